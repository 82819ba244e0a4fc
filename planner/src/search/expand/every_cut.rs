//! Configurations of which the search tried only listed cuts, over every cut: from one bound for a
//! pipeline to integer programs for each of its configurations.

use super::layout::LayoutView;
use super::{Candidate, Context, Expansion, Paths, SearchNode, Stage, Worker};
use crate::bounds::closed;
use crate::bounds::pipeline_spec::PipelineSpec;
use crate::bounds::states::StateView;
use crate::bounds::whole_layers::WholeLayers;
use crate::bounds::workload::MicroBatchCost;
use crate::partition::ilp;
use crate::pricing::Configuration;
use crate::pricing::cost_cache::CostCache;
use crate::pricing::listed_cuts::is_complete;
use crate::pricing::pipelines::PipelineKey;
use crate::request::space::ExpertSplit;
use crate::simulate::CriticalPath;
use models::decisions::Decisions;
use std::sync::Arc;

/// How far a part of the space is decided that is open over every cut.
#[derive(Clone, Debug)]
pub(in crate::search) enum EveryCutStage {
    /// A context.
    Context(Arc<[ExpertSplit]>),
    /// A pipeline, bounded by degrees and load.
    Pipeline,
    /// A pipeline, bounded by whole layers. Parameter state is open.
    Bounded,
    /// A configuration, bounded by whole layers.
    Configuration,
    /// A configuration, bounded by a linear program, with the work that its integer programs may
    /// take next; 0 before the first.
    Relaxed(u64),
}

