//! The nouns of Meshwright.
//!
//! The types that all other crates share: a model ([`model::ModelSpec`]), a cluster
//! ([`cluster::ClusterSpec`]), the layout of ranks ([`mesh`]), the decisions ([`decisions`]),
//! pipeline schedules as lists of passes ([`schedule`]), and the papers' formulas as plain
//! functions ([`formulas`]). Nothing here touches a device, a solver or the network.
//!
//! # Symbols
//!
//! | symbol | meaning |
//! |---|---|
//! | `b` | micro-batch, sequences |
//! | `s` | sequence length, tokens |
//! | `h` | hidden size |
//! | `f` | feed-forward width |
//! | `a`, `k` | query heads, key/value heads |
//! | `V` | vocabulary size |
//! | `L` | transformer layers |
//! | `t`, `p`, `c`, `d` | tensor, pipeline, context and data parallel degrees |
//! | `m`, `v` | micro-batches an iteration, chunks (virtual stages) per pipeline rank |

pub mod check;
pub mod cluster;
pub mod decisions;
pub mod formulas;
pub mod input;
mod kind;
pub mod layer;
pub mod mesh;
pub mod model;
pub mod placement;
pub mod plan;
pub mod program;
pub mod schedule;
pub mod shapes;
mod shipped;
pub mod text;
