//! Measurements of a machine whose ranks are threads, or of a GPU. The runtime's programs `measure`
//! and `measure-gpu` write them; `plan calibrate` turns them into a cluster file.

use super::Dtype;
use serde::{Deserialize, Serialize};

/// Measurements of a machine. Every time is one rank's while all ranks do the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Ranks at a time.
    pub ranks: u64,
    /// Cores of the machine.
    pub cores: u64,
    /// Memory of the machine, bytes, if the system reports it.
    pub memory_bytes: Option<f64>,
    /// Matrix products.
    pub products: Vec<Product>,
    /// Copying from one place of memory to another.
    pub copy: Moved,
    /// Norms, rotations, residuals and activations of a layer together; bytes are those of fused
    /// kernels.
    pub elementwise: Moved,
    /// The attention core, forward and backward.
    pub attention: Core,
    /// AdamW with the gradients' norm.
    pub adamw: Updated,
    /// Collectives over all ranks; empty for a single rank.
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
    /// Tensor-parallel ranks. All other ranks train independent copies.
    pub tp: u64,
    /// Replicas.
    pub dp: u64,
    /// Seconds.
    pub s: f64,
}

/// Measurements of a GPU. Where one is empty, the cluster's figure stays.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MeasuredGpu {
    /// The maker's name of it.
    pub gpu: String,
    /// Driver and libraries, in words.
    pub versions: String,
    /// Multiprocessors.
    pub multiprocessors: u64,
    /// Its memory, bytes.
    pub memory_bytes: f64,
    /// Time from one nearly empty kernel to the next, seconds.
    pub launch_s: Option<f64>,
    /// Copies on the device, small to large.
    pub copies: Vec<Moved>,
    /// Norms, rotations, residuals and activations of a layer; bytes are those of fused kernels.
    pub elementwise: Vec<Moved>,
    /// AdamW with the gradients' norm.
    pub adamw: Option<Updated>,
    /// Matrix products: of each format, every combination of its sizes.
    pub products: Vec<Product>,
    /// Time of a large product after a second of sustained load, over its time alone.
    pub sustained_slowdown: Option<f64>,
    /// Causal attention, in 16 bits.
    pub attention: Vec<Core>,
    /// Collectives of ranks that share the GPU.
    pub collectives: Vec<Collective>,
    /// Whole training steps.
    pub steps: Vec<Step>,
}

/// A collective of a table.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Collective {
    /// Which.
    pub kind: CollectiveKind,
    /// Ranks.
    pub ranks: u64,
    /// Of the whole tensor.
    pub bytes: f64,
    /// Seconds.
    pub s: f64,
}

/// The collectives that tables hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectiveKind {
    /// Every rank ends with the sum.
    AllReduce,
    /// Every rank ends with all shards.
    AllGather,
    /// Every rank ends with its shard of the sum.
    ReduceScatter,
    /// Every rank sends a different shard to each.
    AllToAll,
}

impl CollectiveKind {
    /// All.
    pub const ALL: [Self; 4] =
        [Self::AllReduce, Self::AllGather, Self::ReduceScatter, Self::AllToAll];

    /// The name in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "all_to_all",
        }
    }
}
