// Included once for each implementation: backward passes against central differences of the
// reference's forward pass, in f64, and small exact cases.

use crate::support::spec;
use crate::support::{close, cpu, differences, dot, integers, normal, poison};
use kernels::activation::Activation;
use kernels::attention::{Attention, Gradients, ProbabilityDropout, Saved};
use kernels::cross_entropy::Logits;
use kernels::dropout::Dropout;
use kernels::embedding::{Embedding, by_row};
use kernels::gemm::Shape;
use kernels::latent_heads::LatentHeads;
use kernels::layer_norm::LayerNorm;
use kernels::random::{Stream, GlobalIndices};
use kernels::rms_norm::RmsNorm;
use kernels::rope::{Pairing, Rope, inverse_frequencies};
use kernels::sinks::Sinks;
use kernels::Output;

#[test]
fn products_of_a_linear_layer() {
    let (t, i, o) = (5, 7, 3);
    let (x, w, dy) = (normal(1, t * i), normal(2, o * i), normal(3, t * o));
    let run = |x: &[f64], w: &[f64]| {
        let mut y = poison(t * o);
        spec::gemm::gemm(&cpu(), &Shape::nt(t, o, i), 1.0, x, w, 0.0, &mut y);
        dot(&y, &dy)
    };
    let (mut dx, mut dw) = (poison(t * i), vec![0.5; o * i]);
    gemm::gemm(&cpu(), &Shape::nn(t, i, o), 1.0, &dy, &w, 0.0, &mut dx);
    gemm::gemm(&cpu(), &Shape::tn(o, i, t), 1.0, &dy, &x, 1.0, &mut dw);
    dw.iter_mut().for_each(|dw| *dw -= 0.5);
    differences("dx", &x, &dx, |x| run(x, &w));
    differences("dw", &w, &dw, |w| run(&x, w));
}

#[test]
fn heads_of_latents_backward() {
    let of = LatentHeads { tokens: 3, heads: 4, content: 5, rotary: 2, value: 3 };
    let [up_len, k_len, v_len] = [of.up(), of.key(), of.value].map(|width| 12 * width);
    let (up, rotary) = (normal(1, up_len), normal(2, 6));
    let (dk, dv) = (normal(3, k_len), normal(4, v_len));
    let run = |up: &[f64], rotary: &[f64]| {
        let (mut k, mut v) = (poison(k_len), poison(v_len));
        spec::latent_heads::join(&cpu(), &of, up, rotary, &mut k, &mut v);
        dot(&k, &dk) + dot(&v, &dv)
    };
    let (mut dup, mut drotary) = (poison(up_len), poison(6));
    latent_heads::split(&cpu(), &of, &dk, &dv, &mut dup, &mut drotary);
    differences("dup", &up, &dup, |up| run(up, &rotary));
    differences("drotary", &rotary, &drotary, |rotary| run(&up, rotary));
}

#[test]
fn rms_norm_backward() {
    for unit_offset in [false, true] {
        let norm = RmsNorm { rows: 5, columns: 37, eps: 1e-3, unit_offset };
        let (x, w, dy) = (normal(1, 185), normal(2, 37), normal(3, 185));
        let run = |x: &[f64], w: &[f64]| {
            let (mut y, mut r) = (poison(185), poison(5));
            spec::rms_norm::forward(&cpu(), &norm, x, w, &mut y, &mut r);
            (dot(&y, &dy), r)
        };
        let r = run(&x, &w).1;
        let (mut dx, mut dw) = (poison(185), vec![0.25; 37]);
        rms_norm::backward_input(&cpu(), &norm, &x, &w, &r, &dy, &mut dx, Output::Overwrite);
        rms_norm::backward_weight(&cpu(), &norm, &x, &r, &dy, &mut dw);
        dw.iter_mut().for_each(|dw| *dw -= 0.25);
        differences("dx", &x, &dx, |x| run(x, &w).0);
        differences("dw", &w, &dw, |w| run(&x, w).0);
        let mut twice = dx.clone();
        rms_norm::backward_input(&cpu(), &norm, &x, &w, &r, &dy, &mut twice, Output::Accumulate);
        close("2 dx", &twice, &dx.iter().map(|dx| 2.0 * dx).collect::<Vec<_>>(), 1e-14);
    }
}

