//! AMPipe: its time model against an event simulation of the two streams.

use models::formulas::ampipe::{Block, ampipe_s, baseline_s, tutel_s};
use proptest::prelude::*;

fn block(attention_s: f64, all_to_all_s: f64, experts_s: f64) -> Block {
    Block { attention_s, all_to_all_s, experts_s, other_s: 0.0 }
}

/// Seconds at pipeline degree `p` as appendix C prints them,
/// `A/p + max(A/p, C/p)(p − 1) + max(M/p, C/p)·p + C/p`.
pub(crate) fn printed_s(block: &Block, degree: u64) -> f64 {
    let p = degree as f64;
    let [a, c, m] = [block.attention_s, block.all_to_all_s, block.experts_s].map(|s| s / p);
    a + a.max(c) * (p - 1.0) + m.max(c) * p + c
}

/// Seconds of one chunk: attention, dispatch, experts, combine.
#[derive(Clone, Copy)]
pub(crate) struct Chunk {
    attention_s: f64,
    dispatch_s: f64,
    experts_s: f64,
    combine_s: f64,
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

/// Seconds until the last combine ends, running two in-order streams (AMPipe §3.2, Fig. 6). Compute
/// does every chunk's attention, then every chunk's experts; communication does every dispatch,
/// then every combine. Each starts once its chunk's step before it is done.
pub(crate) fn simulate_s(chunks: &[Chunk]) -> f64 {
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
