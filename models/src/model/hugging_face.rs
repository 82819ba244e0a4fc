//! Hugging Face `config.json` as a raw model.
//!
//! Keys and defaults are those of the configuration classes of transformers 4.57. Keys without
//! effect on the model are listed ([`WITHOUT_EFFECT`]); the user is told of any other
//! ([`keys_without_effect`]).

use std::fmt;

use serde::de::value::Error as NoError;
use serde::de::{Error, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, forward_to_deserialize_any};
use serde_yaml::{Location, Spanned};

use super::raw::{Maybe, RawMla, RawModel, RawMoe, RawPositions, RawWindow, RawYarn};
use super::spec::{Activation, AuxOver, ExpertTensors, Gelu, ModelSpec, NormKind, Router};
use crate::input::{InputError, Source, nearest, parse_yaml};

/// `model_type`s that are read.
const SUPPORTED: [&str; 11] = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "mixtral",
    "deepseek_v3",
    "gpt2",
    "gpt_oss",
    "stablelm",
];

/// Others whose RoPE turns pairs of neighbouring columns, which only latent attention does here.
const INTERLEAVED: [&str; 9] =
    ["glm", "glm4", "gptj", "codegen", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "helium"];

/// A value that may be missing (use the class's default) or null (switched off).
type OrNull<T> = Option<Maybe<T>>;

/// The same of a mapping.
type OrNullStruct<T> = Option<Option<T>>;

/// The keys of all supported architectures together.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct HfConfig {
    model_type: Spanned<String>,
    #[serde(rename = "_name_or_path")]
    name_or_path: Maybe<String>,
    #[serde(alias = "n_layer")]
    num_hidden_layers: Maybe<u64>,
    #[serde(alias = "n_embd")]
    hidden_size: Maybe<u64>,
    #[serde(alias = "n_head")]
    num_attention_heads: Maybe<u64>,
    num_key_value_heads: Maybe<u64>,
    head_dim: Maybe<u64>,
    #[serde(alias = "n_inner")]
    intermediate_size: Maybe<u64>,
    vocab_size: Maybe<u64>,
    #[serde(alias = "n_positions")]
    max_position_embeddings: Maybe<u64>,
    #[serde(alias = "activation_function")]
    hidden_act: Maybe<String>,
    hidden_activation: Maybe<String>,
    tie_word_embeddings: Maybe<bool>,
    attention_bias: Maybe<bool>,
    mlp_bias: Maybe<bool>,
    attention_dropout: Maybe<f64>,
    attn_pdrop: Maybe<f64>,
    resid_pdrop: Maybe<f64>,
    embd_pdrop: Maybe<f64>,
    #[serde(default, deserialize_with = "or_null")]
    sliding_window: OrNull<u64>,
    use_sliding_window: Maybe<bool>,
    max_window_layers: Maybe<u64>,
    layer_types: Maybe<Vec<String>>,
    #[serde(default, deserialize_with = "or_null")]
    attn_logit_softcapping: OrNull<f64>,
    #[serde(default, deserialize_with = "or_null")]
    final_logit_softcapping: OrNull<f64>,
    num_local_experts: Maybe<u64>,
    num_experts: Maybe<u64>,
    n_routed_experts: Maybe<u64>,
    num_experts_per_tok: Maybe<u64>,
    moe_intermediate_size: Maybe<u64>,
    n_group: Maybe<u64>,
    norm_topk_prob: Maybe<bool>,
    routed_scaling_factor: Maybe<f64>,
    topk_group: Maybe<u64>,
    n_shared_experts: Maybe<u64>,
    first_k_dense_replace: Maybe<u64>,
    moe_layer_freq: Maybe<u64>,
    decoder_sparse_step: Maybe<u64>,
    mlp_only_layers: Maybe<Vec<u64>>,
    output_router_logits: Maybe<bool>,
    router_aux_loss_coef: Maybe<f64>,
    router_jitter_noise: Maybe<f64>,
    experts_per_token: Maybe<u64>,
    swiglu_limit: Maybe<f64>,
    q_lora_rank: Maybe<u64>,
    kv_lora_rank: Maybe<u64>,
    qk_nope_head_dim: Maybe<u64>,
    qk_rope_head_dim: Maybe<u64>,
    v_head_dim: Maybe<u64>,
    num_nextn_predict_layers: Maybe<u64>,
    #[serde(alias = "layer_norm_epsilon")]
    rms_norm_eps: Maybe<f64>,
    rope_theta: Maybe<f64>,
    query_pre_attn_scalar: Maybe<f64>,
    partial_rotary_factor: Maybe<f64>,
    layer_norm_eps: Maybe<f64>,
    hidden_dropout: Maybe<f64>,
    use_qkv_bias: Maybe<bool>,
    qk_layernorm: Maybe<bool>,
    use_parallel_residual: Maybe<bool>,
    rope_interleave: Maybe<bool>,
    #[serde(default, deserialize_with = "or_null")]
    rope_scaling: OrNullStruct<RopeScaling>,
    rope_parameters: Option<IgnoredAny>,
    quantization_config: Option<IgnoredAny>,
    add_cross_attention: Maybe<bool>,
    is_encoder_decoder: Maybe<bool>,
    scale_attn_weights: Maybe<bool>,
    scale_attn_by_inverse_layer_idx: Maybe<bool>,
}

