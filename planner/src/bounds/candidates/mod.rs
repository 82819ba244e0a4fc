//! Bounds of candidate partitions by chains of passes.
//!
//! Rank `i` starts when the first micro-batch has passed the first chunks of the ranks before it.
//! It runs all micro-batches of all its chunks one after another, and then the last micro-batch
//! goes back through those first chunks to rank 0, whose reductions come last. In the naive, GPipe,
//! 1F1B, interleaved and breadth-first orders each pass of that chain depends on the one before it.
//! In other orders the chains are those between the milestones of each rank
//! ([`crate::partition::milestones`]).

mod bidirectional;
mod listed_cuts;
pub(super) mod path_seconds;
mod rows;

pub use listed_cuts::{ListedCuts, ListedCutsKey, Shapes};

use super::closed;
use super::pipeline_spec::PipelineSpec;
use super::recompute_knapsack::RecomputeKnapsack;
use super::states::StateView;
use super::workload::{KindCost, MicroBatchCost, VocabEnd};
use crate::cost::state::LocalParams;
use crate::pricing::layers::Counts;
use crate::pricing::recompute_ladder::{LadderOrder, RecomputeLadder};
use listed_cuts::{ChunkGroup, RankChunks, Shape, holds_all};

/// Computes the bounds of candidate partitions.
#[derive(Clone, Copy)]
pub struct ListedBound<'a> {
    /// The pipeline.
    pub spec: &'a PipelineSpec,
    /// One micro-batch, with the communication that the parameter state adds to its passes.
    pub work: &'a MicroBatchCost,
    /// The parameter state.
    pub state: &'a StateView,
    /// Device memory for parameter state and activations; infinite where memory is ignored.
    pub budget_bytes: f64,
}

