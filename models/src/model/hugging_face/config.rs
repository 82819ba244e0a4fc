//! `config.json` as it stands in a file.

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use serde_yaml::Spanned;

use crate::model::raw::Maybe;

/// A value that may be missing (use the class's default) or null (switched off).
type OrNull<T> = Option<Maybe<T>>;

/// The same of a mapping.
type OrNullStruct<T> = Option<Option<T>>;

/// The keys of all supported architectures together.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct HfConfig {
    pub model_type: Spanned<String>,
    #[serde(rename = "_name_or_path")]
    pub name_or_path: Maybe<String>,
    pub num_hidden_layers: Maybe<u64>,
    pub hidden_size: Maybe<u64>,
    pub num_attention_heads: Maybe<u64>,
    pub n_layer: Maybe<u64>,
    pub n_embd: Maybe<u64>,
    pub n_head: Maybe<u64>,
    pub n_inner: Maybe<u64>,
    pub n_positions: Maybe<u64>,
    #[serde(default, deserialize_with = "or_null")]
    pub num_key_value_heads: OrNull<u64>,
    pub head_dim: Maybe<u64>,
    pub intermediate_size: Maybe<u64>,
    pub vocab_size: Maybe<u64>,
    pub max_position_embeddings: Maybe<u64>,
    pub hidden_act: Maybe<String>,
    pub activation_function: Maybe<String>,
    pub hidden_activation: Maybe<String>,
    pub tie_word_embeddings: Maybe<bool>,
    pub attention_bias: Maybe<bool>,
    pub mlp_bias: Maybe<bool>,
    pub attention_dropout: Maybe<f64>,
    pub attn_pdrop: Maybe<f64>,
    pub resid_pdrop: Maybe<f64>,
    pub embd_pdrop: Maybe<f64>,
    #[serde(default, deserialize_with = "or_null")]
    pub sliding_window: OrNull<u64>,
    pub use_sliding_window: Maybe<bool>,
    pub max_window_layers: Maybe<u64>,
    pub layer_types: Maybe<Vec<String>>,
    #[serde(default, deserialize_with = "or_null")]
    pub attn_logit_softcapping: OrNull<f64>,
    #[serde(default, deserialize_with = "or_null")]
    pub final_logit_softcapping: OrNull<f64>,
    pub num_local_experts: Maybe<u64>,
    pub num_experts: Maybe<u64>,
    pub n_routed_experts: Maybe<u64>,
    pub num_experts_per_tok: Maybe<u64>,
    pub moe_intermediate_size: Maybe<u64>,
    pub n_group: Maybe<u64>,
    pub norm_topk_prob: Maybe<bool>,
    pub routed_scaling_factor: Maybe<f64>,
    pub topk_group: Maybe<u64>,
    #[serde(default, deserialize_with = "or_null")]
    pub n_shared_experts: OrNull<u64>,
    pub first_k_dense_replace: Maybe<u64>,
    pub moe_layer_freq: Maybe<u64>,
    pub decoder_sparse_step: Maybe<u64>,
    pub mlp_only_layers: Maybe<Vec<u64>>,
    pub output_router_logits: Maybe<bool>,
    pub router_aux_loss_coef: Maybe<f64>,
    pub router_jitter_noise: Maybe<f64>,
    pub experts_per_token: Maybe<u64>,
    pub swiglu_alpha: Maybe<f64>,
    pub swiglu_limit: Maybe<f64>,
    #[serde(default, deserialize_with = "or_null")]
    pub q_lora_rank: OrNull<u64>,
    pub kv_lora_rank: Maybe<u64>,
    pub qk_nope_head_dim: Maybe<u64>,
    pub qk_rope_head_dim: Maybe<u64>,
    pub v_head_dim: Maybe<u64>,
    pub num_nextn_predict_layers: Maybe<u64>,
    pub rms_norm_eps: Maybe<f64>,
    pub rope_theta: Maybe<f64>,
    pub query_pre_attn_scalar: Maybe<f64>,
    pub partial_rotary_factor: Maybe<f64>,
    pub layer_norm_epsilon: Maybe<f64>,
    pub layer_norm_eps: Maybe<f64>,
    pub norm_epsilon: Maybe<f64>,
    pub embedding_multiplier: Maybe<f64>,
    pub attention_multiplier: Maybe<f64>,
    pub logits_scaling: Maybe<f64>,
    pub residual_multiplier: Maybe<f64>,
    pub residual_dropout: Maybe<f64>,
    pub embedding_dropout: Maybe<f64>,
    pub use_bias: Maybe<bool>,
    pub hidden_dropout: Maybe<f64>,
    pub use_qkv_bias: Maybe<bool>,
    pub qk_layernorm: Maybe<bool>,
    pub use_parallel_residual: Maybe<bool>,
    pub use_bidirectional_attention: Maybe<bool>,
    pub rope_interleave: Maybe<bool>,
    #[serde(default, deserialize_with = "or_null")]
    pub rope_scaling: OrNullStruct<RopeScaling>,
    pub rope_parameters: Option<IgnoredAny>,
    pub quantization_config: Option<IgnoredAny>,
    pub add_cross_attention: Maybe<bool>,
    pub is_encoder_decoder: Maybe<bool>,
    pub scale_attn_weights: Maybe<bool>,
    pub scale_attn_by_inverse_layer_idx: Maybe<bool>,
}

/// How RoPE's frequencies are scaled; what is neither YaRN nor the default is only named.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct RopeScaling {
    pub rope_type: Maybe<String>,
    /// The older name; files may have both.
    pub r#type: Maybe<String>,
    pub factor: Maybe<f64>,
    pub original_max_position_embeddings: Maybe<u64>,
    pub beta_fast: Maybe<f64>,
    pub beta_slow: Maybe<f64>,
    pub truncate: Maybe<bool>,
    pub mscale: Option<IgnoredAny>,
    pub mscale_all_dim: Option<IgnoredAny>,
    pub attention_factor: Option<IgnoredAny>,
}

impl RopeScaling {
    pub fn kind(&self) -> Option<&str> {
        self.rope_type.as_ref().or(self.r#type.as_ref()).map(|kind| kind.value.as_str())
    }
}

fn or_null<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    from: D,
) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(from).map(Some)
}
