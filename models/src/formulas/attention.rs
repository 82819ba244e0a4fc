//! Keys an attention reads, and how a ring of context parallel ranks shares them (Overview, context
//! parallelism).

/// FLOPs of the attention core, forward: scores and values over `tokens` queries that each read
/// `keys` on average, `4·T·s_eff·q` with query width `q` (SC'21 appendix at `s_eff = s`, `q = h`).
pub fn core_flops(tokens: f64, keys: f64, query_width: f64) -> f64 {
    4.0 * tokens * keys * query_width
}

/// Keys a query reads on average without a mask, `s`. SC'21 counts causal attention so too.
pub fn full_keys(sequence: f64) -> f64 {
    sequence
}

/// Keys a query reads on average under a causal mask, `(s + 1)/2`.
pub fn causal_keys(sequence: f64) -> f64 {
    (sequence + 1.0) / 2.0
}

/// Keys a query reads on average under a causal mask and a window of `window` keys, itself
/// included, `w − w(w − 1)/(2s)`. A window longer than the sequence is the causal mask.
pub fn window_keys(sequence: f64, window: f64) -> f64 {
    let w = window.min(sequence);
    w - w * (w - 1.0) / (2.0 * sequence)
}

/// Causal work of `rank` (0 first) of `ranks` that hold contiguous blocks, `rank + ½`, in units of
/// one block of queries against one block of keys.
pub fn contiguous_work(rank: u64) -> f64 {
    rank as f64 + 0.5
}

/// Work of the busiest contiguous rank over the mean, `(2c − 1)/c` (derived; Overview names the
/// imbalance).
pub fn contiguous_imbalance(ranks: f64) -> f64 {
    (2.0 * ranks - 1.0) / ranks
}

/// Time of a contiguous causal ring, in whole blocks, `c − ½`: every step waits for a rank that has a
/// whole block to do, save the first, where all have half of one.
pub fn contiguous_ring_blocks(ranks: f64) -> f64 {
    ranks - 0.5
}

/// Time of a balanced causal ring, in whole blocks, `c/2`.
pub fn balanced_ring_blocks(ranks: f64) -> f64 {
    ranks / 2.0
}

/// The two of `2c` chunks that `rank` holds in a zig-zag ring, `i` and `2c − 1 − i` (Overview,
/// zig-zag). `None` for a rank that is not there.
pub fn zigzag_chunks(rank: u64, ranks: u64) -> Option<[u64; 2]> {
    (rank < ranks).then(|| [rank, 2 * ranks - 1 - rank])
}

/// Work of `rank` in `step` (0 its own keys) of a causal zig-zag ring, in units of one chunk against
/// one chunk: 2, whichever the rank and the step.
pub fn zigzag_step_work(rank: u64, step: u64, ranks: u64) -> Option<f64> {
    let queries = zigzag_chunks(rank, ranks)?;
    let keys = zigzag_chunks((rank + ranks - step % ranks) % ranks, ranks)?;
    let pair = |q: u64, k: u64| match q.cmp(&k) {
        std::cmp::Ordering::Greater => 1.0,
        std::cmp::Ordering::Equal => 0.5,
        std::cmp::Ordering::Less => 0.0,
    };
    Some(queries.iter().flat_map(|q| keys.iter().map(move |k| pair(*q, *k))).sum())
}

/// Whether a zig-zag ring can cut the sequence: `s mod 2c = 0`.
pub fn zigzag_divides(sequence: u64, ranks: u64) -> bool {
    ranks > 0 && sequence.is_multiple_of(2 * ranks)
}

/// Tokens a rank must hold for a balanced causal ring to hide its transfers,
/// `s/c ≥ k·e·peak/(q·B)`: one step's `2(s/c)²q` FLOPs against its `2(s/c)k` elements of
/// `element_bytes` over a link of `link_bytes_per_s` (derived).
pub fn ring_hiding_tokens(
    query_width: f64,
    kv_width: f64,
    element_bytes: f64,
    flops_per_s: f64,
    link_bytes_per_s: f64,
) -> f64 {
    kv_width * element_bytes * flops_per_s / (query_width * link_bytes_per_s)
}
