//! A pipeline as the bounds see it: its order of passes by name, degrees, transfers and gaps.

use crate::partition::{OrderMilestones, VocabPath};
use crate::pricing::cost_cache::{CostCache, LayerCosts};
use crate::pricing::pipelines::PipelineKey;
use crate::pricing::recompute_split::options;
use crate::pricing::stage_transfers::{
    P2pTransfer, gap_s, p2p_transfer, transfer_blocks, vocab_path,
};
use models::decisions::{Decisions, RecomputePolicy, Vocab};
use models::schedule::{ScheduleName, StageLayout, VocabPasses};
use std::rc::Rc;

/// A pipeline as the bounds see it.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelineSpec {
    /// Order of passes.
    pub schedule: ScheduleName,
    /// Pipeline ranks, `p`.
    pub ranks: usize,
    /// Chunks per rank, `v`.
    pub chunks: usize,
    /// Micro-batches, `m`.
    pub micro_batches: usize,
    /// Lower bounds on the transfers between neighbouring ranks.
    pub transfers: Rc<P2pTransfer>,
    /// Upper bound on any of them, s.
    pub most_transfer_s: f64,
    /// Whether the transfer is part of both stages' passes; otherwise it is a latency.
    pub transfer_blocks: bool,
    /// The gap with which every pass starts, s.
    pub gap_s: f64,
    /// Where the vocabulary lives.
    pub vocab: Vocab,
    /// Vocabulary passes on each rank; the first and the last stage then hold no vocabulary layer.
    pub passes: Option<VocabPath>,
    /// What may be recomputed.
    pub recompute: RecomputePolicy,
}

impl PipelineSpec {
    /// The pipeline of `d`.
    pub fn new(cache: &CostCache<'_>, d: &Decisions, layer_costs: &LayerCosts) -> Self {
        let transfers = Rc::new(p2p_transfer(cache, d, layer_costs));
        let passes = vocab_path(cache, d, layer_costs);
        Self { passes, ..Self::bare(cache, d, transfers) }
    }

    /// The pipeline of `d` with these transfers, without vocabulary passes.
    pub fn bare(cache: &CostCache<'_>, d: &Decisions, transfers: Rc<P2pTransfer>) -> Self {
        Self {
            schedule: d.schedule,
            ranks: d.pp as usize,
            chunks: d.vpp as usize,
            micro_batches: d.micro_batches as usize,
            most_transfer_s: transfers.most_s(),
            transfers,
            transfer_blocks: transfer_blocks(cache, d),
            gap_s: gap_s(cache, d),
            vocab: d.vocab,
            passes: None,
            recompute: d.recompute,
        }
    }

    /// Micro-batches, `m`.
    pub fn m(&self) -> f64 {
        self.micro_batches as f64
    }

    /// Number of ranks that hold each stage.
    pub fn copies(&self) -> usize {
        self.layout().copies()
    }

    /// Micro-batches that a rank runs of each of its chunks.
    pub fn runs(&self) -> f64 {
        self.m() / self.copies() as f64
    }

    /// Forwards of each stage, and as many backwards, that are no part of a pair in any order. The
    /// micro-batch that goes back has been through the stage before, so the stage's first forward
    /// is in no pair, and its last backward neither. Of two copies one may pair its first forward
    /// with the other's backward.
    pub fn least_unpaired(&self) -> f64 {
        if self.copies() == 1 { 1.0 } else { 0.0 }
    }

    /// By chunk of a rank with one copy of its stages, forwards and backwards that are no part of a
    /// pair, at least.
    pub fn unpaired(&self, rank: usize) -> Vec<[f64; 2]> {
        let mut counts = vec![];
        match self.schedule {
            // Its warm-up, and as many of each chunk in the cooldown.
            ScheduleName::Overlapped1F1B => self.in_flight(rank, &mut counts),
            _ => counts.resize(self.chunks, self.least_unpaired() as usize),
        }
        counts.into_iter().map(|count| [count as f64; 2]).collect()
    }

    /// Whether micro-batches in flight and milestones are known without generating the order of
    /// passes.
    pub fn is_known_without_order(&self) -> bool {
        self.schedule.is_whole() || self.counted_milestones(0).is_some()
    }

    /// The algorithm of its vocabulary passes.
    pub fn vocab_passes(&self) -> Option<VocabPasses> {
        self.passes.and_then(|_| self.vocab.passes())
    }

    /// Whether the order of forwards and backwards depends on the configuration's own times.
    pub fn order_depends_on_times(&self) -> bool {
        self.vocab_passes().is_some() && self.schedule.room_depends_on_times()
    }

    /// Seconds of the vocabulary passes of a micro-batch, without those of the input layer alone.
    pub fn output_s(&self) -> f64 {
        self.passes.map_or(0.0, |path| path.output_s)
    }

    /// Seconds of the vocabulary passes of one micro-batch.
    pub fn passes_s(&self) -> f64 {
        self.passes.map_or(0.0, |path| path.passes_s)
    }

