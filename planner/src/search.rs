//! The search: every combination is either priced exactly or cut by a bound.
//!
//! Contexts (degrees, context parallelism, micro-batch) are taken by promise, a lower bound with the bubble
//! added, and cut by the bound; what is left is split into nodes by how experts are split. Within a node each pipeline (schedule, chunks, vocabulary placement) and state choice
//! (ZeRO, shards, offload, rank order) has a tighter bound; what survives becomes a placement problem,
//! settled by the dynamic program's bound, by a simulated placement that attains it, or by the integer
//! program. Three families are cut by dominance, each because another member of the space does as well
//! (for the last: as far as passes go; ARCHITECTURE.md says what is not looked at):
//! - uniform recomputation is one of the mixes of `per_layer`;
//! - the layer ranges of `first_last` and `redistribute` are among those of `tensor`;
//! - `gpipe` and `naive` are no faster than `1f1b` and keep no fewer micro-batches in flight: without
//!   latency 1F1B takes at most `(m−1)(max F + max B) + Σ(F + B)`, which is what GPipe takes.

use crate::case::Case;
use crate::case::ground::{Ground, Sheet};
use crate::case::priced::{Placed, Priced};
use crate::case::recompute_bound;
use crate::placement::{Problem, Scratch, dynamic, ilp};
use crate::restrict::Restrictions;
use crate::space::{ExpertSplit, Inner, Node, Space};
use models::cluster::ClusterSpec;
use models::decisions::{Decisions, Offload, Recompute, Vocab};
use models::model::ModelSpec;
use models::schedule::ScheduleName;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// What is to be planned.
#[derive(Clone, Debug)]
pub struct Task<'a> {
    /// The model, with its sequence length and global batch.
    pub model: &'a ModelSpec,
    /// The cluster.
    pub cluster: &'a ClusterSpec,
    /// GPUs.
    pub gpus: u64,
    /// What the user narrowed.
    pub restrictions: &'a Restrictions,
    /// Places layers as if memory were endless, to say by how much a configuration does not fit.
    pub ignore_memory: bool,
    /// Cuts everything that is not faster than this, s.
    pub cutoff_s: f64,
    /// Wall time for integer programs in all.
    pub solver_time: Duration,
}

impl<'a> Task<'a> {
    /// A task with nothing relaxed.
    pub fn new(
        model: &'a ModelSpec,
        cluster: &'a ClusterSpec,
        gpus: u64,
        restrictions: &'a Restrictions,
    ) -> Self {
        Self {
            model,
            cluster,
            gpus,
            restrictions,
            ignore_memory: false,
            cutoff_s: f64::INFINITY,
            solver_time: Duration::from_secs(120),
        }
    }

    /// The task's space.
    pub fn space(&self) -> Space<'a> {
        Space {
            model: self.model,
            cluster: self.cluster,
            gpus: self.gpus,
            restrictions: self.restrictions,
        }
    }
}

/// How the search went: the proof.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Proof {
    /// Combinations that satisfy every divisibility rule.
    pub candidates: u64,
    /// Cut: their bound on time is not below the plan's time.
    pub cut_by_time: u64,
    /// Cut: their bound on memory is above the device's.
    pub cut_by_memory: u64,
    /// Cut: another combination does as well in every respect.
    pub cut_by_dominance: u64,
    /// Placement problems looked into.
    pub placed: u64,
    /// Integer programs solved.
    pub ilps: u64,
    /// Mean wall time of an integer program, ms.
    pub ms_per_ilp: f64,
    /// Wall time of the search, s.
    pub elapsed_s: f64,
    /// Nothing faster exists in the space, by this cost model.
    pub proven_optimal: bool,
    /// (time − bound) / time where not proven, else 0.
    pub gap: f64,
}

/// The best configuration found.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its decisions.
    pub decisions: Decisions,
    /// Its placement.
    pub placed: Placed,
    /// Its price.
    pub priced: Priced,
}

/// What a search returns.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The fastest configuration that fits, if any.
    pub best: Option<Found>,
    /// How it was found.
    pub proof: Proof,
}

