//! Selection biases that load updates: PyTorch's numbers on one rank, and one rank's bits on many.

mod common;

use common::{Split, changed, expected, golden, model, open, optimizer};
use direct::Direct;
use half::bf16;
use models::decisions::{AuxScope, MoeOverlap, Offload};
use models::model::ModelSpec;
use models::program::{Program, Recompute, StageProgram};
use models::schedule::ScheduleName;
use runtime::comm::{Options, run_ranks};
use runtime::device::Device;
use runtime::state::checkpoint::{Checkpoint, TensorFile, Whole};
use runtime::{Host, Rank, Reduction, StepResult};
use std::collections::BTreeMap;
use std::path::Path;

const CASE: &str = "deepseek_v3_bias";
/// The case whose weights and tokens it has.
const OF: &str = "deepseek_v3";

type Biases = BTreeMap<String, Vec<f64>>;

/// What one rank has after some steps.
struct Trained {
    losses: Vec<f64>,
    biases: Biases,
    /// Those of a checkpoint that it writes.
    saved: Option<Biases>,
}

fn has(name: &str) -> bool {
    name.ends_with("e_score_correction_bias")
}

/// Trains on every rank, from weights of a file.
fn trained_on<D: Device>(
    device: impl Fn() -> D + Sync,
    program: &Program,
    reduction: Reduction,
    steps: u64,
    weights: &Path,
) -> Vec<Trained> {
    let stages = Direct::new(program);
    run_ranks(program.world_size(), Options::default(), |world| {
        let mut rank = Rank::new(&stages, world, device(), reduction, 1234).unwrap();
        rank.load(&Checkpoint::open(weights).unwrap()).unwrap();
        let mut results: Vec<StepResult> = Vec::new();
        for step in 0..steps {
            if program.post_validation {
                let before = rank.step_ahead(&*open(OF), step, &optimizer(), 1e-3).unwrap();
                results.extend(before);
                continue;
            }
            let result = rank.gradients(&*open(OF), step, None).unwrap();
            rank.update(&optimizer(), 1e-3, result.norm).unwrap();
            results.push(result);
        }
        results.extend(rank.settle().unwrap());
        let wide = |values: &[D::Wide]| values.iter().map(|&x| kernels::Real::to_f64(x)).collect();
        let biases = rank.selection_biases();
        let biases = biases.map(|(name, values)| (name.to_owned(), wide(values))).collect();
        let saved = rank.whole_weights().unwrap().map(|weights| {
            let biases = weights.into_iter().filter(|(name, _)| has(name));
            biases.map(|(name, (_, values))| (name, wide(&values))).collect()
        });
        Trained { losses: results.iter().map(|result| result.loss).collect(), biases, saved }
    })
}

fn trained(program: &Program, reduction: Reduction, steps: u64) -> Vec<Trained> {
    trained_on(Host::<f64>::serial, program, reduction, steps, &golden(OF))
}

/// Fails unless every rank has the reference's losses, and the bits of its biases.
fn compare(what: &str, ranks: &[Trained], reference: &Trained) {
    let all = reference.saved.as_ref().unwrap();
    assert_eq!(ranks[0].saved.as_ref(), Some(all), "{what}: what is saved");
    for (number, rank) in ranks.iter().enumerate() {
        for (name, bias) in &rank.biases {
            assert_eq!(bias, &all[name], "{what}: {name} of rank {number}");
        }
        assert_eq!(rank.losses.len(), reference.losses.len());
        for (step, (found, wanted)) in rank.losses.iter().zip(&reference.losses).enumerate() {
            let off = (found - wanted).abs();
            assert!(off <= 1e-11, "{what}: loss of step {step} is off by {off:e}");
        }
    }
}

#[test]
fn its_model_is_that_of_the_case() {
    let mut of = model(OF);
    let moe = of.moe.as_mut().unwrap();
    assert!(moe.bias_update_rate == 0.0, "config.json has no such key");
    moe.bias_update_rate = expected(CASE)["bias_update_rate"].as_f64().unwrap();
    // Without such a loss nothing depends on it.
    moe.losses = model(CASE).moe.unwrap().losses;
    of.name = CASE.to_owned();
    // That of a config.json: biases stay as they are.
    assert_eq!(of.assumptions.drain(..).count(), 1);
    assert_eq!(model(CASE), of);
}

#[test]
fn pytorchs_twenty_steps() {
    let split = Split::default();
    let found = trained(&split.program(&model(CASE)), split.reduction, 20).remove(0);
    let wanted = expected(CASE);
    for (step, loss) in found.losses.iter().enumerate() {
        let off = (loss - wanted["trajectory"]["loss_f64"][step].as_f64().unwrap()).abs();
        assert!(off <= 1e-12, "loss of step {step} is off by {off:e}");
    }
    let file = TensorFile::open(&golden(CASE).join("biases.safetensors")).unwrap();
    let read = |name: String| {
        let (_, values): Whole<f64> = file.read(&name).unwrap();
        (name, values)
    };
    let biases: Biases = file.names().into_iter().map(read).collect();
    assert_eq!(biases.len(), 3);
    assert_eq!(found.biases, biases);
    assert_eq!(found.saved, Some(biases));
}