    /// Stages: p·v, or half as many on a bidirectional pipeline.
    pub fn stages(&self) -> usize {
        self.layout().stages(self.ranks, self.chunks)
    }

    /// Stages of a rank that hold parameters, at least: where the first and the last stage share a
    /// table, the last one may hold nothing.
    pub fn least_stages(&self) -> usize {
        if self.ends_meet() { 1 } else { self.chunks }
    }

    /// Which rank holds which stage.
    pub fn layout(&self) -> StageLayout {
        self.schedule.layout(self.chunks)
    }

    /// Whether the first and the last stage share their parameters ([`Self::layout`]).
    pub fn ends_meet(&self) -> bool {
        self.layout().ends_meet(self.ranks, self.stages())
    }

    /// The transfer from `stage` to the next one, s; 0 where both lie on one rank, or there is
    /// none.
    pub fn transfer_s(&self, stage: usize) -> f64 {
        let exists = self.ranks > 1 && stage + 1 < self.stages();
        if exists { self.transfers.behind_s(self.layout(), self.ranks, stage) } else { 0.0 }
    }

    /// The transfers of one micro-batch's forward path from the first stage to `stage`, s.
    pub fn transfers_to_s(&self, stage: usize) -> f64 {
        (0..stage).map(|before| self.transfer_s(before)).sum()
    }

    /// The transfers of one micro-batch's forward path through all stages, s.
    pub fn transfers_s(&self) -> f64 {
        match self.ranks {
            1 => 0.0,
            ranks => self.transfers.along_s(self.layout(), ranks, self.stages()),
        }
    }

    /// Those of them that are part of passes, s.
    pub fn blocking_s(&self) -> f64 {
        if self.transfer_blocks { self.transfers_s() } else { 0.0 }
    }

    /// Blocking transfers in the forward and in the backward of a stage, s.
    pub fn crossings_s(&self, stage: usize) -> (f64, f64) {
        if !self.transfer_blocks {
            return (0.0, 0.0);
        }
        (if stage > 0 { self.transfer_s(stage - 1) } else { 0.0 }, self.transfer_s(stage))
    }

    /// Upper bound on the blocking transfers in one pass, s.
    pub fn most_crossing_s(&self) -> f64 {
        if self.transfer_blocks && self.ranks > 1 { self.most_transfer_s } else { 0.0 }
    }

    /// The gaps of one micro-batch on one stage, s: of its forward, its backward, and its weight
    /// gradients where these are separate.
    pub fn gaps_s(&self) -> [f64; 3] {
        [self.gap_s, self.gap_s, if self.splits_backward() { self.gap_s } else { 0.0 }]
    }

    /// Whether the backward is split into input and weight gradients.
    pub fn splits_backward(&self) -> bool {
        self.schedule.splits_backward()
    }

    /// Micro-batches in flight on a rank of 1F1B that would hold `plain` without vocabulary passes.
    fn held_by_1f1b(&self, plain: usize) -> usize {
        let held = self.vocab.passes().map_or(plain, |passes| passes.in_flight(plain));
        held.min(self.micro_batches)
    }

