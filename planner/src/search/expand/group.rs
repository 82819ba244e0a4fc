//! Expands parallel layouts: from one bound for a whole layout to a bound for each of its
//! pipelines.

use super::layout::LayoutView;
use super::pipeline_bounds::{BoundSource, PipelineBound};
use super::states::StateBounds;
use super::{Expansion, SearchNode, Stage, Worker};
use crate::request::space::ExpertSplit;
use std::sync::Arc;

/// Parallel layouts that differ only in how the all-to-all is overlapped, or a single one.
#[derive(Clone, Debug)]
pub(in crate::search) struct Group {
    /// The expert splits, one per layout.
    pub(super) splits: Arc<[ExpertSplit]>,
    /// By pipeline, as ordered by [`Worker::pipeline_choices`]; empty before the first is bounded.
    bounds: Arc<[PipelineBound]>,
}

/// How far beyond its bound a layout is looked into at a time, as a factor. What is put back may be
/// pruned in the meantime.
const LAYOUT_LOOK_AHEAD: f64 = 1.1;
/// How far beyond that limit the bound of a single pipeline is tightened, as a factor.
const TIGHTEN_AHEAD: f64 = 1.2;

impl Group {
    pub(super) fn new(splits: Arc<[ExpertSplit]>) -> Self {
        Self { splits, bounds: Arc::from([]) }
    }

    /// One layout of the group. A bound for all layouts holds for each.
    fn single(&self, split: ExpertSplit) -> Self {
        let of_others =
            |bound: &PipelineBound| PipelineBound { source: BoundSource::Others, ..*bound };
        Self { splits: Arc::from([split]), bounds: self.bounds.iter().map(of_others).collect() }
    }
}

