//! Request and report of `plan schedule`.

use super::{Durations, InputDurations, Prepared, Timeline, VocabDurations, Workspace};
use models::schedule::{
    AutoCosts, PassTimes, Schedule, ScheduleError, ScheduleName, VocabPasses, zb_auto,
};
use serde::Serialize;

/// A schedule to run with the same times on every pipeline rank, in any unit of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// Name of the schedule.
    pub schedule: ScheduleName,
    /// Pipeline ranks, `p`.
    pub stages: usize,
    /// Micro-batches an iteration, `m`.
    pub micro_batches: usize,
    /// Chunks a rank, `v`.
    pub chunks: usize,
    /// Forward of one micro-batch through all chunks of one rank, `F`.
    pub forward: f64,
    /// Its backward to inputs, `B`.
    pub backward: f64,
    /// Its weight gradients, `W`.
    pub weight: f64,
    /// Latency between ranks, `c`.
    pub latency: f64,
    /// Vocabulary passes, if the output layer is split over the ranks.
    pub vocab: Option<VocabRequest>,
    /// How long a forward and a backward take when they run together.
    pub pair: PairTime,
    /// Activation sizes and memory limit, for schedules that choose their order by them. Missing
    /// values are those of [`AutoCosts::even`].
    pub memory: MemoryRequest,
}

/// Duration of a forward that runs together with a whole backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PairTime {
    /// The sum of both: one after the other.
    #[default]
    Sum,
    /// The longer of both: the shorter is hidden.
    Max,
}

/// Activations of one micro-batch on one rank (all its chunks) and the limit of a rank, in any
/// unit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MemoryRequest {
    /// Part freed by the backward to inputs.
    pub freed_by_b: Option<f64>,
    /// Part freed by the weight gradients.
    pub freed_by_w: Option<f64>,
    /// Most that a rank may hold.
    pub limit: Option<f64>,
}

/// Vocabulary passes with the same times on every rank and barriers that take no time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VocabRequest {
    /// Algorithm of the vocabulary passes.
    pub passes: VocabPasses,
    /// `S` of one micro-batch (with `parallel_naive`, `S` and `S2` each).
    pub first: f64,
    /// `T` of one micro-batch.
    pub last: f64,
    /// `IF` of one micro-batch: the look-up in the input layer.
    pub look_up: f64,
    /// `IB` of one micro-batch: the look-up's backward.
    pub look_up_backward: f64,
}

/// The report. Field names are those of the `--json` output.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// End of the last pass.
    pub makespan: f64,
    /// Longest time from the start of a rank's first pass to the end of its last.
    pub stage_time: f64,
    /// Idle share of the makespan, `1 − m(F + B + W)/makespan`. Vocabulary passes do not count as
    /// idle.
    pub bubble_fraction: f64,
    /// By rank: most activations held at once if `B` frees them, in units of one micro-batch's
    /// activations on one rank (all its chunks).
    pub peak_activations: Vec<f64>,
    /// The same if activations are held until `W`.
    pub peak_activations_until_w: Vec<f64>,
    /// Whether an integer program has proven that no order is shorter. `None` where it was not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proven_optimal: Option<bool>,
    /// Relative gap between this order and the program's lower bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gap: Option<f64>,
    /// By rank, its passes in order, written as in `F0@0`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub orders: Option<Vec<Vec<String>>>,
}

impl Request {
    /// Builds the schedule.
    ///
    /// # Errors
    /// The schedule does not exist for these counts. The error names the nearest counts that work.
    pub fn build(&self) -> Result<Schedule, ScheduleError> {
        let (p, m, v) = (self.stages, self.micro_batches, self.chunks);
        match self.vocab {
            None if self.schedule == ScheduleName::ZbAuto => zb_auto(p, m, v, self.auto_costs()),
            None => self.schedule.build(p, m, v),
            Some(vocab) => {
                let times = self.pass_times(vocab);
                let schedule =
                    self.schedule.build_with_vocab(p, m, v, vocab.passes, Some(times))?;
                schedule.with_input_passes(times)
            }
        }
    }

