//! Models to train: the spec, its readers and its parameter counts.

mod finish;
mod hugging_face;
pub mod params;
mod raw;
mod shipped;
mod spec;

pub use finish::default_global_batch;
pub use shipped::{shipped, shipped_names, shipped_source};
pub use spec::*;

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::input::{InputError, Source, parse_yaml};

/// Reads a model: our YAML, or a Hugging Face `config.json` (told by its `model_type`).
///
/// # Errors
/// Anything wrong with the text or the model, at its place, with what would be valid.
pub fn read(source: &Source) -> Result<ModelSpec, InputError> {
    let format: Format = parse_yaml(source)?;
    let raw = match format.model_type {
        Some(_) => hugging_face::raw_model(source, &parse_yaml(source)?)?,
        None => parse_yaml(source)?,
    };
    finish::finish(source, raw)
}

/// What tells the formats apart.
#[derive(Deserialize)]
struct Format {
    model_type: Option<IgnoredAny>,
}
