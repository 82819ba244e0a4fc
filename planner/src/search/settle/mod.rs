//! What a worker does with one item of the queue: bounds its parts, or settles it.

mod group;
mod node;
mod place;

use group::Group;
use node::{By, NodeKey, NodeView};

use super::Task;
use crate::bounds::cuts::Cutter;
use crate::bounds::listed::{Lister, Members, MembersKey, Shapes};
use crate::bounds::states::{StateView, States};
use crate::bounds::work::{KindWork, Line, MOST_COPIES, Work};
use crate::case::family::{List, few_cuts};
use crate::case::ground::{Ground, SheetKey};
use crate::case::pipelines::{PipelineKey, Pipelines};
use crate::case::priced::Placed;
use crate::case::ways::fixed_durations;
use crate::placement::Scratch;
use crate::simulate::CriticalPath;
use crate::space::{ExpertSplit, Inner, InnerKey, Space};
use models::decisions::{CpStyle, Decisions, Dtype, Recompute};
use models::schedule::StageLayout;
use rustc_hash::FxHashMap as HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// Something that waits, with what is decided in it.
#[derive(Clone, Debug)]
pub(super) struct Item {
    /// No configuration in it is faster, finished, s.
    pub bound_s: f64,
    /// The decisions; what the stage leaves open is a placeholder.
    pub decisions: Decisions,
    /// Combinations.
    pub count: u64,
    /// How far it is decided.
    pub stage: Stage,
}

/// A context before anything is known of it.
#[derive(Clone, Debug)]
pub(super) struct Context {
    /// The decisions, without the split of experts.
    pub decisions: Decisions,
    /// The splits.
    pub splits: Arc<[ExpertSplit]>,
    /// Combinations of each.
    pub each: u64,
}

/// Number format, degrees of what a micro-batch is split over, and sequences in it.
type PricedBy = (Dtype, u64, u64, CpStyle, u64, bool, u64);

impl Context {
    /// Combinations.
    pub fn count(&self) -> u64 {
        self.each * self.splits.len() as u64
    }

    /// What prices depend on: contexts that differ in nothing but pipeline and replicas have the same.
    pub fn priced_by(&self) -> PricedBy {
        let d = &self.decisions;
        (d.dtype, d.tp, d.cp, d.cp_style, d.cp_ulysses, d.sequence_parallel, d.micro_batch)
    }

    /// With its bound; the node where there is one.
    pub fn item(&self, bound_s: f64) -> Item {
        let splits = Arc::clone(&self.splits);
        let dense = self.splits[..] == [ExpertSplit::NONE];
        let stage = if dense { Stage::Node(Group::new(splits)) } else { Stage::Context(splits) };
        Item { bound_s, decisions: self.decisions.clone(), count: self.count(), stage }
    }
}

/// How much better than the best time an item's bound must be for it to be looked into before its turn.
const LEAD: f64 = 1.04;

impl Item {
    /// Whether it is settled next, not split.
    pub fn settles(&self) -> bool {
        matches!(self.stage, Stage::Checked)
    }

    /// Whether it is close to a configuration that may better the best time by much.
    pub fn leads(&self, best_s: f64) -> bool {
        let near = match &self.stage {
            Stage::Bounded(group) => group.splits.len() == 1,
            Stage::Pipeline(_) | Stage::Checked => true,
            Stage::Context(_) | Stage::Node(_) => false,
        };
        near && LEAD * self.bound_s < best_s
    }
}

/// Where a family of cuts is tried, others are looked for from those that take at most this part more than the best
/// listed time: moving layers gains more in few.
pub(super) const SLACK: f64 = 0.01;

/// How far an item is decided.
#[derive(Clone, Debug)]
pub(super) enum Stage {
    /// All but the split of experts.
    Context(Arc<[ExpertSplit]>),
    /// A node whose pipelines are being bounded.
    Node(Group),
    /// The same with the least bound of its pipelines.
    Bounded(Group),
    /// A pipeline, with what its bound was had by.
    Pipeline(By),
    /// A pipeline with the recomputation that memory makes necessary.
    Checked,
}

