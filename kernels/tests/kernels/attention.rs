//! Fast attention against the reference, and parts against the whole.

use crate::support::{close, cpu, normal, poison, tolerance};
use kernels::attention::{
    Attention, Gradients, ProbabilityDropout, Saved, backward, forward, merge, reference,
};
use kernels::dropout::Dropout;
use kernels::random::Stream;
use kernels::{Output, Real};
use proptest::prelude::*;

fn attentions() -> impl Strategy<Value = Attention> {
    let len = || prop_oneof![1usize..10, Just(64), Just(65), Just(131), Just(200)];
    let dims = (prop_oneof![Just(1usize), Just(8), Just(17), Just(64)], 1usize..20);
    let heads = (1usize..3, 1usize..4);
    let offsets = prop_oneof![Just((0usize, 0usize)), (0usize..150, 0usize..150)];
    let window = prop_oneof![Just(None), (1usize..100).prop_map(Some)];
    let soft_cap = prop_oneof![Just(None), (1.0..30.0).prop_map(Some)];
    let kind = (any::<bool>(), window, soft_cap, any::<bool>());
    (1usize..3, len(), len(), heads, dims, offsets, kind).prop_map(
        |(batch, q_len, kv_len, (kv_heads, group), (qk_dim, v_dim), offsets, kind)| {
            let (causal, window, soft_cap, drops) = kind;
            let dropout = Dropout { p: 0.2, stream: Stream { seed: 1, tensor: 2, step: 3 } };
            Attention {
                batch,
                q_len,
                kv_len,
                q_heads: kv_heads * group,
                kv_heads,
                qk_dim,
                v_dim,
                scale: 1.0 / (qk_dim as f64).sqrt(),
                causal,
                window,
                soft_cap,
                q_offset: offsets.0,
                kv_offset: offsets.1,
                dropout: drops.then_some(ProbabilityDropout {
                    dropout,
                    batch_offset: 5,
                    head_offset: 2,
                    total_heads: 11,
                    total_len: 1000,
                }),
            }
        },
    )
}

struct Run<T> {
    out: Vec<T>,
    lse: Vec<T>,
    dq: Vec<T>,
    dk: Vec<T>,
    dv: Vec<T>,
}

fn run<T: Real>(a: &Attention, fast: bool) -> Run<T> {
    let (q, k) = (normal(1, a.q_elements()), normal(2, a.k_elements()));
    let (v, dout) = (normal(3, a.v_elements()), normal(4, a.out_elements()));
    let (mut out, mut lse) = (poison::<T>(a.out_elements()), poison(a.lse_elements()));
    let (mut dq, mut dk, mut dv) = (poison(q.len()), poison(k.len()), poison(v.len()));
    let cpu = cpu();
    let forward = if fast { forward } else { reference::forward };
    forward(&cpu, a, &q, &k, &v, &mut out, &mut lse);
    let backward = if fast { backward } else { reference::backward };
    let saved = Saved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
    let mut gradients = Gradients { dq: &mut dq, dk: &mut dk, dv: &mut dv };
    backward(&cpu, a, &saved, &dout, &mut gradients, Output::Overwrite);
    Run { out, lse, dq, dk, dv }
}

fn compare<T: Real>(a: &Attention) {
    let (got, want) = (run::<T>(a, true), run::<T>(a, false));
    let tolerance = tolerance::<T>();
    close("out", &got.out, &want.out, tolerance);
    close("lse", &got.lse, &want.lse, tolerance);
    close("dq", &got.dq, &want.dq, 2.0 * tolerance);
    close("dk", &got.dk, &want.dk, 2.0 * tolerance);
    close("dv", &got.dv, &want.dv, 2.0 * tolerance);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn blocks_are_the_reference(a in attentions()) {
        compare::<f64>(&a);
        compare::<f32>(&a);
    }

    /// Two ranges of keys, merged. The gradients of the ranges, computed with the merged `out` and
    /// `lse`, add up to those of the whole.
    #[test]
    fn ranges_of_keys_merge_to_the_whole(a in attentions(), cut in 0.0..1.0) {
        let cpu = cpu();
        let at = (a.kv_len as f64 * cut) as usize;
        let (q, k) = (normal::<f64>(1, a.q_elements()), normal(2, a.k_elements()));
        let (v, dout) = (normal(3, a.v_elements()), normal(4, a.out_elements()));
        let rows = |x: &[f64], width: usize, range: std::ops::Range<usize>| -> Vec<f64> {
            let row = a.kv_heads * width;
            x.chunks(a.kv_len * row).flat_map(|x| x[range.start * row..range.end * row].to_vec()).collect()
        };
        let ranges = [0..at, at..a.kv_len].map(|range| {
            let part = Attention { kv_len: range.len(), kv_offset: a.kv_offset + range.start, ..a };
            (part, rows(&k, a.qk_dim, range.clone()), rows(&v, a.v_dim, range.clone()), range)
        });
        let (mut out, mut lse) = (vec![0.0; a.out_elements()], vec![f64::NEG_INFINITY; a.lse_elements()]);
        for (part, k, v, _) in &ranges {
            let (mut part_out, mut part_lse) = (poison(out.len()), poison(lse.len()));
            forward(&cpu, part, &q, k, v, &mut part_out, &mut part_lse);
            merge(&cpu, &a, &mut out, &mut lse, &part_out, &part_lse);
        }
        let whole = run::<f64>(&a, false);
        close("out", &out, &whole.out, 1e-12);
        close("lse", &lse, &whole.lse, 1e-12);
        let mut dq = vec![0.0; q.len()];
        for (part, k, v, range) in &ranges {
            let (mut dk, mut dv) = (poison(k.len()), poison(v.len()));
            let mut first = vec![0.0; q.len()];
            let saved = Saved { q: &q, k, v, out: &out, lse: &lse };
            let mut gradients = Gradients { dq: &mut first, dk: &mut dk, dv: &mut dv };
            backward(&cpu, part, &saved, &dout, &mut gradients, Output::Overwrite);
            dq.iter_mut().zip(first).for_each(|(dq, part)| *dq += part);
            close("dk", &dk, &rows(&whole.dk, a.qk_dim, range.clone()), 1e-12);
            close("dv", &dv, &rows(&whole.dv, a.v_dim, range.clone()), 1e-12);
        }
        close("dq", &dq, &whole.dq, 1e-12);
    }
}

/// Scores of some hundreds: without subtracting the maximum, the exponentials overflow.
#[test]
fn large_scores_do_not_overflow() {
    let a = Attention { scale: 100.0, ..Attention::causal(1, 100, 2, 1, 16) };
    let (got, want) = (run::<f32>(&a, true), run::<f32>(&a, false));
    assert!(want.lse.iter().any(|&lse| lse > 500.0));
    close("lse", &got.lse, &want.lse, 1e-6);
    // Unit rounding of one score in 1000 is 6e-5.
    close("out", &got.out, &want.out, 1e-3);
}
