//! Milestones of a pipeline rank's order of passes, and lower bounds from the chains between them.
//!
//! Where backward is split or stages lie on a V, no closed form of the whole iteration is known.
//! But every order has the same few milestones on each rank: its first backward, the last forward
//! and the last backward of its first chunk, and its end. The passes between them follow from the
//! order. A chain starts when the first micro-batch arrives at the rank, or when its backward does.
//! It continues with the rank's own passes, or with the last micro-batch's round trip to the last
//! stage. It ends with the rank's own weight gradients and reductions, or with the last
//! micro-batch's backward path to the first rank. Every such chain is a lower bound on the
//! iteration time.

use models::schedule::{PassKind, Schedule, ScheduleName, VocabPasses};

/// Passes of one chunk: forwards, backwards to inputs, weight gradients. A whole backward counts as
/// one of each of the latter two.
pub type PassCounts = [f64; 3];

/// Passes of one chunk up to each milestone of its rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ChunkMilestones {
    /// Before the rank's first backward.
    pub first_backward: PassCounts,
    /// Up to the last forward of the rank's first chunk.
    pub last_forward: PassCounts,
    /// Up to the last backward of the rank's first chunk.
    pub last_backward: PassCounts,
}

/// The milestones of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct OrderMilestones {
    /// By chunk.
    pub chunks: Vec<ChunkMilestones>,
    /// Vocabulary passes.
    vocab: VocabCounts,
    /// Chunk of the first backward.
    pub first_chunk: usize,
    /// Whether the first backward comes before the last forward of the first chunk.
    pub apart: bool,
    /// Whether the milestones hold for any order: weight gradients counted after the last backward
    /// may then also run before it. See [`Self::of_any`].
    any_order: bool,
    micro_batches: f64,
}

/// What is known of a rank's vocabulary passes, whatever times they are placed by. They wait for
/// the forwards of their micro-batch on all stages. Its backward waits for them on all ranks, but
/// not for `T` of Algorithm 2, which may share a step with `S` of the next micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct VocabCounts {
    /// Most of any kind before the rank's first backward.
    before: f64,
    /// Fewest of each kind up to the last forward of the first chunk.
    until_forward: f64,
}

impl VocabCounts {
    fn new(chunks: &[ChunkMilestones]) -> Self {
        let forwards = chunks.iter().map(|chunk| chunk.first_backward[0]);
        let backwards = chunks.iter().map(|chunk| chunk.last_forward[1]);
        Self {
            before: forwards.fold(f64::INFINITY, f64::min),
            // One may lag behind.
            until_forward: (backwards.fold(0.0, f64::max) - 1.0).max(0.0),
        }
    }

    /// Fewest passes of each kind between two milestones.
    fn between(&self, from: At, to: At, micro_batches: f64) -> f64 {
        let until = match to {
            At::Start | At::FirstBackward => 0.0,
            At::LastForward => self.until_forward,
            At::LastBackward | At::End => micro_batches,
        };
        let before = match from {
            At::Start => 0.0,
            At::FirstBackward => self.before,
            At::LastForward | At::LastBackward | At::End => micro_batches,
        };
        (until - before).max(0.0)
    }
}

/// When a rank's passes can start, and how long they wait for other ranks, s.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ArrivalTimes {
    /// Arrival of the first micro-batch at the rank's first chunk.
    pub arrive_s: f64,
    /// Earliest start of the first backward.
    pub ready_s: f64,
    /// From the end of a forward of the first chunk to the start of the same micro-batch's
    /// backward.
    pub path_s: f64,
}

/// Earliest ends of a rank's work, s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EndTimes {
    /// End of the last backward of the first chunk.
    pub last_backward_s: f64,
    /// End of the rank's last pass.
    pub own_s: f64,
}