impl Worker<'_> {
    /// The parallel layouts in a search node that may take less than `limit_s` (with overheads),
    /// least bound first.
    pub fn layouts_below(&mut self, node: &SearchNode, limit_s: f64) -> Vec<SearchNode> {
        let (mut parts, mut layouts) = (vec![node.clone()], vec![]);
        while let Some(part) = parts.pop() {
            match &part.stage {
                Stage::Context(splits) => parts.extend(self.split(&part, splits, limit_s).parts),
                Stage::ParallelLayout(group) if group.splits.len() > 1 => {
                    parts.extend(self.single_layouts(&part, group, limit_s).parts);
                }
                _ => layouts.push(part),
            }
        }
        layouts.sort_by(|a, b| a.bound_s.total_cmp(&b.bound_s));
        layouts
    }

    /// Expands a group into its layouts.
    pub(super) fn single_layouts(
        &mut self,
        node: &SearchNode,
        group: &Group,
        best_s: f64,
    ) -> Expansion {
        let mut expansion = Expansion::default();
        let count = node.count / group.splits.len() as u64;
        for split in group.splits.iter() {
            self.bound_splits(node, group.single(*split), (count, best_s), &mut expansion);
        }
        expansion
    }

    /// Bounds layouts of a search node by their layers, and adds them to its parts.
    pub(super) fn bound_splits(
        &mut self,
        node: &SearchNode,
        group: Group,
        (count, best_s): (u64, f64),
        expansion: &mut Expansion,
    ) {
        let decisions = group.splits[0].of(&node.decisions);
        let work = self.least_work(&decisions, &group.splits);
        let (degrees, knapsack) = ((decisions.pp, decisions.micro_batches), self.knapsack(&work));
        let bound_s = self.layers_s(degrees, &work, &knapsack).max(node.bound_s);
        if bound_s >= best_s {
            expansion.cut_by_time += count;
        } else {
            let stage = Stage::ParallelLayout(group);
            expansion.parts.push(SearchNode { bound_s, decisions, count, stage });
        }
    }

    /// Tightens the bound of a group to the least bound of its pipelines. Only pipelines that may
    /// be the least are bounded, and none far beyond the current bound.
    pub(super) fn bound_group(
        &mut self,
        node: &SearchNode,
        group: &Group,
        best_s: f64,
    ) -> Expansion {
        let d = &node.decisions;
        let parallel = &mut self.view(d);
        if group.splits.len() > 1 {
            parallel.work = self.least_work(d, &group.splits);
        }
        if group.bounds.is_empty() {
            let bound_s = self.layout_s(parallel, d, best_s).max(node.bound_s);
            if bound_s >= best_s {
                return Expansion::cut(node.count);
            }
            if bound_s > LAYOUT_LOOK_AHEAD * node.bound_s {
                let part = SearchNode { bound_s, ..node.clone() };
                return Expansion { parts: vec![part], ..Expansion::default() };
            }
        }
        let limit_s = best_s.min(LAYOUT_LOOK_AHEAD * node.bound_s);
        let pipelines = self.pipeline_choices(&parallel.choices, d);
        let mut bounds = group.bounds.to_vec();
        bounds.resize(
            pipelines.len(),
            PipelineBound { bound_s: node.bound_s, source: BoundSource::Others },
        );
        for (pipeline, bound) in pipelines.iter().zip(&mut bounds) {
            if bound.source == BoundSource::Others && bound.bound_s < limit_s {
                let quick_s = self.quick_s(parallel, pipeline, limit_s);
                *bound = PipelineBound {
                    bound_s: quick_s.max(bound.bound_s),
                    source: BoundSource::Degrees,
                };
            }
        }
        let far_s = best_s.min(TIGHTEN_AHEAD * limit_s);
        let mut least_s = f64::INFINITY;
        while let Some((at, least)) = least_of(&bounds) {
            least_s = least.bound_s;
            let is_tight = matches!(least.source, BoundSource::AnyOrder | BoundSource::Memory);
            if is_tight || least_s >= limit_s {
                break;
            }
            let checked = self.checked_s(parallel, &pipelines[at], (limit_s, far_s), true);
            bounds[at] = PipelineBound { bound_s: checked.bound_s.max(least_s), ..checked };
        }
        if least_s >= best_s {
            return Expansion::cut(node.count);
        }
        let group = Group { splits: Arc::clone(&group.splits), bounds: Arc::from(bounds) };
        let stage =
            if least_s >= limit_s { Stage::ParallelLayout(group) } else { Stage::Bounded(group) };
        let part = SearchNode { bound_s: least_s.max(node.bound_s), stage, ..node.clone() };
        Expansion { parts: vec![part], ..Expansion::default() }
    }

    /// Expands a layout into its pipelines.
    pub(super) fn pipelines(&mut self, node: &SearchNode, group: &Group, best_s: f64) -> Expansion {
        let mut expansion = Expansion::default();
        let choices = self.choices(&node.decisions);
        let states = (choices.per_pipeline() / choices.recompute.len()) as u64;
        let pipelines = self.pipeline_choices(&choices, &node.decisions);
        expansion.cut_by_dominance = node.count - pipelines.len() as u64 * states;
        for (decisions, bound) in pipelines.into_iter().zip(group.bounds.iter()) {
            let bound_s = bound.bound_s.max(node.bound_s);
            if bound_s >= best_s {
                expansion.cut_by_time += states;
            } else {
                let stage = Stage::Pipeline(bound.source);
                expansion.parts.push(SearchNode { bound_s, decisions, count: states, stage });
            }
        }
        expansion
    }

    /// Tightens the bound of a pipeline by the recomputation that memory makes necessary.
    pub(super) fn check_pipeline(
        &mut self,
        node: &SearchNode,
        parallel: &mut LayoutView,
        source: BoundSource,
        best_s: f64,
    ) -> Expansion {
        let d = &node.decisions;
        let mut bound_s = node.bound_s;
        if !matches!(source, BoundSource::AnyOrder | BoundSource::Memory) {
            // An earlier bound may have stopped early.
            bound_s = bound_s.max(self.quick_s(parallel, d, best_s));
        }
        if source != BoundSource::Memory && bound_s < best_s {
            let put_off = source != BoundSource::AnyOrder;
            let checked = self.checked_s(parallel, d, (best_s, best_s), put_off);
            bound_s = bound_s.max(checked.bound_s);
            if checked.source == BoundSource::AnyOrder && bound_s < best_s {
                let stage = Stage::Pipeline(BoundSource::AnyOrder);
                let part = SearchNode { bound_s, stage, ..node.clone() };
                return Expansion { parts: vec![part], ..Expansion::default() };
            }
        }
        if bound_s >= best_s {
            return Expansion::cut(node.count);
        }
        let stage = Stage::States(StateBounds::default());
        let part = SearchNode { bound_s, stage, ..node.clone() };
        Expansion { parts: vec![part], ..Expansion::default() }
    }
}

