//! Time of kernels that only move memory.

use models::cluster::ClusterSpec;

/// Part of the datasheet bandwidth that elementwise kernels reach where nothing was measured.
const ACHIEVED: f64 = 0.7;
/// Part of the datasheet bandwidth that long, regular streams reach: a fused optimizer, the kernels
/// of the loss. With it the last stage of Vocabulary Parallelism's baseline
/// (`artifact/exp_one_host.csv`) moves 41 bytes a logit forward, of 38 counted.
const REGULAR_ACHIEVED: f64 = 0.85;

/// Seconds to move `bytes` (read and written together) through memory in one kernel.
pub fn streaming_s(cluster: &ClusterSpec, bytes: f64) -> f64 {
    if bytes <= 0.0 {
        return 0.0;
    }
    let device = &cluster.device;
    let moved_s = match cluster.tables.stream.as_ref() {
        Some(table) => table.at([bytes]),
        None => bytes / (device.hbm_bytes_per_s * ACHIEVED),
    };
    moved_s.max(device.kernel_launch_s)
}

/// Seconds of an elementwise kernel whose fused form moves `bytes`: a plain copy's time, times the
/// software's slowdown.
pub fn elementwise_s(cluster: &ClusterSpec, bytes: f64) -> f64 {
    streaming_s(cluster, bytes) * cluster.software.stream_slowdown
}

/// Seconds to move `bytes` in long, regular streams.
pub fn regular_s(cluster: &ClusterSpec, bytes: f64) -> f64 {
    if bytes <= 0.0 {
        return 0.0;
    }
    let device = &cluster.device;
    (bytes / (device.hbm_bytes_per_s * REGULAR_ACHIEVED)).max(device.kernel_launch_s)
}

/// Seconds for the optimizer to update the `parameters` that one rank holds.
pub fn optimizer_s(cluster: &ClusterSpec, parameters: f64) -> f64 {
    regular_s(cluster, parameters * cluster.software.optimizer_bytes_per_parameter)
}

/// Seconds for a CPU to update `parameters` whose optimizer state lies in host memory
/// (ZeRO-Offload, arXiv 2101.06840). It moves the bytes that a device would; the share of the
/// bandwidth that it reaches is assumed.
pub fn host_optimizer_s(cluster: &ClusterSpec, parameters: f64) -> f64 {
    let bytes = parameters * cluster.software.optimizer_bytes_per_parameter;
    bytes / (cluster.host.memory_bytes_per_s * ACHIEVED)
}
