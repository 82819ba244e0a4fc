//! Losses of routers: PyTorch's numbers on one rank, and one rank's numbers on many.

mod common;

use common::{
    Run, Split, changed, check_trajectory_of, compare, distance, expected, golden_gradients, model,
    open, train_program,
};
use models::decisions::{AuxScope, Offload};
use models::model::{AuxOver, ModelSpec};
use models::program::Recompute;
use models::schedule::ScheduleName;
use runtime::comm::{Options, run_ranks};
use runtime::state::checkpoint::Checkpoint;
use runtime::{Host, Rank, Scalar};
use serde_json::Value;

const WEIGHT: f64 = 0.02;

fn mixtral(over: AuxOver, z_loss: f64) -> ModelSpec {
    let mut model = model("mixtral_aux");
    let moe = model.moe.as_mut().unwrap();
    assert!(moe.aux_loss == WEIGHT && moe.losses.over == AuxOver::AllLayers);
    moe.losses.over = over;
    moe.losses.z_loss = z_loss;
    model
}

/// The weights and tokens are mixtral's.
fn run<T: Scalar>(model: &ModelSpec, split: &Split, steps: usize) -> Run {
    let program = split.program(model);
    train_program::<T>(&program, split, steps, Some("mixtral"), &*open("mixtral"))
}

fn of_batch() -> Split {
    Split { aux_scope: AuxScope::GlobalBatch, ..Split::default() }
}

fn near(found: f64, wanted: &Value, tolerance: f64) {
    let off = (found - wanted.as_f64().unwrap()).abs();
    assert!(off <= tolerance, "{found} is not {wanted}: off by {off:e}");
}

#[test]
fn pytorchs_twenty_steps_with_all_layers_together() {
    let found = run::<f32>(&mixtral(AuxOver::AllLayers, 0.0), &of_batch(), 20);
    check_trajectory_of("mixtral_aux", &found.losses, &found.norms);
    let wanted = &expected("mixtral_aux")["trajectory"]["aux_f64"];
    for (step, aux) in found.aux_losses.iter().enumerate() {
        near(aux / WEIGHT, &wanted[step], 1e-4);
    }
    for (name, (_, values)) in golden_gradients("mixtral_aux") {
        let off = distance(&found.gradients[&name].1, &values);
        assert!(off <= 3e-5, "gradient of {name} is off by {off:e}");
    }
}

#[test]
fn pytorchs_twenty_steps_with_each_layers_loss() {
    let found = run::<f32>(&mixtral(AuxOver::EachLayer, 0.0), &of_batch(), 20);
    let wanted = &expected("mixtral_aux")["alt_aux_sum_layers"];
    for (step, (loss, aux)) in found.losses.iter().zip(&found.aux_losses).enumerate() {
        near(*loss, &wanted["loss_f64"][step], 1e-4);
        near(loss + aux, &wanted["total_loss_f64"][step], 1e-4);
    }
}

fn splits(scope: AuxScope) -> Vec<Split> {
    let one = Split { sequence_parallel: true, aux_scope: scope, ..Split::default() };
    let of = |tp, pp, dp, cp, ep, etp| Split { tp, pp, dp, cp, ep, etp, micro_batch: 2, ..one };
    let mut all = vec![
        of(1, 1, 1, 1, 1, 1),
        of(1, 1, 4, 1, 2, 1),
        of(1, 1, 2, 2, 2, 1),
        of(2, 1, 1, 1, 2, 1),
        of(4, 1, 2, 1, 2, 2),
        of(1, 2, 2, 1, 2, 1),
        of(2, 2, 2, 2, 4, 2),
        Split { recompute: Recompute::Full, ..of(2, 2, 2, 1, 4, 1) },
        Split { recompute: Recompute::Full, recompute_group: 2, ..of(1, 2, 2, 1, 2, 1) },
        Split { zero: 3, offload: Offload::Optimizer, ..of(1, 1, 2, 2, 2, 1) },
        Split { vpp: 2, schedule: ScheduleName::LoopedBfs, ..of(1, 2, 1, 1, 1, 1) },
    ];
    match scope {
        // Every forward pass comes first.
        AuxScope::GlobalBatch => all.iter_mut().for_each(|split| {
            if split.vpp == 1 {
                split.schedule = ScheduleName::GPipe;
            }
        }),
        AuxScope::MicroBatch => {
            all.push(Split { schedule: ScheduleName::ZbH1, ..of(1, 2, 1, 1, 1, 1) });
        }
    }
    all
}

