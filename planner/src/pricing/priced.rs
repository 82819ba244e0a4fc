//! The price of a configuration with a placement of its layers: what plans predict.

use super::cost_cache::CostCache;
use super::pipelines::PipelineKey;
use super::recompute_split::RecomputeSplit;
use super::{Configuration, StageCost};
use crate::cost::parts::Parts;
use crate::partition::{Choice, Column, Problem, Scratch};
use crate::simulate::{Timeline, simulate};
use models::cluster::ClusterSpec;
use models::plan::Breakdown;
use models::schedule::Schedule;
use serde::{Deserialize, Serialize};

/// The layers of one stage and what they recompute.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacedStage {
    /// First layer.
    pub start: usize,
    /// One past the last layer.
    pub end: usize,
    /// What its layers recompute.
    pub recompute: RecomputeSplit,
}

/// The placement: layers of every stage, in model order.
pub type Placed = Vec<PlacedStage>;

/// Bytes of one stage at the moment when its device holds most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemoryBytes {
    /// Weights.
    pub parameters: f64,
    /// Gradients.
    pub gradients: f64,
    /// Optimizer state.
    pub optimizer: f64,
    /// Activations in flight.
    pub activations: f64,
    /// Temporaries, logits, communication buffers and what the driver reserves.
    pub workspace: f64,
    /// All of it.
    pub total: f64,
}

/// The memory of one copy of a stage.
#[derive(Clone, Debug, PartialEq)]
pub struct StagePrice {
    /// Pipeline rank, 0-based.
    pub rank: usize,
    /// Chunk on that rank.
    pub chunk: usize,
    /// Memory of this stage. [`Priced::device_bytes`] has the peak of the rank's device.
    pub memory: MemoryBytes,
}

/// The price of a placed configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Priced {
    /// One iteration, s.
    pub iteration_s: f64,
    /// Where it goes.
    pub breakdown: Breakdown,
    /// By stage.
    pub stages: Vec<StagePrice>,
    /// The second copy of each stage, in bidirectional schedules.
    pub copies: Vec<StagePrice>,
    /// Peak bytes on the device of each pipeline rank, everything included.
    pub device_bytes: Vec<f64>,
    /// Whether it fits on every device and host.
    pub fits: bool,
}

