//! Memory of weights, gradients and optimizer state on one rank, and the time to move them.

use super::collective::{self, Collective};
use super::memory_bound;
use models::cluster::{ClusterSpec, Software};
use models::decisions::{Decisions, DpReduction, Dtype, Offload, USUAL_BUCKET_MIB};
use models::formulas::state::{StateBytes, zero_bytes};
use models::layer::Split;
use models::mesh::GroupShape;
use models::model::{LayerKind, ModelSpec, params};

/// Parameters of one rank before ZeRO shards them, by the replicas that share them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LocalParams {
    /// Shared by data- and context-parallel replicas.
    pub dense: f64,
    /// Shared by the replicas of an expert shard.
    pub expert: f64,
}

impl std::ops::Add for LocalParams {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self { dense: self.dense + other.dense, expert: self.expert + other.expert }
    }
}

impl std::ops::Mul<f64> for LocalParams {
    type Output = Self;
    fn mul(self, factor: f64) -> Self {
        Self { dense: self.dense * factor, expert: self.expert * factor }
    }
}

/// Part of a layer's parameters in its largest matrix: 4h² of GPT's 12h².
const LARGEST_MATRIX: f64 = 1.0 / 3.0;

/// Parameters of one layer on one rank; key/value heads are copied where `tp` exceeds them.
pub fn layer_params(model: &ModelSpec, kind: LayerKind, split: &Split) -> LocalParams {
    let all = params::layer(model, kind);
    let tp = split.tp as f64;
    let copies = (split.tp as f64 / model.attention.kv_heads as f64).max(1.0) - 1.0;
    let copied = if model.attention.mla.is_some() { 0.0 } else { params::key_value(model) as f64 };
    let divided = (all.attention_matrices + all.mlp_matrices) as f64 + copied * copies;
    LocalParams {
        dense: divided / tp + (all.router + all.replicated) as f64,
        expert: all.expert_matrices as f64 / (split.ep * split.etp) as f64,
    }
}

/// Tensors of a layer: weights, biases and norms.
const TENSORS_A_LAYER: f64 = 9.0;

/// Tensors of a model for each of its parameters.
pub fn tensors_a_parameter(model: &ModelSpec) -> f64 {
    TENSORS_A_LAYER * model.layers as f64 / params::total(model) as f64
}

/// Bytes of a parameter before sharding. Mixed precision keeps 2-byte weights, f32 gradients, f32
/// master weights and two moments (Megatron's 18 bytes; other software differs). Training in f32 or
/// f64 has no master copy.
fn parameter_bytes(dtype: Dtype, software: &Software) -> StateBytes {
    let width = dtype.storage_bytes();
    let mixed = |gradients: f64| StateBytes {
        weights: 2.0,
        gradients,
        optimizer: software.optimizer_state_bytes,
    };
    match dtype {
        Dtype::F32 | Dtype::F64 => {
            StateBytes { weights: width, gradients: width, optimizer: 2.0 * width }
        }
        Dtype::Fp16 => mixed(software.fp16_gradient_bytes),
        _ => mixed(software.bf16_gradient_bytes),
    }
}

/// Replicas of one kind of parameter: all of them, those that share one sharded copy, and one rank
/// of each shard group.
#[derive(Clone, Debug, PartialEq)]
struct Replicas {
    all: GroupShape,
    shard: GroupShape,
    across: GroupShape,
}

impl Replicas {
    fn ways(&self) -> f64 {
        self.shard.size() as f64
    }
}

/// The buckets that published software has.
const USUAL_BUCKET_BYTES: f64 = (USUAL_BUCKET_MIB << 20) as f64;

/// Memory and time of parameter state under given decisions.
#[derive(Clone, Debug)]
pub struct StateCost<'a> {
    cluster: &'a ClusterSpec,
    bytes: StateBytes,
    zero_stage: u8,
    offload: Offload,
    reduction: DpReduction,
    bucket_bytes: f64,
    /// Bytes in host memory for each byte of optimizer state: exact weights lie there too, which
    /// are optimizer state in mixed precision alone.
    host_copies: f64,
    dense: Replicas,
    expert: Replicas,
    /// Tensors for each parameter that a rank holds.
    tensors: f64,
}

