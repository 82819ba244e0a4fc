//! One fully pinned configuration: its placement problem, and the price of any placement.
//!
//! This is the cost model's single door: `estimate`, the search, the brute-force oracle and the
//! checker of predictions all price a configuration here.

pub mod family;
pub mod ground;
pub mod layers;
pub mod levels;
pub mod mixes;
mod moved;
pub mod pipelines;
pub mod priced;
pub(crate) mod ways;

use crate::bounds::cuts::{Cuts, Cutter};
use crate::bounds::states::StateView;
use crate::bounds::work::{Line, Work};
use crate::cost::collective::{self, Collective};
use crate::cost::parts::Parts;
use crate::cost::state::{LocalParams, StateCost};
use crate::placement::{Column, Pipeline, Problem, VocabWay};
use crate::simulate::Durations;
use ground::{Ground, Sheet};
use mixes::{Mix, MixCost};
use models::decisions::{Decisions, Recompute, Vocab};
use models::mesh::{Axis, GroupShape, Mesh};
use models::schedule::{Schedule, ScheduleError, ScheduleName};
use priced::Placed;
use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::Arc;
use ways::{Hop, VocabPassCost, copies_s, gap_s, hop, vocab_passes};

/// A configuration with everything but the placement of layers.
#[derive(Debug)]
pub struct Case<'a> {
    /// What it shares with other cases.
    pub ground: &'a Ground<'a>,
    /// The decisions.
    pub decisions: Decisions,
    pipeline: OnceCell<Arc<Pipeline>>,
    sheet: Rc<Sheet>,
    state: StateCost<'a>,
    hop: Hop,
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
    fn load_s(&self) -> f64 {
        self.forward.total_s() + self.backward.total_s()
    }
}

impl<'a> Case<'a> {
    /// Prices everything that does not depend on the placement.
    ///
    /// # Errors
    /// The schedule does not exist for these counts.
    pub fn new(ground: &'a Ground<'a>, decisions: Decisions) -> Result<Self, ScheduleError> {
        ground.check_pipeline(&decisions)?;
        let sheet = ground.sheet(&decisions);
        let state = StateCost::new(ground.cluster, ground.model, &decisions, &ground.domains);
        let hop = hop(ground, &decisions, &sheet);
        let passes = vocab_passes(ground, &decisions, &sheet);
        Ok(Self { ground, decisions, pipeline: OnceCell::new(), sheet, state, hop, passes })
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
        self.pipeline.get_or_init(|| self.ground.pipeline(&self.decisions))
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
        self.ground.cluster.usable_bytes() - self.common_workspace_bytes()
    }

    /// Workspace every device needs: temporaries of a backward pass, a received micro-batch each way,
    /// the vocabulary shard's logits and input, and the units that ZeRO gathers or reduces at a time.
    pub fn common_workspace_bytes(&self) -> f64 {
        let received = if self.decisions.pp > 1 { 2.0 * self.sheet.resident_bytes } else { 0.0 };
        let vocab = self.passes.as_ref().map_or(0.0, |passes| passes.workspace_bytes);
        self.sheet.transient_bytes + received + vocab + self.in_motion_bytes()
    }

    /// Units that ZeRO gathers or reduces at a time: a layer, with the next one's weights on the way;
    /// for breadth-first loops, which keep a chunk gathered for all its micro-batches, a chunk.
    fn in_motion_bytes(&self) -> f64 {
        let d = &self.decisions;
        let layer = self.sheet.params.iter().map(|p| p.dense + p.expert).fold(0.0, f64::max);
        let chunk = self.ground.layers.len().div_ceil(self.stages()) as f64;
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
        copies_s(self.ground, d, stage, bytes) + self.state.reduce_exposed_s(params, 0.0)
    }

