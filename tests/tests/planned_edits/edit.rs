//! What an edit is, and the programs that are edited.

/// Residual stream split over the tensor-parallel ranks.
pub const SPLIT: &str = "true";
/// Residual stream whole on each of them.
pub const WHOLE: &str = "false";
/// A mixture of experts over expert-parallel ranks, its residual stream split.
pub const EXPERTS: &str = "experts";
/// The same whose selection biases are updated by load.
pub const BALANCED: &str = "balanced";
/// Sequences in blocks over context-parallel ranks, and weights over replicas.
pub const BLOCKS: &str = "blocks";

/// Path below `src`, a text that occurs once, and what replaces it.
pub type Replacement = (&'static str, &'static str, &'static str);

pub struct Edit {
    pub name: &'static str,
    /// Program that is edited.
    pub program: &'static str,
    pub replacements: &'static [Replacement],
    /// What the message must say.
    pub says: &'static [&'static str],
}

pub const fn edit(
    name: &'static str,
    program: &'static str,
    replacements: &'static [Replacement],
    says: &'static [&'static str],
) -> Edit {
    Edit { name, program, replacements, says }
}