/// Splits of every kind, up to 16 ranks.
fn splits() -> Vec<Split> {
    let one = Split { sequence_parallel: true, ..Split::default() };
    let of = |tp, pp, dp, cp, ep, etp| Split { tp, pp, dp, cp, ep, etp, micro_batch: 2, ..one };
    let full = Recompute::Full;
    vec![
        of(1, 1, 1, 1, 1, 1),
        of(1, 1, 4, 1, 2, 1),
        of(1, 1, 2, 2, 4, 1),
        of(2, 1, 1, 1, 1, 2),
        of(2, 1, 2, 1, 2, 2),
        of(1, 4, 1, 1, 1, 1),
        of(2, 2, 2, 2, 4, 2),
        Split { micro_batch: 1, ..of(1, 2, 2, 1, 2, 1) },
        Split { zero: 1, ..of(1, 1, 4, 1, 2, 1) },
        Split { zero: 1, reduction: Reduction::AtEnd, ..of(2, 1, 2, 1, 1, 1) },
        Split { zero: 2, reduction: Reduction::PerParameter, ..of(2, 1, 2, 1, 2, 1) },
        Split { zero: 3, ..of(1, 1, 4, 2, 2, 1) },
        Split { zero: 3, dp_shard: 2, ..of(1, 2, 4, 1, 2, 1) },
        Split { zero: 1, offload: Offload::Optimizer, ..of(1, 1, 4, 1, 4, 1) },
        Split { recompute: Recompute::Selective, ..of(1, 1, 2, 1, 2, 1) },
        Split { recompute: full, ..of(1, 2, 2, 1, 2, 1) },
        Split { recompute: full, recompute_group: 2, ..of(2, 1, 1, 1, 1, 1) },
        Split { schedule: ScheduleName::ZbH1, micro_batch: 1, ..of(1, 2, 2, 1, 2, 1) },
        Split { schedule: ScheduleName::Interleaved1F1B, vpp: 2, ..of(1, 2, 1, 1, 1, 1) },
        Split {
            moe_overlap: MoeOverlap::Ampipe,
            moe_chunks: 2,
            recompute: full,
            ..of(2, 1, 2, 1, 2, 1)
        },
        Split {
            moe_overlap: MoeOverlap::Pair,
            schedule: ScheduleName::DualPipeV,
            vpp: 2,
            micro_batch: 1,
            ..of(1, 2, 2, 1, 2, 1)
        },
    ]
}

#[test]
fn splits_give_one_ranks_bits() {
    let model = model(CASE);
    let run = |split: &Split| trained(&split.program(&model), split.reduction, 5);
    let reference = run(&Split::default()).remove(0);
    for split in splits() {
        assert!(split.exists(), "{split:?}");
        compare(&format!("{split:?}"), &run(&split), &reference);
    }
}

/// A program whose pipeline ranks hold two copies of each stage, or begin a step before the norm of
/// the last one is known.
fn of_pipeline(model: &ModelSpec, schedule: ScheduleName, post_validation: bool) -> Program {
    let split = Split { pp: 2, dp: 2, ep: 2, micro_batch: 1, ..Split::default() };
    let order = schedule.build(2, 4, if schedule == ScheduleName::DualPipe { 2 } else { 1 });
    let order = order.unwrap();
    let stage = |n| StageProgram { first_layer: 2 * n, recompute: vec![Recompute::None; 2] };
    let stages = (0..order.stages()).map(stage).collect();
    let (layout, passes) = (order.layout, order.by_rank());
    Program { layout, passes, stages, post_validation, ..split.program(model) }
}

#[test]
fn two_copies_of_each_stage_give_one_ranks_bits() {
    let model = model(CASE);
    let split = Split::default();
    let reference = trained(&split.program(&model), split.reduction, 5).remove(0);
    let program = of_pipeline(&model, ScheduleName::DualPipe, false);
    assert_eq!(program.layout.copies(), 2);
    let ranks = trained(&program, split.reduction, 5);
    assert!(ranks.iter().all(|rank| rank.biases.len() == 3), "each has both stages");
    compare("DualPipe", &ranks, &reference);
}

/// The norm clips in every step, so that forwards that ran ahead run again.
#[test]
fn post_validation_changes_no_bit() {
    let model = model(CASE);
    let run = |ahead| {
        let program = of_pipeline(&model, ScheduleName::ZbH1, ahead);
        trained(&program, Reduction::default(), 6)
    };
    for (ahead, plain) in run(true).iter().zip(run(false)) {
        assert_eq!((&ahead.losses, &ahead.biases), (&plain.losses, &plain.biases));
    }
}

