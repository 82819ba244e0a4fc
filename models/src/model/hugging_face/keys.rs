//! Which key belongs to which architecture.

use std::fmt;

use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_yaml::Spanned;

use super::config::HfConfig;
use crate::input::{InputError, Source, parse_yaml};

/// What a configuration class does with a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// It is part of the model.
    Read,
    /// Released files have it, and it changes nothing here: it names and runs a checkpoint,
    /// generates text with it, initialises it, or follows from other keys.
    Carried,
}

use Use::{Carried, Read};

/// Every `model_type` that is read.
pub(super) const ALL: [&str; 11] = [
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

/// Each key with the `model_type`s whose configurations have it: the configuration classes of
/// transformers 4.57 and the released files of these types. A key of another type has no effect.
pub(super) const KEYS: [(Use, &[&str], &[&str]); 26] = [
    (
        Read,
        &[
            "_name_or_path",
            "hidden_size",
            "max_position_embeddings",
            "model_type",
            "num_attention_heads",
            "num_hidden_layers",
            "tie_word_embeddings",
            "vocab_size",
        ],
        &ALL,
    ),
    (Read, &CHANGES_FORMULAS, &ALL),
    (
        Read,
        &["attention_dropout", "intermediate_size", "num_key_value_heads", "rope_theta"],
        &[
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "qwen3_moe",
            "gemma2",
            "mixtral",
            "deepseek_v3",
            "gpt_oss",
            "stablelm",
        ],
    ),
    (
        Read,
        &["hidden_act"],
        &[
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "qwen3_moe",
            "mixtral",
            "deepseek_v3",
            "gpt_oss",
            "stablelm",
        ],
    ),
    (
        Read,
        &["rms_norm_eps"],
        &[
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "qwen3_moe",
            "gemma2",
            "mixtral",
            "deepseek_v3",
            "gpt_oss",
        ],
    ),
    (
        Read,
        &["head_dim"],
        &["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "mixtral", "gpt_oss"],
    ),
    (
        Read,
        &["attention_bias"],
        &["llama", "qwen3", "qwen3_moe", "gemma2", "deepseek_v3", "gpt_oss"],
    ),
    (Read, &["mlp_bias"], &["llama"]),
    (
        Read,
        &["sliding_window"],
        &["mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "mixtral", "gpt_oss"],
    ),
    (Read, &["layer_types"], &["qwen2", "qwen3", "qwen3_moe", "gemma2", "gpt_oss"]),
    (Read, &["max_window_layers", SWITCH], &SWITCHED),
    (
        Read,
        &[
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "hidden_activation",
            "query_pre_attn_scalar",
        ],
        &["gemma2"],
    ),
    (Read, &["num_experts_per_tok"], &["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"]),
    (Read, &["num_local_experts"], &["mixtral", "gpt_oss"]),
    (Read, &["output_router_logits", "router_aux_loss_coef"], &["qwen3_moe", "mixtral", "gpt_oss"]),
    (Read, &["moe_intermediate_size", "norm_topk_prob"], &["qwen3_moe", "deepseek_v3"]),
    (Read, &["decoder_sparse_step", "mlp_only_layers", "num_experts"], &["qwen3_moe"]),
    (
        Read,
        &[
            "first_k_dense_replace",
            "kv_lora_rank",
            "moe_layer_freq",
            "n_group",
            "n_routed_experts",
            "n_shared_experts",
            "num_nextn_predict_layers",
            "q_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "routed_scaling_factor",
            "topk_group",
            "v_head_dim",
        ],
        &["deepseek_v3"],
    ),
    (
        Carried,
        &["aux_loss_alpha", "ep_size", "qk_head_dim", "scoring_func", "seq_aux", "topk_method"],
        &["deepseek_v3"],
    ),
    (Read, &["experts_per_token", "swiglu_alpha", "swiglu_limit"], &["gpt_oss"]),
    (Carried, &["initial_context_length"], &["gpt_oss"]),
    (Read, &["layer_norm_eps", "use_qkv_bias"], &["stablelm"]),
    (
        Read,
        &[
            "activation_function",
            "attn_pdrop",
            "embd_pdrop",
            "layer_norm_epsilon",
            "n_embd",
            "n_head",
            "n_inner",
            "n_layer",
            "n_positions",
            "resid_pdrop",
        ],
        &["gpt2"],
    ),
    (
        Carried,
        &[
            "n_ctx",
            "reorder_and_upcast_attn",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        ],
        &["gpt2"],
    ),
    (Carried, &OF_CHECKPOINTS, &ALL),
    // Released files of several types have it switched off.
    (Read, &["use_mrope"], &[]),
];

/// Keys whose request no spec can express, named with every type (`Reader::unknown`).
const CHANGES_FORMULAS: [&str; 14] = [
    "add_cross_attention",
    "hidden_dropout",
    "is_encoder_decoder",
    "partial_rotary_factor",
    "qk_layernorm",
    "quantization_config",
    "rope_interleave",
    "rope_parameters",
    "rope_scaling",
    "router_jitter_noise",
    "scale_attn_by_inverse_layer_idx",
    "scale_attn_weights",
    "use_bidirectional_attention",
    "use_parallel_residual",
];

/// Keys of the class that all configurations extend, and of released files of several types.
const OF_CHECKPOINTS: [&str; 66] = [
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "_commit_hash",
    "architectures",
    "attn_implementation",
    "auto_map",
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
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "initializer_range",
    "is_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
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
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "use_bfloat16",
    "use_cache",
];

/// The key that turns windows off, and the types that have it.
const SWITCH: &str = "use_sliding_window";
const SWITCHED: [&str; 3] = ["qwen2", "qwen3", "qwen3_moe"];

/// Keys that ask for windows.
const OF_WINDOWS: [&str; 3] = ["sliding_window", "max_window_layers", "layer_types"];

/// Keys that released files repeat under another name, which their architecture does not read.
const REPEATED: [(&str, &str); 3] = [
    ("hidden_act", "hidden_activation"),
    ("sliding_window_size", "sliding_window"),
    ("head_dim", "qk_rope_head_dim"),
];

/// Keys of a configuration that its architecture does not read although they ask for something,
/// with their lines.
///
/// # Errors
/// It is no configuration.
pub(in crate::model) fn keys_without_effect(
    source: &Source,
) -> Result<Vec<(String, usize)>, InputError> {
    let Entries(entries) = parse_yaml(source)?;
    let config: HfConfig = parse_yaml(source)?;
    let model_type = config.model_type.value.as_str();
    let file = File { source, config: &config, entries: &entries };
    let without_effect = entries.iter().filter(|(key, value)| match find(&key.value, model_type) {
        Some(Carried) => false,
        Some(Read) => file.lacks_its_switch(&key.value),
        None => file.asks(&key.value, value),
    });
    Ok(without_effect.map(|(key, _)| (key.value.clone(), key.referenced.line() as usize)).collect())
}

/// What the configurations of a type do with a key; `None` where they do not have it.
pub(super) fn find(key: &str, model_type: &str) -> Option<Use> {
    let has = |(_, keys, types): &&(Use, &[&str], &[&str])| {
        keys.contains(&key) && types.contains(&model_type)
    };
    KEYS.iter().find(has).map(|(of, _, _)| *of)
}

struct File<'a> {
    source: &'a Source,
    config: &'a HfConfig,
    entries: &'a [Entry],
}

impl File<'_> {
    /// Whether a key that is not read would change something where it is.
    fn asks(&self, key: &str, value: &Spanned<IgnoredAny>) -> bool {
        let text = self.text(value);
        let is_known = KEYS.iter().any(|(_, keys, _)| keys.contains(&key));
        // No other key's `false` differs from its absence.
        let is_off = is_known && key != "norm_topk_prob" && is_off(text);
        let is_repeated = REPEATED.iter().any(|(repeats, of)| {
            *repeats == key && self.given(of).is_some_and(|value| self.text(value) == text)
        });
        let is_windowless =
            OF_WINDOWS.contains(&key) && (self.is_switched_off() || self.is_all_full(key));
        !(is_off || is_repeated || is_windowless)
    }

    /// A width of windows in a type that has none unless they are switched on.
    fn lacks_its_switch(&self, key: &str) -> bool {
        let given = self.config.sliding_window.as_ref().is_some_and(Option::is_some);
        let is_switched = SWITCHED.contains(&self.config.model_type.value.as_str());
        key == "sliding_window" && given && is_switched && self.given(SWITCH).is_none()
    }

    fn is_switched_off(&self) -> bool {
        self.config.use_sliding_window.as_ref().is_some_and(|switch| !switch.value)
    }

    fn is_all_full(&self, key: &str) -> bool {
        let full = |kind: &String| kind == "full_attention";
        let types = self.config.layer_types.as_ref().filter(|_| key == "layer_types");
        types.is_some_and(|types| types.value.iter().all(full))
    }

    fn given(&self, key: &str) -> Option<&Spanned<IgnoredAny>> {
        self.entries.iter().find(|(given, _)| given.value == key).map(|(_, value)| value)
    }

    fn text(&self, value: &Spanned<IgnoredAny>) -> &str {
        self.source.value_at(value.referenced).trim()
    }
}

/// Whether a value as written is null, `false`, zero or empty.
fn is_off(text: &str) -> bool {
    let empty = ["", "~", "null", "false", "\"\"", "''", "[]", "{}"];
    empty.contains(&text) || text.parse::<f64>().is_ok_and(|number| number == 0.0)
}

type Entry = (Spanned<String>, Spanned<IgnoredAny>);

/// The keys of a mapping with their values.
struct Entries(Vec<Entry>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = vec![];
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        from.deserialize_map(InOrder)
    }
}
