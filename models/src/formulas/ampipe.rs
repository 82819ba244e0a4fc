//! Overlapping attention, experts and their all-to-alls inside a block (AMPipe §3, appendix C).

/// Forward seconds of one mixture-of-experts block (AMPipe appendix C).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Block {
    /// Attention, `A`.
    pub attention_s: f64,
    /// Each of the two all-to-alls, `C`.
    pub all_to_all_s: f64,
    /// The experts' MLP, `M`.
    pub experts_s: f64,
    /// LayerNorm and other light operators, `O`.
    pub other_s: f64,
}

impl Block {
    /// Attention, all-to-all and experts of one of `degree` equal chunks.
    fn chunk(&self, degree: u64) -> (f64, f64, f64) {
        let p = degree.max(1) as f64;
        (self.attention_s / p, self.all_to_all_s / p, self.experts_s / p)
    }
}

/// Seconds with nothing overlapped, `A + 2C + M + O` (AMPipe appendix C).
pub fn baseline_s(block: &Block) -> f64 {
    block.attention_s + 2.0 * block.all_to_all_s + block.experts_s + block.other_s
}

/// Seconds at pipeline degree `p` as printed,
/// `A/p + max(A/p, C/p)(p − 1) + max(M/p, C/p)·p + C/p` (AMPipe appendix C).
///
/// Equal to [`simulate_s`] for `p ≥ 2` where `A ≥ C` or `M ≤ C`, too long where `C > A` and `M > C`.
/// At `p = 1` it loses one all-to-all. Use [`ampipe_s`] to plan.
pub fn printed_s(block: &Block, degree: u64) -> f64 {
    let (a, c, m) = block.chunk(degree);
    let p = degree.max(1) as f64;
    a + a.max(c) * (p - 1.0) + m.max(c) * p + c
}

/// Seconds at pipeline degree `p ≥ 2`, light operators hidden,
/// `max(max(A + C/p, A/p + C) + C, max(A, A/p + C/p) + M + C/p)`. Degree 1 (or 0) is the
/// [`baseline_s`].
///
/// Derived: either the network never rests after the last dispatch, or the experts never rest until
/// the last combine. Equal to [`simulate_s`] with equal chunks.
pub fn ampipe_s(block: &Block, degree: u64) -> f64 {
    if degree <= 1 {
        return baseline_s(block);
    }
    let (a, c, _) = block.chunk(degree);
    let Block { attention_s: attention, all_to_all_s: exchange, experts_s: experts, .. } = *block;
    let dispatched = (attention + c).max(a + exchange);
    let experts_start = attention.max(a + c);
    (dispatched + exchange).max(experts_start + experts + c)
}

/// Seconds when only experts and all-to-alls are chunked and attention runs before them,
/// `A + max(2C, M + 2C/p)`, light operators hidden (Tutel, as AMPipe §1 describes it; derived).
/// Degree 1 (or 0) is the [`baseline_s`].
pub fn tutel_s(block: &Block, degree: u64) -> f64 {
    if degree <= 1 {
        return baseline_s(block);
    }
    let (_, c, _) = block.chunk(degree);
    block.attention_s + (2.0 * block.all_to_all_s).max(block.experts_s + 2.0 * c)
}

/// Seconds of one chunk in each of its four places.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chunk {
    /// Attention, gate and encode (compute stream).
    pub attention_s: f64,
    /// First all-to-all (communication stream).
    pub dispatch_s: f64,
    /// Experts (compute stream).
    pub experts_s: f64,
    /// Second all-to-all (communication stream).
    pub combine_s: f64,
}

/// `degree` equal chunks of a block (at least one).
pub fn equal_chunks(block: &Block, degree: u64) -> Vec<Chunk> {
    let (a, c, m) = block.chunk(degree);
    let chunk = Chunk { attention_s: a, dispatch_s: c, experts_s: m, combine_s: c };
    vec![chunk; degree.max(1) as usize]
}

/// Equal chunks except that attention is whole and comes first, as Tutel runs.
pub fn tutel_chunks(block: &Block, degree: u64) -> Vec<Chunk> {
    let mut chunks = equal_chunks(block, degree);
    for (i, chunk) in chunks.iter_mut().enumerate() {
        chunk.attention_s = if i == 0 { block.attention_s } else { 0.0 };
    }
    chunks
}

/// Seconds until the last combine ends, running two in-order streams (AMPipe §3.2, Fig. 6): compute
/// does every chunk's attention, then every chunk's experts; communication every dispatch, then every
/// combine; each starts once its chunk's step before it is done. Chunks may differ.
pub fn simulate_s(chunks: &[Chunk]) -> f64 {
    let (mut compute, mut network) = (0.0_f64, 0.0_f64);
    let mut dispatched = Vec::with_capacity(chunks.len());
    for chunk in chunks {
        compute += chunk.attention_s;
        network = network.max(compute) + chunk.dispatch_s;
        dispatched.push(network);
    }
    for (chunk, ready) in chunks.iter().zip(dispatched) {
        compute = compute.max(ready) + chunk.experts_s;
        network = network.max(compute) + chunk.combine_s;
    }
    network
}

/// The best of `degrees` when each chunk costs `chunk_overhead_s` more to launch, and its seconds
/// (AMPipe §4.2 measures less than 5 % at degree 4). The first wins a tie; `None` for no degree.
pub fn best_degree(block: &Block, degrees: &[u64], chunk_overhead_s: f64) -> Option<(u64, f64)> {
    let overhead_s = |p: u64| if p > 1 { p as f64 * chunk_overhead_s } else { 0.0 };
    let time_s = |p: u64| ampipe_s(block, p) + overhead_s(p);
    degrees.iter().map(|p| (*p, time_s(*p))).min_by(|x, y| x.1.total_cmp(&y.1))
}

/// Share of a causal attention that falls to query chunk `chunk` (0 first) of `degree`,
/// `(2c + 1)/p²` (AMPipe §3.1, Fig. 5: a chunk reads all keys before it).
pub fn causal_share(chunk: u64, degree: u64) -> f64 {
    (2 * chunk + 1) as f64 / (degree * degree) as f64
}

/// How many times faster than `before_s` `after_s` is (AMPipe Table 2 and Fig. 11).
pub fn speedup(before_s: f64, after_s: f64) -> f64 {
    before_s / after_s
}