/// How RoPE's frequencies are scaled; what is not YaRN is only named.
#[derive(Clone, Debug, Deserialize)]
struct RopeScaling {
    rope_type: Maybe<String>,
    /// The older name; files may have both.
    r#type: Maybe<String>,
    factor: Maybe<f64>,
    original_max_position_embeddings: Maybe<u64>,
    beta_fast: Maybe<f64>,
    beta_slow: Maybe<f64>,
    truncate: Maybe<bool>,
    mscale: Option<IgnoredAny>,
    mscale_all_dim: Option<IgnoredAny>,
    attention_factor: Option<IgnoredAny>,
}

/// Keys of the supported architectures without effect here: those that name and run a checkpoint,
/// generate text with it, or initialise it.
const WITHOUT_EFFECT: [&str; 80] = [
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "_commit_hash",
    "architectures",
    "attn_implementation",
    "auto_map",
    "aux_loss_alpha",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "cls_token_id",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "ep_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "initial_context_length",
    "initializer_range",
    "is_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "n_ctx",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "pruned_heads",
    "qk_head_dim",
    "remove_invalid_values",
    "reorder_and_upcast_attn",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "scoring_func",
    "sep_token_id",
    "seq_aux",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "topk_method",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "use_bfloat16",
    "use_cache",
];

/// Keys that ask for experts, which dense architectures do not read.
const OF_EXPERTS: [&str; 9] = [
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "experts_per_token",
    "moe_intermediate_size",
    "n_shared_experts",
    "first_k_dense_replace",
    "decoder_sparse_step",
];

/// Keys of latent attention, which other architectures do not read.
const OF_LATENT_ATTENTION: [&str; 5] =
    ["q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"];

/// Keys that ask for windows.
const OF_WINDOWS: [&str; 2] = ["sliding_window", "layer_types"];

/// Keys of a configuration that no architecture reads, and those of experts, latent attention and
/// windows where the model that was read has none, with their lines.
///
/// # Errors
/// It is no configuration.
pub(super) fn keys_without_effect(
    source: &Source,
    spec: &ModelSpec,
) -> Result<Vec<(String, usize)>, InputError> {
    let Keys(keys) = parse_yaml(source)?;
    let (read, config) = (keys_read(), parse_yaml::<HfConfig>(source)?);
    let lacks = [
        (spec.moe.is_none(), &OF_EXPERTS[..]),
        (spec.attention.mla.is_none(), &OF_LATENT_ATTENTION),
        (spec.attention.window.is_none() && config.asks_for_windows(), &OF_WINDOWS),
    ];
    let known = |key: &str| match lacks.iter().any(|(lacks, keys)| *lacks && keys.contains(&key)) {
        true => false,
        false => read.contains(&key) || WITHOUT_EFFECT.contains(&key),
    };
    let unknown = keys.into_iter().filter(|key| !known(&key.value));
    Ok(unknown.map(|key| (key.value, key.referenced.line() as usize)).collect())
}

