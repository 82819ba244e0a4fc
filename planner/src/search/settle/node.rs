//! A node's pipelines, and how long each takes at least.

use super::Worker;
use crate::bounds::closed;
use crate::bounds::cuts::Cutter;
use crate::bounds::listed::{Lister, Members, Shapes};
use crate::bounds::states::{Burden, StateView, States};
use crate::bounds::trade::Trade;
use crate::bounds::work::{KindWork, Line, Work};
use crate::case::family::List;
use crate::case::ground::Sheet;
use crate::case::mixes::options;
use crate::case::ways;
use crate::placement::VocabWay;
use crate::space::{Inner, InnerKey, Node};
use models::decisions::{CpStyle, Decisions, Dtype, MoeOverlap, Recompute, Vocab};
use models::schedule::{ScheduleName, StageLayout};
use rustc_hash::FxHashMap as HashMap;
use std::rc::Rc;

/// A node with what its pipelines' bounds are computed from.
pub(super) struct NodeView {
    pub(super) inner: Rc<Inner>,
    pub(super) sheet: Rc<Sheet>,
    pub(super) work: Rc<Work>,
    pub(super) states: Rc<States>,
    /// Least transfer between neighbours, whatever the rank order, s.
    pub(super) hop_s: f64,
    /// Work with the vocabulary passes of each placement, and what they take at least.
    pub(super) passes: HashMap<Vocab, (Rc<Work>, VocabWay)>,
    /// What states add at least, where each micro-batch communicates for itself and where all share.
    pub(super) burdens: [Option<Rc<[Burden]>>; 2],
    pub(super) trades: HashMap<Recompute, Rc<Trade>>,
    /// By list, layout, recomputation and whether backward is split, what holds of any order and how far it was
    /// looked into, finished, s.
    any_order_s: HashMap<(List, StageLayout, Recompute, bool), (f64, f64)>,
}

/// No node that this speaks of has a pipeline in less time, finished, s.
#[derive(Clone, Copy, Debug)]
pub(super) struct KindBound {
    pub(super) bound_s: f64,
    pub(super) by: By,
}

/// What a bound of a pipeline was had by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::search) enum By {
    /// Nodes around it.
    Others,
    /// Its degrees, or as much of the next as showed enough.
    Degrees,
    /// The recomputation that memory makes necessary: no more is known without its states.
    Memory,
}

/// A pipeline's work, with what its placements hold where that is known.
#[derive(Clone, Copy)]
struct Held<'a> {
    line: &'a Line,
    work: &'a Work,
    members: Option<&'a Members>,
    /// See [`Worker::slack`].
    slack: f64,
}

impl Held<'_> {
    /// Least recomputation of a micro-batch in the whole model where states take so many bytes a parameter, s.
    fn recompute_s(self, trade: &Trade, state_bytes: [f64; 2], budget: f64) -> f64 {
        match self.members {
            Some(members) => members.recompute_s(self.line, self.work, trade, state_bytes, budget),
            None => trade.at_first(&self.work.counts).0,
        }
    }
}

/// What tells nodes apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct NodeKey {
    degrees: [u64; 8],
    micro_batch: u64,
    cp_style: CpStyle,
    sequence_parallel: bool,
    dtype: Dtype,
    overlap: (MoeOverlap, u64),
}

impl NodeKey {
    fn new(d: &Decisions) -> Self {
        Self {
            degrees: [d.tp, d.pp, d.cp, d.cp_ulysses, d.dp, d.ep, d.etp, d.micro_batches],
            micro_batch: d.micro_batch,
            cp_style: d.cp_style,
            sequence_parallel: d.sequence_parallel,
            dtype: d.dtype,
            overlap: (d.moe_overlap, d.moe_overlap_degree),
        }
    }
}

/// Nodes that are kept, a few kilobytes each.
const MOST_NODES: usize = 1 << 10;

