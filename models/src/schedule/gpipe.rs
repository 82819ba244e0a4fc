//! GPipe: all forwards, then all backwards.

use super::generate::{Counts, pass};
use super::{PassKind, Schedule, ScheduleError, StageLayout};

/// All forwards, then all backwards, both in ascending order (GPipe, arXiv 1811.06965, section
/// 2.3).
///
/// Every pipeline rank holds all `m` micro-batches; the bubble is `(p − 1)(F + B + W)`.
///
/// # Errors
/// No pipeline ranks or no micro-batches.
pub fn gpipe(ranks: usize, micro_batches: usize) -> Result<Schedule, ScheduleError> {
    let counts = Counts::new(ranks, micro_batches, 1)?;
    let all = |kind| (0..micro_batches).map(move |k| pass(kind, k, 0));
    let order: Vec<_> = all(PassKind::F).chain(all(PassKind::BW)).collect();
    Ok(counts.schedule(StageLayout::RoundRobin, vec![order; ranks]))
}