/// Called now and then with the combinations settled and those in all.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// Finds the fastest configuration that fits.
pub fn search(task: &Task<'_>, progress: Progress<'_>) -> Outcome {
    let ground = Ground::new(task.model, task.cluster, task.gpus);
    let mut run = Run::new(task, &ground);
    run.settle_all(progress);
    run.outcome()
}

/// Degrees, context parallelism and micro-batch with all ways to split the experts.
struct Context {
    /// The context as a node whose bound holds for every split.
    bounded: Bounded,
    splits: Rc<[ExpertSplit]>,
}

impl Context {
    /// Combinations.
    fn count(&self) -> u64 {
        self.bounded.count * self.splits.len() as u64
    }
}

/// A node with its bound.
struct Bounded {
    node: Node,
    inner: Inner,
    count: u64,
    load: Load,
    bound_s: f64,
}

impl Bounded {
    /// A guess at the node's time, for the order in which nodes are taken: the bound with 1F1B's bubble.
    fn promise_s(&self) -> f64 {
        let d = &self.node.decisions;
        self.bound_s * (1.0 + (d.pp - 1) as f64 / d.micro_batches as f64)
    }
}

/// Work of one micro-batch through the whole model on one pipeline's devices, at least.
#[derive(Clone, Copy, Debug)]
struct Load {
    forward_s: f64,
    backward_s: f64,
    /// Vocabulary layers where first and last stage hold them.
    ends_forward_s: f64,
    ends_backward_s: f64,
}

impl Load {
    fn total_s(&self) -> f64 {
        self.forward_s + self.backward_s
    }
}

/// A combination that bounds and incumbents did not settle.
struct Open {
    decisions: Decisions,
    bound_s: f64,
}

/// Nodes of the same tensor, pipeline and context degrees probed for a first incumbent.
const PROBED_NODES_A_MESH: usize = 2;

/// Ways to split the experts of such a node that are probed.
const PROBED_SPLITS: usize = 2;

struct Run<'a> {
    task: &'a Task<'a>,
    ground: &'a Ground<'a>,
    space: Space<'a>,
    proof: Proof,
    scratch: Scratch,
    /// Finished iteration of the best so far, s.
    best_s: f64,
    best: Option<(Decisions, Placed)>,
    /// Least bound of a configuration that an integer program gave up on.
    open_bound_s: f64,
    ilp_s: f64,
    open: Vec<Open>,
    /// Least state seconds by tp, pp, cp, ep and etp.
    states: HashMap<(u64, u64, u64, u64, u64), f64>,
}

impl<'a> Run<'a> {
    fn new(task: &'a Task<'a>, ground: &'a Ground<'a>) -> Self {
        Self {
            task,
            ground,
            space: task.space(),
            proof: Proof::default(),
            scratch: Scratch::default(),
            best_s: task.cutoff_s,
            best: None,
            open_bound_s: f64::INFINITY,
            ilp_s: 0.0,
            open: vec![],
            states: HashMap::new(),
        }
    }

    fn settle_all(&mut self, progress: Progress<'_>) {
        let begun = Instant::now();
        let mut contexts = self.bounded_contexts();
        self.proof.candidates = contexts.iter().map(Context::count).sum();
        contexts.sort_by(|a, b| a.bounded.promise_s().total_cmp(&b.bounded.promise_s()));
        self.probe(&contexts);
        let mut settled = 0;
        for context in &contexts {
            if context.bounded.bound_s >= self.best_s {
                self.proof.cut_by_time += context.count();
            } else {
                self.settle_context(context);
            }
            settled += context.count();
            progress(settled, self.proof.candidates);
        }
        self.settle_open();
        self.proof.elapsed_s = begun.elapsed().as_secs_f64();
    }

    fn settle_context(&mut self, context: &Context) {
        for node in self.nodes_of(context) {
            if node.bound_s >= self.best_s {
                self.proof.cut_by_time += node.count;
            } else {
                self.settle_node(&node);
            }
        }
    }

