//! Mixtures of experts: PyTorch's numbers on one rank, and one rank's numbers on many.

mod common;

use common::{Run, Split, check, distance, train};
use models::decisions::Offload;
use models::program::Recompute;
use models::schedule::ScheduleName;

const CASES: [&str; 2] = ["mixtral", "qwen3_moe"];

#[test]
fn pytorchs_twenty_steps() {
    for case in CASES {
        check(case, &train::<f32>(case, &Split::default(), 20));
    }
}

fn compare(what: &str, run: &Run, reference: &Run) {
    for (step, (found, expected)) in run.losses.iter().zip(&reference.losses).enumerate() {
        let off = (found - expected).abs();
        assert!(off <= 1e-12, "{what}: loss of step {step} is off by {off:e}");
    }
    for (step, (found, expected)) in run.norms.iter().zip(&reference.norms).enumerate() {
        let off = (found / expected - 1.0).abs();
        assert!(off <= 1e-11, "{what}: norm of step {step} is off by {off:e}");
    }
    assert!(run.gradients.keys().eq(reference.gradients.keys()), "{what}: other parameters");
    for (name, (shape, values)) in &run.gradients {
        assert_eq!(shape, &reference.gradients[name].0, "{what}: {name}");
        let off = distance(values, &reference.gradients[name].1);
        assert!(off <= 1e-11, "{what}: gradient of {name} is off by {off:e}");
    }
    for (name, (_, values)) in &run.weights {
        let off = distance(values, &reference.weights[name].1);
        assert!(off <= 1e-8, "{what}: {name} is off by {off:e}");
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
