//! Places vocabulary passes in an order of forwards and backwards.

use super::PassTimes;
use crate::schedule::generate::pass;
use crate::schedule::{Pass, PassKind, Schedule, VocabPasses};

/// Not known yet.
const NEVER: f64 = f64::INFINITY;

/// A run in which every pipeline rank takes what it can start first, vocabulary passes before
/// others.
pub(super) struct Greedy<'a> {
    schedule: &'a Schedule,
    vocab: VocabPasses,
    times: PassTimes,
    /// Whether `T` of one micro-batch runs in one step with `S` of the next.
    fused: bool,
    ranks: Vec<RankState<'a>>,
    /// Ends of forwards and backwards by stage and micro-batch.
    forward_end: Vec<f64>,
    backward_end: Vec<f64>,
    /// By kind of vocabulary pass and micro-batch: pipeline ranks done and the latest end.
    barriers: Vec<(usize, f64)>,
    /// By pipeline rank: what it can start first, and when; padded to a power of two with entries
    /// that never start.
    upcoming: Vec<(f64, Next)>,
    /// A tournament tree over the pipeline ranks, the root at 1 and the leaves in its second half:
    /// the one that can start first, the first of several.
    first: Vec<usize>,
}

/// A pipeline rank in the middle of a run.
struct RankState<'a> {
    /// Its forwards and backwards in order.
    order: &'a [Pass],
    /// How many of them are done.
    done: usize,
    /// Vocabulary passes done, by kind.
    vocab: [usize; 3],
    free: f64,
    passes: Vec<Pass>,
    /// Positions of forwards that run together with the next backward, in its order and in the
    /// order made of it.
    pairs: &'a [u32],
    paired: Vec<u32>,
}

#[derive(Clone, Copy)]
enum Next {
    /// Vocabulary passes, from this kind on, each of a micro-batch before the last.
    Vocab(usize),
    Pass(Pass),
}

impl<'a> Greedy<'a> {
    pub fn new(schedule: &'a Schedule, vocab: VocabPasses, times: PassTimes, fused: bool) -> Self {
        let Schedule { ranks, micro_batches, .. } = *schedule;
        let leaves = ranks.next_power_of_two();
        let part = schedule.share_chunks() as f64;
        let passes = schedule.stages() * micro_batches;
        Self {
            schedule,
            vocab,
            fused,
            times: PassTimes {
                forward: times.forward / part,
                backward: times.backward / part,
                weight: times.weight / part,
                ..times
            },
            ranks: schedule
                .passes
                .iter()
                .zip(&schedule.pairs)
                .map(|(order, pairs)| RankState::new(order, pairs))
                .collect(),
            forward_end: vec![NEVER; passes],
            backward_end: vec![NEVER; passes],
            barriers: vec![(0, 0.0); vocab.kinds().len() * micro_batches],
            upcoming: vec![(NEVER, Next::Vocab(0)); leaves],
            first: first_leaves(leaves),
        }
    }

    /// End of the run, and its order; `None` for a deadlock.
    pub fn run(mut self) -> Option<(f64, Schedule)> {
        let all = self.schedule.ranks;
        self.look_ahead(0..all);
        while let Some((rank, (start, next))) = self.earliest() {
            let opens = match next {
                Next::Vocab(kind) => self.run_vocab(rank, kind, start),
                Next::Pass(pass) => self.run_pass(rank, pass, start),
            };
            self.open(rank, opens);
        }
        if self.ranks.iter().any(|rank| rank.done < rank.order.len()) {
            return None;
        }
        let end = self.ranks.iter().map(|rank| rank.free).fold(0.0, f64::max);
        let Schedule { ranks, chunks, micro_batches, layout, .. } = *self.schedule;
        let orders = self.ranks.into_iter().map(|rank| (rank.passes, rank.paired));
        let (passes, pairs) = orders.unzip();
        let vocab = Some(self.vocab);
        Some((end, Schedule { ranks, chunks, micro_batches, layout, vocab, passes, pairs }))
    }

    fn open(&mut self, rank: usize, opens: Opens) {
        match opens {
            Opens::One(other) => self.look_ahead([rank, other]),
            Opens::Vocab(passes) => {
                self.look_ahead([rank]);
                self.look_ahead_to(passes);
            }
        }
    }

    /// What can start first of all; `None` when all is done.
    fn earliest(&self) -> Option<(usize, (f64, Next))> {
        let rank = self.first[1];
        let (start, next) = self.upcoming[rank];
        (start < NEVER).then_some((rank, (start, next)))
    }

    /// Corrects the tree after a pipeline rank's next start changed.
    fn rank(&mut self, rank: usize) {
        let mut node = (self.first.len() / 2 + rank) / 2;
        while node > 0 {
            let (left, right) = (self.first[2 * node], self.first[2 * node + 1]);
            let later = self.upcoming[right].0 < self.upcoming[left].0;
            let first = if later { right } else { left };
            let before = std::mem::replace(&mut self.first[node], first);
            if first == before && first != rank {
                break;
            }
            node /= 2;
        }
    }

