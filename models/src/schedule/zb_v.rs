//! ZB-V: zero bubble at the memory of 1F1B, on a V of stages.

use super::generate::{Counts, Steps};
use super::{Pass, Schedule, ScheduleError, ScheduleName, StageLayout};

/// Pipeline rank `i` holds stages `i` and `2p − 1 − i`, so that a micro-batch's backward starts
/// where its forward did (Zero Bubble, arXiv 2401.10241, section 6; the order of torch's
/// `ScheduleZBVZeroBubble`).
///
/// With equal `F`, `B` and `W` no pipeline rank idles between its own first start and last end for
/// `m ≥ 2p − 1`; all hold `p` micro-batches. Fewer micro-batches run the order of `2p − 1` with the
/// missing ones left out.
///
/// # Errors
/// No pipeline ranks or no micro-batches.
pub fn zb_v(ranks: usize, micro_batches: usize) -> Result<Schedule, ScheduleError> {
    ScheduleName::ZbV.check(ranks, micro_batches, 2)?;
    let counts = Counts::new(ranks, micro_batches, 2)?;
    let passes = (0..ranks).map(|rank| order_on_rank(counts, rank)).collect();
    Ok(counts.schedule(StageLayout::V, passes))
}

fn order_on_rank(counts: Counts, rank: usize) -> Vec<Pass> {
    let Counts { ranks, micro_batches, .. } = counts;
    let full = micro_batches.max(2 * ranks - 1);
    let mut steps = Steps::new();
    warm_up(&mut steps, ranks, rank);
    steady(&mut steps, full);
    cool_down(&mut steps, ranks, rank);
    steps.order.retain(|pass| (pass.micro_batch as usize) < micro_batches);
    steps.order
}

/// Forwards of the first chunk until the first micro-batch is back, then both chunks in turn, then
/// the first backwards of the second.
fn warm_up(steps: &mut Steps, ranks: usize, rank: usize) {
    for _ in 0..2 * (ranks - rank) - 1 {
        steps.forward(0);
    }
    for _ in 0..rank {
        steps.forward(1);
        steps.forward(0);
    }
    for _ in 0..ranks - rank {
        steps.forward(1);
        backward_at_once(steps, 1);
    }
}

fn steady(steps: &mut Steps, micro_batches: usize) {
    while steps.forwards(1) < steps.forwards(0) || steps.forwards(0) < micro_batches {
        if steps.forwards(0) < micro_batches {
            steps.forward(0);
        }
        backward_at_once(steps, 0);
        steps.forward(1);
        backward_at_once(steps, 1);
    }
}

fn cool_down(steps: &mut Steps, ranks: usize, rank: usize) {
    for _ in 0..rank {
        steps.backward(0);
        steps.backward(1);
    }
    for _ in 0..ranks - rank {
        steps.backward(0);
        steps.weights(Some(0));
    }
    while steps.weights(Some(1)) {}
    while steps.weights(Some(0)) {}
}

fn backward_at_once(steps: &mut Steps, chunk: usize) {
    steps.backward(chunk);
    steps.weights(Some(chunk));
}
