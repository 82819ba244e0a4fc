//! Interleaved 1F1B: 1F1B over several chunks per pipeline rank.

use super::generate::{Counts, one_forward_one_backward, pass};
use super::{Pass, PassKind, Schedule, ScheduleError, ScheduleName, StageLayout};

/// Pipeline rank `i` walks its chunks in groups of `p` micro-batches: `2(p − 1 − i) + (v − 1)p`
/// forwards, then forward and backward in turn (Megatron PTD-P, arXiv 2104.04473, section 2.2.2).
///
/// The bubble is `(p − 1)(F + B + W)/v`; pipeline rank `i` holds one chunk more than its warm-up
/// has.
///
/// # Errors
/// A count is zero, `v` is 1, or `m` is no multiple of `p`.
pub fn interleaved_1f1b(
    ranks: usize,
    micro_batches: usize,
    chunks: usize,
) -> Result<Schedule, ScheduleError> {
    ScheduleName::Interleaved1F1B.check(ranks, micro_batches, chunks)?;
    let counts = Counts::new(ranks, micro_batches, chunks)?;
    let passes = (0..ranks).map(|rank| order_on_rank(counts, rank)).collect();
    Ok(counts.schedule(StageLayout::RoundRobin, passes))
}

fn order_on_rank(counts: Counts, rank: usize) -> Vec<Pass> {
    let Counts { ranks, chunks, .. } = counts;
    let warm_up = 2 * (ranks - 1 - rank) + (chunks - 1) * ranks;
    let forwards = rounds(counts).map(|(k, chunk)| pass(PassKind::F, k, chunk));
    let backwards = rounds(counts).map(|(k, chunk)| pass(PassKind::BW, k, chunks - 1 - chunk));
    one_forward_one_backward(forwards, backwards, warm_up)
}

/// Micro-batches and chunks in the order of forwards: groups of `p` micro-batches, chunk after
/// chunk.
pub(super) fn rounds(counts: Counts) -> impl Iterator<Item = (usize, usize)> + Clone {
    let Counts { ranks, micro_batches, chunks } = counts;
    let item = move |n: usize| {
        let within = n % (ranks * chunks);
        (n / (ranks * chunks) * ranks + within % ranks, within / ranks)
    };
    (0..micro_batches * chunks).map(item)
}