/// A combination that bounds and incumbents did not settle.
#[derive(Clone, Debug)]
pub(super) struct Open {
    pub decisions: Decisions,
    pub bound_s: f64,
}

/// A configuration found.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub decisions: Decisions,
    pub placed: Placed,
    pub iteration_s: f64,
}

/// What became of an item.
#[derive(Clone, Debug)]
pub(super) struct Settled {
    pub parts: Vec<Item>,
    pub best: Option<Candidate>,
    pub open: Vec<Open>,
    pub cut_by_time: u64,
    pub cut_by_memory: u64,
    pub cut_by_dominance: u64,
    pub placed: u64,
    /// Chains of passes that made placements longer than their closed form.
    pub paths: Vec<(PipelineKey, CriticalPath)>,
    /// Integer programs solved on the way.
    pub ilps: u64,
    /// Their wall time, s.
    pub ilp_s: f64,
    /// Their work, as [`crate::placement::ilp::Limits::work`] counts it.
    pub work: u64,
    /// Least bound of a program that ran out of time, finished, s; infinite where none did.
    pub open_s: f64,
    /// The best listed placements of configurations of which a family of cuts is tried, where they take at most
    /// [`SLACK`] more than the best time so far.
    pub near: Vec<Candidate>,
}

impl Default for Settled {
    fn default() -> Self {
        Self {
            parts: vec![],
            best: None,
            open: vec![],
            cut_by_time: 0,
            cut_by_memory: 0,
            cut_by_dominance: 0,
            placed: 0,
            paths: vec![],
            ilps: 0,
            ilp_s: 0.0,
            work: 0,
            open_s: f64::INFINITY,
            near: vec![],
        }
    }
}

/// Chains of passes by pipeline: each bounds every configuration on its pipeline.
pub(super) type Paths = HashMap<PipelineKey, Vec<CriticalPath>>;

impl Settled {
    fn cut(count: u64) -> Self {
        Self { cut_by_time: count, ..Self::default() }
    }

    fn bar_s(&self, best_s: f64) -> f64 {
        self.best.as_ref().map_or(best_s, |found| found.iteration_s.min(best_s))
    }
}

/// Degrees tp, pp, cp, ep, etp and the number format: all that parameter state depends on.
type StatesKey = (u64, u64, u64, u64, u64, Dtype);

/// Least works that are kept, half a kilobyte each.
const MOST_LEASTS: usize = 1 << 13;

/// Prices and bounds; one for each thread, with memory of its own.
pub(super) struct Worker<'a> {
    task: &'a Task<'a>,
    space: Space<'a>,
    pub ground: Ground<'a>,
    pub scratch: Scratch,
    states: HashMap<StatesKey, Rc<States>>,
    /// By list, devices, chunks, layout and whether the vocabulary lies over the pipeline.
    shapes: HashMap<(List, usize, usize, StageLayout, bool), Rc<Shapes>>,
    members: HashMap<(List, MembersKey), Rc<Members>>,
    /// By list, layout, devices, micro-batches and chunks: what holds of any order.
    any_members: HashMap<(List, StageLayout, usize, usize, usize), Rc<Members>>,
    inners: HashMap<InnerKey, Rc<Inner>>,
    /// By prices of the first, their number and whether there are several stages: [`Self::least_work`].
    leasts: HashMap<(SheetKey, usize, bool), Rc<Work>>,
    nodes: HashMap<NodeKey, NodeView>,
    /// Work that the integer programs of the item at hand may take.
    work: u64,
}

impl<'a> Worker<'a> {
    pub fn new(task: &'a Task<'a>, pipelines: Arc<Pipelines>) -> Self {
        Self {
            task,
            space: task.space(),
            ground: Ground::new(task.model, task.cluster, task.gpus).sharing(pipelines),
            scratch: Scratch::default(),
            states: HashMap::default(),
            shapes: HashMap::default(),
            members: HashMap::default(),
            any_members: HashMap::default(),
            inners: HashMap::default(),
            leasts: HashMap::default(),
            nodes: HashMap::default(),
            work: u64::MAX,
        }
    }

