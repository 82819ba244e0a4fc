//! What the attention core costs: scores, softmax and values, without the projections.

use models::cluster::{AttentionKernel, ClusterSpec, Dtype};

/// One attention call on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: u64,
    /// Query heads on this rank.
    pub heads: u64,
    /// Key/value heads on this rank.
    pub kv_heads: u64,
    /// Queries, tokens.
    pub query_len: u64,
    /// Keys, tokens; more than queries where context parallelism gathers them.
    pub key_len: u64,
    /// Width of a query or key head.
    pub head_dim_qk: u64,
    /// Width of a value head.
    pub head_dim_v: u64,
    /// Queries are the last of the keys and see none after themselves.
    pub causal: bool,
    /// Keys a query sees, itself included.
    pub window: Option<u64>,
}

/// Backward over forward time of a fused kernel: five products of the same size instead of two.
const FLASH_BACKWARD: f64 = 2.5;
/// Part of the peak that fused forward kernels reach on long sequences where nothing was measured.
const FLASH_ASYMPTOTE: f64 = 0.6;
/// Tokens at which a fused kernel runs at half its asymptote (fit to published runs, 430).
const FLASH_HALF_TOKENS: f64 = 430.0;
/// Part of the peak of the batched products of unfused attention (fit to published runs, .42).
const UNFUSED_EFFICIENCY: f64 = 0.42;
/// Bytes per score that unfused attention moves forward, and backward (together 16 in the fit).
const SCORE_BYTES: [f64; 2] = [7.0, 9.0];

/// Seconds of the forward pass.
pub fn forward_s(cluster: &ClusterSpec, shape: &AttentionShape, dtype: Dtype) -> f64 {
    let core_s = match cluster.software.attention {
        AttentionKernel::Flash => flash_forward_s(cluster, shape, dtype),
        AttentionKernel::Unfused => unfused_s(cluster, shape, dtype, 1.0, SCORE_BYTES[0]),
    };
    (core_s * cluster.software.attention_slowdown).max(cluster.device.kernel_launch_s)
}

/// Seconds of the backward pass.
pub fn backward_s(cluster: &ClusterSpec, shape: &AttentionShape, dtype: Dtype) -> f64 {
    let core_s = match cluster.software.attention {
        AttentionKernel::Flash => FLASH_BACKWARD * flash_forward_s(cluster, shape, dtype),
        AttentionKernel::Unfused => unfused_s(cluster, shape, dtype, 2.0, SCORE_BYTES[1]),
    };
    (core_s * cluster.software.attention_slowdown).max(cluster.device.kernel_launch_s)
}

impl AttentionShape {
    /// Query-key pairs of one head of one sequence that the mask keeps (causal at half: the diagonal
    /// counts half, as FLOP counts of kernels do).
    pub fn kept_pairs(&self) -> f64 {
        let [queries, keys] = [self.query_len, self.key_len].map(|len| len as f64);
        let window = self.window.map_or(keys, |window| (window as f64).min(keys));
        if !self.causal {
            return queries * window;
        }
        // The last `queries` rows of a triangle of side `keys`, cut off at `window`.
        let rows = |above: f64| {
            if above <= window { above * above / 2.0 } else { window * (above - window / 2.0) }
        };
        let hidden = (keys - queries).max(0.0);
        rows(keys.max(queries)) - rows(hidden)
    }

    /// Forward FLOPs: `2 (d_qk + d_v)` for each kept pair of each head and sequence.
    pub fn forward_flops(&self) -> f64 {
        let width = (self.head_dim_qk + self.head_dim_v) as f64;
        2.0 * width * self.kept_pairs() * (self.batch * self.heads) as f64
    }
}

fn flash_forward_s(cluster: &ClusterSpec, shape: &AttentionShape, dtype: Dtype) -> f64 {
    let tokens = (2.0 * shape.kept_pairs()).sqrt().max(1.0);
    let peak = cluster.device.peak_flops(compute_dtype(dtype)) * FLASH_ASYMPTOTE;
    shape.forward_flops() / peak * (1.0 + FLASH_HALF_TOKENS / tokens)
}

/// Batched products over the full square, and passes over the stored scores.
fn unfused_s(
    cluster: &ClusterSpec,
    shape: &AttentionShape,
    dtype: Dtype,
    products: f64,
    score_bytes: f64,
) -> f64 {
    let scores = (shape.batch * shape.heads * shape.query_len * shape.key_len) as f64;
    let width = (shape.head_dim_qk + shape.head_dim_v) as f64;
    let peak = cluster.device.peak_flops(compute_dtype(dtype)) * UNFUSED_EFFICIENCY;
    let passes_s = super::memory_bound::streaming_s(cluster, score_bytes * scores);
    products * 2.0 * width * scores / peak + passes_s
}

/// The core stays in 16 bits where the projections run in 8 or 4.
fn compute_dtype(dtype: Dtype) -> Dtype {
    match dtype {
        Dtype::Fp8 | Dtype::Mxfp8 | Dtype::Nvfp4 => Dtype::Bf16,
        other => other,
    }
}