impl Worker<'_> {
    /// Pipelines of a layout with placements that the search leaves out, each with a lower bound
    /// over every cut and recompute split below `limit_s`.
    fn open_pipelines(&mut self, parallel: &SearchNode, limit_s: f64) -> Vec<SearchNode> {
        let layers = self.cache.layers.len();
        self.with_layout(&parallel.decisions, |own, view| {
            let all = own.pipeline_choices(&view.choices, &parallel.decisions).into_iter();
            let of = |d: Decisions| {
                let bound_s = own.any_cut_s(view, &d).max(parallel.bound_s);
                (bound_s < limit_s).then(|| node(bound_s, d, EveryCutStage::Pipeline))
            };
            all.filter(|d| !is_complete(d, layers)).filter_map(of).collect()
        })
    }

    /// Expands a part that is open over every cut. The first integer programs of a configuration
    /// get `first_work`; what they leave open waits with the bound reached and more work. Without
    /// work there are none.
    pub(super) fn expand_every_cut(
        &mut self,
        node: &SearchNode,
        stage: &EveryCutStage,
        (best_s, first_work): (f64, u64),
        paths: &Paths,
    ) -> Expansion {
        let parts = match stage {
            EveryCutStage::Context(splits) => {
                let context = Context::part(splits, node.bound_s, &node.decisions);
                let layouts = self.layouts_below(&context, best_s);
                let open = |parallel: &SearchNode| self.open_pipelines(parallel, best_s);
                layouts.iter().flat_map(open).collect()
            }
            EveryCutStage::Pipeline => self.bounded(node, best_s).into_iter().collect(),
            EveryCutStage::Bounded => self.open_states(node, best_s),
            EveryCutStage::Configuration => return self.relax(node, best_s, paths),
            EveryCutStage::Relaxed(_) if first_work == 0 => vec![node.clone()],
            EveryCutStage::Relaxed(work) => {
                return self.solve(node, best_s, (*work).max(first_work), paths);
            }
        };
        Expansion { parts, effort: of_work(BOUND_WORK), ..Expansion::default() }
    }

    /// Bounds a pipeline by whole layers.
    fn bounded(&mut self, waiting: &SearchNode, best_s: f64) -> Option<SearchNode> {
        let d = &waiting.decisions;
        let bound_s = self.with_layout(d, |own, parallel| {
            let (spec, work) = own.spec(parallel, d);
            let states = Arc::clone(&parallel.states);
            let budget = own.budget_bytes(&spec, &work, &states.least);
            let state = (&states.least, budget);
            own.whole_layers_s(parallel, (&spec, &work), state, (waiting.bound_s, best_s))
        });
        (bound_s < best_s).then(|| node(bound_s, d.clone(), EveryCutStage::Bounded))
    }

    /// Configurations of a pipeline that may take less than `best_s`.
    fn open_states(&mut self, pipeline: &SearchNode, best_s: f64) -> Vec<SearchNode> {
        self.with_layout(&pipeline.decisions, |own, parallel| {
            let states = Arc::clone(&parallel.states);
            let of = |view: &StateView| {
                let d = view.of(&pipeline.decisions);
                let bound_s =
                    own.any_cut_of_state_s(parallel, &d, view, (pipeline.bound_s, best_s));
                (bound_s < best_s).then(|| node(bound_s, d, EveryCutStage::Configuration))
            };
            states.views().filter_map(of).collect()
        })
    }

    /// Bound of a configuration over every cut and recompute split, with overheads, s, where it
    /// lies between two times; infinite where it is larger.
    fn any_cut_of_state_s(
        &mut self,
        parallel: &mut LayoutView,
        d: &Decisions,
        view: &StateView,
        (known_s, limit_s): (f64, f64),
    ) -> f64 {
        let (spec, plain, work) = self.stated(d, view, parallel);
        let budget = self.budget_bytes(&spec, &plain, view);
        if closed::least_bytes(&spec, &plain, view) > budget * (1.0 + 1e-9) {
            return f64::INFINITY;
        }
        let knapsack = parallel.knapsack(d.recompute);
        let spent_s = closed::least_recompute_s(&spec, &plain, &knapsack, view, budget);
        let step_s = closed::least_step_s(&spec, &work, view);
        let passes_s = closed::passes_s(&spec, &work, spent_s) + step_s;
        let passes_s = passes_s.max(closed::with_state_s(&spec, &work, view, spent_s));
        let bound_s = self.with_overheads_s(passes_s).max(known_s);
        if bound_s >= limit_s {
            return f64::INFINITY;
        }
        self.whole_layers_s(parallel, (&spec, &work), (view, budget), (bound_s, limit_s))
    }

    /// [`WholeLayers`] of a pipeline with a choice of parameter state, with overheads, s, where it
    /// lies between two times; infinite where it is larger.
    fn whole_layers_s(
        &self,
        parallel: &mut LayoutView,
        (spec, work): (&PipelineSpec, &MicroBatchCost),
        (view, budget): (&StateView, f64),
        (from_s, limit_s): (f64, f64),
    ) -> f64 {
        if spec.order_depends_on_times() {
            return from_s;
        }
        let knapsack = parallel.knapsack(spec.recompute);
        let pipeline = self.cache.pipeline_of(spec.key());
        let whole = WholeLayers::new(spec, (work, &knapsack), view, &pipeline, budget);
        let within = [from_s, limit_s].map(|time_s| self.pipeline_s(time_s));
        whole.between_s(within).map_or(f64::INFINITY, |s| self.with_overheads_s(s).max(from_s))
    }

    /// Bounds a configuration by linear programs over every cut and recompute split.
    fn relax(&mut self, waiting: &SearchNode, best_s: f64, paths: &Paths) -> Expansion {
        let mut expansion = Expansion::default();
        let found = in_own_times(&self.cache, &waiting.decisions, paths);
        let Some((configuration, key, known)) = found else { return expansion };
        let limits = ilp::Limits { work: RELAXING_WORK, paths: true, until: self.task.until };
        let within = (configuration.pipeline_s(best_s), self.task.ignore_memory);
        let found = configuration.bound_of_every_cut(known, within, limits, &mut self.scratch);
        expansion.effort = of_work(BOUND_WORK + found.work);
        expansion.paths = found.paths.into_iter().map(|path| (key, path)).collect();
        if !found.nothing_below {
            let bound_s = waiting.bound_s.max(configuration.with_overheads_s(found.bound_s));
            let stage = EveryCutStage::Relaxed(0);
            expansion.parts.push(node(bound_s, waiting.decisions.clone(), stage));
        }
        expansion
    }

    /// Integer programs over every cut and recompute split of one configuration.
    fn solve(&mut self, waiting: &SearchNode, best_s: f64, work: u64, paths: &Paths) -> Expansion {
        let mut expansion = Expansion::default();
        let found = in_own_times(&self.cache, &waiting.decisions, paths);
        let Some((configuration, key, known)) = found else { return expansion };
        let limits = ilp::Limits { work, paths: true, until: self.task.until };
        let within = (configuration.pipeline_s(best_s), self.task.ignore_memory);
        let found = configuration.best_of_every_cut(known, within, limits, &mut self.scratch);
        let report = found.report;
        expansion.take_program(key, &report, found.paths);
        if !report.proven {
            let bound_s = waiting.bound_s.max(configuration.with_overheads_s(report.bound_s));
            let stage = EveryCutStage::Relaxed(work.saturating_mul(MORE));
            expansion.parts.push(node(bound_s, waiting.decisions.clone(), stage));
        }
        expansion.best = found.best.map(|(placed, value_s)| {
            let iteration_s = configuration.with_overheads_s(value_s);
            Candidate { decisions: configuration.decisions, placed, iteration_s }
        });
        expansion
    }
}

/// A configuration whose vocabulary passes are placed by its own times, with its key and the chains
/// known of its pipeline.
fn in_own_times<'c>(
    cache: &'c CostCache<'c>,
    d: &Decisions,
    paths: &Paths,
) -> Option<(Configuration<'c>, PipelineKey, Vec<CriticalPath>)> {
    let configuration = Configuration::new(cache, d.clone()).ok()?.in_own_times();
    let key = PipelineKey::new(&configuration.decisions);
    let known = paths.get(&key).map_or_else(Vec::new, |known| Vec::clone(known));
    Some((configuration, key, known))
}

fn of_work(work: u64) -> ilp::Effort {
    ilp::Effort { work, ..ilp::Effort::default() }
}

/// Work that counts for one bound, in the unit of [`ilp::Limits::work`].
const BOUND_WORK: u64 = 400;

/// Work that the linear programs of a configuration may take.
const RELAXING_WORK: u64 = 100_000;

/// How much more work the programs of a configuration get each time.
const MORE: u64 = 4;

/// A search node that counts no combinations: they are counted where listed cuts are searched.
pub(in crate::search) fn node(
    bound_s: f64,
    decisions: Decisions,
    stage: EveryCutStage,
) -> SearchNode {
    SearchNode { bound_s, decisions, count: 0, stage: Stage::EveryCut(stage) }
}
