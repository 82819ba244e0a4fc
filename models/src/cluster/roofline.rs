//! A roofline model, for where nothing was measured.

use super::{Device, Dtype};

/// Rows and columns of the output tile that one multiprocessor computes at a time.
const TILE: f64 = 128.0;
/// Weight of the tiles that leave multiprocessors idle (fit to published runs: 0.76 to 1.03).
const WAVE: f64 = 0.9;
/// Depth at which filling and draining a tile costs as much as its work (same fit: 99).
const DEPTH: f64 = 99.0;
/// Part of the peak that large products reach (A100 .85, H100 .71 to .8).
const ASYMPTOTE: f64 = 0.8;

/// Seconds of a product of `m x k` by `k x n`: the larger of computing and moving the operands.
///
/// Computing runs at a share of the peak that falls where output tiles do not fill the
/// multiprocessors and where the depth is small; 16-bit output.
pub fn gemm_s(device: &Device, dtype: Dtype, [m, n, k]: [f64; 3]) -> f64 {
    let tiles = m.max(TILE) / TILE * (n.max(TILE) / TILE);
    let tiled = m.max(TILE) * n.max(TILE);
    let compute_s = 2.0 * tiled * (k + DEPTH) / (device.peak_flops(dtype) * ASYMPTOTE);
    let bytes = dtype.bytes() * (m * k + k * n) + 2.0 * m * n;
    let filled = 1.0 + WAVE * device.sms as f64 / tiles;
    (compute_s * filled).max(bytes / device.hbm_bytes_per_s)
}
