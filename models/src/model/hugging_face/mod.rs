//! Hugging Face `config.json` as a raw model.
//!
//! Keys and defaults are those of the configuration classes of transformers 4.57. The user is told
//! of keys that the file's architecture does not read ([`keys_without_effect`]).

mod attention;
mod build;
mod config;
mod experts;
mod formulas;
#[cfg(test)]
mod key_tests;
mod keys;
mod rotary;
mod without_effect;

use serde_yaml::{Location, Spanned};

use super::raw::{Maybe, RawModel};
use crate::input::{InputError, Source, nearest, parse_yaml};
use config::HfConfig;
use keys::ALL;

pub(super) use without_effect::keys_without_effect;

/// `model_type`s that are not read, and what no [`super::ModelSpec`] says of them.
const INEXPRESSIBLE: [(&[&str], &str); 9] = [
    // Only latent attention does so here.
    (
        &["codegen", "cohere", "cohere2", "gptj"],
        "its RoPE turns neighbouring columns, and its attention and feed-forward blocks run side \
         by side",
    ),
    (&["ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium"], "its RoPE turns neighbouring columns"),
    (
        &["gpt_neox", "phi"],
        "its attention and feed-forward blocks run side by side (a parallel residual)",
    ),
    (
        &["falcon"],
        "its attention and feed-forward blocks run side by side (`parallel_attn`), or its \
         positions are ALiBi",
    ),
    (&["bloom", "mpt"], "its positions are ALiBi"),
    (&["olmo"], "its norms have no weights"),
    (
        &["olmo2", "olmo3"],
        "its norms come after attention and feed-forward blocks alone, and those of queries and \
         keys span all heads",
    ),
    (&["gemma3", "gemma3_text"], "its windowed layers have another base of RoPE than the others"),
    (&["smollm3"], "some of its layers have no positions"),
];

/// The raw model of a configuration.
///
/// # Errors
/// Unsupported `model_type`, missing keys, and shapes that [`super::ModelSpec`] cannot say.
pub(super) fn raw_model(source: &Source) -> Result<RawModel, InputError> {
    let config: HfConfig = parse_yaml(source)?;
    let reader = Reader { source, config: &config };
    let raw = match config.model_type.value.as_str() {
        "llama" => reader.llama(),
        "mistral" => reader.mistral(),
        "qwen2" => reader.qwen2(),
        "qwen3" => reader.qwen3(),
        "qwen3_moe" => reader.qwen3_moe(),
        "gemma" => reader.gemma(),
        "gemma2" => reader.gemma2(),
        "mixtral" => reader.mixtral(),
        "deepseek_v3" => reader.deepseek_v3(),
        "gpt2" => reader.gpt2(),
        "gpt_oss" => reader.gpt_oss(),
        "stablelm" => reader.stablelm(),
        "phi3" => reader.phi3(),
        "granite" => reader.granite(),
        "starcoder2" => reader.starcoder2(),
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
        let nearest = nearest(model_type, &ALL)
            .map(|best| format!("did you mean `{best}`? "))
            .unwrap_or_default();
        let supported = ALL.join(", ");
        let known = INEXPRESSIBLE.iter().find(|(types, _)| types.contains(&model_type));
        let (why, nearest, instead) = match known {
            Some((_, why)) => (format!(": {why}"), String::new(), ""),
            None => (String::new(), nearest, "; or describe the model in our YAML"),
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
            let help = format!("add \"{key}\": ... as the architecture's other checkpoints have");
            let misspelt = self.misspelt(key).map(|found| format!("did you mean `{found}`? "));
            missing().help(misspelt.unwrap_or_default() + &help)
        })
    }

    /// The key of the file that resembles one that is missing, by a letter or two.
    fn misspelt(&self, key: &str) -> Option<String> {
        let file: serde_json::Value = serde_json::from_str(self.source.text()).ok()?;
        let keys: Vec<&str> = file.as_object()?.keys().map(String::as_str).collect();
        let found = nearest(key, &keys)?;
        (found.len().abs_diff(key.len()) <= 2).then(|| found.to_owned())
    }

    fn is(&self, model_type: &str) -> bool {
        self.config.model_type.value == model_type
    }

    /// `meta-llama/Llama-2-7b` is called `Llama-2-7b`.
    fn name(&self) -> Maybe<String> {
        let path =
            self.config.name_or_path.as_ref().filter(|path| !path.value.trim().is_empty())?;
        let last = path.value.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
        Some(Spanned { value: last.to_owned(), ..path.clone() })
    }
}

/// A value that the file does not give.
fn unplaced<T>(value: T) -> Spanned<T> {
    Spanned::new(value, Location::UNKNOWN, Location::UNKNOWN)
}

fn implied<T>(value: T) -> Maybe<T> {
    Some(unplaced(value))
}