/// Durations of a rank's passes, s.
#[derive(Clone, Copy, Debug)]
pub struct OwnSeconds<'a> {
    /// Forward, backward to inputs and weight gradients, by chunk.
    pub chunks: &'a [PassCounts],
    /// Time that the passes of a micro-batch take on top, whichever chunk spends it.
    pub shared: PassCounts,
    /// The vocabulary passes of a micro-batch but those of the input layer alone.
    pub vocab_s: f64,
}

/// A milestone, or the start or end of the order.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum At {
    Start,
    FirstBackward,
    LastForward,
    LastBackward,
    End,
}

/// A part of the order that chains follow, from one milestone to another.
#[derive(Clone, Copy)]
enum Span {
    StartToLastForward,
    StartToLastBackward,
    StartToEnd,
    FirstBackwardToLastForward,
    FirstBackwardToLastBackward,
    FirstBackwardToEnd,
    LastBackwardToEnd,
}

impl Span {
    const ALL: [Self; 7] = [
        Self::StartToLastForward,
        Self::StartToLastBackward,
        Self::StartToEnd,
        Self::FirstBackwardToLastForward,
        Self::FirstBackwardToLastBackward,
        Self::FirstBackwardToEnd,
        Self::LastBackwardToEnd,
    ];

    fn milestones(self) -> (At, At) {
        match self {
            Self::StartToLastForward => (At::Start, At::LastForward),
            Self::StartToLastBackward => (At::Start, At::LastBackward),
            Self::StartToEnd => (At::Start, At::End),
            Self::FirstBackwardToLastForward => (At::FirstBackward, At::LastForward),
            Self::FirstBackwardToLastBackward => (At::FirstBackward, At::LastBackward),
            Self::FirstBackwardToEnd => (At::FirstBackward, At::End),
            Self::LastBackwardToEnd => (At::LastBackward, At::End),
        }
    }
}

/// Earliest times of the last milestones. `first` are the passes of the first chunk, s, and
/// `work_s` gives the seconds of the rank's passes in a part of its order.
fn latest(
    apart: bool,
    any_order: bool,
    first: PassCounts,
    arrivals: &ArrivalTimes,
    work_s: impl Fn(Span) -> f64,
) -> EndTimes {
    let ArrivalTimes { arrive_s, ready_s, path_s } = *arrivals;
    let mut forward_s = arrive_s + work_s(Span::StartToLastForward);
    if apart {
        forward_s = forward_s.max(ready_s + work_s(Span::FirstBackwardToLastForward));
    }
    let backward_s = arrive_s + work_s(Span::StartToLastBackward);
    let backward_s = backward_s.max(ready_s + work_s(Span::FirstBackwardToLastBackward));
    let last_backward_s = backward_s.max(forward_s + path_s + first[1]);
    let own_s = if any_order {
        // Weight gradients of other micro-batches may run wherever the rank waits.
        let all_s = arrive_s + work_s(Span::StartToEnd);
        let behind_s = ready_s + work_s(Span::FirstBackwardToEnd);
        (last_backward_s + first[2]).max(all_s).max(behind_s)
    } else {
        last_backward_s + work_s(Span::LastBackwardToEnd)
    };
    EndTimes { last_backward_s, own_s }
}

/// The chains of a rank with one chunk, counted once for many durations.
#[derive(Clone, Debug)]
pub struct OneChunk {
    /// By [`Span`], passes, and whole sets of vocabulary passes.
    passes: [(PassCounts, f64); 7],
    apart: bool,
    any_order: bool,
}

impl OneChunk {
    /// Earliest times of the last milestones, with the seconds of forward, backward to inputs and
    /// weight gradients, and of the vocabulary passes of a micro-batch.
    pub fn ends(&self, own: PassCounts, vocab_s: f64, arrivals: &ArrivalTimes) -> EndTimes {
        let work_s = |span: Span| {
            let ([forwards, backwards, weights], sets) = self.passes[span as usize];
            forwards * own[0] + backwards * own[1] + weights * own[2] + sets * vocab_s
        };
        latest(self.apart, self.any_order, own, arrivals, work_s)
    }
}

