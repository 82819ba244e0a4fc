//! Lower bounds on the cost of parameter state (parameters, gradients, optimizer state), by ZeRO
//! stage, shard group, offloading and rank order.

use super::pipeline_spec::PipelineSpec;
use super::workload::{KindCost, MicroBatchCost};
use crate::cost::state::LocalParams;
use crate::pricing::cost_cache::CostCache;
use crate::pricing::stage_transfers::least_line_of_copies;
use crate::request::pipeline_choices::PipelineChoices;
use models::decisions::{Decisions, Offload, RankOrder};
use models::schedule::ScheduleName;
use std::borrow::Cow;

/// One dense and one expert parameter.
const DENSE: LocalParams = LocalParams { dense: 1.0, expert: 0.0 };
const EXPERT: LocalParams = LocalParams { dense: 0.0, expert: 1.0 };
/// So many parameters that the kernel launch of the update does not matter.
const MANY: f64 = 1e15;

/// Communication once a step, of which passes hide a share at most, and no more than they take.
#[derive(Clone, Copy, Debug, PartialEq)]
struct StepTime {
    /// By parameter (dense, expert), s.
    each_s: [f64; 2],
    /// Of each stage, whatever its parameters, s.
    start_s: f64,
    /// The share that may be hidden.
    overlap: f64,
}

impl StepTime {
    const NONE: Self = Self { each_s: [0.0; 2], start_s: 0.0, overlap: 0.0 };

    /// Whether or not it is hidden, s.
    fn all_s(&self, params: LocalParams, stages: usize) -> f64 {
        let each_s = params.dense * self.each_s[0] + params.expert * self.each_s[1];
        each_s + self.start_s * stages as f64
    }

    /// What passes of `hidden_in_s` leave of it, s.
    fn exposed_s(&self, params: LocalParams, stages: usize, hidden_in_s: f64) -> f64 {
        let all_s = self.all_s(params, stages);
        (all_s * (1.0 - self.overlap)).max(all_s - hidden_in_s)
    }

    fn least(&mut self, other: &Self) {
        let Self { each_s, start_s, overlap } = self;
        each_s.iter_mut().zip(other.each_s).for_each(|(own, other)| *own = own.min(other));
        *start_s = start_s.min(other.start_s);
        *overlap = overlap.max(other.overlap);
    }

    /// Whether it is no longer than another for any parameters.
    fn undercuts(&self, other: &Self) -> bool {
        let each = self.each_s.iter().zip(other.each_s).all(|(own, other)| *own <= other);
        each && self.start_s <= other.start_s && self.overlap >= other.overlap
    }
}

/// One choice of parameter state as rates per parameter (dense, expert), each a lower bound at any
/// size.
#[derive(Clone, Debug, PartialEq)]
pub struct StateView {
    /// The chosen rank order.
    pub rank_order: RankOrder,
    /// The chosen ZeRO stage.
    pub zero_stage: u8,
    /// The chosen size of the shard group.
    pub dp_shard: u64,
    /// The chosen offloading.
    pub offload: Offload,
    /// Bytes on the device.
    pub bytes: [f64; 2],
    /// Reductions between the last pass and the barrier.
    reductions: StepTime,
    /// Gathers after the barrier.
    gathers: StepTime,
    /// Updates after the barrier, s.
    update_s: [f64; 2],
    /// By layer kind, gathers of a layer's weights before each pass, s.
    gather_s: Vec<f64>,
    /// By layer kind, reductions of a layer's gradients in a backward pass, s.
    scatter_s: Vec<f64>,
    /// Of the embedding and of the output layer on one stage each, gathers before a pass and
    /// reductions in a backward pass, s.
    ends_s: [[f64; 2]; 2],
    /// The exchange of gradients between the two copies of a stage, where there are two.
    copied: StepTime,
    /// Buffers for gathered weights and reduced gradients, bytes.
    motion_bytes: f64,
    overlap: f64,
}

