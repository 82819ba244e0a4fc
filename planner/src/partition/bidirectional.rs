//! Lower bounds from chains of passes in bidirectional pipelines.
//!
//! In a bidirectional pipeline every stage has two copies. Ranks `i` and `p − 1 − i` hold the same
//! two stages, and each runs half of the micro-batches of either, one direction's on each rank. In
//! any order, such a rank starts when the first micro-batch arrives from the nearer end, then does
//! all its passes one after another. Where backwards are whole, its last one must still travel back
//! to an end of the pipeline.

use super::milestones::PassCounts;

/// Seconds of the stages of a bidirectional pipeline.
#[derive(Clone, Copy, Debug)]
pub struct Bidirectional<'a> {
    /// By stage, seconds of its passes of one micro-batch.
    pub stages: &'a [PassCounts],
    /// By stage, the forwards before it with the links between, s. One entry more than stages.
    pub down_s: &'a [f64],
    /// By stage, the backwards to inputs before it with the links between, s.
    pub back_s: &'a [f64],
    /// Micro-batches that each copy of a stage runs.
    pub runs: f64,
    /// Whether backwards are whole, so that other ranks' backwards must follow a rank's last pass.
    pub whole: bool,
}

impl Bidirectional<'_> {
    /// Earliest time at which `rank` (of ranks `i` and `p − 1 − i`, the nearer to stage 0) has
    /// done its passes and those that must follow them, s. `recompute_s` is the recomputation of
    /// one micro-batch in both its stages.
    pub fn end_s(&self, rank: usize, recompute_s: f64) -> f64 {
        let other = self.stages.len() - 1 - rank;
        let load_s = |stage: usize| self.stages[stage].iter().sum::<f64>();
        let nearer = |paths_s: &[f64]| paths_s[rank].min(paths_s[other]);
        let own_s = self.runs * (load_s(rank) + load_s(other) + recompute_s);
        nearer(self.down_s) + own_s + if self.whole { nearer(self.back_s) } else { 0.0 }
    }

    /// Pairs of ranks that hold the same stages, each given by the rank nearer to stage 0.
    pub fn pairs(&self) -> std::ops::Range<usize> {
        0..self.stages.len() / 2
    }
}
