//! A search's outcome as a plan and as JSON.

use crate::answer::replan::WhyNoMore;
use crate::answer::unsearched::FasterWith;
use crate::order::choice::Ordered;
use crate::order::vocab::timed;
use crate::partition::Scratch;
use crate::pricing::Configuration;
use crate::pricing::cost_cache::CostCache;
use crate::pricing::priced::{MemoryBytes, Placed};
use crate::pricing::recompute_split::RecomputeSplit;
use crate::request::{DEFAULT_HEADROOM, Request};
use crate::search::{Candidate, Effort, Found, Outcome};
use models::decisions::Decisions;
use models::layer;
use models::placement::{RecomputeCounts, Stage, StageCopy, StageMemory, VocabShare, kind_name};
use models::plan::{
    Breakdown, ClusterFigures, ErrorBand, Inputs, Plan, Predicted, Proof, Timing, VERSION,
    significant,
};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Name and version, as plans carry them.
pub const TOOL: &str = concat!("meshwright ", env!("CARGO_PKG_VERSION"));

/// How model FLOPs count attention.
const ATTENTION_FLOPS: &str =
    "a query reads min(seq_len, window) keys, seq_len without a window; no causal credit";

/// A plan, its proof, and alternatives.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The plan.
    pub plan: Plan,
    /// Whether it fits.
    pub feasible: bool,
    /// The placement of its layers.
    pub placed: Placed,
    /// What is proven of it.
    pub proof: Proof,
    /// What the search cost.
    pub effort: Effort,
    /// What the search priced on its way.
    pub passed: Vec<Candidate>,
    /// Other configurations, fastest first.
    pub alternatives: Vec<Alternative>,
    /// Whether it is proven that there are no others, where there are fewer than were asked for.
    pub all_alternatives: bool,
    /// Bytes on the fullest device if all tokens went to the experts of one rank.
    pub worst_case_bytes: Option<u64>,
    /// With `--runnable`: the fastest plan without it, if that is faster.
    pub not_runnable: Option<NotRunnable>,
    /// The share of its time that a plan without `--runnable` may save at most, as far as a search
    /// for one came.
    pub not_runnable_gap: f64,
    /// With `--objective memory`: bytes of a device below which nothing fits.
    pub least_memory_bytes: Option<u64>,
    /// Settings that were not searched and make it faster.
    pub faster_with: Vec<FasterWith>,
    /// With `--from`: GPUs that idle, if any.
    pub idle: Option<Idle>,
}

/// GPUs that a plan leaves idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Idle {
    /// How many.
    pub gpus: u64,
    /// Why the plan uses no more.
    pub why: WhyNoMore,
}

/// A plan that our trainer cannot run.
#[derive(Clone, Debug, Serialize)]
pub struct NotRunnable {
    /// Its decisions.
    pub decisions: Decisions,
    /// Its iteration, s.
    pub iteration_s: f64,
    /// By what fraction of its time the answer is slower.
    pub costs: f64,
    /// Why it cannot be run.
    pub reasons: Vec<String>,
}

/// Another configuration, compared with the plan.
#[derive(Clone, Debug, Serialize)]
pub struct Alternative {
    /// Its decisions.
    pub decisions: Decisions,
    /// Its iteration, s.
    pub iteration_s: f64,
    /// By what fraction of the plan's time it is slower.
    pub slower: f64,
    /// The share of its time that another one of its kind may save at most, over the cuts tried: 0
    /// where its search was complete.
    pub gap: f64,
    /// Memory of its fullest rank, bytes.
    pub peak_memory_bytes: u64,
    /// Where its iteration goes.
    pub breakdown: Breakdown,
    /// The configuration.
    #[serde(skip)]
    pub found: Found,
}

