//! Best-first branch and bound: a priority queue of search nodes, least bound first, and the
//! threads that expand them.

mod contexts;
mod dives;
mod every_cut;
mod finish;
pub(super) mod lean;
mod team;

use super::expand::{Context, Expansion, Paths, SearchNode, Worker};
use super::{Candidate, Effort, Found, Outcome, Progress, Standing};
use crate::pricing::Configuration;
use crate::pricing::pipelines::Pipelines;
use crate::pricing::priced::{Placed, Priced};
use crate::request::Task;
use crate::request::restrictions::Restrictions;
use crate::simulate::CriticalPath;
use crate::until::Until;
use models::decisions::{Decisions, RankOrder, RecomputePolicy};
use models::plan::Proof;
use models::schedule::ScheduleName;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;
use std::time::Instant;
use team::{Answer, Batch, Team};

/// Search nodes per batch: enough to keep the threads busy, few enough that the incumbent stays
/// fresh. Results depend on the batches, and so batches do not depend on the number of threads.
const BATCH: usize = 128;
/// Search nodes of a batch that are priced and not split further: each may improve the incumbent.
const LEAVES_AT_ONCE: usize = 8;
/// Search nodes of a batch that take long: each may improve the incumbent, too.
const LATER_AT_ONCE: usize = 2;
/// The integer programs of one search node take at most this fraction (1/n) of the work left.
const WORK_SHARE: u64 = 8;
/// More threads would each price the same layers again.
const MAX_THREADS: usize = 8;

/// Share of the time left that each phase gets where the time is limited: expanding search nodes,
/// of which dives, local search; the rest bounds what is left out. What a phase does not use is
/// left to the next.
const EXPANDING: f64 = 0.9;
const DIVING: f64 = 0.4;
const CLIMBING: f64 = 0.5;

/// Whether corners of the space that need little memory are searched where nothing else is found.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Corners {
    Yes,
    /// This is such a search.
    No,
}

/// Runs the search.
pub(super) fn run(task: &Task<'_>, progress: Progress<'_>) -> Outcome {
    run_within(task, progress, Corners::Yes)
}

fn run_within(task: &Task<'_>, progress: Progress<'_>, corners: Corners) -> Outcome {
    let begun = Instant::now();
    let expanding = Task { until: task.until.share(EXPANDING), ..task.clone() };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS));
    let pipelines = Arc::new(Pipelines::default());
    std::thread::scope(|scope| {
        let mut team = Team::new(scope, &expanding, &pipelines, threads);
        let mut run = Run::new(task, Arc::clone(&pipelines), threads);
        run.bound_contexts(&mut team);
        run.dive(&mut team, expanding.until.share(DIVING));
        if corners == Corners::Yes {
            run.search_lean_corners();
        }
        run.expand_all(&mut team, expanding.until, progress);
        drop(team);
        if !run.is_enough() {
            run.climb(threads);
            run.bound_left_open(threads, progress);
        }
        run.effort.limited = task.until.deadline.is_some();
        run.effort.elapsed_s = begun.elapsed().as_secs_f64();
        run.outcome()
    })
}

/// An entry of the heap; of equal bounds the first one pushed comes first.
struct Waiting {
    bound_s: f64,
    number: u64,
    what: What,
}

/// What waits. Contexts are indices because most are never expanded; search nodes are boxed because
/// a heap moves its entries.
enum What {
    Context(usize),
    SearchNode(Box<SearchNode>),
}

