//! Time of the attention core: scores, softmax and values, without the projections.

use models::cluster::{AttentionKernel, AttentionPass, ClusterSpec, Dtype};
use models::formulas::attention::{causal_pairs, core_flops, last_causal_pairs};

/// One attention call on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: u64,
    /// Query heads on this rank.
    pub heads: u64,
    /// Key/value heads on this rank; no price depends on them.
    pub kv_heads: u64,
    /// Queries, tokens.
    pub query_len: u64,
    /// Keys, tokens; more than queries where context parallelism gathers them.
    pub key_len: u64,
    /// Width of a query or key head.
    pub head_dim_qk: u64,
    /// Width of a value head.
    pub head_dim_v: u64,
    /// Causal mask. Queries that are fewer than the keys are spread evenly over them, as zig-zag
    /// chunks are, or are the last ones.
    pub causal: bool,
    /// Whether the queries are the last ones: a chunk of a sequence, with the keys up to its end.
    pub last_queries: bool,
    /// Keys a query sees, itself included.
    pub window: Option<u64>,
    /// Every softmax counts a learned logit beside the keys'.
    pub sinks: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    Forward,
    Backward,
}

/// Part of the peak that fused forward kernels reach on long sequences where nothing was measured.
const FLASH_ASYMPTOTE: f64 = 0.6;
/// Tokens at which a fused kernel runs at half its asymptote (fit to published runs, 430).
const FLASH_HALF_TOKENS: f64 = 430.0;
/// Backward over forward efficiency of fused kernels where nothing was measured (cuDNN on H200: .76
/// to .87).
const FLASH_BACKWARD_EFFICIENCY: f64 = 0.85;
/// Part of the peak of the batched products of unfused attention (fit to published runs, .42).
const UNFUSED_EFFICIENCY: f64 = 0.42;
/// Bytes that unfused attention moves for each 16-bit score in one pass: softmax, dropout and their
/// gradients read and write it. Published runs fit 16 bytes for forward and backward together.
const SCORE_BYTES: f64 = 8.0;

/// Width up to which heads are narrow: they fill half of the 128 columns of a kernel's tile.
const NARROW: u64 = 64;

impl Pass {
    /// Products of query width and of value width in a fused kernel. The backward pass recomputes
    /// the scores (FlashAttention, algorithm 4).
    fn fused_products(self) -> [f64; 2] {
        match self {
            Self::Forward => [1.0, 1.0],
            Self::Backward => [3.0, 2.0],
        }
    }
}

/// Seconds of the forward pass; computed in 16 bits where the rest of the layer runs in 8 or 4.
pub fn forward_s(cluster: &ClusterSpec, shape: &AttentionShape, dtype: Dtype) -> f64 {
    pass_s(cluster, shape, dtype, Pass::Forward)
}

/// Seconds of the backward pass.
pub fn backward_s(cluster: &ClusterSpec, shape: &AttentionShape, dtype: Dtype) -> f64 {
    pass_s(cluster, shape, dtype, Pass::Backward)
}

fn pass_s(cluster: &ClusterSpec, shape: &AttentionShape, dtype: Dtype, pass: Pass) -> f64 {
    let dtype = if dtype.bytes() < 2.0 { Dtype::Bf16 } else { dtype };
    if shape.forward_flops() == 0.0 {
        return 0.0;
    }
    let core_s = match cluster.software.attention {
        AttentionKernel::Flash => fused_s(cluster, shape, dtype, pass) * own(cluster, shape),
        AttentionKernel::Unfused => unfused_s(cluster, shape, dtype, pass),
    };
    let software = &cluster.software;
    let backward = if pass == Pass::Backward { software.attention_backward_slowdown } else { 1.0 };
    (core_s * software.attention_slowdown * backward).max(cluster.device.kernel_launch_s)
}

/// Slowdown of the software's kernels over the table's, which has plain heads 128 wide: for sinks
/// and for narrow heads.
fn own(cluster: &ClusterSpec, shape: &AttentionShape) -> f64 {
    let software = &cluster.software;
    match shape.head_dim_qk.max(shape.head_dim_v) {
        _ if shape.sinks => software.sink_attention_slowdown,
        width if width <= NARROW => software.narrow_attention_slowdown,
        _ => 1.0,
    }
}

