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

/// Seconds at pipeline degree `p ≥ 2`, light operators hidden,
/// `max(max(A + C/p, A/p + C) + C, max(A, A/p + C/p) + M + C/p)`. Degree 1 (or 0) is the
/// [`baseline_s`].
///
/// Derived: either the network never rests after the last dispatch, or the experts never rest until
/// the last combine. Appendix C's own formula is too long where `C > A` and `M > C`, and at degree
/// 1 loses an all-to-all: the tests compare both with a simulation of the two streams.
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