#[test]
fn layer_norm_backward() {
    let norm = LayerNorm { rows: 4, columns: 35, eps: 1e-3 };
    let (x, w, bias, dy) = (normal(1, 140), normal(2, 35), normal(4, 35), normal(3, 140));
    let run = |x: &[f64], w: &[f64], bias: &[f64]| {
        let (mut y, mut m, mut r) = (poison(140), poison(4), poison(4));
        spec::layer_norm::forward(&cpu(), &norm, x, w, bias, &mut y, &mut m, &mut r);
        (dot(&y, &dy), m, r)
    };
    let (_, m, r) = run(&x, &w, &bias);
    let (mut dx, mut dw, mut db) = (poison(140), vec![0.25; 35], vec![0.5; 35]);
    layer_norm::backward_input(&cpu(), &norm, &x, &w, &m, &r, &dy, &mut dx, Output::Overwrite);
    layer_norm::backward_weight(&cpu(), &norm, &x, &m, &r, &dy, &mut dw, &mut db);
    dw.iter_mut().for_each(|dw| *dw -= 0.25);
    db.iter_mut().for_each(|db| *db -= 0.5);
    differences("dx", &x, &dx, |x| run(x, &w, &bias).0);
    differences("dw", &w, &dw, |w| run(&x, w, &bias).0);
    differences("dbias", &bias, &db, |bias| run(&x, &w, bias).0);
    let mut twice = dx.clone();
    layer_norm::backward_input(&cpu(), &norm, &x, &w, &m, &r, &dy, &mut twice, Output::Accumulate);
    close("2 dx", &twice, &dx.iter().map(|dx| 2.0 * dx).collect::<Vec<_>>(), 1e-14);
}

#[test]
fn rotation_there_and_back() {
    for pairing in [Pairing::Half, Pairing::Interleaved] {
        let (tokens, heads, head_dim) = (3, 2, 11);
        let rope = Rope { tokens, heads, head_dim, rotary_start: 3, rotary_dim: 6, pairing };
        let mut table = poison(rope.table_elements());
        rope::fill_table(&cpu(), &inverse_frequencies(100.0, 6), &[0, 5, 1000], &mut table);
        let (x, dy) = (normal::<f64>(1, 66), normal(2, 66));
        let run = |x: &[f64]| {
            let mut y = x.to_vec();
            spec::rope::forward(&cpu(), &rope, &table, &mut y);
            y
        };
        let mut dx = dy.clone();
        rope::backward(&cpu(), &rope, &table, &mut dx);
        differences("dx", &x, &dx, |x| dot(&run(x), &dy));
        let mut back = run(&x);
        rope::backward(&cpu(), &rope, &table, &mut back);
        close("x", &back, &x, 1e-14);
        // By hand: pair 1 of the last token, head 1, is rotated by 1000 / 100^(1/3).
        let (first, second) = if pairing == Pairing::Half { (4, 7) } else { (5, 6) };
        let angle = 1000.0 * 100f64.powf(-1.0 / 3.0);
        let at = (2 * heads + 1) * head_dim;
        let (a, b) = (x[at + first], x[at + second]);
        let mut y = x.clone();
        rope::forward(&cpu(), &rope, &table, &mut y);
        close("a", &[y[at + first]], &[a * angle.cos() - b * angle.sin()], 1e-12);
        close("b", &[y[at + second]], &[a * angle.sin() + b * angle.cos()], 1e-12);
        assert_eq!(y[at..at + 3], x[at..at + 3]);
        assert_eq!(y[at + 9..at + 11], x[at + 9..at + 11]);
    }
}

