//! Interlaced pipelines: all pipeline ranks run the vocabulary layers at the same time.

use crate::schedule::generate::{Counts, pass};
use crate::schedule::{Pass, PassKind, Schedule, ScheduleError, StageLayout, VocabPasses};

/// 1F1B between vocabulary layers that all pipeline ranks run together, as tensor-parallel ranks do
/// (nnScaler's interlaced pipeline; Vocabulary Parallelism, arXiv 2411.05288, sections 2 and 6).
///
/// `S` and `T` of a micro-batch follow one another, and no pipeline rank goes on before all have
/// run `S`. Between two micro-batches' vocabulary layers every pipeline rank runs one forward and
/// one backward. Which comes first alternates along the pipeline, so that a forward passes two
/// pipeline ranks in that time and a backward one. A micro-batch lives half as long again as in
/// 1F1B: pipeline rank `i` holds `⌊3(p − i)/2⌋`. Without latencies the makespan is
/// `(m + p − 1)(F + B + W) + m(S + T)`.
///
/// # Errors
/// No pipeline ranks or no micro-batches.
pub(super) fn interlaced(ranks: usize, micro_batches: usize) -> Result<Schedule, ScheduleError> {
    let counts = Counts::new(ranks, micro_batches, 1)?;
    let passes = (0..ranks).map(|i| order(ranks - 1 - i, micro_batches)).collect();
    let schedule = counts.schedule(StageLayout::RoundRobin, passes);
    Ok(Schedule { vocab: Some(VocabPasses::Interlaced), ..schedule })
}

/// The order of the pipeline rank with `below` others after it.
fn order(below: usize, micro_batches: usize) -> Vec<Pass> {
    let mut order = Vec::with_capacity(4 * micro_batches);
    // The interval before the vocabulary layers of micro-batch `turn`, counted from the first
    // forward here.
    for turn in 0..micro_batches + 2 * below + 1 {
        let micro_batch = |behind: usize| turn.checked_sub(behind).filter(|&k| k < micro_batches);
        let lead = below / 2;
        let forward = micro_batch(0).map(|k| pass(PassKind::F, k, 0));
        let backward = micro_batch(lead + 1 + below).map(|k| pass(PassKind::BW, k, 0));
        let both = if below.is_multiple_of(2) { [backward, forward] } else { [forward, backward] };
        order.extend(both.into_iter().flatten());
        let vocabulary = micro_batch(lead).into_iter();
        let each = |k| [PassKind::S, PassKind::T].map(|kind| pass(kind, k, 0));
        order.extend(vocabulary.flat_map(each));
    }
    order
}
