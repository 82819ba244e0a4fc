//! What kernels cost that only move memory.

use models::cluster::ClusterSpec;

/// Part of the datasheet bandwidth that elementwise kernels reach where nothing was measured.
const ACHIEVED: f64 = 0.8;

/// Seconds to move `bytes` (read and written together) through memory in one kernel.
pub fn streaming_s(cluster: &ClusterSpec, bytes: f64) -> f64 {
    if bytes <= 0.0 {
        return 0.0;
    }
    let device = &cluster.device;
    (bytes / (device.hbm_bytes_per_s * ACHIEVED)).max(device.kernel_launch_s)
}

/// Seconds for the optimizer to update `parameters` held by one rank.
pub fn optimizer_s(cluster: &ClusterSpec, parameters: f64) -> f64 {
    streaming_s(cluster, parameters * cluster.software.optimizer_bytes_per_parameter)
}
