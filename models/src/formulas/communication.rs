//! What each rank sends in collectives, and how often a layer needs them.
//!
//! Volumes are of ring algorithms and in the unit of `whole`, the size of the whole tensor.

/// All-reduces of the hidden states that tensor parallelism adds to one pass over a layer: one
/// after attention and one after the feed-forward (SC'21 §3.2, `8bsh(t − 1)/t` for both passes).
/// With sequence parallelism each is a reduce-scatter and an all-gather (Korthikanti §4.2.2).
pub const REDUCTIONS_A_PASS: f64 = 2.0;

/// Numbers a token that ranks with parts of the vocabulary all-reduce for the loss: the maximum,
/// the label's logit and the sum of exponentials (Vocabulary Parallelism §4).
pub const LOSS_STATISTICS: f64 = 3.0;

/// What a rank sends to all-reduce a tensor over `ranks`, `2(n − 1)/n·S`.
pub fn all_reduce_volume(whole: f64, ranks: f64) -> f64 {
    2.0 * all_gather_volume(whole, ranks)
}

/// What a rank sends to gather, or to reduce and scatter, a tensor over `ranks`, `(n − 1)/n·S`.
pub fn all_gather_volume(whole: f64, ranks: f64) -> f64 {
    (ranks - 1.0) / ranks * whole
}

/// What a rank sends in an all-to-all of its buffer of size `whole`, `(n − 1)/n·S`.
pub fn all_to_all_volume(whole: f64, ranks: f64) -> f64 {
    all_gather_volume(whole, ranks)
}

/// Elements that a rank's `tokens` are dispatched as, or combined from: `copies` of each, top-k or,
/// where experts are padded, top-k times the capacity factor (AMPipe §2.2).
pub fn dispatched_elements(tokens: f64, copies: f64, hidden: f64) -> f64 {
    tokens * copies * hidden
}