impl HfConfig {
    /// Whether there is a width of windows, or a layer with one, that no switch turns off.
    fn asks_for_windows(&self) -> bool {
        let switched_off = self.use_sliding_window.as_ref().is_some_and(|switch| !switch.value);
        let has_width = self.sliding_window.as_ref().is_some_and(Option::is_some);
        let sliding = |kind: &String| kind == "sliding_attention";
        let has_layer =
            self.layer_types.as_ref().is_some_and(|kinds| kinds.value.iter().any(sliding));
        !switched_off && (has_width || has_layer)
    }
}

/// The keys of a mapping.
struct Keys(Vec<Spanned<String>>);

impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Keys;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Keys, A::Error> {
                let mut keys = vec![];
                while let Some((key, IgnoredAny)) = map.next_entry()? {
                    keys.push(key);
                }
                Ok(Keys(keys))
            }
        }
        from.deserialize_map(Entries)
    }
}

/// The keys that [`HfConfig`] reads, with aliases, as its implementation of `Deserialize` asks for
/// them.
fn keys_read() -> &'static [&'static str] {
    struct Asked<'a>(&'a mut &'static [&'static str]);
    impl<'de> Deserializer<'de> for Asked<'_> {
        type Error = NoError;

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, NoError> {
            Err(NoError::custom("only fields are asked for"))
        }

        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            visitor: V,
        ) -> Result<V::Value, NoError> {
            *self.0 = fields;
            self.deserialize_any(visitor)
        }

        forward_to_deserialize_any! {
            bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct
            newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }
    let mut fields: &'static [&'static str] = &[];
    // The error is the one above.
    let _ = HfConfig::deserialize(Asked(&mut fields));
    fields
}

fn or_null<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    from: D,
) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(from).map(Some)
}

/// The raw model of a configuration.
///
/// # Errors
/// Unsupported `model_type`, missing keys, and shapes that [`super::ModelSpec`] cannot say.
pub(super) fn raw_model(source: &Source, config: &HfConfig) -> Result<RawModel, InputError> {
    let reader = Reader { source, config };
    let raw = match config.model_type.value.as_str() {
        "llama" => reader.llama(),
        "mistral" => reader.mistral(),
        "qwen2" => reader.qwen2(),
        "qwen3" => reader.qwen3(),
        "qwen3_moe" => reader.qwen3_moe(),
        "gemma2" => reader.gemma2(),
        "mixtral" => reader.mixtral(),
        "deepseek_v3" => reader.deepseek_v3(),
        "gpt2" => reader.gpt2(),
        "gpt_oss" => reader.gpt_oss(),
        "stablelm" => reader.stablelm(),
        other => Err(reader.unsupported(other)),
    }?;
    Ok(RawModel { rotary_dim: reader.rotary_dim(&raw)?, ..raw })
}

struct Reader<'a> {
    source: &'a Source,
    config: &'a HfConfig,
}

