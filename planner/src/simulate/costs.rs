//! Durations of passes, transfers and barriers, and their places in one flat table.

use models::schedule::{Latency, Pass, PassKind, Schedule, Work};
use std::collections::BTreeSet;

/// Durations of the passes of one micro-batch, s.
///
/// A missing duration that the schedule needs counts as infinite.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Durations {
    /// Forward, by stage.
    pub forward: Vec<f64>,
    /// Backward to inputs, by stage. Includes weight gradients if `weight` is empty.
    pub backward: Vec<f64>,
    /// Weight gradients, by stage. A whole backward takes them on top of `backward`. Empty where no
    /// backward is split.
    pub weight: Vec<f64>,
    /// Forward and whole backward as parts of a pair, by stage: a pair takes as long as the one
    /// part of its forward's stage and the other of its backward's together. Unused without pairs.
    pub paired: [Vec<f64>; 2],
    /// Latency between stages `j` and `j + 1`, either direction. Unused where both are on one rank.
    pub link_s: Vec<f64>,
    /// Vocabulary passes. Unused where the schedule has none.
    pub vocab: VocabDurations,
}

/// Durations of the vocabulary passes of one micro-batch and their barriers, s.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VocabDurations {
    /// `S`, by pipeline rank.
    pub first: Vec<f64>,
    /// `S2`, by rank. Only `parallel_naive` has it.
    pub middle: Vec<f64>,
    /// `T`, by rank.
    pub last: Vec<f64>,
    /// Broadcast of the last stage's output to the other ranks, before `S` (`C0`).
    pub broadcast_s: f64,
    /// Barrier after `S` (`C1`). With `parallel_2` it also brings the input gradient.
    pub after_first_s: f64,
    /// Barrier after `S2`.
    pub after_middle_s: f64,
    /// Barrier after `T` (`C2`).
    pub after_last_s: f64,
    /// Passes of the input layer. Unused where the schedule has none.
    pub input: InputDurations,
}

/// Durations of the input layer's passes for one micro-batch, the layer split over the ranks, s.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct InputDurations {
    /// `IF`, by rank.
    pub forward: Vec<f64>,
    /// `IB`, by rank.
    pub backward: Vec<f64>,
    /// All-reduce of the looked-up rows, before the first stage's forward.
    pub after_forward_s: f64,
    /// Broadcast of the first stage's input gradient, before `IB`.
    pub before_backward_s: f64,
}

impl Durations {
    /// The same durations on every stage. `forward`, `backward` and `weight` are those of all
    /// chunks of one rank, shared equally by the chunks. `backward` is `B` alone; a whole backward
    /// takes `weight` on top. A pair takes as long as its parts together.
    pub fn uniform(
        schedule: &Schedule,
        forward: f64,
        backward: f64,
        weight: f64,
        link_s: f64,
    ) -> Self {
        let (stages, chunks) = (schedule.stages(), schedule.share_chunks() as f64);
        let [forward, backward, weight] = [forward, backward, weight].map(|time| time / chunks);
        Self {
            forward: vec![forward; stages],
            backward: vec![backward; stages],
            weight: vec![weight; stages],
            paired: [vec![forward; stages], vec![backward + weight; stages]],
            link_s: vec![link_s; stages.saturating_sub(1)],
            vocab: VocabDurations::default(),
        }
    }

    /// Duration of the whole backward of a stage.
    fn whole_s(&self, stage: usize) -> f64 {
        self.backward.get(stage).copied().unwrap_or(f64::INFINITY)
            + self.weight.get(stage).copied().unwrap_or(0.0)
    }
}

impl VocabDurations {
    /// The same `S` (and `S2`) and `T` on every rank. Barriers and input-layer passes take no time.
    pub fn uniform(ranks: usize, first: f64, last: f64) -> Self {
        Self {
            first: vec![first; ranks],
            last: vec![last; ranks],
            middle: vec![first; ranks],
            input: InputDurations::uniform(ranks, 0.0, 0.0),
            ..Self::default()
        }
    }

    /// Barriers and broadcasts, in the order of the table.
    pub(super) fn barriers(&self) -> [f64; BARRIERS] {
        let Self { broadcast_s, after_first_s, after_middle_s, after_last_s, input, .. } = self;
        let InputDurations { after_forward_s, before_backward_s, .. } = input;
        [
            *broadcast_s,
            *after_first_s,
            *after_middle_s,
            *after_last_s,
            *after_forward_s,
            *before_backward_s,
        ]
    }
}

impl InputDurations {
    /// The same durations on every rank. The collectives take no time.
    pub fn uniform(ranks: usize, forward: f64, backward: f64) -> Self {
        let (forward, backward) = (vec![forward; ranks], vec![backward; ranks]);
        Self { forward, backward, ..Self::default() }
    }
}

/// Number of barriers and broadcasts, each with its own place in the table.
pub(super) const BARRIERS: usize = 6;

