//! What a worker does with one item of the queue: bounds its parts, or settles it.

use super::Task;
use crate::bounds::closed;
use crate::bounds::cuts::Cutter;
use crate::bounds::listed::{Lister, Members};
use crate::bounds::states::{StateView, States};
use crate::bounds::trade::Trade;
use crate::bounds::work::{Line, Work, options};
use crate::case::Case;
use crate::case::family::List;
use crate::case::ground::{Ground, Sheet};
use crate::case::pipelines::PipelineKey;
use crate::case::priced::Placed;
use crate::cost::state::LocalParams;
use crate::placement::{Scratch, VocabWay, dynamic, ilp};
use crate::simulate::CriticalPath;
use crate::space::{ExpertSplit, Inner, Space};
use models::decisions::{Decisions, Dtype, Recompute, Vocab};
use models::schedule::ScheduleName;
use std::collections::HashMap;
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

/// How far an item is decided.
#[derive(Clone, Debug)]
pub(super) enum Stage {
    /// All but the split of experts.
    Context(Arc<[ExpertSplit]>),
    /// A node, with the bound of its context; with several splits, those that differ in nothing but how the
    /// all-to-all is overlapped.
    Node(Arc<[ExpertSplit]>),
    /// The same with the least bound of its pipelines.
    Bounded(Arc<[ExpertSplit]>),
    /// A pipeline by its degrees alone.
    Pipeline,
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
#[derive(Clone, Debug, Default)]
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

type MembersKey = (ScheduleName, usize, usize, usize);

/// Prices and bounds; one for each thread, with memory of its own.
pub(super) struct Worker<'a> {
    task: &'a Task<'a>,
    space: Space<'a>,
    pub ground: Ground<'a>,
    pub scratch: Scratch,
    states: HashMap<(u64, u64, u64, u64, u64, Dtype), Rc<States>>,
    members: HashMap<(List, MembersKey), Rc<Members>>,
}

/// A node with what its pipelines' bounds are computed from.
struct NodeView {
    inner: Inner,
    sheet: Rc<Sheet>,
    work: Rc<Work>,
    states: Rc<States>,
    /// Least transfer between neighbours, whatever the rank order, s.
    hop_s: f64,
    /// Work with the vocabulary passes of each placement, and what they take at least.
    passes: HashMap<Vocab, (Rc<Work>, VocabWay)>,
    /// Least that states add, where each micro-batch communicates for itself and where all share, s.
    states_s: [Option<f64>; 2],
    trades: HashMap<Recompute, Rc<Trade>>,
}

impl NodeView {
    /// The trade of what may be recomputed.
    fn trade(&mut self, recompute: Recompute) -> Rc<Trade> {
        let kinds = &self.work.kinds;
        let trade = self.trades.entry(recompute);
        Rc::clone(trade.or_insert_with(|| Rc::new(Trade::new(kinds, options(recompute)))))
    }
}

/// A pipeline of a node.
#[derive(Clone, Copy)]
struct Kind {
    schedule: ScheduleName,
    vpp: u64,
    vocab: Vocab,
    recompute: Recompute,
}

impl Kind {
    fn of(self, d: &Decisions) -> Decisions {
        let Self { schedule, vpp, vocab, recompute } = self;
        Decisions { schedule, vpp, vocab, recompute, ..d.clone() }
    }
}

impl<'a> Worker<'a> {
    pub fn new(task: &'a Task<'a>) -> Self {
        Self {
            task,
            space: task.space(),
            ground: Ground::new(task.model, task.cluster, task.gpus),
            scratch: Scratch::default(),
            states: HashMap::new(),
            members: HashMap::new(),
        }
    }

