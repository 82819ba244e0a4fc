//! The search: every combination is either priced exactly or cut by a bound.
//!
//! Nodes (degrees, context and expert splits, micro-batch) are taken in the order of a lower bound on
//! their time. Within a node each pipeline (schedule, chunks, vocabulary placement) and state choice
//! (ZeRO, shards, offload, rank order) has a tighter bound; what survives becomes a placement problem,
//! settled by the dynamic program's bound, by a simulated placement that attains it, or by the integer
//! program. Three families are cut by dominance, each because another member of the space does as well
//! in every respect:
//! - uniform recomputation is one of the mixes of `per_layer`;
//! - the layer ranges of `first_last` and `redistribute` are among those of `tensor`;
//! - `gpipe` and `naive` are no faster than `1f1b` and keep no fewer micro-batches in flight: without
//!   latency 1F1B takes at most `(m−1)(max F + max B) + Σ(F + B)`, which is what GPipe takes.

use crate::case::Case;
use crate::case::ground::Ground;
use crate::case::priced::{Placed, Priced};
use crate::placement::certificate::Certificate;
use crate::placement::{Choice, Problem, Scratch, dynamic, ilp, local};
use crate::restrict::Restrictions;
use crate::space::{Inner, Node, Space};
use models::cluster::ClusterSpec;
use models::decisions::{Decisions, Offload, RankOrder, Recompute, Vocab};
use models::model::ModelSpec;
use models::schedule::ScheduleName;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
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

/// A node with its bound.
struct Bounded {
    node: Node,
    inner: Inner,
    count: u64,
    load: Load,
    bound_s: f64,
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

struct Run<'a> {
    task: &'a Task<'a>,
    ground: &'a Ground<'a>,
    space: Space<'a>,
    proof: Proof,
    scratch: Scratch,
    certificates: HashMap<(ScheduleName, usize, usize, usize), Certificate>,
    /// Finished iteration of the best so far, s.
    best_s: f64,
    best: Option<(Decisions, Placed)>,
    /// Least bound of a configuration that an integer program gave up on.
    open_bound_s: f64,
    ilp_s: f64,
}

impl<'a> Run<'a> {
    fn new(task: &'a Task<'a>, ground: &'a Ground<'a>) -> Self {
        Self {
            task,
            ground,
            space: task.space(),
            proof: Proof::default(),
            scratch: Scratch::default(),
            certificates: HashMap::new(),
            best_s: task.cutoff_s,
            best: None,
            open_bound_s: f64::INFINITY,
            ilp_s: 0.0,
        }
    }

    fn settle_all(&mut self, progress: Progress<'_>) {
        let begun = Instant::now();
        let mut nodes = self.bounded_nodes();
        self.proof.candidates = nodes.iter().map(|node| node.count).sum();
        nodes.sort_by(|a, b| a.bound_s.total_cmp(&b.bound_s));
        let mut settled = 0;
        for node in &nodes {
            if node.bound_s >= self.best_s {
                self.proof.cut_by_time += node.count;
            } else {
                self.settle_node(node);
            }
            settled += node.count;
            progress(settled, self.proof.candidates);
        }
        self.proof.elapsed_s = begun.elapsed().as_secs_f64();
    }

    fn bounded_nodes(&self) -> Vec<Bounded> {
        let bounded = |node: Node| {
            let inner = self.space.inner(&node);
            let count = inner.count();
            let load = self.load(&node.decisions);
            let bound_s = self.node_bound_s(&node.decisions, &load);
            Bounded { node, inner, count, load, bound_s }
        };
        self.space.nodes().into_iter().map(bounded).filter(|node| node.count > 0).collect()
    }