/// Communication of parameter state, s, whether or not passes hide it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Communication {
    /// Inside the passes (ZeRO stages 2 and 3), once.
    pub passes_s: f64,
    /// Reductions between the last pass and the barrier.
    pub tail_s: f64,
    /// Gathers behind the barrier.
    pub step_s: f64,
}

/// Bytes of state on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StateMemory {
    /// Weights.
    pub parameters: f64,
    /// Gradients.
    pub gradients: f64,
    /// Master weights and moments on the device.
    pub optimizer: f64,
    /// Master weights and moments in host memory.
    pub host: f64,
}

impl StateMemory {
    /// Bytes on the device.
    pub fn device_bytes(&self) -> f64 {
        self.parameters + self.gradients + self.optimizer
    }
}

impl std::ops::Add for StateMemory {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            parameters: self.parameters + other.parameters,
            gradients: self.gradients + other.gradients,
            optimizer: self.optimizer + other.optimizer,
            host: self.host + other.host,
        }
    }
}

impl<'a> StateCost<'a> {
    /// Groups as laid out by the mesh: replicas over data and context parallelism, which hold the
    /// same weights, with shards among the nearest of them. `tensors` is
    /// [`tensors_a_parameter`] of the model.
    pub fn new(cluster: &'a ClusterSpec, tensors: f64, d: &Decisions, domains: &[u64]) -> Self {
        let replicas = d.dp * d.cp;
        let expert_replicas = d.expert_dp();
        let expert_shard = d.dp_shard.min(expert_replicas);
        let mesh = models::mesh::Mesh::new(d);
        let dense_group = |size| mesh.replica_group(size, domains);
        let expert_group = |size| mesh.expert_replica_group(size, d.etp * d.ep, domains);
        let across = |whole: GroupShape, shard: &GroupShape| GroupShape {
            within: whole.within.iter().zip(&shard.within).map(|(w, s)| (w / s).max(1)).collect(),
        };
        let make = |all: GroupShape, shard: GroupShape| {
            let across = across(all.clone(), &shard);
            Replicas { all, shard, across }
        };
        Self {
            cluster,
            bytes: parameter_bytes(d.dtype, &cluster.software),
            zero_stage: d.zero_stage,
            offload: d.offload,
            reduction: d.dp_reduction,
            bucket_bytes: (d.dp_bucket_mib << 20) as f64,
            host_copies: if matches!(d.dtype, Dtype::F32 | Dtype::F64) { 1.5 } else { 1.0 },
            dense: make(dense_group(replicas), dense_group(d.dp_shard)),
            expert: make(expert_group(expert_replicas), expert_group(expert_shard)),
            tensors: tensors * d.tp as f64,
        }
    }

    /// Bytes of state for parameters.
    pub fn memory(&self, params: LocalParams) -> StateMemory {
        let of = |count: f64, replicas: &Replicas| {
            let held = zero_bytes(&self.bytes, self.zero_stage, count, replicas.ways());
            let (optimizer, host) = match self.offload {
                Offload::None | Offload::Activations => (held.optimizer, 0.0),
                Offload::Optimizer => (0.0, held.optimizer * self.host_copies),
            };
            StateMemory { parameters: held.weights, gradients: held.gradients, optimizer, host }
        };
        of(params.dense, &self.dense) + of(params.expert, &self.expert)
    }

    /// Bytes of a gradient while it is reduced: the accumulated gradient's, or less where the
    /// software reduces 16-bit gradients.
    pub fn reduced_bytes(&self) -> f64 {
        self.bytes.gradients.min(self.cluster.software.reduced_gradient_bytes)
    }

    /// Bytes of a layer's parameter while ZeRO gathers or reduces its unit: for stage 2 the
    /// gradient; for stage 3 also the weight, and the next unit's on the way. Where units are
    /// matrices: the largest one's weight and gradient in the number format.
    pub fn motion_bytes_a_parameter(&self, dtype: Dtype) -> f64 {
        match self.zero_stage {
            0 | 1 => 0.0,
            2 => self.bytes.gradients,
            _ if self.cluster.software.zero3_by_matrix => {
                2.0 * dtype.storage_bytes() * LARGEST_MATRIX
            }
            _ => 2.0 * dtype.storage_bytes() + 4.0,
        }
    }

    fn both(&self, params: LocalParams, time: impl Fn(f64, &Replicas) -> f64) -> f64 {
        let of =
            |count: f64, replicas: &Replicas| if count > 0.0 { time(count, replicas) } else { 0.0 };
        of(params.dense, &self.dense) + of(params.expert, &self.expert)
    }

