//! Best-first branch and bound: a priority queue of search nodes, least bound first, and the
//! threads that expand them.

mod contexts;
mod dives;
mod every_cut;
mod finish;
pub(super) mod lean;
mod team;

use super::expand::{Allowance, Context, Expansion, Paths, SearchNode, Shared, Worker};
use super::{Candidate, Effort, Found, Outcome, Progress, Standing};
use crate::partition::ilp;
use crate::pricing::cost_cache::CostCache;
use crate::pricing::priced::Placed;
use crate::request::Task;
use crate::request::restrictions::Restrictions;
use crate::simulate::CriticalPath;
use crate::until::Until;
use models::decisions::{Decisions, RankOrder, RecomputePolicy};
use models::plan::Proof;
use models::schedule::ScheduleName;
use std::collections::BTreeMap;
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
/// Share of the time left that they take at most, unless it is the last search node.
const PROGRAM_SHARE: f64 = 0.4;
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

/// The load of the layers that some rank has in every configuration, with overheads, s.
pub(super) fn least_load_s(task: &Task<'_>) -> f64 {
    let worker = Worker::new(task, &Arc::default());
    worker.contexts_s(&contexts::all(task, 1).0).into_iter().fold(f64::INFINITY, f64::min)
}

fn run_within(task: &Task<'_>, progress: Progress<'_>, corners: Corners) -> Outcome {
    let begun = Instant::now();
    let expanding = Task { until: task.until.share(EXPANDING), ..task.clone() };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS));
    let shared = Arc::new(Shared::default());
    std::thread::scope(|scope| {
        let mut team = Team::new(scope, &expanding, &shared, threads);
        let mut run = Run::new(task, Arc::clone(&shared), threads);
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

/// What waits, least bound first; of equal bounds the first one pushed comes first.
#[derive(Default)]
struct Waiting(BTreeMap<(u64, u64), What>);

/// A search node that waits. Contexts are indices because most are never expanded; others are boxed
/// because the map moves its entries.
enum What {
    Context(usize),
    SearchNode(Box<SearchNode>),
}

impl Waiting {
    /// `number` tells entries of equal bounds apart. Bounds are times, and the bits of numbers that
    /// are not negative are ordered as the numbers are.
    fn push(&mut self, bound_s: f64, number: u64, what: What) {
        self.0.insert((bound_s.max(0.0).to_bits(), number), what);
    }

    fn least_s(&self) -> Option<f64> {
        self.0.keys().next().map(|(bits, _)| f64::from_bits(*bits))
    }

    /// The entry with the least bound, where that is below `limit_s`.
    fn pop_below(&mut self, limit_s: f64) -> Option<(f64, What)> {
        let bound_s = self.least_s().filter(|least_s| *least_s < limit_s)?;
        self.0.pop_first().map(|(_, what)| (bound_s, what))
    }
}

struct Run<'a> {
    task: &'a Task<'a>,
    begun: Instant,
    shared: Arc<Shared>,
    proof: Proof,
    effort: Effort,
    contexts: Arc<[Context]>,
    /// Bounds of the contexts, with overheads, s.
    contexts_s: Vec<f64>,
    waiting: Waiting,
    /// Search nodes that take long to expand ([`SearchNode::takes_long`]). They wait until nothing
    /// else does: the better the incumbent, the fewer of them are expanded.
    later: Waiting,
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
    programs: ilp::Effort,
}

impl<'a> Run<'a> {
    fn new(task: &'a Task<'a>, shared: Arc<Shared>, threads: usize) -> Self {
        let (contexts, family) = contexts::all(task, threads);
        Self {
            task,
            begun: Instant::now(),
            shared,
            proof: Proof { family, ..Proof::default() },
            effort: Effort::default(),
            contexts: Arc::from(contexts),
            contexts_s: vec![],
            waiting: Waiting::default(),
            later: Waiting::default(),
            pushed: 0,
            expansions: 0,
            best_s: task.cutoff_s,
            best: None,
            passed: BTreeMap::new(),
            paths: Arc::default(),
            most_paths: LISTED_PATHS,
            open_bound_s: f64::INFINITY,
            left_open_s: f64::INFINITY,
            near: vec![],
            programs: ilp::Effort::default(),
        }
    }

    /// Work left for integer programs.
    fn work_left(&self) -> u64 {
        self.task.solver_work.saturating_sub(self.programs.work)
    }

    fn push(&mut self, node: SearchNode) {
        self.pushed += 1;
        let waiting = if node.takes_long() { &mut self.later } else { &mut self.waiting };
        waiting.push(node.bound_s, self.pushed, What::SearchNode(Box::new(node)));
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
                self.pushed += 1;
                self.waiting.push(bound_s, self.pushed, What::Context(index));
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
        let count = |waiting: &What| match waiting {
            What::Context(index) => contexts[*index].count(),
            What::SearchNode(node) => node.count,
        };
        let left = [&mut self.waiting, &mut self.later].map(std::mem::take);
        let left = left.iter().flat_map(|waiting| waiting.0.values());
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
                let is_last = nodes.len() == 1 && team.is_idle() && self.is_settled();
                let share = if is_last { 1.0 } else { PROGRAM_SHARE };
                let allowed = Allowance { work, share, most_cuts: usize::MAX };
                team.send(Batch::Nodes(nodes, self.best_s, allowed, Arc::clone(&self.paths)));
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

    /// Whether no search node waits below the incumbent's time.
    fn is_settled(&self) -> bool {
        self.least_waiting_s() >= self.best_s
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
        let both_s = [self.waiting.least_s(), self.later.least_s()];
        both_s.into_iter().flatten().fold(f64::INFINITY, f64::min)
    }

    /// The search nodes with the least bounds below the incumbent. Those that take long come where
    /// there are no others, and none are being expanded (`is_idle`).
    fn next_batch(&mut self, is_idle: bool) -> Vec<SearchNode> {
        if self.expansions >= self.task.most_expansions || self.is_enough() {
            return vec![];
        }
        let best_s = self.best_s;
        let is_open = self.waiting.least_s().is_some_and(|least_s| least_s < best_s);
        let (waiting, most_leaves) = match (is_open, is_idle) {
            (false, true) => (&mut self.later, LATER_AT_ONCE),
            _ => (&mut self.waiting, LEAVES_AT_ONCE),
        };
        let (mut nodes, mut leaves) = (vec![], 0);
        while nodes.len() < BATCH && leaves < most_leaves {
            let Some((bound_s, what)) = waiting.pop_below(best_s) else { break };
            let node = match what {
                What::Context(index) => self.contexts[index].node(bound_s),
                What::SearchNode(node) => *node,
            };
            leaves += usize::from(node.is_leaf());
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
        self.programs += expansion.effort;
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
        self.proof.ilps = self.programs.solves;
        self.effort.ms_per_ilp = self.programs.ms_each();
        let worker = Worker::new(self.task, &self.shared);
        let best = self.best.take().and_then(|(decisions, placed)| {
            let decisions = named_by_result(decisions, &placed, self.task.restrictions);
            let found = Found::new(&worker.cache, decisions, placed)?;
            Some(self.in_usual_order(found, &worker.cache))
        });
        let named = |found: Candidate| {
            let restrictions = self.task.restrictions;
            let decisions = named_by_result(found.decisions, &found.placed, restrictions);
            Candidate { decisions, ..found }
        };
        let passed = self.passed.into_values().map(named).collect();
        Outcome { best, passed, proof: self.proof, effort: self.effort }
    }

    /// A configuration with the usual rank order, where that is allowed and as fast.
    fn in_usual_order(&self, found: Found, cache: &CostCache<'_>) -> Found {
        if !self.task.restrictions.rank_order.allows(RankOrder::DpInner) {
            return found;
        }
        let decisions = Decisions { rank_order: RankOrder::DpInner, ..found.decisions.clone() };
        let usual = Found::new(cache, decisions, found.placed.clone());
        let as_good = |other: &Found| {
            let (own, other) = (&found.priced, &other.priced);
            other.fits >= own.fits && other.iteration_s <= own.iteration_s
        };
        usual.filter(as_good).unwrap_or(found)
    }
}

/// Chains kept per pipeline while listed cuts are searched.
const LISTED_PATHS: usize = 8;

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
