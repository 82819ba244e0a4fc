//! A cluster as finished input: every figure is present and has been checked.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::EfficiencyTables;

/// Number formats a GEMM can run in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    Fp16,
    /// 8-bit float, one scale a tensor or block.
    Fp8,
    /// 8-bit float, one scale per 32 elements (OCP MX).
    Mxfp8,
    /// 4-bit float, one scale per 16 elements.
    Nvfp4,
    /// IEEE single.
    F32,
    /// IEEE double.
    F64,
}

impl Dtype {
    /// All, in the order in which they are listed to users.
    pub const ALL: [Self; 7] =
        [Self::Bf16, Self::Fp16, Self::Fp8, Self::Mxfp8, Self::Nvfp4, Self::F32, Self::F64];

    /// Bytes one element takes as a GEMM operand (the scales of block formats not counted).
    pub fn bytes(self) -> f64 {
        match self {
            Self::F64 => 8.0,
            Self::F32 => 4.0,
            Self::Bf16 | Self::Fp16 => 2.0,
            Self::Fp8 | Self::Mxfp8 => 1.0,
            Self::Nvfp4 => 0.5,
        }
    }

    /// The name in files and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Fp8 => "fp8",
            Self::Mxfp8 => "mxfp8",
            Self::Nvfp4 => "nvfp4",
            Self::F32 => "f32",
            Self::F64 => "f64",
        }
    }
}

/// Machines of one kind and the links between them. How many GPUs are used is said elsewhere
/// (`--gpus`): the levels repeat outwards without end.
///
/// Made by [`super::read`]; nothing downstream re-validates it.
#[derive(Clone, Debug)]
pub struct ClusterSpec {
    /// Name as the user knows it, for example `dgx_h100`.
    pub name: String,
    /// One line for `plan clusters`.
    pub description: String,
    /// The accelerator; on `laptop` one thread of the CPU.
    pub device: Device,
    /// Links, innermost first; at least one, the outermost without bound.
    pub levels: Vec<LinkLevel>,
    /// The CPU side, per GPU.
    pub host: Host,
    /// What one node (innermost domain, see [`ClusterSpec::node_gpus`]) can write to checkpoint
    /// storage, bytes/s.
    pub storage_bytes_per_s: f64,
    /// Failures that stop a run, per node (innermost domain) and day.
    pub failures_per_node_day: f64,
    /// What the generation of training software can do.
    pub software: Software,
    /// Measured efficiency of kernels and collectives.
    pub tables: Arc<EfficiencyTables>,
    /// Any number of ranks is accepted, even more than there are devices: ranks are threads.
    pub any_gpu_count: bool,
    /// Ranks that shared the machine when its figures were measured, where ranks are threads of one
    /// machine. With more ranks each gets less of it: see [`ClusterSpec::shared_by`].
    pub measured_ranks: Option<u64>,
    /// Time of one rank's threads on all cores over the time of `measured_ranks` ranks at once, for
    /// the same work.
    pub thread_slowdown: f64,
    /// The range in which the software's error band holds; `None` where no run was compared, or
    /// where the file has a band of its own.
    pub seen: Option<super::Seen>,
    /// Share of each device's memory that plans leave free, 0 in a file; see
    /// [`ClusterSpec::with_headroom`].
    pub headroom: f64,
}

/// One accelerator.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Device {
    /// Name, for example `H100-SXM5-80GB`.
    pub name: String,
    /// Dense peak of each format it computes in, FLOP/s, from the datasheet.
    pub peak_flops: BTreeMap<Dtype, f64>,
    /// Memory, bytes.
    pub hbm_bytes: f64,
    /// Memory bandwidth, bytes/s, from the datasheet.
    pub hbm_bytes_per_s: f64,
    /// Streaming multiprocessors (cores of a CPU).
    pub sms: u64,
    /// Shortest time between two kernels, seconds: a lower bound on any kernel.
    pub kernel_launch_s: f64,
    /// Slowdown of a matrix product at the peak rate under sustained load: clocks fall at the power
    /// limit. Slower products are throttled less.
    pub sustained_slowdown: f64,
    /// Memory that tensors cannot use: context, loaded kernels, allocator slack; bytes.
    pub reserved_bytes: f64,
}

