//! Chimera: two pipelines of 1F1B in opposite directions over the same pipeline ranks.

use super::generate::{Counts, one_forward_one_backward, pass};
use super::{Pass, PassKind, Schedule, ScheduleError, ScheduleName, StageLayout};

/// Bidirectional: every pipeline rank holds two stages' parameters, and half the micro-batches go
/// either way. Each direction keeps 1F1B order; the two are merged by what can start first
/// (Chimera, arXiv 2107.06925, section 3.1). More than `p` micro-batches run in units of `p`, one
/// after the other (section 3.5).
///
/// `p` micro-batches take `2p + p − 2` passes where `F = B + W`; pipeline ranks hold `p/2 + 1` to
/// `p`.
///
/// # Errors
/// `p` is odd, or `m` is no multiple of `p`.
pub fn chimera(ranks: usize, micro_batches: usize) -> Result<Schedule, ScheduleError> {
    ScheduleName::Chimera.check(ranks, micro_batches, 2)?;
    let counts = Counts::new(ranks, micro_batches, 2)?;
    let unit = Merge::new(ranks).run();
    let shifted = |n: usize| {
        move |pass: &Pass| {
            let second = usize::from(pass.chunk) * micro_batches / 2;
            Pass { micro_batch: pass.micro_batch + (n * ranks / 2 + second) as u32, ..*pass }
        }
    };
    let units = micro_batches / ranks;
    let order = |unit: &Vec<Pass>| (0..units).flat_map(|n| unit.iter().map(shifted(n))).collect();
    let passes = unit.iter().map(order).collect();
    Ok(counts.schedule(StageLayout::Bidirectional, passes))
}

/// Relative lengths of passes in the merge.
const FORWARD: u64 = 1;
const BACKWARD: u64 = 2;

/// Both directions of `p` micro-batches, in a run where each pipeline rank takes what can start
/// first.
struct Merge {
    ranks: usize,
    /// By pipeline rank and direction: passes in 1F1B order and how many are done.
    queues: Vec<[(Vec<Pass>, usize); 2]>,
    free: Vec<u64>,
    /// Ends of forwards and backwards, by direction, stage and micro-batch.
    ends: [[Vec<Option<u64>>; 2]; 2],
    orders: Vec<Vec<Pass>>,
    /// By pipeline rank, its heads whose inputs are there, and when they were.
    ready: Vec<[Option<(u64, Pass)>; 2]>,
}

impl Merge {
    fn new(ranks: usize) -> Self {
        let each = ranks / 2;
        let queue = |stage: usize, chunk: usize| {
            let all = |kind| (0..each).map(move |k| pass(kind, k, chunk));
            let warm_up = ranks - 1 - stage;
            (one_forward_one_backward(all(PassKind::F), all(PassKind::BW), warm_up), 0)
        };
        let none = || vec![None; ranks * each];
        let mut merge = Self {
            ranks,
            queues: (0..ranks).map(|i| [queue(i, 0), queue(ranks - 1 - i, 1)]).collect(),
            free: vec![0; ranks],
            ends: [[none(), none()], [none(), none()]],
            orders: vec![Vec::new(); ranks],
            ready: vec![[None; 2]; ranks],
        };
        (0..ranks).for_each(|rank| merge.look_at(rank));
        merge
    }

    fn run(mut self) -> Vec<Vec<Pass>> {
        while let Some((start, rank, pass)) = self.earliest() {
            let length = if pass.kind == PassKind::F { FORWARD } else { BACKWARD };
            let (kind, chunk) = (usize::from(pass.kind != PassKind::F), usize::from(pass.chunk));
            let slot = self.slot(self.stage(rank, pass), pass);
            self.ends[kind][chunk][slot] = Some(start + length);
            self.free[rank] = start + length;
            self.queues[rank][chunk].1 += 1;
            self.orders[rank].push(pass);
            // Its own heads, and those of the neighbours that take its outputs.
            let last = self.ranks - 1;
            (rank.saturating_sub(1)..=(rank + 1).min(last)).for_each(|near| self.look_at(near));
        }
        self.orders
    }

    /// Finds the heads of a pipeline rank whose inputs are there.
    fn look_at(&mut self, rank: usize) {
        for direction in [0, 1] {
            let (order, done) = &self.queues[rank][direction];
            let head = order.get(*done).copied();
            self.ready[rank][direction] =
                head.and_then(|pass| Some((self.ready(rank, pass)?, pass)));
        }
    }

    fn stage(&self, rank: usize, pass: Pass) -> usize {
        StageLayout::Bidirectional.stage_of(self.ranks, rank, usize::from(pass.chunk))
    }

    fn slot(&self, stage: usize, pass: Pass) -> usize {
        stage * (self.ranks / 2) + pass.micro_batch as usize
    }

    /// What can start first; of several a backward, then the older micro-batch.
    fn earliest(&self) -> Option<(u64, usize, Pass)> {
        let startable = self.ready.iter().zip(&self.free).enumerate().flat_map(|(rank, own)| {
            let (heads, &free) = own;
            heads.iter().flatten().map(move |&(ready, pass)| (ready.max(free), rank, pass))
        });
        startable.min_by_key(|&(start, rank, pass)| {
            (start, pass.kind == PassKind::F, pass.micro_batch, rank, pass.chunk)
        })
    }

    fn ready(&self, rank: usize, pass: Pass) -> Option<u64> {
        let (stage, chunk) = (self.stage(rank, pass), usize::from(pass.chunk));
        let [forwards, backwards] = [&self.ends[0][chunk], &self.ends[1][chunk]];
        match pass.kind {
            PassKind::F if stage == 0 => Some(0),
            PassKind::F => forwards[self.slot(stage - 1, pass)],
            _ if stage + 1 == self.ranks => forwards[self.slot(stage, pass)],
            _ => backwards[self.slot(stage + 1, pass)],
        }
    }
}
