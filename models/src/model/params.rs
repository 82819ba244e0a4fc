//! How many parameters a model has, part by part.
//!
//! Counts are elements, not bytes, before the vocabulary is padded. Symbols as in the crate: `h`
//! hidden, `f` feed-forward width, `a` and `k` query and key/value heads, `d` head width, `V`
//! vocabulary, `E` experts.

use super::spec::{LayerKind, Mla, ModelSpec, Moe, NormKind, Positions, Router};

/// Parameters of one layer, grouped by what a mesh divides them by.
///
/// | field | tensor parallel | expert parallel |
/// |---|---|---|
/// | `attention_matrices`, `mlp_matrices` | divided by tp | whole |
/// | `expert_matrices` | divided by etp | divided by ep |
/// | `router`, `replicated` | whole | whole |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerParams {
    /// Projections of attention that split by heads, with the biases that split along. Key and
    /// value heads are here once; [`key_value`] says how much is copied where tp exceeds them.
    pub attention_matrices: u64,
    /// Dense block, or the shared experts of a mixture, with the biases that split along.
    pub mlp_matrices: u64,
    /// Routed experts, all of them, biases included.
    pub expert_matrices: u64,
    /// Router of a mixture, with its selection bias.
    pub router: u64,
    /// Norms, the biases added after a sum over ranks (attention output, second matrix of the
    /// dense block), and MLA's down-projections, which every tensor-parallel rank holds whole.
    pub replicated: u64,
}

impl LayerParams {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.attention_matrices
            + self.mlp_matrices
            + self.expert_matrices
            + self.router
            + self.replicated
    }
}

/// Parameters of one layer of `kind`.
pub fn layer(spec: &ModelSpec, kind: LayerKind) -> LayerParams {
    let moe = spec.moe.as_ref().filter(|_| kind.moe);
    let (attention_matrices, attention_replicated) = attention(spec);
    let norms = spec.norm.per_layer * norm(spec);
    let (mlp_matrices, mlp_replicated) = match moe {
        Some(moe) => dense(spec, moe.shared_ffn, spec.mlp.bias),
        None => dense(spec, spec.mlp.ffn, spec.mlp.bias),
    };
    LayerParams {
        attention_matrices,
        mlp_matrices,
        expert_matrices: moe.map_or(0, |moe| moe.experts * expert(spec, moe)),
        router: moe.map_or(0, |moe| router(spec, moe)),
        replicated: attention_replicated + norms + mlp_replicated,
    }
}

/// Parameters of one layer of `kind` that one token meets: `top_k` experts instead of all.
pub fn layer_active(spec: &ModelSpec, kind: LayerKind) -> u64 {
    let all = layer(spec, kind).total();
    let idle = spec.moe.as_ref().filter(|_| kind.moe);
    all - idle.map_or(0, |moe| (moe.experts - moe.top_k) * expert(spec, moe))
}

/// Attention: what tensor parallelism divides, and what it does not.
fn attention(spec: &ModelSpec) -> (u64, u64) {
    let attention = &spec.attention;
    let out_bias = if attention.out_bias { spec.hidden } else { 0 };
    let (matrices, whole) = match &attention.mla {
        Some(mla) => latent(spec, *mla),
        None => (grouped_query(spec), 0),
    };
    // One scale per element of a head, shared by all heads (Qwen 3).
    let qk_norm = if attention.qk_norm { 2 * attention.head_dim } else { 0 };
    (matrices, whole + out_bias + qk_norm)
}

/// Q `h·ad`, K and V `2h·kd`, O `ad·h`, QKV biases, sinks `a` (Ainslie et al. 2023, section 2.2;
/// multi-head attention is `k = a`).
fn grouped_query(spec: &ModelSpec) -> u64 {
    let query = spec.attention.heads * spec.attention.head_dim;
    let bias = if spec.attention.qkv_bias { query } else { 0 };
    let sinks = if spec.attention.sinks { spec.attention.heads } else { 0 };
    2 * spec.hidden * query + bias + key_value(spec) + sinks
}

/// K and V projections with their biases: `2·(h + 1)·kd`. A tensor-parallel degree above `k` holds
/// copies of them. MLA has none: its keys and values split by query heads.
pub fn key_value(spec: &ModelSpec) -> u64 {
    let attention = &spec.attention;
    let inputs = spec.hidden + u64::from(attention.qkv_bias);
    if attention.mla.is_some() { 0 } else { 2 * inputs * attention.kv_heads * attention.head_dim }
}

