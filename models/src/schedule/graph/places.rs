//! Position of each pass in its pipeline rank's order, and what the pass waits for.

use super::Latency;
use crate::schedule::{Pass, PassKind, Schedule, ScheduleError, StageLayout, VocabPasses};

const ABSENT: u32 = u32::MAX;

/// Position of each pass in its pipeline rank's order.
pub(super) struct Places<'a> {
    pub(super) schedule: &'a Schedule,
    /// Kinds of pass that every pipeline rank runs for every micro-batch, in the order in which
    /// they need one another: those of the output layer, and of the input layer.
    shared: [&'static [PassKind]; 2],
    /// By kind, pipeline rank, chunk and micro-batch.
    positions: Vec<u32>,
}

impl<'a> Places<'a> {
    pub(super) fn new(schedule: &'a Schedule) -> Result<Self, ScheduleError> {
        let (ranks, lists) = (schedule.ranks, schedule.passes.len());
        if lists != ranks {
            return Err(ScheduleError::RankLists { lists, ranks });
        }
        if schedule.layout != StageLayout::RoundRobin && schedule.chunks != 2 {
            return Err(ScheduleError::Layout { chunks: schedule.chunks });
        }
        let size = KINDS * ranks * schedule.chunks * schedule.micro_batches;
        let shared = [vocab_kinds(schedule.vocab), input_kinds(schedule)];
        let mut places = Self { schedule, shared, positions: vec![ABSENT; size] };
        for (rank, passes) in schedule.passes.iter().enumerate() {
            for (n, pass) in passes.iter().enumerate() {
                places.add(rank, *pass, n as u32)?;
            }
        }
        Ok(places)
    }

    fn add(&mut self, rank: usize, pass: Pass, position: u32) -> Result<(), ScheduleError> {
        if !self.belongs(pass) {
            return Err(ScheduleError::Foreign { rank, pass });
        }
        let slot = self.slot(rank, pass);
        match std::mem::replace(&mut self.positions[slot], position) {
            ABSENT => Ok(()),
            _ => Err(ScheduleError::Duplicate { rank, pass }),
        }
    }

    fn belongs(&self, pass: Pass) -> bool {
        let Schedule { chunks, micro_batches, .. } = *self.schedule;
        let chunks = if is_vocab(pass.kind) { 1 } else { chunks };
        let vocab = is_vocab(pass.kind);
        let kind = !vocab || self.shared.iter().any(|kinds| kinds.contains(&pass.kind));
        let exists =
            usize::from(pass.chunk) < chunks && (pass.micro_batch as usize) < micro_batches;
        kind && exists && (vocab || self.schedule.runs(pass.chunk, pass.micro_batch))
    }

    fn slot(&self, rank: usize, pass: Pass) -> usize {
        let Schedule { ranks, chunks, micro_batches, .. } = *self.schedule;
        let place = (pass.kind as usize * ranks + rank) * chunks + usize::from(pass.chunk);
        place * micro_batches + pass.micro_batch as usize
    }

    pub(super) fn position(&self, rank: usize, pass: Pass) -> u32 {
        self.positions[self.slot(rank, pass)]
    }

    fn has(&self, rank: usize, pass: Pass) -> bool {
        self.position(rank, pass) != ABSENT
    }