impl OrderMilestones {
    /// The milestones of a rank's order, with or without vocabulary passes in it.
    pub fn of(schedule: &Schedule, rank: usize) -> Self {
        let order = schedule.passes.get(rank).map_or(&[][..], Vec::as_slice);
        let is_backward = |kind: PassKind| matches!(kind, PassKind::B | PassKind::BW);
        let first = order.iter().position(|pass| is_backward(pass.kind)).unwrap_or(order.len());
        let last = |wanted: &dyn Fn(PassKind) -> bool| {
            order
                .iter()
                .rposition(|pass| pass.chunk == 0 && wanted(pass.kind))
                .map_or(0, |place| place + 1)
        };
        let forward = last(&|kind| kind == PassKind::F);
        let milestones = [first, forward, last(&is_backward)];
        let mut chunks = vec![ChunkMilestones::default(); schedule.chunks];
        let mut counts: Vec<PassCounts> = vec![[0.0; 3]; schedule.chunks];
        for place in 0..=order.len() {
            let reached = if milestones.contains(&place) { &counts[..] } else { &[] };
            for (chunk, &counts) in chunks.iter_mut().zip(reached) {
                let ChunkMilestones { first_backward, last_forward, last_backward } = chunk;
                let all = [first_backward, last_forward, last_backward];
                let here = all.into_iter().zip(milestones).filter(|(_, at)| *at == place);
                here.for_each(|(milestone, _)| *milestone = counts);
            }
            let Some(pass) = order.get(place) else { break };
            let added: PassCounts = match pass.kind {
                PassKind::F => [1.0, 0.0, 0.0],
                PassKind::B => [0.0, 1.0, 0.0],
                PassKind::W => [0.0, 0.0, 1.0],
                PassKind::BW => [0.0, 1.0, 1.0],
                _ => continue,
            };
            let own = &mut counts[usize::from(pass.chunk)];
            own.iter_mut().zip(added).for_each(|(count, added)| *count += added);
        }
        let micro_batches = schedule.micro_batches as f64;
        Self {
            vocab: VocabCounts::new(&chunks),
            chunks,
            first_chunk: order.get(first).map_or(0, |pass| usize::from(pass.chunk)),
            apart: first < forward,
            any_order: false,
            micro_batches,
        }
    }

    /// The same milestones by counting, for `zb_h1`, `zb_h2` and `interleaved_zb`. Their orders
    /// begin with warm-up forwards, more of them where there are vocabulary passes, then repeat
    /// backward to inputs, weight gradients of an earlier backward, and forward.
    pub fn counted(
        schedule: ScheduleName,
        (ranks, micro_batches, chunks): (usize, usize, usize),
        rank: usize,
        vocab: Option<VocabPasses>,
    ) -> Option<Self> {
        let (p, m, v) = (ranks, micro_batches, chunks);
        let (warm_up, lag) = match schedule {
            ScheduleName::ZbH1 => (p - rank, rank),
            ScheduleName::ZbH2 => (2 * (p - rank) - 1, 2 * rank),
            ScheduleName::InterleavedZb => (p - rank + (v - 1) * p, rank),
            _ => return None,
        };
        let all = m * v;
        let room = vocab.map_or(0, |vocab| vocab.barriers() * v);
        let warm_up = (warm_up + room).min(all);
        // Index of the first chunk's last forward among all forwards.
        let last = all + p - 1 - p * v;
        let backwards = if last < warm_up { 0 } else { last - warm_up + 1 };
        let weights = |backwards: usize| backwards.saturating_sub(lag);
        let before_last = weights(all - 1);
        let milestones =
            [(warm_up, 0, 0), (last + 1, backwards, weights(backwards)), (all, all, before_last)];
        let chunk = |chunk: usize| {
            let of = |items: usize, chunk: usize| {
                let (rounds, rest) = (items / (p * v), items % (p * v));
                (rounds * p + rest.saturating_sub(chunk * p).min(p)) as f64
            };
            let back = v - 1 - chunk;
            let [first_backward, last_forward, last_backward] =
                milestones.map(|(f, b, w)| [of(f, chunk), of(b, back), of(w, back)]);
            ChunkMilestones { first_backward, last_forward, last_backward }
        };
        let chunks: Vec<ChunkMilestones> = (0..v).map(chunk).collect();
        Some(Self {
            vocab: VocabCounts::new(&chunks),
            chunks,
            first_chunk: v - 1,
            apart: warm_up <= last,
            any_order: false,
            micro_batches: m as f64,
        })
    }