impl Device {
    /// Peak in `dtype`, FLOP/s. A format the device lacks runs at the rate of the next wider one
    /// it has (fp8 on A100: bf16), and at the fastest where none is wider.
    pub fn peak_flops(&self, dtype: Dtype) -> f64 {
        self.computed_in(dtype)
            .and_then(|dtype| self.peak_flops.get(&dtype))
            .copied()
            .unwrap_or(1.0)
    }

    /// The format in which `dtype` is computed here; `None` on a device without peaks.
    pub fn computed_in(&self, dtype: Dtype) -> Option<Dtype> {
        let wider: &[Dtype] = match dtype {
            Dtype::Nvfp4 => &[Dtype::Nvfp4, Dtype::Mxfp8, Dtype::Fp8, Dtype::Bf16, Dtype::F32],
            Dtype::Mxfp8 => &[Dtype::Mxfp8, Dtype::Fp8, Dtype::Bf16, Dtype::F32],
            Dtype::Fp8 => &[Dtype::Fp8, Dtype::Mxfp8, Dtype::Bf16, Dtype::F32],
            Dtype::Bf16 | Dtype::Fp16 => &[Dtype::Bf16, Dtype::Fp16, Dtype::F32],
            Dtype::F32 => &[Dtype::F32, Dtype::F64],
            Dtype::F64 => &[Dtype::F64],
        };
        let exact = Some(dtype).filter(|dtype| self.peak_flops.contains_key(dtype));
        let next = wider.iter().copied().find(|dtype| self.peak_flops.contains_key(dtype));
        exact.or(next).or_else(|| self.peak_flops.keys().next().copied())
    }
}

/// One level of links: what connects the GPUs of one domain.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LinkLevel {
    /// Name, for example `nvlink`.
    pub name: String,
    /// GPUs in one domain; `None` on the outermost level, which has no bound.
    pub gpus: Option<u64>,
    /// Line rate per GPU in one direction, bytes/s, from the datasheet, where all GPUs send.
    pub bytes_per_s: f64,
    /// GPUs that share one adapter: one that sends alone has that many times `bytes_per_s`.
    pub gpus_an_adapter: u64,
    /// Latency of one step of a collective, or of one message, seconds.
    pub latency_s: f64,
    /// Part of the line rate that large messages reach.
    pub efficiency: f64,
    /// The switches reduce in the network (NVLS inside a node, SHARP between nodes).
    pub in_network: bool,
    /// Bandwidth below over bandwidth above: 1 for a full fat tree, 2 where half the uplinks are
    /// missing.
    pub oversubscription: f64,
}

impl LinkLevel {
    /// Bandwidth per GPU and direction that large messages see, bytes/s.
    pub fn achieved_bytes_per_s(&self) -> f64 {
        self.bytes_per_s * self.efficiency / self.oversubscription
    }

    /// Bandwidth that each of `senders` neighbours in an inner domain sees while the others send
    /// nothing, bytes/s: neighbours share as few adapters as have room for them.
    pub fn achieved_by(&self, senders: u64) -> f64 {
        let sharing = senders.clamp(1, self.gpus_an_adapter);
        self.achieved_bytes_per_s() * self.gpus_an_adapter as f64 / sharing as f64
    }
}

/// The CPU side, each figure for one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Host {
    /// Memory that offloading may use, bytes.
    pub memory_bytes: f64,
    /// Bandwidth of its memory by datasheet, bytes/s; where a file does not say, the link's.
    pub memory_bytes_per_s: f64,
    /// GPU to host, one direction, bytes/s.
    pub link_bytes_per_s: f64,
}