    /// Passes and parameters of layers alone.
    fn stage_of_layers(&self, start: usize, end: usize) -> StageCost {
        let counts = self.ground.layers.counts(start, end);
        let mut cost = StageCost::default();
        let software = &self.ground.cluster.software;
        let slowdown = match (&self.passes, self.decisions.vocab) {
            (None, _) => 1.0,
            (_, Vocab::Interlaced) => software.interlaced_slowdown,
            _ => software.vocab_slowdown,
        };
        let beside_passes = |parts: Parts| parts.slowed(slowdown);
        for (kind, &count) in counts.iter().enumerate() {
            let layer = &self.sheet.layer[kind];
            let params = self.sheet.params[kind];
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
        self.add_hops(stage, &mut cost);
        self.add_gaps(&mut cost);
        if self.passes.is_some() {
            self.add_vocab_shard(stage, &mut cost);
        } else {
            self.add_vocab_ends(stage, &mut cost);
        }
        cost
    }

    fn add_hops(&self, stage: usize, cost: &mut StageCost) {
        if !self.hop.blocks {
            return;
        }
        let behind = |stage| Parts { pp_s: self.hop_behind_s(stage), ..Parts::default() };
        if stage > 0 {
            cost.forward += behind(stage - 1);
        }
        if stage + 1 < self.stages() {
            cost.backward += behind(stage);
        }
    }

    /// What passes start with.
    fn add_gaps(&self, cost: &mut StageCost) {
        let gap_s = gap_s(self.ground, &self.decisions);
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
        let (vocab, tied) = (&self.sheet.vocab, self.ground.model.tied_embeddings);
        let (embedding, head) = self.ground.vocab_params(self.decisions.tp);
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
        let summed = self.ground.model.tied_embeddings && self.passes.is_none();
        if !summed || first == last || !apart() {
            return 0.0;
        }
        let under = self.ground.cluster.software.tied_under_weights;
        let hidden_s = if under { layers_weight_s } else { 0.0 };
        (self.tied_gradient_s() - hidden_s).max(0.0)
    }

    /// Adding up the two copies' gradients of a tied embedding on first and last stage.
    fn tied_gradient_s(&self) -> f64 {
        let (_, rows) = self.ground.vocab_params(self.decisions.tp);
        let mesh = Mesh::new(&self.decisions);
        let stride = mesh.stride(Axis::Pp) * (self.decisions.pp - 1);
        let pair = GroupShape::strided(2, stride, &self.ground.domains);
        let bytes = rows * self.state.reduced_bytes();
        let (cluster, senders) = (self.ground.cluster, mesh.stride(Axis::Pp));
        collective::time_of_some_s(cluster, Collective::AllReduce, bytes, &pair, senders)
    }

    /// One shard of both vocabulary layers on every device.
    fn add_vocab_shard(&self, stage: usize, cost: &mut StageCost) {
        if stage >= self.devices() {
            return;
        }
        let (embedding, head) = self.ground.vocab_params(self.decisions.tp * self.decisions.pp);
        cost.params.dense += embedding;
        cost.params.dense += if self.ground.model.tied_embeddings { 0.0 } else { head };
    }

    /// Recompute mixes open to a stage over layers `start..end`, fastest first.
    pub fn mixes(&self, start: usize, end: usize) -> Rc<Vec<MixCost>> {
        let counts = self.ground.layers.counts(start, end);
        self.sheet.mixes(counts, self.decisions.recompute)
    }

    /// The first of [`Self::mixes`], without the others.
    pub fn first_mix(&self, start: usize, end: usize) -> MixCost {
        let counts = self.ground.layers.counts(start, end);
        mixes::least_recomputing(&self.sheet.layer, &counts, self.decisions.recompute)
    }

    /// Seconds a mix recomputes, by cause.
    pub fn recompute_parts(&self, mix: &Mix) -> Parts {
        let of_kind = |(kind, split): (usize, &[usize; 3])| -> Parts {
            let layer = &self.sheet.layer[kind];
            (0..3).map(|option| layer.recompute[option] * split[option] as f64).sum()
        };
        mix.iter().enumerate().map(of_kind).sum()
    }

    /// While a layer is recomputed its full activations live beside what is kept.
    pub fn recompute_workspace_bytes(&self, mix: &Mix) -> f64 {
        let layers = mix.iter().zip(&self.sheet.layer);
        layers.map(|(split, layer)| mixes::buffer_bytes(layer, split)).fold(0.0, f64::max)
    }

    /// The column of a stage cost with a mix.
    pub fn column(
        &self,
        range: (usize, usize),
        index: usize,
        cost: &StageCost,
        mix: &MixCost,
    ) -> Column {
        Column {
            start: range.0,
            end: range.1,
            mix: index,
            forward_s: cost.forward.total_s(),
            backward_s: cost.backward.total_s() - cost.weight_s + mix.recompute_s,
            weight_s: cost.weight_s,
            tail_s: cost.tail_s,
            step_s: cost.optimizer_s + cost.gather_s,
            in_flight_bytes: mix.in_flight_bytes + cost.extra_in_flight_bytes,
            state_bytes: self.state.memory(cost.params).device_bytes()
                + cost.workspace_bytes
                + self.recompute_workspace_bytes(&mix.mix),
        }
    }

    /// State memory of a stage.
    pub fn state_memory(&self, params: LocalParams) -> crate::cost::state::StateMemory {
        self.state.memory(params)
    }

    /// The placement problem of one chunk a device, with every column of which a bound does not say that
    /// it takes `cutoff_s` or more; `None` where no placement is left.
    ///
    /// Only the fastest mix that fits is kept of a range: the iteration never
    /// shortens when a stage's backward pass lengthens, and memory is that stage's own affair.
    pub fn problem(&self, cutoff_s: f64, ignore_memory: bool) -> Option<Problem> {
        let budget = if ignore_memory { f64::INFINITY } else { self.budget_bytes() };
        let cuts = self.cuts(cutoff_s, budget)?;
        let stages = cuts.ranges.iter().enumerate();
        let columns = stages.map(|(stage, ranges)| self.free_columns(stage, ranges, budget));
        let mut problem = self.problem_of(columns.collect());
        problem.budget_bytes.fill(budget);
        problem.columns.iter().all(|columns| !columns.is_empty()).then_some(problem)
    }

    /// Where one chunk a device may be cut with passes below `cutoff_s`.
    fn cuts(&self, cutoff_s: f64, budget_bytes: f64) -> Option<Cuts> {
        let d = &self.decisions;
        let line = Line::new(self.ground, d, &self.sheet);
        let state = StateView::new(self.ground, d, &self.sheet.params);
        let work = state.added_to(&Work::of(self.ground, d, &self.sheet), &line);
        // Another order of summation must not hide what lies just below.
        let cutter = Cutter::new(&line, &work, &state, &self.ground.layers, budget_bytes);
        cutter.in_made_order(self.ground).solve(cutoff_s * (1.0 + 1e-9))
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
            layers: self.ground.layers.len(),
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
    pub(crate) fn mean_link_s(&self) -> f64 {
        if self.hop.blocks { 0.0 } else { self.hop.mean_s() }
    }

    /// Latency between a stage and the next beside their passes, s.
    fn link_behind_s(&self, stage: usize) -> f64 {
        if self.hop.blocks || stage + 1 >= self.stages() {
            return 0.0;
        }
        self.hop_behind_s(stage)
    }

    /// A transfer between a stage and the next, s.
    fn hop_behind_s(&self, stage: usize) -> f64 {
        self.hop.behind_s(self.decisions.layout(), self.devices(), stage)
    }

    /// A column for each range that some mix fits; where layers are alike only their count matters, and
    /// ranges start at 0.
    fn free_columns(&self, stage: usize, ranges: &[(usize, usize)], budget: f64) -> Vec<Column> {
        let mut ranges = ranges.to_vec();
        if self.ground.layers.is_uniform() {
            ranges.iter_mut().for_each(|range| *range = (0, range.1 - range.0));
        }
        ranges.sort_unstable();
        ranges.dedup();
        ranges.into_iter().filter_map(|range| self.free_column(stage, range, budget)).collect()
    }

    fn free_column(&self, stage: usize, range: (usize, usize), budget: f64) -> Option<Column> {
        let cost = self.stage(stage, range.0, range.1);
        if budget.is_finite() && !self.fits_host(self.state.memory(cost.params).host) {
            return None;
        }
        let mix = self.fastest_mix(stage, range, &cost, budget)?;
        Some(self.column(range, 0, &cost, &mix))
    }

    /// The fastest mix with which a stage fits, were the device's other chunks empty.
    pub(crate) fn fastest_mix(
        &self,
        stage: usize,
        range: (usize, usize),
        cost: &StageCost,
        budget: f64,
    ) -> Option<MixCost> {
        let fits =
            |mix: &MixCost| self.fits_alone(stage, &self.column(range, 0, cost, mix), budget);
        let first = self.first_mix(range.0, range.1);
        if fits(&first) {
            return Some(first);
        }
        let counts = self.ground.layers.counts(range.0, range.1);
        if counts.len() > 2 || self.decisions.recompute != Recompute::PerLayer {
            return self.mixes(range.0, range.1).iter().find(|mix| fits(mix)).cloned();
        }
        let n = self.most_in_flight(stage);
        let states = self.state.memory(cost.params).device_bytes() + cost.workspace_bytes;
        let bytes = budget - states - n * cost.extra_in_flight_bytes;
        // Rounding may make the first answer too large by a hair.
        let tries = [0.0, 1e-13, 1e-11, 1e-9];
        let found = tries.iter().filter_map(|less| {
            mixes::fastest_of_two(&self.sheet.layer, &counts, n, bytes - budget * less)
        });
        found.into_iter().find(|mix| fits(mix))
    }

    /// Gives each stage the fastest mix with which it fits, were the device's other chunks empty; where none
    /// does, stages stay as they are.
    pub fn recompute_as_must_be(&self, placed: &mut Placed) {
        let budget = self.budget_bytes();
        for (stage, placed) in placed.iter_mut().enumerate() {
            let cost = self.stage(stage, placed.start, placed.end);
            let range = (placed.start, placed.end);
            if let Some(found) = self.fastest_mix(stage, range, &cost, budget) {
                placed.mix = found.mix;
            }
        }
    }

    /// Whether a rank's share of host memory holds so many bytes.
    pub(crate) fn fits_host(&self, bytes: f64) -> bool {
        bytes <= self.ground.cluster.host.memory_bytes
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

/// As even as may be; what is left over goes to the latest stages before the last.
pub fn even_counts(layers: usize, stages: usize) -> Vec<usize> {
    let (base, more) = (layers / stages, layers % stages);
    let gets_more = |stage: usize| stage + 1 < stages && stage + 1 + more >= stages;
    (0..stages).map(|stage| base + usize::from(gets_more(stage))).collect()
}