    /// Milestones that hold for any order: all forwards and vocabulary passes may come before the
    /// first backward, and all weight gradients after the last.
    pub fn of_any(micro_batches: usize, chunks: usize) -> Self {
        let m = micro_batches as f64;
        let chunk = |chunk: usize| ChunkMilestones {
            first_backward: [m, 0.0, 0.0],
            last_forward: [if chunk == 0 { m } else { 0.0 }, 0.0, 0.0],
            last_backward: [m, m, 0.0],
        };
        let first_chunk = chunks - 1;
        let chunks: Vec<ChunkMilestones> = (0..chunks).map(chunk).collect();
        Self {
            vocab: VocabCounts::new(&chunks),
            chunks,
            first_chunk,
            apart: false,
            any_order: true,
            micro_batches: m,
        }
    }

    /// Earliest times of the last milestones.
    pub fn ends(&self, own: &OwnSeconds<'_>, arrivals: &ArrivalTimes) -> EndTimes {
        let first = own.chunks.first().copied().unwrap_or_default();
        let work_s = |span: Span| {
            let (from, to) = span.milestones();
            self.work_s(own, from, to)
        };
        latest(self.apart, self.any_order, first, arrivals, work_s)
    }

    /// The chains of a rank with one chunk.
    pub fn of_one_chunk(&self) -> OneChunk {
        let passes = Span::ALL.map(|span| {
            let (from, to) = span.milestones();
            self.between(from, to)
        });
        OneChunk { passes, apart: self.apart, any_order: self.any_order }
    }

    /// Passes of the only chunk between two milestones, and whole sets of vocabulary passes.
    pub(super) fn between(&self, from: At, to: At) -> (PassCounts, f64) {
        let chunk = self.chunks.first().copied().unwrap_or_default();
        let (before, until) = (self.counts(&chunk, from), self.counts(&chunk, to));
        (difference(until, before), self.vocab.between(from, to, self.micro_batches))
    }

    fn counts(&self, chunk: &ChunkMilestones, at: At) -> PassCounts {
        match at {
            At::Start => [0.0; 3],
            At::FirstBackward => chunk.first_backward,
            At::LastForward => chunk.last_forward,
            At::LastBackward => chunk.last_backward,
            At::End => [self.micro_batches; 3],
        }
    }

    /// Lower bound on the seconds of the rank's passes between two milestones.
    fn work_s(&self, own: &OwnSeconds<'_>, from: At, to: At) -> f64 {
        let (mut sum_s, mut fewest) = (0.0, [f64::INFINITY; 3]);
        for (milestones, seconds) in self.chunks.iter().zip(own.chunks) {
            let done = difference(self.counts(milestones, to), self.counts(milestones, from));
            sum_s += done[0] * seconds[0] + done[1] * seconds[1] + done[2] * seconds[2];
            fewest.iter_mut().zip(done).for_each(|(least, count)| *least = least.min(count));
        }
        for (least, shared_s) in fewest.into_iter().zip(own.shared) {
            sum_s += if shared_s > 0.0 { least * shared_s } else { 0.0 };
        }
        if own.vocab_s > 0.0 {
            sum_s += self.vocab.between(from, to, self.micro_batches) * own.vocab_s;
        }
        sum_s
    }
}

fn difference(until: PassCounts, before: PassCounts) -> PassCounts {
    [until[0] - before[0], until[1] - before[1], until[2] - before[2]]
}

#[cfg(test)]
mod tests;
