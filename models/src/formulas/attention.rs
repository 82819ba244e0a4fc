//! Pairs of queries and keys that attention computes, and how a ring of context parallel ranks
//! shares them.

/// FLOPs of the attention core, forward: `2·pairs·(d_qk + d_v)` for scores and their product with
/// the values, over query-key `pairs` (SC'21 appendix, `4Bs²h` with `pairs = Bs²a` and both
/// widths `h/a`).
pub fn core_flops(pairs: f64, widths: f64) -> f64 {
    2.0 * pairs * widths
}

/// Query-key pairs that a causal mask and a window of `window` keys leave of one head and sequence.
///
/// A triangle of side `keys`, cut off at `window`, of whose rows `queries` are an even sample. The
/// diagonal counts half, as in FLOP counts of kernels (FlashAttention halves `s²`); a count of the
/// pairs themselves is half a key a query more.
pub fn causal_pairs(queries: f64, keys: f64, window: f64) -> f64 {
    let window = window.min(keys);
    queries / keys * window * (keys - window / 2.0)
}

/// Pairs that a causal mask and a window leave of the last `queries` of as many queries as `keys`
/// (a chunk of AMPipe §3.1, figure 5, whose mask is shifted by the queries before it).
pub fn last_causal_pairs(queries: f64, keys: f64, window: f64) -> f64 {
    let before = keys - queries;
    let triangle = |side: f64| if side > 0.0 { causal_pairs(side, side, window) } else { 0.0 };
    triangle(keys) - triangle(before)
}

/// Work of the busiest rank over the mean where each rank of a causal ring holds one contiguous
/// block, `(2c − 1)/c` (derived; Overview names the imbalance). It is the ring's slowdown as well:
/// every step but the first waits for a rank with a whole block.
pub fn contiguous_imbalance(ranks: f64) -> f64 {
    (2.0 * ranks - 1.0) / ranks
}