    /// The nodes of a context, most promising first.
    fn nodes_of(&mut self, context: &Context) -> Vec<Bounded> {
        let base = &context.bounded;
        let mut nodes = vec![];
        for split in context.splits.iter() {
            let node = Node { decisions: split.of(&base.node.decisions) };
            let load = self.load(&self.ground.sheet(&node.decisions));
            let bound_s = self.node_bound_s(&node.decisions, &base.inner, &load);
            nodes.push(Bounded {
                node,
                inner: base.inner.clone(),
                count: base.count,
                load,
                bound_s,
            });
        }
        nodes.sort_by(|a, b| a.bound_s.total_cmp(&b.bound_s));
        nodes
    }

    /// Looks for a good configuration among the usual ones of the most promising nodes, so that the
    /// bounds cut from the start. Proves nothing.
    fn probe(&mut self, contexts: &[Context]) {
        let mut seen = HashMap::new();
        for context in contexts {
            let d = &context.bounded.node.decisions;
            let tried = seen.entry((d.tp, d.pp, d.cp)).or_insert(0);
            if context.bounded.bound_s >= self.best_s || *tried >= PROBED_NODES_A_MESH {
                continue;
            }
            *tried += 1;
            for node in self.nodes_of(context).iter().take(PROBED_SPLITS) {
                self.probe_node(node);
            }
        }
    }

    fn probe_node(&mut self, node: &Bounded) {
        for (schedule, vpp, vocabs) in usual_pipelines(&node.inner) {
            let free = vocabs.iter().find(|vocab| **vocab == Vocab::Tensor).or(vocabs.first());
            let Some(&vocab) = free else { continue };
            let d = Decisions { schedule, vpp, vocab, ..node.node.decisions.clone() };
            let pipeline_s = self.pipeline_bound_s(&d, &node.load);
            if self.finish_s(pipeline_s) < self.best_s {
                self.probe_states(node, &d, pipeline_s);
            }
        }
    }

    /// Every ZeRO stage and shard group, the first of everything else.
    fn probe_states(&mut self, node: &Bounded, d: &Decisions, pipeline_s: f64) {
        let recompute = self.recompute_choices(node);
        let inner = &node.inner;
        let first = (inner.offload.first(), inner.rank_order.first(), recompute.first());
        let (Some(&offload), Some(&rank_order), Some(&recompute)) = first else { return };
        // Several chunks take longer to price: of each stage only the largest shard groups are tried.
        let last = |stage: u8| inner.shards.iter().rposition(|shard| shard.0 == stage);
        for (position, &(zero_stage, dp_shard)) in inner.shards.iter().enumerate() {
            if d.vpp > 1 && last(zero_stage) != Some(position) {
                continue;
            }
            let d = Decisions { zero_stage, dp_shard, offload, rank_order, recompute, ..d.clone() };
            self.settle(d, pipeline_s, false);
        }
    }

    /// Settles what bounds and incumbents left open, most promising first.
    fn settle_open(&mut self) {
        let mut open = std::mem::take(&mut self.open);
        open.sort_by(|a, b| a.bound_s.total_cmp(&b.bound_s));
        for item in open {
            if item.bound_s >= self.best_s {
                continue;
            }
            let Ok(case) = Case::new(self.ground, item.decisions) else { continue };
            self.prove(&case);
        }
    }

    /// Contexts with a bound that holds for every split of their experts.
    fn bounded_contexts(&mut self) -> Vec<Context> {
        let mut known: HashMap<_, Rc<[ExpertSplit]>> = HashMap::new();
        let mut contexts = vec![];
        for node in self.space.contexts() {
            let d = &node.decisions;
            let inner = self.space.inner(&node);
            let count = inner.count();
            let key = (d.tp, d.cp, d.dp, d.sequence_parallel);
            let space = self.space;
            let splits = known.entry(key).or_insert_with(|| Rc::from(space.expert_splits(d)));
            if count == 0 || splits.is_empty() {
                continue;
            }
            let splits = Rc::clone(splits);
            let load = self.load(&self.ground.floor_sheet(d, &splits));
            let m = d.micro_batches as f64;
            let bound_s = self.finish_s(m * load.total_s() / d.pp as f64);
            contexts
                .push(Context { bounded: Bounded { node, inner, count, load, bound_s }, splits });
        }
        contexts
    }

