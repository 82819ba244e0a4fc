//! Dives: from search nodes straight to a configuration that is likely to be fast.

use super::layout::LayoutView;
use super::states::StateBounds;
use super::{Allowance, Expansion, SearchNode, Stage, Worker};
use crate::bounds::closed;
use crate::bounds::pipeline_spec::PipelineSpec;
use crate::bounds::recompute_knapsack::RecomputeKnapsack;
use crate::bounds::states::StateView;
use crate::bounds::workload::MicroBatchCost;
use models::decisions::Decisions;
use models::schedule::ScheduleName;
use std::sync::Arc;

/// Pipelines that a dive bounds with the recomputation that memory makes necessary. With 8, fewer
/// dives fit into a second: see docs/decisions/040.
const CHECKED: usize = 4;
/// Micro-batches times stages up to which an order of passes is generated in a dive: 10 ms.
const FEW_PASSES: u64 = 1 << 13;
/// Ranks that share parameter state in [`Worker::promise_s`], at most.
const USUAL_SHARDS: u64 = 64;
/// Candidate partitions that a dive prices at most of one configuration.
const CUTS: usize = 4;
/// Choices of parameter state that a dive tries until one fits.
const PROMISING: usize = 4;

/// Whether dives follow what has no room for its activations by [`Worker::promise_s`]: offloading
/// or a rank order may make room, but mostly it does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::search) enum Tight {
    Followed,
    LeftOut,
}

