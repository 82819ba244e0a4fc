//! A model as it stands in a file: every value with its place, nothing checked.

use serde::Deserialize;
use serde_yaml::Spanned;

use super::spec::{Activation, AuxOver, ExpertTensors, Gelu, NormKind, Router};

/// A value that may be left out.
pub(super) type Maybe<T> = Option<Spanned<T>>;

/// Our YAML, key by key; `shipped/models/llama70b.yaml` explains each.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawModel {
    pub name: Maybe<String>,
    pub layers: Spanned<u64>,
    pub hidden: Spanned<u64>,
    pub heads: Spanned<u64>,
    pub kv_heads: Maybe<u64>,
    pub head_dim: Maybe<u64>,
    pub rotary_dim: Maybe<u64>,
    pub ffn: Spanned<u64>,
    pub vocab: Spanned<u64>,
    pub activation: Maybe<Activation>,
    pub norm: Maybe<NormKind>,
    pub norms_per_layer: Maybe<u64>,
    pub positions: Maybe<RawPositions>,
    pub max_positions: Maybe<u64>,
    pub tied_embeddings: Maybe<bool>,
    pub bias: Maybe<bool>,
    pub qkv_bias: Maybe<bool>,
    pub out_bias: Maybe<bool>,
    pub mlp_bias: Maybe<bool>,
    pub qk_norm: Maybe<bool>,
    pub sinks: Maybe<bool>,
    pub attention_soft_cap: Maybe<f64>,
    pub final_soft_cap: Maybe<f64>,
    pub dropout: Maybe<f64>,
    pub norm_eps: Maybe<f64>,
    pub norm_unit_offset: Maybe<bool>,
    pub rope_theta: Maybe<f64>,
    pub yarn: Option<RawYarn>,
    pub query_pre_attn_scalar: Maybe<f64>,
    pub embedding_scale: Maybe<f64>,
    pub gelu: Maybe<Gelu>,
    pub window: Option<RawWindow>,
    pub mla: Option<RawMla>,
    pub moe: Option<RawMoe>,
    pub seq_len: Maybe<u64>,
    pub global_batch: Maybe<u64>,
    /// What another format's reader had to assume.
    #[serde(skip)]
    pub assumptions: Vec<String>,
    /// Requests of another format that nothing here can compute.
    #[serde(skip)]
    pub unknown: Vec<String>,
}

impl RawModel {
    /// A model with only the required keys.
    pub fn new(
        layers: Spanned<u64>,
        hidden: Spanned<u64>,
        heads: Spanned<u64>,
        ffn: Spanned<u64>,
        vocab: Spanned<u64>,
    ) -> Self {
        Self {
            layers,
            hidden,
            heads,
            ffn,
            vocab,
            name: None,
            kv_heads: None,
            head_dim: None,
            rotary_dim: None,
            activation: None,
            norm: None,
            norms_per_layer: None,
            positions: None,
            max_positions: None,
            tied_embeddings: None,
            bias: None,
            qkv_bias: None,
            out_bias: None,
            mlp_bias: None,
            qk_norm: None,
            sinks: None,
            attention_soft_cap: None,
            final_soft_cap: None,
            dropout: None,
            norm_eps: None,
            norm_unit_offset: None,
            rope_theta: None,
            yarn: None,
            query_pre_attn_scalar: None,
            embedding_scale: None,
            gelu: None,
            window: None,
            mla: None,
            moe: None,
            seq_len: None,
            global_batch: None,
            assumptions: Vec::new(),
            unknown: Vec::new(),
        }
    }
}

/// How positions enter; the table's rows are `max_positions`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RawPositions {
    Rope,
    Learned,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawWindow {
    pub tokens: Spanned<u64>,
    pub full_every: Maybe<u64>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawYarn {
    pub factor: Spanned<f64>,
    pub original_positions: Spanned<u64>,
    pub beta_fast: Maybe<f64>,
    pub beta_slow: Maybe<f64>,
    pub truncate: Maybe<bool>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawMla {
    pub q_rank: Maybe<u64>,
    pub kv_rank: Spanned<u64>,
    pub rope_dim: Spanned<u64>,
    pub value_dim: Spanned<u64>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawMoe {
    pub experts: Spanned<u64>,
    pub top_k: Spanned<u64>,
    pub ffn: Maybe<u64>,
    pub shared_ffn: Maybe<u64>,
    pub first_dense: Maybe<u64>,
    pub every: Maybe<u64>,
    pub capacity_factor: Maybe<f64>,
    pub imbalance: Maybe<f64>,
    pub router: Maybe<Router>,
    pub renormalised: Maybe<bool>,
    pub groups: Maybe<u64>,
    pub kept_groups: Maybe<u64>,
    pub weight_scale: Maybe<f64>,
    pub aux_loss: Maybe<f64>,
    pub aux_over: Maybe<AuxOver>,
    pub z_loss: Maybe<f64>,
    pub bias_update_rate: Maybe<f64>,
    pub biased: Maybe<bool>,
    #[serde(skip)]
    pub tensors: ExpertTensors,
}
