//! Expands a search node: bounds its parts, or prices the configurations that are left in it.

mod context;
mod dive;
pub(super) mod every_cut;
pub(super) mod group;
mod layout;
mod pipeline_bounds;
mod place;
mod shared;
mod states;

pub(in crate::search) use context::Context;
pub(in crate::search) use dive::Tight;
use every_cut::EveryCutStage;
use group::Group;
use layout::{LayoutKey, LayoutView};
use pipeline_bounds::BoundSource;
pub(in crate::search) use shared::Shared;
use states::StateBounds;

use super::Candidate;
use crate::bounds::candidates::{ListedCuts, ListedCutsKey, Shapes};
use crate::bounds::pipeline_spec::PipelineSpec;
use crate::bounds::recompute_knapsack::RecomputeKnapsack;
use crate::bounds::states::StateView;
use crate::bounds::workload::{KindCost, MAX_COPIES, MicroBatchCost};
use crate::partition::{Scratch, ilp};
use crate::pricing::cost_cache::CostCache;
use crate::pricing::listed_cuts::{CutList, few_cuts};
use crate::pricing::pipelines::PipelineKey;
use crate::pricing::stage_transfers::P2pTransfer;
use crate::request::Task;
use crate::request::pipeline_choices::{PipelineChoices, PipelineChoicesKey};
use crate::request::space::{ExpertSplit, Space};
use crate::simulate::CriticalPath;
use models::decisions::{Decisions, Dtype, RecomputePolicy};
use models::schedule::{ScheduleName, StageLayout};
use rustc_hash::FxHashMap as HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// A search node: a part of the space, with the decisions that all its configurations share.
#[derive(Clone, Debug)]
pub(super) struct SearchNode {
    /// Admissible lower bound on its configurations, with overheads, s.
    pub bound_s: f64,
    /// Its decisions; those left open hold placeholders.
    pub decisions: Decisions,
    /// Number of combinations.
    pub count: u64,
    /// How far it is decided.
    pub stage: Stage,
}

impl SearchNode {
    /// Whether expanding it takes much longer than expanding others: an integer program.
    pub fn takes_long(&self) -> bool {
        matches!(self.stage, Stage::Placed)
    }

    /// Whether its configurations are priced next.
    pub fn is_leaf(&self) -> bool {
        matches!(
            self.stage,
            Stage::States(_)
                | Stage::Placed
                | Stage::EveryCut(EveryCutStage::Configuration | EveryCutStage::Relaxed(_))
        )
    }
}

/// Where only a family of partitions is tried, local search starts from every candidate within this
/// fraction of the best candidate's time: moving layers rarely gains more.
pub(super) const SLACK: f64 = 0.01;

/// How far a search node is decided.
#[derive(Clone, Debug)]
pub(super) enum Stage {
    /// All but the expert split and what follows it.
    Context(Arc<[ExpertSplit]>),
    /// Parallel layouts whose pipelines are being bounded.
    ParallelLayout(Group),
    /// Parallel layouts with the least bound of their pipelines.
    Bounded(Group),
    /// One pipeline, with the source of its bound.
    Pipeline(BoundSource),
    /// One pipeline, bounded with the recomputation that memory makes necessary, and the choices
    /// of parameter state that are open.
    States(StateBounds),
    /// One configuration whose placement was priced: a faster one may remain, which the integer
    /// program finds.
    Placed,
    /// What is open over every cut after listed cuts were searched.
    EveryCut(EveryCutStage),
}

/// What expanding a search node may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowance {
    /// Work of its integer programs.
    pub work: u64,
    /// Their share of the time left.
    pub share: f64,
    /// Candidate partitions that are priced of one configuration.
    pub most_cuts: usize,
}