/// How attention is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionKernel {
    /// Batched GEMMs with a fused softmax between; the scores are stored (2021).
    Unfused,
    /// Tiles kept on chip, scores recomputed in the backward pass (FlashAttention).
    Flash,
}

/// What full recomputation repeats of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FullRecompute {
    /// Its whole forward pass (Megatron-LM).
    WholeLayer,
    /// What the backward pass reads: the product that ends a layer is left out, with its reduction
    /// (`torch.utils.checkpoint`).
    StopsEarly,
    /// No reduction over tensor-parallel ranks: their sums are kept, and the products before them
    /// left out (our runtime, `codegen::lower`).
    KeepsReduced,
}

/// What selective recomputation keeps of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Selective {
    /// Every product's result; attention scores, norms and the activation function are recomputed
    /// (Korthikanti §5).
    Products,
    /// Every second product's result and the attention core's (torchtitan's selective "op" policy).
    EverySecondProduct,
    /// All but the expanded queries, keys and values of latent attention (Megatron-Core's
    /// `mla_up_proj`).
    UpProjections,
}

/// Properties of a generation of training software. None depends on a model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Software {
    /// How attention is computed.
    pub attention: AttentionKernel,
    /// Slowdown of the software's matrix products over the library's own under the same load.
    pub gemm_slowdown: f64,
    /// Slowdown of the attention core over the measured kernel.
    pub attention_slowdown: f64,
    /// Further slowdown of fused attention with heads at most 64 wide, on top of
    /// `attention_slowdown`: generations of kernels differ in how well they use the tensor cores at
    /// each width.
    pub narrow_attention_slowdown: f64,
    /// Further slowdown of attention with sinks, whatever its width: separate kernels, unfused on
    /// some devices.
    pub sink_attention_slowdown: f64,
    /// Further slowdown of the attention core's backward pass, on top of `attention_slowdown`:
    /// other kernels than the table's divide their time differently.
    pub attention_backward_slowdown: f64,
    /// Slowdown of elementwise kernels over a plain copy of the bytes that a fused kernel moves.
    pub stream_slowdown: f64,
    /// Whether sequence parallelism is supported (Korthikanti §4.2.2).
    pub sequence_parallel: bool,
    /// Part of tensor-parallel communication that computation does not hide.
    pub tp_exposed: f64,
    /// Bytes of a gradient while replicas reduce it: 4, or 2 where 16-bit gradients are reduced as
    /// they are.
    pub reduced_gradient_bytes: f64,
    /// Part of the data-parallel reduction that can run under the last micro-batch's backward pass.
    pub dp_overlap: f64,
    /// Slowdown of the data-parallel reductions and gathers around a step over the collective
    /// alone.
    pub dp_slowdown: f64,
    /// Slowdown of the gathers and reductions of ZeRO stages 2 and 3 in every pass over the
    /// collective alone.
    pub zero3_slowdown: f64,
    /// Part of those that can run under a pass.
    pub zero3_overlap: f64,
    /// ZeRO stage 3 gathers and reduces matrix by matrix (DeepSpeed), not layer by layer.
    pub zero3_by_matrix: bool,
    /// Pipeline sends run under computation.
    pub p2p_overlap: bool,
    /// Whether, where weight gradients are passes of their own, the first and the last stage reduce
    /// the gradients of tied embeddings under the last micro-batch's weight gradients, not after
    /// them.
    pub tied_under_weights: bool,
    /// Whether ZeRO 1 assigns whole tensors to ranks: gradients are all-reduced, and every rank
    /// broadcasts the tensors it owns, one after another.
    pub zero1_by_tensor: bool,
    /// Whether tensor-parallel ranks with the same hidden states each send a share to the next
    /// stage, whose ranks gather inside the node (SC'21 §4.1); otherwise each sends everything.
    pub scatter_gather: bool,
    /// Slowdown of the experts' grouped products over the kernels alone: routing is uneven, and
    /// quantising the inputs takes time.
    pub expert_slowdown: f64,
    /// Whether a token is sent to each node once, however many of its experts are there, and
    /// forwarded inside (DeepEP); otherwise it is sent once for every expert.
    pub dispatch_once_a_node: bool,
    /// Multiprocessors that an all-to-all of tokens takes from kernels beside it: NCCL's blocks.
    pub dispatch_sms: f64,
    /// Part of DeepEP's dispatch that computation does not hide, without MoE overlap. A plain
    /// all-to-all blocks.
    pub ep_exposed: f64,
    /// Shortest forward pass of one layer that the host can issue, seconds; a backward pass takes
    /// twice that. A floor, not an addend.
    pub host_s_per_layer: f64,
    /// Seconds that routing adds to a layer's forward pass, however few its tokens: the router's
    /// small kernels, and the host's wait for the number of tokens of each expert, without which it
    /// cannot launch their products. 0 where a graph of the whole iteration needs no host.
    pub routing_s: f64,
    /// Whether routing runs in a CUDA graph, without the host: `routing_s` does not apply.
    pub graphed_routing: bool,
    /// Slowdown of transfers between stages beyond the innermost level, over the level's rate: a
    /// send and a receive use few of the library's channels, collectives all. Fitted.
    pub p2p_slowdown: f64,
    /// Seconds that a pipeline rank waits before each pass besides the transfer: its host waited
    /// for the transfer and then launches the first kernels.
    pub pass_gap_s: f64,
    /// Seconds of a step besides its passes: data, clipping, logging.
    pub step_overhead_s: f64,
    /// Slowdown for each doubling of the GPUs beyond one node (stragglers, jitter).
    pub slowdown_per_doubling: f64,
    /// Bytes that casting one element to fp8 moves.
    pub fp8_cast_bytes: f64,
    /// Bytes that each 16-bit element of a token's copy moves in a pass on its way to its expert
    /// and back, links aside: sorting by expert, padding, weighting and restoring, in one kernel or
    /// many.
    pub permute_bytes: f64,
    /// Whether the experts' activation, biases and casts are fused into their products' kernels.
    pub fused_experts: bool,
    /// Bytes the optimizer moves for each parameter it updates.
    pub optimizer_bytes_per_parameter: f64,
    /// Bytes of a gradient between micro-batches where weights are fp16.
    pub fp16_gradient_bytes: f64,
    /// The same where they are bf16 or narrower.
    pub bf16_gradient_bytes: f64,
    /// Bytes of optimizer state for each parameter of a shard: master weights, Adam's moments, and
    /// temporaries of the update.
    pub optimizer_state_bytes: f64,
    /// Bytes that the loss moves for each logit of a forward pass: the cast to f32 and the kernels
    /// after it.
    pub loss_bytes: f64,
    /// The same in a backward pass.
    pub loss_gradient_bytes: f64,
    /// Bytes for each logit of the logits, their gradient and the loss's temporaries.
    pub logit_bytes: f64,
    /// Bytes, for each weight of one layer and of the output layer, of placeholder gradients: the
    /// products have already added the real ones to the sum, and Transformer Engine since 2.3 keeps
    /// one placeholder of each shape.
    pub placeholder_bytes: f64,
    /// Hidden states of a micro-batch that vocabulary passes hold on every pipeline rank: inputs,
    /// gradients and buffers of collectives still in flight. Among them are the rows that `IF`
    /// leaves and the gradients that wait for `IB`, of at most two micro-batches.
    pub vocab_hidden_states: f64,
    /// Slowdown of a layer's kernels beside vocabulary passes, whose collectives occupy
    /// multiprocessors. At least 1, which the bounds rely on.
    pub vocab_slowdown: f64,
    /// The same slowdown in an interlaced pipeline. Its vocabulary layers run beside nothing, but
    /// its pipeline ranks never rest. At least 1.
    pub interlaced_slowdown: f64,
    /// Whether queries, keys and values, and gate and up, are products of their own, not one.
    /// Routed experts and latent attention are priced the same either way.
    pub separate_projections: bool,
    /// Further slowdown of matrix products in 8 bits or fewer, on top of `gemm_slowdown`.
    pub fp8_slowdown: f64,
    /// Bytes that a separate kernel moves to add a micro-batch's weight gradient to the sum; 0
    /// where the product itself accumulates.
    pub gradient_add_bytes: f64,
    /// What full recomputation repeats of a layer.
    pub full_recompute: FullRecompute,
    /// Which products selective recomputation repeats.
    pub selective: Selective,
    /// Bytes of communicators, buckets and everything else that the software holds besides tensors.
    pub buffer_bytes: f64,
    /// Half width of a prediction's error band, a fraction; absent where no published run was
    /// compared.
    pub error_band: Option<f64>,
}

