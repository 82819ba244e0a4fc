//! One fully pinned configuration: its partition problem, and the price of any partition.
//!
//! This is the only entry to the cost model: `estimate`, the search, the exhaustive oracle and the
//! checker of predictions all price configurations here.

mod collective_lines;
pub mod cost_cache;
pub mod layers;
pub mod listed_cuts;
pub mod pipelines;
pub mod priced;
pub mod recompute_ladder;
pub mod recompute_split;
mod stage_costs;
pub(crate) mod stage_transfers;
mod vocab_shards;
pub mod vocab_times;

use crate::cost::parts::Parts;
use crate::cost::state::{LocalParams, StateCost};
use crate::partition::{Column, Pipeline, Problem, VocabPath};
use crate::simulate::Durations;
use cost_cache::{CostCache, LayerCosts};
use listed_cuts::{CutList, Ranges};
use models::decisions::{Decisions, RecomputePolicy};
use models::schedule::{Schedule, ScheduleError, ScheduleName};
use priced::Placed;
use recompute_split::{RecomputeCost, RecomputeSplit};
use stage_transfers::{P2pTransfer, VocabPassCost, p2p_transfer, vocab_passes};
use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::Arc;

/// A configuration: every decision but the partition of layers.
#[derive(Debug)]
pub struct Configuration<'a> {
    /// What it shares with other configurations.
    pub cache: &'a CostCache<'a>,
    /// The decisions.
    pub decisions: Decisions,
    pipeline: OnceCell<Arc<Pipeline>>,
    pub(crate) layer_costs: Rc<LayerCosts>,
    pub(crate) state: StateCost<'a>,
    pub(crate) p2p_transfer: P2pTransfer,
    passes: Option<VocabPassCost>,
}

/// Costs of one stage before its recomputation is decided.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageCost {
    /// Forward pass of one micro-batch.
    pub forward: Parts,
    /// Backward pass of one micro-batch without recomputation.
    pub backward: Parts,
    /// Part of the backward pass that is weight gradients in a pass of their own, s; 0 where none
    /// are split off.
    pub weight_s: f64,
    /// Extra seconds of a forward and of a backward pass that run unpaired.
    pub unpaired_s: [f64; 2],
    /// Parameters on one rank.
    pub params: LocalParams,
    /// Activation bytes in flight besides the layers'.
    pub extra_in_flight_bytes: f64,
    /// Activation bytes of one micro-batch in host memory.
    pub host_in_flight_bytes: f64,
    /// Bytes of this stage that do not depend on micro-batches in flight, such as logits and their
    /// gradient.
    pub workspace_bytes: f64,
    /// Exposed reductions between the last pass and the barrier, s.
    pub tail_s: f64,
    /// Optimizer update after the barrier, s.
    pub optimizer_s: f64,
    /// Exposed all-gathers after the barrier, s.
    pub gather_s: f64,
}

impl StageCost {
    /// Seconds of one micro-batch, forward and backward.
    pub fn load_s(&self) -> f64 {
        self.forward.total_s() + self.backward.total_s()
    }
}

impl<'a> Configuration<'a> {
    /// Prices everything that does not depend on the partition.
    ///
    /// # Errors
    /// The schedule does not exist for these counts.
    pub fn new(cache: &'a CostCache<'a>, decisions: Decisions) -> Result<Self, ScheduleError> {
        cache.check_pipeline(&decisions)?;
        let layer_costs = cache.layer_costs(&decisions);
        let state = cache.state_cost(&decisions);
        let p2p_transfer = p2p_transfer(cache, &decisions, &layer_costs);
        let passes = vocab_passes(cache, &decisions, &layer_costs);
        Ok(Self {
            cache,
            decisions,
            pipeline: OnceCell::new(),
            layer_costs,
            state,
            p2p_transfer,
            passes,
        })
    }

    /// The same configuration with another order of passes.
    #[must_use]
    pub fn in_order(self, schedule: Schedule) -> Self {
        let pipeline = pipelines::of_schedule(schedule, self.decisions.post_validation);
        Self { pipeline: OnceCell::from(Arc::new(pipeline)), ..self }
    }