impl Alternative {
    /// A configuration beside one that takes `own_s`; another of its kind may save `gap` of its
    /// time.
    pub fn new(found: Found, own_s: f64, gap: f64) -> Self {
        let priced = &found.priced;
        Self {
            decisions: found.decisions.clone(),
            iteration_s: priced.iteration_s,
            slower: priced.iteration_s / own_s - 1.0,
            gap,
            peak_memory_bytes: priced.device_bytes.iter().copied().fold(0.0, f64::max) as u64,
            breakdown: priced.breakdown.rounded(),
            found,
        }
    }
}

impl Answer {
    /// The answer of a search that found something.
    pub fn new(request: &Request, outcome: Outcome) -> Option<Self> {
        let Outcome { best, passed, proof, effort } = outcome;
        let best = timed(&request.task(), best?);
        let plan = plan(request, &best, &proof);
        let worst_case_bytes = worst_case_bytes(request, &best);
        let (feasible, placed) = (best.priced.fits, best.placed);
        Some(Self {
            plan,
            feasible,
            placed,
            proof,
            effort,
            passed,
            alternatives: vec![],
            all_alternatives: true,
            worst_case_bytes,
            not_runnable: None,
            not_runnable_gap: 0.0,
            least_memory_bytes: None,
            faster_with: vec![],
            idle: None,
        })
    }

    /// The answer; or its first alternative, if that is faster, as it may be where the search was
    /// stopped. What the proof says of others does not change.
    #[must_use]
    pub fn or_faster(mut self, request: &Request) -> Self {
        let own_s = self.plan.predicted.iteration_s;
        if self.alternatives.first().is_none_or(|first| first.iteration_s >= own_s) {
            return self;
        }
        let faster = self.alternatives.remove(0);
        let displaced = self.as_alternative(request);
        let gap = |gap: f64| (1.0 - own_s * (1.0 - gap) / faster.iteration_s).max(0.0);
        let (gap, searched_gap) = (gap(self.proof.gap), gap(self.proof.searched_gap));
        let proven_optimal = gap == 0.0;
        let proof = Proof { gap, searched_gap, proven_optimal, ..self.proof };
        let (best, passed) = (Some(faster.found), vec![]);
        let outcome = Outcome { best, passed, proof, effort: self.effort };
        let Some(better) = Self::new(request, outcome) else { return self };
        let (mut alternatives, all_alternatives) = (self.alternatives, self.all_alternatives);
        alternatives.extend(displaced);
        alternatives.sort_by(|a, b| a.iteration_s.total_cmp(&b.iteration_s));
        for other in &mut alternatives {
            other.slower = other.iteration_s / better.plan.predicted.iteration_s - 1.0;
        }
        Self { alternatives, all_alternatives, ..better }
    }

    /// This answer as an alternative to a faster one.
    fn as_alternative(&self, request: &Request) -> Option<Alternative> {
        let cache = CostCache::new(&request.model, &request.cluster, request.gpus);
        let found = Found::new(&cache, self.plan.decisions.clone(), self.placed.clone())?;
        Some(Alternative::new(found, self.plan.predicted.iteration_s, self.proof.searched_gap))
    }

    /// The same plan with another order of passes. The proof stays that of the search.
    #[must_use]
    pub fn in_order(self, request: &Request, ordered: Ordered) -> Self {
        let plan = plan(request, &ordered.found, &self.proof);
        let mut faster_with = self.faster_with;
        faster_with.retain(|other| other.iteration_s < plan.predicted.iteration_s);
        Self { plan: Plan { order: ordered.order, ..plan }, faster_with, ..self }
    }

    /// The fullest pipeline rank, the memory of each of its devices, and by how many bytes that
    /// exceeds the device (negative where it fits).
    pub fn fullest(&self) -> (usize, StageMemory, i64) {
        fullest(&self.plan)
    }

    /// The stage with the most memory of a pipeline rank.
    fn largest_stage(&self, rank: usize) -> usize {
        let on_it = self.plan.stages.iter().flat_map(|stage| {
            let here = stage.held().filter(|(holder, _)| *holder == rank);
            here.map(|(_, memory)| (stage.stage, memory.total))
        });
        on_it.max_by_key(|(_, total)| *total).map_or(0, |(stage, _)| stage)
    }

