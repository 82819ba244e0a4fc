//! What each choice of ZeRO stage, shard group, offloading and rank order takes at least.

use super::workload::{KindCost, MOST_COPIES, MicroBatchCost, PipelineSpec};
use crate::cost::state::{LocalParams, StateCost};
use crate::pricing::cost_cache::CostCache;
use crate::request::space::PipelineChoices;
use models::decisions::{Decisions, Offload, RankOrder};
use models::schedule::ScheduleName;

/// One parameter of each sort, shared by all replicas or by an expert's.
const DENSE: LocalParams = LocalParams { dense: 1.0, expert: 0.0 };
const EXPERT: LocalParams = LocalParams { dense: 0.0, expert: 1.0 };
/// So many that the launch of the update's kernel does not matter.
const MANY: f64 = 1e15;

/// A choice of states as rates a parameter, dense and expert, each a lower bound at any size.
#[derive(Clone, Debug, PartialEq)]
pub struct StateView {
    /// The choice.
    pub rank_order: RankOrder,
    /// The choice.
    pub zero_stage: u8,
    /// The choice.
    pub dp_shard: u64,
    /// The choice.
    pub offload: Offload,
    /// Bytes on the device.
    pub bytes: [f64; 2],
    /// Exposed reductions between the last pass and the barrier, s.
    tail_s: [f64; 2],
    /// Exposed gathers and updates behind the barrier, s.
    step_s: [f64; 2],
    /// What reductions and gathers of each stage take however little it holds, s.
    starts_s: (f64, f64),
    /// Gathers of a layer's weights before each pass, by kind, s.
    gather_s: Vec<f64>,
    /// Reductions of a layer's gradients in a backward pass, by kind, s.
    scatter_s: Vec<f64>,
    /// Gathered and reduced units that lie beside everything else, bytes.
    motion_bytes: f64,
    overlap: f64,
}

impl StateView {
    /// The view of decisions' states; everything else of the decisions that matters is the mesh.
    pub fn new(cache: &CostCache<'_>, d: &Decisions, kinds: &[LocalParams]) -> Self {
        let state = StateCost::new(cache.cluster, cache.model, d, &cache.domains);
        let rates = |value: &dyn Fn(LocalParams) -> f64| [value(DENSE), value(EXPERT)];
        let least = |params| {
            let time = |op, bytes, group: &_| bytes * cache.collective_line(op, group).1;
            state.least_exposed(params, time)
        };
        let starts = state.least_exposed(DENSE, |op, _, group| cache.collective_line(op, group).0);
        let update_s = |params: LocalParams| state.optimizer_s(params * MANY) / MANY;
        let software = &cache.cluster.software;
        let by_kind = |from_stage: u8, time: &dyn Fn(LocalParams) -> f64| {
            let time = |k| time(k) * software.zero3_slowdown;
            kinds.iter().map(|&k| if d.zero_stage >= from_stage { time(k) } else { 0.0 }).collect()
        };
        let layer = kinds.iter().map(|p| p.dense + p.expert).fold(0.0, f64::max);
        Self {
            rank_order: d.rank_order,
            zero_stage: d.zero_stage,
            dp_shard: d.dp_shard,
            offload: d.offload,
            bytes: rates(&|one| state.memory(one).device_bytes()),
            tail_s: rates(&|one| least(one).tail_s),
            step_s: rates(&|one| least(one).step_s + update_s(one)),
            starts_s: (starts.tail_s, starts.step_s),
            gather_s: by_kind(3, &|params| state.gather_s(params)),
            scatter_s: by_kind(2, &|params| state.reduce_scatter_s(params)),
            motion_bytes: layer * state.motion_bytes_a_parameter(d.dtype),
            overlap: software.zero3_overlap,
        }
    }

