//! Heads of which a part is rotated: PyTorch's StableLM, and one rank's numbers on many.

mod common;

use common::{Split, check, compare, model, open, train, train_program};
use models::decisions::{CpStyle, Offload};
use models::model::Yarn;
use models::program::Recompute;
use models::schedule::ScheduleName;

const CASE: &str = "stablelm";

fn splits() -> Vec<Split> {
    let of = |tp, pp, dp, cp| Split { tp, pp, dp, cp, micro_batch: 2, ..Split::default() };
    let exchange = |cp_style, cp| Split { cp_style, ..of(1, 1, 1, cp) };
    vec![
        of(2, 1, 1, 1),
        Split { sequence_parallel: true, ..of(4, 1, 1, 1) },
        of(1, 2, 1, 1),
        Split { vpp: 2, schedule: ScheduleName::Interleaved1F1B, ..of(1, 2, 1, 1) },
        exchange(CpStyle::Ring, 2),
        exchange(CpStyle::Ring, 4),
        exchange(CpStyle::Zigzag, 4),
        exchange(CpStyle::AllGather, 2),
        exchange(CpStyle::Ulysses, 2),
        Split { cp_ulysses: 2, ..exchange(CpStyle::Hybrid, 4) },
        Split { zero: 3, ..of(1, 1, 4, 1) },
        Split { zero: 3, dp_shard: 2, ..of(2, 1, 2, 2) },
        Split { zero: 1, offload: Offload::Optimizer, ..of(1, 1, 2, 1) },
        Split { recompute: Recompute::Selective, ..of(2, 1, 1, 2) },
        Split { recompute: Recompute::Full, sequence_parallel: true, ..of(2, 2, 2, 2) },
    ]
}

#[test]
fn splits_train_to_pytorchs_numbers() {
    for split in splits() {
        assert!(split.exists(), "{split:?}");
        check(CASE, &train::<f32>(CASE, &split, 5));
    }
}

#[test]
fn splits_give_one_ranks_numbers() {
    let reference = train::<f64>(CASE, &Split::default(), 2);
    for split in splits() {
        compare(&format!("{split:?}"), &train::<f64>(CASE, &split, 2), &reference);
    }
}

/// Stretched frequencies are those of the rotated columns.
#[test]
fn stretched_positions_of_a_part() {
    let mut model = model(CASE);
    let (factor, original_positions) = (4.0, 8);
    model.numerics.yarn =
        Some(Yarn { factor, original_positions, beta_fast: 2.0, beta_slow: 1.0, truncate: false });
    let samples = open(CASE);
    let run = |split: &Split| {
        train_program::<f64>(&split.program(&model), split, 2, Some(CASE), &*samples)
    };
    let (reference, plain) = (run(&Split::default()), train::<f64>(CASE, &Split::default(), 1));
    assert!((reference.losses[0] - plain.losses[0]).abs() > 1e-4, "frequencies do not count");
    for split in splits().iter().step_by(4) {
        compare(&format!("{split:?}"), &run(split), &reference);
    }
}