    /// Updates what pipeline ranks can start first for those that come to one of these vocabulary
    /// passes, and for the last stage's, whose backwards wait for them too.
    fn look_ahead_to(&mut self, passes: [Option<usize>; 3]) {
        for rank in 0..self.schedule.ranks {
            let next = self.ranks[rank].vocab;
            if passes.iter().zip(next).any(|(&pass, next)| pass == Some(next)) {
                self.look_ahead([rank]);
            }
        }
        self.look_ahead([self.schedule.rank_of(self.schedule.stages() - 1)]);
    }

    /// Updates what these pipeline ranks can start first, vocabulary passes before others.
    fn look_ahead(&mut self, ranks: impl IntoIterator<Item = usize>) {
        for rank in ranks {
            let (vocab, pass) = (self.next_vocab(rank), self.next_pass(rank));
            self.upcoming[rank] = if vocab.0 <= pass.0 { vocab } else { pass };
            self.rank(rank);
        }
    }

    fn next_vocab(&self, rank: usize) -> (f64, Next) {
        let RankState { free, vocab: done, .. } = self.ranks[rank];
        let kinds = 0..self.vocab.kinds().len();
        let mut first = (NEVER, Next::Vocab(0));
        if self.fused {
            // The last step lacks the first kind, and so on.
            let Some(kind) = kinds.clone().find(|&kind| self.is_due(rank, kind)) else {
                return first;
            };
            let ready = self.step(rank, kind).map(|(kind, k)| self.vocab_ready(rank, kind, k));
            return (ready.fold(free, f64::max), Next::Vocab(kind));
        }
        for kind in kinds.rev().filter(|&kind| self.is_due(rank, kind)) {
            let start = self.vocab_ready(rank, kind, done[kind]).max(free);
            if start < first.0 {
                first = (start, Next::Vocab(kind));
            }
        }
        first
    }

    fn is_due(&self, rank: usize, kind: usize) -> bool {
        self.ranks[rank].vocab[kind] < self.schedule.micro_batches
    }

    /// The passes that run with the next one of a kind, oldest micro-batch first: with the
    /// reference's fused steps the next of each later kind, a micro-batch before.
    fn step(&self, rank: usize, kind: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let done = self.ranks[rank].vocab;
        let (fused, due) = (self.fused, self.is_due(rank, kind));
        let (kinds, micro_batches) = (self.vocab.kinds().len(), self.schedule.micro_batches);
        // Kind `j` of step `n` is of micro-batch `n − j`.
        let step = done[kind] + kind;
        let runs = move |&other: &usize| other == kind || fused && other > kind;
        (kind..kinds)
            .rev()
            .filter(move |other| due && runs(other))
            .filter_map(move |other| Some((other, step.checked_sub(other)?)))
            .filter(move |&(_, k)| k < micro_batches)
    }

    /// When the last stage's output is on a pipeline rank.
    fn output_ready(&self, rank: usize, k: usize) -> f64 {
        let last = self.schedule.stages() - 1;
        let away = self.schedule.rank_of(last) != rank;
        self.forward_end[self.at(last, k)] + if away { self.times.broadcast } else { 0.0 }
    }

    fn vocab_ready(&self, rank: usize, kind: usize, k: usize) -> f64 {
        match kind {
            0 => self.output_ready(rank, k),
            _ => self.barrier(kind - 1, k),
        }
    }

    fn barrier(&self, kind: usize, k: usize) -> f64 {
        match self.barriers[self.at(kind, k)] {
            (done, end) if done == self.schedule.ranks => end + self.latency(kind),
            _ => NEVER,
        }
    }

    /// Latency after the vocabulary passes of a kind, by its place in the algorithm.
    fn latency(&self, kind: usize) -> f64 {
        self.times.barriers[place(self.vocab.kinds()[kind])]
    }

    fn next_pass(&self, rank: usize) -> (f64, Next) {
        let RankState { order, done, free, .. } = &self.ranks[rank];
        let Some(&pass) = order.get(*done) else { return (NEVER, Next::Vocab(0)) };
        let partner = self.partner(rank).map_or(0.0, |pass| self.ready(rank, pass));
        (self.ready(rank, pass).max(partner).max(*free), Next::Pass(pass))
    }

    /// The backward that runs together with a pipeline rank's next pass.
    fn partner(&self, rank: usize) -> Option<Pass> {
        let RankState { order, done, pairs, .. } = &self.ranks[rank];
        let paired = pairs.binary_search(&(*done as u32)).is_ok();
        order.get(done + 1).copied().filter(|_| paired)
    }