impl PartialEq for Waiting {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Waiting {}
impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Waiting {
    fn cmp(&self, other: &Self) -> Ordering {
        // `BinaryHeap` pops the largest.
        let by_bound = other.bound_s.total_cmp(&self.bound_s);
        by_bound.then(other.number.cmp(&self.number))
    }
}

struct Run<'a> {
    task: &'a Task<'a>,
    begun: Instant,
    pipelines: Arc<Pipelines>,
    proof: Proof,
    effort: Effort,
    contexts: Arc<[Context]>,
    /// Bounds of the contexts, with overheads, s.
    contexts_s: Vec<f64>,
    waiting: BinaryHeap<Waiting>,
    /// Search nodes that take long to expand ([`SearchNode::takes_long`]). They wait until nothing
    /// else does: the better the incumbent, the fewer of them are expanded.
    later: BinaryHeap<Waiting>,
    pushed: u64,
    /// Search nodes expanded so far.
    expansions: u64,
    /// The incumbent's time with overheads, s.
    best_s: f64,
    best: Option<(Decisions, Placed)>,
    /// The fastest candidate seen of each tp, pp and schedule.
    passed: BTreeMap<(u64, u64, ScheduleName), Candidate>,
    paths: Arc<Paths>,
    /// Chains kept per pipeline.
    most_paths: usize,
    /// Least bound of a configuration that an integer program gave up on, with overheads, s.
    open_bound_s: f64,
    /// Lower bound on the configurations that the search leaves out, with overheads, s.
    left_open_s: f64,
    /// Starts for local search: the best candidate partitions within [`SLACK`] of the incumbent.
    near: Vec<Candidate>,
    ilp_s: f64,
    /// Work done by integer programs.
    work: u64,
}

impl<'a> Run<'a> {
    fn new(task: &'a Task<'a>, pipelines: Arc<Pipelines>, threads: usize) -> Self {
        let (contexts, family) = contexts::all(task, threads);
        Self {
            task,
            begun: Instant::now(),
            pipelines,
            proof: Proof { family, ..Proof::default() },
            effort: Effort::default(),
            contexts: Arc::from(contexts),
            contexts_s: vec![],
            waiting: BinaryHeap::new(),
            later: BinaryHeap::new(),
            pushed: 0,
            expansions: 0,
            best_s: task.cutoff_s,
            best: None,
            passed: BTreeMap::new(),
            paths: Arc::default(),
            most_paths: MAX_PATHS,
            open_bound_s: f64::INFINITY,
            left_open_s: f64::INFINITY,
            near: vec![],
            ilp_s: 0.0,
            work: 0,
        }
    }

    /// Work left for integer programs.
    fn work_left(&self) -> u64 {
        self.task.solver_work.saturating_sub(self.work)
    }

    fn push(&mut self, node: SearchNode) {
        let (bound_s, takes_long) = (node.bound_s, node.takes_long());
        let waiting = self.numbered(bound_s, What::SearchNode(Box::new(node)));
        if takes_long { self.later.push(waiting) } else { self.waiting.push(waiting) }
    }

    fn numbered(&mut self, bound_s: f64, what: What) -> Waiting {
        self.pushed += 1;
        Waiting { bound_s, number: self.pushed, what }
    }

    /// Bounds all contexts and fills the queue with them.
    fn bound_contexts(&mut self, team: &mut Team<'_>) {
        self.proof.candidates = self.contexts.iter().map(Context::count).sum();
        team.send(Batch::Contexts(Arc::clone(&self.contexts)));
        let mut next = 0..;
        for answer in team.receive() {
            let Answer::Contexts(bounds_s) = answer else { continue };
            for (bound_s, index) in bounds_s.into_iter().zip(&mut next) {
                self.contexts_s.push(bound_s);
                let waiting = self.numbered(bound_s, What::Context(index));
                self.waiting.push(waiting);
            }
        }
    }

    /// Takes a configuration that is faster than the incumbent, and remembers another.
    fn offer(&mut self, found: Option<Candidate>) {
        let Some(found) = found else { return };
        let d = &found.decisions;
        let known = self.passed.entry((d.tp, d.pp, d.schedule));
        let known = known.or_insert_with(|| found.clone());
        if found.iteration_s < known.iteration_s {
            known.clone_from(&found);
        }
        if found.iteration_s < self.best_s {
            self.best_s = found.iteration_s;
            self.best = Some((found.decisions, found.placed));
            let first_s = self.begun.elapsed().as_secs_f64();
            self.effort.first_s.get_or_insert(first_s);
        }
    }