impl Configuration<'_> {
    /// The partition problem's columns for a given placement, one a stage.
    pub fn columns_of_placed(&self, placed: &Placed) -> Vec<Vec<Column>> {
        let column = |(stage, s): (usize, &PlacedStage)| {
            let cost = self.stage(stage, s.start, s.end);
            let recompute_choices = self.recompute_cost(&s.recompute);
            vec![self.column((s.start, s.end), 0, &cost, &recompute_choices)]
        };
        placed.iter().enumerate().map(column).collect()
    }

    pub(crate) fn recompute_cost(
        &self,
        recompute: &RecomputeSplit,
    ) -> super::recompute_split::RecomputeCost {
        let bytes = |(kind, split): (usize, &[usize; 3])| -> f64 {
            let layer = &self.layer_costs.layer[kind];
            (0..3).map(|option| split[option] as f64 * layer.saved_bytes[option]).sum()
        };
        super::recompute_split::RecomputeCost {
            recompute: recompute.clone(),
            recompute_s: self.recompute_parts(recompute).total_s(),
            in_flight_bytes: recompute.iter().enumerate().map(bytes).sum(),
        }
    }

    /// The placement that a choice of columns stands for; `None` where a column is not of this
    /// configuration.
    pub fn placed(&self, problem: &Problem, choice: &Choice) -> Option<Placed> {
        let mut start = 0;
        let stage = |(stage, &index): (usize, &usize)| {
            let column = &problem.columns[stage][index];
            let range = (start, start + column.layers());
            start = range.1;
            let cost = self.stage(stage, range.0, range.1);
            let budget = problem.budget_bytes[self.rank_of(stage)];
            let recompute = self.fastest_recompute(stage, range, &cost, budget)?.recompute;
            Some(PlacedStage { start: range.0, end: range.1, recompute })
        };
        choice.iter().enumerate().map(stage).collect()
    }

    /// Prices a placement, whether or not it fits.
    pub fn price(&self, placed: &Placed, scratch: &mut Scratch) -> Priced {
        let problem = self.problem_of(self.columns_of_placed(placed));
        let choice = vec![0; placed.len()];
        let pipeline_s = problem.iteration_s(&choice, scratch);
        let iteration_s = self.with_overheads_s(pipeline_s);
        let reserved = self.common_workspace_bytes() + self.cache.cluster.reserved_bytes();
        let device_bytes: Vec<f64> =
            problem.memory_bytes(&choice).into_iter().map(|bytes| bytes + reserved).collect();
        let mut held = self.stage_prices(placed, &problem, reserved);
        let copies = held.split_off(placed.len());
        let costs: Vec<StageCost> =
            placed.iter().enumerate().map(|(n, s)| self.stage(n, s.start, s.end)).collect();
        let host_fits = self.fits_host(self.host_bytes(&costs));
        Priced {
            iteration_s,
            breakdown: self.breakdown(placed, iteration_s, pipeline_s),
            stages: held,
            copies,
            fits: host_fits && problem.fits(&choice),
            device_bytes,
        }
    }

    /// The timeline of a placement, in the schedule's order or in its `own`; `None` where that
    /// cannot run.
    pub fn timeline(&self, placed: &Placed, own: Option<Schedule>) -> Option<Timeline> {
        let schedule = match own {
            Some(order) => order,
            None => PipelineKey::new(&self.decisions).schedule().ok()?,
        };
        let problem = self.problem_of(self.columns_of_placed(placed));
        simulate(&schedule, &problem.durations(&vec![0; placed.len()])).ok()
    }

    /// As [`CostCache::with_overheads_s`].
    pub fn with_overheads_s(&self, pipeline_s: f64) -> f64 {
        self.cache.with_overheads_s(pipeline_s)
    }

    /// As [`CostCache::pipeline_s`].
    pub fn pipeline_s(&self, iteration_s: f64) -> f64 {
        self.cache.pipeline_s(iteration_s)
    }

    /// The stages, then their second copies in bidirectional schedules.
    fn stage_prices(&self, placed: &Placed, problem: &Problem, reserved: f64) -> Vec<StagePrice> {
        let chunks = self.decisions.vpp as f64;
        let price = |stage: usize, (rank, chunk): (usize, usize)| {
            let cost = self.stage(stage, placed[stage].start, placed[stage].end);
            let state = self.state_memory(cost.params);
            let column = &problem.columns[stage][0];
            let in_flight = self.peak_counts(problem, rank)[chunk];
            let mut memory = MemoryBytes {
                parameters: state.parameters,
                gradients: state.gradients,
                optimizer: state.optimizer,
                activations: f64::from(in_flight) * column.in_flight_bytes,
                workspace: column.state_bytes - state.device_bytes() + reserved / chunks,
                total: 0.0,
            };
            memory.total = memory.parameters
                + memory.gradients
                + memory.optimizer
                + memory.activations
                + memory.workspace;
            StagePrice { rank, chunk, memory }
        };
        let pipeline = self.pipeline();
        let copy = |nth: usize| {
            let of_stage = move |stage| Some(price(stage, pipeline.holders(stage).nth(nth)?));
            (0..placed.len()).filter_map(of_stage)
        };
        copy(0).chain(copy(1)).collect()
    }

    /// Micro-batches in flight, by chunk, at the moment when a pipeline rank holds most.
    fn peak_counts(&self, problem: &Problem, rank: usize) -> Vec<u32> {
        let bytes = |counts: &Vec<u32>| -> f64 {
            let held = |(stage, chunk): (usize, usize)| {
                f64::from(counts[chunk]) * problem.columns[stage][0].in_flight_bytes
            };
            self.pipeline().stages_on(rank).map(held).sum()
        };
        let vectors = &self.pipeline().in_flight[rank];
        let fullest = vectors.iter().max_by(|a, b| bytes(a).total_cmp(&bytes(b)));
        fullest.cloned().unwrap_or_else(|| vec![0; self.decisions.vpp as usize])
    }

    /// Splits the iteration of the busiest pipeline rank by cause. The rest is its bubble.
    fn breakdown(&self, placed: &Placed, iteration_s: f64, pipeline_s: f64) -> Breakdown {
        let (m, runs) = (self.micro_batches(), self.pipeline().runs());
        let mut ranks = vec![RankSpend::default(); self.ranks()];
        for (stage, s) in placed.iter().enumerate() {
            let cost = self.stage(stage, s.start, s.end);
            for (rank, chunk) in self.pipeline().holders(stage) {
                let spend = &mut ranks[rank];
                spend.passes += (cost.forward + cost.backward) * runs;
                let alone = self.pipeline().alone(rank, chunk);
                spend.passes.ep_s += alone[0] * cost.unpaired_s[0] + alone[1] * cost.unpaired_s[1];
                let again = self.recompute_parts(&s.recompute);
                spend.passes.host_s += again.host_s * runs;
                spend.recompute_s += (again.total_s() - again.host_s) * runs;
                spend.dp_s += cost.tail_s + cost.gather_s;
                spend.optimizer_s += cost.optimizer_s;
            }
        }
        for spend in &mut ranks {
            spend.passes += self.vocab_pass_parts() * m;
        }
        let busiest = ranks
            .into_iter()
            .max_by(|a, b| a.total_s().total_cmp(&b.total_s()))
            .unwrap_or_default();
        Breakdown {
            compute_s: busiest.passes.compute_s,
            tp_s: busiest.passes.tp_s,
            cp_s: busiest.passes.cp_s,
            ep_s: busiest.passes.ep_s,
            pp_s: busiest.passes.pp_s,
            dp_s: busiest.passes.dp_s + busiest.dp_s,
            host_s: busiest.passes.host_s,
            bubble_s: pipeline_s - busiest.total_s(),
            recompute_s: busiest.recompute_s,
            optimizer_s: busiest.optimizer_s,
            other_s: iteration_s - pipeline_s,
        }
    }
}

/// What one pipeline rank spends its time on.
#[derive(Clone, Copy, Debug, Default)]
struct RankSpend {
    passes: Parts,
    recompute_s: f64,
    dp_s: f64,
    optimizer_s: f64,
}

impl RankSpend {
    fn total_s(&self) -> f64 {
        self.passes.total_s() + self.recompute_s + self.dp_s + self.optimizer_s
    }
}

impl CostCache<'_> {
    /// Adds to the pipeline's time the delay by stragglers ([`straggler`]) and the fixed work of a
    /// step.
    pub fn with_overheads_s(&self, pipeline_s: f64) -> f64 {
        pipeline_s * straggler(self.cluster, self.gpus) + self.cluster.software.step_overhead_s
    }

    /// Inverse of [`Self::with_overheads_s`].
    pub fn pipeline_s(&self, iteration_s: f64) -> f64 {
        (iteration_s - self.cluster.software.step_overhead_s) / straggler(self.cluster, self.gpus)
    }
}

/// Slowdown by stragglers: grows by a constant for every doubling of the nodes.
pub fn straggler(cluster: &ClusterSpec, gpus: u64) -> f64 {
    let nodes = gpus as f64 / cluster.node_gpus() as f64;
    1.0 + cluster.software.slowdown_per_doubling * nodes.max(1.0).log2()
}