    /// Splits or settles an item with respect to the best time so far; its integer programs take no more than `work`.
    pub fn settle(&mut self, item: &Item, best_s: f64, work: u64, paths: &Paths) -> Settled {
        self.work = work;
        match &item.stage {
            Stage::Context(splits) => self.split(item, splits, best_s),
            Stage::Node(group) => self.bound_node(item, group, best_s),
            Stage::Bounded(group) if group.splits.len() > 1 => {
                self.single_nodes(item, group, best_s)
            }
            Stage::Bounded(group) => self.pipelines(item, group, best_s),
            Stage::Pipeline(by) => self.with_node(&item.decisions, |own, node| {
                own.check_pipeline(item, node, *by, best_s, paths)
            }),
            Stage::Checked => self.with_node(&item.decisions, |own, node| {
                own.settle_states(item, node, best_s, paths)
            }),
        }
    }

    fn finish_s(&self, core_s: f64) -> f64 {
        let software = &self.task.cluster.software;
        core_s * crate::case::priced::straggler(self.task.cluster, self.task.gpus)
            + software.step_overhead_s
    }

    /// Inverse of [`Self::finish_s`].
    fn core_s(&self, iteration_s: f64) -> f64 {
        let software = &self.task.cluster.software;
        (iteration_s - software.step_overhead_s)
            / crate::case::priced::straggler(self.task.cluster, self.task.gpus)
    }

    /// Some device has at least the mean of the devices' work on layers, or as many layers of a kind as some
    /// device must have, and does all its micro-batches one after another; and a micro-batch goes down all layers
    /// and back. The least recomputation allowed is counted.
    fn layers_s(&self, d: &Decisions, work: &Work) -> f64 {
        let least = least_recompute(self.task);
        let layer_s = |kind: &KindWork| kind.load_s() + kind.recompute_s[least];
        let fullest_s = work.fullest(d.pp as usize, MOST_COPIES, |_, kind| layer_s(kind));
        let device_s = fullest_s.max(work.layers_s(layer_s) / d.pp as f64);
        let way_s = work.layers_s(|kind| layer_s(kind) - kind.weight_s);
        self.finish_s((d.micro_batches as f64 * device_s).max(way_s))
    }

    /// Bounds of contexts that hold for every split of their experts, finished, s.
    pub fn contexts_s(&self, contexts: &[Context]) -> Vec<f64> {
        let mut bounds_s = Vec::with_capacity(contexts.len());
        for alike in contexts.chunk_by(|a, b| a.priced_by() == b.priced_by()) {
            let d = &alike[0].decisions;
            let dense = self.task.model.moe.is_none();
            let sheet = if dense { self.ground.sheet(d) } else { self.ground.floor_sheet(d) };
            let work = Work::new(&self.ground, d, &sheet);
            bounds_s.extend(alike.iter().map(|context| self.layers_s(&context.decisions, &work)));
        }
        bounds_s
    }

    /// Splits a context by how many ranks share its experts; how the all-to-all is overlapped comes later.
    fn split(&mut self, item: &Item, splits: &[ExpertSplit], best_s: f64) -> Settled {
        let mut settled = Settled::default();
        let count = item.count / splits.len() as u64;
        for alike in splits.chunk_by(|a, b| (a.ep, a.etp) == (b.ep, b.etp)) {
            let count = count * alike.len() as u64;
            let work = self.least_work(&alike[0].of(&item.decisions), alike);
            let bound_s = self.layers_s(&item.decisions, &work).max(item.bound_s);
            if bound_s >= best_s {
                settled.cut_by_time += count;
            } else {
                let decisions = alike[0].of(&item.decisions);
                let stage = Stage::Node(Group::new(Arc::from(alike)));
                settled.parts.push(Item { bound_s, decisions, count, stage });
            }
        }
        settled
    }