#[test]
fn activations_backward() {
    let (x, up, dy) = (normal::<f64>(1, 101), normal(2, 101), normal(3, 101));
    for f in Activation::ALL {
        let run = |x: &[f64]| {
            let mut y = poison(101);
            spec::activation::forward(&cpu(), f, x, &mut y);
            dot(&y, &dy)
        };
        let gated = |x: &[f64], up: &[f64]| {
            let mut y = poison(101);
            spec::activation::gated_forward(&cpu(), f, x, up, &mut y);
            dot(&y, &dy)
        };
        let (mut dx, mut dgate, mut dup) = (poison(101), poison(101), poison(101));
        activation::backward(&cpu(), f, &x, &dy, &mut dx);
        differences(&format!("{f:?} dx"), &x, &dx, run);
        activation::gated_backward(&cpu(), f, &x, &up, &dy, &mut dgate, &mut dup);
        differences(&format!("{f:?} dgate"), &x, &dgate, |x| gated(x, &up));
        differences(&format!("{f:?} dup"), &up, &dup, |up| gated(&x, up));
    }
}

/// Values from the functions' definitions, to more digits than needed (mpmath 1.3).
#[test]
fn activations_forward() {
    let x = [-3.0, -0.5, 1.25];
    let known = [
        (Activation::Relu, [0.0, 0.0, 1.25]),
        (Activation::SquaredRelu, [0.0, 0.0, 1.5625]),
        (Activation::GeluTanh, [-0.003637392081773019, -0.15428599017485609, 1.1177142029697147]),
        (Activation::GeluErf, [-0.0040496940948902835, -0.15426876936299344, 1.117937782916431]),
        (Activation::Silu, [-0.14227761953270035, -0.18877033439907273, 0.9716248264683639]),
        (Activation::ClampedGelu, [-0.01807130970778597, -0.149_611_563_393_619_9, 1.1169343014431693]),
    ];
    for (f, want) in known {
        let mut y = poison(3);
        activation::forward(&cpu(), f, &x, &mut y);
        close(&format!("{f:?}"), &y, &want, 1e-14);
        activation::gated_forward(&cpu(), f, &x, &[2.0; 3], &mut y);
        let factor = if f == Activation::ClampedGelu { 3.0 } else { 2.0 };
        close(&format!("{f:?} gated"), &y, &want.map(|y| factor * y), 1e-14);
    }
    // Beyond the bounds, where slopes are 0.
    let (at_bound, [mut y, mut dgate, mut dup]) = (6.999_953_128_303_317, [(); 3].map(|()| poison(2)));
    let (gate, up) = ([8.0, 1e3], [9.0, -7.5]);
    activation::gated_forward(&cpu(), Activation::ClampedGelu, &gate, &up, &mut y);
    close("clamped", &y, &[8.0 * at_bound, -6.0 * at_bound], 1e-14);
    activation::gated_backward(&cpu(), Activation::ClampedGelu, &gate, &up, &[1.0; 2], &mut dgate, &mut dup);
    assert_eq!((dgate, dup), (vec![0.0; 2], vec![0.0; 2]));
}

#[test]
fn embedding_backward() {
    let e = Embedding { tokens: 9, columns: 5, rows: 4, first_row: 2, scale: 1.5 };
    let ids = [2, 5, 2, 0, 7, 3, 2, -1, 5];
    let (table, dy) = (normal(1, 20), normal(2, 45));
    let run = |table: &[f64]| {
        let mut out = poison(45);
        spec::embedding::forward(&cpu(), &e, &ids, table, &mut out);
        dot(&out, &dy)
    };
    let mut dtable = vec![0.25; 20];
    let order = by_row(&ids);
    let (sorted, _) = order.as_chunks::<2>();
    let pairs = [[-1, 7], [0, 3], [2, 0], [2, 2], [2, 6], [3, 5], [5, 1], [5, 8], [7, 4]];
    assert_eq!(sorted, pairs);
    embedding::backward(&cpu(), &e, &order, &dy, &mut dtable);
    dtable.iter_mut().for_each(|d| *d -= 0.25);
    differences("dtable", &table, &dtable, run);
}