    /// Calls `check` for every pipeline rank, chunk and micro-batch with that forward.
    fn each(
        &self,
        check: impl Fn(usize, Pass) -> Result<(), ScheduleError>,
    ) -> Result<(), ScheduleError> {
        for rank in 0..self.schedule.ranks {
            for chunk in 0..self.schedule.chunks as u16 {
                let all = 0..self.schedule.micro_batches as u32;
                for micro_batch in all.filter(|&k| self.schedule.runs(chunk, k)) {
                    check(rank, Pass { kind: PassKind::F, micro_batch, chunk })?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn check_complete(&self) -> Result<(), ScheduleError> {
        self.each(|rank, forward| {
            for &kind in self.kinds_due(rank, forward) {
                self.check_has(rank, Pass { kind, ..forward })?;
            }
            if self.begins(forward) {
                for &kind in self.shared.into_iter().flatten() {
                    self.check_has(rank, Pass { kind, chunk: 0, ..forward })?;
                }
            }
            self.check_one_backward(rank, forward)
        })
    }

    /// Whether this is a micro-batch's first chunk on its pipeline rank, so that each micro-batch
    /// counts once.
    fn begins(&self, forward: Pass) -> bool {
        forward.chunk == self.schedule.direction(forward.micro_batch)
    }

    fn kinds_due(&self, rank: usize, forward: Pass) -> &'static [PassKind] {
        if self.has(rank, Pass { kind: PassKind::BW, ..forward }) {
            &[PassKind::F, PassKind::BW]
        } else {
            &[PassKind::F, PassKind::B, PassKind::W]
        }
    }

    fn check_has(&self, rank: usize, pass: Pass) -> Result<(), ScheduleError> {
        if self.has(rank, pass) { Ok(()) } else { Err(ScheduleError::Missing { rank, pass }) }
    }

    /// A whole backward excludes its halves.
    fn check_one_backward(&self, rank: usize, forward: Pass) -> Result<(), ScheduleError> {
        let has = |kind| self.has(rank, Pass { kind, ..forward });
        let extra = [PassKind::B, PassKind::W].into_iter().find(|&kind| has(kind));
        match extra {
            Some(kind) if has(PassKind::BW) => {
                Err(ScheduleError::Duplicate { rank, pass: Pass { kind, ..forward } })
            }
            _ => Ok(()),
        }
    }

    pub(super) fn check_local_order(&self) -> Result<(), ScheduleError> {
        self.each(|rank, forward| {
            let in_order = |kinds: &[PassKind], of: Pass| {
                kinds.windows(2).try_for_each(|pair| {
                    let [needs, pass] = [pair[0], pair[1]].map(|kind| Pass { kind, ..of });
                    self.check_after(rank, pass, needs)
                })
            };
            in_order(self.kinds_due(rank, forward), forward)?;
            if !self.begins(forward) {
                return Ok(());
            }
            let mut shared = self.shared.into_iter();
            shared.try_for_each(|kinds| in_order(kinds, Pass { chunk: 0, ..forward }))
        })
    }

    fn check_after(&self, rank: usize, pass: Pass, needs: Pass) -> Result<(), ScheduleError> {
        if self.position(rank, needs) < self.position(rank, pass) {
            Ok(())
        } else {
            Err(ScheduleError::TooEarly { rank, pass, needs })
        }
    }

    /// Checks that each pair is a forward and the next whole backward, of another micro-batch or
    /// another chunk.
    pub(super) fn check_pairs(&self) -> Result<(), ScheduleError> {
        for (rank, pairs) in self.schedule.pairs.iter().enumerate() {
            let order = self.schedule.passes.get(rank).map_or(&[][..], Vec::as_slice);
            let fits = |place: u32| match order.get(place as usize..) {
                Some([forward, backward, ..]) => {
                    let kinds = (forward.kind, backward.kind) == (PassKind::F, PassKind::BW);
                    let of = |pass: &Pass| (pass.chunk, pass.micro_batch);
                    kinds && of(forward) != of(backward)
                }
                _ => false,
            };
            if let Some(&place) = pairs.iter().find(|&&place| !fits(place)) {
                return Err(ScheduleError::Pair { rank, place });
            }
        }
        Ok(())
    }

    /// Checks that all pipeline ranks run the vocabulary passes of each kind in the same order of
    /// micro-batches: each kind's reductions follow one another in a queue of their own and would
    /// otherwise meet those of other micro-batches.
    pub(super) fn check_vocab_order(&self) -> Result<(), ScheduleError> {
        let order = |rank: usize, kind: PassKind| {
            let of_kind = self.schedule.passes[rank].iter().filter(move |pass| pass.kind == kind);
            of_kind.map(|pass| pass.micro_batch)
        };
        for &kind in self.shared.into_iter().flatten() {
            let differs = |&rank: &usize| !order(rank, kind).eq(order(0, kind));
            if let Some(rank) = (1..self.schedule.ranks).find(differs) {
                return Err(ScheduleError::VocabOrder { rank, kind });
            }
        }
        Ok(())
    }

    /// The backward of a stage whose input gradients the stage before it waits for.
    fn backward(&self, rank: usize, forward: Pass) -> Pass {
        let whole = Pass { kind: PassKind::BW, ..forward };
        let half = Pass { kind: PassKind::B, ..forward };
        if self.has(rank, whole) { whole } else { half }
    }
}

/// What a pass waits for besides the pass before it on its pipeline rank.
pub(super) enum Need {
    Nothing,
    Pass(usize, Pass, Latency),
    /// All pipeline ranks' passes of this kind for its micro-batch.
    Barrier(PassKind),
}

impl Places<'_> {
    pub(super) fn need(&self, rank: usize, pass: Pass) -> Need {
        let stage = self.schedule.stage_of(rank, usize::from(pass.chunk));
        match (pass.kind, self.schedule.vocab) {
            (PassKind::F, _) => self.forward_need(rank, stage, pass),
            (PassKind::B | PassKind::BW, _) => self.backward_need(rank, stage, pass),
            (PassKind::S, _) => self.last_forward(rank, pass),
            (PassKind::T, Some(VocabPasses::Naive)) => Need::Barrier(PassKind::S2),
            (PassKind::S2 | PassKind::T, _) => Need::Barrier(PassKind::S),
            (PassKind::W | PassKind::IF, _) => Need::Nothing,
            (PassKind::IB, _) => self.first_backward(rank, pass),
        }
    }

    fn forward_need(&self, rank: usize, stage: usize, pass: Pass) -> Need {
        match self.schedule.stage_before(stage) {
            None if self.shared[1].is_empty() => Need::Nothing,
            None => Need::Barrier(PassKind::IF),
            Some(before) => self.neighbour(rank, before, pass, before),
        }
    }

    fn backward_need(&self, rank: usize, stage: usize, pass: Pass) -> Need {
        match (self.schedule.stage_after(stage), self.schedule.vocab) {
            (Some(after), _) => {
                let forward = Pass { kind: PassKind::F, ..pass };
                self.neighbour(rank, after, forward, stage)
            }
            (None, None) => Need::Nothing,
            (None, Some(VocabPasses::Two)) => Need::Barrier(PassKind::S),
            (None, Some(_)) => Need::Barrier(PassKind::T),
        }
    }

    /// A pass of the neighbouring stage `other`, over the link after stage `link`.
    fn neighbour(&self, rank: usize, other: usize, pass: Pass, link: usize) -> Need {
        let (other_rank, chunk) = self.schedule.holder(other, pass.micro_batch);
        let forward = Pass { chunk, ..pass };
        let is_before = other == link;
        let needed = if is_before { forward } else { self.backward(other_rank, forward) };
        let same = other_rank == rank;
        let latency = if same { Latency::None } else { Latency::Link(link as u32) };
        Need::Pass(other_rank, needed, latency)
    }

    fn first_backward(&self, rank: usize, pass: Pass) -> Need {
        let (holder, chunk) = self.schedule.holder(0, pass.micro_batch);
        let latency = if holder == rank { Latency::None } else { Latency::InputGradient };
        let forward = Pass { kind: PassKind::F, chunk, ..pass };
        Need::Pass(holder, self.backward(holder, forward), latency)
    }

    fn last_forward(&self, rank: usize, pass: Pass) -> Need {
        let (holder, chunk) = self.schedule.holder(self.schedule.stages() - 1, pass.micro_batch);
        let latency = if holder == rank { Latency::None } else { Latency::Broadcast };
        Need::Pass(holder, Pass { kind: PassKind::F, chunk, ..pass }, latency)
    }
}

/// Kinds of pass.
const KINDS: usize = PassKind::IB as usize + 1;

pub(super) fn is_vocab(kind: PassKind) -> bool {
    matches!(kind, PassKind::S | PassKind::S2 | PassKind::T | PassKind::IF | PassKind::IB)
}

/// Input-layer kinds: if any pipeline rank has such passes, all must, and only beside those of the
/// output layer.
fn input_kinds(schedule: &Schedule) -> &'static [PassKind] {
    let is_input = |pass: &Pass| matches!(pass.kind, PassKind::IF | PassKind::IB);
    let any = schedule.vocab.is_some() && schedule.passes.iter().flatten().any(is_input);
    if any { &[PassKind::IF, PassKind::IB] } else { &[] }
}

fn vocab_kinds(vocab: Option<VocabPasses>) -> &'static [PassKind] {
    vocab.map_or(&[], VocabPasses::kinds)
}
