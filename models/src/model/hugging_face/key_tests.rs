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
    let pairs = format!("{common} {shape} {own}");
    let pairs: Vec<&str> = Box::leak(pairs.into_boxed_str()).split_whitespace().collect();
    let split = |pair: &&'static str| pair.split_once('=').unwrap();
    pairs.iter().map(split).map(|(key, value)| (key, value.to_owned())).collect()
}

/// Values of a key that ask for something; one of them differs from every default.
fn requests(key: &str) -> &'static [&'static str] {
    match key {
        "hidden_act" | "hidden_activation" | "activation_function" => &["\"tanh\""],
        "model_type" => &["\"bert\""],
        "_name_or_path" => &["\"of/another\""],
        "layer_types" => &[
            "[\"sliding_attention\", \"sliding_attention\", \"sliding_attention\", \"full_attention\"]",
        ],
        "mlp_only_layers" => &["[0]"],
        "rope_scaling" => &["{\"rope_type\": \"yarn\", \"factor\": 4.0}"],
        "rope_parameters" | "quantization_config" => &["{\"bits\": 4}"],
        "rms_norm_eps"
        | "layer_norm_eps"
        | "layer_norm_epsilon"
        | "attention_dropout"
        | "hidden_dropout"
        | "router_jitter_noise"
        | "attn_pdrop"
        | "embd_pdrop"
        | "resid_pdrop"
        | "router_aux_loss_coef"
        | "partial_rotary_factor" => &["0.01"],
        "attention_bias"
        | "mlp_bias"
        | "norm_topk_prob"
        | "output_router_logits"
        | "rope_interleave"
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
        | "use_mrope" => &["true", "false"],
        _ => &["3", "2"],
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

/// A key that the table says a type reads changes the model, or is refused; any other changes
/// nothing, and is named unless released files carry it.
#[test]
fn types_read_the_keys_that_the_table_says() {
    let mut wrong = vec![];
    for model_type in ALL {
        let base = complete(model_type);
        let plain = outcome(model_type, &base);
        assert!(plain.is_ok(), "{model_type}: {plain:?}");
        for key in KEYS.iter().flat_map(|(_, keys, _)| keys.iter().copied()) {
            let with = |value: &&str| {
                let mut keys = base.clone();
                keys.insert(key, (*value).to_owned());
                keys
            };
            let all: Vec<_> = requests(key).iter().map(with).collect();
            let changes = all.iter().any(|keys| outcome(model_type, keys) != plain);
            let named = all.iter().any(|keys| names(model_type, keys, key));
            let of = find(key, model_type);
            if (changes, named) != (of == Some(Use::Read), of.is_none()) {
                let found = format!("changes the model: {changes}, is named: {named}");
                wrong.push(format!("`{key}` of {model_type}: {of:?}, but {found}"));
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