    fn ready(&self, rank: usize, pass: Pass) -> f64 {
        let k = pass.micro_batch as usize;
        let stage = self.schedule.stage_of(rank, usize::from(pass.chunk));
        match pass.kind {
            PassKind::F if stage == 0 => 0.0,
            PassKind::F => self.forward_end[self.at(stage - 1, k)] + self.link(stage - 1),
            // Behind its backward in the pipeline rank's own order.
            PassKind::W => 0.0,
            _ if stage + 1 < self.schedule.stages() => {
                self.backward_end[self.at(stage + 1, k)] + self.link(stage)
            }
            _ => self.last_backward_ready(k),
        }
    }

    /// A transfer between a stage and the next.
    fn link(&self, stage: usize) -> f64 {
        let away = self.schedule.rank_of(stage) != self.schedule.rank_of(stage + 1);
        if away { self.times.link } else { 0.0 }
    }

    fn last_backward_ready(&self, k: usize) -> f64 {
        let kind = if self.vocab == VocabPasses::Two { 0 } else { self.vocab.kinds().len() - 1 };
        self.barrier(kind, k)
    }

    /// Runs a step.
    fn run_vocab(&mut self, rank: usize, first: usize, start: f64) -> Opens {
        let mut end = start;
        let (mut opened, mut completes) = ([None; 3], false);
        for (kind, k) in self.step(rank, first) {
            end += self.times.vocab[place(self.vocab.kinds()[kind])];
            let slot = self.at(kind, k);
            let (done, latest) = self.barriers[slot];
            self.barriers[slot] = (done + 1, latest.max(end));
            if done + 1 == self.schedule.ranks {
                completes = true;
                opened.iter_mut().skip(kind + 1).take(1).for_each(|next| *next = Some(k));
            }
            self.ranks[rank].passes.push(pass(self.vocab.kinds()[kind], k, 0));
            self.ranks[rank].vocab[kind] += 1;
        }
        self.ranks[rank].free = end;
        if completes { Opens::Vocab(opened) } else { Opens::One(rank) }
    }

    /// Runs a forward, a backward or weight gradients; with a forward the backward that is paired
    /// with it.
    fn run_pass(&mut self, rank: usize, pass: Pass, start: f64) -> Opens {
        let Some(partner) = self.partner(rank) else {
            return self.end_pass(rank, pass, start + self.time(pass.kind));
        };
        let end = start + self.time(pass.kind) + self.time(partner.kind);
        let place = self.ranks[rank].passes.len() as u32;
        self.ranks[rank].paired.push(place);
        let opens = self.end_pass(rank, pass, end);
        self.open(rank, opens);
        self.end_pass(rank, partner, end)
    }

    fn end_pass(&mut self, rank: usize, pass: Pass, end: f64) -> Opens {
        let stage = self.schedule.stage_of(rank, usize::from(pass.chunk));
        let slot = self.at(stage, pass.micro_batch as usize);
        let other = match pass.kind {
            PassKind::F => {
                self.forward_end[slot] = end;
                self.schedule.stage_after(stage)
            }
            PassKind::W => Some(stage),
            _ => {
                self.backward_end[slot] = end;
                Some(self.schedule.stage_before(stage).unwrap_or(stage))
            }
        };
        let own = &mut self.ranks[rank];
        own.free = end;
        own.done += 1;
        own.passes.push(pass);
        // All pipeline ranks wait for the last stage's forward.
        let vocab = Opens::Vocab([Some(pass.micro_batch as usize), None, None]);
        other.map_or(vocab, |other| Opens::One(self.schedule.rank_of(other)))
    }

    fn time(&self, kind: PassKind) -> f64 {
        match kind {
            PassKind::F => self.times.forward,
            PassKind::BW => self.times.backward + self.times.weight,
            PassKind::W => self.times.weight,
            _ => self.times.backward,
        }
    }

    fn at(&self, row: usize, micro_batch: usize) -> usize {
        row * self.schedule.micro_batches + micro_batch
    }
}

/// The place of a kind of vocabulary pass among all of them.
fn place(kind: PassKind) -> usize {
    kind as usize - PassKind::S as usize
}

/// A tree over equal leaves: each tree node has its first leaf.
fn first_leaves(leaves: usize) -> Vec<usize> {
    let mut first = vec![0; 2 * leaves];
    for node in (1..2 * leaves).rev() {
        first[node] = if node >= leaves { node - leaves } else { first[2 * node] };
    }
    first
}

impl<'a> RankState<'a> {
    fn new(order: &'a [Pass], pairs: &'a [u32]) -> Self {
        let (passes, paired) = (Vec::new(), Vec::new());
        Self { order, done: 0, vocab: [0; 3], free: 0.0, passes, pairs, paired }
    }
}

/// What a pass makes ready.
#[derive(Clone, Copy)]
enum Opens {
    /// The next pass of this pipeline rank.
    One(usize),
    /// Vocabulary passes of all pipeline ranks: by kind, of which micro-batch.
    Vocab([Option<usize>; 3]),
}
