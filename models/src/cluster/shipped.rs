//! The clusters that come with the program, compiled in.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use super::{ClusterSpec, Software, read};
use crate::input::{InputError, Source, parse_yaml};

macro_rules! clusters {
    ($($name:literal)*) => {
        [$(Shipped {
            name: $name,
            text: include_str!(concat!("../../shipped/clusters/", $name, ".yaml")),
            read: OnceLock::new(),
        }),*]
    };
}

/// A file, read when first asked for: validation asks for each row.
struct Shipped {
    name: &'static str,
    text: &'static str,
    read: OnceLock<Result<ClusterSpec, InputError>>,
}

/// In the order in which they are listed.
static SHIPPED: [Shipped; 14] = clusters![
    "dgx_h100" "dgx_h200" "dgx_b200" "gb200_nvl72" "dgx_b300" "gb300_nvl72" "h800" "selene" "a100_roce" "a800" "a10g_pcie" "a100_40g" "h100_hbm2e"
    "laptop"
];

/// Names of the shipped clusters.
pub fn shipped_names() -> impl Iterator<Item = &'static str> {
    SHIPPED.iter().map(|shipped| shipped.name)
}

/// Text of a shipped cluster, to read or to copy; `selene` and `selene.yaml` are the same one.
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

/// A shipped cluster by name; `None` where there is none of that name.
///
/// The error is for a shipped file that cannot be read, which the tests exclude.
pub fn shipped(name: &str) -> Option<Result<ClusterSpec, InputError>> {
    let shipped = find(name)?;
    Some(shipped.read.get_or_init(|| shipped.source().and_then(|source| read(&source))).clone())
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

/// A shipped generation of training software by name, for example `megatron_2024`; `None` where there
/// is none of that name.
///
/// # Errors
/// A shipped file that cannot be read, which the tests exclude.
pub fn software(name: &str) -> Result<Option<Software>, InputError> {
    Ok(generations()?.get(name).copied())
}