/// The pipeline with the least bound, the first of equals.
fn least_of(bounds: &[PipelineBound]) -> Option<(usize, PipelineBound)> {
    let all = bounds.iter().copied().enumerate();
    all.min_by(|a, b| a.1.bound_s.total_cmp(&b.1.bound_s))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Task;
    use crate::request::restrictions::Restrictions;
    use crate::search::expand::{Context, SLACK};
    use models::decisions::Decisions;
    use std::sync::Arc;

    /// Breadth-first loops gather sharded weights once for all micro-batches, pairs of passes hide
    /// what others do not: a bound for all pipelines must not forget any of them.
    #[test]
    fn the_bound_of_a_layout_is_no_more_than_that_of_any_pipeline() {
        let mut compared = 0;
        for (model, gpus, settings) in [
            ("llama8b", 32, ["zero_stage=3", "tp=1,2"]),
            ("llama8b", 32, ["zero_stage=1", "tp=1,2"]),
            // Of 32 layers some rank of 6 holds 6, but of two copies of each only 11 in all.
            ("llama8b", 12, ["schedule=dualpipe,chimera", "pp=6"]),
            ("mixtral_8x22b", 32, ["zero_stage=2,3", "tp=2"]),
        ] {
            let model = models::model::shipped(model).and_then(Result::ok).expect("it reads");
            let cluster = models::cluster::shipped("selene").and_then(Result::ok);
            let mut cluster = cluster.expect("it reads");
            cluster.levels.iter_mut().for_each(|level| level.bytes_per_s *= 0.1);
            let restrictions = Restrictions::parse(&settings).expect("they are valid");
            let task =
                Task { ignore_memory: true, ..Task::new(&model, &cluster, gpus, &restrictions) };
            let mut worker = Worker::new(&task, &Arc::default());
            let space = task.space();
            for context in space.contexts().into_iter().step_by(7) {
                let d = context.decisions;
                let (splits, template) = (Arc::from(space.expert_splits(&d)), Arc::new(d));
                let Decisions { micro_batch, micro_batches, .. } = *template;
                let context = Context { template, micro_batch, micro_batches, splits, each: 1 };
                for layout in worker.layouts_below(&context.node(0.0), f64::INFINITY) {
                    let d = &layout.decisions;
                    let mut parallel = worker.view(d);
                    let bound_s = worker.layout_s(&mut parallel, d, f64::INFINITY);
                    for pipeline in worker.pipeline_choices(&parallel.choices, d) {
                        let own_s = worker.quick_s(&mut parallel, &pipeline, f64::INFINITY);
                        // The bound of a pipeline leaves room for local search.
                        let least_s = own_s * (1.0 + SLACK) * (1.0 + 1e-9);
                        assert!(bound_s <= least_s, "{bound_s} > {own_s}: {pipeline:?}");
                        compared += 1;
                    }
                }
            }
        }
        assert!(compared > 1000, "{compared}");
    }
}