#[test]
fn biases_and_sums() {
    let (x, bias) = (normal::<f64>(1, 21), normal::<f64>(2, 7));
    let mut y = x.clone();
    elementwise::add_bias(&cpu(), &bias, &mut y);
    close("y", &y, &(0..21).map(|i| x[i] + bias[i % 7]).collect::<Vec<_>>(), 1e-15);
    let mut dbias = vec![1.0; 7];
    elementwise::bias_gradient(&cpu(), &x, &mut dbias);
    close("dbias", &dbias, &(0..7).map(|i| 1.0 + x[i] + x[i + 7] + x[i + 14]).collect::<Vec<_>>(), 1e-14);
    close("sum", &[elementwise::sum(&cpu(), &x)], &[x.iter().sum::<f64>()], 1e-14);
    close("squares", &[elementwise::sum_of_squares(&cpu(), &x)], &[dot(&x, &x)], 1e-14);
    let mut z = poison(21);
    elementwise::add(&cpu(), &x, &y, &mut z);
    elementwise::axpy(&cpu(), -2.0, &x, &mut z);
    elementwise::scale(&cpu(), 3.0, &mut z);
    close("z", &z, &(0..21).map(|i| 3.0 * (y[i] - x[i])).collect::<Vec<_>>(), 1e-14);
}

#[test]
fn leading_dimensions_change_places() {
    let x: Vec<f64> = (0..30).map(f64::from).collect();
    let mut y = poison(30);
    transpose::swap_leading(&cpu(), [2, 5, 3], &x, &mut y);
    assert_eq!(y[..9], [0.0, 1.0, 2.0, 15.0, 16.0, 17.0, 3.0, 4.0, 5.0]);
    transpose::swap_leading(&cpu(), [5, 6, 1], &x, &mut y);
    assert_eq!(y[..6], [0.0, 6.0, 12.0, 18.0, 24.0, 1.0]);
}

#[test]
fn dropout_drops_its_share_and_keeps_the_mean() {
    let dropout = Dropout { p: 0.3, stream: Stream { seed: 7, tensor: 1, step: 2 } };
    let x = vec![1.0f64; 100_000];
    let mut y = poison(x.len());
    dropout::apply(&cpu(), &dropout, &GlobalIndices::contiguous(0, x.len()), &x, &mut y);
    let dropped = y.iter().filter(|&&y| y == 0.0).count() as f64 / 1e5;
    assert!((dropped - 0.3).abs() < 0.006, "{dropped}"); // four standard deviations
    assert!(y.iter().all(|&y| y == 0.0 || (y - 1.0 / 0.7).abs() < 1e-15));
}

#[test]
fn a_shard_draws_the_mask_of_the_whole() {
    let dropout = Dropout { p: 0.5, stream: Stream { seed: 3, tensor: 9, step: 1 } };
    let x = normal::<f64>(1, 11 * 23);
    let mut y = poison(x.len());
    dropout::apply(&cpu(), &dropout, &GlobalIndices::contiguous(0, x.len()), &x, &mut y);
    let (row, rows, column, columns) = (3, 5, 7, 13);
    let at = |i: usize| (row + i / columns) * 23 + column + i % columns;
    let part: Vec<f64> = (0..rows * columns).map(|i| x[at(i)]).collect();
    let mut dropped = poison(part.len());
    let view = GlobalIndices::matrix(row as u64, rows, column as u64, columns, 23);
    dropout::apply(&cpu(), &dropout, &view, &part, &mut dropped);
    assert_eq!(dropped, (0..part.len()).map(|i| y[at(i)]).collect::<Vec<_>>());
}