    /// The answer as JSON, by its documented names.
    pub fn json(&self) -> Value {
        let Plan { inputs, decisions, predicted, stages, order, .. } = &self.plan;
        let (rank, _, short) = self.fullest();
        json!({
            "model": inputs.model.name,
            "cluster": inputs.cluster.name,
            "gpus": inputs.gpus,
            "global_batch": inputs.global_batch,
            "seq_len": inputs.seq_len,
            "tokens": inputs.tokens,
            "headroom": inputs.headroom,
            "assumptions": inputs.model.assumptions,
            "decisions": decisions,
            "feasible": self.feasible,
            "short_of_memory": (!self.feasible).then(|| json!({"stage": self.largest_stage(rank), "bytes": short.max(0)})),
            "warnings": warnings(&self.plan),
            "stages": stages,
            "order": (!order.is_empty()).then_some(order),
            "predicted": predicted,
            "worst_case_memory_bytes": self.worst_case_bytes,
            "attention_flops": ATTENTION_FLOPS,
            "search": search_json(&self.proof, self.effort),
            "alternatives": self.alternatives,
            "not_runnable": self.not_runnable,
            "not_runnable_gap": self.not_runnable_gap,
            "least_memory_bytes": self.least_memory_bytes,
            "faster_with": self.faster_with,
            "idle": self.idle,
            "tool": TOOL,
        })
    }
}

/// Bytes on the fullest device if every token of an expert-parallel group went to the experts of
/// one of its ranks; `None` where no load is worse than an even one.
fn worst_case_bytes(request: &Request, found: &Found) -> Option<u64> {
    let mut model = request.model.clone();
    let worst = layer::worst_imbalance(&model, found.decisions.ep)?;
    model.moe.as_mut()?.imbalance = worst;
    let cache = CostCache::new(&model, &request.cluster, request.gpus);
    let configuration = Configuration::new(&cache, found.decisions.clone()).ok()?;
    let priced = configuration.price(&found.placed, &mut Scratch::default());
    priced.device_bytes.into_iter().reduce(f64::max).map(|bytes| bytes as u64)
}

/// A warning where memory is filled beyond the default headroom, and yet fits.
pub fn memory_warning(filled: f64, headroom: f64) -> Option<String> {
    let headroom = headroom.max(DEFAULT_HEADROOM);
    let near = filled <= 1.0 && filled > 1.0 - headroom;
    let [percent, limit] = [filled, headroom].map(|share| 100.0 * share);
    near.then(|| format!("memory is {percent:.1} % full: within {limit:.0} % of the limit a run may fail or slow down"))
}

/// Warnings about a plan.
pub fn warnings(plan: &Plan) -> Vec<String> {
    let (_, memory, _) = fullest(plan);
    let filled = memory.total as f64 / plan.inputs.cluster.hbm_bytes as f64;
    memory_warning(filled, plan.inputs.headroom).into_iter().collect()
}

/// The fullest pipeline rank of a plan; see [`Answer::fullest`].
pub fn fullest(plan: &Plan) -> (usize, StageMemory, i64) {
    let ranks = plan.device_memory();
    let fullest = ranks.into_iter().enumerate().max_by_key(|(_, memory)| memory.total);
    let (rank, memory) = fullest.unwrap_or_default();
    let room = plan.inputs.cluster.hbm_bytes as i64;
    (rank, memory, memory.total as i64 - room)
}

fn search_json(proof: &Proof, effort: Effort) -> Value {
    let cut = [proof.cut_by_time, proof.cut_by_memory, proof.cut_by_dominance];
    json!({
        "candidates": proof.candidates,
        "pruned": cut.iter().sum::<u64>(),
        "pruned_by": {"time": cut[0], "memory": cut[1], "dominance": cut[2]},
        "placed": proof.placed,
        "solved": proof.ilps,
        "ms_per_ilp": effort.ms_per_ilp,
        "elapsed_s": effort.elapsed_s,
        "first_s": effort.first_s,
        "proven_optimal": proof.proven_optimal,
        "gap": proof.gap,
        "searched_gap": proof.searched_gap,
        "family": proof.family,
    })
}

