//! Lower bounds from chains of passes in bidirectional pipelines.
//!
//! In a bidirectional pipeline every stage has two copies. Ranks `i` and `p − 1 − i` hold the same
//! two stages, and each runs half of the micro-batches of either, one direction's on each rank. In
//! any order, such a rank starts when the first micro-batch arrives from the nearer end, then does
//! all its passes one after another.

use super::milestones::PassCounts;

/// Seconds of the stages of a bidirectional pipeline.
#[derive(Clone, Copy, Debug)]
pub struct Bidirectional<'a> {
    /// By stage, seconds of its passes of one micro-batch.
    pub stages: &'a [PassCounts],
    /// By stage, the forwards before it with the links between, s. One entry more than stages.
    pub down_s: &'a [f64],
    /// Micro-batches that each copy of a stage runs.
    pub runs: f64,
}

impl Bidirectional<'_> {
    /// Earliest time at which `rank` (of ranks `i` and `p − 1 − i`, the nearer to stage 0) has
    /// done its passes, s. `recompute_s` is the recomputation of one micro-batch in both stages.
    pub fn end_s(&self, rank: usize, recompute_s: f64) -> f64 {
        let other = self.stages.len() - 1 - rank;
        let load_s = |stage: usize| self.stages[stage].iter().sum::<f64>();
        let own_s = self.runs * (load_s(rank) + load_s(other) + recompute_s);
        self.down_s[rank].min(self.down_s[other]) + own_s
    }

    /// Pairs of ranks that hold the same stages, each given by the rank nearer to stage 0.
    pub fn pairs(&self) -> std::ops::Range<usize> {
        0..self.stages.len() / 2
    }
}