impl StateView {
    /// The parameter state that `d` chooses on its mesh.
    pub fn new(cache: &CostCache<'_>, d: &Decisions, kinds: &[LocalParams]) -> Self {
        let state = cache.state_cost(d);
        let rates = |value: &dyn Fn(LocalParams) -> f64| [value(DENSE), value(EXPERT)];
        let least = |params| {
            let time = |op, bytes, group: &_| bytes * cache.collective_line(op, group).1;
            state.least_communication(params, time)
        };
        let start = |op, _, group: &_| cache.collective_line(op, group).0;
        let starts = state.least_communication(DENSE, start);
        let rate = [DENSE, EXPERT].map(least);
        let [of_reductions, of_gathers] = state.step_overlaps();
        let update_s = |params: LocalParams| state.optimizer_s(params * MANY) / MANY;
        let software = &cache.cluster.software;
        let by_kind = |from_stage: u8, time: &dyn Fn(LocalParams) -> f64| {
            let mut all: Vec<f64> = Vec::with_capacity(kinds.len());
            for (index, &kind) in kinds.iter().enumerate() {
                // Kinds that differ in attention alone have the same parameters.
                let alike = kinds[..index].iter().position(|other| *other == kind);
                all.push(match alike {
                    _ if d.zero_stage < from_stage => 0.0,
                    Some(other) => all[other],
                    None => time(kind) * software.zero3_slowdown,
                });
            }
            all
        };
        let layer = kinds.iter().map(|p| p.dense + p.expert).fold(0.0, f64::max);
        let end_s = |dense: f64| {
            let params = LocalParams { dense, expert: 0.0 };
            let gather_s = if d.zero_stage >= 3 { state.gather_s(params) } else { 0.0 };
            let scatter_s = if d.zero_stage >= 2 { state.reduce_scatter_s(params) } else { 0.0 };
            [gather_s, scatter_s].map(|time_s| time_s * software.zero3_slowdown)
        };
        let (embedding, head) = cache.vocab_params(d.tp);
        let (copied_start_s, copied_byte_s) = least_line_of_copies(cache, d);
        Self {
            rank_order: d.rank_order,
            zero_stage: d.zero_stage,
            dp_shard: d.dp_shard,
            offload: d.offload,
            bytes: rates(&|one| state.memory(one).device_bytes()),
            reductions: StepTime {
                each_s: rate.map(|one| one.tail_s),
                start_s: starts.tail_s,
                overlap: of_reductions,
            },
            gathers: StepTime {
                each_s: rate.map(|one| one.step_s),
                start_s: starts.step_s,
                overlap: of_gathers,
            },
            update_s: rates(&update_s),
            gather_s: by_kind(3, &|params| state.gather_s(params)),
            scatter_s: by_kind(2, &|params| state.reduce_scatter_s(params)),
            ends_s: [end_s(embedding), end_s(head)],
            copied: StepTime {
                each_s: rates(&|one| state.copied_bytes(one) * copied_byte_s),
                start_s: copied_start_s,
                overlap: 0.0,
            },
            motion_bytes: layer * state.motion_bytes_a_parameter(d.dtype),
            overlap: software.zero3_overlap,
        }
    }

    /// The same choice with other offloading, which changes bytes and updates alone.
    fn offloading(&self, cache: &CostCache<'_>, d: &Decisions) -> Self {
        let state = cache.state_cost(d);
        let rates = |value: &dyn Fn(LocalParams) -> f64| [value(DENSE), value(EXPERT)];
        Self {
            offload: d.offload,
            bytes: rates(&|one| state.memory(one).device_bytes()),
            update_s: rates(&|one| state.optimizer_s(one * MANY) / MANY),
            ..self.clone()
        }
    }

    /// The componentwise minimum of two choices, under the name of the first.
    fn least(mut self, other: &Self) -> Self {
        let least = |own: &mut [f64], other: &[f64]| {
            own.iter_mut().zip(other).for_each(|(own, other)| *own = own.min(*other));
        };
        least(&mut self.bytes, &other.bytes);
        self.reductions.least(&other.reductions);
        self.gathers.least(&other.gathers);
        least(&mut self.update_s, &other.update_s);
        least(&mut self.gather_s, &other.gather_s);
        least(&mut self.scatter_s, &other.scatter_s);
        self.ends_s.iter_mut().zip(&other.ends_s).for_each(|(own, other)| least(own, other));
        self.copied.least(&other.copied);
        self.motion_bytes = self.motion_bytes.min(other.motion_bytes);
        self
    }

    /// `d` with these choices.
    pub fn of(&self, d: &Decisions) -> Decisions {
        Decisions {
            rank_order: self.rank_order,
            zero_stage: self.zero_stage,
            dp_shard: self.dp_shard,
            offload: self.offload,
            ..d.clone()
        }
    }

    /// Bytes of the state of parameters.
    pub fn bytes_of(&self, params: LocalParams) -> f64 {
        params.dense * self.bytes[0] + params.expert * self.bytes[1]
    }

