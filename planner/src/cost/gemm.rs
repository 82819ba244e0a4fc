//! Time of matrix products.
//!
//! `C[m, n] = A[m, k] B[k, n]`: forward has `m` tokens; the gradient with respect to the input
//! swaps `n` and `k`; the one with respect to the weight has `k` tokens. Each is priced by its own
//! shape.

use models::cluster::{ClusterSpec, Dtype, Products, roofline};
use models::formulas::flops::product_flops;

/// Padding rows that a grouped kernel computes for each group, on average: a group ends inside a
/// tile of 128, and experts' loads differ.
const DEAD_ROWS: f64 = 64.0;

/// Cost of starting a group's tile, as additional depth. A fit to published runs gives 1250,
/// SimuMax's grouped kernels about 0 (A100) to 1000 (B200).
const GROUP_DEPTH: f64 = 400.0;

/// Heads whose width is no multiple of this leave the fast paths of the matrix libraries.
const ALIGNMENT: u64 = 8;
/// Slowdown of all products of a layer with such heads (BigScience runs with width 150 and 108:
/// 1.43 ± .05).
const MISALIGNED: f64 = 1.43;

/// Seconds for one product of `m x k` by `k x n`.
///
/// At least a kernel launch, which runs under the previous kernel: hence the maximum and not the
/// sum.
pub fn gemm_s(cluster: &ClusterSpec, dtype: Dtype, m: u64, n: u64, k: u64) -> f64 {
    let shape = [m, n, k].map(|size| size as f64);
    if shape.contains(&0.0) {
        return 0.0;
    }
    alone_s(cluster, dtype, shape).max(cluster.device.kernel_launch_s)
}

/// Seconds for `groups` products of `m_per_group x k` by `k x n` in one kernel, each with its own
/// weights (the experts of a rank).
///
/// The tiles of all groups share the multiprocessors, so the kernel runs like one product of all
/// rows, but not faster than memory delivers every group's weights.
pub fn grouped_gemm_s(
    cluster: &ClusterSpec,
    dtype: Dtype,
    groups: u64,
    m_per_group: u64,
    n: u64,
    k: u64,
) -> f64 {
    slowed_grouped_gemm_s(cluster, dtype, [groups, m_per_group, n, k], 1.0)
}

/// As [`grouped_gemm_s`] for `[groups, m per group, n, k]`, with computation `slowdown` times
/// slower; memory is not slowed.
pub fn slowed_grouped_gemm_s(
    cluster: &ClusterSpec,
    dtype: Dtype,
    shape: [u64; 4],
    slowdown: f64,
) -> f64 {
    let [groups, m, n, k] = shape.map(|size| size as f64);
    if groups * m * n * k == 0.0 {
        return 0.0;
    }
    if groups == 1.0 {
        let product_s = alone_s(cluster, dtype, [m, n, k]) * slowdown;
        return product_s.max(cluster.device.kernel_launch_s);
    }
    let rows = groups * (m + DEAD_ROWS);
    let product_s = alone_s(cluster, dtype, [rows, n, k + GROUP_DEPTH]) * slowdown;
    let bytes = groups * (dtype.bytes() * (k * n + m * k) + 2.0 * m * n);
    let floor_s = super::memory_bound::streaming_s(cluster, bytes);
    product_s.max(floor_s)
}

/// Seconds for the gradients of `groups` weights of `n x k`, each from `tokens` rows, added to
/// 32-bit gradients: a product of depth `tokens`, but not faster than memory reads and writes
/// those.
pub fn weight_gradient_s(
    cluster: &ClusterSpec,
    dtype: Dtype,
    groups: u64,
    tokens: u64,
    n: u64,
    k: u64,
) -> f64 {
    slowed_weight_gradient_s(cluster, dtype, [groups, tokens, n, k], 1.0)
}

/// As [`weight_gradient_s`] for `[groups, tokens, n, k]`, with computation `slowdown` times slower;
/// memory is not slowed. Where the software adds gradients up in a separate kernel, that follows.
pub fn slowed_weight_gradient_s(
    cluster: &ClusterSpec,
    dtype: Dtype,
    shape: [u64; 4],
    slowdown: f64,
) -> f64 {
    let [groups, tokens, n, k] = shape;
    if groups * tokens * n * k == 0 {
        return 0.0;
    }
    let weights = groups as f64 * n as f64 * k as f64;
    let rows = groups as f64 * tokens as f64 * (n + k) as f64;
    let bytes = 8.0 * weights + dtype.bytes() * rows;
    let [depth, n, k] = [tokens, n, k].map(|size| size as f64);
    let product_s = alone_s(cluster, dtype, [groups as f64 * n, k, depth]) * slowdown;
    let add_bytes = cluster.software.gradient_add_bytes * weights;
    product_s.max(super::memory_bound::streaming_s(cluster, bytes))
        + super::memory_bound::streaming_s(cluster, add_bytes)
}

/// Slowdown of a layer's products when heads are `head_dim` wide; 1 for aligned widths.
///
/// Kept apart from [`gemm_s`], which it would make non-monotone.
pub fn misalignment_factor(head_dim: u64) -> f64 {
    if head_dim.is_multiple_of(ALIGNMENT) { 1.0 } else { MISALIGNED }
}

/// A product without the launch: measured, else by the roofline.
fn alone_s(cluster: &ClusterSpec, dtype: Dtype, shape: [f64; 3]) -> f64 {
    let device = &cluster.device;
    let runs_in = device.computed_in(dtype).unwrap_or(dtype);
    let s = match measured(cluster, runs_in) {
        Some((table, faster)) => table.at(shape) / faster,
        None => roofline::gemm_s(device, runs_in, shape),
    };
    let software = &cluster.software;
    let narrow = if runs_in.bytes() < 2.0 { software.fp8_slowdown } else { 1.0 };
    let [m, n, k] = shape;
    let rate = product_flops(m, n, k) / (s * device.peak_flops(runs_in));
    s * throttled(device.sustained_slowdown, rate) * software.gemm_slowdown * narrow
}

/// Slowdown under sustained load of a product that alone runs at a part `rate` of the peak, on a
/// device that slows down by `at_peak` at the peak to stay within its power limit.
///
/// At least 1: products that leave units idle need not slow down.
fn throttled(at_peak: f64, rate: f64) -> f64 {
    (at_peak * throttle(rate)).max(1.0)
}

/// Throttling at a part of the peak rate, relative to that at the peak. Power is work a cycle times
/// the cube of the clock, as voltage follows the clock, so at the limit the clock falls with the
/// cube root of the work.
pub fn throttle(rate: f64) -> f64 {
    rate.cbrt()
}

/// The table for a format, and the format's speed over the table's: an unmeasured format reaches
/// the same fraction of its own peak as the measured one nearest to it.
fn measured(cluster: &ClusterSpec, dtype: Dtype) -> Option<(&Products, f64)> {
    let near = match dtype {
        Dtype::Fp8 | Dtype::Mxfp8 | Dtype::Nvfp4 => Dtype::Fp8,
        _ => Dtype::Bf16,
    };
    let tables = &cluster.tables.gemm;
    let found = tables.get_key_value(&dtype).or_else(|| tables.get_key_value(&near));
    let (near, table) = found.or_else(|| tables.first_key_value())?;
    Some((table, cluster.device.peak_flops(dtype) / cluster.device.peak_flops(*near)))
}
