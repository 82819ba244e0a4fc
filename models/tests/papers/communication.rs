//! Volumes of SC'21 and Korthikanti, and causal rings.

use models::formulas::attention::{causal_pairs, contiguous_imbalance, core_flops};
use models::formulas::communication::{
    REDUCTIONS_A_PASS, all_gather_volume, all_reduce_volume, all_to_all_volume, dispatched_elements,
};
use proptest::prelude::*;

/// SC'21 §3.2: `8bsh(t − 1)/t` for a layer and micro-batch. Korthikanti §4.2.2: as much where each
/// all-reduce is a reduce-scatter and an all-gather.
#[test]
fn tensor_parallel_volume_of_a_layer() {
    let (bsh, t) = (2048.0 * 12288.0, 8.0);
    let printed = 8.0 * bsh * (t - 1.0) / t;
    assert_eq!(2.0 * REDUCTIONS_A_PASS * all_reduce_volume(bsh, t), printed);
    assert_eq!(2.0 * REDUCTIONS_A_PASS * 2.0 * all_gather_volume(bsh, t), printed);
    assert_eq!(all_reduce_volume(bsh, 1.0), 0.0);
}

/// AMPipe §2.2: `T·k·h·(ep − 1)/ep`, or with `C = T·k/E` tokens for each expert
/// `E·C·h·(ep − 1)/ep`.
#[test]
fn expert_volumes() {
    let sent = all_to_all_volume(dispatched_elements(4096.0, 2.0, 1024.0), 8.0);
    assert_eq!(sent, 16.0 * 512.0 * 1024.0 * 7.0 / 8.0);
}

/// SC'21's appendix: `4Bs²h` for scores and values.
#[test]
fn core_flops_of_sc21() {
    let (s, heads, width) = (2048.0, 8.0, 64.0);
    assert_eq!(core_flops(s * s * heads, 2.0 * width), 4.0 * s * s * 512.0);
}

/// Query-key pairs of a causal mask that a rank computes which holds `queries`, the diagonal half.
fn pairs(queries: impl Iterator<Item = u64>) -> f64 {
    queries.map(|query| query as f64 + 0.5).sum()
}

proptest! {
    /// The count of pairs, of which the diagonal counts half.
    #[test]
    fn causal_pairs_equal_a_count(sequence in 1_u64..200, window in 1_u64..250) {
        let count = (0..sequence).map(|i| (i + 1).min(window)).sum::<u64>() as f64;
        let (s, w) = (sequence as f64, window.min(sequence) as f64);
        prop_assert!((causal_pairs(s, s, window as f64) - (count - w / 2.0)).abs() < 1e-6);
        // Half the queries, spread evenly, have half the pairs.
        prop_assert!((2.0 * causal_pairs(s / 2.0, s, w) - causal_pairs(s, s, w)).abs() < 1e-6);
    }

    /// A zig-zag ring is even; contiguous blocks are not.
    #[test]
    fn contiguous_blocks_are_uneven_by_the_formula(ranks in 1_u64..33, half in 1_u64..5) {
        let chunk = |i: u64| i * half..(i + 1) * half;
        let mean = pairs(0..2 * half * ranks) / ranks as f64;
        for rank in 0..ranks {
            let zigzag = pairs(chunk(rank)) + pairs(chunk(2 * ranks - 1 - rank));
            prop_assert!((zigzag / mean - 1.0).abs() < 1e-12);
        }
        let busiest = pairs(2 * half * (ranks - 1)..2 * half * ranks);
        prop_assert!((busiest / mean - contiguous_imbalance(ranks as f64)).abs() < 1e-12);
    }
}