/// The result of expanding a search node.
#[derive(Clone, Debug)]
pub(super) struct Expansion {
    pub parts: Vec<SearchNode>,
    pub best: Option<Candidate>,
    pub cut_by_time: u64,
    pub cut_by_memory: u64,
    pub cut_by_dominance: u64,
    pub placed: u64,
    /// Critical paths of placements: rows with which later programs begin.
    pub paths: Vec<(PipelineKey, CriticalPath)>,
    /// What integer programs cost.
    pub effort: ilp::Effort,
    /// Least bound of a program that ran out of work, with overheads, s; infinite where none did.
    pub open_s: f64,
    /// Starts for local search: the best candidate partitions of configurations with a family of
    /// them, within [`SLACK`] of the incumbent.
    pub near: Vec<Candidate>,
}

impl Default for Expansion {
    fn default() -> Self {
        Self {
            parts: vec![],
            best: None,
            cut_by_time: 0,
            cut_by_memory: 0,
            cut_by_dominance: 0,
            placed: 0,
            paths: vec![],
            effort: ilp::Effort::default(),
            open_s: f64::INFINITY,
            near: vec![],
        }
    }
}

/// Critical paths by pipeline, with which programs of its configurations begin: a path bounds every
/// configuration on its pipeline. The map is copied while threads look at it, but not the paths.
pub(super) type Paths = HashMap<PipelineKey, Arc<Vec<CriticalPath>>>;

impl Expansion {
    fn cut(count: u64) -> Self {
        Self { cut_by_time: count, ..Self::default() }
    }

    fn bar_s(&self, best_s: f64) -> f64 {
        self.best.as_ref().map_or(best_s, |found| found.iteration_s.min(best_s))
    }
}

/// Degrees tp, pp, cp, ep, etp and the number format: all that parameter state depends on.
type StatesKey = (u64, u64, u64, u64, u64, Dtype);

/// All that candidates under any order of passes depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct AnyOrderKey {
    list: CutList,
    layout: StageLayout,
    ranks: usize,
    micro_batches: usize,
    chunks: usize,
    /// Whether the vocabulary is spread over the pipeline.
    over_pipeline: bool,
    has_pairs: bool,
}

/// Prices and bounds search nodes. Each thread has its own, with its own caches.
pub(super) struct Worker<'a> {
    task: &'a Task<'a>,
    space: Space<'a>,
    pub cache: CostCache<'a>,
    pub scratch: Scratch,
    no_transfer: Rc<P2pTransfer>,
    shared: Arc<Shared>,
    /// By cut list, ranks, chunks, stage layout and whether the vocabulary is spread over the
    /// pipeline.
    shapes: HashMap<(CutList, usize, usize, StageLayout, bool), Rc<Shapes>>,
    /// By cut list, whether the vocabulary is spread over the pipeline, and key.
    candidates: HashMap<(CutList, bool, ListedCutsKey), Rc<ListedCuts>>,
    any_order_candidates: HashMap<AnyOrderKey, Rc<ListedCuts>>,
    choices: HashMap<PipelineChoicesKey, Rc<PipelineChoices>>,
    layouts: HashMap<LayoutKey, LayoutView>,
    /// The pipelines priced last, without their parameter state: see [`Worker::stated`].
    last_specs: Vec<(Decisions, PipelineSpec, Arc<MicroBatchCost>)>,
}

impl<'a> Worker<'a> {
    pub fn new(task: &'a Task<'a>, shared: &Arc<Shared>) -> Self {
        let pipelines = Arc::clone(&shared.pipelines);
        Self {
            shared: Arc::clone(shared),
            task,
            space: task.space(),
            cache: CostCache::new(task.model, task.cluster, task.gpus).sharing(pipelines),
            scratch: Scratch::default(),
            no_transfer: Rc::new(P2pTransfer::none()),
            shapes: HashMap::default(),
            candidates: HashMap::default(),
            any_order_candidates: HashMap::default(),
            choices: HashMap::default(),
            layouts: HashMap::default(),
            last_specs: vec![],
        }
    }

