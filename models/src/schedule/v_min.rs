//! V-Min: a third of the activations of 1F1B.

use super::building_block::{Block, shortened};
use super::generate::Counts;
use super::{Schedule, ScheduleError, ScheduleName, StageLayout};

/// The building block in which a micro-batch lives as short as possible (Pipeline Parallelism with
/// Controllable Memory, arXiv 2405.15362, section 3.2).
///
/// Every pipeline rank holds `⌊(p + 4)/3⌋` micro-batches. Where `F`, `B` and `W` take unequal
/// times, a bubble repeats with every micro-batch.
///
/// # Errors
/// No pipeline ranks or no micro-batches.
pub fn v_min(ranks: usize, micro_batches: usize) -> Result<Schedule, ScheduleError> {
    ScheduleName::VMin.check(ranks, micro_batches, 2)?;
    let counts = Counts::new(ranks, micro_batches, 2)?;
    let passes = shortened(&blocks(ranks), micro_batches, 0);
    Ok(counts.schedule(StageLayout::V, passes))
}

/// All passes go one slot per pipeline rank.
pub(super) fn blocks(p: usize) -> Vec<Block> {
    // Where 3 divides the pipeline ranks both directions would meet in the same slots.
    let apart = if p.is_multiple_of(3) { 2 } else { 0 };
    let block = |i: usize| [i, 2 * p - 1 - i, 2 * p + i + apart, 4 * p + apart - 1 - i];
    (0..p).map(block).collect()
}
