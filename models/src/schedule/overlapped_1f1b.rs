//! Interleaved 1F1B whose steady state is pairs, so that a forward's all-to-alls lie under a
//! backward's computation.

use super::generate::{Counts, pass};
use super::interleaved_1f1b::rounds;
use super::{PassKind, PassOrder, Schedule, ScheduleError, ScheduleName, StageLayout};

/// Pipeline rank `i` runs `2(p − 1 − i) + (v − 1)p + 1` forwards before its first backward, one
/// more than in [`super::interleaved_1f1b`]. So each later forward is of another micro-batch than
/// the next backward, and the two run together (Megatron-Core's
/// `--overlap-moe-expert-parallel-comm`).
///
/// With a pair as long as its parts the bubble is that of interleaved 1F1B, `(p − 1)(F + B + W)/v`;
/// pipeline rank `i` holds one chunk more than its warm-up has. A single pipeline rank may have one
/// chunk: it runs whole micro-batches in pairs.
///
/// # Errors
/// A count is zero, `v` is 1 with several pipeline ranks, or `m` is no multiple of `p`.
pub fn overlapped_1f1b(
    ranks: usize,
    micro_batches: usize,
    chunks: usize,
) -> Result<Schedule, ScheduleError> {
    ScheduleName::Overlapped1F1B.check(ranks, micro_batches, chunks)?;
    let counts = Counts::new(ranks, micro_batches, chunks)?;
    let orders: Vec<PassOrder> = (0..ranks).map(|rank| order_on_rank(counts, rank)).collect();
    let pairs = orders.iter().map(|order| order.pairs.clone()).collect();
    let passes = orders.into_iter().map(|order| order.passes).collect();
    Ok(Schedule { pairs, ..counts.schedule(StageLayout::RoundRobin, passes) })
}

/// Forwards that a pipeline rank runs before its first pair, if there are enough.
fn warm_up(ranks: usize, chunks: usize, rank: usize) -> usize {
    2 * (ranks - 1 - rank) + (chunks - 1) * ranks + 1
}

fn order_on_rank(counts: Counts, rank: usize) -> PassOrder {
    let Counts { ranks, chunks, .. } = counts;
    let mut forwards = rounds(counts).map(|(k, chunk)| pass(PassKind::F, k, chunk));
    let mut backwards = rounds(counts).map(|(k, chunk)| pass(PassKind::BW, k, chunks - 1 - chunk));
    let first = forwards.by_ref().take(warm_up(ranks, chunks, rank));
    let mut order = PassOrder::from(first.collect::<Vec<_>>());
    for (forward, backward) in forwards.zip(backwards.by_ref()) {
        order.pairs.push(order.passes.len() as u32);
        order.passes.extend([forward, backward]);
    }
    order.passes.extend(backwards);
    order
}
