//! Which key belongs to which architecture.

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

/// All types but `gpt2`, whose keys have names of their own.
const BUT_GPT2: [&str; 10] = [
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
];

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
pub(super) const KEYS: [(Use, &[&str], &[&str]); 29] = [
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
    (Read, &["hidden_dropout"], &BUT_GPT2),
    (
        Read,
        &["attention_dropout", "intermediate_size", "num_key_value_heads", "rope_theta"],
        &BUT_GPT2,
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
            "_num_labels",
            "n_ctx",
            "n_special",
            "output_past",
            "predict_special_tokens",
            "reorder_and_upcast_attn",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        ],
        &["gpt2"],
    ),
    (
        Carried,
        &["is_llama_config", "max_sequence_length", "rope_interleaved", "transformers.js_config"],
        &["llama"],
    ),
    (Carried, &["qkv_bias", "shared_expert_intermediate_size", "use_qk_norm"], &["qwen3_moe"]),
    (Carried, &OF_CHECKPOINTS, &ALL),
    // Released files of several types have it switched off.
    (Read, &["use_mrope"], &[]),
];

/// Keys whose request no spec can express, named with every type (`Reader::unknown`).
const CHANGES_FORMULAS: [&str; 13] = [
    "add_cross_attention",
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
pub(super) const SWITCH: &str = "use_sliding_window";
pub(super) const SWITCHED: [&str; 3] = ["qwen2", "qwen3", "qwen3_moe"];

/// What the configurations of a type do with a key; `None` where they do not have it.
pub(super) fn find(key: &str, model_type: &str) -> Option<Use> {
    let has = |(_, keys, types): &&(Use, &[&str], &[&str])| {
        keys.contains(&key) && types.contains(&model_type)
    };
    KEYS.iter().find(has).map(|(of, _, _)| *of)
}