    /// The least recomputation allowed is counted; all else is what every placement must do.
    fn load(&self, sheet: &Sheet) -> Load {
        let counts = self.ground.layers.counts(0, self.ground.layers.len());
        let least = least_recompute(self.task.restrictions);
        let sum = |value: &dyn Fn(usize) -> f64| -> f64 {
            counts.iter().enumerate().map(|(kind, &count)| count as f64 * value(kind)).sum()
        };
        let vocab = &sheet.vocab;
        Load {
            forward_s: sum(&|kind| sheet.layer[kind].forward.total_s()),
            backward_s: sum(&|kind| {
                let layer = &sheet.layer[kind];
                layer.backward().total_s() + layer.recompute[least].total_s()
            }),
            ends_forward_s: vocab.embed_forward.total_s() + vocab.head_forward.total_s(),
            ends_backward_s: vocab.embed_backward.total_s()
                + vocab.head_backward_input.total_s()
                + vocab.head_backward_weight.total_s(),
        }
    }

    /// Some device has at least the mean of the devices' work on layers and does all its micro-batches
    /// one after another.
    ///
    /// To this come the reductions, gathers and updates of whichever state choice does least of them.
    fn node_bound_s(&mut self, d: &Decisions, inner: &Inner, load: &Load) -> f64 {
        let states_s = self.least_states_s(d, inner);
        self.finish_s(d.micro_batches as f64 * load.total_s() / d.pp as f64 + states_s)
    }

    /// Depends on the mesh alone, not on how a micro-batch passes through it.
    fn least_states_s(&mut self, d: &Decisions, inner: &Inner) -> f64 {
        let key = (d.tp, d.pp, d.cp, d.ep, d.etp);
        if let Some(&known) = self.states.get(&key) {
            return known;
        }
        let mut least_s = f64::INFINITY;
        for &rank_order in &inner.rank_order {
            for &(zero_stage, dp_shard) in &inner.shards {
                for &offload in &inner.offload {
                    let d = Decisions { rank_order, zero_stage, dp_shard, offload, ..d.clone() };
                    least_s = least_s.min(crate::case::least_layer_state_s(self.ground, &d));
                }
            }
        }
        self.states.insert(key, least_s);
        least_s
    }

    fn finish_s(&self, core_s: f64) -> f64 {
        let software = &self.task.cluster.software;
        core_s * crate::case::priced::straggler(self.task.cluster, self.task.gpus)
            + software.step_overhead_s
    }

    fn settle_node(&mut self, node: &Bounded) {
        for (schedule, vpp, vocabs) in &node.inner.schedules {
            for &vocab in vocabs {
                self.settle_pipeline(node, *schedule, *vpp, vocab);
            }
        }
    }

    fn settle_pipeline(&mut self, node: &Bounded, schedule: ScheduleName, vpp: u64, vocab: Vocab) {
        let count = node.inner.per_pipeline() as u64;
        if self.is_dominated(node, schedule, vocab) {
            self.proof.cut_by_dominance += count;
            return;
        }
        let d = Decisions { schedule, vpp, vocab, ..node.node.decisions.clone() };
        let pipeline_s = self.pipeline_bound_s(&d, &node.load);
        if self.finish_s(pipeline_s) >= self.best_s {
            self.proof.cut_by_time += count;
            return;
        }
        let recompute = self.recompute_choices(node);
        let kept = recompute.len() * node.inner.rank_order.len();
        let per_order = (node.inner.shards.len() * node.inner.offload.len()) as u64;
        self.proof.cut_by_dominance += count - kept as u64 * per_order;
        for recompute in recompute {
            for &rank_order in &node.inner.rank_order {
                let d = Decisions { recompute, rank_order, ..d.clone() };
                self.settle_states(node, &d, pipeline_s);
            }
        }
    }

