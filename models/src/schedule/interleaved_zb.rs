//! Interleaved 1F1B with weight gradients moved into its bubble.

use super::generate::{Counts, split_backward};
use super::interleaved_1f1b::rounds;
use super::{Pass, Schedule, ScheduleError, ScheduleName, StageLayout};

/// ZB-H1 over several chunks per pipeline rank, in the rounds of interleaved 1F1B:
/// `p − i + (v − 1)p` forwards, then backward to inputs, to weights `i` passes later, and forward,
/// in turn (torch's `ScheduleInterleavedZeroBubble`).
///
/// The bubble is `(p − 1)(F + B − W)/v` while `W ≤ min(F, B)`; every pipeline rank holds `p`
/// micro-batches up to `W` with two chunks.
///
/// # Errors
/// A count is zero, `v` is 1 (that is [`super::zb_h1`]), or `m` is no multiple of `p`.
pub fn interleaved_zb(
    ranks: usize,
    micro_batches: usize,
    chunks: usize,
) -> Result<Schedule, ScheduleError> {
    ScheduleName::InterleavedZb.check(ranks, micro_batches, chunks)?;
    let counts = Counts::new(ranks, micro_batches, chunks)?;
    let passes = (0..ranks).map(|rank| order_on_rank(counts, rank)).collect();
    Ok(counts.schedule(StageLayout::RoundRobin, passes))
}

fn order_on_rank(counts: Counts, rank: usize) -> Vec<Pass> {
    let Counts { ranks, chunks, .. } = counts;
    let warm_up = ranks - rank + (chunks - 1) * ranks;
    let backwards = rounds(counts).map(move |(k, chunk)| (k, chunks - 1 - chunk));
    split_backward(rounds(counts), backwards, warm_up, rank)
}
