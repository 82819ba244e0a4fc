//! Gradients are being reduced over replicas while the last micro-batch's backward pass goes on.

mod common;

use common::{Split, golden, model, open};
use direct::Direct;
use runtime::comm::{Options, run_ranks};
use runtime::state::checkpoint::Checkpoint;
use runtime::{Host, Rank, Reduction, StepResult};

/// Every rank's first step.
fn step(split: &Split) -> Vec<StepResult> {
    let program = split.program(&model("llama_gqa"));
    run_ranks(split.ranks(), Options::default(), |world| {
        let stages = Direct::new(&program);
        let mut rank =
            Rank::new(&stages, world, Host::<f32>::serial(), split.reduction, 0).unwrap();
        rank.load(&Checkpoint::open(&golden("llama_gqa")).unwrap()).unwrap();
        rank.gradients(&*open("llama_gqa"), 0, None).unwrap()
    })
}

/// Number of reductions started before, during and after a rank's last pass.
fn started(of: &StepResult) -> [usize; 3] {
    let last = of.outcome.ran.last().unwrap();
    let mut counts = [0; 3];
    for span in &of.reductions {
        let when =
            usize::from(span.started >= last.computing) + usize::from(span.started >= last.end);
        counts[when] += 1;
    }
    counts
}

#[test]
fn buckets_start_within_the_last_backward_pass() {
    for pp in [1, 2] {
        let split = Split { dp: 2, pp, micro_batch: 1, ..Split::default() };
        for of in step(&split) {
            let [before, within, behind] = started(&of);
            assert_eq!(before, 0, "pp {pp}: a gradient was sent that was not complete");
            assert!(within >= 3, "pp {pp}: {within} within the pass, {behind} behind it");
            assert!(behind <= 1, "pp {pp}: {within} within the pass, {behind} behind it");
            let bytes: usize = of.reductions.iter().map(|span| span.bytes).sum();
            assert!(of.reductions.iter().all(|span| span.bytes < bytes), "no buckets");
        }
    }
}

#[test]
fn without_buckets_nothing_starts_before_the_end() {
    let reduction = Reduction::AtEnd;
    for of in step(&Split { dp: 2, micro_batch: 1, reduction, ..Split::default() }) {
        let [before, within, behind] = started(&of);
        assert_eq!((before + within, behind), (0, 1));
    }
}
