//! Shapes and bytes of what one layer computes, stores and sends under a split.
//!
//! Symbols as in the crate documentation; `T` is a rank's tokens of one micro-batch, `b·s/c`, and
//! `e` the bytes of a stored element.

use crate::decisions::{Decisions, Dtype, Recompute};
use crate::formulas::{activation, attention, communication, flops};
use crate::model::{Activation, LayerKind, ModelSpec};

/// How one micro-batch of one layer is split over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Split {
    /// Tensor parallel degree, `t`.
    pub tp: u64,
    /// Context parallel degree, `c`.
    pub cp: u64,
    /// Ulysses degree inside `cp`.
    pub cp_ulysses: u64,
    /// Expert parallel degree.
    pub ep: u64,
    /// Tensor parallel degree inside an expert.
    pub etp: u64,
    /// Norms and residuals split over tensor-parallel ranks.
    pub sequence_parallel: bool,
    /// Sequences a micro-batch, `b`.
    pub micro_batch: u64,
}

impl Split {
    /// One sequence on one rank.
    pub const WHOLE: Self = Self {
        tp: 1,
        cp: 1,
        cp_ulysses: 1,
        ep: 1,
        etp: 1,
        sequence_parallel: false,
        micro_batch: 1,
    };

    /// That of a configuration.
    pub fn of(d: &Decisions) -> Self {
        Self {
            tp: d.tp,
            cp: d.cp,
            cp_ulysses: d.cp_ulysses,
            ep: d.ep,
            etp: d.etp,
            sequence_parallel: d.sequence_parallel,
            micro_batch: d.micro_batch,
        }
    }

    /// A rank's tokens of one micro-batch, T = b·s/c.
    pub fn tokens(&self, model: &ModelSpec) -> u64 {
        self.micro_batch * model.seq_len / self.cp
    }

    /// Tokens that each tensor-parallel rank keeps of the residual stream: `T/t` with sequence
    /// parallelism, else `T`.
    pub fn resident_tokens(&self, model: &ModelSpec) -> u64 {
        self.tokens(model) / if self.sequence_parallel { self.tp } else { 1 }
    }
}

/// A matrix product `[m, k] x [k, n]`, `groups` times with `m` rows each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gemm {
    /// Independent products (experts); 1 for a plain one.
    pub groups: u64,
    /// Rows: tokens.
    pub m: u64,
    /// Columns: output features.
    pub n: u64,
    /// Summed dimension: input features.
    pub k: u64,
}

impl Gemm {
    /// One product, `[m, k]` by `[k, n]`.
    pub fn new(m: u64, n: u64, k: u64) -> Self {
        Self { groups: 1, m, n, k }
    }

    /// FLOPs of all groups.
    pub fn flops(&self) -> f64 {
        flops::product_flops((self.groups * self.m) as f64, self.n as f64, self.k as f64)
    }
}

/// Head counts and widths that one tensor-parallel rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalHeads {
    /// Query heads.
    pub heads: u64,
    /// Key/value heads, copies included: at least one.
    pub kv_heads: u64,
    /// Width of a query or key head, RoPE part included.
    pub qk_dim: u64,
    /// Width of a value head.
    pub v_dim: u64,
}

impl LocalHeads {
    /// Heads of one of `ways` ranks.
    pub fn new(model: &ModelSpec, ways: u64) -> Self {
        let attention = &model.attention;
        let (rope_dim, v_dim) =
            attention.mla.map_or((0, attention.head_dim), |mla| (mla.rope_dim, mla.value_dim));
        Self {
            heads: attention.heads / ways,
            kv_heads: attention.kv_heads.div_ceil(ways),
            qk_dim: attention.head_dim + rope_dim,
            v_dim,
        }
    }

    /// Elements of Q a token.
    pub fn q_width(&self) -> u64 {
        self.heads * self.qk_dim
    }

    /// Elements of K and V together a token.
    pub fn kv_width(&self) -> u64 {
        self.kv_heads * (self.qk_dim + self.v_dim)
    }

    /// Elements of the attention output a token.
    pub fn out_width(&self) -> u64 {
        self.heads * self.v_dim
    }
}