    /// See the module's documentation.
    fn is_dominated(&self, node: &Bounded, schedule: ScheduleName, vocab: Vocab) -> bool {
        let vocabs = |name: ScheduleName| {
            node.inner.schedules.iter().find(|(s, ..)| *s == name).map(|(.., vocabs)| vocabs)
        };
        let here = vocabs(schedule);
        let freer = here.is_some_and(|vocabs| vocabs.contains(&Vocab::Tensor));
        if freer && matches!(vocab, Vocab::FirstLast | Vocab::Redistribute) {
            return true;
        }
        let plain = matches!(schedule, ScheduleName::GPipe | ScheduleName::Naive);
        plain && vocabs(ScheduleName::OneFOneB).is_some_and(|vocabs| vocabs.contains(&vocab))
    }

    fn recompute_choices(&mut self, node: &Bounded) -> Vec<Recompute> {
        let all = &node.inner.recompute;
        if all.contains(&Recompute::PerLayer) { vec![Recompute::PerLayer] } else { all.clone() }
    }

    /// Bound on the passes of any placement on this pipeline, s (core, not finished).
    fn pipeline_bound_s(&mut self, d: &Decisions, load: &Load) -> f64 {
        let (m, p) = (d.micro_batches as f64, d.pp as f64);
        let mean_s = m * load.total_s() / p;
        if d.vocab.over_pipeline() {
            let vocab_s = self.ground.vocabulary_over_pipeline(d).total_s();
            return with_passes_bound_s(m, p, load.total_s(), vocab_s);
        }
        let forward_s = load.forward_s + load.ends_forward_s;
        let backward_s = load.backward_s + load.ends_backward_s;
        let total_s = forward_s + backward_s;
        if d.vpp > 1 {
            return mean_s.max(m / p * total_s);
        }
        one_chunk_bound_s(m, p, forward_s, backward_s, total_s)
    }

    /// Settles every ZeRO stage, shard group and offloading on one pipeline.
    fn settle_states(&mut self, node: &Bounded, d: &Decisions, pipeline_s: f64) {
        let inner = &node.inner;
        let least = least_states(inner, d);
        let bound_s = self.relaxed_bound_s(least, pipeline_s);
        if self.finish_s(bound_s) >= self.best_s {
            self.proof.cut_by_time += (inner.shards.len() * inner.offload.len()) as u64;
            return;
        }
        for &(zero_stage, dp_shard) in &inner.shards {
            for &offload in &inner.offload {
                let d = Decisions { zero_stage, dp_shard, offload, ..d.clone() };
                self.settle(d, bound_s, true);
            }
        }
    }

    /// A bound on the passes that holds for all states: the optimum of the closed form, or the fastest of
    /// the listed placements, with the memory that the states which take least of it leave.
    fn relaxed_bound_s(&mut self, d: Decisions, pipeline_s: f64) -> f64 {
        let ignore_memory = self.task.ignore_memory;
        if d.vpp == 1 && d.schedule == ScheduleName::OneFOneB && !ignore_memory {
            let recomputing_s = recompute_bound::one_f_one_b_bound_s(self.ground, &d);
            if self.finish_s(recomputing_s) >= self.best_s {
                return recomputing_s;
            }
        }
        let Ok(case) = Case::new(self.ground, d) else { return f64::INFINITY };
        if let Some(list) = case.listed_ranges() {
            let chain_s = case.listed_chain_bound_s(&list);
            if case.finish_s(chain_s) >= self.best_s {
                return chain_s;
            }
            let listed_s = case.listed_bound_s(&list, ignore_memory, &mut self.scratch);
            return pipeline_s.max(listed_s);
        }
        let problem = case.relaxed_problem(case.core_s(self.best_s), ignore_memory);
        let bounded = dynamic::solve(&problem);
        bounded.map_or(f64::INFINITY, |found| pipeline_s.max(found.bound_s))
    }

