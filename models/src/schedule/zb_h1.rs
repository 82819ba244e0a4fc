//! ZB-H1: 1F1B with weight gradients moved into its bubble.

use super::generate::{Counts, split_backward};
use super::{Schedule, ScheduleError, StageLayout};

/// Pipeline rank `i` runs `p − i` forwards, then backward to inputs, backward to weights of the
/// micro-batch `i` before it, and forward, in turn (Zero Bubble, arXiv 2401.10241, section 2.1 and
/// figure 3).
///
/// The bubble is `(p − 1)(F + B − W)` for `m ≥ p` and `W ≤ F`; pipeline rank `i` holds `p − i`
/// micro-batches up to `B` and `i` more up to `W`: no pipeline rank holds more than the first of
/// 1F1B.
///
/// # Errors
/// No pipeline ranks or no micro-batches.
pub fn zb_h1(ranks: usize, micro_batches: usize) -> Result<Schedule, ScheduleError> {
    let counts = Counts::new(ranks, micro_batches, 1)?;
    let items = || (0..micro_batches).map(|k| (k, 0));
    let passes = (0..ranks).map(|i| split_backward(items(), items(), ranks - i, i)).collect();
    Ok(counts.schedule(StageLayout::RoundRobin, passes))
}
