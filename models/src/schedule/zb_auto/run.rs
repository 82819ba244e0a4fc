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
    pub ranks: Vec<RankState>,
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
        let ranks = vec![RankState::default(); counts.ranks];
        let work = costs.forward + costs.backward + costs.weight;
        let [in_time, shorter] =
            [ties.in_time, ties.shorter].map(|sign| 1e-9 * work * f64::from(sign));
        let sources = (0..counts.ranks).map(|rank| sources(counts, layout, rank)).collect();
        Self { counts, costs, sources, ranks, in_time, shorter }
    }

    /// Passes of this kind so far.
    pub fn count(&self, rank: usize, step: Step) -> usize {
        let (kind, chunk) = step.parts();
        self.ranks[rank].ends[kind][chunk].len()
    }

    /// Whether one more is due.
    pub fn is_open(&self, rank: usize, step: Step) -> bool {
        self.count(rank, step) < self.counts.micro_batches
    }

    /// Whether weights wait.
    pub fn has_weights(&self, rank: usize) -> bool {
        !self.ranks[rank].waiting.is_empty()
    }

    pub fn weights_waiting(&self, rank: usize) -> usize {
        self.ranks[rank].waiting.len()
    }

    /// The pipeline rank whose pass the next one of this kind waits for, if it is another one.
    fn source(&self, rank: usize, step: Step) -> Option<usize> {
        let (kind, chunk) = step.parts();
        self.sources[rank][kind][chunk]
    }

    /// When what the next pass of this kind waits for arrives from another pipeline rank; `None` if
    /// it waits for none or the other has not run it.
    pub fn arrival(&self, rank: usize, step: Step) -> Option<f64> {
        let (kind, chunk) = step.parts();
        let source = self.source(rank, step)?;
        let end = self.ranks[source].ends[kind][chunk].get(self.count(rank, step))?;
        Some(end + self.costs.latency)
    }

    /// Whether the next pass of this kind could be placed, its own pipeline rank's passes aside.
    pub fn has_input(&self, rank: usize, step: Step) -> bool {
        self.source(rank, step).is_none() || self.arrival(rank, step).is_some()
    }

    /// Places the next pass of a kind; `None` where its input is not there or it is not due.
    pub fn put(&mut self, rank: usize, step: Step) -> Option<()> {
        let arrival = self.arrival(rank, step);
        let waits = arrival.is_none() && self.source(rank, step).is_some();
        if waits || !self.is_open(rank, step) {
            return None;
        }
        let (kind, chunk) = step.parts();
        let (pass_kind, time) = match step {
            Step::F(_) => (PassKind::F, self.costs.forward),
            Step::B(_) => (PassKind::B, self.costs.backward),
        };
        let costs = self.costs;
        let rank = &mut self.ranks[rank];
        let start = arrival.map_or(rank.clock, |arrival| rank.clock.max(arrival));
        if !rank.order.is_empty() {
            rank.idle += start - rank.clock;
        }
        rank.clock = start + time;
        rank.held += change(pass_kind, costs);
        let k = rank.ends[kind][chunk].len();
        rank.ends[kind][chunk].push(rank.clock);
        rank.order.push(pass(pass_kind, k, chunk));
        if kind == 1 {
            rank.waiting.push_back((k, chunk));
        }
        Some(())
    }

    /// Places the oldest waiting weight gradients; `None` if there are none.
    pub fn put_weights(&mut self, rank: usize) -> Option<()> {
        let costs = self.costs;
        let rank = &mut self.ranks[rank];
        let (k, chunk) = rank.waiting.pop_front()?;
        rank.clock += costs.weight;
        rank.held += change(PassKind::W, costs);
        rank.order.push(pass(PassKind::W, k, chunk));
        Some(())
    }

    pub fn flush_weights(&mut self, rank: usize) {
        while self.put_weights(rank).is_some() {}
    }

    /// Whether that many more forwards fit into memory.
    pub fn has_room(&self, rank: usize, forwards: usize) -> bool {
        let more = forwards as f64 * change(PassKind::F, self.costs);
        self.ranks[rank].held + more <= self.costs.limit * (1.0 + 1e-9)
    }

    /// Weight gradients that must run first for a forward to fit.
    pub fn weights_for_room(&self, rank: usize) -> usize {
        let freed = -change(PassKind::W, self.costs);
        let over = |n: usize| {
            let held = self.ranks[rank].held + change(PassKind::F, self.costs);
            held - n as f64 * freed > self.costs.limit * (1.0 + 1e-9)
        };
        (0..self.weights_waiting(rank)).take_while(|&n| over(n)).count()
    }

    /// Places weight gradients until a forward fits; `None` where it never does.
    pub fn make_room(&mut self, rank: usize) -> Option<()> {
        while !self.has_room(rank, 1) {
            self.put_weights(rank)?;
        }
        Some(())
    }

    /// Places weight gradients that end before `until`; whether some are left and a gap remains.
    pub fn fill(&mut self, rank: usize, until: f64) -> bool {
        let until = until + self.in_time;
        let fits = |run: &Self| run.ranks[rank].clock + run.costs.weight <= until;
        while self.has_weights(rank) && fits(self) {
            let _ = self.put_weights(rank);
        }
        self.has_weights(rank) && self.ranks[rank].clock + 2.0 * self.in_time < until
    }

    /// Whether waiting until `until` makes a pipeline rank idle longer than `most`.
    pub fn would_idle_longest(&self, rank: usize, until: f64, most: f64) -> bool {
        let own = &self.ranks[rank];
        until - own.clock > most - own.idle + self.shorter
    }

    /// Whether one more forward ends before `until`.
    pub fn forward_is_in_time(&self, rank: usize, until: f64) -> bool {
        self.ranks[rank].clock + self.costs.forward <= until + self.in_time
    }

    /// The longest any pipeline rank idled.
    pub fn most_idle(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.idle).fold(0.0, f64::max)
    }

    pub fn orders(self) -> Vec<Vec<Pass>> {
        self.ranks.into_iter().map(|rank| rank.order).collect()
    }
}

/// See [`Run`].
fn sources(counts: Counts, layout: StageLayout, rank: usize) -> [[Option<usize>; 2]; 2] {
    let (p, v) = (counts.ranks, counts.chunks);
    let other = |stage: Option<usize>| {
        let stage = stage.filter(|&stage| stage < p * v)?;
        Some(layout.rank_of(p, stage)).filter(|&other| other != rank)
    };
    let stage = |chunk: usize| Some(layout.stage_of(p, rank, chunk)).filter(|_| chunk < v);
    [
        [0, 1].map(|chunk| other(stage(chunk).and_then(|stage| stage.checked_sub(1)))),
        [0, 1].map(|chunk| other(stage(chunk).map(|stage| stage + 1))),
    ]
}