impl Worker<'_> {
    /// Follows what is most promising of some search nodes down to a parallel layout, and prices
    /// `breadth` of its pipelines, each with its most promising choice of parameter state.
    pub fn dive(
        &mut self,
        nodes: &[SearchNode],
        (best_s, work): (f64, u64),
        (breadth, tight): (usize, Tight),
    ) -> Expansion {
        let mut parts: Vec<SearchNode> = vec![];
        for node in nodes {
            // What a context takes depends on how it splits the experts.
            match &node.stage {
                Stage::Context(splits) => parts.extend(self.split(node, splits, best_s).parts),
                _ => parts.push(node.clone()),
            }
        }
        let (node, fused_loss) = loop {
            let promising = parts.into_iter().map(|part| (self.promise_s(&part), part));
            let least = promising.min_by(|a, b| a.0.0.total_cmp(&b.0.0));
            let follows = |((promise_s, _), _): &((f64, Option<bool>), SearchNode)| {
                (promise_s.is_finite() || tight == Tight::Followed) && !self.task.is_stopped()
            };
            let Some(((_, fused_loss), least)) = least.filter(follows) else {
                return Expansion::default();
            };
            parts = match &least.stage {
                Stage::ParallelLayout(group) if group.splits.len() > 1 => {
                    self.single_layouts(&least, group, best_s).parts
                }
                _ => break (least, fused_loss),
            };
        };
        self.with_layout(&node.decisions, |own, parallel| {
            own.price_pipelines((&node, fused_loss), parallel, (best_s, work), breadth)
        })
    }

    /// What a dive expects of a part of the space, with overheads, s: the least with 1F1B and a
    /// usual choice of parameter state; and whether the loss is fused then, where there is room.
    fn promise_s(&mut self, node: &SearchNode) -> (f64, Option<bool>) {
        let d = Decisions { schedule: ScheduleName::OneFOneB, vpp: 1, ..node.decisions.clone() };
        let choices = self.choices(&d);
        let layer_costs = self.cache.layer_costs(&d);
        let work = MicroBatchCost::new(&self.cache, &d, &layer_costs);
        let vocabs = || choices.schedules.iter().flat_map(|(.., vocabs)| vocabs);
        let is_open = |fused_loss: &bool| vocabs().any(|(_, other)| other == fused_loss);
        let works = [false, true].into_iter().filter(is_open).map(|fused_loss| {
            let vocabulary = self.cache.vocabulary(&Decisions { fused_loss, ..d.clone() });
            (work.with_vocabulary(&vocabulary), fused_loss)
        });
        let works: Vec<_> = works.collect();
        let spec = self.bare_spec(&self.no_transfer, &d);
        let (rank_order, offload) = (choices.rank_order[0], choices.offload[0]);
        let mut least = (f64::INFINITY, None);
        let by_stage: Vec<_> = choices.shards.chunk_by(|a, b| a.0 == b.0).collect();
        let (leanest, others) = (by_stage.last(), by_stage.iter().take(2));
        for shards in leanest.into_iter().chain(others) {
            let last = shards.len() - 1;
            let usual = shards.iter().rposition(|(_, size)| *size <= USUAL_SHARDS).unwrap_or(0);
            let mut tried = vec![shards[usual], shards[(usual + last) / 2], shards[last]];
            tried.dedup();
            let views = tried.into_iter().map(|(zero_stage, dp_shard)| {
                let d = Decisions { zero_stage, dp_shard, rank_order, offload, ..d.clone() };
                StateView::new(&self.cache, &d, &layer_costs.params)
            });
            for view in views {
                for (work, fused_loss) in &works {
                    let expected_s = self.expected_s(&spec, work, &view);
                    if expected_s < least.0 {
                        least = (expected_s, Some(*fused_loss));
                    }
                }
            }
        }
        least
    }

    /// What a dive expects of a choice of parameter state, with overheads, s: its bound with the
    /// recomputation that makes room for one micro-batch of all layers on the mean rank, as 1F1B's
    /// first rank has it; infinite where there is no room.
    pub(super) fn expected_s(
        &self,
        spec: &PipelineSpec,
        work: &MicroBatchCost,
        view: &StateView,
    ) -> f64 {
        let knapsack = RecomputeKnapsack::new(&work.kinds, spec.options());
        let ends = work.head.workspace_bytes + work.head.in_flight_bytes;
        let budget = self.budget_bytes(spec, work, view) - ends;
        let states = closed::mean_state_bytes(spec, work, view);
        let spent_s = knapsack.least_s(&work.counts, 1.0, budget - states);
        let with_state = view.added_to(work, spec);
        self.with_overheads_s(closed::with_state_s(spec, &with_state, view, spent_s))
    }

    /// Prices the pipelines of a layout that have the least bounds, with a given loss or any, at
    /// least one of them with one chunk a rank and one with several. Orders of passes that take
    /// long to generate are left out.
    fn price_pipelines(
        &mut self,
        (node, fused_loss): (&SearchNode, Option<bool>),
        parallel: &mut LayoutView,
        (best_s, work): (f64, u64),
        breadth: usize,
    ) -> Expansion {
        let allowed = Allowance { work, share: 1.0, most_cuts: CUTS };
        let all = self.pipeline_choices(&parallel.choices, &node.decisions).into_iter();
        let all = all.filter(|d| fused_loss.is_none_or(|fused| d.fused_loss == fused));
        let soon = |d: &Decisions| {
            let passes = d.pp * d.vpp * d.micro_batches;
            let known = !d.vocab.over_pipeline();
            let known = known && self.bare_spec(&self.no_transfer, d).is_known_without_order();
            passes <= FEW_PASSES || known
        };
        let all: Vec<Decisions> = all.filter(soon).collect();
        let of = |d: Decisions| (self.quick_s(parallel, &d, best_s), d);
        let mut bounded: Vec<_> = all.into_iter().map(of).collect();
        bounded.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (one, several): (Vec<_>, Vec<_>) = bounded.into_iter().partition(|(_, d)| d.vpp == 1);
        let mut nearest = self.with_least_bounds(parallel, one, best_s, breadth);
        nearest.extend(self.with_least_bounds(parallel, several, best_s, breadth));
        let mut expansion = Expansion::default();
        for (bound_s, decisions) in nearest {
            if bound_s >= expansion.bar_s(best_s) || self.task.is_stopped() {
                continue;
            }
            let stage = Stage::States(StateBounds::default());
            let node = SearchNode { bound_s, decisions, stage, count: 1 };
            self.price_promising(&node, parallel, (best_s, allowed), &mut expansion);
        }
        expansion
    }

    /// Of pipelines with their bounds, least first, those with the least bounds after the
    /// recomputation that memory makes necessary.
    fn with_least_bounds(
        &mut self,
        parallel: &mut LayoutView,
        bounded: Vec<(f64, Decisions)>,
        best_s: f64,
        most: usize,
    ) -> Vec<(f64, Decisions)> {
        let near = bounded.into_iter().take(CHECKED.max(most));
        let mut checked: Vec<_> = near
            .filter(|(bound_s, _)| *bound_s < best_s)
            .take_while(|_| !self.task.is_stopped())
            .map(|(bound_s, d)| {
                let checked = self.checked_s(parallel, &d, (best_s, best_s), false);
                (checked.bound_s.max(bound_s), d)
            })
            .collect();
        checked.sort_by(|a, b| a.0.total_cmp(&b.0));
        checked.truncate(most);
        checked
    }

    /// Prices a pipeline with the choices of parameter state that have the least bounds, until one
    /// is faster than the best so far.
    pub(super) fn price_promising(
        &mut self,
        node: &SearchNode,
        parallel: &mut LayoutView,
        (best_s, allowed): (f64, Allowance),
        expansion: &mut Expansion,
    ) {
        let (spec, work) = self.spec(parallel, &node.decisions);
        let states = Arc::clone(&parallel.states);
        let all = states.views().map(|view| (self.expected_s(&spec, &work, view), view));
        let mut views: Vec<_> = all.filter(|(expected_s, _)| expected_s.is_finite()).collect();
        views.sort_by(|a, b| a.0.total_cmp(&b.0));
        let before_s = expansion.bar_s(best_s);
        for (_, view) in views.into_iter().take(PROMISING) {
            let bound_s = self.state_s(&spec, &work, view).max(node.bound_s);
            let bar_s = expansion.bar_s(best_s);
            if bound_s >= bar_s || bar_s < before_s {
                break;
            }
            let d = view.of(&node.decisions);
            let Some(placed_s) = self.placed_state_s(&d, view, parallel, bar_s) else { continue };
            let bound_s = bound_s.max(placed_s);
            if bound_s < bar_s {
                self.price_state(d, view, parallel, ((bound_s, best_s), allowed), expansion);
            }
        }
    }
}
