//! Best-first branch and bound: a priority queue of search nodes, least bound first, and the
//! threads that expand them.

use super::expand::{Candidate, Context, Expansion, Open, Paths, SLACK, SearchNode, Worker};
use super::left_open;
use super::{Effort, Found, Outcome, Progress, Standing};
use crate::partition::ilp;
use crate::pricing::Configuration;
use crate::pricing::listed_cuts::is_family;
use crate::pricing::pipelines::{PipelineKey, Pipelines};
use crate::pricing::priced::Placed;
use crate::request::Task;
use crate::request::restrictions::Restrictions;
use crate::request::space::{ExpertSplit, ParallelLayout, PipelineChoices, PipelineChoicesKey};
use crate::simulate::CriticalPath;
use crate::until::Until;
use models::decisions::{Decisions, Offload, RankOrder, RecomputePolicy};
use models::plan::Proof;
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};
use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering as Sharing};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// Search nodes per batch: enough to keep the threads busy, few enough that the incumbent stays
/// fresh. Results depend on the batches, and so batches do not depend on the number of threads.
const BATCH: usize = 128;
/// Search nodes of a batch that are priced and not split further: each may improve the incumbent.
const LEAVES_AT_ONCE: usize = 8;
/// The integer programs of one problem take at most this fraction (1/n) of the work left.
const WORK_SHARE: u64 = 8;
/// Contexts that are dived into at a time.
const DIVES: usize = 16;
/// Dives end after so many batches, and broader ones after so many groups of contexts with the same
/// degrees, that did not improve the incumbent.
const MAX_FAILED_DIVES: usize = 6;
const MAX_FAILED_GROUPS: usize = 2;
/// Pipelines of each parallel layout in a broader dive.
const BREADTH: usize = 4;
/// Micro-batch sizes that a dive considers.
const MICRO_BATCHES: usize = 6;
/// A group counts up to this multiple of the incumbent's time.
const SECOND_BEST: f64 = 1.1;
/// Contexts that one thread bounds at a time. Neighbours share layer costs.
const CONTEXTS: usize = 256;
/// More threads would each price the same layers again.
const MAX_THREADS: usize = 8;

/// Share of the time left that each phase gets where the time is limited: expanding search nodes, of
/// which dives, proving what is open, local search; the rest bounds what is left out. What a phase
/// does not use is left to the next.
const EXPANDING: f64 = 0.9;
const DIVING: f64 = 0.4;
const PROVING: f64 = 0.5;
const CLIMBING: f64 = 0.5;

/// Runs the search.
pub(super) fn run(task: &Task<'_>, progress: Progress<'_>) -> Outcome {
    let begun = Instant::now();
    let expanding = Task { until: task.until.share(EXPANDING), ..task.clone() };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS));
    let pipelines = Arc::new(Pipelines::default());
    std::thread::scope(|scope| {
        let mut team = Team::new(scope, &expanding, &pipelines, threads);
        let mut run = Run::new(task, Arc::clone(&pipelines));
        run.bound_contexts(&mut team);
        run.dive(&mut team, expanding.until.share(DIVING));
        run.expand_all(&mut team, expanding.until, progress);
        drop(team);
        if !run.is_enough() {
            run.prove_open();
            run.climb(threads);
            run.bound_left_open();
        }
        run.effort.elapsed_s = begun.elapsed().as_secs_f64();
        run.outcome()
    })
}

/// Work for all threads, which take its pieces in turn.
enum Batch {
    Contexts(Arc<[Context]>),
    /// Search nodes, the incumbent's time, the work allowed to the integer programs of each, known
    /// chains.
    Nodes(Vec<SearchNode>, f64, u64, Arc<Paths>),
    /// Search nodes to dive into, a limit on the time, s, and how many pipelines to price.
    Dives(Vec<Vec<SearchNode>>, f64, usize),
}

enum Answer {
    /// Bounds, with overheads, s.
    Contexts(Vec<f64>),
    Expansion(Box<Expansion>),
}

/// A batch that was sent: its number, and the index of the next piece to take.
type SentBatch = (usize, Arc<Batch>, Arc<AtomicUsize>);

/// Answers, each with the index of its piece.
type Answers = Vec<(usize, Answer)>;