/// Projections of the attention block, forward.
pub fn attention_gemms(model: &ModelSpec, split: &Split) -> Vec<Gemm> {
    let (tokens, h) = (split.tokens(model), model.hidden);
    let heads = LocalHeads::new(model, split.tp);
    let out = Gemm::new(tokens, h, heads.out_width());
    let Some(mla) = model.attention.mla else {
        return vec![Gemm::new(tokens, heads.q_width() + heads.kv_width(), h), out];
    };
    let mut gemms = match mla.q_rank {
        Some(rank) => {
            vec![Gemm::new(tokens, rank, h), Gemm::new(tokens, heads.q_width(), rank)]
        }
        None => vec![Gemm::new(tokens, heads.q_width(), h)],
    };
    let up_width = heads.heads * (model.attention.head_dim + heads.v_dim);
    gemms.push(Gemm::new(tokens, mla.kv_rank + mla.rope_dim, h));
    gemms.push(Gemm::new(tokens, up_width, mla.kv_rank));
    gemms.push(out);
    gemms
}

/// [`attention_gemms`] of software that computes queries, keys and values by products of their own.
pub fn separate_attention_gemms(model: &ModelSpec, split: &Split) -> Vec<Gemm> {
    let together = attention_gemms(model, split);
    let (None, [_, out]) = (model.attention.mla, together.as_slice()) else { return together };
    let (heads, h) = (LocalHeads::new(model, split.tp), model.hidden);
    let (keys, values) = (heads.kv_heads * heads.qk_dim, heads.kv_heads * heads.v_dim);
    let mut gemms = [heads.q_width(), keys, values].map(|n| Gemm::new(out.m, n, h)).to_vec();
    gemms.push(*out);
    gemms
}

/// Input projections a feed-forward block has: gate and up, or up alone.
pub fn input_matrices(activation: Activation) -> u64 {
    if activation.is_gated() { 2 } else { 1 }
}

/// Products of the feed-forward block that every token takes (dense, or shared experts), forward.
pub fn dense_gemms(model: &ModelSpec, kind: LayerKind, split: &Split) -> Vec<Gemm> {
    let (tokens, h) = (split.tokens(model), model.hidden);
    let ffn = match (&model.moe, kind.moe) {
        (Some(moe), true) => moe.shared_ffn / split.tp,
        _ => model.mlp.ffn / split.tp,
    };
    if ffn == 0 {
        return vec![];
    }
    let inputs = input_matrices(model.mlp.activation);
    vec![Gemm::new(tokens, inputs * ffn, h), Gemm::new(tokens, h, ffn)]
}

/// [`dense_gemms`] of software that computes gate and up by products of their own.
pub fn separate_dense_gemms(model: &ModelSpec, kind: LayerKind, split: &Split) -> Vec<Gemm> {
    let matrices = input_matrices(model.mlp.activation);
    let apart = |(i, gemm): (usize, Gemm)| match i {
        0 => vec![Gemm { n: gemm.n / matrices, ..gemm }; matrices as usize],
        _ => vec![gemm],
    };
    dense_gemms(model, kind, split).into_iter().enumerate().flat_map(apart).collect()
}

/// Routed copies of a token: top-k, or the capacity that padding fills.
pub fn routed_copies(model: &ModelSpec) -> f64 {
    model.moe.as_ref().map_or(0.0, |moe| {
        let balanced = moe.top_k as f64;
        moe.capacity_factor.map_or(balanced, |factor| balanced * factor)
    })
}

/// Copies of a token on the fullest of `ep` ranks, over the tokens of a rank: [`routed_copies`]
/// times the imbalance, or the worst that these ranks can have. A capacity pads all ranks to one
/// size.
pub fn fullest_copies(model: &ModelSpec, ep: u64) -> f64 {
    let imbalance = model.moe.as_ref().map_or(1.0, |moe| moe.imbalance);
    routed_copies(model) * worst_imbalance(model, ep).map_or(1.0, |worst| imbalance.min(worst))
}

/// The imbalance if every token of an expert-parallel group went to as many experts of one rank as
/// there are: `ep·min(k, E/ep)/k`. `None` where that is no more than an even load, or a capacity
/// limits it.
pub fn worst_imbalance(model: &ModelSpec, ep: u64) -> Option<f64> {
    let moe = model.moe.as_ref().filter(|moe| moe.capacity_factor.is_none())?;
    let worst = (ep * moe.top_k.min(moe.experts / ep)) as f64 / moe.top_k as f64;
    (worst > 1.0).then_some(worst)
}

/// Products of the routed experts, forward, with balanced routing:
/// each local expert sees etp·ep·(T/t)·k_eff/E tokens.
pub fn expert_gemms(model: &ModelSpec, split: &Split) -> Vec<Gemm> {
    expert_gemms_of(model, split, routed_copies(model))
}