    /// Lower bound on the exposed reductions after the last pass, s, for `params` parameters in
    /// `stages` stages of one rank, whose backward passes of one micro-batch take `hidden_in_s` at
    /// most (infinite where that is not known). Where the bound is added to all passes of the same
    /// rank, `hidden_in_s` may be a part of their backward: what is left out then counts at least
    /// as often in the passes as it could hide.
    pub fn tail_of_s(&self, params: LocalParams, stages: usize, hidden_in_s: f64) -> f64 {
        self.reductions.exposed_s(params, stages, hidden_in_s)
    }

    /// Lower bound on what follows the last pass of a rank whose stages have two copies, s: these
    /// exchange gradients first, and so nothing hides the reductions.
    pub fn tail_of_copies_s(&self, params: LocalParams, stages: usize) -> f64 {
        self.copied.all_s(params, stages) + self.tail_of_s(params, stages, 0.0)
    }

    /// The reductions after the last pass, hidden or not, s; and the share that is never hidden.
    pub fn reductions_s(&self, params: LocalParams, stages: usize) -> (f64, f64) {
        (self.reductions.all_s(params, stages), 1.0 - self.reductions.overlap)
    }

    /// Lower bound on the work after the barrier, s, for `params` parameters in `stages` stages of
    /// one rank, whose forward passes of one micro-batch take `hidden_in_s` at most.
    pub fn step_of_s(&self, params: LocalParams, stages: usize, hidden_in_s: f64) -> f64 {
        let update_s = params.dense * self.update_s[0] + params.expert * self.update_s[1];
        update_s + self.gathers.exposed_s(params, stages, hidden_in_s)
    }

    /// Gathers after the barrier, hidden or not, s, without what each stage adds.
    pub fn gathers_s(&self, params: LocalParams) -> f64 {
        self.gathers.all_s(params, 0)
    }

    /// Buffers of gathers and reductions, bytes. Breadth-first loops keep those of a whole chunk.
    pub fn motion_bytes(&self, spec: &PipelineSpec, layers: usize) -> f64 {
        let stages = spec.ranks * spec.chunks;
        match spec.schedule {
            ScheduleName::LoopedBfs => self.motion_bytes * layers.div_ceil(stages) as f64,
            _ => self.motion_bytes,
        }
    }

    /// Whether forward and backward passes communicate for the parameter state.
    pub fn in_passes(&self) -> bool {
        self.zero_stage >= 2
    }

    /// Gathers and reductions that the forward and the backward of a layer do not hide, s.
    pub fn exposed_s(&self, index: usize, kind: &KindCost, spec: &PipelineSpec) -> (f64, f64) {
        let (gather_s, scatter_s) = (self.gather_s[index], self.scatter_s[index]);
        let forward_s = self.unhidden_s(spec, gather_s, kind.forward_s);
        (forward_s, self.unhidden_s(spec, gather_s + scatter_s, kind.backward_s))
    }

    /// What a pass of `compute_s` does not hide of the communication of one unit, s. Breadth-first
    /// loops gather and reduce once for all micro-batches.
    fn unhidden_s(&self, spec: &PipelineSpec, comm_s: f64, compute_s: f64) -> f64 {
        let shared = if spec.schedule == ScheduleName::LoopedBfs { spec.m() } else { 1.0 };
        let comm_s = comm_s / shared;
        comm_s - (comm_s * self.overlap).min(compute_s)
    }

    /// Adds what the tables of the embedding and of the output layer add to passes, where one stage
    /// holds each. The backward of the embedding reads no weights; a table that both share is
    /// reduced once.
    fn add_to_ends(&self, work: &mut MicroBatchCost, spec: &PipelineSpec) {
        let shared = work.tied && spec.ends_meet();
        let [[gather_s, scatter_s], [of_head_s, scatter_of_head_s]] = self.ends_s;
        let back_s = [scatter_s, of_head_s + if shared { 0.0 } else { scatter_of_head_s }];
        let ends = [(&mut work.embedding, gather_s), (&mut work.head, of_head_s)];
        for ((end, gather_s), back_s) in ends.into_iter().zip(back_s) {
            end.forward_s += self.unhidden_s(spec, gather_s, end.forward_s);
            end.backward_s += self.unhidden_s(spec, back_s, end.backward_s);
        }
    }

