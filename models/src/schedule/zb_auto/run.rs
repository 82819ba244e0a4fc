//! A run that places passes one by one: clocks, activations and idle times of the pipeline ranks.

use super::super::generate::{Counts, pass};
use super::super::{Pass, PassKind, StageLayout};
use super::{AutoCosts, change};
use std::collections::VecDeque;

/// State of a pipeline rank.
#[derive(Clone, Default)]
pub(super) struct RankState {
    /// Time at which it is free.
    pub clock: f64,
    /// Activations held.
    held: f64,
    /// Time idled since its first pass.
    pub idle: f64,
    order: Vec<Pass>,
    /// Waiting weight gradients: micro-batch and chunk.
    waiting: VecDeque<(usize, usize)>,
    /// By kind (forward, backward) and chunk, ends of the passes so far.
    ends: [[Vec<f64>; 2]; 2],
}

/// All pipeline ranks, on stages laid out as `layout`.
pub(super) struct Run {
    pub counts: Counts,
    pub costs: AutoCosts,
    /// By pipeline rank, kind (forward, backward) and chunk: the other pipeline rank whose pass the
    /// next one waits for.
    sources: Vec<[[Option<usize>; 2]; 2]>,
    pub devices: Vec<RankState>,
    /// Tolerance by which weight gradients may end late.
    in_time: f64,
    /// Tolerance by which a wait may be longer and still count as shorter.
    shorter: f64,
}

/// How times are compared that differ by rounding alone. Which way is better is not known
/// beforehand.
#[derive(Clone, Copy)]
pub(super) struct Ties {
    /// Whether weight gradients that end just when an input arrives are in time: 1 yes, -1 no, 0 as
    /// rounded.
    in_time: i8,
    /// Whether a wait equal to the longest idle time of any pipeline rank counts as shorter.
    shorter: i8,
}

impl Ties {
    pub fn all() -> impl Iterator<Item = Self> {
        let ways = [0, 1, -1];
        ways.into_iter().flat_map(move |in_time| ways.map(|shorter| Self { in_time, shorter }))
    }
}

/// A forward or a backward to inputs, of a chunk.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    F(usize),
    B(usize),
}

impl Step {
    fn parts(self) -> (usize, usize) {
        match self {
            Self::F(chunk) => (0, chunk),
            Self::B(chunk) => (1, chunk),
        }
    }
}

impl Run {
    pub fn new(counts: Counts, costs: AutoCosts, layout: StageLayout, ties: Ties) -> Self {
        let devices = vec![RankState::default(); counts.devices];
        let work = costs.forward + costs.backward + costs.weight;
        let [in_time, shorter] =
            [ties.in_time, ties.shorter].map(|sign| 1e-9 * work * f64::from(sign));
        let sources = (0..counts.devices).map(|device| sources(counts, layout, device)).collect();
        Self { counts, costs, sources, devices, in_time, shorter }
    }

    /// Passes of this kind so far.
    pub fn count(&self, device: usize, step: Step) -> usize {
        let (kind, chunk) = step.parts();
        self.devices[device].ends[kind][chunk].len()
    }

    /// Whether one more is due.
    pub fn is_open(&self, device: usize, step: Step) -> bool {
        self.count(device, step) < self.counts.micro_batches
    }

    /// Whether weights wait.
    pub fn has_weights(&self, device: usize) -> bool {
        !self.devices[device].waiting.is_empty()
    }

    pub fn weights_waiting(&self, device: usize) -> usize {
        self.devices[device].waiting.len()
    }

    /// The pipeline rank whose pass the next one of this kind waits for, if it is another one.
    fn source(&self, device: usize, step: Step) -> Option<usize> {
        let (kind, chunk) = step.parts();
        self.sources[device][kind][chunk]
    }

    /// When what the next pass of this kind waits for arrives from another pipeline rank; `None` if
    /// it waits for none or the other has not run it.
    pub fn arrival(&self, device: usize, step: Step) -> Option<f64> {
        let (kind, chunk) = step.parts();
        let source = self.source(device, step)?;
        let end = self.devices[source].ends[kind][chunk].get(self.count(device, step))?;
        Some(end + self.costs.latency)
    }

    /// Whether the next pass of this kind could be placed, its own pipeline rank's passes aside.
    pub fn has_input(&self, device: usize, step: Step) -> bool {
        self.source(device, step).is_none() || self.arrival(device, step).is_some()
    }