impl ListedBound<'_> {
    /// Lower bound on the passes and the reductions of rank 0 over all candidates, s; infinite
    /// where none fits. A value of `limit_s` or more only proves that every candidate takes
    /// `limit_s` or more.
    pub fn bound_s(&self, candidates: &ListedCuts, limit_s: f64) -> f64 {
        let knapsack = RecomputeKnapsack::new(&self.work.kinds, self.spec.options());
        let mut least_s = f64::INFINITY;
        for &position in &candidates.shapes.evenest_first {
            let candidate = &candidates.shapes.shapes[position];
            least_s = least_s.min(self.candidate_s(
                candidates,
                candidate,
                &knapsack,
                limit_s.min(least_s),
            ));
        }
        least_s
    }

    /// The candidates below `limit_s`, by index, with their bounds.
    pub fn below(&self, candidates: &ListedCuts, limit_s: f64) -> Vec<(usize, f64)> {
        let knapsack = RecomputeKnapsack::new(&self.work.kinds, self.spec.options());
        let of = |candidate| self.candidate_s(candidates, candidate, &knapsack, limit_s);
        let bounds = candidates.shapes.shapes.iter().map(of).enumerate();
        bounds.filter(|(_, bound_s)| *bound_s < limit_s).collect()
    }

    /// The bound of one candidate; infinite where it does not fit. A value of `limit_s` or more
    /// only proves that the candidate takes `limit_s` or more.
    fn candidate_s(
        &self,
        candidates: &ListedCuts,
        candidate: &Shape,
        knapsack: &RecomputeKnapsack,
        limit_s: f64,
    ) -> f64 {
        let pinned_s = |rank: usize| knapsack.at_first(&candidate.ranks[rank].layers).0;
        let free_s = self.rows_s(
            candidates,
            candidate,
            candidate.corners.iter().copied(),
            limit_s,
            pinned_s,
        );
        if free_s >= limit_s {
            return free_s;
        }
        if self.budget_bytes == f64::INFINITY {
            return free_s;
        }
        self.fitting_s(candidates, candidate, knapsack, (free_s, limit_s))
    }

    /// The bound with the recomputation that memory makes necessary.
    fn fitting_s(
        &self,
        candidates: &ListedCuts,
        candidate: &Shape,
        knapsack: &RecomputeKnapsack,
        (free_s, limit_s): (f64, f64),
    ) -> f64 {
        let p = self.spec.ranks;
        let all = || 0..p;
        let chunks_of = |rank: usize| &candidate.ranks[rank];
        let free = |rank: usize| self.free_bytes(candidate, rank, candidates.held[rank]);
        if self.spec.chunks == 1 {
            let needs_s = |rank: usize| {
                let of = &candidate.ranks[rank];
                knapsack.least_s(&of.layers, candidates.held[rank].0 * self.scale(), free(rank))
            };
            return self.rows_s(candidates, candidate, all(), limit_s, needs_s);
        }
        // Pipelines that do not fit mostly fail on rank 0.
        if !self.leanest_fits(candidates, &candidate.ranks[0], free(0)) {
            return f64::INFINITY;
        }
        if candidates.holds_nothing {
            return free_s;
        }
        if let Some(most) = &candidates.open {
            let needs_s = |rank: usize| {
                self.any_split_s(candidates, chunks_of(rank), knapsack, (most[rank], free(rank)))
            };
            return self.rows_s(candidates, candidate, all(), limit_s, needs_s);
        }
        let orders = RecomputeLadder::orders(self.spec.recompute);
        let mut least_s = f64::INFINITY;
        for &order in orders {
            // Ranks `i` and `p − 1 − i` hold the same stages.
            let apart = p / self.spec.copies();
            let (mut recompute_s, mut any, mut beyond_s) = (vec![0.0; apart], false, None);
            for (rank, own_s) in recompute_s.iter_mut().enumerate() {
                *own_s = self.ladder_s(candidates, chunks_of(rank), order, free(rank));
                any |= *own_s > 0.0;
                // The first ranks hold most. Once one of them reaches the limit, the rest need not
                // be looked at.
                beyond_s =
                    Some(self.row_s(candidate, rank, *own_s)).filter(|row_s| *row_s >= limit_s);
                if beyond_s.is_some() {
                    break;
                }
            }
            if !any {
                // Without recomputation the bound is the one that ignores memory.
                return least_s.min(free_s);
            }
            let own_s = |rank: usize| recompute_s[if rank < apart { rank } else { p - 1 - rank }];
            let rows_s = || self.rows_s(candidates, candidate, all(), limit_s, own_s);
            least_s = least_s.min(beyond_s.unwrap_or_else(rows_s));
        }
        least_s
    }

    /// Micro-batches per count of [`ListedCuts`].
    fn scale(&self) -> f64 {
        if holds_all(self.spec) { self.spec.m() } else { 1.0 }
    }

    /// Bytes left on a rank for the activations of layers.
    fn free_bytes(&self, candidate: &Shape, rank: usize, held: (f64, f64)) -> f64 {
        let mut params = params_of(self.work, &candidate.ranks[rank].layers);
        let mut fixed = 0.0;
        let (embedding, head) = (&self.work.embedding, &self.work.head_of(self.spec));
        if self.spec.passes.is_some() {
            params.dense += embedding.params + head.params;
        } else {
            let mut hold = |end: &VocabEnd, held: f64| {
                params.dense += end.params;
                fixed += end.workspace_bytes + held * self.scale() * end.in_flight_bytes;
            };
            if self.spec.copies() > 1 {
                // Either end of a bidirectional pipeline holds both vocabulary layers, one per
                // direction.
                if rank == 0 || rank + 1 == self.spec.ranks {
                    let (first, second) =
                        if rank == 0 { (embedding, head) } else { (head, embedding) };
                    hold(first, held.0);
                    hold(second, held.1);
                }
            } else {
                if rank == 0 {
                    hold(embedding, held.0);
                }
                if rank == self.head_rank() {
                    hold(head, held.1);
                }
            }
        }
        // Another order of summation must not rule out what just fits.
        self.budget_bytes * (1.0 + 1e-9) - self.state.bytes_of(params) - fixed
    }

    fn leanest_fits(&self, candidates: &ListedCuts, rank: &RankChunks, free: f64) -> bool {
        let options = self.spec.options();
        let leanest = |kind: &KindCost| {
            options.iter().map(|&option| kind.saved_bytes[option]).fold(f64::INFINITY, f64::min)
        };
        let of = |(alike, held): (&ChunkGroup, &f64)| {
            let layers = self.work.kinds.iter().zip(&alike.layers);
            held * layers.map(|(kind, &count)| count as f64 * leanest(kind)).sum::<f64>()
        };
        let alike = rank.alike.iter().zip(candidates.held_on(rank));
        alike.map(of).sum::<f64>() * self.scale() <= free
    }

    /// Relaxed recomputation of a rank, s, where every recompute split is allowed: the bytes beyond
    /// its memory must be saved, and a second of recomputation saves a layer's bytes at most as
    /// often as micro-batches of a chunk are in flight (`most_held`).
    fn any_split_s(
        &self,
        candidates: &ListedCuts,
        rank: &RankChunks,
        knapsack: &RecomputeKnapsack,
        (most_held, free): (f64, f64),
    ) -> f64 {
        let first_s = knapsack.at_first(&rank.layers).0;
        let of = |(alike, held): (&ChunkGroup, &f64)| held * knapsack.at_first(&alike.layers).1;
        let alike = rank.alike.iter().zip(candidates.held_on(rank));
        let held = alike.map(of).sum::<f64>() * self.scale();
        let excess = (held - free) / (most_held * self.scale());
        if excess <= 0.0 { first_s } else { knapsack.saving_s(&rank.layers, first_s, excess) }
    }

    /// Recomputation on the lowest rung at which a rank fits, s, at one moment that every execution
    /// reaches.
    fn ladder_s(
        &self,
        candidates: &ListedCuts,
        rank: &RankChunks,
        order: LadderOrder,
        free: f64,
    ) -> f64 {
        let ladder = RecomputeLadder::new(order, self.spec.recompute, rank.longest);
        let rung = ladder.least(|rung| self.held_bytes(candidates, rank, ladder, rung) <= free);
        let Some(rung) = rung else { return f64::INFINITY };
        rank.alike
            .iter()
            .map(|alike| alike.chunks * self.stage_s(ladder, rung, &alike.layers))
            .sum()
    }

    fn held_bytes(
        &self,
        candidates: &ListedCuts,
        rank: &RankChunks,
        ladder: RecomputeLadder,
        rung: usize,
    ) -> f64 {
        let of = |(alike, held): (&ChunkGroup, &f64)| {
            let (each, buffer) = self.stage_bytes(ladder, rung, &alike.layers);
            held * self.scale() * each + alike.chunks * buffer
        };
        rank.alike.iter().zip(candidates.held_on(rank)).map(of).sum()
    }

    /// Activation bytes of a micro-batch in a stage, and the bytes of its recompute buffer.
    fn stage_bytes(&self, ladder: RecomputeLadder, rung: usize, layers: &Counts) -> (f64, f64) {
        let (mut each, mut buffer) = (0.0, 0.0_f64);
        for (kind, &count) in self.work.kinds.iter().zip(layers) {
            let split = ladder.split(rung, count);
            let layers = split.iter().zip(kind.saved_bytes);
            each += layers.map(|(&count, bytes)| count as f64 * bytes).sum::<f64>();
            let leanest = (1..3).rev().find(|&option| split[option] > 0).unwrap_or(0);
            buffer = buffer.max(kind.saved_bytes[0] - kind.saved_bytes[leanest]);
        }
        (each, buffer)
    }

    fn stage_s(&self, ladder: RecomputeLadder, rung: usize, layers: &Counts) -> f64 {
        let of = |(kind, &count): (&KindCost, &usize)| -> f64 {
            let split = ladder.split(rung, count);
            (0..3).map(|option| split[option] as f64 * kind.recompute_s[option]).sum()
        };
        self.work.kinds.iter().zip(layers).map(of).sum()
    }

    /// One micro-batch's forward and backward over the whole model, s.
    fn whole_s(&self) -> f64 {
        let (spec, work) = (self.spec, self.work);
        let ends_s = closed::ends_s(spec, work);
        work.load_s() + ends_s + 2.0 * (spec.blocking_s() + spec.stages() as f64 * spec.gap_s)
    }
}

fn load_s(work: &MicroBatchCost, counts: &Counts) -> f64 {
    work.kinds.iter().zip(counts).map(|(kind, &count)| count as f64 * kind.load_s()).sum()
}

fn params_of(work: &MicroBatchCost, counts: &Counts) -> LocalParams {
    let all = work.kinds.iter().zip(counts);
    all.fold(LocalParams::default(), |sum, (kind, &count)| sum + kind.params * count as f64)
}