#[test]
fn cross_entropy_backward() {
    for soft_cap in [None, Some(2.0)] {
        let shape = Logits { rows: 4, columns: 13, real_columns: 11, first_column: 0, soft_cap };
        let targets = [3, 10, -1, 0];
        let logits = normal::<f64>(1, 52);
        let statistics = |logits: &[f64]| {
            let (mut max, mut sum, mut hit, mut loss) = (poison(4), poison(4), poison(4), poison(4));
            use spec::cross_entropy as ce;
            ce::local_max(&cpu(), &shape, logits, &mut max);
            ce::local_sum_exp(&cpu(), &shape, logits, &targets, &max, &mut sum, &mut hit);
            ce::loss(&cpu(), &targets, &max, &sum, &hit, &mut loss);
            (max, sum, loss)
        };
        let (max, sum, _) = statistics(&logits);
        let mut gradient = logits.clone();
        cross_entropy::gradient_in_place(&cpu(), &shape, &mut gradient, &targets, &max, &sum, 0.75);
        let total = |logits: &[f64]| 0.75 * statistics(logits).2.iter().sum::<f64>();
        differences("logits", &logits, &gradient, total);
        assert!(gradient[2 * 13..3 * 13].iter().all(|&g| g == 0.0), "ignored row");
        assert!(gradient.chunks(13).all(|row| row[11..] == [0.0; 2]), "padding");
    }
}

#[test]
fn cross_entropy_of_even_logits_is_the_log_of_their_number() {
    let shape = Logits { real_columns: 8, ..Logits::whole(2, 11) };
    let mut logits = vec![0.5; 22];
    logits[8..11].fill(1e9); // padding
    let (mut max, mut sum, mut hit, mut loss) = (poison(2), poison(2), poison(2), poison(2));
    cross_entropy::local_max(&cpu(), &shape, &logits, &mut max);
    cross_entropy::local_sum_exp(&cpu(), &shape, &logits, &[7, -1], &max, &mut sum, &mut hit);
    cross_entropy::loss(&cpu(), &[7, -1], &max, &sum, &hit, &mut loss);
    close("loss", &loss[..1], &[8f64.ln()], 1e-15);
    assert_eq!(loss[1], 0.0);
}

#[test]
fn attention_backward() {
    let plain = Attention { v_dim: 3, ..Attention::causal(2, 7, 4, 2, 5) };
    let stream = Stream { seed: 5, tensor: 6, step: 7 };
    let dropout = Some(ProbabilityDropout {
        dropout: Dropout { p: 0.25, stream },
        batch_offset: 3,
        head_offset: 4,
        total_heads: 8,
        total_len: 20,
    });
    let cases = [
        plain,
        Attention { causal: false, ..plain },
        Attention { soft_cap: Some(1.5), ..plain },
        Attention { window: Some(3), ..plain },
        Attention { dropout, soft_cap: Some(2.0), ..plain },
        Attention { q_len: 4, kv_len: 9, q_offset: 3, kv_offset: 2, ..plain },
        Attention { q_len: 4, kv_len: 6, q_offset: 0, kv_offset: 2, ..plain },
    ];
    for a in cases {
        let (q, k) = (normal(1, a.q_elements()), normal(2, a.k_elements()));
        let (v, dout) = (normal(3, a.v_elements()), normal(4, a.out_elements()));
        let run = |q: &[f64], k: &[f64], v: &[f64]| {
            let (mut out, mut lse) = (poison(a.out_elements()), poison(a.lse_elements()));
            spec::attention::forward(&cpu(), &a, q, k, v, &mut out, &mut lse);
            (out, lse)
        };
        let (out, lse) = run(&q, &k, &v);
        let (mut dq, mut dk, mut dv) = (poison(q.len()), poison(k.len()), poison(v.len()));
        let saved = Saved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
        let mut gradients = Gradients { dq: &mut dq, dk: &mut dk, dv: &mut dv };
        attention::backward(&cpu(), &a, &saved, &dout, &mut gradients, Output::Overwrite);
        differences(&format!("dq of {a:?}"), &q, &dq, |q| dot(&run(q, &k, &v).0, &dout));
        differences(&format!("dk of {a:?}"), &k, &dk, |k| dot(&run(&q, k, &v).0, &dout));
        differences(&format!("dv of {a:?}"), &v, &dv, |v| dot(&run(&q, &k, v).0, &dout));
        let (twice_q, twice_k, twice_v) = (dq.clone(), dk.clone(), dv.clone());
        let mut gradients = Gradients { dq: &mut dq, dk: &mut dk, dv: &mut dv };
        attention::backward(&cpu(), &a, &saved, &dout, &mut gradients, Output::Accumulate);
        for (got, once) in [(&dq, &twice_q), (&dk, &twice_k), (&dv, &twice_v)] {
            close("twice", got, &once.iter().map(|x| 2.0 * x).collect::<Vec<_>>(), 1e-13);
        }
    }
}