    /// Expands search nodes until a moment.
    fn expand_all(&mut self, team: &mut Team<'_>, until: Until<'_>, progress: Progress<'_>) {
        let work = |run: &Self| (!until.is_over()).then(|| run.work_left() / WORK_SHARE);
        self.expand_while(team, work, progress);
        self.open_bound_s = self.open_bound_s.min(self.least_waiting_s());
        let contexts = &self.contexts;
        let count = |waiting: Waiting| match waiting.what {
            What::Context(index) => contexts[index].count(),
            What::SearchNode(node) => node.count,
        };
        let left = self.waiting.drain().chain(self.later.drain());
        self.proof.cut_by_time += left.map(count).sum::<u64>();
    }

    /// Expands search nodes while `work` gives integer programs work for the next batch.
    fn expand_while(
        &mut self,
        team: &mut Team<'_>,
        work: impl Fn(&Self) -> Option<u64>,
        progress: Progress<'_>,
    ) {
        loop {
            // The threads work on the next batch while the answers to one are taken.
            while team.is_hungry() {
                let Some(work) = work(self) else { break };
                let nodes = self.next_batch(team.is_idle());
                if nodes.is_empty() {
                    break;
                }
                team.send(Batch::Nodes(nodes, self.best_s, work, Arc::clone(&self.paths)));
            }
            if team.is_idle() {
                break;
            }
            for answer in team.receive() {
                if let Answer::Expansion(expansion) = answer {
                    self.take(*expansion);
                }
            }
            progress(self.standing());
        }
    }

    /// Whether any configuration was asked for, and one was found.
    fn is_enough(&self) -> bool {
        self.task.any && self.best.is_some()
    }

    fn standing(&self) -> Standing {
        let proof = &self.proof;
        let cut = proof.cut_by_time + proof.cut_by_memory + proof.cut_by_dominance;
        let bound_s = self.least_waiting_s().min(self.best_s);
        let (settled, best_s) = (cut + proof.placed, self.best_s);
        Standing { settled, all: proof.candidates, best_s, bound_s }
    }

    /// The least bound of a search node that is not expanded, with overheads, s.
    fn least_waiting_s(&self) -> f64 {
        let least_s = |heap: &BinaryHeap<Waiting>| heap.peek().map(|least| least.bound_s);
        let both_s = [least_s(&self.waiting), least_s(&self.later)];
        both_s.into_iter().flatten().fold(f64::INFINITY, f64::min)
    }

    /// The search nodes with the least bounds below the incumbent. Those that take long come where
    /// there are no others, and none are being expanded (`is_idle`).
    fn next_batch(&mut self, is_idle: bool) -> Vec<SearchNode> {
        if self.expansions >= self.task.most_expansions || self.is_enough() {
            return vec![];
        }
        let best_s = self.best_s;
        let is_open =
            |heap: &BinaryHeap<Waiting>| heap.peek().is_some_and(|least| least.bound_s < best_s);
        let (heap, most_leaves) = match (is_open(&self.waiting), is_idle) {
            (false, true) => (&mut self.later, LATER_AT_ONCE),
            _ => (&mut self.waiting, LEAVES_AT_ONCE),
        };
        let (mut nodes, mut leaves) = (vec![], 0);
        while nodes.len() < BATCH && leaves < most_leaves && is_open(heap) {
            let Some(Waiting { bound_s, what, .. }) = heap.pop() else { break };
            let node = match what {
                What::Context(index) => self.contexts[index].node(bound_s),
                What::SearchNode(node) => *node,
            };
            leaves += usize::from(node.is_leaf() || node.takes_long());
            nodes.push(node);
        }
        self.expansions += nodes.len() as u64;
        nodes
    }

