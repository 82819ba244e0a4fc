//! What was measured of a machine whose ranks are threads: `runtime`'s program `measure` writes it,
//! `plan calibrate` makes a cluster of it.

use super::Dtype;
use serde::{Deserialize, Serialize};

/// Measurements. Every time is one rank's while all ranks do the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Ranks at a time.
    pub ranks: u64,
    /// Cores of the machine.
    pub cores: u64,
    /// Memory of the machine, bytes, where the system says.
    pub memory_bytes: Option<f64>,
    /// Matrix products.
    pub products: Vec<Product>,
    /// Copying from one place of memory to another.
    pub copy: Moved,
    /// Norms, rotations, residuals and activations of a layer together; bytes as a fused kernel moves.
    pub elementwise: Moved,
    /// The attention core, forward and backward.
    pub attention: Core,
    /// AdamW with the gradients' norm.
    pub adamw: Updated,
    /// Collectives over all ranks; none of a single one.
    pub collectives: Vec<Exchange>,
    /// Messages from each rank to the next.
    pub messages: Vec<Exchange>,
    /// Whole training steps.
    pub steps: Vec<Step>,
}

/// `[m, k] x [k, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Product {
    /// Number format.
    pub dtype: Dtype,
    /// Rows.
    pub m: u64,
    /// Columns.
    pub n: u64,
    /// Depth.
    pub k: u64,
    /// Seconds.
    pub s: f64,
}

/// Bytes read and written, and the time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Moved {
    /// Bytes.
    pub bytes: f64,
    /// Seconds.
    pub s: f64,
}

/// Causal attention of equal head widths.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Core {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each.
    pub seq_len: u64,
    /// Query heads.
    pub heads: u64,
    /// Key/value heads.
    pub kv_heads: u64,
    /// Their width.
    pub head_dim: u64,
    /// Seconds forward.
    pub forward_s: f64,
    /// Seconds backward.
    pub backward_s: f64,
}

/// Parameters updated.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Updated {
    /// Parameters.
    pub parameters: f64,
    /// Seconds.
    pub s: f64,
}

/// A collective, or a message.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Exchange {
    /// Of the whole tensor.
    pub bytes: f64,
    /// Seconds.
    pub s: f64,
}

/// A training step of a model under a split.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// The model's file.
    pub model: String,
    /// Sequences of the step.
    pub global_batch: u64,
    /// Ranks that share the machine: those measured, or one alone with all cores.
    pub ranks: u64,
    /// Tensor-parallel ranks; all other ranks train copies of their own, with nothing in common.
    pub tp: u64,
    /// Replicas.
    pub dp: u64,
    /// Seconds.
    pub s: f64,
}