/// Multi-head latent attention (DeepSeek-V2, section 2.1, equations 9 to 19): up-projections and
/// output, which split by heads; then down-projections with their norms, which do not.
fn latent(spec: &ModelSpec, mla: Mla) -> (u64, u64) {
    let (h, a, d) = (spec.hidden, spec.attention.heads, spec.attention.head_dim);
    let query = a * (d + mla.rope_dim);
    let (query_up, query_down) = match mla.q_rank {
        Some(rank) => (rank * query, h * rank + rank),
        None => (h * query, 0),
    };
    let key_value_up = mla.kv_rank * a * (d + mla.value_dim);
    let key_value_down = h * (mla.kv_rank + mla.rope_dim) + mla.kv_rank;
    let out = a * mla.value_dim * h;
    (query_up + key_value_up + out, query_down + key_value_down + latent_bias(spec, mla))
}

/// With `qkv_bias`, MLA adds one to each down-projection (DeepSeek-V3's `attention_bias`); a query
/// that is not compressed has none.
fn latent_bias(spec: &ModelSpec, mla: Mla) -> u64 {
    let width = mla.q_rank.unwrap_or(0) + mla.kv_rank + mla.rope_dim;
    if spec.attention.qkv_bias { width } else { 0 }
}

/// All of attention in one layer, without the layer's norms.
pub fn attention_total(spec: &ModelSpec) -> u64 {
    let (matrices, whole) = attention(spec);
    matrices + whole
}

/// A feed-forward block of width `ffn`: `2hf`, gated `3hf`; biases `f` a matrix in, `h` for the one
/// out (Shazeer 2020, section 2).
fn dense(spec: &ModelSpec, ffn: u64, bias: bool) -> (u64, u64) {
    let matrices_in = if spec.mlp.activation.is_gated() { 2 } else { 1 };
    let weights = (matrices_in + 1) * spec.hidden * ffn;
    let biased = bias && ffn > 0;
    if biased { (weights + matrices_in * ffn, spec.hidden) } else { (weights, 0) }
}

/// One routed expert.
pub fn expert(spec: &ModelSpec, moe: &Moe) -> u64 {
    let (matrices, whole) = dense(spec, moe.ffn, spec.expert_bias());
    matrices + whole
}

/// Router: `h·E`; a bias adds `E`, and so does a selection bias (DeepSeek-V3, section 2.1.2). That
/// has no gradient, but is stored and counted like a parameter, as in the published checkpoints.
fn router(spec: &ModelSpec, moe: &Moe) -> u64 {
    let biases = u64::from(moe.biased) + u64::from(moe.router == Router::SigmoidBias);
    (spec.hidden + biases) * moe.experts
}

/// One norm: scale, and for LayerNorm shift.
pub fn norm(spec: &ModelSpec) -> u64 {
    match spec.norm.kind {
        NormKind::LayerNorm => 2 * spec.hidden,
        NormKind::RmsNorm => spec.hidden,
    }
}

/// Token embedding, `V·h`; with tied embeddings also the output layer.
pub fn embedding(spec: &ModelSpec) -> u64 {
    spec.vocab * spec.hidden
}

/// Table of learned positions; 0 with RoPE.
pub fn positions(spec: &ModelSpec) -> u64 {
    match spec.positions {
        Positions::Learned { max } => max * spec.hidden,
        Positions::Rope => 0,
    }
}

/// Output layer, `V·h`; 0 where it shares the embedding's weights.
pub fn head(spec: &ModelSpec) -> u64 {
    if spec.tied_embeddings { 0 } else { embedding(spec) }
}

/// All parameters; shared ones count once.
///
/// For a GPT this is SC'21 equation 2 plus the final norm, which the paper leaves out.
pub fn total(spec: &ModelSpec) -> u64 {
    outside_layers(spec) + over_layers(spec, |kind| layer(spec, kind).total())
}

/// Parameters one token meets, both embeddings included: `top_k` of the experts.
pub fn active(spec: &ModelSpec) -> u64 {
    outside_layers(spec) + over_layers(spec, |kind| layer_active(spec, kind))
}

fn outside_layers(spec: &ModelSpec) -> u64 {
    embedding(spec) + positions(spec) + head(spec) + norm(spec)
}

fn over_layers(spec: &ModelSpec, count: impl Fn(LayerKind) -> u64) -> u64 {
    (0..spec.layers).map(|index| count(spec.layer_kind(index))).sum()
}

/// Parameters of the model's largest kind of layer, whether or not a layer of it exists.
pub(super) fn largest_layer(spec: &ModelSpec) -> u64 {
    let count = |moe| layer(spec, LayerKind { moe, windowed: false }).total();
    count(true).max(count(false))
}
