//! No pipelining: one pipeline rank computes at a time.

use super::generate::{Counts, pass};
use super::{PassKind, Schedule, ScheduleError, StageLayout};

/// The whole batch as one micro-batch, forward through every pipeline rank and back.
///
/// The bubble is `(p − 1)/p` of the iteration and every pipeline rank holds the whole batch's
/// activations (GPipe, arXiv 1811.06965, figure 2b). Its only micro-batch stands for all the work
/// of an iteration: durations and activations are those of the whole batch.
///
/// # Errors
/// No pipeline ranks.
pub fn naive(ranks: usize) -> Result<Schedule, ScheduleError> {
    let passes = vec![vec![pass(PassKind::F, 0, 0), pass(PassKind::BW, 0, 0)]; ranks];
    Ok(Counts::new(ranks, 1, 1)?.schedule(StageLayout::RoundRobin, passes))
}