impl AttentionShape {
    /// Query-key pairs of one head of one sequence that the mask keeps; a causal diagonal counts
    /// half.
    pub fn kept_pairs(&self) -> f64 {
        let [queries, keys] = [self.query_len, self.key_len].map(|len| len as f64);
        let window = self.window.map_or(keys, |window| (window as f64).min(keys));
        if !self.causal {
            return queries * window;
        }
        if self.last_queries {
            return last_causal_pairs(queries, keys, window);
        }
        causal_pairs(queries, keys, window)
    }

    /// Forward FLOPs of the kept pairs of all heads and sequences.
    pub fn forward_flops(&self) -> f64 {
        let widths = (self.head_dim_qk + self.head_dim_v) as f64;
        core_flops(self.kept_pairs(), widths) * self.instances()
    }

    /// Heads of all sequences.
    fn instances(&self) -> f64 {
        (self.batch * self.heads) as f64
    }

    /// Rows of all instances, each a query of one head, with the causal sequence that has the same
    /// mean row length.
    fn rows(&self) -> Rows {
        let queries = self.query_len as f64;
        let sequence = 2.0 * self.kept_pairs() / queries;
        Rows { count: self.instances() * queries, sequence }
    }
}

/// Rows of scores, which kernels process in parallel by tiles.
#[derive(Clone, Copy)]
struct Rows {
    count: f64,
    /// Twice their mean length.
    sequence: f64,
}

impl Rows {
    /// Seconds by a table of causal squares. A square that was not measured, because it is longer
    /// than any or would be less than one, takes as long as a shorter one with as many rows, in
    /// proportion to the rows' length. It never takes longer than a whole square of its length.
    fn measured_s(self, table: &AttentionPass, width: f64) -> f64 {
        let whole = self.sequence.min(table.longest());
        let of = |side: f64| table.at([width, side, self.count / side]) * self.sequence / side;
        of(whole.min(self.count)).min(of(whole))
    }
}

/// One fused kernel over the pairs that the mask keeps.
fn fused_s(cluster: &ClusterSpec, shape: &AttentionShape, dtype: Dtype, pass: Pass) -> f64 {
    let [qk, v] = [shape.head_dim_qk, shape.head_dim_v].map(|width| width as f64);
    let [of_qk, of_v] = pass.fused_products();
    // Tables have equal widths: the time of the mean width, times the products' real split.
    let split = 2.0 * (of_qk * qk + of_v * v) / ((of_qk + of_v) * (qk + v));
    let rows = shape.rows();
    match cluster.tables.attention.as_ref() {
        Some(table) => {
            let pass = if pass == Pass::Forward { &table.forward } else { &table.backward };
            split * slower(cluster, dtype) * rows.measured_s(pass, (qk + v) / 2.0)
        }
        None => {
            let products = (of_qk * qk + of_v * v) / (qk + v);
            let backward = if pass == Pass::Forward { 1.0 } else { FLASH_BACKWARD_EFFICIENCY };
            let peak = cluster.device.peak_flops(dtype) * FLASH_ASYMPTOTE * backward;
            shape.forward_flops() * products / peak * (1.0 + FLASH_HALF_TOKENS / rows.sequence)
        }
    }
}

/// Slowdown of a wider format over the 16 bits of the tables.
fn slower(cluster: &ClusterSpec, dtype: Dtype) -> f64 {
    cluster.device.peak_flops(Dtype::Bf16) / cluster.device.peak_flops(dtype)
}

/// Batched products over the full square, and passes over the stored scores.
fn unfused_s(cluster: &ClusterSpec, shape: &AttentionShape, dtype: Dtype, pass: Pass) -> f64 {
    let scores = shape.instances() * (shape.query_len * shape.key_len) as f64;
    let widths = (shape.head_dim_qk + shape.head_dim_v) as f64;
    let products = if pass == Pass::Forward { 1.0 } else { 2.0 };
    let peak = cluster.device.peak_flops(dtype) * UNFUSED_EFFICIENCY;
    let bytes = SCORE_BYTES * scores * dtype.bytes() / Dtype::Bf16.bytes();
    products * core_flops(scores, widths) / peak
        + super::memory_bound::elementwise_s(cluster, bytes)
}