    /// Places the next pass of a kind; `None` where its input is not there or it is not due.
    pub fn put(&mut self, device: usize, step: Step) -> Option<()> {
        let arrival = self.arrival(device, step);
        let waits = arrival.is_none() && self.source(device, step).is_some();
        if waits || !self.is_open(device, step) {
            return None;
        }
        let (kind, chunk) = step.parts();
        let (pass_kind, time) = match step {
            Step::F(_) => (PassKind::F, self.costs.forward),
            Step::B(_) => (PassKind::B, self.costs.backward),
        };
        let costs = self.costs;
        let device = &mut self.devices[device];
        let start = arrival.map_or(device.clock, |arrival| device.clock.max(arrival));
        if !device.order.is_empty() {
            device.idle += start - device.clock;
        }
        device.clock = start + time;
        device.held += change(pass_kind, costs);
        let k = device.ends[kind][chunk].len();
        device.ends[kind][chunk].push(device.clock);
        device.order.push(pass(pass_kind, k, chunk));
        if kind == 1 {
            device.waiting.push_back((k, chunk));
        }
        Some(())
    }

    /// Places the oldest waiting weight gradients; `None` if there are none.
    pub fn put_weights(&mut self, device: usize) -> Option<()> {
        let costs = self.costs;
        let device = &mut self.devices[device];
        let (k, chunk) = device.waiting.pop_front()?;
        device.clock += costs.weight;
        device.held += change(PassKind::W, costs);
        device.order.push(pass(PassKind::W, k, chunk));
        Some(())
    }

    pub fn flush_weights(&mut self, device: usize) {
        while self.put_weights(device).is_some() {}
    }

    /// Whether that many more forwards fit into memory.
    pub fn has_room(&self, device: usize, forwards: usize) -> bool {
        let more = forwards as f64 * change(PassKind::F, self.costs);
        self.devices[device].held + more <= self.costs.limit * (1.0 + 1e-9)
    }

    /// Weight gradients that must run first for a forward to fit.
    pub fn weights_for_room(&self, device: usize) -> usize {
        let freed = -change(PassKind::W, self.costs);
        let over = |n: usize| {
            let held = self.devices[device].held + change(PassKind::F, self.costs);
            held - n as f64 * freed > self.costs.limit * (1.0 + 1e-9)
        };
        (0..self.weights_waiting(device)).take_while(|&n| over(n)).count()
    }

    /// Places weight gradients until a forward fits; `None` where it never does.
    pub fn make_room(&mut self, device: usize) -> Option<()> {
        while !self.has_room(device, 1) {
            self.put_weights(device)?;
        }
        Some(())
    }

    /// Places weight gradients that end before `until`; whether some are left and a gap remains.
    pub fn fill(&mut self, device: usize, until: f64) -> bool {
        let until = until + self.in_time;
        let fits = |run: &Self| run.devices[device].clock + run.costs.weight <= until;
        while self.has_weights(device) && fits(self) {
            let _ = self.put_weights(device);
        }
        self.has_weights(device) && self.devices[device].clock + 2.0 * self.in_time < until
    }

    /// Whether waiting until `until` makes a pipeline rank idle longer than `most`.
    pub fn would_idle_longest(&self, device: usize, until: f64, most: f64) -> bool {
        let own = &self.devices[device];
        until - own.clock > most - own.idle + self.shorter
    }

    /// Whether one more forward ends before `until`.
    pub fn forward_is_in_time(&self, device: usize, until: f64) -> bool {
        self.devices[device].clock + self.costs.forward <= until + self.in_time
    }

    /// The longest any pipeline rank idled.
    pub fn most_idle(&self) -> f64 {
        self.devices.iter().map(|device| device.idle).fold(0.0, f64::max)
    }

    pub fn orders(self) -> Vec<Vec<Pass>> {
        self.devices.into_iter().map(|device| device.order).collect()
    }
}

/// See [`Run`].
fn sources(counts: Counts, layout: StageLayout, device: usize) -> [[Option<usize>; 2]; 2] {
    let (p, v) = (counts.devices, counts.chunks);
    let other = |stage: Option<usize>| {
        let stage = stage.filter(|&stage| stage < p * v)?;
        Some(layout.device_of(p, stage)).filter(|&other| other != device)
    };
    let stage = |chunk: usize| Some(layout.stage_of(p, device, chunk)).filter(|_| chunk < v);
    [
        [0, 1].map(|chunk| other(stage(chunk).and_then(|stage| stage.checked_sub(1)))),
        [0, 1].map(|chunk| other(stage(chunk).map(|stage| stage + 1))),
    ]
}
