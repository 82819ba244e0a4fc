//! Time and bytes of one layer for one micro-batch on one rank.
//!
//! `models::layer` lists the kernels; here each gets a time, and it is decided which communication
//! stays exposed.

use super::attention::{self, AttentionShape};
use super::collective::{self, Collective};
use super::experts::ExpertPieces;
use super::parts::{AttentionChunks, Parts};
use super::{gemm, memory_bound};
use models::cluster::{AttentionKernel, ClusterSpec, FullRecompute, Selective};
use models::decisions::{CpStyle, Dtype, MoeOverlap, Recompute};
use models::formulas::attention as attention_formulas;
use models::formulas::communication::REDUCTIONS_A_PASS;
use models::layer::{self, Gemm, LocalHeads, Split};
use models::mesh::GroupShape;
use models::model::{LayerKind, ModelSpec};

/// Properties of a micro-batch's pass through a layer that do not depend on the pipeline.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Sizes each rank sees.
    pub split: Split,
    /// Context-parallel style.
    pub cp_style: CpStyle,
    /// Overlap of the expert all-to-all.
    pub moe_overlap: MoeOverlap,
    /// Chunks of that overlap.
    pub moe_overlap_degree: u64,
    /// Whether logits exist for a block of tokens at a time.
    pub fused_loss: bool,
    /// Layers that full recomputation keeps one input of.
    pub recompute_group: u64,
    /// Whether what layers keep lies in host memory.
    pub offload_activations: bool,
    /// Number format.
    pub dtype: Dtype,
    /// Tensor-parallel group on the links.
    pub tp_group: GroupShape,
    /// Context-parallel group on the links.
    pub cp_group: GroupShape,
    /// Expert-parallel group on the links.
    pub ep_group: GroupShape,
    /// Tensor-parallel group inside an expert.
    pub etp_group: GroupShape,
}

/// Cost of one layer of one kind for one micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerCost {
    /// Forward pass.
    pub forward: Parts,
    /// Backward with respect to inputs.
    pub backward_input: Parts,
    /// Backward with respect to weights.
    pub backward_weight: Parts,
    /// Forward work repeated in the backward pass, by `Recompute::ALL`.
    pub recompute: [Parts; 3],
    /// Activation bytes held on the device from forward to backward, by `Recompute::ALL`.
    pub saved_bytes: [f64; 3],
    /// Those held in host memory.
    pub host_bytes: [f64; 3],
    /// With pairs: extra seconds of a forward and of a backward pass that run unpaired.
    pub unpaired_s: [f64; 2],
}

/// One of the three products of a gated feed-forward block.
const SECOND_OF_FEED: f64 = 1.0 / 3.0;

impl LayerCost {
    /// Whole backward pass without recomputation.
    pub fn backward(&self) -> Parts {
        self.backward_input + self.backward_weight
    }

    /// Seconds forward and backward without recomputation.
    pub fn total_s(&self) -> f64 {
        self.forward.total_s() + self.backward().total_s()
    }
}

/// Prices layers of one model on one cluster.
#[derive(Clone, Copy)]
pub struct LayerPricer<'a> {
    /// The model.
    pub model: &'a ModelSpec,
    /// The cluster.
    pub cluster: &'a ClusterSpec,
}