    /// What neither undercuts in anything, as decided as the first.
    fn least(mut self, other: &Self) -> Self {
        let least = |own: &mut [f64], other: &[f64]| {
            own.iter_mut().zip(other).for_each(|(own, other)| *own = own.min(*other));
        };
        least(&mut self.bytes, &other.bytes);
        least(&mut self.tail_s, &other.tail_s);
        least(&mut self.step_s, &other.step_s);
        least(&mut self.gather_s, &other.gather_s);
        least(&mut self.scatter_s, &other.scatter_s);
        self.starts_s.0 = self.starts_s.0.min(other.starts_s.0);
        self.starts_s.1 = self.starts_s.1.min(other.starts_s.1);
        self.motion_bytes = self.motion_bytes.min(other.motion_bytes);
        self
    }

    /// Writes these decisions.
    pub fn of(&self, d: &Decisions) -> Decisions {
        Decisions {
            rank_order: self.rank_order,
            zero_stage: self.zero_stage,
            dp_shard: self.dp_shard,
            offload: self.offload,
            ..d.clone()
        }
    }

    /// Bytes of the states of parameters.
    pub fn bytes_of(&self, params: LocalParams) -> f64 {
        params.dense * self.bytes[0] + params.expert * self.bytes[1]
    }

    /// Least exposed reductions behind the passes of a device with these parameters in so many stages, s.
    pub fn tail_of_s(&self, params: LocalParams, stages: usize) -> f64 {
        let each_s = self.starts_s.0 * stages as f64;
        params.dense * self.tail_s[0] + params.expert * self.tail_s[1] + each_s
    }

    /// Least work behind the barrier of a device with these parameters in so many stages, s.
    pub fn step_of_s(&self, params: LocalParams, stages: usize) -> f64 {
        let each_s = self.starts_s.1 * stages as f64;
        params.dense * self.step_s[0] + params.expert * self.step_s[1] + each_s
    }

    /// Buffers of gathers and reductions, bytes. Breadth-first loops keep a chunk of layers.
    pub fn motion_bytes(&self, spec: &PipelineSpec, layers: usize) -> f64 {
        let stages = spec.devices * spec.chunks;
        match spec.schedule {
            ScheduleName::LoopedBfs => self.motion_bytes * layers.div_ceil(stages) as f64,
            _ => self.motion_bytes,
        }
    }

    /// Whether passes communicate for states.
    pub fn in_passes(&self) -> bool {
        self.zero_stage >= 2
    }

    /// What passes over layers of a kind cannot hide of gathers and reductions, forward and backward, s.
    pub fn exposed_s(&self, index: usize, kind: &KindCost, spec: &PipelineSpec) -> (f64, f64) {
        // Breadth-first loops gather and reduce once for all micro-batches.
        let shared = if spec.schedule == ScheduleName::LoopedBfs { spec.m() } else { 1.0 };
        let exposed = |comm_s: f64, compute_s: f64| comm_s - (comm_s * self.overlap).min(compute_s);
        let gather_s = self.gather_s[index] / shared;
        let both_s = gather_s + self.scatter_s[index] / shared;
        (exposed(gather_s, kind.forward_s), exposed(both_s, kind.backward_s))
    }

    /// The work with what these states add to the passes over layers.
    pub fn added_to(&self, work: &MicroBatchCost, spec: &PipelineSpec) -> MicroBatchCost {
        let mut work = work.clone();
        if self.in_passes() {
            for (index, kind) in work.kinds.iter_mut().enumerate() {
                let (forward_s, backward_s) = self.exposed_s(index, kind, spec);
                kind.forward_s += forward_s;
                kind.backward_s += backward_s;
                kind.input_s += backward_s;
            }
        }
        work
    }
}

/// All choices of states of a mesh.
#[derive(Clone, Debug, PartialEq)]
pub struct States {
    /// The choices, in groups that differ in nothing but how many ranks share them.
    pub groups: Vec<Alike>,
    /// Rates that no choice undercuts: least bytes, nothing in passes.
    pub least: StateView,
}

/// Choices of states that differ in nothing but how many ranks share them.
#[derive(Clone, Debug, PartialEq)]
pub struct Alike {
    /// The choices.
    pub views: Vec<StateView>,
    /// What none of them undercuts in anything.
    pub least: StateView,
}