    /// Expands a search node against the incumbent's time `best_s`.
    pub fn expand(
        &mut self,
        node: &SearchNode,
        best_s: f64,
        allowed: Allowance,
        paths: &Paths,
    ) -> Expansion {
        if self.task.is_stopped() {
            return Expansion { parts: vec![node.clone()], ..Expansion::default() };
        }
        match &node.stage {
            Stage::Context(splits) => self.split(node, splits, best_s),
            Stage::ParallelLayout(group) => self.bound_group(node, group, best_s),
            Stage::Bounded(group) if group.splits.len() > 1 => {
                self.single_layouts(node, group, best_s)
            }
            Stage::Bounded(group) => self.pipelines(node, group, best_s),
            Stage::Pipeline(source) => self.with_layout(&node.decisions, |own, parallel| {
                own.check_pipeline(node, parallel, *source, best_s)
            }),
            Stage::States(bounds) => self.with_layout(&node.decisions, |own, parallel| {
                own.expand_states(node, bounds, parallel, (best_s, allowed))
            }),
            Stage::Placed => self.solve_program(node, (best_s, allowed), paths),
            Stage::EveryCut(stage) => {
                self.expand_every_cut(node, stage, (best_s, allowed.work), paths)
            }
        }
    }

    fn with_overheads_s(&self, pipeline_s: f64) -> f64 {
        self.cache.with_overheads_s(pipeline_s)
    }

    fn pipeline_s(&self, iteration_s: f64) -> f64 {
        self.cache.pipeline_s(iteration_s)
    }

    /// Bound of a parallel layout from its layers, with overheads, s. Some rank has at least the
    /// mean load, or as many layers of one kind as some rank must hold, and runs its micro-batches
    /// one after another; and one micro-batch takes its forward and backward path. The least
    /// recomputation is counted that is allowed, and that makes room for the activations of one
    /// micro-batch: when it has gone forward through all layers, the ranks together hold them.
    fn layers_s(
        &self,
        (pp, micro_batches): (u64, u64),
        work: &MicroBatchCost,
        knapsack: &RecomputeKnapsack,
    ) -> f64 {
        let again_s = |kind: &KindCost| {
            let allowed = self.recompute_options().map(|option| kind.recompute_s[option]);
            allowed.fold(f64::INFINITY, f64::min)
        };
        let m = micro_batches as f64;
        let unpaired = if copies_may_pair(pp, micro_batches) { 0.0 } else { 1.0 };
        let layer_s = |kind: &KindCost| {
            m * (kind.load_s() + again_s(kind)) + unpaired * kind.both_unpaired_s()
        };
        let fullest_s = work.fullest(pp as usize, MAX_COPIES, |_, kind| layer_s(kind));
        let ranks_bytes = match self.task.ignore_memory {
            true => f64::INFINITY,
            false => pp as f64 * self.task.cluster.usable_bytes(),
        };
        // With activations on the host nothing is forced, and the first option may take longest.
        let forced_s = knapsack.forced_s(&work.counts, ranks_bytes).unwrap_or(0.0);
        let all_again_s = work.layers_s(again_s).max(forced_s);
        let all_s = m * (work.load_s() + all_again_s) + unpaired * work.unpaired_s();
        let rank_s = fullest_s.max(all_s / pp as f64);
        // Without a barrier, iterations overlap.
        let path_s = match self.task.restrictions.wants_post_validation() {
            true => 0.0,
            false => work.layers_s(|kind| kind.load_s() - kind.weight_s) + all_again_s,
        };
        self.with_overheads_s(rank_s.max(path_s))
    }

    /// What layers may recompute, as options of `Recompute::ALL`.
    fn recompute_options(&self) -> impl Iterator<Item = usize> {
        (0..3).filter(|option| allows_recompute(self.task, *option))
    }

    /// The knapsack of all recomputation that is allowed.
    fn knapsack(&self, work: &MicroBatchCost) -> RecomputeKnapsack {
        RecomputeKnapsack::new(&work.kinds, &self.recompute_options().collect::<Vec<_>>())
    }

