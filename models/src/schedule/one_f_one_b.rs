//! 1F1B: one forward, one backward.

use super::generate::{Counts, one_forward_one_backward, pass};
use super::{Pass, PassKind, Schedule, ScheduleError, StageLayout};

/// Pipeline rank `i` runs `min(p − 1 − i, m)` forwards, then forward and backward in turn
/// (PipeDream-Flush; Megatron PTD-P, arXiv 2104.04473, section 2.2.1).
///
/// Pipeline rank `i` holds `min(p − i, m)` micro-batches; the bubble is `(p − 1)(F + B + W)`.
///
/// # Errors
/// No pipeline ranks or no micro-batches.
pub fn one_f_one_b(ranks: usize, micro_batches: usize) -> Result<Schedule, ScheduleError> {
    let counts = Counts::new(ranks, micro_batches, 1)?;
    let passes = (0..ranks).map(|i| order_on_rank(ranks - 1 - i, micro_batches)).collect();
    Ok(counts.schedule(StageLayout::RoundRobin, passes))
}

fn order_on_rank(warm_up: usize, micro_batches: usize) -> Vec<Pass> {
    let all = |kind| (0..micro_batches).map(move |k| pass(kind, k, 0));
    one_forward_one_backward(all(PassKind::F), all(PassKind::BW), warm_up)
}
