//! The table of keys against what the reader does.

use std::collections::BTreeMap;

use super::keys::{ALL, KEYS, Use, find};
use crate::input::Source;
use crate::model::{ModelSpec, read, warnings};

/// A configuration of a type, as JSON values, in which each of its switches is on.
fn complete(model_type: &str) -> BTreeMap<&'static str, String> {
    let common = "vocab_size=100";
    let gpt2 = "n_embd=64 n_head=8 n_layer=4 n_positions=40";
    let rotary = "hidden_size=64 num_attention_heads=8 num_hidden_layers=4 intermediate_size=128 \
                  max_position_embeddings=40";
    let windows = "use_sliding_window=true sliding_window=16 max_window_layers=0";
    let losses = "output_router_logits=true router_aux_loss_coef=0.5";
    let own = match model_type {
        "qwen2" | "qwen3" => windows,
        "qwen3_moe" => &format!(
            "{windows} {losses} num_experts=8 num_experts_per_tok=2 moe_intermediate_size=32"
        ),
        "mixtral" => &format!("{losses} num_local_experts=8 num_experts_per_tok=2"),
        "gpt_oss" => &format!("{losses} num_local_experts=8 experts_per_token=2"),
        "deepseek_v3" => {
            "num_experts_per_tok=2 n_routed_experts=8 moe_intermediate_size=32 n_group=4 \
             topk_group=2 kv_lora_rank=16 qk_nope_head_dim=16 qk_rope_head_dim=8 v_head_dim=16 \
             first_k_dense_replace=1"
        }
        _ => "",
    };
    let shape = if model_type == "gpt2" { gpt2 } else { rotary };
    let groups = match model_type {
        "gpt2" | "deepseek_v3" => "",
        _ => "num_key_value_heads=4",
    };
    let pairs = format!("{common} {shape} {groups} {own}");
    let pairs: Vec<&str> = Box::leak(pairs.into_boxed_str()).split_whitespace().collect();
    let split = |pair: &&'static str| pair.split_once('=').unwrap();
    pairs.iter().map(split).map(|(key, value)| (key, value.to_owned())).collect()
}

/// Values of a key: one differs from every default, and each switch is on and off.
fn values(key: &str) -> &'static [&'static str] {
    match key {
        "hidden_act" | "hidden_activation" | "activation_function" => &["\"gelu\""],
        "model_type" => &["\"bert\""],
        "_name_or_path" => &["\"of/another\""],
        "layer_types" => &[
            "[\"sliding_attention\", \"sliding_attention\", \"sliding_attention\", \"full_attention\"]",
            "[\"full_attention\", \"full_attention\", \"full_attention\", \"full_attention\"]",
        ],
        "mlp_only_layers" => &["[0]"],
        "rope_scaling" => &["{\"rope_type\": \"yarn\", \"factor\": 4.0}"],
        "rope_parameters" | "quantization_config" => &["{\"bits\": 4}"],
        "partial_rotary_factor" => &["0.5"],
        "hidden_size" => &["128"],
        "scoring_func" => &["\"softmax\"", "\"sigmoid\""],
        "topk_method" => &["\"greedy\"", "\"noaux_tc\""],
        "rms_norm_eps"
        | "layer_norm_eps"
        | "layer_norm_epsilon"
        | "norm_epsilon"
        | "attention_dropout"
        | "embedding_dropout"
        | "residual_dropout"
        | "hidden_dropout"
        | "router_jitter_noise"
        | "attn_pdrop"
        | "embd_pdrop"
        | "resid_pdrop"
        | "aux_loss_alpha"
        | "router_aux_loss_coef" => &["0.01", "0.0"],
        "attention_bias"
        | "mlp_bias"
        | "norm_topk_prob"
        | "output_router_logits"
        | "qkv_bias"
        | "rope_interleave"
        | "rope_interleaved"
        | "use_qk_norm"
        | "use_qkv_bias"
        | "qk_layernorm"
        | "tie_word_embeddings"
        | "use_sliding_window"
        | "add_cross_attention"
        | "is_encoder_decoder"
        | "scale_attn_weights"
        | "scale_attn_by_inverse_layer_idx"
        | "use_parallel_residual"
        | "use_bidirectional_attention"
        | "use_bias"
        | "use_mrope" => &["true", "false"],
        _ => &["4", "3", "2", "32", "0"],
    }
}