#[test]
fn splits_give_one_ranks_numbers() {
    let scopes = [AuxScope::MicroBatch, AuxScope::GlobalBatch];
    for (over, scope) in [
        (AuxOver::EachLayer, scopes[0]),
        (AuxOver::EachLayer, scopes[1]),
        (AuxOver::AllLayers, scopes[1]),
    ] {
        let model = mixtral(over, 0.01);
        let alone = match scope {
            AuxScope::GlobalBatch => of_batch(),
            AuxScope::MicroBatch => Split { micro_batch: 2, ..Split::default() },
        };
        let reference = run::<f64>(&model, &alone, 2);
        assert!(reference.aux_losses.iter().all(|&loss| loss > 0.0));
        for split in splits(scope) {
            let what = format!("{over:?} {split:?}");
            assert!(split.exists(), "{what}");
            compare(&what, &run::<f64>(&model, &split, 2), &reference);
        }
    }
}

/// The gradient of the whole loss, against differences of it: along a direction of a router's
/// matrix, small enough that no choice changes.
#[test]
fn gradients_are_those_of_the_whole_loss() {
    let split = Split { micro_batch: 4, ..Split::default() };
    let program = split.program(&mixtral(AuxOver::EachLayer, 0.5));
    let stages = direct::Direct::new(&program);
    let name = "model.layers.2.block_sparse_moe.gate.weight";
    let samples = open("mixtral");
    let value = |by: f64| {
        let path = changed("mixtral", |of, values| {
            let moved = values.iter_mut().enumerate().filter(|_| of == name);
            moved.for_each(|(n, weight)| *weight += by * (n % 5) as f64);
        });
        let of_rank = |world| {
            let host = Host::<f64>::serial();
            let mut rank = Rank::new(&stages, world, host, split.reduction, 0).unwrap();
            rank.load(&Checkpoint::open(&path).unwrap()).unwrap();
            let result = rank.gradients(&*samples, 0, None).unwrap();
            let gradients = rank.whole_gradients().unwrap().unwrap();
            (result.loss + result.aux_loss, gradients[name].1.clone())
        };
        let of_all = run_ranks(1, Options::default(), of_rank).swap_remove(0);
        std::fs::remove_file(path).unwrap();
        of_all
    };
    let (_, gradient) = value(0.0);
    let along: f64 = gradient.iter().enumerate().map(|(n, g)| g * (n % 5) as f64).sum();
    let delta = 1e-7;
    let difference = (value(delta).0 - value(-delta).0) / (2.0 * delta);
    assert!((along - difference).abs() < 1e-6 * along.abs().max(1.0), "{along} {difference}");
}

/// A trainer whose loss cannot know all choices is refused.
#[test]
fn schedules_that_begin_backward_too_early_are_refused() {
    let split = Split { pp: 2, micro_batch: 1, ..of_batch() };
    let program = split.program(&mixtral(AuxOver::EachLayer, 0.0));
    let refused = run_ranks(2, Options::default(), |world| {
        let stages = direct::Direct::new(&program);
        let rank = Rank::new(&stages, world, Host::<f32>::serial(), split.reduction, 0);
        rank.err().map(|error| error.to_string())
    });
    let reason = refused[0].as_ref().unwrap();
    assert!(reason.contains("all forward passes first"), "{reason}");
}