/// Attention without sinks and their correction, differentiated together.
#[test]
fn attention_with_sinks() {
    let a = Attention { v_dim: 3, window: Some(4), ..Attention::causal(2, 7, 4, 2, 5) };
    let of = Sinks { batch: 2, heads: 4, queries: 7, width: 3 };
    let (q, k) = (normal(1, a.q_elements()), normal(2, a.k_elements()));
    let (v, dout) = (normal(3, a.v_elements()), normal(4, a.out_elements()));
    let logits = normal(5, 4);
    let run = |q: &[f64], k: &[f64], v: &[f64], logits: &[f64]| {
        let (mut out, mut lse) = (poison(a.out_elements()), poison(a.lse_elements()));
        spec::attention::forward(&cpu(), &a, q, k, v, &mut out, &mut lse);
        let mut new = poison(lse.len());
        sinks::apply(&cpu(), &of, logits, &lse, &mut new, &mut out);
        (out, new)
    };
    let (out, lse) = run(&q, &k, &v, &logits);
    let (mut dq, mut dk, mut dv) = (poison(q.len()), poison(k.len()), poison(v.len()));
    let saved = Saved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
    let mut gradients = Gradients { dq: &mut dq, dk: &mut dk, dv: &mut dv };
    attention::backward(&cpu(), &a, &saved, &dout, &mut gradients, Output::Overwrite);
    let rows = out.chunks_exact(3).zip(dout.chunks_exact(3));
    let mut by_row: Vec<f64> = rows.map(|(out, dout)| dot(out, dout)).collect();
    sinks::gradient(&cpu(), &of, &logits, &lse, &mut by_row);
    let mut dlogits = vec![0.0; 4];
    by_row.iter().enumerate().for_each(|(n, x)| dlogits[n % 4] += x);
    differences("dq", &q, &dq, |q| dot(&run(q, &k, &v, &logits).0, &dout));
    differences("dk", &k, &dk, |k| dot(&run(&q, k, &v, &logits).0, &dout));
    differences("dv", &v, &dv, |v| dot(&run(&q, &k, v, &logits).0, &dout));
    differences("sinks", &logits, &dlogits, |logits| dot(&run(&q, &k, &v, logits).0, &dout));
}

/// The formula with all scores at once, written out for one head.
#[test]
fn attention_forward_is_softmax() {
    let a = Attention::causal(1, 5, 1, 1, 3);
    let (q, k, v) = (normal::<f64>(1, 15), normal::<f64>(2, 15), normal::<f64>(3, 15));
    let (mut out, mut lse) = (poison(15), poison(5));
    attention::forward(&cpu(), &a, &q, &k, &v, &mut out, &mut lse);
    for i in 0..5 {
        let score = |j: usize| dot(&q[3 * i..3 * i + 3], &k[3 * j..3 * j + 3]) / 3f64.sqrt();
        let sum: f64 = (0..=i).map(|j| score(j).exp()).sum();
        close("lse", &lse[i..=i], &[sum.ln()], 1e-14);
        for l in 0..3 {
            let want: f64 = (0..=i).map(|j| score(j).exp() / sum * v[3 * j + l]).sum();
            close("out", &out[3 * i + l..=3 * i + l], &[want], 1e-14);
        }
    }
}

#[test]
fn ids_are_looked_up() {
    let e = Embedding { tokens: 3, columns: 2, rows: 2, first_row: 10, scale: 2.0 };
    let mut out = poison::<f64>(6);
    embedding::forward(&cpu(), &e, &[11, 9, 10], &[1.0, 2.0, 3.0, 4.0], &mut out);
    assert_eq!(out, [6.0, 8.0, 0.0, 0.0, 2.0, 4.0]);
    assert_eq!(integers(1, 100, 0..3).iter().max(), Some(&2));
}
