//! V-Half: half the activations of 1F1B.

use super::building_block::{Block, repeated, shortened};
use super::generate::Counts;
use super::{Schedule, ScheduleError, ScheduleName, StageLayout};

/// The building block in which a micro-batch lives half as long as in 1F1B, with weight gradients
/// in free slots (Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 3.2).
///
/// Every pipeline rank holds `⌊(p + 2)/2⌋` micro-batches; the bubble is about `p/2` micro-batches'
/// work where `F`, `B` and `W` take equal times, as the blocks assume, and more where they do not.
///
/// # Errors
/// No pipeline ranks or no micro-batches.
pub fn v_half(ranks: usize, micro_batches: usize) -> Result<Schedule, ScheduleError> {
    ScheduleName::VHalf.check(ranks, micro_batches, 2)?;
    let counts = Counts::new(ranks, micro_batches, 2)?;
    let passes = shortened(&blocks(ranks), micro_batches, 0);
    Ok(counts.schedule(StageLayout::V, passes))
}

/// V-Half as its block repeats, without shortened warm-up and cooldown: the base for vocabulary
/// passes.
///
/// # Errors
/// As [`v_half`].
pub fn v_half_repeated(ranks: usize, micro_batches: usize) -> Result<Schedule, ScheduleError> {
    ScheduleName::VHalf.check(ranks, micro_batches, 2)?;
    let counts = Counts::new(ranks, micro_batches, 2)?;
    let passes = repeated(&blocks(ranks), micro_batches);
    Ok(counts.schedule(StageLayout::V, passes))
}

/// Forwards go down two slots per pipeline rank and back up one; backwards likewise.
pub(super) fn blocks(p: usize) -> Vec<Block> {
    // With an even number of pipeline ranks both directions would meet in the same slots.
    let apart = if p.is_multiple_of(2) { 3 } else { 0 };
    let block = |i: usize| [2 * i, 3 * p - i - 2, 3 * p + 2 * i + apart - 1, 6 * p + apart - i - 2];
    (0..p).map(block).collect()
}
