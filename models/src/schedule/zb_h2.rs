//! ZB-H2: no bubble between a pipeline rank's first forward and its last weight gradients.

use super::generate::{Counts, split_backward};
use super::{Schedule, ScheduleError, StageLayout};

/// As [`super::zb_h1`] with `2(p − i) − 1` forwards first and weights of the micro-batch `2i`
/// before (Zero Bubble, arXiv 2401.10241, section 2.2 and figure 3).
///
/// From a pipeline rank's own first start to its own last end it idles `(p − 1)(F + B − 2W)`, for
/// `m ≥ 2p − 1` and `W ≤ min(F, B)`; pipeline rank `i` holds `2(p − i) − 1` micro-batches up to `B`
/// and `2i` more up to `W`.
///
/// # Errors
/// No pipeline ranks or no micro-batches.
pub fn zb_h2(ranks: usize, micro_batches: usize) -> Result<Schedule, ScheduleError> {
    let counts = Counts::new(ranks, micro_batches, 1)?;
    let items = || (0..micro_batches).map(|k| (k, 0));
    let order = |i: usize| split_backward(items(), items(), 2 * (ranks - i) - 1, 2 * i);
    Ok(counts.schedule(StageLayout::RoundRobin, (0..ranks).map(order).collect()))
}
