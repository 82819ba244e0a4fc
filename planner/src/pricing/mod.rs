//! One fully pinned configuration: its placement problem, and the price of any placement.
//!
//! This is the cost model's single door: `estimate`, the search, the brute-force oracle and the
//! checker of predictions all price a configuration here.

pub mod cost_cache;
pub mod layers;
pub mod listed_cuts;
pub mod pipelines;
pub mod priced;
pub mod recompute_ladder;
pub mod recompute_split;
pub(crate) mod stage_transfers;

use crate::cost::collective::{self, Collective};
use crate::cost::parts::Parts;
use crate::cost::state::{LocalParams, StateCost};
use crate::partition::{Column, Pipeline, Problem, VocabWay};
use crate::simulate::Durations;
use cost_cache::{CostCache, LayerCosts};
use listed_cuts::{CutList, Ranges};
use models::decisions::{Decisions, Recompute, Vocab};
use models::mesh::{Axis, GroupShape, Mesh};
use models::schedule::{Schedule, ScheduleError, ScheduleName};
use priced::Placed;
use recompute_split::{self as recompute_choices, RecomputeCost, RecomputeSplit};
use stage_transfers::{P2pTransfer, VocabPassCost, copies_s, gap_s, p2p_transfer, vocab_passes};
use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::Arc;

/// A configuration with everything but the placement of layers.
#[derive(Debug)]
pub struct Configuration<'a> {
    /// What it shares with other cases.
    pub cache: &'a CostCache<'a>,
    /// The decisions.
    pub decisions: Decisions,
    pipeline: OnceCell<Arc<Pipeline>>,
    pub(crate) layer_costs: Rc<LayerCosts>,
    pub(crate) state: StateCost<'a>,
    pub(crate) p2p_transfer: P2pTransfer,
    passes: Option<VocabPassCost>,
}

/// What one stage costs before it is decided what it recomputes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageCost {
    /// Forward pass of one micro-batch.
    pub forward: Parts,
    /// Backward pass of one micro-batch without recomputation.
    pub backward: Parts,
    /// What of it are weight gradients that run in a pass of their own, s; 0 where none do.
    pub weight_s: f64,
    /// Parameters on one rank.
    pub params: LocalParams,
    /// Activation bytes in flight beside the layers'.
    pub extra_in_flight_bytes: f64,
    /// Logits and their gradient, and other bytes of this stage that do not depend on micro-batches
    /// in flight.
    pub workspace_bytes: f64,
    /// Exposed reductions between the last pass and the barrier, s.
    pub tail_s: f64,
    /// Optimizer update behind the barrier, s.
    pub optimizer_s: f64,
    /// Exposed gathers behind the barrier, s.
    pub gather_s: f64,
}

impl StageCost {
    /// Seconds of one micro-batch, forward and backward.
    pub fn load_s(&self) -> f64 {
        self.forward.total_s() + self.backward.total_s()
    }
}

