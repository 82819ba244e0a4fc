//! One fully pinned configuration: its placement problem, and the price of any placement.
//!
//! This is the cost model's single door: `estimate`, the search, the brute-force oracle and the
//! checker of predictions all price a configuration here.

pub mod family;
pub mod ground;
pub mod layers;
pub mod mixes;
pub mod pipelines;
pub mod priced;
pub mod recompute_bound;

use crate::cost::collective::{self, Collective};
use crate::cost::layer::VocabCost;
use crate::cost::parts::Parts;
use crate::cost::state::{LocalParams, StateCost};
use crate::placement::{Column, Pipeline, Problem};
use crate::simulate::{Durations, VocabDurations};
use ground::{Ground, Sheet};
use mixes::{Mix, MixCost};
use models::decisions::{Decisions, Vocab};
use models::formulas::vocabulary;
use models::mesh::{Axis, GroupShape, Mesh};
use models::schedule::{ScheduleError, ScheduleName, StageLayout};
use std::cell::OnceCell;
use std::ops::{Range, RangeInclusive};
use std::rc::Rc;
use std::sync::Arc;

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

/// Sending a micro-batch's hidden states to the next stage.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Hop {
    time_s: f64,
    /// The receiver waits with nothing else to do; else the time is a latency.
    blocks: bool,
}

/// The vocabulary passes of one device.
#[derive(Clone, Debug)]
struct VocabPassCost {
    cost: VocabCost,
    durations: VocabDurations,
    /// Computation and exposed collectives of all passes of one micro-batch.
    parts: Parts,
}

impl<'a> Case<'a> {
    /// Prices everything that does not depend on the placement.
    ///
    /// # Errors
    /// The schedule does not exist for these counts.
    pub fn new(ground: &'a Ground<'a>, decisions: Decisions) -> Result<Self, ScheduleError> {
        ground.check_pipeline(&decisions)?;
        let sheet = ground.sheet(&decisions);
        let state = StateCost::new(ground.cluster, &decisions, &ground.domains);
        let hop = hop(ground, &decisions, &sheet);
        let passes = vocab_passes(ground, &decisions, &sheet);
        Ok(Self { ground, decisions, pipeline: OnceCell::new(), sheet, state, hop, passes })
    }

    /// Order of passes, made when first asked for: many cases are cut without it.
    pub fn pipeline(&self) -> &Arc<Pipeline> {
        self.pipeline.get_or_init(|| self.ground.pipeline(&self.decisions))
    }

    /// Device of a stage: round-robin, as all schedules here have it.
    pub fn device_of(&self, stage: usize) -> usize {
        StageLayout::RoundRobin.device_of(self.devices(), stage)
    }

    /// Pipeline devices, p.
    pub fn devices(&self) -> usize {
        self.decisions.pp as usize
    }

    /// Micro-batches, m.
    pub fn micro_batches(&self) -> f64 {
        self.decisions.micro_batches as f64
    }

