//! What a file is, told by its keys: a model, a cluster, a plan or a Hugging Face configuration.

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::input::{InputError, Source, parse_yaml};

/// Kinds of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Model,
    Cluster,
    Plan,
    /// A Hugging Face configuration without its `model_type`.
    Untyped,
}

type Given = Option<IgnoredAny>;

#[derive(Deserialize)]
struct Keys {
    layers: Given,
    hidden: Given,
    device: Given,
    levels: Given,
    version: Given,
    decisions: Given,
    model_type: Given,
    hidden_size: Given,
    n_embd: Given,
}

/// The kind of a file; `None` where its keys do not tell.
fn kind(source: &Source) -> Option<Kind> {
    let keys: Keys = parse_yaml(source).ok()?;
    let is_config = keys.hidden_size.is_some() || keys.n_embd.is_some();
    let told = [
        (
            Kind::Model,
            keys.model_type.is_some() || (keys.layers.is_some() && keys.hidden.is_some()),
        ),
        (Kind::Cluster, keys.device.is_some() && keys.levels.is_some()),
        (Kind::Plan, keys.version.is_some() && keys.decisions.is_some()),
        (Kind::Untyped, is_config),
    ];
    told.into_iter().find(|(_, is)| *is).map(|(kind, _)| kind)
}

/// The error for a file that could not be read as what was wanted: where it is of another kind,
/// that it is, with the flag that takes it; `error` otherwise.
pub(crate) fn or_other(source: &Source, wanted: Kind, error: InputError) -> InputError {
    let Some(found) = kind(source).filter(|&found| found != wanted) else { return error };
    let name = source.name();
    if found == Kind::Untyped && wanted == Kind::Model {
        return InputError::new(format!("{name} has no `model_type`"))
            .help("add it as the architecture's released config.json has it");
    }
    let wanted = if wanted == Kind::Cluster { "cluster" } else { "model" };
    let (is, flag) = match found {
        Kind::Model | Kind::Untyped => ("a model", "--model takes it"),
        Kind::Cluster => ("a cluster", "--cluster takes it"),
        Kind::Plan => ("a plan", "--from plans again from it"),
    };
    InputError::new(format!("{name} is {is}, no {wanted}")).help(flag)
}
