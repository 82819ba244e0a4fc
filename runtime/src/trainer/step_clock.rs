//! Measures where the time of a step goes on one rank.

use crate::device::Device;
use crate::rank::Rank;
use crate::step::executor::Outcome;
use crate::step_time::StepTime;
use std::time::Instant;

/// Runs from the beginning of a step to its end.
pub(super) struct StepClock {
    begin: Instant,
    before: StepTime,
}

impl StepClock {
    /// Starts with a step.
    pub fn start<D: Device>(rank: &Rank<'_, D>) -> Self {
        Self { before: rank.time_spent(), begin: Instant::now() }
    }

    /// Parts of the step so far, without [`StepTime::other_s`]. `outcome`: how its passes ran.
    pub fn parts<D: Device>(&self, rank: &Rank<'_, D>, outcome: Option<&Outcome>) -> StepTime {
        let spent = rank.time_spent().combined(&self.before, |now_s, before_s| now_s - before_s);
        StepTime { compute_s: outcome.map_or(0.0, |outcome| outcome.computing_s), ..spent }
    }

    /// Ends with the step, whose other parts are known.
    pub fn end(self, parts: StepTime) -> StepTime {
        StepTime { other_s: self.begin.elapsed().as_secs_f64() - parts.total_s(), ..parts }
    }
}