/// The same on the fullest rank.
pub fn fullest_expert_gemms(model: &ModelSpec, split: &Split) -> Vec<Gemm> {
    expert_gemms_of(model, split, fullest_copies(model, split.ep))
}

fn expert_gemms_of(model: &ModelSpec, split: &Split, copies: f64) -> Vec<Gemm> {
    let Some(moe) = &model.moe else { return vec![] };
    let per_rank = split.resident_tokens(model) as f64 * copies;
    let m = (per_rank * (split.ep * split.etp) as f64 / moe.experts as f64).ceil() as u64;
    let (groups, ffn) = (moe.experts / split.ep, moe.ffn / split.etp);
    let inputs = input_matrices(model.mlp.activation);
    vec![
        Gemm { groups, m, n: inputs * ffn, k: model.hidden },
        Gemm { groups, m, n: model.hidden, k: ffn },
    ]
}

/// Bytes that memory-bound kernels of one layer read and write, one entry a kernel.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Streams {
    /// Forward.
    pub forward: Vec<f64>,
    /// Backward.
    pub backward: Vec<f64>,
    /// Re-run by selective recomputation.
    pub selective: Vec<f64>,
}

/// Memory-bound kernels of one layer: norms, residual adds (with dropout), RoPE, the activation
/// function. Sorting tokens by expert is left out: it depends on the software.
///
/// Bytes per element: a norm reads and writes `2e`, backward `3e` (input and gradient in, one out);
/// a residual add `3e` either way (backward adds the branches' gradients); RoPE `2e` either way, of
/// the columns that it rotates in place; a gated activation `3e` forward and `5e` backward, a plain
/// one `2e` and `3e`.
pub fn streams(model: &ModelSpec, kind: LayerKind, split: &Split, dtype: Dtype) -> Streams {
    let e = dtype.storage_bytes();
    let resident = split.resident_tokens(model) as f64;
    let tokens = split.tokens(model) as f64;
    let hidden = resident * model.hidden as f64;
    let mask = if model.dropout > 0.0 { 1.0 } else { 0.0 };
    let heads = LocalHeads::new(model, split.tp);
    let rotated = model.attention.rotary_dim.unwrap_or(heads.qk_dim);
    let rope = tokens * ((heads.heads + heads.kv_heads) * rotated) as f64 * 2.0 * e;
    let mut out = Streams::default();
    for _ in 0..model.norm.per_layer {
        out.forward.push(hidden * 2.0 * e);
        out.backward.push(hidden * 3.0 * e);
        out.selective.push(hidden * 2.0 * e);
    }
    for _ in 0..2 {
        out.forward.push(hidden * (3.0 * e + mask));
        out.backward.push(hidden * (3.0 * e + mask));
    }
    out.forward.push(rope);
    out.backward.push(rope);
    let (forward_e, backward_e) =
        if model.mlp.activation.is_gated() { (3.0, 5.0) } else { (2.0, 3.0) };
    let activated = activated_elements(model, kind, split);
    out.forward.push(activated * forward_e * e);
    out.backward.push(activated * backward_e * e);
    out.selective.push(activated * forward_e * e);
    out
}

/// Elements of the routed copies of tokens on the fullest rank: the dispatch, or the combine.
pub fn routed_elements(model: &ModelSpec, split: &Split) -> f64 {
    let tokens = split.resident_tokens(model) as f64;
    let copies = fullest_copies(model, split.ep);
    communication::dispatched_elements(tokens, copies, model.hidden as f64)
}

/// Elements that come out of the activation function on one rank.
fn activated_elements(model: &ModelSpec, kind: LayerKind, split: &Split) -> f64 {
    let tokens = split.tokens(model) as f64;
    match (&model.moe, kind.moe) {
        (Some(moe), true) => {
            let routed = split.resident_tokens(model) as f64 * fullest_copies(model, split.ep);
            routed * moe.ffn as f64 + tokens * (moe.shared_ffn / split.tp) as f64
        }
        _ => tokens * (model.mlp.ffn / split.tp) as f64,
    }
}