impl<'a> Configuration<'a> {
    /// Prices everything that does not depend on the placement.
    ///
    /// # Errors
    /// The schedule does not exist for these counts.
    pub fn new(cache: &'a CostCache<'a>, decisions: Decisions) -> Result<Self, ScheduleError> {
        cache.check_pipeline(&decisions)?;
        let layer_costs = cache.layer_costs(&decisions);
        let state = StateCost::new(cache.cluster, cache.model, &decisions, &cache.domains);
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

    /// The same in another order of passes.
    #[must_use]
    pub fn in_order(self, schedule: Schedule) -> Self {
        let pipeline = pipelines::of_schedule(schedule, self.decisions.post_validation);
        Self { pipeline: OnceCell::from(Arc::new(pipeline)), ..self }
    }

    /// The same in another order of passes, in which no device holds the activations of more than `held` micro-batches.
    #[must_use]
    pub fn in_order_within(self, schedule: Schedule, held: u32) -> Self {
        let pipeline = pipelines::of_schedule(schedule, self.decisions.post_validation);
        let in_flight = vec![vec![vec![held]]; pipeline.devices];
        let pipeline = Pipeline { in_flight, ..pipeline };
        Self { pipeline: OnceCell::from(Arc::new(pipeline)), ..self }
    }

    /// Order of passes, made when first asked for: many cases are cut without it.
    pub fn pipeline(&self) -> &Arc<Pipeline> {
        self.pipeline.get_or_init(|| self.cache.pipeline(&self.decisions))
    }

    /// Device of a stage; of two copies, the first direction's.
    pub fn device_of(&self, stage: usize) -> usize {
        self.decisions.layout().device_of(self.devices(), stage)
    }

    /// Devices that hold a stage.
    pub fn holders_of(&self, stage: usize) -> impl Iterator<Item = usize> + use<> {
        let (layout, devices) = (self.decisions.layout(), self.devices());
        (0..layout.copies()).map(move |copy| layout.holder(devices, stage, copy as u16).0)
    }

    /// Stages of a device, by chunk.
    pub fn stages_of(&self, device: usize) -> impl Iterator<Item = usize> + use<> {
        let (devices, chunks) = (self.devices(), self.decisions.vpp as usize);
        let layout = self.decisions.layout();
        (0..chunks).map(move |chunk| layout.stage_of(devices, device, chunk))
    }

    /// Pipeline devices, p.
    pub fn devices(&self) -> usize {
        self.decisions.pp as usize
    }

    /// Micro-batches, m.
    pub fn micro_batches(&self) -> f64 {
        self.decisions.micro_batches as f64
    }

    /// Pipeline stages: p·v, or half as many where every stage is there twice.
    pub fn stages(&self) -> usize {
        self.decisions.stages()
    }

    /// Bytes a device has for what the placement decides.
    pub fn budget_bytes(&self) -> f64 {
        self.cache.cluster.usable_bytes() - self.common_workspace_bytes()
    }

    /// Workspace every device needs: temporaries of a backward pass, a received micro-batch each way,
    /// the vocabulary shard's logits and input, and the units that ZeRO gathers or reduces at a time.
    pub fn common_workspace_bytes(&self) -> f64 {
        let received =
            if self.decisions.pp > 1 { 2.0 * self.layer_costs.resident_bytes } else { 0.0 };
        let vocab = self.passes.as_ref().map_or(0.0, |passes| passes.workspace_bytes);
        self.layer_costs.transient_bytes + received + vocab + self.in_motion_bytes()
    }

    /// Units that ZeRO gathers or reduces at a time: a layer, with the next one's weights on the way;
    /// for breadth-first loops, which keep a chunk gathered for all its micro-batches, a chunk.
    fn in_motion_bytes(&self) -> f64 {
        let d = &self.decisions;
        let layer = self.layer_costs.params.iter().map(|p| p.dense + p.expert).fold(0.0, f64::max);
        let chunk = self.cache.layers.len().div_ceil(self.stages()) as f64;
        let unit = layer * if d.schedule == ScheduleName::LoopedBfs { chunk } else { 1.0 };
        unit * self.state.motion_bytes_a_parameter(d.dtype)
    }

    /// Cost of a stage that holds layers `start..end`.
    pub fn stage(&self, stage: usize, start: usize, end: usize) -> StageCost {
        let layers = self.stage_of_layers(start, end);
        let mut cost = self.stage_ends(stage);
        cost.tail_s += self.tied_exposed_s(stage, layers.weight_s);
        cost.forward += layers.forward;
        cost.backward += layers.backward;
        cost.weight_s += layers.weight_s;
        cost.params = cost.params + layers.params;
        let (forward_s, backward_s) = (cost.forward.total_s(), cost.backward.total_s());
        cost.tail_s += self.reduced_s(stage, cost.params, backward_s);
        cost.optimizer_s = self.state.optimizer_s(cost.params);
        cost.gather_s = self.state.gather_exposed_s(cost.params, forward_s);
        cost
    }

    /// Reductions of a stage's gradients that passes do not hide, s. Where every stage is there twice, its copies
    /// exchange their gradients behind the last pass, and replicas have theirs summed only then.
    fn reduced_s(&self, stage: usize, params: LocalParams, backward_s: f64) -> f64 {
        let d = &self.decisions;
        if d.layout().copies() == 1 {
            return self.state.reduce_exposed_s(params, backward_s);
        }
        let bytes = self.state.copied_bytes(params);
        copies_s(self.cache, d, stage, bytes) + self.state.reduce_exposed_s(params, 0.0)
    }

    /// Passes and parameters of layers alone.
    fn stage_of_layers(&self, start: usize, end: usize) -> StageCost {
        let counts = self.cache.layers.counts(start, end);
        let mut cost = StageCost::default();
        let software = &self.cache.cluster.software;
        let slowdown = match (&self.passes, self.decisions.vocab) {
            (None, _) => 1.0,
            (_, Vocab::Interlaced) => software.interlaced_slowdown,
            _ => software.vocab_slowdown,
        };
        let beside_passes = |parts: Parts| parts.slowed(slowdown);
        for (kind, &count) in counts.iter().enumerate() {
            let layer = &self.layer_costs.layer[kind];
            let params = self.layer_costs.params[kind];
            let (forward, backward) =
                (beside_passes(layer.forward), beside_passes(layer.backward()));
            cost.forward += self.with_gather(forward, params, 1.0, 0.0) * count as f64;
            cost.backward += self.with_gather(backward, params, 1.0, 1.0) * count as f64;
            cost.params = cost.params + params * count as f64;
            if self.decisions.schedule.splits_backward() {
                cost.weight_s += beside_passes(layer.backward_weight).total_s() * count as f64;
            }
        }
        cost
    }

    /// Adds what ZeRO stages 2 and 3 communicate for a layer in every micro-batch and the pass does
    /// not hide. Breadth-first loops run a chunk's micro-batches one after another and so gather and
    /// reduce once for all of them.
    fn with_gather(
        &self,
        mut pass: Parts,
        params: LocalParams,
        gathers: f64,
        reductions: f64,
    ) -> Parts {
        let d = &self.decisions;
        let gather_s = if d.zero_stage >= 3 { gathers * self.state.gather_s(params) } else { 0.0 };
        let reduce_s =
            if d.zero_stage >= 2 { reductions * self.state.reduce_scatter_s(params) } else { 0.0 };
        if gather_s + reduce_s > 0.0 {
            let shared =
                if d.schedule == ScheduleName::LoopedBfs { d.micro_batches as f64 } else { 1.0 };
            pass.dp_s += self.state.pass_exposed_s((gather_s + reduce_s) / shared, pass.total_s());
        }
        pass
    }

    /// What the first and last stage hold beside layers, and what crossing a boundary costs.
    fn stage_ends(&self, stage: usize) -> StageCost {
        let mut cost = StageCost::default();
        self.add_transfers(stage, &mut cost);
        self.add_gaps(&mut cost);
        if self.passes.is_some() {
            self.add_vocab_shard(stage, &mut cost);
        } else {
            self.add_vocab_ends(stage, &mut cost);
        }
        cost
    }

    fn add_transfers(&self, stage: usize, cost: &mut StageCost) {
        if !self.p2p_transfer.blocks {
            return;
        }
        let behind = |stage| Parts { pp_s: self.transfer_behind_s(stage), ..Parts::default() };
        if stage > 0 {
            cost.forward += behind(stage - 1);
        }
        if stage + 1 < self.stages() {
            cost.backward += behind(stage);
        }
    }

    /// What passes start with.
    fn add_gaps(&self, cost: &mut StageCost) {
        let gap_s = gap_s(self.cache, &self.decisions);
        let gap = Parts { pp_s: gap_s, ..Parts::default() };
        cost.forward += gap;
        cost.backward += gap;
        if self.decisions.schedule.splits_backward() {
            cost.backward += gap;
            cost.weight_s += gap_s;
        }
    }

    /// Embedding on the first stage, output layer on the last.
    fn add_vocab_ends(&self, stage: usize, cost: &mut StageCost) {
        let (vocab, tied) = (&self.layer_costs.vocab, self.cache.model.tied_embeddings);
        let (embedding, head) = self.cache.vocab_params(self.decisions.tp);
        let (first, last) = (stage == 0, stage + 1 == self.stages());
        if first {
            cost.forward += vocab.embed_forward;
            cost.backward += vocab.embed_backward;
            cost.params.dense += embedding;
            cost.extra_in_flight_bytes += vocab.embed_saved_bytes;
        }
        if last {
            cost.forward += vocab.head_forward;
            cost.backward += vocab.head_backward_input + vocab.head_backward_weight;
            if self.decisions.schedule.splits_backward() {
                cost.weight_s += vocab.head_backward_weight.total_s();
            }
            cost.params.dense += if tied && first { 0.0 } else { head };
            cost.extra_in_flight_bytes += vocab.head_saved_bytes;
            cost.workspace_bytes += vocab.logits_bytes;
        }
    }

    /// What nothing hides of adding up a tied embedding's gradients, s; `layers_weight_s` are the stage's last weight
    /// gradients, before which come the output layer's.
    fn tied_exposed_s(&self, stage: usize, layers_weight_s: f64) -> f64 {
        let (first, last) = (stage == 0, stage + 1 == self.stages());
        // On a V of stages the first device holds both; of two copies, each end's.
        let apart =
            || !self.holders_of(0).any(|device| device == self.device_of(self.stages() - 1));
        let summed = self.cache.model.tied_embeddings && self.passes.is_none();
        if !summed || first == last || !apart() {
            return 0.0;
        }
        let under = self.cache.cluster.software.tied_under_weights;
        let hidden_s = if under { layers_weight_s } else { 0.0 };
        (self.tied_gradient_s() - hidden_s).max(0.0)
    }

    /// Adding up the two copies' gradients of a tied embedding on first and last stage.
    fn tied_gradient_s(&self) -> f64 {
        let (_, rows) = self.cache.vocab_params(self.decisions.tp);
        let mesh = Mesh::new(&self.decisions);
        let stride = mesh.stride(Axis::Pp) * (self.decisions.pp - 1);
        let pair = GroupShape::strided(2, stride, &self.cache.domains);
        let bytes = rows * self.state.reduced_bytes();
        let (cluster, senders) = (self.cache.cluster, mesh.stride(Axis::Pp));
        collective::time_of_some_s(cluster, Collective::AllReduce, bytes, &pair, senders)
    }

    /// One shard of both vocabulary layers on every device.
    fn add_vocab_shard(&self, stage: usize, cost: &mut StageCost) {
        if stage >= self.devices() {
            return;
        }
        let (embedding, head) = self.cache.vocab_params(self.decisions.tp * self.decisions.pp);
        cost.params.dense += embedding;
        cost.params.dense += if self.cache.model.tied_embeddings { 0.0 } else { head };
    }

    /// Recompute mixes open to a stage over layers `start..end`, fastest first.
    pub fn recompute_choices(&self, start: usize, end: usize) -> Rc<Vec<RecomputeCost>> {
        let counts = self.cache.layers.counts(start, end);
        self.layer_costs.recompute_choices(counts, self.decisions.recompute)
    }

    /// The first of [`Self::recompute_choices`], without the others.
    pub fn least_recompute(&self, start: usize, end: usize) -> RecomputeCost {
        let counts = self.cache.layers.counts(start, end);
        recompute_choices::least_recomputing(
            &self.layer_costs.layer,
            &counts,
            self.decisions.recompute,
        )
    }

    /// Seconds a mix recomputes, by cause.
    pub fn recompute_parts(&self, recompute: &RecomputeSplit) -> Parts {
        let of_kind = |(kind, split): (usize, &[usize; 3])| -> Parts {
            let layer = &self.layer_costs.layer[kind];
            (0..3).map(|option| layer.recompute[option] * split[option] as f64).sum()
        };
        recompute.iter().enumerate().map(of_kind).sum()
    }

    /// While a layer is recomputed its full activations live beside what is kept.
    pub fn recompute_workspace_bytes(&self, recompute: &RecomputeSplit) -> f64 {
        let layers = recompute.iter().zip(&self.layer_costs.layer);
        layers
            .map(|(split, layer)| recompute_choices::buffer_bytes(layer, split))
            .fold(0.0, f64::max)
    }

    /// The column of a stage cost with a mix.
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
            recompute: index,
            forward_s: cost.forward.total_s(),
            backward_s: cost.backward.total_s() - cost.weight_s + recompute.recompute_s,
            weight_s: cost.weight_s,
            tail_s: cost.tail_s,
            step_s: cost.optimizer_s + cost.gather_s,
            in_flight_bytes: recompute.in_flight_bytes + cost.extra_in_flight_bytes,
            state_bytes: self.state.memory(cost.params).device_bytes()
                + cost.workspace_bytes
                + self.recompute_workspace_bytes(&recompute.recompute),
        }
    }

    /// State memory of a stage.
    pub fn state_memory(&self, params: LocalParams) -> crate::cost::state::StateMemory {
        self.state.memory(params)
    }

    /// A problem over given columns.
    pub fn problem_of(&self, columns: Vec<Vec<Column>>) -> Problem {
        let vocab = self.passes.as_ref().map(|p| p.durations.clone()).unwrap_or_default();
        Problem {
            pipeline: Arc::clone(self.pipeline()),
            fixed: Durations {
                link_s: (1..self.stages()).map(|stage| self.link_behind_s(stage - 1)).collect(),
                vocab,
                ..Durations::default()
            },
            vocab: self
                .passes
                .as_ref()
                .map_or_else(VocabWay::default, |p| p.way(self.decisions.vocab)),
            layers: self.cache.layers.len(),
            columns,
            budget_bytes: vec![self.budget_bytes(); self.devices()],
        }
    }

    /// Seconds of all vocabulary passes of one micro-batch on one device.
    pub fn vocab_pass_s(&self) -> f64 {
        self.passes.as_ref().map_or(0.0, |passes| passes.parts.total_s())
    }

    /// The same by cause.
    pub fn vocab_pass_parts(&self) -> Parts {
        self.passes.as_ref().map_or_else(Parts::default, |passes| passes.parts)
    }

    /// Mean latency of a transfer between devices where it is no part of their passes, s.
    pub fn mean_link_s(&self) -> f64 {
        if self.p2p_transfer.blocks { 0.0 } else { self.p2p_transfer.mean_s() }
    }

    /// Latency between a stage and the next beside their passes, s.
    pub(crate) fn link_behind_s(&self, stage: usize) -> f64 {
        if self.p2p_transfer.blocks || stage + 1 >= self.stages() {
            return 0.0;
        }
        self.transfer_behind_s(stage)
    }

    /// A transfer between a stage and the next, s.
    fn transfer_behind_s(&self, stage: usize) -> f64 {
        self.p2p_transfer.behind_s(self.decisions.layout(), self.devices(), stage)
    }

    /// The fastest mix with which a stage fits, were the device's other chunks empty.
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
        if counts.len() > 2 || self.decisions.recompute != Recompute::PerLayer {
            return self
                .recompute_choices(range.0, range.1)
                .iter()
                .find(|recompute| fits(recompute))
                .cloned();
        }
        let n = self.most_in_flight(stage);
        let states = self.state.memory(cost.params).device_bytes() + cost.workspace_bytes;
        let bytes = budget - states - n * cost.extra_in_flight_bytes;
        // Rounding may make the first answer too large by a hair.
        let tries = [0.0, 1e-13, 1e-11, 1e-9];
        let found = tries.iter().filter_map(|less| {
            recompute_choices::fastest_of_two(
                &self.layer_costs.layer,
                &counts,
                n,
                bytes - budget * less,
            )
        });
        found.into_iter().find(|recompute| fits(recompute))
    }

    /// Gives each stage the fastest mix with which it fits, were the device's other chunks empty; where none
    /// does, stages stay as they are.
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

    /// Most host memory that a device's stages need, bytes.
    pub(crate) fn host_bytes(&self, stages: &[StageCost]) -> f64 {
        let mut host = vec![0.0; self.devices()];
        for (stage, cost) in stages.iter().enumerate() {
            for device in self.holders_of(stage) {
                host[device] += self.state_memory(cost.params).host;
            }
        }
        host.into_iter().fold(0.0, f64::max)
    }

    /// The layer ranges that may be tried, where they are listed: a single one for `first_last` and
    /// `redistribute`, the family for several chunks; `None` where the solver places layers freely.
    pub fn listed_ranges(&self) -> Option<Vec<Ranges>> {
        let list = CutList::of(self.decisions.vocab, self.decisions.vpp)?;
        Some(self.cache.listed_ranges(list, self.stages(), self.decisions.vocab))
    }

    /// Whether a rank's share of host memory holds so many bytes.
    pub(crate) fn fits_host(&self, bytes: f64) -> bool {
        bytes <= self.cache.cluster.host.memory_bytes
    }

    /// Whether a column fits, were the device's other chunks empty.
    fn fits_alone(&self, stage: usize, column: &Column, budget: f64) -> bool {
        column.state_bytes + self.most_in_flight(stage) * column.in_flight_bytes <= budget
    }

    /// Most micro-batches of a stage in flight.
    fn most_in_flight(&self, stage: usize) -> f64 {
        self.pipeline().most_in_flight(stage)
    }
}
