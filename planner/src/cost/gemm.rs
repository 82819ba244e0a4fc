//! What matrix products cost.
//!
//! `C[m, n] = A[m, k] B[k, n]`: forward has `m` tokens; the gradient with respect to the input swaps
//! `n` and `k`; the one with respect to the weight has `k` tokens. Each is priced by its own shape.

use models::cluster::{ClusterSpec, Device, Dtype};

/// Rows and columns of the output tile one multiprocessor computes.
const TILE: f64 = 128.0;
/// Weight of wave quantisation in the shape penalty (fit to published runs, .76-1.03).
const WAVE: f64 = 0.9;
/// Depth at which filling and draining the pipeline costs as much as the work (fit, 99).
const DEPTH: f64 = 99.0;
/// Part of the peak that large products reach where nothing was measured (A100 .85, H100 .71-.8).
const ASYMPTOTE: f64 = 0.8;

/// Seconds for one product of `m x k` by `k x n`.
///
/// Not less than a kernel launch, which runs under the previous kernel: hence the larger of the two and
/// not their sum.
pub fn gemm_s(cluster: &ClusterSpec, dtype: Dtype, m: u64, n: u64, k: u64) -> f64 {
    let device = &cluster.device;
    let [m, n, k] = [m, n, k].map(|size| size as f64);
    if m * n * k == 0.0 {
        return 0.0;
    }
    (analytic_s(device, dtype, [m, n, k]) * cluster.software.gemm_slowdown)
        .max(device.kernel_launch_s)
}

/// Seconds for `groups` products of `m_per_group x k` by `k x n` in one kernel, each with its own
/// weights (the experts of a rank).
pub fn grouped_gemm_s(
    cluster: &ClusterSpec,
    dtype: Dtype,
    groups: u64,
    m_per_group: u64,
    n: u64,
    k: u64,
) -> f64 {
    groups as f64 * gemm_s(cluster, dtype, m_per_group, n, k)
}

/// The larger of computing and moving operands: computing at a share of the peak that falls where
/// tiles do not fill the multiprocessors or the depth is small.
fn analytic_s(device: &Device, dtype: Dtype, [m, n, k]: [f64; 3]) -> f64 {
    let tiles = m.max(TILE) / TILE * n.max(TILE) / TILE;
    let penalty = (1.0 + WAVE * device.sms as f64 / tiles) * (1.0 + DEPTH / k);
    let compute_s = 2.0 * m * n * k / (device.peak_flops(dtype) * ASYMPTOTE) * penalty;
    let bytes = dtype.bytes() * (m * k + k * n) + 2.0 * m * n;
    compute_s.max(bytes / device.hbm_bytes_per_s)
}
