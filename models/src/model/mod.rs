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
use crate::kind::{Kind, or_other};
use crate::text::quotable;

/// Reads a model: our YAML, or a Hugging Face `config.json` (told by its `model_type`).
///
/// # Errors
/// Anything wrong with the text or the model, at its place, with what would be valid.
pub fn read(source: &Source) -> Result<ModelSpec, InputError> {
    let format: Format = parse_yaml(source)?;
    let raw = match format.model_type {
        Some(_) => hugging_face::raw_model(source)?,
        None => parse_yaml(source).map_err(|error| or_other(source, Kind::Model, error))?,
    };
    finish::finish(source, raw)
}

/// Keys that a warning names.
const NAMED: usize = 10;

/// Warnings, one sentence each, about requests of a model file that are not met: keys of a Hugging
/// Face `config.json` that have no effect, and parts that can be planned but not trained.
pub fn warnings(source: &Source, spec: &ModelSpec) -> Vec<String> {
    let hugging_face = parse_yaml(source).is_ok_and(|format: Format| format.model_type.is_some());
    let unknown = match hugging_face {
        true => hugging_face::keys_without_effect(source, spec).unwrap_or_default(),
        false => vec![],
    };
    let name = |(key, line): &(String, usize)| format!("`{}` (line {line})", quotable(key));
    let named: Vec<String> = unknown.iter().take(NAMED).map(name).collect();
    let more = match unknown.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let (named, file) = (named.join(", "), source.name());
    let keys = (!named.is_empty())
        .then(|| format!("{file}: keys that have no effect on this model: {named}{more}"));
    let untrained = &spec.numerics.unknown;
    let untrained = (!untrained.is_empty()).then(|| {
        let list = untrained.join(", ");
        format!("{file}: {list}: planned as without, and `plan generate` refuses it")
    });
    keys.into_iter().chain(untrained).collect()
}

/// What tells the formats apart.
#[derive(Deserialize)]
struct Format {
    model_type: Option<IgnoredAny>,
}