/// The plan of a found configuration.
pub fn plan(request: &Request, found: &Found, proof: &Proof) -> Plan {
    priced_plan(request, found, proof.rounded())
}

/// The plan of a found configuration, with a proof that is rounded already.
pub fn priced_plan(request: &Request, found: &Found, proof: Proof) -> Plan {
    let inputs = inputs(request, &found.decisions);
    let stages = stages(request, found);
    let timing = Timing {
        iteration_s: significant(found.priced.iteration_s),
        breakdown: found.priced.breakdown.rounded(),
        error_band: ErrorBand::new(
            &request.cluster,
            &request.model,
            request.gpus,
            &found.decisions,
        ),
    };
    let predicted = Predicted::new(&inputs, &found.decisions, &stages, timing);
    Plan {
        version: VERSION,
        tool: TOOL.to_owned(),
        inputs,
        decisions: found.decisions.clone(),
        predicted,
        proof,
        stages,
        order: vec![],
    }
}

fn inputs(request: &Request, d: &Decisions) -> Inputs {
    Inputs {
        gpus: request.gpus,
        global_batch: request.model.global_batch,
        seq_len: request.model.seq_len,
        tokens: request.tokens,
        settings: request.settings.clone(),
        runnable: request.runnable,
        objective: request.objective,
        headroom: request.headroom,
        cluster: ClusterFigures::new(&request.cluster, d),
        model: request.model.clone(),
    }
}

fn stages(request: &Request, found: &Found) -> Vec<Stage> {
    let cache = CostCache::new(&request.model, &request.cluster, request.gpus);
    let names: Vec<&str> = cache.layers.kinds.iter().map(|&kind| kind_name(kind)).collect();
    let priced = found.placed.iter().zip(&found.priced.stages).enumerate();
    priced
        .map(|(stage, (placed, price))| Stage {
            stage,
            device: price.rank,
            chunk: price.chunk,
            first_layer: placed.start,
            layers: placed.end - placed.start,
            vocab_share: VocabShare::new(&found.decisions, stage),
            recompute: recompute(&names, &placed.recompute),
            memory: memory(&price.memory),
            copy: found.priced.copies.get(stage).map(|copy| StageCopy {
                device: copy.rank,
                chunk: copy.chunk,
                memory: memory(&copy.memory),
            }),
        })
        .collect()
}

fn recompute(names: &[&str], recompute: &RecomputeSplit) -> BTreeMap<String, RecomputeCounts> {
    let named = names.iter().zip(recompute).filter(|(_, split)| split.iter().sum::<usize>() > 0);
    named
        .map(|(name, &[none, selective, full])| {
            ((*name).to_owned(), RecomputeCounts { none, selective, full })
        })
        .collect()
}

/// Whole bytes, rounded down so that what fits still fits.
fn memory(bytes: &MemoryBytes) -> StageMemory {
    StageMemory {
        parameters: bytes.parameters as u64,
        gradients: bytes.gradients as u64,
        optimizer: bytes.optimizer as u64,
        activations: bytes.activations as u64,
        workspace: bytes.workspace as u64,
        total: 0,
    }
    .summed()
}

#[cfg(test)]
mod tests {
    use super::memory_warning;

    #[test]
    fn only_what_hardly_fits_is_warned_of() {
        assert_eq!(memory_warning(0.95, 0.05), None);
        assert_eq!(memory_warning(1.001, 0.05), None);
        assert!(memory_warning(0.973, 0.0).is_some_and(|text| text.contains("97.3 % full")));
        assert!(memory_warning(0.84, 0.2).is_some_and(|text| text.contains("within 20 %")));
    }
}