impl LayerPricer<'_> {
    /// Cost of a layer from its pieces; decides how the experts' all-to-all is overlapped.
    pub fn layer_of(
        &self,
        kind: LayerKind,
        shape: &Shape,
        (pieces, chunks): (&Pieces, &AttentionChunks),
        experts: &ExpertPieces,
    ) -> LayerCost {
        let block = if kind.moe {
            match shape.moe_overlap {
                MoeOverlap::None | MoeOverlap::Pair => self.expert_block(experts),
                MoeOverlap::Tutel | MoeOverlap::Ampipe => {
                    self.chunked_experts(shape, (&pieces.attention, chunks), experts)
                }
            }
        } else {
            ThreePasses::default()
        };
        let cost = self.layer_with(kind, shape, pieces, block);
        match shape.moe_overlap {
            MoeOverlap::Pair if kind.moe => self.paired(cost, pieces, experts),
            _ => cost,
        }
    }

    /// Lower bound on the cost of a layer whose experts' passes take at least `experts`.
    pub fn layer_floor(
        &self,
        kind: LayerKind,
        shape: &Shape,
        pieces: &Pieces,
        experts: ThreePasses,
    ) -> LayerCost {
        let experts = if kind.moe { experts } else { ThreePasses::default() };
        self.layer_with(kind, shape, pieces, experts)
    }

    /// The part of a layer that does not depend on how its experts are split.
    pub fn pieces(&self, kind: LayerKind, shape: &Shape, body: &Body) -> Pieces {
        let (forward, backward) = self.attention_core(kind, shape);
        let mut attention = body.projections;
        attention.forward += forward;
        attention.input += backward;
        Pieces { body: *body, attention, selective: self.selective(kind, shape, body) }
    }

    /// The part of a layer that depends only on a rank's tokens, its tensor-parallel degree and the
    /// number format.
    pub fn body(&self, kind: LayerKind, shape: &Shape) -> Body {
        Body {
            projections: self.projections(shape),
            feed: self.feed_forward(kind, shape),
            streams: self.streams(kind, shape),
            tensor: self.tensor_parallel(shape),
            spared: self.spared(kind, shape),
        }
    }

    fn layer_with(
        &self,
        kind: LayerKind,
        shape: &Shape,
        pieces: &Pieces,
        moe: ThreePasses,
    ) -> LayerCost {
        let Pieces { attention, selective, body } = *pieces;
        let Body { feed, streams, tensor, spared, .. } = body;
        let forward = attention.forward + feed.forward + streams.forward + moe.forward + tensor;
        let backward_input = attention.input + feed.input + streams.backward + moe.input + tensor;
        let backward_weight = attention.weight + feed.weight + moe.weight;
        let again = Parts {
            compute_s: forward.compute_s - spared.compute_s,
            tp_s: forward.tp_s - spared.tp_s,
            ..forward
        };
        let cost = LayerCost {
            forward: self.at_least_host(forward),
            backward_input: self.at_least_host(backward_input),
            backward_weight: self.at_least_host(backward_weight),
            recompute: [Parts::default(), selective, self.at_least_host(again)],
            saved_bytes: Recompute::ALL.map(|option| self.saved_bytes(kind, shape, option)),
            host_bytes: [0.0; 3],
            unpaired_s: [0.0; 2],
        };
        if shape.offload_activations { self.offloaded(cost) } else { cost }
    }

    /// A layer whose activations lie in host memory between its passes. Each pass moves them, one
    /// way, and hides what it can, the backward pass under what it recomputes too. What passes
    /// cannot hide is counted in the backward pass: the forward pass is one for all ways to
    /// recompute.
    fn offloaded(&self, cost: LayerCost) -> LayerCost {
        let exposed = |option: usize| {
            let moved_s = cost.saved_bytes[option] / self.cluster.host.link_bytes_per_s;
            let backward_s = cost.backward().total_s() + cost.recompute[option].total_s();
            let hidden = [cost.forward.total_s(), backward_s];
            hidden.iter().map(|pass_s| (moved_s - pass_s).max(0.0)).sum::<f64>()
        };
        let recompute = [0, 1, 2].map(|option| {
            let host_s = exposed(option);
            cost.recompute[option] + Parts { host_s, ..Parts::default() }
        });
        LayerCost { recompute, host_bytes: cost.saved_bytes, saved_bytes: [0.0; 3], ..cost }
    }

    /// A layer's pass takes at least as long as the host needs to launch it.
    fn at_least_host(&self, mut parts: Parts) -> Parts {
        let floor_s = self.cluster.software.host_s_per_layer;
        parts.compute_s += (floor_s - parts.total_s()).max(0.0);
        parts
    }

    /// Whether selective recomputation repeats every second product. That takes fused attention and
    /// gated dense layers; other layers repeat the norms and activation functions.
    fn every_second(&self, kind: LayerKind) -> bool {
        let gated = layer::input_matrices(self.model.mlp.activation) == 2;
        let dense = !kind.moe && self.model.attention.mla.is_none() && gated;
        let second = self.cluster.software.selective == Selective::EverySecondProduct;
        second && dense && self.fused_attention()
    }

    fn up_projections_again(&self) -> bool {
        self.cluster.software.selective == Selective::UpProjections
    }

    fn fused_attention(&self) -> bool {
        self.cluster.software.attention == AttentionKernel::Flash
    }

    /// Bytes that a layer keeps of a micro-batch, by what it recomputes.
    pub fn saved_bytes(&self, kind: LayerKind, shape: &Shape, option: Recompute) -> f64 {
        let fused = self.fused_attention();
        let split = &shape.split;
        if option == Recompute::Selective && self.every_second(kind) {
            return layer::every_second_product_bytes(self.model, kind, split, shape.dtype);
        }
        if option == Recompute::Full && shape.recompute_group > 1 {
            let input = layer::saved_bytes(self.model, kind, split, shape.dtype, fused, option);
            return input / shape.recompute_group as f64;
        }
        if option == Recompute::Full && self.keeps_reduced() {
            let input = layer::saved_bytes(self.model, kind, split, shape.dtype, fused, option);
            return input + layer::reduced_bytes(self.model, split, shape.dtype);
        }
        if option == Recompute::Selective && self.up_projections_again() {
            let all = Recompute::None;
            return layer::saved_bytes(self.model, kind, split, shape.dtype, fused, all)
                - layer::up_projected_bytes(self.model, split, shape.dtype);
        }
        layer::saved_bytes(self.model, kind, split, shape.dtype, fused, option)
    }

    fn gemm_s(&self, dtype: Dtype, g: &Gemm, slowdown: f64) -> f64 {
        gemm::slowed_grouped_gemm_s(self.cluster, dtype, [g.groups, g.m, g.n, g.k], slowdown)
    }

    /// Forward, input-gradient and weight-gradient products, `[m,k][k,n]`, `[m,n][n,k]` and
    /// `[n,m][m,k]`, with the casts of inputs that are stored wider than they are multiplied.
    pub(super) fn products(&self, dtype: Dtype, gemms: &[Gemm]) -> ThreePasses {
        self.slowed_products(dtype, gemms, 1.0)
    }

    pub(super) fn slowed_products(
        &self,
        dtype: Dtype,
        gemms: &[Gemm],
        slowdown: f64,
    ) -> ThreePasses {
        let each = |seconds: &dyn Fn(&Gemm) -> f64| {
            Parts::compute(gemms.iter().map(seconds).sum::<f64>() * self.misalignment())
        };
        let casts = |width: fn(&Gemm) -> u64| {
            Parts::compute(
                gemms.iter().map(|g| self.cast_s(dtype, g.groups * g.m * width(g))).sum(),
            )
        };
        ThreePasses {
            forward: each(&|g| self.gemm_s(dtype, g, slowdown)) + casts(|g| g.k),
            input: each(&|g| self.gemm_s(dtype, &Gemm { n: g.k, k: g.n, ..*g }, slowdown))
                + casts(|g| g.n),
            weight: each(&|g| {
                let shape = [g.groups, g.m, g.n, g.k];
                gemm::slowed_weight_gradient_s(self.cluster, dtype, shape, slowdown)
            }),
        }
    }

    /// Seconds to cast `elements` to 8 bits or fewer, with the transposed copy that the weight
    /// gradient needs.
    fn cast_s(&self, dtype: Dtype, elements: u64) -> f64 {
        let narrow = dtype.bytes() < dtype.storage_bytes()
            && self.cluster.device.computed_in(dtype).is_some_and(|runs_in| runs_in.bytes() < 2.0);
        let bytes = if narrow { self.cluster.software.fp8_cast_bytes } else { 0.0 };
        memory_bound::streaming_s(self.cluster, bytes * elements as f64)
    }

    fn misalignment(&self) -> f64 {
        gemm::misalignment_factor(LocalHeads::new(self.model, 1).qk_dim)
    }

    fn keeps_reduced(&self) -> bool {
        self.cluster.software.full_recompute == FullRecompute::KeepsReduced
    }

    /// What full recomputation leaves out: products whose sums are kept or not read, with the
    /// reductions behind them.
    fn spared(&self, kind: LayerKind, shape: &Shape) -> Parts {
        let last = |gemms: &[Gemm]| {
            let last = &gemms[gemms.len().saturating_sub(1)..];
            let reduction_s = self.reduction_s(shape) * self.cluster.software.tp_exposed;
            let reduced = Parts { tp_s: reduction_s, ..Parts::default() };
            self.products(shape.dtype, last).forward + reduced
        };
        let mut spared = Parts::default();
        // A group's layers are run again as they were.
        if shape.recompute_group > 1 {
            return spared;
        }
        if self.cluster.software.full_recompute != FullRecompute::WholeLayer && !kind.moe {
            spared += last(&layer::dense_gemms(self.model, kind, &shape.split));
        }
        if self.keeps_reduced() && shape.split.tp > 1 {
            spared += last(&layer::attention_gemms(self.model, &shape.split));
        }
        spared
    }

    /// Projections of keys and of the output, forward.
    fn second_products(&self, shape: &Shape) -> Parts {
        let heads = LocalHeads::new(self.model, shape.split.tp);
        let (tokens, h) = (shape.split.tokens(self.model), self.model.hidden);
        let product = |n, k| Gemm { groups: 1, m: tokens, n, k };
        let keys = product(heads.kv_heads * heads.qk_dim, h);
        self.products(shape.dtype, &[keys, product(h, heads.out_width())]).forward
    }

    /// The attention core with its context-parallel communication, forward and backward.
    fn attention_core(&self, kind: LayerKind, shape: &Shape) -> (Parts, Parts) {
        let core = self.core_shape(kind, shape);
        let forward_s = attention::forward_s(self.cluster, &core, shape.dtype);
        let backward_s = attention::backward_s(self.cluster, &core, shape.dtype);
        let cp = shape.split.cp;
        if cp == 1 {
            return (Parts::compute(forward_s), Parts::compute(backward_s));
        }
        let uneven = if shape.cp_style == CpStyle::Ring {
            attention_formulas::contiguous_imbalance(cp as f64)
        } else {
            1.0
        };
        let (forward_s, backward_s) = (forward_s * uneven, backward_s * uneven);
        let comm = self.context_parallel(shape);
        let exposed = |attention_s: f64, hidden_s: f64, bare_s: f64| {
            bare_s + (hidden_s - attention_s * (1.0 - 1.0 / comm.ring as f64)).max(0.0)
        };
        let with_comm = |compute_s, cp_s| Parts { compute_s, cp_s, ..Parts::default() };
        (
            with_comm(forward_s, exposed(forward_s, comm.ring_forward_s, comm.bare_forward_s)),
            with_comm(backward_s, exposed(backward_s, comm.ring_backward_s, comm.bare_backward_s)),
        )
    }

    /// The attention one rank computes: its queries against all keys.
    pub(super) fn core_shape(&self, kind: LayerKind, shape: &Shape) -> AttentionShape {
        let split = &shape.split;
        let heads = LocalHeads::new(self.model, split.tp * split.cp_ulysses);
        let window = self.model.attention.window.filter(|_| kind.windowed).map(|w| w.tokens);
        AttentionShape {
            batch: split.micro_batch,
            heads: heads.heads,
            kv_heads: heads.kv_heads,
            query_len: self.model.seq_len / (split.cp / split.cp_ulysses),
            key_len: self.model.seq_len,
            head_dim_qk: heads.qk_dim,
            head_dim_v: heads.v_dim,
            causal: true,
            last_queries: false,
            window,
            sinks: self.model.attention.sinks,
        }
    }

    /// Context-parallel transfers of one layer. Ring: `c − 1` hops with K and V of `s/c` tokens
    /// forward; backward also their f32 gradients, which go one hop more. All-gather: K and V of
    /// all ranks. Ulysses: all-to-alls of the rank's Q, K, V and output (Overview, context
    /// parallelism).
    fn context_parallel(&self, shape: &Shape) -> ContextComm {
        let split = &shape.split;
        let e = shape.dtype.storage_bytes();
        let tokens = split.tokens(self.model) as f64;
        let heads = LocalHeads::new(self.model, split.tp);
        let kv_bytes = tokens * heads.kv_width() as f64 * e;
        let ring = split.cp / split.cp_ulysses;
        let mut comm = ContextComm { ring, ..ContextComm::default() };
        if shape.cp_style == CpStyle::AllGather {
            comm.ring = 1;
            let gathered = kv_bytes * split.cp as f64;
            let time = |op| collective::time_s(self.cluster, op, gathered, &shape.cp_group);
            comm.bare_forward_s = time(Collective::AllGather);
            comm.bare_backward_s = time(Collective::AllGather) + time(Collective::ReduceScatter);
            return comm;
        }
        if split.cp_ulysses > 1 {
            let inner = self.ulysses_group(shape);
            let widths = heads.q_width() + heads.kv_width() + heads.out_width();
            let bytes = tokens * widths as f64 * e;
            let all = collective::time_s(self.cluster, Collective::AllToAll, bytes, &inner);
            comm.bare_forward_s = all;
            comm.bare_backward_s = all;
        }
        if ring > 1 {
            let level = self.ring_level(shape);
            let senders = split.tp * split.cp_ulysses;
            let hop_s = |bytes| collective::p2p_s(self.cluster, bytes, level, senders);
            comm.ring_forward_s = (ring - 1) as f64 * hop_s(kv_bytes);
            let accumulators = 4.0 / e;
            // Gradients go one hop further than keys and values, home.
            comm.ring_backward_s = (ring - 1) as f64 * hop_s(kv_bytes * (1.0 + accumulators))
                + hop_s(kv_bytes * accumulators);
        }
        comm
    }

    /// Bytes of keys and values that `all_gather` collects from all context-parallel ranks for a
    /// layer, and of their gradients.
    pub fn gathered_bytes(&self, shape: &Shape) -> f64 {
        let split = &shape.split;
        if split.cp == 1 || shape.cp_style != CpStyle::AllGather {
            return 0.0;
        }
        let tokens = (split.tokens(self.model) * split.cp) as f64;
        let width = LocalHeads::new(self.model, split.tp).kv_width() as f64;
        2.0 * tokens * width * shape.dtype.storage_bytes()
    }

    /// The inner, Ulysses part of a context-parallel group: its nearest ranks.
    fn ulysses_group(&self, shape: &Shape) -> GroupShape {
        let cap = shape.split.cp_ulysses;
        GroupShape { within: shape.cp_group.within.iter().map(|&ranks| ranks.min(cap)).collect() }
    }

    /// Link level of the slowest hop of the ring.
    fn ring_level(&self, shape: &Shape) -> usize {
        let within = &shape.cp_group.within;
        within.iter().position(|&ranks| ranks == shape.split.cp).unwrap_or(within.len() - 1)
    }

    fn projections(&self, shape: &Shape) -> ThreePasses {
        let gemms = match self.cluster.software.separate_projections {
            true => layer::separate_attention_gemms(self.model, &shape.split),
            false => layer::attention_gemms(self.model, &shape.split),
        };
        self.products(shape.dtype, &gemms)
    }

    fn feed_forward(&self, kind: LayerKind, shape: &Shape) -> ThreePasses {
        let gemms = match self.cluster.software.separate_projections {
            true => layer::separate_dense_gemms(self.model, kind, &shape.split),
            false => layer::dense_gemms(self.model, kind, &shape.split),
        };
        self.products(shape.dtype, &gemms)
    }

    /// Memory-bound kernels, forward and backward.
    fn streams(&self, kind: LayerKind, shape: &Shape) -> StreamCost {
        let streams = layer::streams(self.model, kind, &shape.split, shape.dtype);
        let time = |kernels: &[f64]| {
            let seconds =
                kernels.iter().map(|&bytes| memory_bound::elementwise_s(self.cluster, bytes));
            Parts::compute(seconds.sum())
        };
        let [forward, backward] = if kind.moe { self.routed(shape) } else { Default::default() };
        StreamCost {
            forward: time(&streams.forward) + forward,
            backward: time(&streams.backward) + backward,
            selective: time(&streams.selective),
        }
    }

    /// Selective recomputation: every second product, the attention core where its scores would be
    /// stored, or the norms and the activation function.
    fn selective(&self, kind: LayerKind, shape: &Shape, body: &Body) -> Parts {
        if self.every_second(kind) {
            // Of queries, keys, values, output, gate, up and down: keys, output and up.
            let second = self.second_products(shape);
            return body.streams.forward + second + body.feed.forward * SECOND_OF_FEED;
        }
        if self.up_projections_again() {
            let products = layer::up_projections(self.model, &shape.split);
            return self.products(shape.dtype, &products).forward;
        }
        if self.fused_attention() {
            return body.streams.selective;
        }
        let core = self.core_shape(kind, shape);
        Parts::compute(attention::forward_s(self.cluster, &core, shape.dtype))
    }

    /// Exposed tensor-parallel collectives of one pass over a layer: [`REDUCTIONS_A_PASS`]
    /// all-reduces of `bsh`, or with sequence parallelism as many pairs of all-gather and
    /// reduce-scatter.
    fn tensor_parallel(&self, shape: &Shape) -> Parts {
        let split = &shape.split;
        if split.tp == 1 {
            return Parts::default();
        }
        let gather_s = match split.sequence_parallel {
            true => self.stream_s(Collective::AllGather, shape),
            false => 0.0,
        };
        let pair_s = gather_s + self.reduction_s(shape);
        let tp_s = REDUCTIONS_A_PASS * pair_s * self.cluster.software.tp_exposed;
        Parts { tp_s, ..Parts::default() }
    }

    /// The reduction of one row-parallel product's partial sums, s.
    fn reduction_s(&self, shape: &Shape) -> f64 {
        match shape.split.sequence_parallel {
            _ if shape.split.tp == 1 => 0.0,
            true => self.stream_s(Collective::ReduceScatter, shape),
            false => self.stream_s(Collective::AllReduce, shape),
        }
    }

    /// A collective of a micro-batch's residual stream over tensor-parallel ranks, s.
    fn stream_s(&self, op: Collective, shape: &Shape) -> f64 {
        let elements = shape.split.tokens(self.model) as f64 * self.model.hidden as f64;
        let bytes = elements * shape.dtype.storage_bytes();
        collective::time_s(self.cluster, op, bytes, &shape.tp_group)
    }
}