/// Activation bytes one layer keeps from a micro-batch's forward pass to its backward pass.
///
/// With dropout and unfused attention this is Korthikanti Table 2, `34sbh + 5as²b` before division.
/// With RMSNorm, grouped queries, a gated block and fused attention it is
/// `8h + 2(q + k + v) + 2q + 4a + 6f` bytes a token. The operators' shares are in
/// [`crate::formulas::activation`]. The log-sum-exp, `4a`, is counted for unfused attention too.
pub fn saved_bytes(
    model: &ModelSpec,
    kind: LayerKind,
    split: &Split,
    dtype: Dtype,
    fused_attention: bool,
    recompute: Recompute,
) -> f64 {
    let e = dtype.storage_bytes();
    let resident = split.resident_tokens(model) as f64;
    let hidden = resident * model.hidden as f64;
    if recompute == Recompute::Full {
        return e * hidden;
    }
    let selective = recompute == Recompute::Selective;
    let mask = if model.dropout > 0.0 { activation::dropout_mask_bytes(hidden) } else { 0.0 };
    // Of norms and the activation function: computed again, or kept.
    let outputs = if selective && fused_attention { 0.0 } else { 1.0 };
    let norms = activation::norm_bytes(hidden, e, model.norm.per_layer as f64, 2.0 * outputs);
    let attention = attention_saved(model, split, e, outputs)
        + if fused_attention { 0.0 } else { score_bytes(model, kind, split, e, selective) };
    let inputs = input_matrices(model.mlp.activation) as f64;
    let activated = activated_elements(model, kind, split);
    let feed_forward = activation::feed_forward_bytes(activated, e, inputs, outputs);
    norms + mask + attention + feed_forward + moe_saved(model, kind, split, e)
}

/// Tokens of a block of logits, where these exist for a block at a time: as many as make the block
/// about as large as the output layer's input, in steps of 64 (Liger Kernel, arXiv 2410.10989,
/// section 3.2).
pub fn loss_rows(tokens: u64, hidden: u64, columns: u64) -> u64 {
    (tokens * hidden).div_ceil(columns.max(1)).next_multiple_of(64).min(tokens)
}

/// Bytes of the sums over tensor-parallel ranks that a layer's backward pass reads: those of the
/// attention block, and of the feed-forward block where a norm follows it.
pub fn reduced_bytes(model: &ModelSpec, split: &Split, dtype: Dtype) -> f64 {
    if split.tp == 1 {
        return 0.0;
    }
    let after_blocks = model.norm.per_layer > 2;
    let sums = if after_blocks { 2.0 } else { 1.0 };
    let hidden = split.resident_tokens(model) as f64 * model.hidden as f64;
    sums * hidden * dtype.storage_bytes()
}

/// Activation bytes one layer keeps where the backward pass repeats every second product: the
/// layer's input and output, queries and values, the attention core's result, and one input
/// projection of a gated block.
pub fn every_second_product_bytes(
    model: &ModelSpec,
    kind: LayerKind,
    split: &Split,
    dtype: Dtype,
) -> f64 {
    let e = dtype.storage_bytes();
    let hidden = split.resident_tokens(model) as f64 * model.hidden as f64;
    let heads = LocalHeads::new(model, split.tp);
    let widths = heads.q_width() + heads.kv_heads * heads.v_dim + heads.out_width();
    let tokens = split.tokens(model) as f64;
    let attention = activation::attention_bytes(tokens, widths as f64, heads.heads as f64, e);
    2.0 * e * hidden + attention + e * activated_elements(model, kind, split)
}

/// Q, K, V, the attention output and its log-sum-exp, bytes; for MLA also the latent vectors before
/// their norms, and a share `normed` of those behind, which the up-projections read.
///
/// With Ulysses the output is kept twice: by heads, for attention, and by tokens, for the
/// projection behind it. If there are fewer key/value heads than Ulysses ranks, ranks keep copies.
fn attention_saved(model: &ModelSpec, split: &Split, e: f64, normed: f64) -> f64 {
    let tokens = split.tokens(model) as f64;
    let heads = LocalHeads::new(model, split.tp);
    let outputs = if split.cp_ulysses > 1 { 2 } else { 1 };
    let widths = heads.q_width() + outputs * heads.out_width();
    let copies = split.cp_ulysses.div_ceil(heads.kv_heads).max(1);
    let (kv, latents) = match model.attention.mla {
        Some(mla) => {
            (heads.heads * (heads.qk_dim + heads.v_dim), mla.q_rank.unwrap_or(0) + mla.kv_rank)
        }
        None => (copies * heads.kv_width(), 0),
    };
    let width = (widths + kv) as f64 + (1.0 + normed) * latents as f64;
    activation::attention_bytes(tokens, width, heads.heads as f64, e)
}