    /// Work of a node `d` that none of the splits undercuts, of which it has one, and which differ in nothing but
    /// how the all-to-all is overlapped. Nodes that differ in pipeline and replicas share it.
    fn least_work(&mut self, d: &Decisions, splits: &[ExpertSplit]) -> Rc<Work> {
        if splits.len() == 1 {
            return Rc::new(Work::new(&self.ground, d, &self.ground.sheet(d)));
        }
        let key = (self.ground.sheet_key(d), splits.len(), d.pp > 1);
        if let Some(known) = self.leasts.get(&key) {
            return Rc::clone(known);
        }
        let of = |split: &ExpertSplit| {
            let d = split.of(d);
            Work::new(&self.ground, &d, &self.ground.price_of(&d))
        };
        let least = splits.iter().map(of).reduce(|a, b| a.least(&b));
        let least = least.unwrap_or_else(|| Work::new(&self.ground, d, &self.ground.sheet(d)));
        if self.leasts.len() >= MOST_LEASTS {
            self.leasts.clear();
        }
        let least = Rc::new(least);
        self.leasts.insert(key, Rc::clone(&least));
        least
    }

    /// What the best of listed cuts may take times the best time for others to be looked for from there.
    pub(super) fn slack(&self, list: List, line: &Line) -> f64 {
        let family = list == List::Family && !few_cuts(self.ground.layers.len(), line.stages());
        if family { 1.0 + SLACK } else { 1.0 }
    }

    /// The longest known chain of a pipeline under states that take least, whatever the rank order,
    /// finished, s; where no cut lies below the limit, the limit.
    fn paths_s(&mut self, node: &mut NodeView, d: &Decisions, limit_s: f64, paths: &Paths) -> f64 {
        let Some(known) = paths.get(&PipelineKey::new(d)) else { return 0.0 };
        let (line, work) = self.line(node, d);
        if let Some(list) = List::of(d.vocab, d.vpp) {
            let (state, known) = (&node.states.least, known.iter().collect::<Vec<_>>());
            let lister = Lister { line: &line, work: &work, state, budget_bytes: f64::INFINITY };
            let core_s = lister.least_longest_s(&self.members(list, &line), &known);
            return self.finish_s(core_s / self.slack(list, &line));
        }
        let fixed: Vec<_> = node
            .inner
            .rank_order
            .iter()
            .map(|&rank_order| {
                let d = Decisions { rank_order, ..d.clone() };
                fixed_durations(&self.ground, &d, &node.sheet)
            })
            .collect();
        let budget = self.budget_bytes(&line, &work, &node.states.least);
        let cutter = Cutter::new(&line, &work, &node.states.least, &self.ground.layers, budget);
        let cutter = cutter.in_made_order(&self.ground);
        let Some(cuts) = cutter.solve(self.core_s(limit_s)) else { return limit_s };
        let of = |path: &CriticalPath| {
            let lengths = fixed.iter().map(|durations| path.length_s(durations));
            cutter.path_s(&cuts, path, lengths.fold(f64::INFINITY, f64::min))
        };
        self.finish_s(known.iter().map(of).fold(0.0, f64::max))
    }

    /// What a device has for states and activations.
    fn budget_bytes(&self, line: &Line, work: &Work, state: &StateView) -> f64 {
        if self.task.ignore_memory {
            return f64::INFINITY;
        }
        let moving = state.motion_bytes(line, self.ground.layers.len());
        self.task.cluster.usable_bytes() - work.workspace_bytes - moving
    }
}

/// Index of the cheapest recomputation that is allowed, in `RECOMPUTE_OPTIONS`.
fn least_recompute(task: &Task<'_>) -> usize {
    let allows = |option| task.restrictions.recompute.allows(option);
    if allows(Recompute::None) || allows(Recompute::PerLayer) {
        0
    } else if allows(Recompute::Selective) {
        1
    } else {
        2
    }
}
