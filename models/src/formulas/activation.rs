//! Bytes of activations that operators keep for the backward pass (Korthikanti §4, extended to
//! RMSNorm, grouped queries, gated feed-forwards, fused attention and experts).
//!
//! `element_bytes` is the width of a stored element. Each count follows from what the operator's
//! backward pass reads. Rotary positions are linear and the output projection reads what attention
//! kept, so neither adds anything.

/// Dropout masks of attention's and the feed-forward's output, a byte an element each: `2sbh`
/// (Korthikanti §4.1).
pub fn dropout_mask_bytes(elements: f64) -> f64 {
    2.0 * elements
}

/// Inputs of `norms` norms, and the `outputs` of them that linear layers keep, of hidden states
/// with `elements` (Korthikanti §4.1: `4sbh` and `4sbh`).
pub fn norm_bytes(elements: f64, element_bytes: f64, norms: f64, outputs: f64) -> f64 {
    (norms + outputs) * element_bytes * elements
}

/// Queries, keys, values and attention's output, `width` elements a token together, and the fp32
/// log-sum-exp of every head of fused attention.
pub fn attention_bytes(tokens: f64, width: f64, heads: f64, element_bytes: f64) -> f64 {
    tokens * (element_bytes * width + 4.0 * heads)
}

/// Scores that unfused attention keeps: the softmax's output, and with dropout its mask and result,
/// `5as²b` in 16 bits (Korthikanti §4.1).
pub fn score_bytes(tokens: f64, heads: f64, keys: f64, element_bytes: f64, dropout: bool) -> f64 {
    let a_score = if dropout { 2.0 * element_bytes + 1.0 } else { element_bytes };
    tokens * heads * keys * a_score
}

/// Projections into the activation function (`inputs`: gate and up, or up alone), and its `outputs`
/// (1, or 0 if recomputed), with `elements` each (Korthikanti §4.1: `8sbh` and `8sbh`).
pub fn feed_forward_bytes(elements: f64, element_bytes: f64, inputs: f64, outputs: f64) -> f64 {
    elements * element_bytes * (inputs + outputs)
}

/// What routing adds to a token's experts: fp32 logits and probabilities, and for each of `copies`
/// of the token its permuted input and the expert's output.
pub fn routing_bytes(
    tokens: f64,
    experts: f64,
    copies: f64,
    hidden: f64,
    element_bytes: f64,
) -> f64 {
    tokens * (8.0 * experts + 2.0 * element_bytes * hidden * copies)
}

/// Layers that full recomputation should run again together, from one input, to need least memory:
/// a rank of `layers` layers keeps the inputs of its groups of `c` for `in_flight` micro-batches,
/// and the values of one group, `layers / c * in_flight * input + c * values` bytes, which is least
/// at the square root of `layers * in_flight * input / values` (SC'21 section 3.5, which counts the
/// groups; Chen et al. 2016, section 4.1).
pub fn least_memory_group(layers: f64, in_flight: f64, input: f64, values: f64) -> f64 {
    (layers * in_flight * input / values).sqrt().clamp(1.0, layers)
}
