//! Chains of passes where every stage is there twice.
//!
//! Two devices that mirror each other hold the same two stages, and each runs half of the micro-batches of either,
//! one direction's on one and the other's on the other. Whatever the order, such a device starts when the first
//! micro-batch has come down to it from the nearer end, does all its passes one after another, and where backwards are
//! whole its last one still has to go back up to an end.

use super::milestones::PassCounts;

/// Stages that are there twice.
#[derive(Clone, Copy, Debug)]
pub struct Bidirectional<'a> {
    /// By stage, seconds of its passes of one micro-batch.
    pub stages: &'a [PassCounts],
    /// By stage, the forwards before it with the links between, s; one more than stages.
    pub down_s: &'a [f64],
    /// The same of backwards to inputs, s.
    pub back_s: &'a [f64],
    /// Micro-batches that each copy of a stage runs.
    pub runs: f64,
    /// Whether no weight gradients run apart, so that a device's last pass is followed by others'.
    pub whole: bool,
}

impl Bidirectional<'_> {
    /// When `device`, the nearer to stage 0 of two that mirror each other, can have done its passes and what must follow
    /// them, s; with `recompute_s` for one micro-batch of both its stages.
    pub fn end_s(&self, device: usize, recompute_s: f64) -> f64 {
        let other = self.stages.len() - 1 - device;
        let load_s = |stage: usize| self.stages[stage].iter().sum::<f64>();
        let nearer = |ways_s: &[f64]| ways_s[device].min(ways_s[other]);
        let own_s = self.runs * (load_s(device) + load_s(other) + recompute_s);
        nearer(self.down_s) + own_s + if self.whole { nearer(self.back_s) } else { 0.0 }
    }

    /// Pairs of devices, by the nearer to stage 0.
    pub fn pairs(&self) -> std::ops::Range<usize> {
        0..self.stages.len() / 2
    }
}