/// A step whose numbers are not finite leaves biases as they were before it, as it does weights.
#[test]
fn post_validation_takes_updates_back() {
    let model = model(CASE);
    let after_one = trained(&of_pipeline(&model, ScheduleName::ZbH1, false), Reduction::AtEnd, 1);
    let program = of_pipeline(&model, ScheduleName::ZbH1, true);
    let stages = Direct::new(&program);
    for settles in [false, true] {
        let biases = run_ranks(program.world_size(), Options::default(), |world| {
            let host = Host::<f64>::serial();
            let mut rank = Rank::new(&stages, world, host, Reduction::AtEnd, 1234).unwrap();
            rank.load(&Checkpoint::open(&golden(OF)).unwrap()).unwrap();
            let mut step = |step, lr| rank.step_ahead(&*open(OF), step, &optimizer(), lr).unwrap();
            // An absurd rate, after which the second step's numbers are not finite.
            assert!(step(0, 1e300).is_none());
            assert!(step(1, 1e-3).unwrap().norm.is_finite());
            let last = if settles { rank.settle().unwrap() } else { step(2, 1e-3) };
            assert!(!last.unwrap().norm.is_finite());
            let biases = rank.selection_biases();
            biases.map(|(name, values)| (name.to_owned(), values.to_vec())).collect::<Biases>()
        });
        for (biases, wanted) in biases.iter().zip(&after_one) {
            assert_eq!(biases, &wanted.biases);
        }
    }
}

/// Losses of routers count load too, over their own rows.
#[test]
fn with_losses_of_routers() {
    let mut model = model(CASE);
    model.moe.as_mut().unwrap().aux_loss = 0.02;
    for aux_scope in [AuxScope::MicroBatch, AuxScope::GlobalBatch] {
        // The loss of a micro-batch depends on which sequences it has.
        let micro_batch = if aux_scope == AuxScope::MicroBatch { 2 } else { 8 };
        let run = |split: Split| {
            let split = Split { aux_scope, schedule: ScheduleName::GPipe, ..split };
            trained(&split.program(&model), split.reduction, 4)
        };
        let reference = run(Split { micro_batch, ..Split::default() }).remove(0);
        let split = Split { sequence_parallel: true, micro_batch: 2, ..Split::default() };
        for split in [
            Split { tp: 2, dp: 2, cp: 2, ep: 4, ..split },
            Split { pp: 2, dp: 2, ep: 2, zero: 1, ..split },
        ] {
            compare(&format!("{aux_scope:?} {split:?}"), &run(split), &reference);
        }
    }
}

/// Gradients that no update follows, as in an evaluation, leave biases alone.
#[test]
fn only_updates_move_biases() {
    let program = Split::default().program(&model(CASE));
    let stages = Direct::new(&program);
    run_ranks(1, Options::default(), |world| {
        let host = Host::<f64>::serial();
        let mut rank = Rank::new(&stages, world, host, Reduction::AtEnd, 1234).unwrap();
        rank.load(&Checkpoint::open(&golden(OF)).unwrap()).unwrap();
        let step = |rank: &mut Rank<'_, _>, updates: bool| {
            let result = rank.gradients(&*open(OF), 0, None).unwrap();
            if updates {
                rank.update(&optimizer(), 0.0, result.norm).unwrap();
            }
            let biases = rank.selection_biases();
            biases.map(|(_, values): (_, &[f64])| values.to_vec()).collect::<Vec<_>>()
        };
        let before = step(&mut rank, false);
        assert_eq!(step(&mut rank, false), before);
        let once = step(&mut rank, true);
        let moved = once.iter().flatten().zip(before.iter().flatten());
        // By the load of one step, not of three.
        assert!(moved.clone().all(|(a, b)| (a - b).abs() < 0.01 + 1e-9));
        assert!(moved.clone().any(|(a, b)| a != b));
    });
}

/// Biases that bf16 cannot tell apart: the choice reads them exactly, and small updates count.
#[test]
fn biases_are_exact_beside_rounded_weights() {
    let bias = |expert: usize| 0.5 + expert as f64 / 4096.0;
    assert_eq!(bf16::from_f64(bias(7)), bf16::from_f64(bias(0)));
    // All scores are equal, so that all rows go where biases are largest.
    let path = changed(OF, |name, values| {
        if has(name) {
            values.iter_mut().enumerate().for_each(|(expert, value)| *value = bias(expert));
        } else if name.ends_with("mlp.gate.weight") {
            values.fill(0.0);
        }
    });
    let mut model = model(CASE);
    model.moe.as_mut().unwrap().bias_update_rate = 2.0_f64.powi(-14);
    for zero in [0, 1, 3] {
        let split = Split { dp: 2, ep: 2, micro_batch: 4, zero, ..Split::default() };
        let (program, reduction) = (split.program(&model), split.reduction);
        let ranks = trained_on(Host::<bf16, f32>::serial, &program, reduction, 1, &path);
        let moved = |expert: usize| if expert < 6 { 1.0 } else { -1.0 };
        let of = |expert: usize| bias(expert) + moved(expert) * 2.0_f64.powi(-14);
        let wanted: Vec<f64> = (0..8).map(of).collect();
        let saved = ranks[0].saved.iter().flatten();
        for (name, values) in ranks.iter().flat_map(|rank| &rank.biases).chain(saved) {
            assert_eq!(values, &wanted, "{name} with ZeRO {zero}");
        }
    }
    std::fs::remove_file(path).unwrap();
}
