//! The raw model of each architecture.

use std::fmt::Display;

use serde_yaml::Spanned;

use super::{Reader, implied, unplaced};
use crate::input::InputError;
use crate::model::raw::{Maybe, RawMla, RawModel, RawMoe, RawPositions, RawYarn};
use crate::model::spec::{Activation, ExpertTensors, NormKind};

impl Reader<'_> {
    /// The common part of architectures with RMSNorm, RoPE and a gated block; `tied` is the class's
    /// default for `tie_word_embeddings`.
    pub(super) fn llama_like(&self, tied: bool) -> Result<RawModel, InputError> {
        self.no_attention_dropout()?;
        self.with_rope(tied, self.gated_activation()?)
    }

    /// The common part of architectures with RoPE, whatever their block and dropout.
    fn with_rope(
        &self,
        tied: bool,
        activation: Spanned<Activation>,
    ) -> Result<RawModel, InputError> {
        let config = self.config;
        Ok(RawModel {
            name: self.name(),
            kv_heads: self.kv_heads()?,
            head_dim: config.head_dim.clone(),
            activation: Some(activation),
            max_positions: Some(
                self.need("max_position_embeddings", &config.max_position_embeddings)?,
            ),
            tied_embeddings: config.tie_word_embeddings.clone().or_else(|| implied(tied)),
            qkv_bias: config.attention_bias.clone(),
            out_bias: config.attention_bias.clone(),
            assumptions: self.grouped_query_assumption(),
            norm_eps: config.rms_norm_eps.clone().or_else(|| implied(1e-6)),
            rope_theta: config.rope_theta.clone(),
            yarn: self.yarn(),
            gelu: implied(self.gelu()),
            unknown: self.unknown(),
            ..RawModel::new(
                self.need("num_hidden_layers", &config.num_hidden_layers)?,
                self.need("hidden_size", &config.hidden_size)?,
                self.need("num_attention_heads", &config.num_attention_heads)?,
                self.need("intermediate_size", &config.intermediate_size)?,
                self.need("vocab_size", &config.vocab_size)?,
            )
        })
    }

    pub(super) fn llama(&self) -> Result<RawModel, InputError> {
        Ok(RawModel { mlp_bias: self.config.mlp_bias.clone(), ..self.llama_like(false)? })
    }

    /// Biases are not configurable; a window is there unless null.
    pub(super) fn mistral(&self) -> Result<RawModel, InputError> {
        let window = self.window(implied(4096), None);
        Ok(RawModel { window, qkv_bias: None, out_bias: None, ..self.llama_like(false)? })
    }

    pub(super) fn qwen2(&self) -> Result<RawModel, InputError> {
        Ok(RawModel {
            window: self.switched_window()?,
            qkv_bias: implied(true),
            out_bias: None,
            ..self.llama_like(false)?
        })
    }

    pub(super) fn qwen3(&self) -> Result<RawModel, InputError> {
        let raw = self.llama_like(false)?;
        let head_dim = raw.head_dim.clone().or_else(|| implied(128));
        Ok(RawModel { window: self.switched_window()?, qk_norm: implied(true), head_dim, ..raw })
    }

    pub(super) fn qwen3_moe(&self) -> Result<RawModel, InputError> {
        let config = self.config;
        let moe = RawMoe {
            ffn: Some(self.need("moe_intermediate_size", &config.moe_intermediate_size)?),
            first_dense: self.leading_dense()?,
            every: config.decoder_sparse_step.clone(),
            renormalised: config.norm_topk_prob.clone().or_else(|| implied(false)),
            ..self.experts("num_experts", &config.num_experts)?
        };
        Ok(RawModel {
            window: self.switched_window()?,
            qk_norm: implied(true),
            moe: Some(moe),
            ..self.llama_like(false)?
        })
    }

    pub(super) fn mixtral(&self) -> Result<RawModel, InputError> {
        let moe = RawMoe {
            renormalised: implied(true),
            tensors: ExpertTensors::BlockSparseMoe,
            ..self.experts("num_local_experts", &self.config.num_local_experts)?
        };
        let window = self.window(None, None);
        Ok(RawModel {
            window,
            moe: Some(moe),
            qkv_bias: None,
            out_bias: None,
            norm_eps: self.config.rms_norm_eps.clone().or_else(|| implied(1e-5)),
            rope_theta: self.config.rope_theta.clone().or_else(|| implied(1e6)),
            ..self.llama_like(false)?
        })
    }

    /// Scaled embeddings, and norms that store their distance from 1.
    pub(super) fn gemma(&self) -> Result<RawModel, InputError> {
        let raw = self.llama_like(true)?;
        Ok(RawModel {
            head_dim: raw.head_dim.clone().or_else(|| implied(256)),
            norm_unit_offset: implied(true),
            embedding_scale: implied((raw.hidden.value as f64).sqrt()),
            ..raw
        })
    }

    /// Four norms a layer, caps on scores and logits, every other layer windowed.
    pub(super) fn gemma2(&self) -> Result<RawModel, InputError> {
        let config = self.config;
        let raw = self.llama_like(true)?;
        let every = self.full_every()?.unwrap_or_else(|| implied(2));
        Ok(RawModel {
            head_dim: raw.head_dim.clone().or_else(|| implied(256)),
            norms_per_layer: implied(4),
            window: self.window(implied(4096), every),
            attention_soft_cap: config
                .attn_logit_softcapping
                .clone()
                .unwrap_or_else(|| implied(50.0)),
            final_soft_cap: config.final_logit_softcapping.clone().unwrap_or_else(|| implied(30.0)),
            norm_unit_offset: implied(true),
            query_pre_attn_scalar: config.query_pre_attn_scalar.clone().or_else(|| implied(256.0)),
            embedding_scale: implied((raw.hidden.value as f64).sqrt()),
            ..raw
        })
    }

    pub(super) fn deepseek_v3(&self) -> Result<RawModel, InputError> {
        let config = self.config;
        let raw = self.llama_like(false)?;
        let mla = RawMla {
            q_rank: config.q_lora_rank.clone().unwrap_or_else(|| implied(1536)),
            kv_rank: self.need("kv_lora_rank", &config.kv_lora_rank)?,
            rope_dim: self.need("qk_rope_head_dim", &config.qk_rope_head_dim)?,
            value_dim: self.need("v_head_dim", &config.v_head_dim)?,
        };
        let head_dim = Some(self.need("qk_nope_head_dim", &config.qk_nope_head_dim)?);
        let mut assumptions = raw.assumptions.clone();
        assumptions.push(
            "selection biases stay as they are, and no loss balances experts: only a model file in \
             YAML has bias_update_rate and aux_loss"
                .to_owned(),
        );
        if config.num_nextn_predict_layers.as_ref().is_some_and(|layers| layers.value > 0) {
            assumptions.push("the multi-token prediction layers are left out".to_owned());
        }
        Ok(RawModel {
            head_dim,
            mla: Some(mla),
            moe: Some(self.fine_grained_experts()?),
            assumptions,
            ..raw
        })
    }

    /// Sinks, biases everywhere, a clamped activation, every other layer windowed, YaRN. Its
    /// activation's bound and rate are constants of the architecture's code.
    pub(super) fn gpt_oss(&self) -> Result<RawModel, InputError> {
        let config = self.config;
        self.constant("swiglu_limit", &config.swiglu_limit, 7.0)?;
        self.constant("swiglu_alpha", &config.swiglu_alpha, 1.702)?;
        let on = config.output_router_logits.as_ref().is_some_and(|on| on.value);
        let aux_loss = || config.router_aux_loss_coef.clone().unwrap_or_else(|| unplaced(0.9));
        let moe = RawMoe {
            aux_loss: on.then(aux_loss),
            renormalised: implied(true),
            biased: implied(true),
            tensors: ExpertTensors::MlpRouter,
            ..self.experts("num_local_experts", &config.num_local_experts)?
        };
        let every = self.full_every()?.unwrap_or_else(|| implied(2));
        let bias = config.attention_bias.clone().or_else(|| implied(true));
        let stretched = || RawYarn {
            factor: unplaced(32.0),
            original_positions: unplaced(4096),
            beta_fast: None,
            beta_slow: None,
            truncate: implied(false),
        };
        let raw = self.llama_like(false)?;
        Ok(RawModel {
            activation: Some(unplaced(Activation::ClampedGeglu)),
            head_dim: raw.head_dim.clone().or_else(|| implied(64)),
            window: self.window(implied(128), every),
            sinks: implied(true),
            qkv_bias: bias.clone(),
            out_bias: bias,
            norm_eps: config.rms_norm_eps.clone().or_else(|| implied(1e-5)),
            rope_theta: config.rope_theta.clone().or_else(|| implied(150_000.0)),
            // The class's own scaling, which only null switches off.
            yarn: raw.yarn.clone().or_else(|| config.rope_scaling.is_none().then(stretched)),
            moe: Some(moe),
            ..raw
        })
    }

    /// Refuses another value than the architecture's own.
    pub(super) fn constant<T: Copy + Display + PartialEq>(
        &self,
        key: &str,
        given: &Maybe<T>,
        value: T,
    ) -> Result<(), InputError> {
        let other = given.as_ref().filter(|given| given.value != value);
        other.map_or(Ok(()), |given| {
            let message = format!("`{key}` cannot be {}", given.value);
            Err(self.error(given, message).help(format!("valid: {value}")))
        })
    }

    /// LayerNorm without biases on matrices; a quarter of each head is rotated.
    pub(super) fn stablelm(&self) -> Result<RawModel, InputError> {
        let config = self.config;
        Ok(RawModel {
            norm: implied(NormKind::LayerNorm),
            qkv_bias: config.use_qkv_bias.clone(),
            out_bias: None,
            head_dim: None,
            norm_eps: config.layer_norm_eps.clone().or_else(|| implied(1e-5)),
            ..self.llama_like(false)?
        })
    }

    /// As Llama's. Its checkpoints join projections that lie apart here.
    pub(super) fn phi3(&self) -> Result<RawModel, InputError> {
        let config = self.config;
        self.constant("resid_pdrop", &config.resid_pdrop, 0.0)?;
        let raw = self.llama_like(false)?;
        Ok(RawModel {
            window: self.window(None, None),
            qkv_bias: None,
            out_bias: None,
            norm_eps: config.rms_norm_eps.clone().or_else(|| implied(1e-5)),
            assumptions: self.with_names_of_llama(raw.assumptions.clone()),
            ..raw
        })
    }

    /// As Llama's, with four factors; two of them no spec has ([`Self::unknown`]).
    pub(super) fn granite(&self) -> Result<RawModel, InputError> {
        let config = self.config;
        let raw = self.llama()?;
        Ok(RawModel {
            embedding_scale: config.embedding_multiplier.clone(),
            query_pre_attn_scalar: Some(self.score_divisor()?),
            ..raw
        })
    }

    /// Granite's factor of scores, as the number by whose root they are divided.
    fn score_divisor(&self) -> Result<Spanned<f64>, InputError> {
        let Some(factor) = &self.config.attention_multiplier else { return Ok(unplaced(1.0)) };
        if factor.value > 0.0 && factor.value.powi(-2).is_finite() {
            return Ok(Spanned::new(factor.value.powi(-2), factor.referenced, factor.defined));
        }
        let message = format!("`attention_multiplier` cannot be {}", factor.value);
        Err(self.error(factor, message).help("valid: above 0, for example 0.0078125"))
    }

    /// LayerNorm, biases everywhere, one ungated block, RoPE.
    pub(super) fn starcoder2(&self) -> Result<RawModel, InputError> {
        let config = self.config;
        let bias = config.use_bias.clone().or_else(|| implied(true));
        let dropouts = [
            ("residual_dropout", &config.residual_dropout),
            ("embedding_dropout", &config.embedding_dropout),
            ("attention_dropout", &config.attention_dropout),
        ];
        let raw = self.with_rope(true, self.plain_activation()?)?;
        Ok(RawModel {
            window: self.window(None, None),
            norm: implied(NormKind::LayerNorm),
            bias: bias.clone(),
            qkv_bias: bias.clone(),
            out_bias: bias,
            dropout: self.same_dropout(dropouts, 0.0)?,
            norm_eps: config.norm_epsilon.clone().or_else(|| implied(1e-5)),
            assumptions: self.with_names_of_llama(raw.assumptions.clone()),
            ..raw
        })
    }

    fn with_names_of_llama(&self, mut assumptions: Vec<String>) -> Vec<String> {
        let model_type = &self.config.model_type.value;
        assumptions.push(format!(
            "a trainer reads and writes tensors by Llama's names, not by those of {model_type}"
        ));
        assumptions
    }

    /// Learned positions, LayerNorm, biases everywhere, tied, one ungated block.
    pub(super) fn gpt2(&self) -> Result<RawModel, InputError> {
        let config = self.config;
        // The class takes the names of other architectures, too.
        let either = |key: &str, other: &Maybe<u64>, own: &Maybe<u64>| {
            self.need(key, if other.is_some() { other } else { own })
        };
        let hidden = either("n_embd", &config.hidden_size, &config.n_embd)?;
        let four_times = Spanned { value: hidden.value.saturating_mul(4), ..hidden };
        Ok(RawModel {
            name: self.name(),
            activation: Some(self.plain_activation()?),
            norm: implied(NormKind::LayerNorm),
            positions: implied(RawPositions::Learned),
            max_positions: Some(either(
                "n_positions",
                &config.max_position_embeddings,
                &config.n_positions,
            )?),
            tied_embeddings: config.tie_word_embeddings.clone().or_else(|| implied(true)),
            bias: implied(true),
            dropout: self.same_dropout(
                [
                    ("resid_pdrop", &config.resid_pdrop),
                    ("embd_pdrop", &config.embd_pdrop),
                    ("attn_pdrop", &config.attn_pdrop),
                ],
                0.1,
            )?,
            norm_eps: config.layer_norm_epsilon.clone().or_else(|| implied(1e-5)),
            gelu: implied(self.gelu()),
            unknown: self.unknown(),
            ..RawModel::new(
                either("n_layer", &config.num_hidden_layers, &config.n_layer)?,
                hidden,
                either("n_head", &config.num_attention_heads, &config.n_head)?,
                config.n_inner.clone().unwrap_or(four_times),
                self.need("vocab_size", &config.vocab_size)?,
            )
        })
    }

    /// Key/value heads; null stands for as many as there are query heads.
    fn kv_heads(&self) -> Result<Maybe<u64>, InputError> {
        let config = self.config;
        if let Some(given) = &config.num_key_value_heads {
            return Ok(given.clone());
        }
        let Some(default) = self.default_kv_heads() else { return Ok(None) };
        let heads = self.need("num_attention_heads", &config.num_attention_heads)?;
        if heads.value.is_multiple_of(default) {
            return Ok(implied(default));
        }
        let message = format!(
            "`num_key_value_heads` is missing, and {default}, the default, does not divide \
             `num_attention_heads` ({})",
            heads.value
        );
        Err(self.error(&heads, message).help("add \"num_key_value_heads\": ..."))
    }

    /// The class's default; `None` for as many as there are query heads.
    fn default_kv_heads(&self) -> Option<u64> {
        match self.config.model_type.value.as_str() {
            "mistral" | "mixtral" | "gpt_oss" => Some(8),
            "gemma2" | "qwen3_moe" => Some(4),
            "gemma" => Some(16),
            "starcoder2" => Some(2),
            "qwen2" | "qwen3" | "stablelm" => Some(32),
            _ => None,
        }
    }

    fn grouped_query_assumption(&self) -> Vec<String> {
        let heads = match self.default_kv_heads() {
            _ if self.config.num_key_value_heads.is_some() => return vec![],
            Some(default) => format!("{default} key/value heads, the default"),
            None => "as many key/value heads as query heads".to_owned(),
        };
        vec![format!("{heads}: the model file has no num_key_value_heads")]
    }
}
