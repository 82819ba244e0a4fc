//! Mixtures of experts: PyTorch's numbers on one rank, and one rank's numbers on many.

mod common;

use common::{Run, Split, check, compare, golden, model, open, train};
use direct::Direct;
use models::decisions::Offload;
use models::program::Recompute;
use models::schedule::ScheduleName;
use runtime::comm::{Options, run_ranks};
use runtime::state::checkpoint::{self, Checkpoint, TensorFile, Whole};
use runtime::{Host, Rank};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;

const CASES: [&str; 2] = ["mixtral", "qwen3_moe"];

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

/// A checkpoint in which all scores are equal, so that every row goes to the first experts: other
/// experts get none, nor do the ranks that hold them.
fn without_routers(case: &str) -> PathBuf {
    let file = TensorFile::open(&golden(case).join("model.safetensors")).unwrap();
    let read = |name: String| {
        let (shape, mut values): Whole<f64> = file.read(&name).unwrap();
        if name.ends_with("gate.weight") {
            values.fill(0.0);
        }
        (name, (shape, values))
    };
    let tensors = file.names().into_iter().map(read).collect();
    let path = std::env::temp_dir().join(format!("{case}-{}.safetensors", std::process::id()));
    checkpoint::write(&mut File::create(&path).unwrap(), &tensors).unwrap();
    path
}

#[test]
fn all_rows_to_the_same_experts() {
    for case in CASES {
        let path = without_routers(case);
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
            Run { losses, norms, gradients: gradients.unwrap(), weights: BTreeMap::new() }
        };
        let reference = run(&Split::default());
        let none = reference.gradients.iter().filter(|(name, _)| name.contains("experts.7."));
        assert!(none.clone().count() > 0);
        for (name, (_, values)) in none {
            assert!(values.iter().all(|value| *value == 0.0), "{name} has got rows");
        }
        for split in splits() {
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