    /// The same configuration with another order of passes, in which no rank holds the activations
    /// of more than `held` micro-batches.
    #[must_use]
    pub fn in_order_within(self, schedule: Schedule, held: u32) -> Self {
        let pipeline = pipelines::of_schedule(schedule, self.decisions.post_validation);
        let in_flight = vec![vec![vec![held]]; pipeline.ranks];
        let pipeline = Pipeline { in_flight, ..pipeline };
        Self { pipeline: OnceCell::from(Arc::new(pipeline)), ..self }
    }

    /// The pipeline, built on first use: many configurations are pruned without it.
    pub fn pipeline(&self) -> &Arc<Pipeline> {
        self.pipeline.get_or_init(|| self.cache.pipeline(&self.decisions))
    }

    /// Pipeline rank of a stage; the first direction's copy where the pipeline is bidirectional.
    pub fn rank_of(&self, stage: usize) -> usize {
        self.decisions.layout().rank_of(self.ranks(), stage)
    }

    /// Pipeline ranks that hold a copy of a stage.
    pub fn holders_of(&self, stage: usize) -> impl Iterator<Item = usize> + use<> {
        let (layout, ranks) = (self.decisions.layout(), self.ranks());
        (0..layout.copies()).map(move |copy| layout.holder(ranks, stage, copy as u16).0)
    }

    /// Stages of a pipeline rank, by chunk.
    pub fn stages_of(&self, rank: usize) -> impl Iterator<Item = usize> + use<> {
        let (ranks, chunks) = (self.ranks(), self.decisions.vpp as usize);
        let layout = self.decisions.layout();
        (0..chunks).map(move |chunk| layout.stage_of(ranks, rank, chunk))
    }

    /// Pipeline ranks, p.
    pub fn ranks(&self) -> usize {
        self.decisions.pp as usize
    }

    /// Micro-batches, m.
    pub fn micro_batches(&self) -> f64 {
        self.decisions.micro_batches as f64
    }

    /// Pipeline stages: p·v, or half as many in a bidirectional pipeline.
    pub fn stages(&self) -> usize {
        self.decisions.stages()
    }

    /// Bytes that a rank has for everything that depends on the partition.
    pub fn budget_bytes(&self) -> f64 {
        self.cache.cluster.usable_bytes() - self.common_workspace_bytes()
    }

    /// Workspace that every rank needs: temporaries of a backward pass, a received micro-batch in
    /// each direction, the vocabulary shard's logits and input, and the units that ZeRO gathers or
    /// reduces at a time.
    pub fn common_workspace_bytes(&self) -> f64 {
        let received =
            if self.decisions.pp > 1 { 2.0 * self.layer_costs.resident_bytes } else { 0.0 };
        let vocab = self.passes.as_ref().map_or(0.0, |passes| passes.workspace_bytes);
        self.layer_costs.transient_bytes + received + vocab + self.in_motion_bytes()
    }

    /// Bytes of the units that ZeRO gathers or reduces at a time. A unit is a layer, plus the
    /// weights of the next one, which arrive meanwhile. For looped breadth-first, which keeps a
    /// chunk gathered for all its micro-batches, it is a chunk.
    fn in_motion_bytes(&self) -> f64 {
        let d = &self.decisions;
        let layer = self.layer_costs.params.iter().map(|p| p.dense + p.expert).fold(0.0, f64::max);
        let chunk = self.cache.layers.len().div_ceil(self.stages()) as f64;
        let unit = layer * if d.schedule == ScheduleName::LoopedBfs { chunk } else { 1.0 };
        unit * self.state.motion_bytes_a_parameter(d.dtype)
    }

    /// Recompute choices of a stage over layers `start..end`, fastest first.
    pub fn recompute_choices(&self, start: usize, end: usize) -> Rc<Vec<RecomputeCost>> {
        let counts = self.cache.layers.counts(start, end);
        self.layer_costs.recompute_choices(counts, self.decisions.recompute)
    }

