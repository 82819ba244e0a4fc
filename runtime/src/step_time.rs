//! Where the time of a step goes, planned or measured.

use serde::Serialize;

/// Seconds of a step by cause; together they are the whole step.
///
/// Planned, it is the time of the busiest pipeline rank. Measured, it is the mean over all ranks,
/// so that where pipeline ranks differ it has less `compute_s` and more `pp_s` than planned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StepTime {
    /// Kernels of passes, recomputed ones included.
    pub compute_s: f64,
    /// Calls of the tensor-parallel group.
    pub tp_s: f64,
    /// Calls of the context-parallel groups.
    pub cp_s: f64,
    /// Calls of the experts' groups.
    pub ep_s: f64,
    /// Transfers between stages, and waiting for other stages.
    pub pp_s: f64,
    /// Gradient reductions that no pass hides.
    pub dp_s: f64,
    /// Optimizer update.
    pub optimizer_s: f64,
    /// Everything else: reading data, fixed work, stragglers.
    pub other_s: f64,
}

impl StepTime {
    /// The parts by name.
    pub fn parts(&self) -> [(&'static str, f64); 8] {
        [
            ("compute", self.compute_s),
            ("tp", self.tp_s),
            ("cp", self.cp_s),
            ("ep", self.ep_s),
            ("pp", self.pp_s),
            ("dp", self.dp_s),
            ("optimizer", self.optimizer_s),
            ("other", self.other_s),
        ]
    }

    /// The whole step, s.
    pub fn total_s(&self) -> f64 {
        self.parts().iter().map(|(_, seconds)| seconds).sum()
    }

    /// The parts in the order of [`Self::parts`], as a time.
    pub(crate) fn from_parts(
        [compute_s, tp_s, cp_s, ep_s, pp_s, dp_s, optimizer_s, other_s]: [f64; 8],
    ) -> Self {
        Self { compute_s, tp_s, cp_s, ep_s, pp_s, dp_s, optimizer_s, other_s }
    }

    /// A time made of each part's seconds in two times.
    pub(crate) fn combined(&self, other: &Self, combine: impl Fn(f64, f64) -> f64) -> Self {
        let (ours, theirs) = (self.parts(), other.parts());
        Self::from_parts(std::array::from_fn(|n| combine(ours[n].1, theirs[n].1)))
    }
}