    /// The least recomputation allowed is counted; all else is what every placement must do.
    fn load(&self, d: &Decisions) -> Load {
        let sheet = self.ground.sheet(d);
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
    fn node_bound_s(&self, d: &Decisions, load: &Load) -> f64 {
        self.finish_s(d.micro_batches as f64 * load.total_s() / d.pp as f64)
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
        for recompute in self.recompute_choices(node) {
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
            return mean_s;
        }
        let forward_s = load.forward_s + load.ends_forward_s;
        let backward_s = load.backward_s + load.ends_backward_s;
        let total_s = forward_s + backward_s;
        if d.vpp > 1 {
            // The hop's latency or blocking time only adds to this.
            let certificate = self.certificate(d);
            return certificate
                .map_or(mean_s, |found| found.bound_s(forward_s, backward_s, 0.0))
                .max(mean_s);
        }
        one_chunk_bound_s(m, p, forward_s, backward_s, total_s)
    }

    fn certificate(&mut self, d: &Decisions) -> Option<Certificate> {
        let (p, m, v) = (d.pp as usize, d.micro_batches as usize, d.vpp as usize);
        let key = (d.schedule, p, m, v);
        if let Some(found) = self.certificates.get(&key) {
            return Some(*found);
        }
        let found = Certificate::find(&*self.ground.pipeline(d).ok()?);
        self.certificates.insert(key, found);
        Some(found)
    }

    fn settle_states(&mut self, node: &Bounded, d: &Decisions, pipeline_s: f64) {
        let share = node.inner.recompute.len() as u64;
        let merged = self.recompute_choices(node).len() as u64;
        let dominated_each = (share - merged) / merged.max(1);
        for &(zero_stage, dp_shard) in &node.inner.shards {
            for &offload in &node.inner.offload {
                self.proof.cut_by_dominance += dominated_each;
                let d = Decisions { zero_stage, dp_shard, offload, ..d.clone() };
                self.settle(d, pipeline_s);
            }
        }
    }

    /// Settles one combination.
    fn settle(&mut self, d: Decisions, pipeline_s: f64) {
        let Ok(case) = Case::new(self.ground, d) else {
            self.proof.cut_by_dominance += 1;
            return;
        };
        let bound_s = pipeline_s.max(case.mean_bound_s()) + case.least_step_s();
        if case.finish_s(bound_s) >= self.best_s {
            self.proof.cut_by_time += 1;
        } else if !self.task.ignore_memory && case.least_bytes_per_device() > case.budget_bytes() {
            self.proof.cut_by_memory += 1;
        } else {
            self.place(&case);
        }
    }

    /// Finds the best placement of a combination, unless it cannot beat the best so far.
    fn place(&mut self, case: &Case<'_>) {
        self.proof.placed += 1;
        let cutoff_s = case.core_s(self.best_s);
        let mut problem = case.problem(cutoff_s, self.task.ignore_memory);
        if self.task.ignore_memory {
            problem.budget_bytes.fill(f64::INFINITY);
        }
        if problem.columns.iter().any(Vec::is_empty) {
            return;
        }
        let mut incumbent = None;
        if problem.pipeline.one_f_one_b {
            let Some(bounded) = dynamic::solve(&problem) else { return };
            if bounded.bound_s >= cutoff_s {
                return;
            }
            let value_s = problem.iteration_s(&bounded.choice, &mut self.scratch);
            self.offer(case, &problem, &bounded.choice, value_s);
            if value_s <= bounded.bound_s * (1.0 + ilp::PROOF_TOLERANCE) {
                return;
            }
            incumbent = Some((bounded.choice, value_s));
        } else if let Some((choice, value_s)) = local::solve(&problem, &mut self.scratch) {
            self.offer(case, &problem, &choice, value_s);
            incumbent = Some((choice, value_s));
        }
        self.prove(case, &problem, incumbent);
    }

    fn offer(&mut self, case: &Case<'_>, problem: &Problem, choice: &Choice, core_s: f64) {
        let iteration_s = case.finish_s(core_s);
        if iteration_s < self.best_s {
            self.best_s = iteration_s;
            self.best = Some((case.decisions.clone(), case.placed(problem, choice)));
        }
    }

    /// Settles the rest by the integer program.
    fn prove(&mut self, case: &Case<'_>, problem: &Problem, incumbent: Option<(Choice, f64)>) {
        let left_s = self.task.solver_time.as_secs_f64() - self.ilp_s;
        let limits = ilp::Limits { time: Duration::from_secs_f64(left_s.max(0.0)), paths: true };
        let cutoff_s = case.core_s(self.best_s).max(incumbent.as_ref().map_or(0.0, |(_, value)| *value));
        let cutoff_s = cutoff_s.min(case.core_s(self.best_s) * (1.0 + 1e-9));
        let report = ilp::solve(problem, incumbent, cutoff_s, limits, &mut self.scratch);
        self.proof.ilps += report.solves as u64;
        self.ilp_s += report.elapsed_s;
        if let Some((choice, value_s)) = &report.best {
            self.offer(case, problem, choice, *value_s);
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

/// Whether decisions leave nothing on the host and order ranks as Megatron does.
pub fn is_plain(d: &Decisions) -> bool {
    d.offload == Offload::None && d.rank_order == RankOrder::DpInner
}