    /// Bounds of contexts over all their expert splits, with overheads, s.
    pub fn contexts_s(&self, contexts: &[Context]) -> Vec<f64> {
        let mut bounds_s = Vec::with_capacity(contexts.len());
        for alike in contexts.chunk_by(|a, b| a.priced_by() == b.priced_by()) {
            let d = &alike[0].decisions();
            let layer_costs = self.cache.floor_layer_costs(d);
            let work = MicroBatchCost::new(&self.cache, d, &layer_costs);
            let knapsack = self.knapsack(&work);
            let of = |own: &Context| {
                self.layers_s((own.template.pp, own.micro_batches), &work, &knapsack)
            };
            bounds_s.extend(alike.iter().map(of));
        }
        bounds_s
    }

    /// Expands a context by the degrees of its experts; the overlap of the all-to-all is decided
    /// later.
    fn split(&mut self, node: &SearchNode, splits: &[ExpertSplit], best_s: f64) -> Expansion {
        let mut expansion = Expansion::default();
        let count = node.count / splits.len() as u64;
        for alike in splits.chunk_by(|a, b| (a.ep, a.etp) == (b.ep, b.etp)) {
            let (count, group) = (count * alike.len() as u64, Group::new(Arc::from(alike)));
            self.bound_splits(node, group, (count, best_s), &mut expansion);
        }
        expansion
    }

    /// The componentwise minimum of the micro-batch costs of a layout `d` over `splits`, which
    /// differ only in how the all-to-all is overlapped. Layouts that differ only in pipeline and
    /// replicas share it.
    fn least_work(&mut self, d: &Decisions, splits: &[ExpertSplit]) -> Arc<MicroBatchCost> {
        if splits.len() == 1 {
            return Arc::new(MicroBatchCost::new(&self.cache, d, &self.cache.layer_costs(d)));
        }
        let of = |split: &ExpertSplit| {
            let d = split.of(d);
            MicroBatchCost::new(&self.cache, &d, &self.cache.price_of(&d))
        };
        let least = || {
            let least = splits.iter().map(of).reduce(|a, b| a.least(&b));
            least.unwrap_or_else(|| MicroBatchCost::new(&self.cache, d, &self.cache.layer_costs(d)))
        };
        self.shared.least_work((self.cache.layer_costs_key(d), splits.len(), d.pp > 1), least)
    }

    /// Factor on the incumbent's time up to which candidate partitions are kept as starts for local
    /// search.
    pub(super) fn slack(&self, list: CutList, spec: &PipelineSpec) -> f64 {
        let family = list == CutList::Family && !few_cuts(self.cache.layers.len(), spec.stages());
        if family { 1.0 + SLACK } else { 1.0 }
    }

    /// Rank memory for parameter state and activations, bytes.
    fn budget_bytes(&self, spec: &PipelineSpec, work: &MicroBatchCost, state: &StateView) -> f64 {
        if self.task.ignore_memory {
            return f64::INFINITY;
        }
        let moving = state.motion_bytes(spec, self.cache.layers.len());
        self.task.cluster.usable_bytes() - work.workspace_bytes - moving
    }
}

/// Whether two copies of a stage may pair their passes with each other's
/// ([`PipelineSpec::least_unpaired`]).
fn copies_may_pair(pp: u64, micro_batches: u64) -> bool {
    ScheduleName::DualPipe.check(pp as usize, micro_batches as usize, 2).is_ok()
}

/// Whether layers may recompute as this option of `Recompute::ALL` says.
fn allows_recompute(task: &Task<'_>, option: usize) -> bool {
    let alike = [RecomputePolicy::None, RecomputePolicy::Selective, RecomputePolicy::Full];
    let allows = |policy| task.restrictions.recompute.allows(policy);
    allows(RecomputePolicy::PerLayer) || allows(alike[option])
}