    /// Splits or settles an item with respect to the best time so far.
    pub fn settle(&mut self, item: &Item, best_s: f64, paths: &Paths) -> Settled {
        match &item.stage {
            Stage::Context(splits) => self.split(item, splits, best_s),
            Stage::Node(splits) => self.bound_node(item, splits, best_s),
            Stage::Bounded(splits) if splits.len() > 1 => self.single_nodes(item, splits, best_s),
            Stage::Bounded(_) => self.pipelines(item, best_s),
            Stage::Pipeline => self.check_pipeline(item, best_s, paths),
            Stage::Checked => self.settle_states(item, best_s, paths),
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

    /// Some device has at least the mean of the devices' work on layers and does all its micro-batches
    /// one after another; the least recomputation allowed is counted.
    fn mean_s(&self, d: &Decisions, work: &Work) -> f64 {
        let least = least_recompute(self.task);
        let layer_s = work.layers_s(|kind| kind.load_s() + kind.recompute_s[least]);
        self.finish_s(d.micro_batches as f64 * layer_s / d.pp as f64)
    }

    /// A context with a bound that holds for every split of its experts; the node where there is one.
    pub fn context(&self, d: Decisions, splits: Arc<[ExpertSplit]>, count: u64) -> Item {
        let dense = self.task.model.moe.is_none();
        let sheet = if dense { self.ground.sheet(&d) } else { self.ground.floor_sheet(&d) };
        let work = Work::new(&self.ground, &d, &sheet);
        let bound_s = self.mean_s(&d, &work);
        let count = count * splits.len() as u64;
        let stage = if dense { Stage::Node(splits) } else { Stage::Context(splits) };
        Item { bound_s, decisions: d, count, stage }
    }

    /// Splits a context by how many ranks share its experts; how the all-to-all is overlapped comes later.
    fn split(&mut self, item: &Item, splits: &[ExpertSplit], best_s: f64) -> Settled {
        let mut settled = Settled::default();
        let count = item.count / splits.len() as u64;
        for alike in splits.chunk_by(|a, b| (a.ep, a.etp) == (b.ep, b.etp)) {
            let count = count * alike.len() as u64;
            let work = self.least_work(&item.decisions, alike);
            let bound_s = self.mean_s(&item.decisions, &work).max(item.bound_s);
            if bound_s >= best_s {
                settled.cut_by_time += count;
            } else {
                let decisions = alike[0].of(&item.decisions);
                let stage = Stage::Node(Arc::from(alike));
                settled.parts.push(Item { bound_s, decisions, count, stage });
            }
        }
        settled
    }

    /// Work that no split of several undercuts.
    fn least_work(&self, d: &Decisions, splits: &[ExpertSplit]) -> Work {
        let of = |split: &ExpertSplit| {
            let d = split.of(d);
            if splits.len() == 1 {
                return Work::new(&self.ground, &d, &self.ground.sheet(&d));
            }
            Work::new(&self.ground, &d, &self.ground.price_of(&d))
        };
        let least = splits.iter().map(of).reduce(|a, b| a.least(&b));
        least.unwrap_or_else(|| Work::new(&self.ground, d, &self.ground.sheet(d)))
    }

    /// Nodes of a group.
    fn single_nodes(&mut self, item: &Item, splits: &[ExpertSplit], best_s: f64) -> Settled {
        let mut settled = Settled::default();
        let count = item.count / splits.len() as u64;
        for split in splits {
            let decisions = split.of(&item.decisions);
            let work = self.least_work(&decisions, &[*split]);
            let bound_s = self.mean_s(&decisions, &work).max(item.bound_s);
            if bound_s >= best_s {
                settled.cut_by_time += count;
            } else {
                let stage = Stage::Node(Arc::from([*split]));
                settled.parts.push(Item { bound_s, decisions, count, stage });
            }
        }
        settled
    }

    fn view(&mut self, d: &Decisions) -> NodeView {
        let inner = self.space.inner(&crate::space::Node { decisions: d.clone() });
        let sheet = self.ground.sheet(d);
        let work = Rc::new(Work::new(&self.ground, d, &sheet));
        let states = self.states(d, &inner, &sheet);
        let hops = inner.rank_order.iter().map(|&rank_order| {
            let d = Decisions { rank_order, ..d.clone() };
            crate::case::hop(&self.ground, &d, &sheet).time_s
        });
        let hop_s = hops.fold(f64::INFINITY, f64::min);
        NodeView {
            inner,
            sheet,
            work,
            states,
            hop_s,
            passes: HashMap::new(),
            states_s: [None; 2],
            trades: HashMap::new(),
        }
    }

    fn states(&mut self, d: &Decisions, inner: &Inner, sheet: &Sheet) -> Rc<States> {
        let key = (d.tp, d.pp, d.cp, d.ep, d.etp, d.dtype);
        if let Some(known) = self.states.get(&key) {
            return Rc::clone(known);
        }
        let states = Rc::new(States::new(&self.ground, d, inner, &sheet.params));
        self.states.insert(key, Rc::clone(&states));
        states
    }

    /// The pipeline and its work as they are at least, whatever the rank order.
    fn line(&self, node: &mut NodeView, d: &Decisions) -> (Line, Rc<Work>) {
        let looped = matches!(d.schedule, ScheduleName::Interleaved1F1B | ScheduleName::LoopedBfs);
        let mut line = Line {
            schedule: d.schedule,
            devices: d.pp as usize,
            chunks: d.vpp as usize,
            micro_batches: d.micro_batches as usize,
            hop_s: node.hop_s,
            hop_blocks: !(looped && self.task.cluster.software.p2p_overlap) || d.pp == 1,
            vocab: d.vocab,
            passes: None,
            recompute: d.recompute,
        };
        if !d.vocab.over_pipeline() {
            return (line, Rc::clone(&node.work));
        }
        let (ground, sheet, inner) = (&self.ground, &node.sheet, &node.inner);
        let (work, way) = node.passes.entry(d.vocab).or_insert_with(|| {
            let ways = inner.rank_order.iter().filter_map(|&rank_order| {
                ground.line(&Decisions { rank_order, ..d.clone() }, sheet).passes
            });
            let least = ways.reduce(|a, b| VocabWay {
                passes_s: a.passes_s.min(b.passes_s),
                way_s: a.way_s.min(b.way_s),
                barriers: a.barriers,
            });
            (Rc::new(ground.with_passes(d, sheet, &node.work)), least.unwrap_or_default())
        });
        line.passes = Some(*way);
        (line, Rc::clone(work))
    }

    fn kinds(&self, inner: &Inner) -> Vec<Kind> {
        let mut kinds = vec![];
        for (schedule, vpp, vocabs) in &inner.schedules {
            for &vocab in vocabs.iter().filter(|&&vocab| !is_dominated(inner, *schedule, vocab)) {
                let of = |recompute| Kind { schedule: *schedule, vpp: *vpp, vocab, recompute };
                kinds.extend(recompute_choices(inner).into_iter().map(of));
            }
        }
        kinds
    }

    /// A pipeline by its degrees alone, with the least that states add, finished, s.
    fn quick_s(&mut self, node: &mut NodeView, d: &Decisions) -> f64 {
        let (line, work) = self.line(node, d);
        let budget = self.budget_bytes(&line, &work, &node.states.least);
        let least = node.states.least.bytes;
        let trade = node.trade(d.recompute);
        let spent_s = match List::of(d.vocab, d.vpp) {
            Some(list) if d.vpp > 1 => {
                self.members(list, &line).recompute_s(&line, &work, &trade, least, budget)
            }
            _ => trade.at_first(&work.counts).0,
        };
        let passes_s = closed::passes_s(&line, &work, spent_s);
        let mean_s = line.m() * ((work.load_s() + spent_s) / line.devices as f64 + line.passes_s());
        let shared = usize::from(line.schedule == ScheduleName::LoopedBfs);
        let of = || node.states.least_s(&work, &line);
        let states_s = *node.states_s[shared].get_or_insert_with(of);
        self.finish_s(passes_s.max(mean_s + states_s))
    }

    /// A pipeline with the recomputation that the states which take least memory make necessary, finished,
    /// s; infinite where it is not below the limit.
    fn checked_s(&mut self, node: &mut NodeView, d: &Decisions, best_s: f64) -> f64 {
        let (line, work) = self.line(node, d);
        let states = Rc::clone(&node.states);
        let core_s = self.placed_s(&line, &work, &states.least, best_s);
        self.finish_s(core_s)
    }

    /// Lower bound on the passes of any placement under states, s; infinite where none is faster than
    /// `best_s`. `work` has the states' part in its passes.
    fn placed_s(&mut self, line: &Line, work: &Work, state: &StateView, best_s: f64) -> f64 {
        let limit_s = self.core_s(best_s);
        let budget_bytes = self.budget_bytes(line, work, state);
        match List::of(line.vocab, line.chunks as u64) {
            Some(list) => {
                let members = self.members(list, line);
                Lister { line, work, state, budget_bytes }.bound_s(&members, limit_s)
            }
            None => {
                let cutter = Cutter::new(line, work, state, &self.ground.layers, budget_bytes);
                cutter.least_s(limit_s)
            }
        }
    }

    fn members(&mut self, list: List, line: &Line) -> Rc<Members> {
        let ground = &self.ground;
        let members = self.members.entry((list, Members::key(line))).or_insert_with(|| {
            let ranges = ground.listed_ranges(list, line.devices * line.chunks);
            Rc::new(Members::new(&ground.layers, line, ranges))
        });
        Rc::clone(members)
    }

    /// Replaces a node's bound by the least of its pipelines', looking only as far as that takes and no
    /// further than a little beyond the bound it has.
    fn bound_node(&mut self, item: &Item, splits: &Arc<[ExpertSplit]>, best_s: f64) -> Settled {
        let d = &item.decisions;
        let node = &mut self.view(d);
        if splits.len() > 1 {
            node.work = Rc::new(self.least_work(d, splits));
        }
        let mut kinds: Vec<(f64, Decisions)> = vec![];
        for kind in self.kinds(&node.inner) {
            let d = kind.of(d);
            kinds.push((self.quick_s(node, &d), d));
        }
        kinds.sort_by(|a, b| a.0.total_cmp(&b.0));
        let limit_s = best_s.min(NEAR * item.bound_s);
        let mut least_s = limit_s;
        for (quick_s, d) in kinds {
            if quick_s >= least_s {
                break;
            }
            least_s = least_s.min(self.checked_s(node, &d, least_s).max(quick_s));
        }
        nearer(item, least_s, limit_s, best_s, Stage::Bounded(Arc::clone(splits)))
    }

    fn pipelines(&mut self, item: &Item, best_s: f64) -> Settled {
        let mut settled = Settled::default();
        let node = &mut self.view(&item.decisions);
        let states = (node.inner.per_pipeline() / node.inner.recompute.len()) as u64;
        let kinds = self.kinds(&node.inner);
        settled.cut_by_dominance = item.count - kinds.len() as u64 * states;
        for kind in kinds {
            let decisions = kind.of(&item.decisions);
            let bound_s = self.quick_s(node, &decisions).max(item.bound_s);
            if bound_s >= best_s {
                settled.cut_by_time += states;
            } else {
                let stage = Stage::Pipeline;
                settled.parts.push(Item { bound_s, decisions, count: states, stage });
            }
        }
        settled
    }

    fn check_pipeline(&mut self, item: &Item, best_s: f64, paths: &Paths) -> Settled {
        let node = &mut self.view(&item.decisions);
        let limit_s = best_s.min(NEAR * item.bound_s);
        let mut bound_s = self.checked_s(node, &item.decisions, limit_s).max(item.bound_s);
        if bound_s < limit_s {
            bound_s = bound_s.max(self.paths_s(node, &item.decisions, limit_s, paths));
        }
        nearer(item, bound_s, limit_s, best_s, Stage::Checked)
    }

    /// The longest known chain of a pipeline under states that take least, whatever the rank order,
    /// finished, s.
    fn paths_s(&self, node: &mut NodeView, d: &Decisions, best_s: f64, paths: &Paths) -> f64 {
        let Some(known) = paths.get(&PipelineKey::new(d)).filter(|_| d.vpp == 1) else {
            return 0.0;
        };
        let (line, work) = self.line(node, d);
        let fixed: Vec<_> = node
            .inner
            .rank_order
            .iter()
            .map(|&rank_order| {
                let d = Decisions { rank_order, ..d.clone() };
                self.ground.fixed_durations(&d, &node.sheet)
            })
            .collect();
        let budget = self.budget_bytes(&line, &work, &node.states.least);
        let cutter = Cutter::new(&line, &work, &node.states.least, &self.ground.layers, budget);
        let Some(cuts) = cutter.solve(self.core_s(best_s)) else { return f64::INFINITY };
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

    /// Settles every ZeRO stage, shard group, offloading and rank order on one pipeline.
    fn settle_states(&mut self, item: &Item, best_s: f64, paths: &Paths) -> Settled {
        let node = &mut self.view(&item.decisions);
        let (line, work) = self.line(node, &item.decisions);
        let states = Rc::clone(&node.states);
        let mut settled = Settled::default();
        let mut views: Vec<(f64, &StateView)> = vec![];
        for view in &states.views {
            let bound_s = self.state_s(&line, &work, view).max(item.bound_s);
            if bound_s >= best_s {
                settled.cut_by_time += 1;
            } else {
                views.push((bound_s, view));
            }
        }
        views.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (bound_s, view) in views {
            if bound_s >= settled.bar_s(best_s) {
                settled.cut_by_time += 1;
            } else {
                let d = view.of(&item.decisions);
                self.settle_state(d, view, node, (bound_s, best_s), paths, &mut settled);
            }
        }
        settled
    }

    /// A pipeline under states, memory aside, finished, s.
    fn state_s(&self, line: &Line, work: &Work, view: &StateView) -> f64 {
        let p = line.devices as f64;
        let mean = work.params() * (1.0 / p);
        let first = line.options()[0];
        let layers_s = work.layers_s(|kind| kind.load_s() + kind.recompute_s[first]);
        let passes_s = view.in_all_passes_s(work, line) + line.m() * layers_s;
        let mean_s = passes_s / p + line.m() * line.passes_s() + view.tail_of_s(mean, line.chunks);
        self.finish_s(mean_s + view.step_of_s(mean, line.chunks))
    }

    fn settle_state(
        &mut self,
        d: Decisions,
        view: &StateView,
        node: &NodeView,
        (bound_s, best_s): (f64, f64),
        paths: &Paths,
        settled: &mut Settled,
    ) {
        let bar_s = settled.bar_s(best_s);
        let line = self.ground.line(&d, &node.sheet);
        let plain = self.ground.work(&d, &node.sheet);
        let budget = self.task.cluster.usable_bytes() - plain.workspace_bytes;
        let least = closed::least_bytes(&plain, d.pp as f64, view.bytes, line.options());
        if !self.task.ignore_memory && least > budget * (1.0 + 1e-9) {
            settled.cut_by_memory += 1;
            return;
        }
        let work = view.added_to(&plain, &line);
        let mean = work.params() * (1.0 / line.devices as f64);
        let step_s = view.step_of_s(mean, line.chunks);
        if let Some(list) = List::of(d.vocab, d.vpp) {
            let budget_bytes = self.budget_bytes(&line, &plain, view);
            let lister = Lister { line: &line, work: &work, state: view, budget_bytes };
            let members = self.members(list, &line);
            let below = lister.below(&members, self.core_s(bar_s) - step_s);
            if below.is_empty() {
                settled.cut_by_time += 1;
            } else {
                settled.placed += 1;
                self.place_listed(d, &members, below, bar_s, settled);
            }
            return;
        }
        let mut core_s = self.placed_s(&line, &work, view, bar_s) + step_s;
        if line.chunks == 1 && self.finish_s(core_s) < bar_s {
            let key = PipelineKey::new(&d);
            let own = settled.paths.iter().filter(|(of, _)| *of == key).map(|(_, path)| path);
            let known = paths.get(&key).into_iter().flatten().chain(own);
            core_s = core_s.max(self.chains_s(&d, &node.sheet, view, bar_s, known) + step_s);
        }
        let bound_s = bound_s.max(self.finish_s(core_s));
        if bound_s >= bar_s {
            settled.cut_by_time += 1;
            return;
        }
        settled.placed += 1;
        self.place(d, bound_s, bar_s, settled);
    }

    /// The longest of known chains of a combination, s; infinite where no cut lies below `bar_s`.
    fn chains_s<'p>(
        &self,
        d: &Decisions,
        sheet: &Sheet,
        view: &StateView,
        bar_s: f64,
        known: impl Iterator<Item = &'p CriticalPath>,
    ) -> f64 {
        let mut known = known.peekable();
        if known.peek().is_none() || List::of(d.vocab, d.vpp).is_some() {
            return 0.0;
        }
        let line = self.ground.line(d, sheet);
        let plain = self.ground.work(d, sheet);
        let budget = self.budget_bytes(&line, &plain, view);
        let work = view.added_to(&plain, &line);
        let fixed = self.ground.fixed_durations(d, sheet);
        let cutter = Cutter::new(&line, &work, view, &self.ground.layers, budget);
        let Some(cuts) = cutter.solve(self.core_s(bar_s)) else { return f64::INFINITY };
        known.map(|path| cutter.path_s(&cuts, path, path.length_s(&fixed))).fold(0.0, f64::max)
    }

    /// Whether known chains leave nothing of an open combination below the best time.
    pub fn is_cut_by(&self, d: &Decisions, best_s: f64, known: &[CriticalPath]) -> bool {
        let sheet = self.ground.sheet(d);
        let view = StateView::new(&self.ground, d, &sheet.params);
        let mean = sheet_params(&self.ground, &sheet) * (1.0 / d.pp as f64);
        let core_s = self.chains_s(d, &sheet, &view, best_s, known.iter());
        self.finish_s(core_s + view.step_of_s(mean, 1)) >= best_s
    }

    /// Tries the listed placements whose bounds lie below the best time, most promising first.
    fn place_listed(
        &mut self,
        d: Decisions,
        members: &Members,
        mut below: Vec<(usize, f64)>,
        bar_s: f64,
        settled: &mut Settled,
    ) {
        let Ok(case) = Case::new(&self.ground, d) else { return };
        below.sort_by(|a, b| a.1.total_cmp(&b.1));
        let ranges = below.into_iter().map(|(position, _)| members.list[position].clone());
        let tried: Vec<_> = ranges.collect();
        let (cutoff_s, scratch) = (case.core_s(bar_s), &mut self.scratch);
        let best = case.best_listed(&tried, cutoff_s, self.task.ignore_memory, scratch);
        if let Some((placed, value_s)) = best {
            offer(&case, placed, value_s, bar_s, settled);
        }
    }

    /// Looks for a good placement of a combination, and leaves it open where a better one than the best so
    /// far may still be hidden in it.
    fn place(&mut self, d: Decisions, bound_s: f64, bar_s: f64, settled: &mut Settled) {
        let Ok(case) = Case::new(&self.ground, d) else { return };
        let cutoff_s = case.core_s(bar_s);
        let ignore_memory = self.task.ignore_memory;
        let Some(problem) = case.problem(cutoff_s, ignore_memory) else { return };
        let Some(bounded) = dynamic::solve(&problem) else { return };
        let bound_s = bound_s.max(case.finish_s(bounded.bound_s));
        if bound_s >= bar_s {
            return;
        }
        let value_s = problem.iteration_s(&bounded.choice, &mut self.scratch);
        if let Some(placed) = case.placed(&problem, &bounded.choice) {
            offer(&case, placed, value_s, bar_s, settled);
        }
        if value_s > bounded.bound_s * (1.0 + ilp::PROOF_TOLERANCE) {
            let path = problem.critical_path(&bounded.choice, &mut self.scratch);
            settled.paths.push((PipelineKey::new(&case.decisions), path));
            settled.open.push(Open { decisions: case.decisions, bound_s });
        }
    }
}

/// How far beyond its bound an item is looked into at a time. Tight limits make bounds cheap.
const NEAR: f64 = 1.1;

/// An item that a bound moved on to `stage`, or that waits again where the bound reached its limit.
fn nearer(item: &Item, bound_s: f64, limit_s: f64, best_s: f64, stage: Stage) -> Settled {
    if bound_s.min(limit_s) >= best_s {
        return Settled::cut(item.count);
    }
    let part = if bound_s >= limit_s {
        Item { bound_s: limit_s, ..item.clone() }
    } else {
        Item { bound_s: bound_s.max(item.bound_s), stage, ..item.clone() }
    };
    Settled { parts: vec![part], ..Settled::default() }
}

fn offer(case: &Case<'_>, placed: Placed, core_s: f64, bar_s: f64, settled: &mut Settled) {
    let iteration_s = case.finish_s(core_s);
    if iteration_s < bar_s {
        settled.best = Some(Candidate { decisions: case.decisions.clone(), placed, iteration_s });
    }
}

/// Parameters of all layers.
fn sheet_params(ground: &Ground<'_>, sheet: &Sheet) -> LocalParams {
    let counts = ground.layers.between(0, ground.layers.len());
    let all = sheet.params.iter().zip(counts);
    all.fold(LocalParams::default(), |sum, (&params, count)| sum + params * count as f64)
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

/// Uniform recomputation is a mix of `per_layer`.
fn recompute_choices(inner: &Inner) -> Vec<Recompute> {
    let all = &inner.recompute;
    if all.contains(&Recompute::PerLayer) { vec![Recompute::PerLayer] } else { all.clone() }
}

/// See the documentation of [`super`].
fn is_dominated(inner: &Inner, schedule: ScheduleName, vocab: Vocab) -> bool {
    let vocabs = |name: ScheduleName| {
        inner.schedules.iter().find(|(s, ..)| *s == name).map(|(.., vocabs)| vocabs)
    };
    let here = vocabs(schedule);
    let freer = here.is_some_and(|vocabs| vocabs.contains(&Vocab::Tensor));
    if freer && matches!(vocab, Vocab::FirstLast | Vocab::Redistribute) {
        return true;
    }
    let plain = matches!(schedule, ScheduleName::GPipe | ScheduleName::Naive);
    plain && vocabs(ScheduleName::OneFOneB).is_some_and(|vocabs| vocabs.contains(&vocab))
}