/// Layout of the flat table of durations. Its first entry is zero.
#[derive(Clone, Debug)]
pub(super) struct Table {
    pub stages: usize,
    pub ranks: usize,
    /// Stages of the forward and the backward of each kind of pair, sorted.
    pub pairs: Vec<[usize; 2]>,
}

impl Table {
    pub fn new(schedule: &Schedule) -> Self {
        let of_rank = |(rank, places): (usize, &Vec<u32>)| {
            let pass = |place: usize| schedule.passes[rank][place];
            let stage = move |place: usize| schedule.stage_of(rank, usize::from(pass(place).chunk));
            let kinds = places.iter().map(|&place| [place as usize, place as usize + 1].map(stage));
            kinds.collect::<Vec<_>>()
        };
        let pairs: BTreeSet<_> = schedule.pairs.iter().enumerate().flat_map(of_rank).collect();
        let pairs = pairs.into_iter().collect();
        Self { stages: schedule.stages(), ranks: schedule.ranks, pairs }
    }

    /// Rows by stage: forward, backward, weight, link, whole backward.
    pub fn stage_row(&self, row: usize) -> usize {
        1 + row * self.stages
    }

    /// Rows by rank: `S`, `S2`, `T`, `IF`, `IB`.
    pub fn rank_row(&self, row: usize) -> usize {
        self.stage_row(5) + row * self.ranks
    }

    pub fn barriers(&self) -> usize {
        self.rank_row(5)
    }

    /// One place for each kind of pair.
    pub fn pair_row(&self) -> usize {
        self.barriers() + BARRIERS
    }

    pub fn len(&self) -> usize {
        self.pair_row() + self.pairs.len()
    }

    /// Index of what a graph node runs. A join takes no time: index 0.
    pub fn of_work(&self, schedule: &Schedule, rank: usize, work: Work) -> usize {
        let stage_of = |pass: Pass| schedule.stage_of(rank, usize::from(pass.chunk));
        match work {
            Work::Join => 0,
            Work::Pair(forward, backward) => {
                let stages = [forward, backward].map(stage_of);
                let kind = self.pairs.binary_search(&stages);
                self.pair_row() + kind.expect("the graph's pairs are those of the schedule")
            }
            Work::Pass(pass) => self.of_pass(rank, stage_of(pass), pass),
        }
    }

    fn of_pass(&self, rank: usize, stage: usize, pass: Pass) -> usize {
        match pass.kind {
            PassKind::F => self.stage_row(0) + stage,
            PassKind::B => self.stage_row(1) + stage,
            PassKind::BW => self.stage_row(4) + stage,
            PassKind::W => self.stage_row(2) + stage,
            PassKind::S => self.rank_row(0) + rank,
            PassKind::S2 => self.rank_row(1) + rank,
            PassKind::T => self.rank_row(2) + rank,
            PassKind::IF => self.rank_row(3) + rank,
            PassKind::IB => self.rank_row(4) + rank,
        }
    }

    pub fn of_latency(&self, latency: Latency) -> usize {
        match latency {
            Latency::None => 0,
            Latency::Link(stage) => self.stage_row(3) + stage as usize,
            Latency::Broadcast => self.barriers(),
            Latency::Barrier(PassKind::S2) => self.barriers() + 2,
            Latency::Barrier(PassKind::T) => self.barriers() + 3,
            Latency::Barrier(PassKind::IF) => self.barriers() + 4,
            Latency::InputGradient => self.barriers() + 5,
            Latency::Barrier(_) => self.barriers() + 1,
        }
    }

    /// Writes the durations to their places.
    pub fn fill(&self, durations: &Durations, table: &mut Vec<f64>) {
        let Durations { forward, backward, weight, link_s, vocab, paired } = durations;
        table.clear();
        table.resize(self.len(), f64::INFINITY);
        table[0] = 0.0;
        for (row, values) in [forward, backward, weight, link_s].into_iter().enumerate() {
            put(&mut table[self.stage_row(row)..][..self.stages], values);
        }
        for (row, values) in [&vocab.first, &vocab.middle, &vocab.last].into_iter().enumerate() {
            put(&mut table[self.rank_row(row)..][..self.ranks], values);
        }
        let whole = &mut table[self.stage_row(4)..][..self.stages];
        whole.iter_mut().enumerate().for_each(|(n, place)| *place = durations.whole_s(n));
        let part =
            |of: usize, stage: usize| paired[of].get(stage).copied().unwrap_or(f64::INFINITY);
        for (place, stages) in table[self.pair_row()..].iter_mut().zip(&self.pairs) {
            *place = part(0, stages[0]) + part(1, stages[1]);
        }
        for (row, values) in [&vocab.input.forward, &vocab.input.backward].into_iter().enumerate() {
            put(&mut table[self.rank_row(3 + row)..][..self.ranks], values);
        }
        put(&mut table[self.barriers()..][..BARRIERS], &vocab.barriers());
    }
}

fn put(places: &mut [f64], values: &[f64]) {
    for (place, value) in places.iter_mut().zip(values) {
        *place = *value;
    }
}