    /// `work` with what the parameter state adds to the passes of layers.
    pub fn added_to<'w>(
        &self,
        work: &'w MicroBatchCost,
        spec: &PipelineSpec,
    ) -> Cow<'w, MicroBatchCost> {
        if !self.in_passes() {
            return Cow::Borrowed(work);
        }
        let mut work = work.clone();
        for (index, kind) in work.kinds.iter_mut().enumerate() {
            let (forward_s, backward_s) = self.exposed_s(index, kind, spec);
            kind.forward_s += forward_s;
            kind.backward_s += backward_s;
            kind.input_s += backward_s;
        }
        // Bounds for all pipelines leave the ends out.
        if spec.passes.is_none() && work.embedding.params > 0.0 {
            self.add_to_ends(&mut work, spec);
        }
        Cow::Owned(work)
    }
}

/// All choices of parameter state on a mesh.
#[derive(Clone, Debug, PartialEq)]
pub struct States {
    /// The choices, in groups that differ only in the size of the shard group.
    pub groups: Vec<ShardGroup>,
    /// The choices that no other one matches or betters in every respect.
    pub undominated: Vec<StateView>,
    /// A relaxation of all choices: the least bytes, and no communication.
    pub least: StateView,
}

/// Choices of parameter state that differ only in the size of the shard group.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardGroup {
    /// The choices.
    pub views: Vec<StateView>,
    /// The componentwise minimum of the choices.
    pub least: StateView,
}

impl ShardGroup {
    fn new(views: Vec<StateView>) -> Option<Self> {
        let least = views.iter().cloned().reduce(|a, b| a.least(&b))?;
        Some(Self { views, least })
    }
}

impl States {
    /// All choices that a parallel layout leaves open.
    pub fn new(
        cache: &CostCache<'_>,
        d: &Decisions,
        choices: &PipelineChoices,
        kinds: &[LocalParams],
    ) -> Self {
        let mut groups = vec![];
        for &rank_order in &choices.rank_order {
            for shards in choices.shards.chunk_by(|a, b| a.0 == b.0) {
                let mut first: Vec<StateView> = vec![];
                for &offload in &choices.offload {
                    let view = |(index, &(zero_stage, dp_shard)): (usize, &(u8, u64))| {
                        let d =
                            Decisions { rank_order, zero_stage, dp_shard, offload, ..d.clone() };
                        match first.get(index) {
                            Some(view) => view.offloading(cache, &d),
                            None => StateView::new(cache, &d, kinds),
                        }
                    };
                    let views: Vec<StateView> = shards.iter().enumerate().map(view).collect();
                    if first.is_empty() {
                        first.clone_from(&views);
                    }
                    groups.extend(ShardGroup::new(views));
                }
            }
        }
        let rates = |value: &dyn Fn(&StateView) -> [f64; 2]| {
            let least = |a: [f64; 2], b: [f64; 2]| [a[0].min(b[0]), a[1].min(b[1])];
            groups.iter().map(|group| value(&group.least)).fold([f64::INFINITY; 2], least)
        };
        let least = StateView {
            rank_order: RankOrder::DpInner,
            zero_stage: 0,
            dp_shard: 1,
            offload: Offload::None,
            bytes: rates(&|view| view.bytes),
            reductions: StepTime::NONE,
            gathers: StepTime::NONE,
            update_s: [0.0; 2],
            gather_s: vec![0.0; kinds.len()],
            scatter_s: vec![0.0; kinds.len()],
            ends_s: [[0.0; 2]; 2],
            copied: StepTime::NONE,
            motion_bytes: 0.0,
            overlap: 0.0,
        };
        let mut undominated: Vec<StateView> = vec![];
        for view in groups.iter().flat_map(|group| &group.views) {
            if !undominated.iter().any(|known| known.undercuts(view)) {
                undominated.retain(|known| !view.undercuts(known));
                undominated.push(view.clone());
            }
        }
        Self { groups, undominated, least }
    }

    /// All choices, ungrouped.
    pub fn views(&self) -> impl Iterator<Item = &StateView> {
        self.groups.iter().flat_map(|group| &group.views)
    }
}

impl StateView {
    /// Whether it is no worse than another choice in any respect.
    fn undercuts(&self, other: &Self) -> bool {
        let all = |own: &[f64], other: &[f64]| own.iter().zip(other).all(|(a, b)| a <= b);
        all(&self.bytes, &other.bytes)
            && self.reductions.undercuts(&other.reductions)
            && self.gathers.undercuts(&other.gathers)
            && all(&self.update_s, &other.update_s)
            && self.ends_s.iter().zip(&other.ends_s).all(|(own, other)| all(own, other))
            && self.copied.undercuts(&other.copied)
            && all(&self.gather_s, &other.gather_s)
            && all(&self.scatter_s, &other.scatter_s)
    }
}
