//! Mixtures of experts: PyTorch's numbers on one rank, and one rank's numbers on many.

mod common;

use common::{Run, Split, changed, check, compare, model, open, train, train_program};
use direct::Direct;
use models::decisions::{CpStyle, MoeOverlap, Offload};
use models::model::{Activation, ExpertChoice, ModelSpec, Router, Window, Yarn};
use models::program::Recompute;
use models::schedule::ScheduleName;
use runtime::comm::{Options, run_ranks};
use runtime::state::checkpoint::Checkpoint;
use runtime::{Host, Rank};
use std::collections::BTreeMap;

const CASES: [&str; 4] = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"];

#[test]
fn pytorchs_twenty_steps() {
    for case in CASES {
        check(case, &train::<f32>(case, &Split::default(), 20));
    }
}

/// Splits of every kind, up to 16 ranks.
fn splits() -> Vec<Split> {
    let one = Split { sequence_parallel: true, ..Split::default() };
    let of = |tp, pp, dp, cp, ep, etp| Split { tp, pp, dp, cp, ep, etp, micro_batch: 2, ..one };
    vec![
        of(1, 1, 2, 1, 2, 1),
        of(1, 1, 4, 1, 2, 1),
        of(1, 1, 4, 1, 4, 1),
        of(1, 1, 1, 2, 2, 1),
        of(2, 1, 1, 1, 1, 1),
        of(2, 1, 1, 1, 2, 1),
        of(2, 1, 1, 1, 1, 2),
        of(2, 1, 2, 1, 2, 2),
        of(2, 1, 2, 1, 4, 1),
        of(4, 1, 2, 1, 2, 2),
        of(2, 1, 2, 2, 8, 1),
        of(1, 2, 2, 1, 2, 1),
        of(2, 2, 2, 2, 4, 2),
        Split { recompute: Recompute::Full, ..of(2, 2, 2, 1, 4, 1) },
        Split { recompute: Recompute::Selective, ..of(2, 1, 2, 1, 2, 2) },
        Split { zero: 1, ..of(1, 1, 4, 1, 2, 1) },
        Split { zero: 2, ..of(2, 1, 2, 1, 2, 1) },
        Split { zero: 3, ..of(1, 1, 4, 2, 2, 1) },
        Split { zero: 3, dp_shard: 2, ..of(1, 1, 4, 1, 2, 1) },
        Split { zero: 1, offload: Offload::Optimizer, ..of(2, 1, 2, 1, 4, 1) },
        Split { schedule: ScheduleName::ZbH1, micro_batch: 1, ..of(1, 2, 2, 1, 2, 1) },
        Split { fused_loss: true, ..of(2, 2, 1, 1, 2, 1) },
    ]
}

/// Every third of them.
fn some_splits() -> impl Iterator<Item = Split> {
    splits().into_iter().skip(1).step_by(3)
}

