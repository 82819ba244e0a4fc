//! Floating-point operations, and rates and times that follow from them.

/// Seconds in a day.
const DAY_S: f64 = 86_400.0;

/// FLOPs of a product of `m × k` by `k × n`, `2mnk`: two a multiply-add (SC'21 appendix).
pub fn product_flops(m: f64, n: f64, k: f64) -> f64 {
    2.0 * m * n * k
}

/// FLOPs of forward and backward passes, from those of the forward pass, `3F`: the backward pass
/// has two products for each of the forward pass (SC'21 appendix).
pub fn training_flops(forward_flops: f64) -> f64 {
    3.0 * forward_flops
}

/// Model FLOPs utilisation: FLOPs of one iteration over what the devices could do in `device_s`,
/// the iteration's time summed over devices (SC'21 Table 1).
pub fn utilisation(flops: f64, device_s: f64, peak_flops_per_s: f64) -> f64 {
    flops / device_s / peak_flops_per_s
}

/// Days to train on `tokens` at `iteration_tokens` tokens an iteration, `T/(Bs)` iterations
/// (SC'21 §5.1).
pub fn training_days(tokens: f64, iteration_tokens: f64, iteration_s: f64) -> f64 {
    tokens / iteration_tokens * iteration_s / DAY_S
}