impl Alike {
    fn new(views: Vec<StateView>) -> Option<Self> {
        let least = views.iter().cloned().reduce(|a, b| a.least(&b))?;
        Some(Self { views, least })
    }
}

impl States {
    /// All that a node leaves open.
    pub fn new(
        cache: &CostCache<'_>,
        d: &Decisions,
        choices: &PipelineChoices,
        kinds: &[LocalParams],
    ) -> Self {
        let mut groups = vec![];
        for &rank_order in &choices.rank_order {
            for shards in choices.shards.chunk_by(|a, b| a.0 == b.0) {
                for &offload in &choices.offload {
                    let view = |&(zero_stage, dp_shard): &(u8, u64)| {
                        let d =
                            Decisions { rank_order, zero_stage, dp_shard, offload, ..d.clone() };
                        StateView::new(cache, &d, kinds)
                    };
                    groups.extend(Alike::new(shards.iter().map(view).collect()));
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
            tail_s: [0.0; 2],
            step_s: [0.0; 2],
            starts_s: (0.0, 0.0),
            gather_s: vec![0.0; kinds.len()],
            scatter_s: vec![0.0; kinds.len()],
            motion_bytes: 0.0,
            overlap: 0.0,
        };
        Self { groups, least }
    }

    /// The choices.
    pub fn views(&self) -> impl Iterator<Item = &StateView> {
        self.groups.iter().flat_map(|group| &group.views)
    }

    /// What choices add at least to the mean load of devices with the work's parameters on average (the work of
    /// one micro-batch given): the choices that no other undercuts in bytes and seconds, least seconds first.
    pub fn overheads(&self, work: &MicroBatchCost, spec: &PipelineSpec) -> Vec<StateOverhead> {
        let mean = work.params() * (1.0 / spec.devices as f64);
        let of = |view: &StateView| {
            let passes_s = view.in_all_passes_s(work, spec) / spec.devices as f64;
            let behind_s = |params, n| view.tail_of_s(params, n) + view.step_of_s(params, n);
            let fullest_s = work.fullest(spec.devices, MOST_COPIES, |index, kind| {
                let (forward_s, backward_s) = view.exposed_s(index, kind, spec);
                spec.m() * (kind.load_s() + forward_s + backward_s) + behind_s(kind.params, 0)
            });
            StateOverhead { bytes: view.bytes, added_s: passes_s + behind_s(mean, 1), fullest_s }
        };
        let mut all: Vec<StateOverhead> = self.views().map(of).collect();
        all.sort_by(|a, b| a.added_s.total_cmp(&b.added_s));
        let mut overheads: Vec<StateOverhead> = vec![];
        for overhead in all {
            // What is less on average may be more where one kind of layer lies.
            let undercuts = |known: &StateOverhead| {
                let no_larger = known.bytes.iter().zip(overhead.bytes).all(|(a, b)| *a <= b);
                no_larger && known.fullest_s <= overhead.fullest_s
            };
            if !overheads.iter().any(undercuts) {
                overheads.push(overhead);
            }
        }
        overheads
    }
}

/// What a choice of states costs a device on average.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateOverhead {
    /// Bytes a parameter, dense and expert.
    pub bytes: [f64; 2],
    /// In passes, behind them and behind the barrier, with one stage each, s.
    pub added_s: f64,
    /// All that a device does which has no more than some device must have of one kind of layer, s.
    pub fullest_s: f64,
}

impl StateView {
    /// What all micro-batches' passes over all layers cannot hide, s.
    pub fn in_all_passes_s(&self, work: &MicroBatchCost, spec: &PipelineSpec) -> f64 {
        if !self.in_passes() {
            return 0.0;
        }
        let all = work.kinds.iter().zip(&work.counts).enumerate();
        let of = |(index, (kind, &count)): (usize, (&KindCost, &usize))| {
            let (forward_s, backward_s) = self.exposed_s(index, kind, spec);
            count as f64 * (forward_s + backward_s)
        };
        spec.m() * all.map(of).sum::<f64>()
    }
}