impl NodeView {
    /// The trade of what may be recomputed.
    pub(super) fn trade(&mut self, recompute: Recompute) -> Rc<Trade> {
        let kinds = &self.work.kinds;
        let trade = self.trades.entry(recompute);
        Rc::clone(trade.or_insert_with(|| Rc::new(Trade::new(kinds, options(recompute)))))
    }
}

/// A pipeline of a node.
#[derive(Clone, Copy)]
pub(super) struct Kind {
    schedule: ScheduleName,
    vpp: u64,
    vocab: Vocab,
    recompute: Recompute,
}

impl Kind {
    pub(super) fn of(self, d: &Decisions) -> Decisions {
        let Self { schedule, vpp, vocab, recompute } = self;
        Decisions { schedule, vpp, vocab, recompute, ..d.clone() }
    }
}

impl Worker<'_> {
    /// Works on a node whose pipelines come one after another, and keeps what was computed of it.
    pub(super) fn with_node<R>(
        &mut self,
        d: &Decisions,
        work: impl FnOnce(&mut Self, &mut NodeView) -> R,
    ) -> R {
        let key = NodeKey::new(d);
        let mut node = self.nodes.remove(&key).unwrap_or_else(|| self.view(d));
        let result = work(self, &mut node);
        if self.nodes.len() >= MOST_NODES {
            self.nodes.clear();
        }
        self.nodes.insert(key, node);
        result
    }

    pub(super) fn view(&mut self, d: &Decisions) -> NodeView {
        let inner = self.inner(d);
        let sheet = self.ground.sheet(d);
        let work = Rc::new(Work::new(&self.ground, d, &sheet));
        let states = self.states(d, &inner, &sheet);
        let hops = inner.rank_order.iter().map(|&rank_order| {
            // All the node's pipelines have it, and vocabulary passes beside a hop only make it longer.
            let d = Decisions { rank_order, vocab: Vocab::Tensor, ..d.clone() };
            ways::hop(&self.ground, &d, &sheet).least_s()
        });
        let hop_s = hops.fold(f64::INFINITY, f64::min);
        NodeView {
            inner,
            sheet,
            work,
            states,
            hop_s,
            passes: HashMap::default(),
            burdens: [None, None],
            trades: HashMap::default(),
            any_order_s: HashMap::default(),
        }
    }

    pub(super) fn inner(&mut self, d: &Decisions) -> Rc<Inner> {
        let space = self.space;
        let of = || Rc::new(space.inner(&Node { decisions: d.clone() }));
        Rc::clone(self.inners.entry(InnerKey::new(d)).or_insert_with(of))
    }

    pub(super) fn states(&mut self, d: &Decisions, inner: &Inner, sheet: &Sheet) -> Rc<States> {
        let key = (d.tp, d.pp, d.cp, d.ep, d.etp, d.dtype);
        if let Some(known) = self.states.get(&key) {
            return Rc::clone(known);
        }
        let states = Rc::new(States::new(&self.ground, d, inner, &sheet.params));
        self.states.insert(key, Rc::clone(&states));
        states
    }

    /// A pipeline without vocabulary passes.
    pub(super) fn bare_line(&self, hop_s: f64, d: &Decisions) -> Line {
        Line {
            schedule: d.schedule,
            devices: d.pp as usize,
            chunks: d.vpp as usize,
            micro_batches: d.micro_batches as usize,
            hop_s,
            hop_blocks: ways::hop_blocks(&self.ground, d),
            vocab: d.vocab,
            passes: None,
            recompute: d.recompute,
        }
    }

    /// The pipeline and its work as they are at least, whatever the rank order.
    pub(super) fn line(&self, node: &mut NodeView, d: &Decisions) -> (Line, Rc<Work>) {
        let mut line = self.bare_line(node.hop_s, d);
        if !d.vocab.over_pipeline() {
            return (line, Rc::clone(&node.work));
        }
        let (ground, sheet, inner) = (&self.ground, &node.sheet, &node.inner);
        let (work, way) = node.passes.entry(d.vocab).or_insert_with(|| {
            let ways = inner.rank_order.iter().filter_map(|&rank_order| {
                Line::new(ground, &Decisions { rank_order, ..d.clone() }, sheet).passes
            });
            let least = ways.reduce(|a, b| VocabWay {
                passes_s: a.passes_s.min(b.passes_s),
                way_s: a.way_s.min(b.way_s),
                passes: a.passes,
            });
            (Rc::new(node.work.with_passes(ground, d, sheet)), least.unwrap_or_default())
        });
        line.passes = Some(*way);
        (line, Rc::clone(work))
    }

    /// Pipelines of a node whose degrees are those of `d`.
    pub(super) fn kinds(&self, inner: &Inner, d: &Decisions) -> Vec<Kind> {
        let mut kinds = vec![];
        let (p, m) = (d.pp as usize, d.micro_batches as usize);
        for (schedule, vpp, vocabs) in &inner.schedules {
            let same = schedule.made_by_hand(p, m, *vpp as usize);
            let is_open = |vocab: &&Vocab| {
                !is_dominated(inner, *schedule, **vocab)
                    && !is_named_otherwise(inner, same, **vocab)
            };
            for &vocab in vocabs.iter().filter(is_open) {
                let of = |recompute| Kind { schedule: *schedule, vpp: *vpp, vocab, recompute };
                kinds.extend(recompute_choices(inner).into_iter().map(of));
            }
        }
        kinds
    }

    /// A pipeline by its degrees alone, with the least that states add, finished, s; no more is looked at
    /// once the bound reaches `enough_s`.
    pub(super) fn quick_s(&mut self, node: &mut NodeView, d: &Decisions, enough_s: f64) -> f64 {
        if d.vocab.over_pipeline() {
            // Layers and their bubble alone: pricing vocabulary passes takes longer.
            let line = Line { passes: Some(VocabWay::default()), ..self.bare_line(0.0, d) };
            let layers_s = self.finish_s(closed::passes_s(&line, &node.work, 0.0));
            if layers_s >= enough_s {
                return layers_s;
            }
        }
        let (line, work) = self.line(node, d);
        // Orders that are not counted are not made for a quick look.
        let list = List::of(d.vocab, d.vpp).filter(|_| d.vpp > 1 && line.is_known_unmade());
        let slack = list.map_or(1.0, |list| self.slack(list, &line));
        let members = list.map(|list| self.members(list, &line));
        let held = Held { line: &line, work: &work, members: members.as_deref(), slack };
        let (trade, least) = (node.trade(d.recompute), node.states.least.bytes);
        let budget = self.budget_bytes(&line, &work, &node.states.least);
        let spent_s = held.recompute_s(&trade, least, budget);
        let passes_s = self.finish_s(closed::passes_s(&line, &work, spent_s) / slack);
        passes_s.max(self.burdened_s(node, held, budget))
    }

    /// A pipeline with the states that cost it least over every cut and every mix of recomputation, finished, s.
    pub(super) fn any_cut_s(&mut self, node: &mut NodeView, d: &Decisions) -> f64 {
        let (line, work) = self.line(node, d);
        let spent_s = node.trade(d.recompute).at_first(&work.counts).0;
        let passes_s = closed::passes_s(&line, &work, spent_s);
        self.mean_load_s(node, (&line, &work)).max(self.finish_s(passes_s))
    }

    /// The same where devices do not wait for one another at the end of an iteration, which then lasts from a device's
    /// own first start to its own last end: no device starts later than the first micro-batch has come down all
    /// layers. No better than it takes to see that it lies beyond `limit_s`.
    pub(super) fn without_barrier_s(
        &mut self,
        node: &mut NodeView,
        d: &Decisions,
        limit_s: f64,
    ) -> f64 {
        let (line, work) = self.line(node, d);
        let load_s = self.mean_load_s(node, (&line, &work));
        if load_s >= limit_s {
            return load_s;
        }
        let start_s = self.latest_start_s(node, d, &line);
        let states = Rc::clone(&node.states);
        let passes_s = if List::of(d.vocab, d.vpp).is_none() {
            let within_s = self.finish_s(self.core_s(limit_s) + start_s);
            self.placed_s(&line, &work, &states.least, within_s)
        } else {
            let spent_s = node.trade(d.recompute).at_first(&work.counts).0;
            closed::passes_s(&line, &work, spent_s)
        };
        load_s.max(self.finish_s(passes_s - start_s))
    }

    /// The latest that any device of a pipeline may start, s.
    fn latest_start_s(&self, node: &NodeView, d: &Decisions, line: &Line) -> f64 {
        let gathers_s = |index: usize, kind: &KindWork| {
            let exposed = node.states.views().map(|view| view.exposed_s(index, kind, line).0);
            exposed.fold(0.0, f64::max)
        };
        let all = node.work.kinds.iter().zip(&node.work.counts).enumerate();
        let layers_s: f64 = all
            .map(|(index, (kind, &count))| count as f64 * (kind.forward_s + gathers_s(index, kind)))
            .sum();
        let hops = node.inner.rank_order.iter().map(|&rank_order| {
            ways::hop(&self.ground, &Decisions { rank_order, ..d.clone() }, &node.sheet).most_s()
        });
        let between_s = hops.fold(0.0, f64::max) + ways::gap_s(&self.ground, d);
        layers_s + node.work.embedding.forward_s + d.pp as f64 * between_s
    }

    fn mean_load_s(&self, node: &mut NodeView, (line, work): (&Line, &Work)) -> f64 {
        let held = Held { line, work, members: None, slack: 1.0 };
        let budget = self.budget_bytes(line, work, &node.states.least);
        self.burdened_s(node, held, budget)
    }

    /// A pipeline with the states that cost it least, were its devices' work and bytes the mean of all or what some
    /// device must have of one kind of layer, finished, s; infinite where none fits.
    fn burdened_s(&self, node: &mut NodeView, held: Held<'_>, budget: f64) -> f64 {
        let Held { line, work, slack, .. } = held;
        let shared = usize::from(line.schedule == ScheduleName::LoopedBfs);
        let states = Rc::clone(&node.states);
        let of = || Rc::from(states.burdens(work, line));
        let burdens = Rc::clone(node.burdens[shared].get_or_insert_with(of));
        let trade = node.trade(line.recompute);
        let first_s = trade.at_first(&work.counts).0;
        let vocab_s = line.m() * line.passes_s();
        let mean_s =
            |spent_s: f64| line.m() * (work.load_s() + spent_s) / line.devices as f64 + vocab_s;
        let mut least_s = f64::INFINITY;
        for burden in burdens.iter() {
            if mean_s(first_s) + burden.added_s >= least_s {
                break;
            }
            if closed::least_bytes(line, work, burden.bytes) <= budget * (1.0 + 1e-9) {
                let spent_s = held.recompute_s(&trade, burden.bytes, budget);
                let device_s = (mean_s(spent_s) + burden.added_s).max(burden.fullest_s + vocab_s);
                least_s = least_s.min(device_s);
            }
        }
        self.finish_s(least_s / slack)
    }

    /// A pipeline with the recomputation that the states which take least memory make necessary, finished,
    /// s; infinite where it does not fit, and beyond `far_s` no better than that takes. Its order is not made
    /// where any would be beyond `near_s`.
    pub(super) fn checked_s(
        &mut self,
        node: &mut NodeView,
        d: &Decisions,
        (near_s, far_s): (f64, f64),
    ) -> KindBound {
        let (line, work) = self.line(node, d);
        let states = Rc::clone(&node.states);
        let any_order_s = self.any_order_s(node, &line, &work, near_s);
        if any_order_s >= near_s {
            return KindBound { bound_s: any_order_s, by: By::Degrees };
        }
        let core_s = self.placed_s(&line, &work, &states.least, far_s);
        let bound_s = self.finish_s(core_s);
        KindBound { bound_s, by: if bound_s < far_s { By::Memory } else { By::Degrees } }
    }

    /// What holds of a pipeline in any order, finished, s: most pipelines are cut without theirs. Schedules
    /// that split backward share it.
    fn any_order_s(&mut self, node: &mut NodeView, line: &Line, work: &Work, limit_s: f64) -> f64 {
        let Some(list) = List::of(line.vocab, line.chunks as u64) else { return 0.0 };
        let Some(any) = self.any_members(list, line) else { return 0.0 };
        let kind = (list, line.layout(), line.recompute, line.splits_backward());
        if let Some(&(known_s, looked_s)) = node.any_order_s.get(&kind)
            && (known_s < looked_s || known_s >= limit_s)
        {
            return known_s;
        }
        let state = &node.states.least;
        let budget_bytes = self.budget_bytes(line, work, state);
        let (lister, slack) = (Lister { line, work, state, budget_bytes }, self.slack(list, line));
        let core_s = lister.bound_s(&any, self.core_s(limit_s) * slack);
        let bound_s = self.finish_s(core_s / slack);
        node.any_order_s.insert(kind, (bound_s, limit_s));
        bound_s
    }

    /// Lower bound on the passes of any placement under states, s; infinite where none fits, and no better than
    /// it takes to see that none is faster than `best_s`. `work` has the states' part in its passes.
    pub(super) fn placed_s(
        &mut self,
        line: &Line,
        work: &Work,
        state: &StateView,
        best_s: f64,
    ) -> f64 {
        let limit_s = self.core_s(best_s);
        let budget_bytes = self.budget_bytes(line, work, state);
        match List::of(line.vocab, line.chunks as u64) {
            Some(list) => {
                let (lister, slack) =
                    (Lister { line, work, state, budget_bytes }, self.slack(list, line));
                lister.bound_s(&self.members(list, line), limit_s * slack) / slack
            }
            None => {
                let cutter = Cutter::new(line, work, state, &self.ground.layers, budget_bytes);
                cutter.in_made_order(&self.ground).least_s(limit_s)
            }
        }
    }

    /// What holds of any order, where a pipeline's own is known only once it is made. Whether it is already depends on
    /// what this thread did before, and is not asked: the proof may not.
    fn any_members(&mut self, list: List, line: &Line) -> Option<Rc<Members>> {
        if line.is_known_unmade() || line.passes.is_some() {
            return None;
        }
        let key = (list, line.layout(), line.devices, line.micro_batches, line.chunks);
        if let Some(known) = self.any_members.get(&key) {
            return Some(Rc::clone(known));
        }
        let members = Rc::new(Members::of_any(line, self.shapes(list, line)));
        self.any_members.insert(key, Rc::clone(&members));
        Some(members)
    }

    pub(super) fn members(&mut self, list: List, line: &Line) -> Rc<Members> {
        let key = (list, Members::key(line));
        if let Some(known) = self.members.get(&key) {
            return Rc::clone(known);
        }
        let shapes = self.shapes(list, line);
        let pipeline = || self.ground.pipeline_of(line.key());
        let members = Rc::new(Members::new(line, shapes, pipeline));
        self.members.insert(key, Rc::clone(&members));
        members
    }

    fn shapes(&mut self, list: List, line: &Line) -> Rc<Shapes> {
        let Line { devices, chunks, vocab, .. } = *line;
        let ground = &self.ground;
        let key = (list, devices, chunks, line.layout(), vocab.over_pipeline());
        let shapes = self.shapes.entry(key).or_insert_with(|| {
            let ranges = ground.listed_ranges(list, line.stages(), vocab);
            Rc::new(Shapes::new(&ground.layers, line, ranges))
        });
        Rc::clone(shapes)
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

/// Whether the same order of passes is in the space as another schedule's: see the documentation of [`super`].
fn is_named_otherwise(inner: &Inner, same: Option<ScheduleName>, vocab: Vocab) -> bool {
    let has = |name| inner.schedules.iter().any(|(s, _, all)| *s == name && all.contains(&vocab));
    !vocab.over_pipeline() && same.is_some_and(has)
}
