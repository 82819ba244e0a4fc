//! AMPipe: the two streams against the closed forms of its appendix C.

use models::formulas::ampipe::{Chunk, Interference, backward_s, forward_s};
use proptest::prelude::*;

/// Forward seconds of one mixture-of-experts block (AMPipe appendix C).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Block {
    /// Attention, `A`.
    pub(crate) attention_s: f64,
    /// Each of the two all-to-alls, `C`.
    pub(crate) all_to_all_s: f64,
    /// The experts' MLP, `M`.
    pub(crate) experts_s: f64,
    /// LayerNorm and other light operators, `O`.
    pub(crate) other_s: f64,
}

fn block(attention_s: f64, all_to_all_s: f64, experts_s: f64) -> Block {
    Block { attention_s, all_to_all_s, experts_s, other_s: 0.0 }
}

/// Seconds with nothing overlapped, `A + 2C + M + O` (AMPipe appendix C).
pub(crate) fn baseline_s(block: &Block) -> f64 {
    block.attention_s + 2.0 * block.all_to_all_s + block.experts_s + block.other_s
}

/// Seconds at pipeline degree `p ≥ 2`, light operators hidden,
/// `max(max(A + C/p, A/p + C) + C, max(A, A/p + C/p) + M + C/p)`. Degree 1 (or 0) is the
/// [`baseline_s`].
///
/// Derived: either the network never rests after the last dispatch, or the experts never rest until
/// the last combine. Appendix C's own formula is too long where `C > A` and `M > C`, and at degree
/// 1 loses an all-to-all.
pub(crate) fn ampipe_s(block: &Block, degree: u64) -> f64 {
    if degree <= 1 {
        return baseline_s(block);
    }
    let p = degree as f64;
    let Block { attention_s: attention, all_to_all_s: exchange, experts_s: experts, .. } = *block;
    let (a, c) = (attention / p, exchange / p);
    let dispatched = (attention + c).max(a + exchange);
    let experts_start = attention.max(a + c);
    (dispatched + exchange).max(experts_start + experts + c)
}

/// Seconds when only experts and all-to-alls are chunked and attention runs before them,
/// `A + max(2C, M + 2C/p)`, light operators hidden (Tutel, as AMPipe §1 describes it; derived).
/// Degree 1 (or 0) is the [`baseline_s`].
pub(crate) fn tutel_s(block: &Block, degree: u64) -> f64 {
    if degree <= 1 {
        return baseline_s(block);
    }
    let c = block.all_to_all_s / degree as f64;
    block.attention_s + (2.0 * block.all_to_all_s).max(block.experts_s + 2.0 * c)
}

/// Seconds at pipeline degree `p` as appendix C prints them,
/// `A/p + max(A/p, C/p)(p − 1) + max(M/p, C/p)·p + C/p`.
pub(crate) fn printed_s(block: &Block, degree: u64) -> f64 {
    let p = degree as f64;
    let [a, c, m] = [block.attention_s, block.all_to_all_s, block.experts_s].map(|s| s / p);
    a + a.max(c) * (p - 1.0) + m.max(c) * p + c
}

/// `degree` equal chunks of a block.
pub(crate) fn equal_chunks(block: &Block, degree: u64) -> Vec<Chunk> {
    let p = degree as f64;
    let [a, c, m] = [block.attention_s, block.all_to_all_s, block.experts_s].map(|s| s / p);
    vec![Chunk { attention_s: a, dispatch_s: c, experts_s: m, combine_s: c }; degree as usize]
}

/// Equal chunks except that attention is whole and comes first, as Tutel runs.
pub(crate) fn tutel_chunks(block: &Block, degree: u64) -> Vec<Chunk> {
    let mut chunks = equal_chunks(block, degree);
    for (i, chunk) in chunks.iter_mut().enumerate() {
        chunk.attention_s = if i == 0 { block.attention_s } else { 0.0 };
    }
    chunks
}

/// Streams that do not disturb each other.
pub(crate) const UNDISTURBED: Interference = Interference { slowdown: 1.0, late: false };

/// Forward seconds of undisturbed streams.
pub(crate) fn simulate_s(chunks: &[Chunk]) -> f64 {
    forward_s(chunks, UNDISTURBED)
}

/// Appendix C loses one all-to-all at degree 1: its formula is then shorter than the baseline it
/// should equal.
#[test]
fn degree_1_is_the_baseline() {
    let block = Block { other_s: 0.5, ..block(4.0, 4.0, 2.0) };
    assert_eq!(printed_s(&block, 1), 12.0);
    assert_eq!(baseline_s(&block), 14.5);
    assert_eq!(ampipe_s(&block, 1), 14.5);
    assert_eq!(tutel_s(&block, 0), 14.5);
    assert_eq!(simulate_s(&equal_chunks(&block, 1)), 14.0);
}