    /// The first of [`Self::recompute_choices`], computed without the others.
    pub fn least_recompute(&self, start: usize, end: usize) -> RecomputeCost {
        let counts = self.cache.layers.counts(start, end);
        recompute_split::least_recomputing(
            &self.layer_costs.layer,
            &counts,
            self.decisions.recompute,
        )
    }

    /// Seconds that a recompute split recomputes, by cause.
    pub fn recompute_parts(&self, recompute: &RecomputeSplit) -> Parts {
        let of_kind = |(kind, split): (usize, &[usize; 3])| -> Parts {
            let layer = &self.layer_costs.layer[kind];
            (0..3).map(|option| layer.recompute[option] * split[option] as f64).sum()
        };
        recompute.iter().enumerate().map(of_kind).sum()
    }

    /// Bytes of the full activations of one layer while it is recomputed, besides what is kept.
    pub fn recompute_workspace_bytes(&self, recompute: &RecomputeSplit) -> f64 {
        let layers = recompute.iter().zip(&self.layer_costs.layer);
        layers.map(|(split, layer)| recompute_split::buffer_bytes(layer, split)).fold(0.0, f64::max)
    }

    /// The column of a stage cost with a recompute choice.
    pub fn column(
        &self,
        range: (usize, usize),
        index: usize,
        cost: &StageCost,
        recompute: &RecomputeCost,
    ) -> Column {
        Column {
            start: range.0,
            end: range.1,
            kinds: self.cache.layers.between(range.0, range.1),
            recompute: index,
            forward_s: cost.forward.total_s(),
            backward_s: cost.backward.total_s() - cost.weight_s + recompute.recompute_s,
            weight_s: cost.weight_s,
            unpaired_s: cost.unpaired_s,
            tail_s: cost.tail_s,
            step_s: cost.optimizer_s + cost.gather_s,
            in_flight_bytes: recompute.in_flight_bytes + cost.extra_in_flight_bytes,
            state_bytes: self.state.memory(cost.params).device_bytes()
                + cost.workspace_bytes
                + self.recompute_workspace_bytes(&recompute.recompute),
            host_bytes: 0.0,
        }
    }

    /// State memory of a stage.
    pub fn state_memory(&self, params: LocalParams) -> crate::cost::state::StateMemory {
        self.state.memory(params)
    }

    /// The partition problem over given columns.
    pub fn problem_of(&self, columns: Vec<Vec<Column>>) -> Problem {
        let vocab = self.passes.as_ref().map(|p| p.durations.clone()).unwrap_or_default();
        Problem {
            pipeline: Arc::clone(self.pipeline()),
            fixed: Durations {
                link_s: (1..self.stages()).map(|stage| self.link_after_s(stage - 1)).collect(),
                vocab,
                ..Durations::default()
            },
            vocab: self.vocab_path(),
            layers: self.cache.layers.len(),
            kinds: self.cache.layers.between(0, self.cache.layers.len()),
            columns,
            budget_bytes: vec![self.budget_bytes(); self.ranks()],
            host_budget_bytes: f64::INFINITY,
        }
    }

    /// The vocabulary passes that every micro-batch goes through.
    pub fn vocab_path(&self) -> VocabPath {
        self.passes.as_ref().map_or_else(VocabPath::default, |p| p.path(self.decisions.vocab))
    }

    /// Seconds of all vocabulary passes of one micro-batch on one rank.
    pub fn vocab_pass_s(&self) -> f64 {
        self.passes.as_ref().map_or(0.0, |passes| passes.parts.total_s())
    }

    /// The same time by cause.
    pub fn vocab_pass_parts(&self) -> Parts {
        self.passes.as_ref().map_or_else(Parts::default, |passes| passes.parts)
    }

    /// Mean latency of a transfer between ranks, s; 0 where transfers are part of passes.
    pub fn mean_link_s(&self) -> f64 {
        if self.p2p_transfer.blocks { 0.0 } else { self.p2p_transfer.mean_s() }
    }

    /// Latency between a stage and the next that is not part of their passes, s.
    pub(crate) fn link_after_s(&self, stage: usize) -> f64 {
        if self.p2p_transfer.blocks || stage + 1 >= self.stages() {
            return 0.0;
        }
        self.transfer_after_s(stage)
    }