/// Values that say what a type has where its class does not read the key, from the classes' code.
fn agreeing(key: &str, model_type: &str) -> &'static [&'static str] {
    let (yes, no) = (&["true"], &["false", "0", "0.0"]);
    let is_moe = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"].contains(&model_type);
    match (key, model_type) {
        // Biases on queries, keys and values alone are neither.
        ("attention_bias", "qwen2") => &[],
        ("attention_bias" | "mlp_bias", "gpt2") | ("mlp_bias", "gpt_oss") => yes,
        ("attention_bias" | "mlp_bias", "starcoder2") => yes,
        ("use_qkv_bias" | "qkv_bias", "qwen2" | "gpt2" | "gpt_oss" | "starcoder2") => yes,
        ("use_qk_norm", "qwen3" | "qwen3_moe") => yes,
        ("norm_topk_prob", "mixtral" | "gpt_oss") => yes,
        ("attention_dropout" | "hidden_dropout", "gpt2") => &[],
        ("use_sliding_window", "mistral" | "gemma2" | "gpt_oss") => yes,
        ("layer_types" | "max_window_layers", "mistral") => &[],
        ("max_window_layers", "gemma2" | "gpt_oss") => &[],
        ("layer_types", _) => &values("layer_types")[1..],
        ("scoring_func", "deepseek_v3") => &["\"sigmoid\""],
        ("topk_method", "deepseek_v3") => &["\"noaux_tc\""],
        ("shared_expert_intermediate_size", "deepseek_v3") => &["32"],
        ("num_experts_per_tok" | "experts_per_token", _) if is_moe => &["2"],
        ("moe_intermediate_size", "mixtral" | "gpt_oss") => &[],
        ("num_experts" | "num_local_experts" | "n_routed_experts", _) if is_moe => &[],
        ("n_embd" | "n_head" | "n_layer" | "n_inner" | "n_positions", _) => &[],
        ("head_dim" | "intermediate_size" | "num_key_value_heads", _) => &[],
        ("rms_norm_eps" | "layer_norm_eps" | "layer_norm_epsilon", _) => &[],
        _ => no,
    }
}

/// Carried keys of which another value than the type's own is named.
const CARRIED_AS: [&str; 7] = [
    "aux_loss_alpha",
    "qkv_bias",
    "rope_interleaved",
    "scoring_func",
    "shared_expert_intermediate_size",
    "topk_method",
    "use_qk_norm",
];

/// Whether of a key that is read every value but one is refused, while no other key changes.
fn is_fixed(key: &str, model_type: &str) -> bool {
    match key {
        "attention_dropout" | "model_type" | "moe_layer_freq" | "swiglu_alpha" | "swiglu_limit" => {
            true
        }
        "attn_pdrop" | "embd_pdrop" | "resid_pdrop" => true,
        "embedding_dropout" | "residual_dropout" => true,
        "num_key_value_heads" => model_type == "deepseek_v3",
        "num_experts_per_tok" => model_type == "gpt_oss",
        _ => false,
    }
}

fn source(model_type: &str, keys: &BTreeMap<&str, String>) -> Source {
    let lines = keys.iter().map(|(key, value)| format!(",\n\"{key}\": {value}"));
    let model_type = match keys.contains_key("model_type") {
        true => String::new(),
        false => format!(",\n\"model_type\": \"{model_type}\""),
    };
    let text = format!("{{\"x\": 1{model_type}{}}}", lines.collect::<String>());
    Source::from_bytes("config.json", text.into_bytes()).unwrap()
}

/// The model, or why it is refused.
fn outcome(model_type: &str, keys: &BTreeMap<&str, String>) -> Result<ModelSpec, String> {
    read(&source(model_type, keys)).map_err(|error| error.message)
}

fn names(model_type: &str, keys: &BTreeMap<&str, String>, key: &str) -> bool {
    let source = source(model_type, keys);
    read(&source).is_ok_and(|spec| {
        warnings(&source, &spec).iter().any(|said| said.contains(&format!("`{key}` (line")))
    })
}

/// A key that the table says a type reads changes the model, or can only be refused; any other
/// changes nothing. Of a key that is not read each value is named that says another thing than the
/// type has, and no other.
#[test]
fn types_read_the_keys_that_the_table_says() {
    let mut wrong = vec![];
    for model_type in ALL {
        let base = complete(model_type);
        let plain = outcome(model_type, &base);
        assert!(plain.is_ok(), "{model_type}: {plain:?}");
        for key in KEYS.iter().flat_map(|(_, keys, _)| keys.iter().copied()) {
            let of = find(key, model_type);
            let with = |value: &str| {
                let mut keys = base.clone();
                keys.insert(key, value.to_owned());
                keys
            };
            let all = || values(key).iter().map(|value| outcome(model_type, &with(value)));
            let changes = all().any(|found| found.is_ok() && found != plain);
            let refused = all().any(|found| found.is_err());
            let found = format!("changes the model: {changes}, is refused: {refused}");
            let right = match of {
                Some(Use::Read) if is_fixed(key, model_type) => refused && !changes,
                Some(Use::Read) => changes,
                _ => !changes && !refused,
            };
            if !right {
                wrong.push(format!("`{key}` of {model_type}: {of:?}, but {found}"));
            }
            for value in values(key).iter().filter(|_| right) {
                let disagrees = !agreeing(key, model_type).contains(value);
                let expected = match of {
                    Some(Use::Read) => false,
                    Some(Use::Carried) => disagrees && CARRIED_AS.contains(&key),
                    None => disagrees,
                };
                if names(model_type, &with(value), key) != expected {
                    wrong.push(format!("`{key}: {value}` of {model_type}: named: {}", !expected));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_key_stands_twice() {
    for model_type in ALL {
        let mut seen = vec![];
        for (_, keys, types) in KEYS.iter().filter(|(_, _, types)| types.contains(&model_type)) {
            assert!(types.iter().all(|of| ALL.contains(of)), "{types:?}");
            for key in *keys {
                assert!(!seen.contains(key), "`{key}` of {model_type}");
                seen.push(key);
            }
        }
    }
}