    /// Pipeline stages, p·v.
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
        let received = if self.decisions.pp > 1 { 2.0 * self.sheet.hidden_bytes } else { 0.0 };
        let vocab = self
            .passes
            .as_ref()
            .map_or(0.0, |passes| passes.cost.logits_bytes + 2.0 * passes.cost.head_saved_bytes);
        self.sheet.transient_bytes + received + vocab + self.in_motion_bytes()
    }

    /// Units that ZeRO gathers or reduces at a time: a layer, with the next one's weights on the way;
    /// for breadth-first loops, which keep a chunk gathered for all its micro-batches, a chunk.
    fn in_motion_bytes(&self) -> f64 {
        let d = &self.decisions;
        let layer = self.sheet.params.iter().map(|p| p.dense + p.expert).fold(0.0, f64::max);
        let chunk = self.ground.layers.len().div_ceil(self.stages()) as f64;
        let unit = layer * if d.schedule == ScheduleName::LoopedBfs { chunk } else { 1.0 };
        match d.zero_stage {
            0 | 1 => 0.0,
            2 => unit * 4.0,
            _ => unit * (2.0 * d.dtype.storage_bytes() + 4.0),
        }
    }

    /// Cost of a stage that holds layers `start..end`.
    pub fn stage(&self, stage: usize, start: usize, end: usize) -> StageCost {
        let layers = self.stage_of_layers(start, end);
        let mut cost = self.stage_ends(stage);
        cost.forward += layers.forward;
        cost.backward += layers.backward;
        cost.params = cost.params + layers.params;
        let (forward_s, backward_s) = (cost.forward.total_s(), cost.backward.total_s());
        cost.tail_s += self.state.reduce_exposed_s(cost.params, backward_s);
        cost.optimizer_s = self.state.optimizer_s(cost.params);
        cost.gather_s = self.state.gather_exposed_s(cost.params, forward_s);
        cost
    }

    /// Passes and parameters of layers alone.
    fn stage_of_layers(&self, start: usize, end: usize) -> StageCost {
        let counts = self.ground.layers.counts(start, end);
        let mut cost = StageCost::default();
        for (kind, &count) in counts.iter().enumerate() {
            let layer = &self.sheet.layer[kind];
            let params = self.sheet.params[kind];
            cost.forward += self.with_gather(layer.forward, params, 1.0, 0.0) * count as f64;
            cost.backward += self.with_gather(layer.backward(), params, 1.0, 1.0) * count as f64;
            cost.params = cost.params + params * count as f64;
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
        let crossing = Parts { pp_s: self.hop.time_s, ..Parts::default() };
        let device = |stage: usize| self.device_of(stage);
        if stage > 0 && device(stage - 1) != device(stage) {
            cost.forward += crossing;
        }
        if stage + 1 < self.stages() && device(stage + 1) != device(stage) {
            cost.backward += crossing;
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
            cost.params.dense += if tied && first { 0.0 } else { head };
            cost.extra_in_flight_bytes += vocab.head_saved_bytes;
            cost.workspace_bytes += vocab.logits_bytes;
        }
        if tied && first != last {
            cost.tail_s += self.tied_gradient_s(head);
        }
    }

    /// Adding up the two copies' gradients of a tied embedding on first and last stage.
    fn tied_gradient_s(&self, rows: f64) -> f64 {
        let mesh = Mesh::new(&self.decisions);
        let stride = mesh.stride(Axis::Pp) * (self.decisions.pp - 1);
        let pair = GroupShape::strided(2, stride, &self.ground.domains);
        collective::time_s(self.ground.cluster, Collective::AllReduce, rows * 4.0, &pair)
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
        layers
            .map(|(split, layer)| {
                let used = |option: usize| split[option] > 0;
                let rebuilt = |option: usize| layer.saved_bytes[0] - layer.saved_bytes[option];
                if used(2) {
                    rebuilt(2)
                } else if used(1) {
                    rebuilt(1)
                } else {
                    0.0
                }
            })
            .fold(0.0, f64::max)
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
            backward_s: cost.backward.total_s() + mix.recompute_s,
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

    /// Layer redistribution by the compute ratio of output layer and layer (Vocabulary Parallelism,
    /// section 3; its appendix's FLOP counts).
    pub(crate) fn redis_counts(&self, layers: usize, stages: usize) -> Vec<usize> {
        let model = self.ground.model;
        let ratio = vocabulary::output_compute_ratio(
            model.vocab as f64,
            model.hidden as f64,
            model.seq_len as f64,
        );
        let input = vocabulary::input_compute_ratio(model.hidden as f64, model.seq_len as f64);
        let (_, counts) = vocabulary::redis(layers as u64, stages as u64, input, ratio);
        counts.into_iter().map(|count| count as usize).collect()
    }

    /// Fewest layers a stage may hold: none where it holds a vocabulary layer instead.
    fn fewest_layers(&self, stage: usize) -> usize {
        let vocab_end = self.passes.is_none() && (stage == 0 || stage + 1 == self.stages());
        usize::from(!(vocab_end && self.stages() > 1))
    }

    /// The placement problem of one chunk a device, with every column whose stage alone takes less than
    /// `cutoff_s`.
    ///
    /// Only the fastest mix that fits is kept of a range: the iteration never
    /// shortens when a stage's backward pass lengthens, and memory is that stage's own affair.
    pub fn problem(&self, cutoff_s: f64, ignore_memory: bool) -> Problem {
        let budget = if ignore_memory { f64::INFINITY } else { self.budget_bytes() };
        let free = |stage| self.free_columns(stage, cutoff_s, budget);
        self.problem_of((0..self.stages()).map(free).collect())
    }

    /// A problem over given columns.
    pub fn problem_of(&self, columns: Vec<Vec<Column>>) -> Problem {
        let link_s = if self.hop.blocks { 0.0 } else { self.hop.time_s };
        let vocab = self.passes.as_ref().map(|p| p.durations.clone()).unwrap_or_default();
        Problem {
            pipeline: Arc::clone(self.pipeline()),
            fixed: Durations {
                link_s: vec![link_s; self.stages() - 1],
                vocab,
                ..Durations::default()
            },
            vocab_s: self.vocab_pass_s(),
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

    /// Ranges open to a stage where the solver places layers, as first layers with possible ends. Where
    /// all layers are alike only the count matters, and ranges start at 0.
    fn free_ranges(&self, stage: usize) -> Vec<(usize, RangeInclusive<usize>)> {
        let layers = self.ground.layers.len();
        let fewest =
            |stages: Range<usize>| -> usize { stages.map(|s| self.fewest_layers(s)).sum() };
        let (before, after) = (fewest(0..stage), fewest(stage + 1..self.stages()));
        let own = self.fewest_layers(stage);
        if self.ground.layers.is_uniform() {
            return vec![(0, own..=layers.saturating_sub(before + after))];
        }
        let last_end = layers.saturating_sub(after);
        let starts = if stage == 0 { 0..=0 } else { before..=last_end };
        starts.map(|start| (start, start + own..=last_end)).collect()
    }

    fn free_columns(&self, stage: usize, cutoff_s: f64, budget: f64) -> Vec<Column> {
        let mut columns = vec![];
        for (start, ends) in self.free_ranges(stage) {
            for end in ends {
                let more = self.columns_of(stage, (start, end), cutoff_s, budget);
                if more.is_empty() && end > start {
                    break;
                }
                columns.extend(more);
            }
        }
        columns
    }

    /// Columns of one range. Cost and memory grow with layers, so once a range has none, longer ones
    /// have none either.
    fn columns_of(
        &self,
        stage: usize,
        counted: (usize, usize),
        cutoff_s: f64,
        budget: f64,
    ) -> Vec<Column> {
        let cost = self.stage(stage, counted.0, counted.1);
        let m = self.micro_batches();
        let device_s = |load_s: f64| m * (load_s + self.vocab_pass_s());
        if device_s(cost.forward.total_s() + cost.backward.total_s()) >= cutoff_s
            || (budget.is_finite() && !self.fits_host(self.state.memory(cost.params).host))
        {
            return vec![];
        }
        let range =
            if self.ground.layers.is_uniform() { (0, counted.1 - counted.0) } else { counted };
        let first = self.column(range, 0, &cost, &self.first_mix(counted.0, counted.1));
        if self.fits_alone(stage, &first, budget) {
            return vec![first];
        }
        let mixes = self.mixes(counted.0, counted.1);
        let columns =
            mixes.iter().enumerate().map(|(index, mix)| self.column(range, index, &cost, mix));
        columns
            .take_while(|column| device_s(column.load_s()) < cutoff_s)
            .find(|column| self.fits_alone(stage, column, budget))
            .into_iter()
            .collect()
    }

    /// The placement problem with nothing behind the passes, no gathers in them, and memory for this
    /// case's states but none for buffers in motion. With the states that take least memory, this is what
    /// every choice of ZeRO stage, shards and offloading has at least to do on this pipeline.
    pub fn relaxed_problem(&self, cutoff_s: f64, ignore_memory: bool) -> Problem {
        let budget = if ignore_memory { f64::INFINITY } else { self.relaxed_budget_bytes() };
        let columns =
            (0..self.stages()).map(|stage| self.relaxed_columns(stage, cutoff_s, budget)).collect();
        let mut problem = self.problem_of(columns);
        problem.budget_bytes.fill(budget);
        problem
    }

    /// Bytes a device has, buffers of ZeRO's gathers and reductions not counted.
    pub(crate) fn relaxed_budget_bytes(&self) -> f64 {
        self.budget_bytes() + self.in_motion_bytes()
    }

    fn relaxed_columns(&self, stage: usize, cutoff_s: f64, budget: f64) -> Vec<Column> {
        let m = self.micro_batches();
        let limit_s = cutoff_s / m - self.vocab_pass_s();
        let mut columns = vec![];
        for (start, ends) in self.free_ranges(stage) {
            for end in ends {
                let fits = |column: &Column| self.fits_alone(stage, column, budget);
                let found = self.relaxed_range(stage, start, end, limit_s, fits);
                if found.is_none() && end > start {
                    break;
                }
                columns.extend(found);
            }
        }
        columns
    }

    /// The fastest column of a range that fits and takes less than `limit_s`, with nothing but layers and
    /// vocabulary in its passes.
    fn relaxed_range(
        &self,
        stage: usize,
        start: usize,
        end: usize,
        limit_s: f64,
        fits: impl Fn(&Column) -> bool,
    ) -> Option<Column> {
        let cost = self.relaxed_stage(stage, start, end);
        if cost.forward.total_s() + cost.backward.total_s() >= limit_s {
            return None;
        }
        let range = if self.ground.layers.is_uniform() { (0, end - start) } else { (start, end) };
        let first = self.column(range, 0, &cost, &self.first_mix(start, end));
        if fits(&first) {
            return Some(first);
        }
        let mixes = self.mixes(start, end);
        let columns = mixes.iter().map(|mix| self.column(range, 0, &cost, mix));
        columns.take_while(|column| column.load_s() < limit_s).find(fits)
    }

    /// Cost of a stage without anything that depends on how parameter state is sharded.
    pub(crate) fn relaxed_stage(&self, stage: usize, start: usize, end: usize) -> StageCost {
        let mut cost = self.stage_ends(stage);
        let counts = self.ground.layers.counts(start, end);
        for (kind, &count) in counts.iter().enumerate() {
            let layer = &self.sheet.layer[kind];
            cost.forward += layer.forward * count as f64;
            cost.backward += layer.backward() * count as f64;
            cost.params = cost.params + self.sheet.params[kind] * count as f64;
        }
        cost.tail_s = 0.0;
        cost
    }

    /// Lower bound on the passes: some device has at least the mean of the devices' work, and every
    /// device does all its micro-batches one after another.
    pub fn mean_bound_s(&self) -> f64 {
        let m = self.micro_batches();
        let all = self.whole_model();
        let total_s = all.forward.total_s() + all.backward.total_s();
        m * (total_s / self.decisions.pp as f64 + self.vocab_pass_s())
    }

    /// Layers and vocabulary of the whole model as one stage's worth of passes, hops left out.
    fn whole_model(&self) -> StageCost {
        let layers = self.ground.layers.len();
        let mut cost = self.stage_of_layers(0, layers);
        let mut ends = StageCost::default();
        if self.passes.is_none() {
            self.add_vocab_ends(0, &mut ends);
            if self.stages() > 1 {
                self.add_vocab_ends(self.stages() - 1, &mut ends);
            }
            cost.params.dense += ends.params.dense;
        } else {
            for device in 0..self.devices() {
                self.add_vocab_shard(device, &mut cost);
            }
        }
        cost.forward += ends.forward;
        cost.backward += ends.backward;
        cost
    }

    /// Lower bounds on tails (to be added to the mean load) and on the step behind the barrier, s: their
    /// means over devices.
    pub fn least_state_s(&self) -> (f64, f64) {
        let mean = self.whole_model().params * (1.0 / self.decisions.pp as f64);
        let ground = self.ground;
        let least = self.state.least_exposed(mean, |op, group| ground.seconds_per_byte(op, group));
        (least.tail_s, least.step_s + self.least_optimizer_s(mean))
    }

    /// Updating parameters takes time in proportion, but no less than a kernel's launch.
    fn least_optimizer_s(&self, mean: LocalParams) -> f64 {
        let dense = LocalParams { expert: 0.0, ..mean };
        let expert = LocalParams { dense: 0.0, ..mean };
        self.state.optimizer_s(dense).max(self.state.optimizer_s(expert))
    }

    /// Some device needs at least the mean of the devices' states, and the activations of one
    /// micro-batch in flight with everything recomputed that may be.
    pub fn least_bytes_per_device(&self) -> f64 {
        let pp = self.decisions.pp as f64;
        let states = self.state.memory(self.whole_model().params).device_bytes();
        let counts = self.ground.layers.counts(0, self.ground.layers.len());
        let activations: f64 = counts
            .iter()
            .zip(&self.sheet.layer)
            .map(|(&count, layer)| {
                count as f64 * mixes::least_bytes(layer, self.decisions.recompute)
            })
            .sum();
        (states + activations) / pp
    }

    /// Whether a rank's share of host memory holds so many bytes.
    pub(crate) fn fits_host(&self, bytes: f64) -> bool {
        bytes <= self.ground.cluster.host.memory_bytes
    }

    /// Whether the column's own bytes suffice to rule it out, were the device's other chunks empty.
    fn fits_alone(&self, stage: usize, column: &Column, budget: f64) -> bool {
        let (device, chunk) = (self.pipeline().device_of[stage], self.pipeline().chunk_of[stage]);
        let most = self.pipeline().in_flight[device].iter().map(|counts| counts[chunk]).max();
        let bytes = column.state_bytes + f64::from(most.unwrap_or(0)) * column.in_flight_bytes;
        bytes <= budget
    }
}

/// Lower bound on exposed reductions, gathers and updates of a state choice, for layers alone, s.
pub fn least_layer_state_s(ground: &Ground<'_>, d: &Decisions) -> f64 {
    let sheet = ground.sheet(d);
    let counts = ground.layers.counts(0, ground.layers.len());
    let all = counts
        .iter()
        .zip(&sheet.params)
        .fold(LocalParams::default(), |sum, (&count, &params)| sum + params * count as f64);
    let mean = all * (1.0 / d.pp as f64);
    let state = StateCost::new(ground.cluster, d, &ground.domains);
    let least = state.least_exposed(mean, |op, group| ground.seconds_per_byte(op, group));
    let dense = state.optimizer_s(LocalParams { expert: 0.0, ..mean });
    let expert = state.optimizer_s(LocalParams { dense: 0.0, ..mean });
    least.passes_s + least.tail_s + least.step_s + dense.max(expert)
}

/// As even as may be; what is left over goes to the latest stages before the last.
pub fn even_counts(layers: usize, stages: usize) -> Vec<usize> {
    let (base, more) = (layers / stages, layers % stages);
    let gets_more = |stage: usize| stage + 1 < stages && stage + 1 + more >= stages;
    (0..stages).map(|stage| base + usize::from(gets_more(stage))).collect()
}

/// Time of one transfer between stages: with tensor parallelism each rank sends its 1/t share over
/// its own link and the receivers gather inside the node (SC'21, section 4.1, scatter/gather).
fn hop(ground: &Ground<'_>, d: &Decisions, sheet: &Sheet) -> Hop {
    if d.pp == 1 {
        return Hop { time_s: 0.0, blocks: true };
    }
    let level = Mesh::new(d).pipeline_level(&ground.domains);
    let mut time_s = collective::p2p_s(ground.cluster, sheet.hidden_bytes / d.tp as f64, level);
    if d.tp > 1 && !d.sequence_parallel {
        let group = GroupShape::strided(d.tp, 1, &ground.domains);
        time_s +=
            collective::time_s(ground.cluster, Collective::AllGather, sheet.hidden_bytes, &group);
    }
    let looped = matches!(d.schedule, ScheduleName::Interleaved1F1B | ScheduleName::LoopedBfs);
    Hop { time_s, blocks: !(looped && ground.cluster.software.p2p_overlap) }
}

/// Passes and barriers of vocabulary layers split over the pipeline (Vocabulary Parallelism,
/// section 4): all-reduces serve as reduces too, as in the paper's implementation.
fn vocab_passes(ground: &Ground<'_>, d: &Decisions, sheet: &Sheet) -> Option<VocabPassCost> {
    if !d.vocab.over_pipeline() {
        return None;
    }
    let cost = ground.vocabulary_over_pipeline(d);
    let stride = Mesh::new(d).stride(Axis::Pp);
    let group = GroupShape::strided(d.pp, stride, &ground.domains);
    let time = |op, bytes| collective::time_s(ground.cluster, op, bytes, &group);
    let broadcast_s = time(Collective::Broadcast, sheet.hidden_bytes);
    let statistics_s = time(Collective::AllReduce, sheet.tokens * 4.0);
    let gradient_s = time(Collective::AllReduce, sheet.hidden_bytes);
    let embed = cost.embed_forward + cost.embed_backward;
    let (forward, input) = (cost.head_forward, cost.head_backward_input);
    let weight = cost.head_backward_weight;
    let blocking = |tp_s: f64| Parts { pp_s: tp_s, ..Parts::default() };
    let (first, middle, last, barriers) = match d.vocab {
        Vocab::ParallelNaive => (
            forward,
            Parts::default(),
            input + weight + embed,
            [broadcast_s, statistics_s, statistics_s, gradient_s],
        ),
        Vocab::Parallel2 => (
            forward + input,
            Parts::default(),
            weight + embed,
            [broadcast_s, 2.0 * statistics_s + gradient_s, 0.0, 0.0],
        ),
        Vocab::Interlaced => (
            forward + blocking(broadcast_s + 2.0 * statistics_s),
            Parts::default(),
            input + weight + embed + blocking(gradient_s),
            [0.0; 4],
        ),
        _ => (
            forward,
            Parts::default(),
            input + weight + embed,
            [broadcast_s, 2.0 * statistics_s, 0.0, gradient_s],
        ),
    };
    let devices = d.pp as usize;
    let durations = VocabDurations {
        first: vec![first.total_s(); devices],
        middle: vec![middle.total_s(); devices],
        last: vec![last.total_s(); devices],
        broadcast_s: barriers[0],
        after_first_s: barriers[1],
        after_middle_s: barriers[2],
        after_last_s: barriers[3],
    };
    Some(VocabPassCost { cost, durations, parts: first + middle + last })
}
