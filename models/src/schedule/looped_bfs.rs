//! Looped breadth-first: each chunk runs all its micro-batches at once.

use super::generate::{Counts, pass};
use super::{PassKind, Schedule, ScheduleError, StageLayout};

/// Chunk after chunk, all forwards; then chunk after chunk backwards, micro-batches descending
/// (Breadth-First Pipeline Parallelism, arXiv 2211.05953, section 4; torch's `ScheduleLoopedBFS`).
///
/// Each chunk's parameters are gathered once a direction, which suits fully sharded data
/// parallelism. Every pipeline rank holds all `m` micro-batches; the bubble is
/// `(p − 1)(F + B + W)/v`.
///
/// # Errors
/// A count is zero.
pub fn looped_bfs(
    ranks: usize,
    micro_batches: usize,
    chunks: usize,
) -> Result<Schedule, ScheduleError> {
    let counts = Counts::new(ranks, micro_batches, chunks)?;
    let all = |kind, chunk| (0..micro_batches).map(move |k| pass(kind, k, chunk));
    let forwards = (0..chunks).flat_map(|chunk| all(PassKind::F, chunk));
    let backwards = (0..chunks).rev().flat_map(|chunk| all(PassKind::BW, chunk).rev());
    let passes = vec![forwards.chain(backwards).collect(); ranks];
    Ok(counts.schedule(StageLayout::RoundRobin, passes))
}
