//! Limits of each figure of a cluster file: wide enough for every real machine, from one slow core
//! to what may be sold in ten years, and narrow enough that no time or size computed from them
//! overflows or vanishes.

/// Least and most valid value of a key, both valid themselves, in the unit of the key: s, bytes,
/// bytes/s, FLOP/s, or a plain factor or count. `reserved_bytes` must also be below `hbm_bytes`.
pub(super) fn limits(key: &str) -> (f64, f64) {
    match key {
        "peak_flops" => (1e6, 1e19),
        "hbm_bytes" => (1e3, 1e15),
        "hbm_bytes_per_s" => (1e6, 1e16),
        "reserved_bytes" | "buffer_bytes" => (0.0, 1e15),
        "sms" => (1.0, 1e6),
        "dispatch_sms" => (0.0, 1e6),
        "kernel_launch_s" => (0.0, 1.0),

        "gpus" => (1.0, 1e9),
        "bytes_per_s" | "link_bytes_per_s" | "memory_bytes_per_s" => (1e3, 1e15),
        "gpus_an_adapter" => (1.0, 1e4),
        "latency_s" => (0.0, 10.0),
        "efficiency" => (1e-3, 1.0),
        "oversubscription" => (1.0, 1e3),

        "memory_bytes" => (0.0, 1e16),
        "storage_bytes_per_s" => (1.0, 1e18),
        "failures_per_node_day" => (0.0, 1e4),
        "measured_ranks" => (1.0, 1e6),

        "dp_overlap" | "zero3_overlap" | "error_band" => (0.0, 1.0),
        "tp_exposed" | "ep_exposed" | "slowdown_per_doubling" => (0.0, 1e3),
        "host_s_per_layer" | "routing_s" | "pass_gap_s" => (0.0, 10.0),
        "step_overhead_s" => (0.0, 1e4),
        "vocab_slowdown" | "interlaced_slowdown" | "sustained_slowdown" => (1.0, 1e3),
        "vocab_hidden_states" => (0.0, 1e4),
        "placeholder_bytes" | "fp8_cast_bytes" | "permute_bytes" | "gradient_add_bytes" => {
            (0.0, 1e4)
        }
        // Bytes of an element, a logit or a parameter.
        key if key.ends_with("_bytes") || key == "optimizer_bytes_per_parameter" => (0.1, 1e4),
        // Ratios of times.
        key if key.ends_with("_slowdown") => (0.1, 1e4),
        // An unlisted key has no valid value, which every test would notice.
        _ => (f64::NAN, f64::NAN),
    }
}

/// Least and most of a key that machines have or may soon have; `None` where any valid value is
/// plausible. What lies outside was probably typed in another unit. 0 stands for "none" where it is
/// valid.
pub(super) fn plausible(key: &str) -> Option<(f64, f64)> {
    Some(match key {
        "peak_flops" => (1e9, 1e17),
        "hbm_bytes" => (1e8, 1e13),
        "hbm_bytes_per_s" => (1e9, 1e14),
        "kernel_launch_s" => (1e-9, 1e-4),
        "bytes_per_s" | "link_bytes_per_s" | "memory_bytes_per_s" => (5e7, 1e13),
        "latency_s" => (1e-9, 1e-3),
        "memory_bytes" => (1e9, 1e14),
        "storage_bytes_per_s" => (1e6, 1e14),
        "failures_per_node_day" => (1e-7, 10.0),
        "host_s_per_layer" | "routing_s" | "pass_gap_s" => (1e-9, 0.1),
        "step_overhead_s" => (1e-9, 60.0),
        _ => return None,
    })
}

/// The unit of a key whose values have a plausible range.
pub(super) fn unit(key: &str) -> &'static str {
    match key {
        "peak_flops" => "FLOP/s",
        "failures_per_node_day" => "failures",
        key if key.ends_with("_per_s") => "bytes/s",
        key if key.ends_with("_bytes") => "bytes",
        _ => "s",
    }
}

/// Most levels of links.
pub(super) const MOST_LEVELS: usize = 16;

/// Least and most of any number in efficiency tables: sizes, ranks, microseconds, units of 1e-4.
pub(super) const TABLE: (f64, f64) = (1e-6, 1e18);

/// Largest part of the device's peak that a table may state: slightly more than 1, for measurements
/// err.
pub(super) const MOST_OF_PEAK: f64 = 1.1;
