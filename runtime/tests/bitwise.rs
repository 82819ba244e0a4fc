//! Changes of the split that must not change a single bit.

mod channels;
mod common;

use channels::run_wired;
use common::{Split, model, open, train, train_rank};
use models::decisions::Offload;
use models::program::Recompute;
use models::schedule::ScheduleName;
use runtime::Reduction;
use runtime::comm::{Delays, Options};
use std::time::Duration;

const CASES: [&str; 5] = ["llama_gqa", "llama_tied", "gpt2", "qwen2", "gemma2"];

fn busy() -> Split {
    Split { tp: 2, pp: 2, dp: 2, micro_batch: 1, sequence_parallel: true, ..Split::default() }
}

#[test]
fn the_same_plan_twice_whatever_the_timing() {
    for case in CASES {
        let first = train::<f32>(case, &busy(), 2);
        let longest = Duration::from_micros(200);
        let delays = Some(Delays { seed: 5, longest });
        let second = train::<f32>(case, &Split { delays, ..busy() }, 2);
        assert!(first == second, "{case}");
    }
}

#[test]
fn recomputation_on_or_off() {
    for case in CASES {
        for split in [Split { micro_batch: 4, ..Split::default() }, busy()] {
            let none = train::<f32>(case, &split, 2);
            for recompute in [Recompute::Selective, Recompute::Full] {
                let again = train::<f32>(case, &Split { recompute, ..split }, 2);
                assert!(none == again, "{case} {split:?} {recompute:?}");
            }
        }
    }
}

#[test]
fn when_gradients_are_reduced() {
    let bucketed = train::<f32>("llama_gqa", &busy(), 2);
    for reduction in [Reduction::AtEnd, Reduction::PerParameter] {
        let other = train::<f32>("llama_gqa", &Split { reduction, ..busy() }, 2);
        assert!(bucketed == other, "{reduction:?}");
    }
    // Reduced at the end, stages 2 and 3 also gather without prefetching.
    for zero in [2, 3] {
        let split = Split { zero, ..busy() };
        let bucketed = train::<f32>("llama_gqa", &split, 2);
        let other = train::<f32>("llama_gqa", &Split { reduction: Reduction::AtEnd, ..split }, 2);
        assert!(bucketed == other, "{zero}");
    }
}

/// What replicas share changes no bit of one micro-batch. Of several, stages 2 and 3 sum each over
/// replicas before they add it to the others, stages 0 and 1 add first and sum once: the order of
/// additions differs.
#[test]
fn what_replicas_share() {
    let splits = [
        Split { dp: 2, micro_batch: 4, ..Split::default() },
        Split { dp: 4, tp: 2, pp: 2, micro_batch: 2, sequence_parallel: true, ..Split::default() },
    ];
    for case in CASES {
        for split in splits {
            let none = train::<f32>(case, &split, 2);
            for zero in [1, 2, 3] {
                for reduction in [Reduction::Buckets { bytes: 1 << 14 }, Reduction::AtEnd] {
                    let split = Split { zero, reduction, ..split };
                    assert!(none == train::<f32>(case, &split, 2), "{case} {split:?}");
                }
            }
        }
    }
    let pairs = [(0, 1), (2, 3)];
    for (one, other) in pairs {
        let run = |zero| train::<f64>("llama_tied", &Split { zero, ..busy() }, 3);
        assert!(run(one) == run(other), "{one} {other}");
    }
}

#[test]
fn what_host_memory_holds() {
    for case in CASES {
        for zero in [0, 1, 2, 3] {
            let split = Split { zero, ..busy() };
            let device = train::<f32>(case, &split, 2);
            let host = train::<f32>(case, &Split { offload: Offload::Optimizer, ..split }, 2);
            assert!(device == host, "{case} {zero}");
            let host = train::<f32>(case, &Split { offload: Offload::Activations, ..split }, 2);
            assert!(device == host, "{case} {zero}, activations");
        }
    }
}

#[test]
fn pipelines_that_take_micro_batches_in_the_same_order() {
    let run = |pp, vpp, schedule| {
        train::<f32>(
            "llama_gqa",
            &Split { pp, vpp, schedule, micro_batch: 2, ..Split::default() },
            2,
        )
    };
    // The clip norm is summed stage by stage, so weights agree only up to rounding; losses of the
    // first step and gradients agree to the bit.
    let one = run(1, 1, ScheduleName::OneFOneB);
    for (pp, vpp, schedule) in [
        (2, 1, ScheduleName::OneFOneB),
        (4, 1, ScheduleName::GPipe),
        (2, 2, ScheduleName::Interleaved1F1B),
    ] {
        let other = run(pp, vpp, schedule);
        assert_eq!(one.losses[0], other.losses[0], "{pp} {vpp} {schedule}");
        assert!(one.gradients == other.gradients, "{pp} {vpp} {schedule}");
    }
}

#[test]
fn ranks_as_processes() {
    for case in CASES {
        let split = busy();
        let program = split.program(&model(case));
        let samples = open(case);
        let run = |world| train_rank::<f32>(&program, &split, 2, Some(case), &*samples, world);
        let wired = run_wired(split.ranks(), Options::default(), run).swap_remove(0).unwrap();
        assert!(wired == train::<f32>(case, &split, 2), "{case}");
    }
}
