//! Common parts of the generators: checked counts and the making of passes.

use super::{Pass, PassKind, Schedule, ScheduleError, StageLayout};
use std::collections::VecDeque;

/// Pipeline ranks, micro-batches and chunks, all within what a [`Pass`] can hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counts {
    pub ranks: usize,
    pub micro_batches: usize,
    pub chunks: usize,
}

impl Counts {
    pub fn new(ranks: usize, micro_batches: usize, chunks: usize) -> Result<Self, ScheduleError> {
        within("ranks", ranks, 1 << 20)?;
        within("micro-batches", micro_batches, 1 << 24)?;
        within("chunks per pipeline rank", chunks, 1 << 10)?;
        Ok(Self { ranks, micro_batches, chunks })
    }

    /// A schedule of these counts, without vocabulary passes and pairs.
    pub fn schedule(self, layout: StageLayout, passes: Vec<Vec<Pass>>) -> Schedule {
        let Self { ranks, micro_batches, chunks } = self;
        let pairs = vec![Vec::new(); ranks];
        Schedule { ranks, chunks, micro_batches, layout, vocab: None, passes, pairs }
    }
}

fn within(what: &'static str, value: usize, most: usize) -> Result<(), ScheduleError> {
    match value {
        0 => Err(ScheduleError::Count { what, value, most }),
        _ if value > most => Err(ScheduleError::Count { what, value, most }),
        _ => Ok(()),
    }
}

/// A pass; [`Counts`] has made sure that the numbers fit.
pub(super) fn pass(kind: PassKind, micro_batch: usize, chunk: usize) -> Pass {
    Pass { kind, micro_batch: micro_batch as u32, chunk: chunk as u16 }
}

/// 1F1B: `warm_up` forwards first, then forward and backward in turn, then the remaining backwards.
pub(super) fn one_forward_one_backward(
    forwards: impl Iterator<Item = Pass>,
    backwards: impl Iterator<Item = Pass>,
    warm_up: usize,
) -> Vec<Pass> {
    let (mut forwards, mut backwards) = (forwards, backwards);
    let mut order: Vec<Pass> = forwards.by_ref().take(warm_up).collect();
    for forward in forwards {
        order.push(forward);
        order.extend(backwards.next());
    }
    order.extend(backwards);
    order
}

/// 1F1B with split backwards: `warm_up` forwards; then backward to inputs, backward to weights of
/// the oldest once `lag` of them wait, and forward, in turn; the rest in the same order.
///
/// Items are micro-batch and chunk.
pub(super) fn split_backward(
    forwards: impl Iterator<Item = (usize, usize)>,
    backwards: impl Iterator<Item = (usize, usize)> + Clone,
    warm_up: usize,
    lag: usize,
) -> Vec<Pass> {
    let of = |kind: PassKind| move |(k, chunk): (usize, usize)| pass(kind, k, chunk);
    let (mut forwards, mut weights) = (forwards.map(of(PassKind::F)), backwards.clone());
    let mut order: Vec<Pass> = forwards.by_ref().take(warm_up).collect();
    for (n, item) in backwards.enumerate() {
        order.push(of(PassKind::B)(item));
        if n >= lag {
            order.extend(weights.next().map(of(PassKind::W)));
        }
        order.extend(forwards.next());
    }
    order.extend(weights.map(of(PassKind::W)));
    order
}

/// A pipeline rank's order under construction. Each kind of pass of a chunk takes the micro-batches
/// in turn.
pub(super) struct Steps {
    /// By kind (forward, backward) and chunk, passes so far.
    counts: [[usize; 2]; 2],
    /// Waiting weight gradients, oldest first.
    waiting: VecDeque<(usize, usize)>,
    /// The order.
    pub order: Vec<Pass>,
    /// Positions of forwards that run together with the next backward.
    pub pairs: Vec<u32>,
}

impl Steps {
    pub fn new() -> Self {
        let (counts, waiting) = ([[0; 2]; 2], VecDeque::new());
        Self { counts, waiting, order: Vec::new(), pairs: Vec::new() }
    }

    /// Forwards of a chunk so far.
    pub fn forwards(&self, chunk: usize) -> usize {
        self.counts[0][chunk]
    }

    pub fn forward(&mut self, chunk: usize) {
        let k = self.next(0, chunk);
        self.order.push(pass(PassKind::F, k, chunk));
    }

    /// Backward to inputs; its weight gradients wait.
    pub fn backward(&mut self, chunk: usize) {
        let k = self.next(1, chunk);
        self.order.push(pass(PassKind::B, k, chunk));
        self.waiting.push_back((k, chunk));
    }

    pub fn whole_backward(&mut self, chunk: usize) {
        let k = self.next(1, chunk);
        self.order.push(pass(PassKind::BW, k, chunk));
    }

    /// Forward of one chunk together with the whole backward of the other.
    pub fn pair(&mut self, forward: usize) {
        self.pairs.push(self.order.len() as u32);
        self.forward(forward);
        self.whole_backward(1 - forward);
    }

    /// Weight gradients of the oldest waiting backward, of one chunk or of any; whether there was
    /// any.
    pub fn weights(&mut self, chunk: Option<usize>) -> bool {
        let wanted = |&(_, c): &(usize, usize)| chunk.is_none_or(|chunk| chunk == c);
        let found = self.waiting.iter().position(wanted).and_then(|at| self.waiting.remove(at));
        self.order.extend(found.map(|(k, chunk)| pass(PassKind::W, k, chunk)));
        found.is_some()
    }

    fn next(&mut self, kind: usize, chunk: usize) -> usize {
        let count = &mut self.counts[kind][chunk];
        *count += 1;
        *count - 1
    }
}