/// Times of the three passes over some products.
#[derive(Clone, Copy, Debug, Default)]
pub struct ThreePasses {
    pub(super) forward: Parts,
    pub(super) input: Parts,
    pub(super) weight: Parts,
}

impl std::ops::Add for ThreePasses {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            forward: self.forward + other.forward,
            input: self.input + other.input,
            weight: self.weight + other.weight,
        }
    }
}

/// A layer without its experts.
#[derive(Clone, Copy, Debug)]
pub struct Pieces {
    body: Body,
    /// Projections and core.
    pub(super) attention: ThreePasses,
    selective: Parts,
}

impl Pieces {
    /// The dense feed-forward block, or the shared experts.
    pub(super) fn feed(&self) -> ThreePasses {
        self.body.feed
    }
}

/// A layer without its experts and its attention core.
#[derive(Clone, Copy, Debug)]
pub struct Body {
    /// Projections of attention.
    projections: ThreePasses,
    feed: ThreePasses,
    streams: StreamCost,
    tensor: Parts,
    /// Work that full recomputation leaves out.
    spared: Parts,
}

/// Times of the memory-bound kernels.
#[derive(Clone, Copy, Debug)]
struct StreamCost {
    forward: Parts,
    backward: Parts,
    selective: Parts,
}

/// Context-parallel transfer times of one layer: of the ring, which attention can hide, and of the
/// rest, which it cannot.
#[derive(Clone, Copy, Debug, Default)]
struct ContextComm {
    ring: u64,
    ring_forward_s: f64,
    ring_backward_s: f64,
    bare_forward_s: f64,
    bare_backward_s: f64,
}