/// Products that expand latent attention's compressed queries, keys and values, forward.
pub fn up_projections(model: &ModelSpec, split: &Split) -> Vec<Gemm> {
    let Some(mla) = model.attention.mla else { return vec![] };
    let tokens = split.tokens(model);
    let heads = LocalHeads::new(model, split.tp);
    let keys_and_values = heads.heads * (model.attention.head_dim + heads.v_dim);
    let queries = mla.q_rank.map(|rank| Gemm::new(tokens, heads.q_width(), rank));
    queries.into_iter().chain([Gemm::new(tokens, keys_and_values, mla.kv_rank)]).collect()
}

/// Bytes of the results of [`up_projections`], one layer and micro-batch.
pub fn up_projected_bytes(model: &ModelSpec, split: &Split, dtype: Dtype) -> f64 {
    let Some(mla) = model.attention.mla else { return 0.0 };
    let heads = LocalHeads::new(model, split.tp);
    let queries = mla.q_rank.map_or(0, |_| heads.q_width());
    let widths = queries + heads.heads * (heads.qk_dim + heads.v_dim);
    split.tokens(model) as f64 * widths as f64 * dtype.storage_bytes()
}

/// Scores that unfused attention keeps.
fn score_bytes(model: &ModelSpec, kind: LayerKind, split: &Split, e: f64, selective: bool) -> f64 {
    if selective {
        return 0.0;
    }
    let heads = LocalHeads::new(model, split.tp).heads as f64;
    let (tokens, keys) = (split.tokens(model) as f64, keys(model, kind) as f64);
    activation::score_bytes(tokens, heads, keys, e, model.dropout > 0.0)
}

/// Router scores, permuted inputs and expert outputs.
fn moe_saved(model: &ModelSpec, kind: LayerKind, split: &Split, e: f64) -> f64 {
    let (Some(moe), true) = (&model.moe, kind.moe) else { return 0.0 };
    let resident = split.resident_tokens(model) as f64;
    let copies = fullest_copies(model, split.ep) * split.etp as f64;
    activation::routing_bytes(resident, moe.experts as f64, copies, model.hidden as f64, e)
}

/// Model FLOPs of one forward pass over `tokens` tokens: two a multiply-add, attention as in
/// [`core_flops`] (Megatron's convention, SC'21 appendix), output layer included, experts at top-k
/// but for the tokens that a capacity factor below 1 drops at least.
pub fn forward_flops(model: &ModelSpec, tokens: f64) -> f64 {
    let split = Split::WHOLE;
    let per_sequence: f64 = (0..model.layers)
        .map(|index| layer_forward_flops(model, model.layer_kind(index), &split))
        .sum::<f64>()
        + Gemm::new(model.seq_len, model.vocab, model.hidden).flops();
    per_sequence * tokens / model.seq_len as f64
}

/// Model FLOPs of one layer's forward pass over one sequence.
fn layer_forward_flops(model: &ModelSpec, kind: LayerKind, split: &Split) -> f64 {
    let dense: f64 = attention_gemms(model, split)
        .iter()
        .chain(&dense_gemms(model, kind, split))
        .map(Gemm::flops)
        .sum();
    let routed = match (&model.moe, kind.moe) {
        (Some(moe), true) => {
            let matrices = input_matrices(model.mlp.activation) + 1;
            let h = model.hidden;
            let expert = Gemm::new(model.seq_len * moe.top_k, matrices * moe.ffn, h);
            let kept = moe.capacity_factor.map_or(1.0, |factor| factor.min(1.0));
            kept * expert.flops() + Gemm::new(model.seq_len, moe.experts, h).flops()
        }
        _ => 0.0,
    };
    core_flops(model, kind) + dense + routed
}

/// FLOPs of attention scores and their product with V, forward, one layer and sequence:
/// `2sk'a(d_qk + d_v)` for `a` heads and `k'` keys a query. As in Megatron's convention the causal
/// mask earns no credit: `k'` is `s`, and in a windowed layer `min(s, window)`.
pub fn core_flops(model: &ModelSpec, kind: LayerKind) -> f64 {
    let heads = LocalHeads::new(model, 1);
    let pairs = model.seq_len as f64 * keys(model, kind) as f64;
    attention::core_flops(pairs, (heads.heads * (heads.qk_dim + heads.v_dim)) as f64)
}

/// Most keys that a query reads.
fn keys(model: &ModelSpec, kind: LayerKind) -> u64 {
    match model.attention.window {
        Some(window) if kind.windowed => window.tokens.min(model.seq_len),
        _ => model.seq_len,
    }
}
