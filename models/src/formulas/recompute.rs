//! What recomputing activations saves and costs (SC'21 §3.5; Korthikanti §5).

/// Bytes a stage of `layers` holds with `checkpoints` of them, `c·A_in + (l/c)·A_int` (SC'21 §3.5).
pub fn stage_bytes(
    layers: f64,
    checkpoints: f64,
    input_bytes: f64,
    intermediate_bytes: f64,
) -> f64 {
    checkpoints * input_bytes + layers / checkpoints * intermediate_bytes
}

/// The real-valued minimum of [`stage_bytes`], `c* = √(l·A_int/A_in)` (SC'21 §3.5).
///
/// May lie above the number of layers, which no stage can do: see [`best_checkpoints`].
pub fn ideal_checkpoints(layers: f64, input_bytes: f64, intermediate_bytes: f64) -> f64 {
    (layers * intermediate_bytes / input_bytes).sqrt()
}

/// The whole number of checkpoints in `1..=layers` that holds the fewest bytes.
///
/// [`stage_bytes`] is convex in `c`, so the best is a neighbour of `c*` clamped to the stage
/// (SC'21 §3.5, which leaves `c*` real and unclamped). A stage without layers has none.
pub fn best_checkpoints(layers: u64, input_bytes: f64, intermediate_bytes: f64) -> u64 {
    let l = layers as f64;
    let ideal = ideal_checkpoints(l, input_bytes, intermediate_bytes);
    // Saturates on an infinite or missing `ideal`, and is clamped either way.
    let below = (ideal.floor() as u64).clamp(layers.min(1), layers);
    let above = (below + 1).min(layers);
    let bytes = |c: u64| stage_bytes(l, c as f64, input_bytes, intermediate_bytes);
    if bytes(above) < bytes(below) { above } else { below }
}

/// Extra work of full recompute over forward and backward alone, `1/3` with a backward pass of
/// twice the forward (SC'21 appendix: factor 4 instead of 3), logit layer left out.
pub const FULL_OVERHEAD: f64 = 1.0 / 3.0;

/// Bubble seconds of 1F1B when each backward pass first repeats its forward pass,
/// `(p − 1)(2t_f + t_b)` (SC'21 §2.2.1 with §3.5).
pub fn bubble_s(stages: f64, forward_s: f64, backward_s: f64) -> f64 {
    super::pipeline::bubble_s(stages, 1.0, forward_s, forward_s + backward_s)
}

/// Extra work of recomputing the attention core, over that of the layers: `s/(18h + 3s)`.
///
/// One more forward run of the core, `4Bs²h`, over `72Bsh² + 12Bs²h`; vocabulary left out.
pub fn selective_overhead(sequence: f64, hidden: f64) -> f64 {
    sequence / (18.0 * hidden + 3.0 * sequence)
}

/// The same overhead as Korthikanti prints it, `(1 + s/(3h))/(1 + s/(6h)) − 1` (their appendix).
///
/// Three times [`selective_overhead`]: it charges `12Bs²h`, forward and backward of the core, for
/// what is one more forward run. For comparison with the paper only.
pub fn selective_overhead_printed(sequence: f64, hidden: f64) -> f64 {
    (1.0 + sequence / (3.0 * hidden)) / (1.0 + sequence / (6.0 * hidden)) - 1.0
}