#[test]
fn all_rows_to_the_same_experts() {
    for case in CASES {
        // All scores are equal, so that every row goes to the first experts: other experts get
        // none, nor do the ranks that hold them.
        let path = changed(case, |name, values| {
            if name.contains(".gate.") || name.contains(".router.") {
                values.fill(0.0);
            }
        });
        let run = |split: &Split| {
            let program = split.program(&model(case));
            let stages = Direct::new(&program);
            let ranks = run_ranks(split.ranks(), Options::default(), |world| {
                let host = Host::<f64>::serial();
                let mut rank = Rank::new(&stages, world, host, split.reduction, 0).unwrap();
                rank.load(&Checkpoint::open(&path).unwrap()).unwrap();
                let result = rank.gradients(&*open(case), 0, None).unwrap();
                let gradients = rank.whole_gradients().unwrap();
                (result, gradients)
            });
            let (result, gradients) = ranks.into_iter().next().unwrap();
            let (losses, norms) = (vec![result.loss], vec![result.norm]);
            // No weights: a router's gradients are rounding where nothing was chosen, and Adam
            // makes whole steps of them.
            let (aux_losses, gradients) = (vec![result.aux_loss], gradients.unwrap());
            Run { losses, norms, aux_losses, gradients, weights: BTreeMap::new() }
        };
        let reference = run(&Split::default());
        let none = reference.gradients.iter().filter(|(name, _)| name.contains("experts.7."));
        assert!(none.clone().count() > 0);
        for (name, (_, values)) in none {
            assert!(values.iter().all(|value| *value == 0.0), "{name} has got rows");
        }
        for split in some_splits() {
            compare(&format!("{case} {split:?}"), &run(&split), &reference);
        }
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn splits_give_one_ranks_numbers() {
    for case in CASES {
        let reference = train::<f64>(case, &Split::default(), 2);
        for split in splits() {
            assert!(split.exists(), "{split:?}");
            compare(&format!("{case} {split:?}"), &train::<f64>(case, &split, 2), &reference);
        }
    }
}

/// DeepSeek-V3's routing, and an expert that every token goes to, in a model without its attention.
#[test]
fn shared_experts_and_groups() {
    let mut model = model("qwen3_moe");
    let moe = model.moe.as_mut().unwrap();
    moe.router = Router::SigmoidBias;
    moe.shared_ffn = 48;
    moe.choice = ExpertChoice { renormalised: true, groups: 4, kept_groups: 2, scale: 2.5 };
    let samples = open("qwen3_moe");
    let run =
        |split: &Split| train_program::<f64>(&split.program(&model), split, 2, None, &*samples);
    let reference = run(&Split::default());
    for split in some_splits() {
        compare(&format!("{split:?}"), &run(&split), &reference);
    }
}

/// gpt-oss's layers: sinks, biases of experts and routers, a clamped activation, stretched
/// positions.
fn with_sinks_and_biases() -> ModelSpec {
    let mut model = model("qwen3_moe");
    (model.attention.sinks, model.attention.qkv_bias, model.attention.out_bias) =
        (true, true, true);
    model.attention.window = Some(Window { tokens: 5, full_every: Some(2) });
    model.mlp.activation = Activation::ClampedGeglu;
    model.moe.as_mut().unwrap().biased = true;
    model.numerics.yarn = Some(Yarn {
        factor: 8.0,
        original_positions: 16,
        beta_fast: 4.0,
        beta_slow: 1.0,
        truncate: false,
    });
    model
}

#[test]
fn sinks_and_biases() {
    let (model, samples) = (with_sinks_and_biases(), open("qwen3_moe"));
    let run =
        |split: &Split| train_program::<f64>(&split.program(&model), split, 2, None, &*samples);
    let reference = run(&Split::default());
    let chunks = in_chunks(MoeOverlap::Ampipe, 2);
    let rings = [CpStyle::Ring, CpStyle::Zigzag, CpStyle::AllGather, CpStyle::Ulysses];
    let rings = rings.map(|cp_style| {
        let cp_ulysses = if cp_style == CpStyle::Ulysses { 2 } else { 1 };
        Split { cp: 2, cp_style, cp_ulysses, ..Split::default() }
    });
    for split in splits().into_iter().chain(chunks).chain(rings) {
        compare(&format!("{split:?}"), &run(&split), &reference);
    }
}

/// The splits that cut rows into chunks.
fn in_chunks(moe_overlap: MoeOverlap, chunks: usize) -> Vec<Split> {
    let one =
        Split { sequence_parallel: true, moe_overlap, moe_chunks: chunks, ..Split::default() };
    let of = |tp, pp, dp, cp, ep, etp| Split { tp, pp, dp, cp, ep, etp, micro_batch: 2, ..one };
    let mut all = vec![
        of(1, 1, 1, 1, 1, 1),
        of(1, 1, 2, 1, 2, 1),
        of(2, 2, 2, 1, 2, 1),
        of(2, 1, 2, 1, 2, 2),
        of(4, 1, 1, 1, 4, 1),
        Split { micro_batch: 1, ..of(2, 1, 2, 1, 4, 1) },
        Split { recompute: Recompute::Full, ..of(2, 2, 2, 1, 4, 1) },
        Split { recompute: Recompute::Selective, zero: 3, ..of(1, 1, 2, 1, 2, 1) },
        Split { schedule: ScheduleName::ZbH1, ..of(1, 2, 2, 1, 2, 1) },
    ];
    if moe_overlap == MoeOverlap::Tutel {
        all.push(of(2, 1, 2, 2, 4, 1));
    }
    all
}

#[test]
fn chunks_give_one_ranks_numbers() {
    for (case, overlap, chunks) in [
        ("mixtral", MoeOverlap::Ampipe, 2),
        ("deepseek_v3", MoeOverlap::Ampipe, 4),
        ("qwen3_moe", MoeOverlap::Tutel, 4),
    ] {
        let reference = train::<f64>(case, &Split::default(), 2);
        for split in in_chunks(overlap, chunks) {
            compare(&format!("{case} {split:?}"), &train::<f64>(case, &split, 2), &reference);
        }
    }
}

/// Chunks change no bit of a forward pass. Of gradients, they cut sums over rows: AMPipe those of
/// keys and values, and so all before the last layer's attention; Tutel those of the mixture's own
/// matrices alone.
#[test]
fn chunks_change_no_bit_but_of_named_sums() {
    for case in CASES {
        let one = Split::default();
        let run = |moe_overlap, moe_chunks| {
            train::<f32>(case, &Split { moe_overlap, moe_chunks, ..one }, 1)
        };
        let whole = run(MoeOverlap::None, 1);
        for chunks in [2, 4] {
            for overlap in [MoeOverlap::Ampipe, MoeOverlap::Tutel] {
                let cut = run(overlap, chunks);
                let what = format!("{case}, {overlap:?} in {chunks}");
                assert_eq!(cut.losses[0].to_bits(), whole.losses[0].to_bits(), "{what}");
                let is_sum = |name: &str| {
                    let of_mixture = [".experts.", ".gate.", ".router.", ".shared_experts."];
                    of_mixture.iter().any(|part| name.contains(part))
                        || overlap == MoeOverlap::Ampipe && name.contains("layers.")
                        || overlap == MoeOverlap::Ampipe && name.contains("embed")
                };
                for (name, (_, values)) in &cut.gradients {
                    let named = is_sum(name);
                    assert!(named || *values == whole.gradients[name].1, "{what}: {name}");
                }
            }
        }
    }
}

/// The splits whose schedule has pairs.
fn in_pairs() -> Vec<Split> {
    let one = Split {
        sequence_parallel: true,
        moe_overlap: MoeOverlap::Pair,
        schedule: ScheduleName::DualPipeV,
        pp: 2,
        vpp: 2,
        dp: 2,
        micro_batch: 1,
        ..Split::default()
    };
    vec![
        Split { ep: 2, ..one },
        Split { tp: 2, ep: 2, etp: 2, ..one },
        Split { tp: 2, ep: 4, recompute: Recompute::Selective, ..one },
        Split { ep: 2, recompute: Recompute::Full, zero: 1, ..one },
        Split { ep: 2, zero: 3, ..one },
        Split { cp: 2, ep: 4, ..one },
        Split { ep: 2, schedule: ScheduleName::Overlapped1F1B, ..one },
        Split { tp: 2, ep: 4, zero: 2, schedule: ScheduleName::Overlapped1F1B, ..one },
        Split { ep: 2, zero: 3, pp: 1, vpp: 1, schedule: ScheduleName::Overlapped1F1B, ..one },
    ]
}

#[test]
fn pairs_give_one_ranks_numbers() {
    for case in CASES {
        let reference = train::<f64>(case, &Split::default(), 2);
        for split in in_pairs() {
            assert!(split.exists(), "{split:?}");
            compare(&format!("{case} {split:?}"), &train::<f64>(case, &split, 2), &reference);
        }
    }
}

/// Passes that let each other run compute what they compute one after the other.
#[test]
fn pairs_change_no_bit() {
    for split in in_pairs() {
        let together = train::<f32>("deepseek_v3", &split, 2);
        let alone = Split { moe_overlap: MoeOverlap::None, ..split };
        assert!(together == train::<f32>("deepseek_v3", &alone, 2), "{split:?}");
    }
}

fn mixtral(capacity_factor: Option<f64>) -> ModelSpec {
    let mut model = model("mixtral");
    model.moe.as_mut().unwrap().capacity_factor = capacity_factor;
    model
}

fn with_capacity(factor: Option<f64>, split: &Split) -> Run {
    let program = split.program(&mixtral(factor));
    train_program::<f64>(&program, split, 2, Some("mixtral"), &*open("mixtral"))
}

#[test]
fn what_is_dropped_does_not_depend_on_the_split() {
    let alone = Split { micro_batch: 2, ..Split::default() };
    let reference = with_capacity(Some(1.0), &alone);
    let dropless = with_capacity(None, &alone);
    assert!((reference.losses[0] - dropless.losses[0]).abs() > 1e-4, "nothing was dropped");
    for split in some_splits() {
        if split.micro_batch == 2 {
            compare(&format!("{split:?}"), &with_capacity(Some(1.0), &split), &reference);
        }
    }
}

/// At `E / k` times its share an expert takes every row.
#[test]
fn room_for_all_drops_nothing() {
    let split = Split { dp: 2, ep: 2, ..Split { micro_batch: 2, ..Split::default() } };
    let moe = mixtral(None).moe.unwrap();
    let factor = moe.experts as f64 / moe.top_k as f64;
    assert!(with_capacity(Some(factor), &split) == with_capacity(None, &split));
}

/// Where all rows choose the same two experts, some ranks send nothing.
#[test]
fn ranks_whose_copies_are_all_dropped() {
    let path = changed("mixtral", |name, values| {
        if name.ends_with("gate.weight") {
            values.fill(0.0);
        }
    });
    let run = |split: &Split| {
        let program = split.program(&mixtral(Some(0.125)));
        let stages = Direct::new(&program);
        let ranks = run_ranks(split.ranks(), Options::default(), |world| {
            let host = Host::<f64>::serial();
            let mut rank = Rank::new(&stages, world, host, split.reduction, 0).unwrap();
            rank.load(&Checkpoint::open(&path).unwrap()).unwrap();
            let result = rank.gradients(&*open("mixtral"), 0, None).unwrap();
            (result.loss, rank.whole_gradients().unwrap())
        });
        let (loss, gradients) = ranks.into_iter().next().unwrap();
        let (losses, gradients) = (vec![loss], gradients.unwrap());
        Run { losses, norms: vec![], aux_losses: vec![], gradients, weights: BTreeMap::new() }
    };
    let reference = run(&Split { micro_batch: 2, ..Split::default() });
    for split in some_splits().filter(|split| split.micro_batch == 2) {
        compare(&format!("{split:?}"), &run(&split), &reference);
    }
    std::fs::remove_file(path).unwrap();
}
