//! The clusters that come with the program, compiled in.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use super::{ClusterSpec, Software, read};
use crate::input::{InputError, Source, parse_yaml};
use crate::shipped::Shipped;

macro_rules! clusters {
    ($($name:literal)*) => {
        [$(Shipped::new($name, include_str!(concat!("../../shipped/clusters/", $name, ".yaml")))),*]
    };
}

/// In the order in which they are listed.
static SHIPPED: [Shipped<ClusterSpec>; 14] = clusters![
    "dgx_h100" "dgx_h200" "dgx_b200" "gb200_nvl72" "dgx_b300" "gb300_nvl72" "h800" "selene" "a100_roce" "a800" "a10g_pcie" "a100_40g" "h100_hbm2e"
    "laptop"
];

/// Names of the shipped clusters.
pub fn shipped_names() -> impl Iterator<Item = &'static str> {
    SHIPPED.iter().map(Shipped::name)
}

/// Text of a shipped cluster, to read or to copy; `selene` and `selene.yaml` are the same one.
/// `None` where there is none of that name.
pub fn shipped_source(name: &str) -> Option<Result<Source, InputError>> {
    Some(Shipped::find(&SHIPPED, name)?.source())
}

/// A shipped cluster by name; `None` where there is none of that name.
///
/// The error is for a shipped file that cannot be read, which the tests exclude.
pub fn shipped(name: &str) -> Option<Result<ClusterSpec, InputError>> {
    Some(Shipped::find(&SHIPPED, name)?.get(read))
}

/// The shipped generations of training software.
const SOFTWARE: &str = include_str!("../../shipped/clusters/software.yaml");

type Generations = BTreeMap<String, Software>;

fn generations() -> Result<&'static Generations, InputError> {
    static READ: OnceLock<Result<Generations, InputError>> = OnceLock::new();
    let read = || parse_yaml(&Source::from_bytes("software.yaml", SOFTWARE.as_bytes().to_vec())?);
    READ.get_or_init(read).as_ref().map_err(Clone::clone)
}

/// Names of the shipped generations of training software, in alphabetical order.
///
/// # Errors
/// A shipped file that cannot be read, which the tests exclude.
pub fn software_names() -> Result<Vec<String>, InputError> {
    Ok(generations()?.keys().cloned().collect())
}

/// A shipped generation of training software by name, for example `megatron_2024`; `None` where
/// there is none of that name.
///
/// # Errors
/// A shipped file that cannot be read, which the tests exclude.
pub fn software(name: &str) -> Result<Option<Software>, InputError> {
    Ok(generations()?.get(name).copied())
}
