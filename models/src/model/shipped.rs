//! The models that come with the program, compiled in.

use super::{ModelSpec, read};
use crate::input::{InputError, Source};
use std::sync::OnceLock;

macro_rules! models {
    ($($name:literal)*) => {
        [$(Shipped {
            name: $name,
            text: include_str!(concat!("../../shipped/models/", $name, ".yaml")),
            read: OnceLock::new(),
        }),*]
    };
}

/// A file, read when first asked for: validation asks for each row.
struct Shipped {
    name: &'static str,
    text: &'static str,
    read: OnceLock<Result<ModelSpec, InputError>>,
}

/// In the order in which they are listed.
static SHIPPED: [Shipped; 41] = models![
    "tiny" "gpt2_124m"
    "llama8b" "llama70b" "llama405b" "llama2_7b" "llama2_70b" "gemma2_9b"
    "mixtral_8x7b" "mixtral_8x22b" "qwen3_235b_a22b" "qwen3_30b_a3b" "deepseek_v2" "deepseek_v3"
    "gpt_oss_120b" "grok1" "llama4_maverick" "nemotron4_15b" "mpt_7b"
    "gpt3_175b" "opt_175b"
    "gpt_1.7b" "gpt_3.6b" "gpt_7.5b" "gpt_18b" "gpt_39b"
    "gpt_76b" "gpt_145b" "gpt_310b" "gpt_530b" "gpt_1t"
    "vocab_4b" "vocab_10b" "vocab_21b" "vocab_7b" "vocab_16b" "vocab_30b"
    "ampipe_base" "ampipe_medium" "ampipe_large" "ampipe_xl"
];

/// Names of the shipped models.
pub fn shipped_names() -> impl Iterator<Item = &'static str> {
    SHIPPED.iter().map(|shipped| shipped.name)
}

/// Text of a shipped model, to read or to copy; `llama70b` and `llama70b.yaml` are the same one.
/// `None` where there is none of that name.
pub fn shipped_source(name: &str) -> Option<Result<Source, InputError>> {
    Some(find(name)?.source())
}

fn find(name: &str) -> Option<&'static Shipped> {
    let wanted = name.strip_suffix(".yaml").unwrap_or(name);
    SHIPPED.iter().find(|shipped| shipped.name == wanted)
}

impl Shipped {
    fn source(&self) -> Result<Source, InputError> {
        Source::from_bytes(format!("{}.yaml", self.name), self.text.as_bytes().to_vec())
    }
}

/// A shipped model by name; `None` where there is none of that name.
///
/// The error is for a shipped file that cannot be read, which the tests exclude.
pub fn shipped(name: &str) -> Option<Result<ModelSpec, InputError>> {
    let shipped = find(name)?;
    Some(shipped.read.get_or_init(|| shipped.source().and_then(|source| read(&source))).clone())
}