/// The threads, each with its own [`Worker`].
struct Team<'scope> {
    to: Vec<Sender<SentBatch>>,
    threads: Vec<ScopedJoinHandle<'scope, ()>>,
    from: Receiver<(usize, Answers)>,
    /// Batches sent so far.
    sent: usize,
    /// Batches not answered in full, oldest first: the number of pieces, and the answers so far.
    under_way: VecDeque<(usize, Answers)>,
}

/// Time without an answer after which the threads are checked for panics.
const PATIENCE: Duration = Duration::from_millis(200);

impl<'scope> Team<'scope> {
    fn new<'env>(
        scope: &'scope Scope<'scope, 'env>,
        task: &'env Task<'env>,
        pipelines: &Arc<Pipelines>,
        threads: usize,
    ) -> Self {
        let (answer, from) = channel();
        let (mut to, mut handles) = (vec![], vec![]);
        for _ in 0..threads {
            let (own, work) = channel();
            let answer = answer.clone();
            let shared = Arc::clone(pipelines);
            handles.push(scope.spawn(move || serve(task, shared, &work, &answer)));
            to.push(own);
        }
        Self { to, threads: handles, from, sent: 0, under_way: VecDeque::new() }
    }

    /// Sends a batch to the threads, which finish earlier batches first.
    fn send(&mut self, batch: Batch) {
        let pieces = match &batch {
            Batch::Contexts(contexts) => contexts.len().div_ceil(CONTEXTS),
            Batch::Nodes(nodes, ..) => nodes.len(),
            Batch::Dives(dives, ..) => dives.len(),
        };
        let (batch, next) = (Arc::new(batch), Arc::new(AtomicUsize::new(0)));
        for to in self.to.iter().take(pieces) {
            let _ = to.send((self.sent, Arc::clone(&batch), Arc::clone(&next)));
        }
        self.sent += 1;
        self.under_way.push_back((pieces, Vec::with_capacity(pieces)));
    }

    /// Answers to the oldest batch, in the order of its pieces.
    ///
    /// # Panics
    /// Passes on the panic of a thread.
    fn receive(&mut self) -> Vec<Answer> {
        while self.under_way.front().is_some_and(|(pieces, answers)| answers.len() < *pieces) {
            match self.from.recv_timeout(PATIENCE) {
                Ok((batch, some)) => {
                    let oldest = self.sent - self.under_way.len();
                    self.under_way[batch - oldest].1.extend(some);
                }
                Err(_) => self.pass_on_panics(),
            }
        }
        let (_, mut answers) = self.under_way.pop_front().unwrap_or_default();
        answers.sort_by_key(|(piece, _)| *piece);
        answers.into_iter().map(|(_, answer)| answer).collect()
    }
}

impl Team<'_> {
    /// Threads end before the team is dropped only where they panic.
    fn pass_on_panics(&mut self) {
        let ended = self.threads.iter().position(ScopedJoinHandle::is_finished);
        if let Some(Err(panic)) = ended.map(|at| self.threads.swap_remove(at).join()) {
            self.to.clear();
            std::panic::resume_unwind(panic);
        }
    }
}

