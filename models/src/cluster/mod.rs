//! Clusters: devices, links, the software that runs on them, and measured efficiency.

mod grid;
mod limits;
mod measured;
mod products;
mod raw;
pub mod roofline;
mod runs;
mod shipped;
mod spec;
mod tables;
mod written;

pub use grid::Grid;
pub use measured::{
    Collective, CollectiveKind, Core, Exchange, Measured, MeasuredGpu, Moved, Product, Step,
    Updated,
};
pub use products::{Products, Waves};
pub use runs::{MeasuredRuns, Runs, Seen, features, measured_runs};
pub use shipped::{shipped, shipped_names, shipped_source, software, software_names};
pub use spec::*;
pub use tables::{AttentionPass, AttentionTable, EfficiencyTables, LinkTable, Scaled, table_names};
pub use written::table_text;

use crate::input::{InputError, Source, parse_yaml};
use crate::kind::{Kind, or_other};

/// Reads a cluster from YAML.
///
/// # Errors
/// Anything wrong with the text or a value, at its place, with what would be valid.
pub fn read(source: &Source) -> Result<ClusterSpec, InputError> {
    let raw = parse_yaml(source).map_err(|error| or_other(source, Kind::Cluster, error))?;
    raw::finish(source, &raw)
}

/// Warnings, one sentence each, about figures of a cluster's file that are valid but that no
/// machine has: most were typed in another unit.
pub fn warnings(source: &Source) -> Vec<String> {
    parse_yaml(source).map_or_else(|_| vec![], |raw| raw::implausible(source, &raw))
}
