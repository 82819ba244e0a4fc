//! One line of metrics a step. Exchanging it, all ranks also agree whether to go on.

use super::run::{Continuation, Failure, TrainingRun};
use crate::comm::{Op, Request};
use crate::device::Device;
use crate::error::Error;
use crate::rank::StepResult;
use crate::report::Resident;
use crate::step_time::StepTime;
use serde::Serialize;

/// One line of the metrics.
#[derive(Clone, Debug, Serialize)]
struct Metrics {
    /// Counted from 0.
    step: u64,
    loss: f64,
    aux_loss: f64,
    total_loss: f64,
    grad_norm: f64,
    lr: f64,
    tokens_per_s: f64,
    model_flops_per_s: f64,
    /// The step, as the mean over ranks.
    step_s: f64,
    /// Its parts; absent where they are not measured.
    #[serde(flatten)]
    parts: Option<StepTime>,
    /// The step as planned; absent if the plan does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    predicted_step_s: Option<f64>,
    /// Largest tensor memory of a rank so far: weights, gradients, moments, and activations kept
    /// for backward passes. It is what a plan counts, without the plan's reserves.
    peak_tensor_bytes: u64,
    /// Planned memory of a rank; 0 if the plan does not say.
    planned_memory_bytes: u64,
    /// Largest resident set of a process after this step, including all of the process's ranks.
    resident_bytes: u64,
    /// Largest resident set of a process so far.
    peak_resident_bytes: u64,
    /// Ranks that are threads of rank 0's process and share its memory.
    ranks_in_process: usize,
}

/// Peak memory so far: of a rank in tensors, and of a process in total.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PeakMemory {
    pub(super) peak_tensor_bytes: u64,
    pub(super) peak_resident_bytes: u64,
}

/// A step's metrics apart from its result, with two all-reduces in flight.
#[must_use = "a call that nobody waits for may never finish"]
pub(super) struct PendingMetrics {
    pub(super) step: u64,
    pub(super) lr: f64,
    /// Sums over all ranks of the parts of the step.
    pub(super) time: Request<f64>,
    /// The maxima over all ranks, in the order of [`TrainingRun::start_metrics`].
    pub(super) most: Request<i64>,
}

impl<D: Device> TrainingRun<'_, '_, D> {
    pub(super) fn start_metrics(
        &self,
        step: u64,
        lr: f64,
        time: StepTime,
        unread: bool,
    ) -> Result<PendingMetrics, Error> {
        let (world, asked) = (&self.rank.groups().world, self.job.interrupt.is_asked());
        let Resident { now_bytes, peak_bytes } = Resident::read();
        let tensor_bytes = self.rank.state_bytes() + self.peak_bytes as u64;
        // A rank that cannot read its data contributes its number plus 1.
        let unread = if unread { world.rank() as u64 + 1 } else { 0 };
        let most = [tensor_bytes, now_bytes, peak_bytes, asked.into(), unread];
        let most = most.map(|number| number as i64).to_vec();
        let parts = time.parts().map(|(_, part_s)| part_s).to_vec();
        let (time, most) =
            (world.start_all_reduce(parts, Op::Sum)?, world.start_all_reduce(most, Op::Max)?);
        Ok(PendingMetrics { step, lr, time, most })
    }

    /// Writes a step's metrics. Here all ranks agree whether any was asked to end, and whether all
    /// can read the next step; `next` says so of this rank.
    pub(super) fn write_metrics(
        &mut self,
        metrics: PendingMetrics,
        result: &StepResult,
        next: Result<(), Error>,
    ) -> Result<Continuation, Failure> {
        let PendingMetrics { step, lr, time, most } = metrics;
        let time = self.mean_over_ranks(&time.wait()?);
        let (step_s, most) = (time.total_s(), most.wait()?);
        let [peak_tensor_bytes, resident_bytes, peak_resident_bytes, asked, unread] =
            [0, 1, 2, 3, 4].map(|n| most.get(n).map_or(0, |&most| most as u64));
        self.memory = PeakMemory { peak_tensor_bytes, peak_resident_bytes };
        let spec = self.job.spec;
        let predicted = spec.prediction.and_then(|prediction| prediction.step);
        let metrics = Metrics {
            step,
            loss: result.loss,
            aux_loss: result.aux_loss,
            total_loss: result.loss + result.aux_loss,
            grad_norm: result.norm,
            lr,
            tokens_per_s: spec.tokens() as f64 / step_s,
            model_flops_per_s: spec.training_flops / step_s,
            step_s,
            parts: self.job.measures_parts().then_some(time),
            predicted_step_s: predicted.map(|predicted| predicted.total_s()),
            peak_tensor_bytes,
            planned_memory_bytes: spec.planned_memory_bytes(),
            resident_bytes,
            peak_resident_bytes,
            ranks_in_process: self.job.ranks_in_process,
        };
        if let Some(progress) = &mut self.progress {
            progress.step(metrics.loss, &time);
        }
        if let Some(output) = &mut self.outputs.metrics {
            output.line(&serde_json::to_string(&metrics).unwrap_or_default());
        }
        if let Some(rank) = unread.checked_sub(1) {
            let elsewhere = Error::Unread { step: step + 2, rank };
            return Err(Failure { error: next.err().unwrap_or(elsewhere), together: true });
        }
        Ok(if asked > 0 { Continuation::Stop } else { Continuation::Continue })
    }

    /// The mean over ranks, from the sums of the parts of a step.
    fn mean_over_ranks(&self, sums: &[f64]) -> StepTime {
        let ranks = self.rank.groups().world.size() as f64;
        StepTime::from_parts(std::array::from_fn(|n| sums.get(n).map_or(0.0, |sum| sum / ranks)))
    }
}