    /// Indices into `Recompute::ALL` that layers may use.
    pub fn options(&self) -> &'static [usize] {
        options(self.recompute)
    }

    /// The key of its order of passes.
    pub fn key(&self) -> PipelineKey {
        PipelineKey {
            schedule: self.schedule,
            ranks: self.ranks,
            micro_batches: self.micro_batches,
            chunks: self.chunks,
            vocab: if self.vocab.over_pipeline() { self.vocab } else { Vocab::Tensor },
            post_validation: false,
            pass_times: None,
        }
    }

    /// The schedule whose order of passes it has: without vocabulary passes, two names may share
    /// one order.
    pub fn order(&self) -> ScheduleName {
        let Self { schedule, ranks, micro_batches, chunks, .. } = *self;
        let other = schedule.made_by_hand(ranks, micro_batches, chunks);
        other.filter(|_| self.passes.is_none()).unwrap_or(schedule)
    }

    /// Milestones of a rank's order, where they can be counted without generating it.
    pub fn counted_milestones(&self, rank: usize) -> Option<OrderMilestones> {
        let counts = (self.ranks, self.micro_batches, self.chunks);
        OrderMilestones::counted(self.order(), counts, rank, self.vocab_passes())
    }

    /// Micro-batches in flight of each chunk of a rank at a moment that every execution reaches:
    /// the end of its warm-up.
    pub fn in_flight(&self, rank: usize, counts: &mut Vec<usize>) {
        let (p, v, m) = (self.ranks, self.chunks, self.micro_batches);
        // Vocabulary passes need one more micro-batch in flight for each barrier.
        let room = self.vocab_passes().map_or(0, VocabPasses::barriers);
        // Of so many forwards, those of each chunk.
        let in_rounds = |forwards: usize| {
            let (rounds, rest) = (forwards.min(m * v) / (p * v), forwards.min(m * v) % (p * v));
            (0..v).map(move |chunk| rounds * p + rest.saturating_sub(chunk * p).min(p))
        };
        counts.clear();
        match self.order() {
            ScheduleName::Naive => counts.resize(v, 1),
            ScheduleName::GPipe | ScheduleName::LoopedBfs => counts.resize(v, m),
            ScheduleName::OneFOneB => counts.resize(v, self.held_by_1f1b(p - rank)),
            // Those of the warm-up, and of `interleaved_1f1b` one more.
            ScheduleName::Interleaved1F1B | ScheduleName::Overlapped1F1B => {
                counts.extend(in_rounds(2 * (p - 1 - rank) + (v - 1) * p + 1));
            }
            ScheduleName::ZbH1 => counts.resize(v, (p + room).min(m)),
            ScheduleName::ZbH2 => counts.resize(v, (2 * p - 1 + room).min(m)),
            // The forwards before the first weight gradients.
            ScheduleName::InterleavedZb => counts.extend(in_rounds((p + room) * v)),
            // The forwards before the first micro-batch is back: the memory limit leaves each rank
            // fewer than the one before.
            ScheduleName::ZbAuto if v == 1 && self.passes.is_none() => {
                counts.resize(v, (p - rank).min(m));
            }
            // Counted from the generated order (`ListedCuts::new`).
            _ => counts.resize(v, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use models::schedule::Release;

    fn spec(schedule: ScheduleName, (p, m): (usize, usize), vocab: Vocab) -> PipelineSpec {
        PipelineSpec {
            schedule,
            ranks: p,
            chunks: 1,
            micro_batches: m,
            transfers: Rc::new(P2pTransfer::none()),
            most_transfer_s: 0.0,
            transfer_blocks: false,
            gap_s: 0.0,
            vocab,
            passes: vocab.over_pipeline().then(VocabPath::default),
            recompute: RecomputePolicy::None,
        }
    }

    #[test]
    fn passes_counted_as_unpaired_are_in_no_pair() {
        let mut compared = 0;
        let chunks = |schedule| if schedule == ScheduleName::DualPipeV { 2..=2 } else { 1..=4 };
        let schedules = [ScheduleName::Overlapped1F1B, ScheduleName::DualPipeV];
        let all = schedules.into_iter().flat_map(|name| chunks(name).map(move |v| (name, v)));
        for (schedule, chunks) in all {
            for (p, m) in (1..=6).flat_map(|p| (1..=18).map(move |m| (p, m))) {
                let spec = PipelineSpec { chunks, ..spec(schedule, (p, m), Vocab::Tensor) };
                let Ok(order) = spec.key().schedule() else { continue };
                for (rank, (passes, pairs)) in order.passes.iter().zip(&order.pairs).enumerate() {
                    let mut unpaired = vec![[m as f64; 2]; chunks];
                    for &place in pairs {
                        for (of, pass) in passes[place as usize..].iter().take(2).enumerate() {
                            unpaired[usize::from(pass.chunk)][of] -= 1.0;
                        }
                    }
                    let counted = spec.unpaired(rank);
                    let what = format!("{schedule} p {p} m {m} v {chunks} rank {rank}");
                    if schedule == ScheduleName::Overlapped1F1B {
                        assert_eq!(counted, unpaired, "{what}");
                    }
                    let all = counted.iter().flatten().zip(unpaired.iter().flatten());
                    assert!(all.into_iter().all(|(counted, own)| counted <= own), "{what}");
                    compared += 1;
                }
            }
        }
        assert!(compared > 300, "{compared}");
    }

    #[test]
    fn counted_micro_batches_in_flight_are_a_lower_bound() {
        let mut least = 0;
        let plain = |schedule| (schedule, Vocab::Tensor);
        let over = [Vocab::ParallelNaive, Vocab::Parallel1, Vocab::Parallel2, Vocab::Interlaced];
        let split = [ScheduleName::ZbH1, ScheduleName::ZbH2, ScheduleName::InterleavedZb];
        let kinds = [&split[..], &[ScheduleName::ZbAuto]].concat().into_iter().map(plain);
        let with_passes = split.into_iter().flat_map(|s| over.map(|vocab| (s, vocab)));
        let kinds: Vec<_> = kinds.chain(with_passes).collect();
        for (p, m) in (2..=9).flat_map(|p| (1..=24).map(move |m| (p, m))) {
            for &(schedule, vocab) in &kinds {
                let chunks = if schedule == ScheduleName::InterleavedZb { 2 } else { 1 };
                let spec = PipelineSpec { chunks, ..spec(schedule, (p, m), vocab) };
                let Ok(order) = spec.key().schedule() else { continue };
                for rank in 0..p {
                    let mut counts = vec![];
                    spec.in_flight(rank, &mut counts);
                    let held = order.max_in_flight(rank, Release::AtW);
                    let is_reached = |held: &Vec<u32>| {
                        counts.iter().zip(held).all(|(count, held)| *count <= *held as usize)
                    };
                    let what = format!("{schedule} {vocab} p {p} m {m} rank {rank}");
                    assert!(held.iter().any(is_reached), "{what}: {counts:?} of {held:?}");
                    least += counts[0];
                }
            }
        }
        assert!(least > 60_000, "{least}");
    }
}