    /// Costs for the schedules that search their own order.
    pub fn auto_costs(&self) -> AutoCosts {
        let even = AutoCosts::even(self.stages);
        let MemoryRequest { freed_by_b, freed_by_w, limit } = self.memory;
        let freed_by_b = freed_by_b.unwrap_or(even.freed_by_b);
        let freed_by_w = freed_by_w.unwrap_or(even.freed_by_w);
        AutoCosts {
            forward: self.forward,
            backward: self.backward,
            weight: self.weight,
            latency: self.latency,
            freed_by_b,
            freed_by_w,
            limit: limit.unwrap_or((freed_by_b + freed_by_w) * self.stages as f64),
        }
    }

    fn pass_times(&self, vocab: VocabRequest) -> PassTimes {
        PassTimes {
            forward: self.forward,
            backward: self.backward,
            weight: self.weight,
            // The middle pass takes as long as `S`: see `VocabDurations::uniform`.
            vocab: [vocab.first, vocab.first, vocab.last],
            link: self.latency,
            ..PassTimes::default()
        }
    }

    /// Real micro-batches in one micro-batch of the schedule: all of them for `naive`, else one.
    fn batch(&self) -> f64 {
        let run = self.schedule.micro_batches_run(self.micro_batches);
        self.micro_batches as f64 / run as f64
    }

    fn durations(&self, schedule: &Schedule) -> Durations {
        let [f, b, w] = [self.forward, self.backward, self.weight].map(|time| time * self.batch());
        let mut durations = Durations::uniform(schedule, f, b, w, self.latency);
        if self.pair == PairTime::Max {
            let longer = f.max(b + w) / schedule.share_chunks() as f64;
            let [forward, backward] = &mut durations.paired;
            forward.fill(longer);
            backward.fill(0.0);
        }
        if let Some(vocab) = self.vocab {
            let VocabRequest { first, last, look_up, look_up_backward, .. } = vocab;
            durations.vocab = VocabDurations {
                input: InputDurations::uniform(self.stages, look_up, look_up_backward),
                ..VocabDurations::uniform(self.stages, first, last)
            };
        }
        durations
    }

    /// Runs the schedule.
    ///
    /// # Errors
    /// As [`Self::build`].
    pub fn run(&self) -> Result<(Schedule, Timeline), ScheduleError> {
        self.run_order(self.build()?)
    }

    /// Runs another order of the same schedule.
    ///
    /// # Errors
    /// The passes are incomplete or wait for one another.
    pub fn run_order(&self, schedule: Schedule) -> Result<(Schedule, Timeline), ScheduleError> {
        let durations = self.durations(&schedule);
        let prepared = Prepared::new(&schedule)?;
        let mut timeline = prepared.timeline(&schedule, &durations, &mut Workspace::default());
        for peaks in [&mut timeline.peak_activations, &mut timeline.peak_activations_until_w] {
            peaks.iter_mut().for_each(|peak| *peak *= self.batch());
        }
        Ok((schedule, timeline))
    }
}

impl Report {
    /// Numbers of a run, without orders.
    pub fn new(timeline: &Timeline) -> Self {
        Self {
            makespan: timeline.makespan_s,
            stage_time: timeline.longest_stage_s,
            bubble_fraction: timeline.bubble_fraction(),
            peak_activations: timeline.peak_activations.clone(),
            peak_activations_until_w: timeline.peak_activations_until_w.clone(),
            proven_optimal: None,
            gap: None,
            orders: None,
        }
    }

    /// Adds the orders.
    #[must_use]
    pub fn with_orders(mut self, schedule: &Schedule) -> Self {
        self.orders = Some((0..schedule.ranks).map(|i| schedule.order_words(i)).collect());
        self
    }
}
