//! What a rank holds: parameters and their declarations, pooled buffers, and checkpoint files.

pub(crate) mod buffer;
pub mod checkpoint;
pub mod params;
