//! What `plan schedule` answers.

use super::{Durations, InputDurations, Prepared, Timeline, VocabDurations, Workspace};
use models::schedule::{
    AutoCosts, PassTimes, Schedule, ScheduleError, ScheduleName, VocabPasses, zb_auto,
};
use serde::Serialize;

/// A schedule to be run with the same times on every device, in any unit of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// Which schedule.
    pub schedule: ScheduleName,
    /// Pipeline devices, `p`.
    pub stages: usize,
    /// Micro-batches an iteration, `m`.
    pub micro_batches: usize,
    /// Chunks a device, `v`.
    pub chunks: usize,
    /// Forward of one micro-batch on one device's whole share, `F`.
    pub forward: f64,
    /// Its backward with respect to inputs, `B`.
    pub backward: f64,
    /// Its backward with respect to weights, `W`.
    pub weight: f64,
    /// Latency between devices, `c`.
    pub latency: f64,
    /// Vocabulary passes, if the output layer is split over the devices.
    pub vocab: Option<VocabRequest>,
    /// How long a forward and a backward take that run together.
    pub pair: PairTime,
    /// Activations of one micro-batch of one device's whole share and how many a device may hold, for
    /// schedules that choose their order by them; by default those of [`AutoCosts::even`].
    pub memory: MemoryRequest,
}

/// How long a forward takes together with a whole backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PairTime {
    /// As long as both, one after the other.
    #[default]
    Sum,
    /// As long as the longer: the shorter is hidden.
    Max,
}

/// Activations, in any unit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MemoryRequest {
    /// What backward to inputs frees.
    pub freed_by_b: Option<f64>,
    /// What backward to weights frees.
    pub freed_by_w: Option<f64>,
    /// What a device may hold.
    pub limit: Option<f64>,
}

/// Vocabulary passes with the same times on every device and barriers that take no time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VocabRequest {
    /// Which algorithm.
    pub passes: VocabPasses,
    /// `S` of one micro-batch (with `parallel_naive`, `S` and `S2` each).
    pub first: f64,
    /// `T` of one micro-batch.
    pub last: f64,
    /// `IF` of one micro-batch: a look-up in the input layer.
    pub look_up: f64,
    /// `IB` of one micro-batch: its backward.
    pub look_up_backward: f64,
}

/// The answer, by the names that `--json` has.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// End of the last pass.
    pub makespan: f64,
    /// Longest time from a device's own first start to its own last end.
    pub stage_time: f64,
    /// Idle share of the makespan, `1 − m(F + B + W)/makespan`; vocabulary passes are no idling.
    pub bubble_fraction: f64,
    /// By device: most activations held if `B` frees them, in those of one micro-batch of one device's
    /// whole share.
    pub peak_activations: Vec<f64>,
    /// The same if they are held to `W`.
    pub peak_activations_until_w: Vec<f64>,
    /// Whether an integer program has proven that no order is shorter, where it was asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proven_optimal: Option<bool>,
    /// How far its bound lies below this order, as a share.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gap: Option<f64>,
    /// By device, its passes in order, as in `F0@0`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub orders: Option<Vec<Vec<String>>>,
}

impl Request {
    /// The schedule asked for.
    ///
    /// # Errors
    /// It does not exist for these counts; the error names the nearest that do.
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

    /// What an order is searched for.
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
            // As long as `S`, which it divides with: see `VocabDurations::uniform`.
            vocab: [vocab.first, vocab.first, vocab.last],
            link: self.latency,
            ..PassTimes::default()
        }
    }

    /// Micro-batches that one of the schedule's micro-batches stands for: all in `naive`, else one.
    fn batch(&self) -> f64 {
        let run = self.schedule.micro_batches_run(self.micro_batches);
        self.micro_batches as f64 / run as f64
    }

    fn durations(&self, schedule: &Schedule) -> Durations {
        let [f, b, w] = [self.forward, self.backward, self.weight].map(|time| time * self.batch());
        let mut durations = Durations::uniform(schedule, f, b, w, self.latency);
        if self.pair == PairTime::Max {
            let parts = schedule.share_chunks() as f64;
            durations.pair.fill([f.max(b + w) / parts; 2]);
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

    /// Runs another order of the schedule.
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
    /// The numbers of a run, without orders.
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
        self.orders = Some((0..schedule.devices).map(|i| schedule.order_words(i)).collect());
        self
    }
}
