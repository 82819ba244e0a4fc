//! One training step of one rank: passes, transfers, reductions, and replay as a CUDA graph.

pub(crate) mod executor;
pub(crate) mod graph_replay;
pub(crate) mod post_validation;
pub(crate) mod reduce;
pub(crate) mod vocab_collectives;