impl Reader<'_> {
    fn unsupported(&self, model_type: &str) -> InputError {
        let nearest = nearest(model_type, &SUPPORTED)
            .map(|best| format!("did you mean `{best}`? "))
            .unwrap_or_default();
        let supported = SUPPORTED.join(", ");
        let (why, instead) = match INTERLEAVED.contains(&model_type) {
            true => (": its RoPE turns neighbouring columns", ""),
            false => ("", "; or describe the model in our YAML"),
        };
        let message = format!("`model_type` is not a supported architecture{why}");
        self.error(&self.config.model_type, message)
            .help(format!("{nearest}supported: {supported}{instead}"))
    }

    fn error<T>(&self, at: &Spanned<T>, message: String) -> InputError {
        self.source.error_at(at.referenced, message)
    }

    /// A required key.
    fn need<T: Clone>(&self, key: &str, value: &Maybe<T>) -> Result<Spanned<T>, InputError> {
        let missing =
            || self.error(&self.config.model_type, format!("missing required key `{key}`"));
        value.clone().ok_or_else(|| {
            missing()
                .help(format!("add \"{key}\": ... as the architecture's other checkpoints have"))
        })
    }

    /// The common part of architectures with RMSNorm, RoPE and a gated block; `tied` is the class's
    /// default for `tie_word_embeddings`.
    fn llama_like(&self, tied: bool) -> Result<RawModel, InputError> {
        let config = self.config;
        self.no_attention_dropout()?;
        Ok(RawModel {
            name: self.name(),
            kv_heads: config.num_key_value_heads.clone(),
            head_dim: config.head_dim.clone(),
            activation: Some(self.gated_activation()?),
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

    fn llama(&self) -> Result<RawModel, InputError> {
        Ok(RawModel { mlp_bias: self.config.mlp_bias.clone(), ..self.llama_like(false)? })
    }

    /// Biases are not configurable; a window is there unless null.
    fn mistral(&self) -> Result<RawModel, InputError> {
        let window = self.window(implied(4096), None);
        Ok(RawModel { window, qkv_bias: None, out_bias: None, ..self.llama_like(false)? })
    }

    fn qwen2(&self) -> Result<RawModel, InputError> {
        Ok(RawModel {
            window: self.switched_window()?,
            qkv_bias: implied(true),
            out_bias: None,
            ..self.llama_like(false)?
        })
    }

    fn qwen3(&self) -> Result<RawModel, InputError> {
        let raw = self.llama_like(false)?;
        let head_dim = raw.head_dim.clone().or_else(|| implied(128));
        Ok(RawModel { window: self.switched_window()?, qk_norm: implied(true), head_dim, ..raw })
    }

    fn qwen3_moe(&self) -> Result<RawModel, InputError> {
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

    fn mixtral(&self) -> Result<RawModel, InputError> {
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

    /// Four norms a layer, caps on scores and logits, every other layer windowed.
    fn gemma2(&self) -> Result<RawModel, InputError> {
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

    fn deepseek_v3(&self) -> Result<RawModel, InputError> {
        let config = self.config;
        let raw = self.llama_like(false)?;
        let mla = RawMla {
            q_rank: config.q_lora_rank.clone(),
            kv_rank: self.need("kv_lora_rank", &config.kv_lora_rank)?,
            rope_dim: self.need("qk_rope_head_dim", &config.qk_rope_head_dim)?,
            value_dim: self.need("v_head_dim", &config.v_head_dim)?,
        };
        let head_dim = Some(self.need("qk_nope_head_dim", &config.qk_nope_head_dim)?);
        let mut assumptions = raw.assumptions.clone();
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
    fn gpt_oss(&self) -> Result<RawModel, InputError> {
        let config = self.config;
        let limit = config.swiglu_limit.as_ref();
        if let Some(limit) = limit.filter(|limit| limit.value != 7.0) {
            let message = format!("`swiglu_limit` cannot be {}", limit.value);
            return Err(self.error(limit, message).help("valid: 7"));
        }
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

    /// LayerNorm without biases on matrices; a quarter of each head is rotated.
    fn stablelm(&self) -> Result<RawModel, InputError> {
        let config = self.config;
        Ok(RawModel {
            norm: implied(NormKind::LayerNorm),
            qkv_bias: config.use_qkv_bias.clone(),
            out_bias: None,
            norm_eps: config.layer_norm_eps.clone().or_else(|| implied(1e-5)),
            ..self.llama_like(false)?
        })
    }

    /// Rotated columns of a head: of its width the given part, which classes round down.
    fn rotary_dim(&self, raw: &RawModel) -> Result<Maybe<u64>, InputError> {
        let default = implied(0.25).filter(|_| self.is("stablelm"));
        let factor = self.config.partial_rotary_factor.clone().or(default);
        let Some(factor) = factor.filter(|_| self.rotates_heads()) else { return Ok(None) };
        let shared_out = || raw.hidden.value.checked_div(raw.heads.value);
        let head_dim = raw.head_dim.as_ref().map(|width| width.value).or_else(shared_out);
        // Without a width of heads the model is refused for that.
        let Some(head_dim) = head_dim else { return Ok(None) };
        let rotated = (head_dim as f64 * factor.value) as u64;
        let is_part = factor.value > 0.0 && factor.value <= 1.0;
        if is_part && rotated > 0 && rotated.is_multiple_of(2) {
            return Ok(Some(Spanned::new(rotated, factor.referenced, factor.defined)));
        }
        let message = format!("`partial_rotary_factor` cannot be {}", factor.value);
        Err(self.error(&factor, message).help(format!(
            "valid: above 0, up to 1, so that an even number of a head's {head_dim} columns turns"
        )))
    }

    fn is(&self, model_type: &str) -> bool {
        self.config.model_type.value == model_type
    }

    /// Whether RoPE turns heads, and not a part beside them, or none.
    fn rotates_heads(&self) -> bool {
        !self.is("deepseek_v3") && !self.is("gpt2")
    }

    /// The scaling of RoPE's frequencies, if it is YaRN as in the paper.
    fn yarn(&self) -> Option<RawYarn> {
        let scaling = self.config.rope_scaling.as_ref()?.as_ref()?;
        let other = [&scaling.mscale, &scaling.mscale_all_dim, &scaling.attention_factor];
        let plain = other.into_iter().all(Option::is_none);
        let kind = scaling.rope_type.as_ref().or(scaling.r#type.as_ref());
        let is_yarn = kind.is_some_and(|kind| kind.value == "yarn");
        let positions = scaling.original_max_position_embeddings.as_ref();
        (plain && is_yarn).then_some(())?;
        Some(RawYarn {
            factor: scaling.factor.clone()?,
            original_positions: positions.or(self.config.max_position_embeddings.as_ref())?.clone(),
            beta_fast: scaling.beta_fast.clone(),
            beta_slow: scaling.beta_slow.clone(),
            truncate: scaling.truncate.clone(),
        })
    }

    /// Learned positions, LayerNorm, biases everywhere, tied, one ungated block.
    fn gpt2(&self) -> Result<RawModel, InputError> {
        let config = self.config;
        let hidden = self.need("n_embd", &config.hidden_size)?;
        let four_times = Spanned { value: hidden.value.saturating_mul(4), ..hidden };
        Ok(RawModel {
            name: self.name(),
            activation: Some(self.plain_activation()?),
            norm: implied(NormKind::LayerNorm),
            positions: implied(RawPositions::Learned),
            max_positions: Some(self.need("n_positions", &config.max_position_embeddings)?),
            tied_embeddings: config.tie_word_embeddings.clone().or_else(|| implied(true)),
            bias: implied(true),
            dropout: self.one_dropout()?,
            norm_eps: config.rms_norm_eps.clone().or_else(|| implied(1e-5)),
            gelu: implied(self.gelu()),
            unknown: self.unknown(),
            ..RawModel::new(
                self.need("n_layer", &config.num_hidden_layers)?,
                hidden,
                self.need("n_head", &config.num_attention_heads)?,
                config.intermediate_size.clone().unwrap_or(four_times),
                self.need("vocab_size", &config.vocab_size)?,
            )
        })
    }

    /// `meta-llama/Llama-2-7b` is called `Llama-2-7b`.
    fn name(&self) -> Maybe<String> {
        let path =
            self.config.name_or_path.as_ref().filter(|path| !path.value.trim().is_empty())?;
        let last = path.value.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
        Some(Spanned { value: last.to_owned(), ..path.clone() })
    }

    fn grouped_query_assumption(&self) -> Vec<String> {
        let given = self.config.num_key_value_heads.is_some();
        let says =
            "as many key/value heads as query heads: the model file has no num_key_value_heads";
        if given { Vec::new() } else { vec![says.to_owned()] }
    }

    fn gated_activation(&self) -> Result<Spanned<Activation>, InputError> {
        let Some(given) =
            self.config.hidden_activation.as_ref().or(self.config.hidden_act.as_ref())
        else {
            let gemma = self.config.model_type.value == "gemma2";
            return Ok(unplaced(if gemma { Activation::Geglu } else { Activation::Swiglu }));
        };
        let activation = match given.value.as_str() {
            "silu" | "swish" => Activation::Swiglu,
            "gelu" | "gelu_new" | "gelu_pytorch_tanh" => Activation::Geglu,
            _ => return Err(self.bad_activation(given, "silu, gelu, gelu_new, gelu_pytorch_tanh")),
        };
        Ok(Spanned::new(activation, given.referenced, given.defined))
    }

    fn plain_activation(&self) -> Result<Spanned<Activation>, InputError> {
        let Some(given) = &self.config.hidden_act else { return Ok(unplaced(Activation::Gelu)) };
        let activation = match given.value.as_str() {
            "gelu" | "gelu_new" | "gelu_pytorch_tanh" => Activation::Gelu,
            "relu" => Activation::Relu,
            "relu2" => Activation::SquaredRelu,
            _ => {
                return Err(
                    self.bad_activation(given, "gelu, gelu_new, gelu_pytorch_tanh, relu, relu2")
                );
            }
        };
        Ok(Spanned::new(activation, given.referenced, given.defined))
    }

    /// `gelu` is the exact form, the other names are the tanh form.
    fn gelu(&self) -> Gelu {
        let given = self.config.hidden_activation.as_ref().or(self.config.hidden_act.as_ref());
        let exact = given.is_some_and(|given| given.value == "gelu");
        if exact { Gelu::Erf } else { Gelu::Tanh }
    }

    /// Changes to the formulas that the configuration asks for and a spec cannot express.
    fn unknown(&self) -> Vec<String> {
        let config = self.config;
        let is = |flag: &Maybe<bool>, value: bool| flag.as_ref().is_some_and(|f| f.value == value);
        let is_number =
            |given: &Maybe<f64>, usual: f64| given.as_ref().is_none_or(|x| x.value == usual);
        let rotates_heads = self.rotates_heads();
        let known = [
            (
                "rope_scaling",
                matches!(config.rope_scaling, None | Some(None)) || self.yarn().is_some(),
            ),
            ("rope_parameters", config.rope_parameters.is_none()),
            ("rope_interleave: false", !is(&config.rope_interleave, false) || rotates_heads),
            ("rope_interleave: true", !is(&config.rope_interleave, true) || !rotates_heads),
            (
                "partial_rotary_factor",
                is_number(&config.partial_rotary_factor, 1.0) || rotates_heads,
            ),
            ("qk_layernorm", !is(&config.qk_layernorm, true)),
            ("use_parallel_residual", !is(&config.use_parallel_residual, true)),
            ("hidden_dropout", is_number(&config.hidden_dropout, 0.0)),
            ("router_jitter_noise", is_number(&config.router_jitter_noise, 0.0)),
            ("quantization_config", config.quantization_config.is_none()),
            ("add_cross_attention", !is(&config.add_cross_attention, true)),
            ("is_encoder_decoder", !is(&config.is_encoder_decoder, true)),
            ("scale_attn_weights: false", !is(&config.scale_attn_weights, false)),
            ("scale_attn_by_inverse_layer_idx", !is(&config.scale_attn_by_inverse_layer_idx, true)),
        ];
        known.into_iter().filter(|(_, known)| !known).map(|(key, _)| key.to_owned()).collect()
    }

    fn bad_activation(&self, given: &Spanned<String>, valid: &str) -> InputError {
        let key = self.source.key_at(given.referenced).unwrap_or("hidden_act");
        self.error(given, format!("`{key}` cannot be this")).help(format!("valid: {valid}"))
    }

    /// Refuses dropout on attention alone, which a spec cannot express.
    fn no_attention_dropout(&self) -> Result<(), InputError> {
        let given = self.config.attention_dropout.as_ref();
        given.filter(|dropout| dropout.value != 0.0).map_or(Ok(()), |dropout| {
            let message = format!("`attention_dropout` cannot be {}", dropout.value);
            Err(self
                .error(dropout, message)
                .help("valid: 0; dropout on attention alone is not supported"))
        })
    }

    /// GPT-2's three probabilities (default 0.1) as the one that a spec has.
    fn one_dropout(&self) -> Result<Maybe<f64>, InputError> {
        let all = [&self.config.resid_pdrop, &self.config.embd_pdrop, &self.config.attn_pdrop];
        let value = |dropout: &Maybe<f64>| dropout.as_ref().map_or(0.1, |dropout| dropout.value);
        let (first, rest) = (value(all[0]), &all[1..]);
        let differs = rest.iter().any(|other| value(other) != first);
        match all.iter().find_map(|dropout| dropout.as_ref()) {
            Some(given) if differs => Err(self
                .error(given, "`resid_pdrop`, `embd_pdrop` and `attn_pdrop` differ".to_owned())
                .help("valid: the same probability three times (0.1 where left out)")),
            given => Ok(given.cloned().or_else(|| implied(0.1))),
        }
    }

    /// The window as given; `default` where the key is missing.
    fn window(&self, default: Maybe<u64>, full_every: Maybe<u64>) -> Option<RawWindow> {
        let tokens = self.config.sliding_window.clone().unwrap_or(default)?;
        // A period of 1 stands for "no layer is windowed".
        let none = full_every.as_ref().is_some_and(|every| every.value == 1);
        (!none).then_some(RawWindow { tokens, full_every })
    }

    /// Qwen's window: only with `use_sliding_window`, from layer `max_window_layers` on.
    fn switched_window(&self) -> Result<Option<RawWindow>, InputError> {
        let config = self.config;
        if !config.use_sliding_window.as_ref().is_some_and(|switch| switch.value) {
            return Ok(None);
        }
        if let Some(every) = self.full_every()? {
            return Ok(self.window(implied(4096), every));
        }
        let layers = self.need("num_hidden_layers", &config.num_hidden_layers)?.value;
        let first = config.max_window_layers.clone().unwrap_or_else(|| unplaced(28));
        match first.value {
            0 => Ok(self.window(implied(4096), None)),
            full if full >= layers => Ok(None),
            _ => Err(self
                .error(
                    &first,
                    format!("`max_window_layers` ({}) windows only the last layers", first.value),
                )
                .help(format!(
                    "valid: 0 (all windowed) or {layers} (none); a mixture is not supported"
                ))),
        }
    }

    /// `layer_types` as a period: `None` not given, `Some(None)` all windowed, `Some(Some(1))`
    /// none, `Some(Some(k))` every k-th full.
    fn full_every(&self) -> Result<Option<Maybe<u64>>, InputError> {
        let Some(types) = &self.config.layer_types else { return Ok(None) };
        let full = |kind: &String| kind == "full_attention";
        let Some(first) = types.value.iter().position(full) else { return Ok(Some(None)) };
        let period = first + 1;
        let regular =
            types.value.iter().enumerate().all(|(i, kind)| full(kind) == ((i + 1) % period == 0));
        if regular {
            return Ok(Some(Some(Spanned::new(period as u64, types.referenced, types.defined))));
        }
        Err(self
            .error(types, "`layer_types` has no period that is supported".to_owned())
            .help("valid: every k-th layer full_attention, the others sliding_attention"))
    }

    fn experts(&self, key: &str, experts: &Maybe<u64>) -> Result<RawMoe, InputError> {
        Ok(RawMoe {
            experts: self.need(key, experts)?,
            top_k: match (&self.config.num_experts_per_tok, &self.config.experts_per_token) {
                (None, Some(given)) => given.clone(),
                (given, _) => self.need("num_experts_per_tok", given)?,
            },
            ffn: None,
            shared_ffn: None,
            first_dense: None,
            every: None,
            capacity_factor: None,
            imbalance: None,
            router: implied(Router::Softmax),
            renormalised: self.config.norm_topk_prob.clone(),
            groups: None,
            kept_groups: None,
            weight_scale: None,
            aux_loss: self.aux_loss(),
            aux_over: implied(AuxOver::AllLayers),
            z_loss: None,
            bias_update_rate: None,
            biased: None,
            tensors: ExpertTensors::Mlp,
        })
    }

    /// The coefficient counts only where router logits are asked for; it is 0.001 by default.
    fn aux_loss(&self) -> Maybe<f64> {
        let on = self.config.output_router_logits.as_ref().is_some_and(|on| on.value);
        on.then(|| self.config.router_aux_loss_coef.clone().unwrap_or_else(|| unplaced(0.001)))
    }

    fn fine_grained_experts(&self) -> Result<RawMoe, InputError> {
        let config = self.config;
        let ffn = self.need("moe_intermediate_size", &config.moe_intermediate_size)?;
        let shared = config.n_shared_experts.as_ref();
        Ok(RawMoe {
            shared_ffn: shared.map(|n| Spanned { value: n.value.saturating_mul(ffn.value), ..*n }),
            ffn: Some(ffn),
            first_dense: config.first_k_dense_replace.clone().or_else(|| implied(3)),
            every: config.moe_layer_freq.clone(),
            router: implied(Router::SigmoidBias),
            groups: config.n_group.clone().or_else(|| implied(8)),
            kept_groups: config.topk_group.clone().or_else(|| implied(4)),
            weight_scale: config.routed_scaling_factor.clone().or_else(|| implied(2.5)),
            aux_loss: None,
            ..self.experts("n_routed_experts", &config.n_routed_experts)?
        })
    }

    /// Qwen's list of dense layers, which must be the first ones, and in step with
    /// `decoder_sparse_step`: that counts from layer 0, ours from the first sparse layer.
    fn leading_dense(&self) -> Result<Maybe<u64>, InputError> {
        let Some(listed) = &self.config.mlp_only_layers else { return Ok(None) };
        let step = self.config.decoder_sparse_step.as_ref().map_or(1, |step| step.value.max(1));
        let count = listed.value.len() as u64;
        let mut sorted = listed.value.clone();
        sorted.sort_unstable();
        if sorted.into_iter().eq(0..count) && count.is_multiple_of(step) {
            return Ok(Some(Spanned::new(count, listed.referenced, listed.defined)));
        }
        Err(self
            .error(listed, "`mlp_only_layers` is not a list of the first layers".to_owned())
            .help(format!("valid: [], or 0, 1, 2, ... without gaps, as many as {step} divides")))
    }
}

/// A value that the file does not give.
fn unplaced<T>(value: T) -> Spanned<T> {
    Spanned::new(value, Location::UNKNOWN, Location::UNKNOWN)
}

fn implied<T>(value: T) -> Maybe<T> {
    Some(unplaced(value))
}
