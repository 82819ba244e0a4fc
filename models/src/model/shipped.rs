//! The models that come with the program, compiled in.

use super::{ModelSpec, read};
use crate::input::{InputError, Source};
use crate::shipped::Shipped;

macro_rules! models {
    ($($name:literal)*) => {
        [$(Shipped::new($name, include_str!(concat!("../../shipped/models/", $name, ".yaml")))),*]
    };
}

/// In the order in which they are listed.
static SHIPPED: [Shipped<ModelSpec>; 41] = models![
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
    SHIPPED.iter().map(Shipped::name)
}

/// Text of a shipped model, to read or to copy; `llama70b` and `llama70b.yaml` are the same one.
/// `None` where there is none of that name.
pub fn shipped_source(name: &str) -> Option<Result<Source, InputError>> {
    Some(Shipped::find(&SHIPPED, name)?.source())
}

/// A shipped model by name; `None` where there is none of that name.
///
/// The error is for a shipped file that cannot be read, which the tests exclude.
pub fn shipped(name: &str) -> Option<Result<ModelSpec, InputError>> {
    Some(Shipped::find(&SHIPPED, name)?.get(read))
}