    /// Time of a transfer between a stage and the next, s.
    fn transfer_after_s(&self, stage: usize) -> f64 {
        self.p2p_transfer.behind_s(self.decisions.layout(), self.ranks(), stage)
    }

    /// The fastest recompute choice with which a stage fits if the rank's other chunks are empty.
    pub(crate) fn fastest_recompute(
        &self,
        stage: usize,
        range: (usize, usize),
        cost: &StageCost,
        budget: f64,
    ) -> Option<RecomputeCost> {
        let fits = |recompute: &RecomputeCost| {
            self.fits_alone(stage, &self.column(range, 0, cost, recompute), budget)
        };
        let first = self.least_recompute(range.0, range.1);
        if fits(&first) {
            return Some(first);
        }
        let counts = self.cache.layers.counts(range.0, range.1);
        if counts.len() > 2 || self.decisions.recompute != RecomputePolicy::PerLayer {
            return self
                .recompute_choices(range.0, range.1)
                .iter()
                .find(|recompute| fits(recompute))
                .cloned();
        }
        let n = self.most_in_flight(stage);
        let states = self.state.memory(cost.params).device_bytes() + cost.workspace_bytes;
        let bytes = budget - states - n * cost.extra_in_flight_bytes;
        // Rounding may make the first answer too large by a tiny amount.
        let tries = [0.0, 1e-13, 1e-11, 1e-9];
        let found = tries.iter().filter_map(|less| {
            recompute_split::fastest_of_two(
                &self.layer_costs.layer,
                &counts,
                n,
                bytes - budget * less,
            )
        });
        found.into_iter().find(|recompute| fits(recompute))
    }

    /// Gives each stage the fastest recompute choice with which it fits if the rank's other chunks
    /// are empty. Stages that fit with none stay unchanged.
    pub fn recompute_as_must_be(&self, placed: &mut Placed) {
        let budget = self.budget_bytes();
        for (stage, placed) in placed.iter_mut().enumerate() {
            let cost = self.stage(stage, placed.start, placed.end);
            let range = (placed.start, placed.end);
            if let Some(found) = self.fastest_recompute(stage, range, &cost, budget) {
                placed.recompute = found.recompute;
            }
        }
    }

    /// Largest host memory that the stages of one rank need, bytes: optimizer state, and the
    /// activations of as many micro-batches as are in flight.
    pub(crate) fn host_bytes(&self, stages: &[StageCost]) -> f64 {
        let mut host = vec![0.0; self.ranks()];
        for (stage, cost) in stages.iter().enumerate() {
            for rank in self.holders_of(stage) {
                host[rank] += self.stage_host_bytes(stage, cost);
            }
        }
        host.into_iter().fold(0.0, f64::max)
    }

    /// What one stage needs of host memory.
    pub(crate) fn stage_host_bytes(&self, stage: usize, cost: &StageCost) -> f64 {
        let activations = self.most_in_flight(stage) * cost.host_in_flight_bytes;
        self.state_memory(cost.params).host + activations
    }

    /// The layer ranges to try, where they are listed: a single one for `first_last` and
    /// `redistribute`, several for more than one chunk. `None` where the solver places layers
    /// freely.
    pub fn listed_ranges(&self) -> Option<Vec<Ranges>> {
        let list = CutList::of(self.decisions.vocab, self.decisions.vpp)?;
        Some(self.cache.listed_ranges(list, self.stages(), self.decisions.vocab))
    }

    /// Whether a rank's share of host memory holds this many bytes.
    pub(crate) fn fits_host(&self, bytes: f64) -> bool {
        bytes <= self.cache.cluster.host.memory_bytes
    }

    /// Whether a column fits if the rank's other chunks are empty.
    pub(crate) fn fits_alone(&self, stage: usize, column: &Column, budget: f64) -> bool {
        column.state_bytes + self.most_in_flight(stage) * column.in_flight_bytes <= budget
    }

    /// Most micro-batches of a stage in flight.
    fn most_in_flight(&self, stage: usize) -> f64 {
        self.pipeline().most_in_flight(stage)
    }
}
