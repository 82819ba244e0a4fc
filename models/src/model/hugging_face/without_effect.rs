//! Keys of a file that ask for something and change nothing.

use std::fmt;

use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_yaml::Spanned;

use super::config::HfConfig;
use super::keys::Use::{Carried, Read};
use super::keys::{KEYS, SWITCH, SWITCHED, find};
use crate::input::{InputError, Source, parse_yaml};
use crate::model::spec::{ModelSpec, Moe};

/// Keys that ask for windows.
const OF_WINDOWS: [&str; 3] = ["sliding_window", "max_window_layers", "layer_types"];

/// Keys that released files repeat under another name, which their architecture does not read.
const REPEATED: [(&str, &str); 3] = [
    ("hidden_act", "hidden_activation"),
    ("sliding_window_size", "sliding_window"),
    ("head_dim", "qk_rope_head_dim"),
];

/// Carried keys that say what a type always is, with the value that says it.
const CARRIED_AS: [(&str, &str); 2] = [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")];

/// Carried keys that say what the model is, by [`value_of`].
const CARRIED_IF_TRUE: [&str; 5] = [
    "aux_loss_alpha",
    "qkv_bias",
    "rope_interleaved",
    "shared_expert_intermediate_size",
    "use_qk_norm",
];

/// Keys of a configuration that its architecture does not read although they ask for something,
/// with their lines.
///
/// # Errors
/// It is no configuration.
pub(in crate::model) fn keys_without_effect(
    source: &Source,
    spec: &ModelSpec,
) -> Result<Vec<(String, usize)>, InputError> {
    let Entries(entries) = parse_yaml(source)?;
    let config: HfConfig = parse_yaml(source)?;
    let model_type = config.model_type.value.as_str();
    let file = File { source, config: &config, spec, entries: &entries };
    let without_effect = entries.iter().filter(|(key, value)| match find(&key.value, model_type) {
        Some(Carried) => file.is_carried_otherwise(&key.value, value),
        Some(Read) => file.lacks_its_switch(&key.value),
        None => file.asks(&key.value, value),
    });
    Ok(without_effect.map(|(key, _)| (key.value.clone(), key.referenced.line() as usize)).collect())
}

struct File<'a> {
    source: &'a Source,
    config: &'a HfConfig,
    spec: &'a ModelSpec,
    entries: &'a [Entry],
}

impl File<'_> {
    /// Whether a key that is not read would change something where it is.
    fn asks(&self, key: &str, value: &Spanned<IgnoredAny>) -> bool {
        let text = self.text(value);
        let is_known = KEYS.iter().any(|(_, keys, _)| keys.contains(&key));
        let is_true = number(text).is_some_and(|said| value_of(self.spec, key) == Some(said));
        let agrees = is_known && (is_empty(text) || is_true);
        let is_repeated = REPEATED.iter().any(|(repeats, of)| {
            *repeats == key && self.given(of).is_some_and(|value| self.text(value) == text)
        });
        let is_windowless = OF_WINDOWS.contains(&key)
            && self.spec.attention.window.is_none()
            && (self.is_switched_off() || self.is_all_full(key));
        !(agrees || is_repeated || is_windowless)
    }

    /// Whether a carried key asks for something else than what the type is.
    fn is_carried_otherwise(&self, key: &str, value: &Spanned<IgnoredAny>) -> bool {
        let text = self.text(value);
        match CARRIED_AS.iter().find(|(of, _)| *of == key) {
            Some((_, own)) => text.trim_matches(['"', '\'']) != *own && !is_empty(text),
            None => CARRIED_IF_TRUE.contains(&key) && number(text) != value_of(self.spec, key),
        }
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

/// Whether a value as written is null or empty, which asks for nothing.
fn is_empty(text: &str) -> bool {
    ["", "~", "null", "\"\"", "''", "[]", "{}"].contains(&text)
}

/// A number or a switch as written; 1 for `true`.
fn number(text: &str) -> Option<f64> {
    match text {
        "true" => Some(1.0),
        "false" => Some(0.0),
        number => number.parse().ok(),
    }
}

/// What a model has of a key that its type does not read, as [`number`]; `None` where no value
/// says it. Keys that are not listed are of parts that the type does not have.
fn value_of(spec: &ModelSpec, key: &str) -> Option<f64> {
    let (attention, moe) = (&spec.attention, spec.moe.as_ref());
    let flag = |on: bool| Some(if on { 1.0 } else { 0.0 });
    let of_experts = |count: fn(&Moe) -> u64| Some(moe.map_or(0.0, |moe| count(moe) as f64));
    match key {
        // Biases on queries, keys and values alone are neither.
        "attention_bias" if attention.qkv_bias != attention.out_bias => None,
        "attention_bias" | "qkv_bias" | "use_qkv_bias" => flag(attention.qkv_bias),
        "mlp_bias" => flag(spec.mlp.bias || moe.is_some_and(|moe| moe.biased)),
        "use_qk_norm" => flag(attention.qk_norm),
        "norm_topk_prob" => flag(moe.is_some_and(|moe| moe.choice.renormalised)),
        "attention_dropout" | "hidden_dropout" => Some(spec.dropout),
        "use_sliding_window" => flag(attention.window.is_some()),
        "max_window_layers" if attention.window.is_some() => None,
        "num_experts" | "num_local_experts" | "n_routed_experts" => of_experts(|moe| moe.experts),
        "num_experts_per_tok" | "experts_per_token" => of_experts(|moe| moe.top_k),
        "moe_intermediate_size" => of_experts(|moe| moe.ffn),
        "shared_expert_intermediate_size" => of_experts(|moe| moe.shared_ffn),
        // Every model has these, and a file that names them otherwise is told so.
        "rms_norm_eps" | "layer_norm_eps" | "layer_norm_epsilon" => None,
        "n_embd" | "n_head" | "n_layer" | "n_inner" | "n_positions" => None,
        "head_dim" | "intermediate_size" | "num_key_value_heads" => None,
        _ => Some(0.0),
    }
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
