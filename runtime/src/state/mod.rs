//! What a rank holds: parameters and their declarations, how replicas share their state, pooled
//! buffers, and checkpoint files.

pub(crate) mod buffer;
pub mod checkpoint;
pub mod gradients;
pub mod params;
pub mod shards;
pub mod weights;