impl ClusterSpec {
    /// The cluster as each of `ranks` sees it. Ranks that share one machine divide it: fewer ranks
    /// have more threads each, and more ranks than cores take turns.
    pub fn shared_by(mut self, ranks: u64) -> Self {
        let Some(measured) = self.measured_ranks else { return self };
        let share = measured as f64 / ranks as f64;
        let speed = share / self.threads_lose(share, measured as f64);
        self.measured_ranks = Some(ranks);
        self.device.peak_flops.values_mut().for_each(|flops| *flops *= speed);
        self.device.hbm_bytes *= share;
        self.device.hbm_bytes_per_s *= speed;
        // Waiting for another rank grows with the turns, but does not shrink for a rank that is
        // alone.
        let turns = share.min(1.0);
        for level in &mut self.levels {
            level.bytes_per_s *= turns;
            level.latency_s /= turns;
        }
        self
    }

    /// Slowdown of a rank with the threads of `share` of the `measured` ranks: each doubling of
    /// threads costs the same, and all `measured` ranks' threads cost `thread_slowdown`.
    fn threads_lose(&self, share: f64, measured: f64) -> f64 {
        if share <= 1.0 { 1.0 } else { self.thread_slowdown.powf(share.ln() / measured.ln()) }
    }

    /// GPUs in one domain of each level when `gpus` are used, innermost first: never falling, the
    /// last is `gpus`. Has the form of [`crate::mesh::GroupShape::within`] for the group of all
    /// ranks.
    pub fn level_sizes(&self, gpus: u64) -> Vec<u64> {
        self.levels.iter().map(|level| level.gpus.unwrap_or(gpus).min(gpus)).collect()
    }

