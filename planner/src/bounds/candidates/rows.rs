//! The longest chain of passes through each pipeline rank of a candidate partition.

use super::listed_cuts::{Shape, holds_all};
use super::path_seconds::PathSeconds;
use super::{ListedBound, ListedCuts, load_s, params_of};
use crate::bounds::workload::{KindCost, VocabEnd};
use crate::partition::milestones::{ArrivalTimes, OwnSeconds};
use crate::pricing::layers::Counts;

impl ListedBound<'_> {
    /// The longest chain over some ranks, s, where each rank recomputes for `recompute_s` per
    /// micro-batch. Stops at the first chain that reaches `limit_s`.
    pub(super) fn rows_s(
        &self,
        candidates: &ListedCuts,
        candidate: &Shape,
        ranks: impl Iterator<Item = usize>,
        limit_s: f64,
        recompute_s: impl Fn(usize) -> f64,
    ) -> f64 {
        if self.spec.copies() > 1 {
            return self.bidirectional_rows_s(candidates, candidate, limit_s, recompute_s);
        }
        if !candidates.milestones.is_empty() {
            return self.milestone_rows_s(candidates, candidate, limit_s, recompute_s);
        }
        let (mut longest_s, mut recomputing_s) = (0.0_f64, 0.0);
        for rank in ranks {
            let own_s = recompute_s(rank);
            longest_s = longest_s.max(self.row_s(candidate, rank, own_s));
            if longest_s >= limit_s {
                return longest_s;
            }
            recomputing_s += own_s;
        }
        let latency_s = 2.0 * (self.spec.transfers_s() - self.spec.blocking_s());
        let total_s = self.whole_s() + recomputing_s;
        let path_s = total_s + latency_s + self.others_s(candidate, total_s);
        longest_s.max(path_s) + self.tail_s(candidate, 0)
    }

    /// [`Self::rows_s`] with the chains between milestones.
    pub(super) fn milestone_rows_s(
        &self,
        candidates: &ListedCuts,
        candidate: &Shape,
        limit_s: f64,
        recompute_s: impl Fn(usize) -> f64,
    ) -> f64 {
        let spec = self.spec;
        // A rank runs all its passes, however long it waits for them.
        let (mut longest_s, head) = (0.0_f64, self.head_rank());
        for rank in [candidate.fullest, 0, head] {
            let layers_s = load_s(self.work, &candidate.ranks[rank].layers);
            let ends = [(0, &self.work.embedding), (head, &self.work.head)];
            let here = ends.iter().filter(|(at, _)| *at == rank && spec.passes.is_none());
            let ends_s: f64 = here.map(|(_, end)| end.load_s()).sum();
            let own_s = spec.m() * (layers_s + ends_s + recompute_s(rank) + spec.passes_s());
            longest_s = longest_s.max(own_s);
            if longest_s >= limit_s {
                return longest_s;
            }
        }
        let path = PathSeconds::new(spec, self.work, &candidate.stages);
        let (mut recomputing_s, mut chunks) = (0.0, vec![]);
        for (rank, milestones) in candidates.milestones.iter().enumerate() {
            let shared_s = recompute_s(rank);
            let stage_of = |chunk: usize| spec.layout().stage_of(spec.ranks, rank, chunk);
            chunks.clear();
            chunks.extend((0..spec.chunks).map(|chunk| path.seconds[stage_of(chunk)]));
            let shared = [0.0, shared_s, 0.0];
            let own = OwnSeconds { chunks: &chunks, shared, vocab_s: spec.output_s() };
            let around = ArrivalTimes {
                arrive_s: path.down_s[rank],
                ready_s: path.round_trip_s(0, stage_of(milestones.first_chunk)),
                path_s: path.round_trip_s(rank + 1, rank) + path.link_s(rank),
            };
            let ends = milestones.ends(&own, &around);
            let tail_s = self.tail_s(candidate, rank);
            let last_s = ends.last_backward_s + path.back_s[rank];
            longest_s = longest_s.max(ends.own_s + tail_s).max(last_s);
            let unpaired_s = candidates.unpaired_s(spec, self.work, (candidate, rank));
            if unpaired_s > 0.0 {
                let passes_s = chunks.iter().flatten().sum::<f64>() + shared_s;
                let own_s = around.arrive_s + spec.m() * passes_s + unpaired_s;
                longest_s = longest_s.max(own_s + tail_s);
            }
            if longest_s >= limit_s {
                return longest_s;
            }
            recomputing_s += shared_s;
        }
        longest_s.max(path.round_trip_s(0, 0) + path.first_backward_s() + recomputing_s)
    }

    /// What one micro-batch's forward and backward path waits for the other micro-batches, s. GPipe
    /// and breadth-first loops run the other m − 1 forwards of the stage with the longest forward
    /// before the last micro-batch goes on, and as many backwards of some stage before the first
    /// micro-batch goes back.
    pub(super) fn others_s(&self, candidate: &Shape, total_s: f64) -> f64 {
        let (spec, work) = (self.spec, self.work);
        if !holds_all(spec) || spec.micro_batches == 1 {
            return 0.0;
        }
        let layers_s = |counts: &Counts, value: fn(&KindCost) -> f64| -> f64 {
            work.kinds.iter().zip(counts).map(|(kind, &count)| count as f64 * value(kind)).sum()
        };
        let last = candidate.stages.len() - 1;
        let end_s = |stage: usize, value: fn(&VocabEnd) -> f64| {
            let ends = [(0, &work.embedding), (last, &work.head)];
            let here = ends.into_iter().filter(|(at, _)| *at == stage && spec.passes.is_none());
            here.map(|(_, end)| value(end)).sum::<f64>()
        };
        // Every inner stage receives.
        let least_s = if spec.transfer_blocks { spec.transfers.least_s() } else { 0.0 };
        let crossing_s = if spec.ranks > 1 { least_s } else { 0.0 } + spec.gap_s;
        let longest_s = |of_kind: fn(&KindCost) -> f64, of_end: fn(&VocabEnd) -> f64| {
            let ends = [0, last]
                .map(|stage| layers_s(&candidate.stages[stage], of_kind) + end_s(stage, of_end));
            let inner = candidate.inner.iter().map(|counts| layers_s(counts, of_kind) + crossing_s);
            inner.chain(ends).fold(0.0, f64::max)
        };
        let forward_s = longest_s(|kind| kind.forward_s, |end| end.forward_s);
        let backward_s = longest_s(|kind| kind.backward_s, |end| end.backward_s);
        (spec.m() - 1.0) * (forward_s + backward_s).max(total_s / spec.stages() as f64)
    }

    /// Lower bound on the exposed reductions of a rank with one copy of its stages, s.
    pub(super) fn tail_s(&self, candidate: &Shape, rank: usize) -> f64 {
        let layers = &candidate.ranks[rank].layers;
        let mut params = params_of(self.work, layers);
        let (embedding, head) = (&self.work.embedding, &self.work.head_of(self.spec));
        // With vocabulary passes every rank holds a shard of both.
        let over_pipeline = self.spec.passes.is_some();
        for (at, end) in [(0, embedding), (self.head_rank(), head)] {
            params.dense += if over_pipeline || at == rank { end.params } else { 0.0 };
        }
        let hidden_in_s = self.backward_s(layers, rank);
        self.state.tail_of_s(params, self.spec.least_stages(), hidden_in_s)
    }

    /// Upper bound on the backward of one micro-batch on a rank, s; infinite where it is not known.
    pub(super) fn backward_s(&self, layers: &Counts, rank: usize) -> f64 {
        let (spec, work) = (self.spec, self.work);
        if self.state.in_passes() {
            return f64::INFINITY;
        }
        let kinds = work.kinds.iter().zip(layers);
        let layers_s: f64 = kinds.map(|(kind, &count)| count as f64 * kind.backward_s).sum();
        let ends = [(0, &work.embedding), (self.head_rank(), &work.head)];
        let here = ends.iter().filter(|(at, _)| *at == rank);
        let ends_s: f64 = here.map(|(_, end)| end.backward_s).sum();
        let [_, backward_s, weight_s] = spec.gaps_s();
        let each_s = spec.most_crossing_s() + backward_s + weight_s;
        layers_s + ends_s + spec.chunks as f64 * each_s
    }

    /// The rank of the output layer.
    pub(super) fn head_rank(&self) -> usize {
        self.spec.layout().rank_of(self.spec.ranks, self.spec.stages() - 1)
    }

    /// The chain of one rank, s.
    pub(super) fn row_s(&self, candidate: &Shape, rank: usize, recompute_s: f64) -> f64 {
        let (spec, work) = (self.spec, self.work);
        let layers_s = load_s(work, &candidate.ranks[rank].layers);
        let stage_of = |chunk: usize| spec.layout().stage_of(spec.ranks, rank, chunk);
        let crossings_s: f64 = (0..spec.chunks)
            .map(|chunk| spec.crossings_s(stage_of(chunk)))
            .map(|(forward_s, backward_s)| forward_s + backward_s)
            .sum();
        let gaps_s = spec.chunks as f64 * spec.gaps_s().iter().sum::<f64>();
        let mut own_s = layers_s + recompute_s + crossings_s + gaps_s + spec.output_s();
        let mut ramp_s = 0.0;
        let head = self.head_rank();
        let bidirectional = spec.copies() > 1;
        if spec.passes.is_none() {
            let ends = [(0, &work.embedding), (head, &work.head)];
            let here = |at: usize| at == rank || bidirectional && spec.ranks - 1 - at == rank;
            own_s += ends.iter().filter(|end| here(end.0)).map(|end| end.1.load_s()).sum::<f64>();
            ramp_s += if rank > 0 { work.embedding.load_s() } else { 0.0 };
        }
        if rank > 0 {
            ramp_s += load_s(work, &candidate.before[rank]);
            // Where transfers block, that to this rank is part of its own passes.
            let last_s = if spec.transfer_blocks { spec.transfer_s(rank - 1) } else { 0.0 };
            ramp_s += 2.0 * spec.transfers_to_s(rank) - last_s;
            ramp_s += 2.0 * spec.gap_s * rank as f64;
        }
        // A bidirectional rank may be nearer to the other end, and separate weight gradients fill a
        // rank's waits: no ramp is certain there.
        let ramp_s = if spec.schedule.is_whole() { ramp_s } else { 0.0 };
        ramp_s + spec.runs() * own_s
    }
}