    /// Settles one combination, or, when only probing, looks for an incumbent in it.
    fn settle(&mut self, d: Decisions, pipeline_s: f64, counted: bool) {
        let Ok(case) = Case::new(self.ground, d) else { return };
        let (reduce_s, step_s) = case.least_state_s();
        let passes_s = pipeline_s.max(case.mean_bound_s() + reduce_s);
        let bound_s = case.finish_s(passes_s + step_s);
        let one = u64::from(counted);
        if bound_s >= self.best_s {
            self.proof.cut_by_time += one;
        } else if !self.task.ignore_memory && case.least_bytes_per_device() > case.budget_bytes() {
            self.proof.cut_by_memory += one;
        } else {
            self.proof.placed += one;
            if let Some(bound_s) = self.place(&case, bound_s).filter(|_| counted) {
                self.open.push(Open { decisions: case.decisions, bound_s });
            }
        }
    }

    fn problem(&self, case: &Case<'_>) -> Option<Problem> {
        let mut problem = case.problem(case.core_s(self.best_s), self.task.ignore_memory);
        if self.task.ignore_memory {
            problem.budget_bytes.fill(f64::INFINITY);
        }
        problem.columns.iter().all(|columns| !columns.is_empty()).then_some(problem)
    }

    /// Looks for a good placement of a combination. Returns its bound (finished, s) if a better
    /// placement than the best so far may still be hidden in it.
    fn place(&mut self, case: &Case<'_>, bound_s: f64) -> Option<f64> {
        if let Some(list) = case.listed_ranges() {
            let best = case.best_listed(&list, self.task.ignore_memory, &mut self.scratch);
            if let Some((placed, value_s)) = best {
                self.offer(case, || placed, value_s);
            }
            return None;
        }
        let problem = self.problem(case)?;
        let bounded = dynamic::solve(&problem)?;
        let bound_s = bound_s.max(case.finish_s(bounded.bound_s));
        if bound_s >= self.best_s {
            return None;
        }
        let value_s = problem.iteration_s(&bounded.choice, &mut self.scratch);
        self.offer(case, || case.placed(&problem, &bounded.choice), value_s);
        (value_s > bounded.bound_s * (1.0 + ilp::PROOF_TOLERANCE)).then_some(bound_s)
    }

    fn offer(&mut self, case: &Case<'_>, placed: impl FnOnce() -> Placed, core_s: f64) {
        let iteration_s = case.finish_s(core_s);
        if iteration_s < self.best_s {
            self.best_s = iteration_s;
            self.best = Some((case.decisions.clone(), placed()));
        }
    }

    /// Settles a combination by the integer program.
    fn prove(&mut self, case: &Case<'_>) {
        let Some(problem) = self.problem(case) else { return };
        let left_s = (self.task.solver_time.as_secs_f64() - self.ilp_s).max(0.0);
        let limits = ilp::Limits { time: Duration::from_secs_f64(left_s), paths: true };
        let cutoff_s = case.core_s(self.best_s);
        let report = ilp::solve(&problem, None, cutoff_s, limits, &mut self.scratch);
        self.proof.ilps += report.solves as u64;
        self.ilp_s += report.elapsed_s;
        if let Some((choice, value_s)) = &report.best {
            self.offer(case, || case.placed(&problem, choice), *value_s);
        }
        if !report.proven {
            self.open_bound_s = self.open_bound_s.min(case.finish_s(report.bound_s));
        }
    }

    fn outcome(mut self) -> Outcome {
        let open = self.open_bound_s < self.best_s;
        self.proof.proven_optimal = !open;
        self.proof.gap = if open { 1.0 - self.open_bound_s / self.best_s } else { 0.0 };
        self.proof.ms_per_ilp = 1e3 * self.ilp_s / self.proof.ilps.max(1) as f64;
        let best = self.best.take().and_then(|(decisions, placed)| {
            let decisions = named_by_result(decisions, &placed, self.task.restrictions);
            let case = Case::new(self.ground, decisions).ok()?;
            let priced = case.price(&placed, &mut self.scratch);
            Some(Found { decisions: case.decisions, placed, priced })
        });
        Outcome { best, proof: self.proof }
    }
}