    /// GPUs in a full node: the innermost domain, or one where there is a single level.
    pub fn node_gpus(&self) -> u64 {
        self.levels.first().and_then(|level| level.gpus).unwrap_or(1)
    }

    /// Nodes that `gpus` take; the last may be partly filled.
    pub fn nodes(&self, gpus: u64) -> u64 {
        gpus.div_ceil(self.node_gpus())
    }

    /// Index of the innermost level whose domain holds both global ranks.
    pub fn level_between(&self, a: u64, b: u64) -> usize {
        let together = |level: &LinkLevel| level.gpus.is_none_or(|gpus| a / gpus == b / gpus);
        self.levels.iter().position(together).unwrap_or(self.levels.len().saturating_sub(1))
    }

    /// Memory that a rank's tensors may take, bytes: neither reserved nor kept free.
    pub fn usable_bytes(&self) -> f64 {
        let kept_free = self.headroom * self.device.hbm_bytes;
        (self.device.hbm_bytes - kept_free - self.reserved_bytes()).max(0.0)
    }

    /// The cluster with another share of each device's memory kept free.
    #[must_use]
    pub fn with_headroom(self, headroom: f64) -> Self {
        Self { headroom, ..self }
    }

    /// Memory that tensors cannot use, bytes: the device's context and the software's buffers.
    pub fn reserved_bytes(&self) -> f64 {
        self.device.reserved_bytes + self.software.buffer_bytes
    }
}