    fn collective_s(&self, op: Collective, bytes: f64, group: &GroupShape) -> f64 {
        collective::time_s(self.cluster, op, bytes, group)
    }

    /// Reduce-scatter of gradients over the shard group.
    pub fn reduce_scatter_s(&self, params: LocalParams) -> f64 {
        self.both(params, |count, replicas| {
            let bytes = count * self.reduced_bytes();
            self.collective_s(Collective::ReduceScatter, bytes, &replicas.shard)
        })
    }

    /// All-gather of weights over the shard group.
    pub fn gather_s(&self, params: LocalParams) -> f64 {
        self.both(params, |count, replicas| {
            let bytes = count * self.bytes.weights;
            self.collective_s(Collective::AllGather, bytes, &replicas.shard)
        })
    }

    /// All-reduce of sharded gradients across shard groups (hybrid sharding).
    pub fn across_s(&self, params: LocalParams) -> f64 {
        self.both(params, |count, replicas| {
            let bytes = count * self.reduced_bytes() / replicas.ways();
            self.collective_s(Collective::AllReduce, bytes, &replicas.across)
        })
    }

    /// Bytes of gradients that the two copies of a stage exchange: all, or the shards to which ZeRO
    /// reduces them first.
    pub fn copied_bytes(&self, params: LocalParams) -> f64 {
        self.both(params, |count, replicas| {
            let ways = if self.zero_stage >= 1 { replicas.ways() } else { 1.0 };
            count * self.reduced_bytes() / ways
        })
    }

    /// Exposed reduction of a stage's gradients once a step; `backward_s` of computation can hide
    /// what the software overlaps.
    pub fn reduce_exposed_s(&self, params: LocalParams, backward_s: f64) -> f64 {
        let reduce_s = match self.zero_stage {
            0 | 1 if self.reduces_whole() => self.both(params, |count, replicas| {
                let bytes = count * self.reduced_bytes();
                self.collective_s(Collective::AllReduce, bytes, &replicas.all)
            }),
            1 => self.reduce_scatter_s(params) + self.across_s(params),
            _ => self.across_s(params),
        };
        let count = params.dense + params.expert;
        match self.reduction {
            DpReduction::Naive => reduce_s * self.cluster.software.dp_slowdown,
            DpReduction::Overlapped => {
                let latencies_s = self.extra_latencies_s(count, count * self.tensors);
                self.step_exposed_s(reduce_s + latencies_s, backward_s)
            }
            DpReduction::Bucketed => {
                let bytes = count * self.reduced_bytes();
                let latencies_s = self.extra_latencies_s(count, bytes / self.bucket_bytes);
                // Nothing hides the last bucket. Fitted overlaps have the usual one's share.
                let last = (self.bucket_bytes - USUAL_BUCKET_BYTES).max(0.0) / bytes;
                let hidden_in_s = backward_s.min(reduce_s * (1.0 - last).max(0.0));
                let hidden_in_s = if last > 0.0 { hidden_in_s } else { backward_s };
                self.step_exposed_s(reduce_s + latencies_s, hidden_in_s)
            }
        }
    }

    /// Latencies of more reductions than the usual buckets need, which fitted slowdowns have.
    fn extra_latencies_s(&self, params: f64, calls: f64) -> f64 {
        let usual = params * self.reduced_bytes() / USUAL_BUCKET_BYTES;
        let call_s = collective::ring_latency_s(self.cluster, &self.dense.all);
        (calls - usual).max(0.0) * call_s
    }

    /// Whether every rank gets the sums of all gradients.
    fn reduces_whole(&self) -> bool {
        self.zero_stage == 0 || self.deals_tensors()
    }

    fn deals_tensors(&self) -> bool {
        self.zero_stage == 1 && self.cluster.software.zero1_by_tensor
    }

    /// Latencies of one broadcast by each rank that owns tensors, one after another.
    fn broadcasts_s(&self, params: LocalParams) -> f64 {
        self.both(params, |count, replicas| {
            let owners = replicas.ways().min(count * self.tensors);
            owners * collective::ring_latency_s(self.cluster, &replicas.shard)
        })
    }