/// Index of the cheapest recomputation that is allowed, in `RECOMPUTE_OPTIONS`.
fn least_recompute(restrictions: &Restrictions) -> usize {
    let allows = |option| restrictions.recompute.allows(option);
    if allows(Recompute::None) || allows(Recompute::PerLayer) {
        0
    } else if allows(Recompute::Selective) {
        1
    } else {
        2
    }
}

/// Pipelines worth a probe: one chunk, and few and many chunks of each schedule that has several.
fn usual_pipelines(inner: &Inner) -> Vec<(ScheduleName, u64, &Vec<Vocab>)> {
    let several = [ScheduleName::Interleaved1F1B, ScheduleName::LoopedBfs];
    let of = |name: ScheduleName| inner.schedules.iter().filter(move |(s, ..)| *s == name);
    let mut found: Vec<_> = of(ScheduleName::OneFOneB).collect();
    for name in several {
        let all: Vec<_> = of(name).collect();
        found.extend(all.first());
        found.extend(all.get(all.len() / 2));
    }
    found.into_iter().map(|(schedule, vpp, vocabs)| (*schedule, *vpp, vocabs)).collect()
}

/// The states that take least memory on every device: the highest stage over the most shards, as much
/// on the host as may be.
fn least_states(inner: &Inner, d: &Decisions) -> Decisions {
    let (zero_stage, dp_shard) = inner.shards.iter().copied().max().unwrap_or((0, 1));
    let most = inner.shards.iter().map(|shard| shard.1).max().unwrap_or(dp_shard);
    let offload = inner.offload.iter().copied().max().unwrap_or(Offload::None);
    Decisions { zero_stage, dp_shard: most, offload, ..d.clone() }
}

/// 1F1B, GPipe and naive, any placement, latencies aside. Two bounds, the larger counts:
/// - one micro-batch's way through all stages and back, with the other m − 1 forwards (or backwards) on
///   the stage where they are longest, which is at least their mean;
/// - for m > p the average of the rows of the closed form ([`dynamic`]) that weighs all stages alike:
///   with weights `λ_q = ((m−1)/p − Σ_{j<q} λ_j)/(m − 1 − w_q) ≥ 0`, which add up to one, every stage's
///   load counts `(m + p − 1)/p` times. GPipe and naive take no less than 1F1B.
fn one_chunk_bound_s(m: f64, p: f64, forward_s: f64, backward_s: f64, total_s: f64) -> f64 {
    let way_s = total_s + (m - 1.0) * forward_s.max(backward_s) / p;
    let rows_s = if m > p { (m + p - 1.0) / p * total_s } else { m / p * total_s };
    way_s.max(rows_s)
}

/// 1F1B with vocabulary passes of `vocab_s` on every device: stage `q` does all its micro-batches and
/// what the stages before it do to one, `T ≥ Σ_{j<q} ℓ_j + m(ℓ_q + vocab)`. The average of these rows that
/// weighs all stages alike counts the whole model `1/(1 − (1 − 1/m)^p)` times.
fn with_passes_bound_s(m: f64, p: f64, total_s: f64, vocab_s: f64) -> f64 {
    total_s / (1.0 - (1.0 - 1.0 / m).powf(p)) + m * vocab_s
}

/// A mixed recomputation that turned out uniform goes by the uniform name, if that is allowed.
fn named_by_result(mut d: Decisions, placed: &Placed, restrictions: &Restrictions) -> Decisions {
    if d.recompute != Recompute::PerLayer {
        return d;
    }
    let used = |option: usize| placed.iter().any(|s| s.mix.iter().any(|split| split[option] > 0));
    let uniform = match (used(0), used(1), used(2)) {
        (_, false, false) => Recompute::None,
        (false, true, false) => Recompute::Selective,
        (false, false, true) => Recompute::Full,
        _ => Recompute::PerLayer,
    };
    if restrictions.recompute.allows(uniform) {
        d.recompute = uniform;
    }
    d
}
