//! One line of metrics a step. Exchanging it, all ranks also agree whether to go on.

use super::run::{Continuation, Failure, TrainingRun};
use crate::comm::{Op, Request};
use crate::device::Device;
use crate::error::Error;
use crate::rank::StepResult;
use crate::report::Resident;
use serde::Serialize;

/// One line of the metrics.
#[derive(Clone, Debug, Serialize)]
struct Metrics {
    step: u64,
    loss: f64,
    aux_loss: f64,
    total_loss: f64,
    grad_norm: f64,
    lr: f64,
    tokens_per_s: f64,
    model_flops_per_s: f64,
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

/// A step's metrics apart from its result, with an all-reduce in flight.
pub(super) struct PendingMetrics {
    pub(super) step: u64,
    pub(super) lr: f64,
    pub(super) seconds: f64,
    /// The maxima over all ranks, in the order of [`TrainingRun::start_metrics`].
    pub(super) most: Request<i64>,
}

impl<D: Device> TrainingRun<'_, '_, D> {
    pub(super) fn start_metrics(
        &self,
        step: u64,
        lr: f64,
        seconds: f64,
        unread: bool,
    ) -> Result<PendingMetrics, Error> {
        let (world, asked) = (&self.rank.groups().world, self.job.interrupt.is_asked());
        let Resident { now_bytes, peak_bytes } = Resident::read();
        let tensor_bytes = self.rank.state_bytes() + self.peak_bytes as u64;
        // A rank that cannot read its data contributes its number plus 1.
        let unread = if unread { world.rank() as u64 + 1 } else { 0 };
        let most = [tensor_bytes, now_bytes, peak_bytes, asked.into(), unread];
        let most = most.map(|number| number as i64).to_vec();
        Ok(PendingMetrics { step, lr, seconds, most: world.start_all_reduce(most, Op::Max)? })
    }

    /// Writes a step's metrics. Here all ranks agree whether any was asked to end, and whether all
    /// can read the next step; `next` says so of this rank.
    pub(super) fn write_metrics(
        &mut self,
        metrics: PendingMetrics,
        result: &StepResult,
        next: Result<(), Error>,
    ) -> Result<Continuation, Failure> {
        let PendingMetrics { step, lr, seconds, most } = metrics;
        let most = most.wait()?;
        let [peak_tensor_bytes, resident_bytes, peak_resident_bytes, asked, unread] =
            [0, 1, 2, 3, 4].map(|n| most.get(n).map_or(0, |&most| most as u64));
        self.memory = PeakMemory { peak_tensor_bytes, peak_resident_bytes };
        let spec = self.job.spec;
        let tokens = (spec.global_batch() * spec.seq_len) as f64;
        let metrics = Metrics {
            step,
            loss: result.loss,
            aux_loss: 0.0,
            total_loss: result.loss,
            grad_norm: result.norm,
            lr,
            tokens_per_s: tokens / seconds,
            model_flops_per_s: spec.training_flops / seconds,
            peak_tensor_bytes,
            planned_memory_bytes: spec.planned_memory_bytes,
            resident_bytes,
            peak_resident_bytes,
            ranks_in_process: self.job.ranks_in_process,
        };
        self.bar.set_message(format!("loss {:.4}", metrics.loss));
        self.bar.inc(1);
        if let Some(output) = &mut self.outputs.metrics {
            output.line(&serde_json::to_string(&metrics).unwrap_or_default());
        }
        if let Some(rank) = unread.checked_sub(1) {
            let elsewhere = Error::Unread { step: step + 1, rank };
            return Err(Failure { error: next.err().unwrap_or(elsewhere), together: true });
        }
        Ok(if asked > 0 { Continuation::Stop } else { Continuation::Continue })
    }
}