fn serve(
    task: &Task<'_>,
    pipelines: Arc<Pipelines>,
    work: &Receiver<SentBatch>,
    answer: &Sender<(usize, Answers)>,
) {
    let mut worker = Worker::new(task, pipelines);
    for (number, batch, next) in work {
        // One message per batch: waking the receiver takes longer than many a piece.
        let mut answers = vec![];
        loop {
            let piece = next.fetch_add(1, Sharing::Relaxed);
            let done = match batch.as_ref() {
                Batch::Contexts(contexts) => {
                    let some = contexts.chunks(CONTEXTS).nth(piece);
                    some.map(|some| Answer::Contexts(worker.contexts_s(some)))
                }
                Batch::Dives(dives, best_s, breadth) => dives.get(piece).map(|nodes| {
                    Answer::Expansion(Box::new(worker.dive(nodes, *best_s, *breadth)))
                }),
                Batch::Nodes(nodes, best_s, work, paths) => nodes.get(piece).map(|node| {
                    Answer::Expansion(Box::new(worker.expand(node, *best_s, *work, paths)))
                }),
            };
            let Some(done) = done else { break };
            answers.push((piece, done));
        }
        if !answers.is_empty() && answer.send((number, answers)).is_err() {
            return;
        }
    }
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
    pushed: u64,
    /// Search nodes expanded so far.
    expansions: u64,
    /// The incumbent's time with overheads, s.
    best_s: f64,
    best: Option<(Decisions, Placed)>,
    open: Vec<Open>,
    paths: Arc<Paths>,
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
    fn new(task: &'a Task<'a>, pipelines: Arc<Pipelines>) -> Self {
        let (contexts, family) = contexts(task);
        Self {
            task,
            begun: Instant::now(),
            pipelines,
            proof: Proof { family, ..Proof::default() },
            effort: Effort::default(),
            contexts: Arc::from(contexts),
            contexts_s: vec![],
            waiting: BinaryHeap::new(),
            pushed: 0,
            expansions: 0,
            best_s: task.cutoff_s,
            best: None,
            open: vec![],
            paths: Arc::default(),
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
        self.wait(node.bound_s, What::SearchNode(Box::new(node)));
    }

    fn wait(&mut self, bound_s: f64, what: What) {
        self.pushed += 1;
        self.waiting.push(Waiting { bound_s, number: self.pushed, what });
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
                self.wait(bound_s, What::Context(index));
            }
        }
    }

    /// Looks for a good first incumbent. Of all contexts with the same degrees the one with the least
    /// bound is followed to its most promising configuration, which is priced. Then the contexts of
    /// the degrees where that went best are looked into more broadly.
    fn dive(&mut self, team: &mut Team<'_>, until: Until<'_>) {
        let mut groups: HashMap<[u64; 3], Vec<usize>> = HashMap::default();
        for (at, context) in self.contexts.iter().enumerate() {
            let d = &context.decisions;
            groups.entry([d.tp, d.pp, d.cp]).or_default().push(at);
        }
        let bound_s = |at: &usize| self.contexts_s[*at];
        let mut groups: Vec<Vec<usize>> = groups.into_values().collect();
        for group in &mut groups {
            group.sort_by(|a, b| bound_s(a).total_cmp(&bound_s(b)).then(a.cmp(b)));
        }
        groups.sort_by(|a, b| bound_s(&a[0]).total_cmp(&bound_s(&b[0])).then(a.cmp(b)));
        let (mut found, mut failed) = (vec![], 0);
        for some in groups.chunks(DIVES) {
            if failed == MAX_FAILED_DIVES {
                break;
            }
            let before_s = self.best_s;
            let firsts = some.iter().map(|group| self.by_micro_batch(group)).collect();
            let times_s = self.dive_into(firsts, 1, team, until);
            found.extend(times_s.into_iter().zip(some));
            let is_better = self.best_s < before_s || self.best.is_none();
            failed = if is_better { 0 } else { failed + 1 };
        }
        found.retain(|(time_s, _)| time_s.is_finite());
        found.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut failed = 0;
        for (_, group) in found {
            if failed == MAX_FAILED_GROUPS {
                break;
            }
            let before_s = self.best_s;
            let nearest = group.iter().take(DIVES).map(|&at| vec![at]).collect();
            self.dive_into(nearest, BREADTH, team, until);
            failed = if self.best_s < before_s { 0 } else { failed + 1 };
        }
    }

    /// Of some contexts, the one with the least bound of each micro-batch size, with the loss fused
    /// and not, for some sizes from the smallest to the largest.
    fn by_micro_batch(&self, group: &[usize]) -> Vec<usize> {
        let mut least: BTreeMap<u64, [Option<usize>; 2]> = BTreeMap::new();
        for &at in group {
            let d = &self.contexts[at].decisions;
            let by_loss = least.entry(d.micro_batch).or_default();
            by_loss[usize::from(d.fused_loss)].get_or_insert(at);
        }
        let least: Vec<_> = least.into_values().collect();
        let most = if self.task.model.moe.is_some() { 3 } else { MICRO_BATCHES };
        let mut spaced: Vec<usize> =
            (0..most).map(|n| n * (least.len() - 1) / (most - 1)).collect();
        spaced.dedup();
        spaced.into_iter().flat_map(|index| least[index]).flatten().collect()
    }

    /// Dives into groups of contexts that may be faster than the incumbent; by group, the time
    /// found, s.
    fn dive_into(
        &mut self,
        groups: Vec<Vec<usize>>,
        breadth: usize,
        team: &mut Team<'_>,
        until: Until<'_>,
    ) -> Vec<f64> {
        let mut times_s = vec![f64::INFINITY; groups.len()];
        let mut open = vec![];
        for (number, group) in groups.into_iter().enumerate() {
            let below = group.into_iter().filter(|&at| self.contexts_s[at] < self.best_s);
            let nodes: Vec<_> =
                below.map(|at| self.contexts[at].node(self.contexts_s[at])).collect();
            if !nodes.is_empty() {
                open.push((number, nodes));
            }
        }
        if open.is_empty() || until.is_over() || self.is_enough() {
            return times_s;
        }
        self.expansions += open.len() as u64;
        // Groups compare by what they find, whether or not it is an incumbent.
        let bar_s = if breadth == 1 { self.best_s * SECOND_BEST } else { self.best_s };
        let (numbers, dives): (Vec<_>, Vec<_>) = open.into_iter().unzip();
        team.send(Batch::Dives(dives, bar_s, breadth));
        for (answer, number) in team.receive().into_iter().zip(numbers) {
            let Answer::Expansion(expansion) = answer else { continue };
            times_s[number] =
                expansion.best.as_ref().map_or(f64::INFINITY, |best| best.iteration_s);
            self.offer(expansion.best);
        }
        times_s
    }

    /// Takes a configuration that is faster than the incumbent.
    fn offer(&mut self, found: Option<Candidate>) {
        if let Some(Candidate { decisions, placed, iteration_s }) = found
            && iteration_s < self.best_s
        {
            self.best_s = iteration_s;
            self.best = Some((decisions, placed));
            let first_s = self.begun.elapsed().as_secs_f64();
            self.effort.first_s.get_or_insert(first_s);
        }
    }

    fn expand_all(&mut self, team: &mut Team<'_>, until: Until<'_>, progress: Progress<'_>) {
        loop {
            // The threads work on the next batch while the answers to one are taken.
            while team.under_way.len() < 2 {
                let nodes = if until.is_over() { vec![] } else { self.next_batch() };
                if nodes.is_empty() {
                    break;
                }
                let work = self.work_left() / WORK_SHARE;
                team.send(Batch::Nodes(nodes, self.best_s, work, Arc::clone(&self.paths)));
            }
            if team.under_way.is_empty() {
                break;
            }
            for answer in team.receive() {
                if let Answer::Expansion(expansion) = answer {
                    self.take(*expansion);
                }
            }
            progress(self.standing());
        }
        self.open_bound_s = self.open_bound_s.min(self.least_waiting_s());
        let contexts = &self.contexts;
        let count = |waiting: Waiting| match waiting.what {
            What::Context(index) => contexts[index].count(),
            What::SearchNode(node) => node.count,
        };
        self.proof.cut_by_time += self.waiting.drain().map(count).sum::<u64>();
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
        self.waiting.peek().map_or(f64::INFINITY, |least| least.bound_s)
    }

    /// The search nodes with the least bounds below the incumbent.
    fn next_batch(&mut self) -> Vec<SearchNode> {
        if self.expansions >= self.task.most_expansions || self.is_enough() {
            return vec![];
        }
        let (mut nodes, mut leaves) = (vec![], 0);
        while nodes.len() < BATCH && leaves < LEAVES_AT_ONCE {
            let best_s = self.best_s;
            if self.waiting.peek().is_none_or(|least| least.bound_s >= best_s) {
                break;
            }
            let Some(Waiting { bound_s, what, .. }) = self.waiting.pop() else { break };
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
        self.proof.ilps += expansion.ilps;
        self.ilp_s += expansion.ilp_s;
        self.work += expansion.work;
        self.open_bound_s = self.open_bound_s.min(expansion.open_s);
        self.open.extend(expansion.open);
        self.near.extend(expansion.near);
        if !expansion.paths.is_empty() {
            let known = Arc::make_mut(&mut self.paths);
            for (key, path) in expansion.paths {
                remember(known.entry(key).or_default(), path);
            }
        }
        for part in expansion.parts {
            self.push(part);
        }
        self.offer(expansion.best);
    }

    /// Settles the combinations left open by bounds and incumbents, most promising first.
    fn prove_open(&mut self) {
        let task = Task { until: self.task.until.share(PROVING), ..self.task.clone() };
        let mut worker = Worker::new(&task, Arc::clone(&self.pipelines));
        let mut open = std::mem::take(&mut self.open);
        open.sort_by(|a, b| a.bound_s.total_cmp(&b.bound_s));
        for node in open {
            let known =
                self.paths.get(&PipelineKey::new(&node.decisions)).map_or(&[][..], Vec::as_slice);
            if node.bound_s >= self.best_s || worker.is_cut_by(&node.decisions, self.best_s, known)
            {
                continue;
            }
            if self.work_left() == 0 || task.is_stopped() {
                self.open_bound_s = self.open_bound_s.min(node.bound_s);
            } else {
                self.prove(&mut worker, node, task.until);
            }
        }
    }

    /// Settles a combination by the integer program.
    fn prove(&mut self, worker: &mut Worker<'_>, node: Open, until: Until<'_>) {
        let Ok(configuration) = Configuration::new(&worker.cache, node.decisions) else { return };
        let cutoff_s = configuration.pipeline_s(self.best_s);
        let Some(problem) = configuration.problem(cutoff_s, self.task.ignore_memory) else {
            return;
        };
        // No combination takes all the work left: others may need less.
        let work = (self.task.solver_work / WORK_SHARE).min(self.work_left());
        let limits = ilp::Limits { work, paths: true, until };
        let key = PipelineKey::new(&configuration.decisions);
        let known = self.paths.get(&key).cloned().unwrap_or_default();
        let (report, more) =
            ilp::solve_with(&problem, known, cutoff_s, limits, &mut worker.scratch);
        let kept = Arc::make_mut(&mut self.paths).entry(key).or_default();
        more.into_iter().for_each(|path| remember(kept, path));
        self.proof.ilps += report.solves as u64;
        self.ilp_s += report.elapsed_s;
        self.work += report.work;
        if let Some((choice, value_s)) = &report.best {
            let iteration_s = configuration.with_overheads_s(*value_s);
            if let Some(placed) =
                configuration.placed(&problem, choice).filter(|_| iteration_s < self.best_s)
            {
                self.best_s = iteration_s;
                self.best = Some((configuration.decisions.clone(), placed));
            }
        }
        if !report.proven {
            let bound_s = node.bound_s.max(configuration.with_overheads_s(report.bound_s));
            self.open_bound_s = self.open_bound_s.min(bound_s);
        }
    }

    /// Local search from all candidate partitions within [`SLACK`] of the incumbent. Which ones
    /// these are does not depend on the order in which they were found.
    fn climb(&mut self, threads: usize) {
        if self.task.is_stopped() {
            return;
        }
        let limit_s = self.best_s * (1.0 + SLACK);
        let near = std::mem::take(&mut self.near);
        let near = near.into_iter().filter(|start| start.iteration_s < limit_s).collect();
        let groups = by_pipeline(near);
        let task = Task { until: self.task.until.share(CLIMBING), ..self.task.clone() };
        let (next, task) = (AtomicUsize::new(0), &task);
        let work = |pipelines| {
            let (mut worker, mut found) = (Worker::new(task, pipelines), vec![]);
            loop {
                let index = next.fetch_add(1, Sharing::Relaxed);
                let Some(group) = groups.get(index) else { break found };
                found.extend(worker.climb(group.clone()).map(|best| (index, best)));
            }
        };
        let found: Vec<(usize, Candidate)> = std::thread::scope(|scope| {
            let start = |_| scope.spawn(|| work(Arc::clone(&self.pipelines)));
            let threads: Vec<_> = (0..threads.min(groups.len())).map(start).collect();
            let joined = threads.into_iter().map(|thread| match thread.join() {
                Ok(found) => found,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            joined.flatten().collect()
        });
        let least = found.into_iter().min_by(|(at, a), (other, b)| {
            a.iteration_s.total_cmp(&b.iteration_s).then(at.cmp(other))
        });
        if let Some((_, best)) = least.filter(|(_, best)| best.iteration_s < self.best_s) {
            self.best_s = best.iteration_s;
            self.best = Some((best.decisions, best.placed));
        }
    }

    /// Bounds the configurations that the search leaves out.
    fn bound_left_open(&mut self) {
        if self.best.is_some() {
            let contexts: Vec<_> =
                self.contexts_s.iter().copied().zip(self.contexts.iter()).collect();
            self.left_open_s = left_open::least_s(self.task, &contexts, self.best_s);
        }
    }

    fn outcome(mut self) -> Outcome {
        let gap = |open_s: f64| (1.0 - open_s / self.best_s).max(0.0);
        self.proof.searched_gap = gap(self.open_bound_s.min(self.best_s));
        self.proof.gap = gap(self.open_bound_s.min(self.left_open_s).min(self.best_s));
        self.proof.proven_optimal = self.proof.gap == 0.0;
        self.effort.ms_per_ilp = 1e3 * self.ilp_s / self.proof.ilps.max(1) as f64;
        let mut worker = Worker::new(self.task, Arc::clone(&self.pipelines));
        let best = self.best.take().and_then(|(decisions, placed)| {
            let decisions = named_by_result(decisions, &placed, self.task.restrictions);
            let configuration = Configuration::new(&worker.cache, decisions).ok()?;
            let priced = configuration.price(&placed, &mut worker.scratch);
            Some(Found { decisions: configuration.decisions, placed, priced })
        });
        Outcome { best, proof: self.proof, effort: self.effort }
    }
}

/// Groups configurations that differ only in parameter state, in the order in which they come.
fn by_pipeline(all: Vec<Candidate>) -> Vec<Vec<Candidate>> {
    let mut groups: Vec<(Decisions, Vec<Candidate>)> = vec![];
    for candidate in all {
        let pipeline = Decisions {
            zero_stage: 0,
            dp_shard: 1,
            offload: Offload::None,
            rank_order: RankOrder::DpInner,
            ..candidate.decisions.clone()
        };
        match groups.iter_mut().find(|(known, _)| *known == pipeline) {
            Some((_, group)) => group.push(candidate),
            None => groups.push((pipeline, vec![candidate])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

/// Chains kept per pipeline.
const MAX_PATHS: usize = 8;

fn remember(known: &mut Vec<CriticalPath>, path: CriticalPath) {
    if known.len() < MAX_PATHS && !known.contains(&path) {
        known.push(path);
    }
}

/// All contexts with combinations, those that share layer costs next to each other; and whether
/// some pipeline tries only a family of partitions.
fn contexts(task: &Task<'_>) -> (Vec<Context>, bool) {
    let space = task.space();
    let mut known: HashMap<_, [Arc<[ExpertSplit]>; 2]> = HashMap::default();
    let mut counter = space.counter();
    let (mut seen, mut family) = (HashSet::default(), false);
    let mut contexts = vec![];
    for ParallelLayout { decisions: d } in space.contexts() {
        let key = (d.tp, d.cp, d.dp, d.sequence_parallel, d.recompute_group);
        let kinds = known.entry(key).or_insert_with(|| by_pairs(space.expert_splits(&d)));
        for splits in kinds.iter().filter(|splits| !splits.is_empty()) {
            let d = Decisions { moe_overlap: splits[0].overlap, ..d.clone() };
            if !family && seen.insert(PipelineChoicesKey::new(&d)) {
                let choices = space.choices(&ParallelLayout { decisions: d.clone() });
                family = has_family(&choices, &d, task.model.layers);
            }
            let each = counter.count(&d);
            if each > 0 {
                contexts.push(Context { decisions: d, splits: Arc::clone(splits), each });
            }
        }
    }
    // Contexts are large: keys are sorted, and each context moves once.
    contexts.sort_by_cached_key(Context::priced_by);
    (contexts, family)
}

/// Expert splits without pairs of passes, and those with pairs, which fewer pipelines have.
fn by_pairs(splits: Vec<ExpertSplit>) -> [Arc<[ExpertSplit]>; 2] {
    let (paired, alone): (Vec<_>, Vec<_>) = splits.into_iter().partition(ExpertSplit::is_paired);
    [Arc::from(alone), Arc::from(paired)]
}

/// Whether only a family of partitions is tried of some pipeline.
fn has_family(choices: &PipelineChoices, d: &Decisions, layers: usize) -> bool {
    choices.pipelines(d).any(|d| is_family(&d, layers))
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