/// Where communication outweighs attention and experts outweigh communication, appendix C adds two
/// waits that overlap: A = 1, C = 4, M = 8 at degree 4 takes 10.25, not 12.25.
#[test]
fn formula_overcounts_where_experts_hide_the_wait() {
    let block = block(1.0, 4.0, 8.0);
    assert_eq!(printed_s(&block, 4), 12.25);
    assert_eq!(ampipe_s(&block, 4), 10.25);
    assert_eq!(simulate_s(&equal_chunks(&block, 4)), 10.25);
}

#[test]
fn examples_of_the_time_model() {
    let cases = [
        (block(4.0, 4.0, 2.0), [14.0, 10.0, 9.0, 8.5]),
        (block(8.0, 4.0, 2.0), [18.0, 14.0, 13.0, 12.5]),
        (block(2.0, 6.0, 3.0), [17.0, 13.0, 12.5, 12.25]),
        (block(10.0, 10.0, 10.0), [40.0, 25.0, 22.5, 21.25]),
    ];
    for (block, expected) in cases {
        assert_eq!([1, 2, 4, 8].map(|p| ampipe_s(&block, p)), expected);
    }
}

/// A backward pass that takes its chunks in the order opposite to a forward pass's, played
/// backwards, is that forward pass: dispatches first, attention last.
fn mirrored(chunks: &[Chunk]) -> Vec<Chunk> {
    let swap = |c: &Chunk| Chunk { dispatch_s: c.combine_s, combine_s: c.dispatch_s, ..*c };
    chunks.iter().rev().map(swap).collect()
}

/// Two chunks, all-to-alls of 2 and kernels of 4. Each all-to-all starts behind the next chunk's
/// kernels: attention ends at 8, dispatches at 10 and 12, experts at 14 and 18, combines at 20
/// and 22.
#[test]
fn late_all_to_alls_start_behind_the_next_chunk() {
    let chunks = equal_chunks(&block(8.0, 4.0, 8.0), 2);
    assert_eq!(simulate_s(&chunks), 18.0);
    assert_eq!(forward_s(&chunks, Interference { late: true, ..UNDISTURBED }), 22.0);
    // Dispatches end at 2 and 4, experts at 6 and 10, combines at 12 and 14, attention at 16 and
    // 20; undisturbed, the first combine is over before the experts are.
    assert_eq!(backward_s(&chunks, Interference { late: true, ..UNDISTURBED }), 20.0);
    assert_eq!(backward_s(&chunks, UNDISTURBED), 18.0);
}

/// Attention of 4 beside a dispatch of 2 has done 1 of its work when that ends, and 3 are left.
#[test]
fn computation_is_slowed_only_beside_an_all_to_all() {
    let chunks = equal_chunks(&block(8.0, 4.0, 0.0), 2);
    let halved = Interference { slowdown: 2.0, late: false };
    assert_eq!(simulate_s(&chunks), 14.0);
    assert_eq!(forward_s(&chunks, halved), 15.0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn closed_forms_equal_the_simulation(
        attention in 0.0_f64..12.0,
        exchange in 0.0_f64..12.0,
        experts in 0.0_f64..12.0,
        degree in 1_u64..17,
    ) {
        let block = block(attention, exchange, experts);
        let simulated = simulate_s(&equal_chunks(&block, degree));
        prop_assert!((ampipe_s(&block, degree) - simulated).abs() < 1e-9);
        let tutel = simulate_s(&tutel_chunks(&block, degree));
        prop_assert!((tutel_s(&block, degree) - tutel).abs() < 1e-9);
        prop_assert!(simulated <= tutel + 1e-9 && tutel <= baseline_s(&block) + 1e-9);
        let backward = backward_s(&mirrored(&equal_chunks(&block, degree)), UNDISTURBED);
        prop_assert!((backward - simulated).abs() < 1e-9);
    }

    #[test]
    fn printed_formula_is_exact_or_an_upper_bound(
        attention in 0.0_f64..12.0,
        exchange in 0.0_f64..12.0,
        experts in 0.0_f64..12.0,
        degree in 2_u64..17,
    ) {
        let block = block(attention, exchange, experts);
        let simulated = simulate_s(&equal_chunks(&block, degree));
        let printed = printed_s(&block, degree);
        prop_assert!(printed >= simulated - 1e-9);
        if attention >= exchange || experts <= exchange {
            prop_assert!((printed - simulated).abs() < 1e-9, "{printed} {simulated}");
        }
    }
}