    fn take(&mut self, expansion: Expansion) {
        self.proof.cut_by_time += expansion.cut_by_time;
        self.proof.cut_by_memory += expansion.cut_by_memory;
        self.proof.cut_by_dominance += expansion.cut_by_dominance;
        self.proof.placed += expansion.placed;
        self.proof.ilps += expansion.ilps;
        self.ilp_s += expansion.ilp_s;
        self.work += expansion.work;
        self.open_bound_s = self.open_bound_s.min(expansion.open_s);
        self.near.extend(expansion.near);
        if !expansion.paths.is_empty() {
            let known = Arc::make_mut(&mut self.paths);
            for (key, path) in expansion.paths {
                remember(Arc::make_mut(known.entry(key).or_default()), path, self.most_paths);
            }
        }
        for part in expansion.parts {
            self.push(part);
        }
        self.offer(expansion.best);
    }

    fn outcome(mut self) -> Outcome {
        if self.is_enough() {
            // The first that was found: all that is known of others is where the search began.
            self.open_bound_s = self.contexts_s.iter().copied().fold(self.open_bound_s, f64::min);
        }
        let gap = |open_s: f64| (1.0 - open_s / self.best_s).max(0.0);
        self.proof.searched_gap = gap(self.open_bound_s.min(self.best_s));
        self.proof.gap = gap(self.open_bound_s.min(self.left_open_s).min(self.best_s));
        self.proof.proven_optimal = self.proof.gap == 0.0;
        self.effort.ms_per_ilp = 1e3 * self.ilp_s / self.proof.ilps.max(1) as f64;
        let mut worker = Worker::new(self.task, Arc::clone(&self.pipelines));
        let best = self.best.take().and_then(|(decisions, placed)| {
            let decisions = named_by_result(decisions, &placed, self.task.restrictions);
            let (decisions, priced) = self.in_usual_order(&mut worker, &decisions, &placed)?;
            Some(Found { decisions, placed, priced })
        });
        let named = |found: Candidate| {
            let restrictions = self.task.restrictions;
            let decisions = named_by_result(found.decisions, &found.placed, restrictions);
            Candidate { decisions, ..found }
        };
        let passed = self.passed.into_values().map(named).collect();
        Outcome { best, passed, proof: self.proof, effort: self.effort }
    }
}

impl Run<'_> {
    /// A configuration with its price; with the usual rank order where that is as fast.
    fn in_usual_order(
        &self,
        worker: &mut Worker<'_>,
        d: &Decisions,
        placed: &Placed,
    ) -> Option<(Decisions, Priced)> {
        let mut price = |decisions: Decisions| {
            let configuration = Configuration::new(&worker.cache, decisions).ok()?;
            let priced = configuration.price(placed, &mut worker.scratch);
            Some((configuration.decisions, priced))
        };
        let found = price(d.clone())?;
        let usual = Decisions { rank_order: RankOrder::DpInner, ..d.clone() };
        let allowed = self.task.restrictions.rank_order.allows(RankOrder::DpInner);
        let usual = if allowed { price(usual) } else { None };
        let as_good = |other: &(Decisions, Priced)| {
            other.1.fits >= found.1.fits && other.1.iteration_s <= found.1.iteration_s
        };
        Some(usual.filter(as_good).unwrap_or(found))
    }
}

/// Chains kept per pipeline.
const MAX_PATHS: usize = 8;

fn remember(known: &mut Vec<CriticalPath>, path: CriticalPath, most: usize) {
    if known.len() < most && !known.contains(&path) {
        known.push(path);
    }
}

/// Replaces `per_layer` by the uniform recomputation that the placement turned out to have, if
/// allowed.
pub(super) fn named_by_result(
    mut d: Decisions,
    placed: &Placed,
    restrictions: &Restrictions,
) -> Decisions {
    if d.recompute != RecomputePolicy::PerLayer {
        return d;
    }
    let used =
        |option: usize| placed.iter().any(|s| s.recompute.iter().any(|split| split[option] > 0));
    let uniform = match (used(0), used(1), used(2)) {
        (_, false, false) => RecomputePolicy::None,
        (false, true, false) => RecomputePolicy::Selective,
        (false, false, true) => RecomputePolicy::Full,
        _ => RecomputePolicy::PerLayer,
    };
    if restrictions.recompute.allows(uniform) {
        d.recompute = uniform;
    }
    d
}
