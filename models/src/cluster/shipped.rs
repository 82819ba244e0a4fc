//! The clusters that come with the program, compiled in.

use std::collections::BTreeMap;

use super::{ClusterSpec, Software, read};
use crate::input::{InputError, Source, parse_yaml};

macro_rules! clusters {
    ($($name:literal)*) => {
        &[$(($name, include_str!(concat!("../../shipped/clusters/", $name, ".yaml")))),*]
    };
}

/// Name and text, in the order in which they are listed.
const SHIPPED: &[(&str, &str)] = clusters![
    "dgx_h100" "dgx_h200" "dgx_b200" "gb200_nvl72" "dgx_b300" "gb300_nvl72" "h800" "selene" "a100_roce" "a800" "a10g_pcie" "a100_40g" "h100_hbm2e"
    "laptop"
];

/// Names of the shipped clusters.
pub fn shipped_names() -> impl Iterator<Item = &'static str> {
    SHIPPED.iter().map(|(name, _)| *name)
}

/// Text of a shipped cluster, to read or to copy; `selene` and `selene.yaml` are the same one.
/// `None` where there is none of that name.
pub fn shipped_source(name: &str) -> Option<Result<Source, InputError>> {
    let wanted = name.strip_suffix(".yaml").unwrap_or(name);
    let (name, text) = SHIPPED.iter().find(|(name, _)| *name == wanted)?;
    Some(Source::from_bytes(format!("{name}.yaml"), text.as_bytes().to_vec()))
}

/// A shipped cluster by name; `None` where there is none of that name.
///
/// The error is for a shipped file that cannot be read, which the tests exclude.
pub fn shipped(name: &str) -> Option<Result<ClusterSpec, InputError>> {
    Some(shipped_source(name)?.and_then(|source| read(&source)))
}

/// The shipped generations of training software.
const SOFTWARE: &str = include_str!("../../shipped/clusters/software.yaml");

fn generations() -> Result<BTreeMap<String, Software>, InputError> {
    parse_yaml(&Source::from_bytes("software.yaml", SOFTWARE.as_bytes().to_vec())?)
}

/// Names of the shipped generations of training software, in alphabetical order.
///
/// # Errors
/// A shipped file that cannot be read, which the tests exclude.
pub fn software_names() -> Result<Vec<String>, InputError> {
    Ok(generations()?.into_keys().collect())
}

/// A shipped generation of training software by name, for example `megatron_2024`; `None` where there
/// is none of that name.
///
/// # Errors
/// A shipped file that cannot be read, which the tests exclude.
pub fn software(name: &str) -> Result<Option<Software>, InputError> {
    Ok(generations()?.remove(name))
}