    /// Exposed part of reductions and gathers around a step beside `compute_s` of computation.
    fn step_exposed_s(&self, comm_s: f64, compute_s: f64) -> f64 {
        let software = &self.cluster.software;
        let comm_s = comm_s * software.dp_slowdown;
        comm_s - (comm_s * software.dp_overlap).min(compute_s)
    }

    /// Exposed part of gathers and reductions in a pass of `compute_s`.
    pub fn pass_exposed_s(&self, comm_s: f64, compute_s: f64) -> f64 {
        let software = &self.cluster.software;
        let comm_s = comm_s * software.zero3_slowdown;
        let hidden = match self.reduction {
            DpReduction::Naive => 0.0,
            _ => software.zero3_overlap,
        };
        comm_s - (comm_s * hidden).min(compute_s)
    }

    /// Lower bound on the communication of pipeline ranks that hold `params` on average; `least_s`
    /// gives a lower bound on the seconds of a collective of that many bytes.
    ///
    /// Where `least_s` is linear the bound is admissible for the mean over pipeline ranks, hence
    /// for the largest. Where it is constant it is admissible for each stage that holds any such
    /// parameters. Communication that stages 2 and 3 repeat in every micro-batch is counted once.
    pub fn least_communication(
        &self,
        params: LocalParams,
        least_s: impl Fn(Collective, f64, &GroupShape) -> f64,
    ) -> Communication {
        let software = &self.cluster.software;
        let (in_step, in_pass) = (software.dp_slowdown, software.zero3_slowdown);
        let scatter_s = || {
            self.both(params, |count, r| {
                least_s(Collective::ReduceScatter, count * self.reduced_bytes(), &r.shard)
            })
        };
        let across_s = || {
            self.both(params, |count, r| {
                least_s(Collective::AllReduce, count * self.reduced_bytes() / r.ways(), &r.across)
            })
        };
        let gather_s = || {
            self.both(params, |count, r| {
                least_s(Collective::AllGather, count * self.bytes.weights, &r.shard)
            })
        };
        let reduce_s = || {
            self.both(params, |count, r| {
                least_s(Collective::AllReduce, count * self.reduced_bytes(), &r.all)
            })
        };
        let (passes_s, tail_s, step_s) = match self.zero_stage {
            0 => (0.0, reduce_s() * in_step, 0.0),
            1 if self.deals_tensors() => (0.0, reduce_s() * in_step, gather_s() * in_step),
            1 => (0.0, (scatter_s() + across_s()) * in_step, gather_s() * in_step),
            2 => (scatter_s() * in_pass, across_s() * in_step, gather_s() * in_step),
            _ => ((scatter_s() + 2.0 * gather_s()) * in_pass, across_s() * in_step, 0.0),
        };
        Communication { passes_s, tail_s, step_s }
    }

    /// The shares of reductions and of gathers around a step that passes may hide.
    pub fn step_overlaps(&self) -> [f64; 2] {
        let share = self.cluster.software.dp_overlap;
        let reductions = if self.reduction == DpReduction::Naive { 0.0 } else { share };
        [reductions, if self.deals_tensors() { 0.0 } else { share }]
    }

    /// Optimizer update of a stage's shard. With the state in host memory, the link carries
    /// gradients down, the CPU updates, and the link carries weights up, tensor by tensor.
    pub fn optimizer_s(&self, params: LocalParams) -> f64 {
        self.both(params, |count, replicas| {
            let own = if self.zero_stage >= 1 { count / replicas.ways() } else { count };
            match self.offload {
                Offload::None | Offload::Activations => {
                    memory_bound::optimizer_s(self.cluster, own)
                }
                Offload::Optimizer => {
                    let moved = own * (self.bytes.gradients + self.bytes.weights);
                    let transfers_s = moved / self.cluster.host.link_bytes_per_s;
                    transfers_s + memory_bound::host_optimizer_s(self.cluster, own)
                }
            }
        })
    }

    /// Exposed gather of updated weights (stages 1 and 2). The next forward pass hides what the
    /// software overlaps; broadcasts by owners stay exposed.
    pub fn gather_exposed_s(&self, params: LocalParams, forward_s: f64) -> f64 {
        match self.zero_stage {
            1 if self.deals_tensors() => {
                let comm_s = self.gather_s(params) + self.broadcasts_s(params);
                comm_s * self.cluster.software.dp_slowdown
            }
            1 | 2 => self.step_exposed_s(self.gather_s(params), forward_s),
            _ => 0.0,
        }
    }
}
