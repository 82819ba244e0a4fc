//! Attention.

use super::{close, down, numbers, out, up};
use kernels::attention::fused::Kernel;
use kernels::attention::{self, Attention, ProbabilityDropout};
use kernels::cuda::{Gpu, Storage, Stored, bf16};
use kernels::dropout::Dropout;
use kernels::random::Stream;
use kernels::{Cpu, Output};

/// For tensor-core products with factors rounded to bf16: compares norms, and allows no outliers.
/// Tighter for f32.
fn close_by_norm(what: &str, storage: Storage, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let (whole_tolerance, tolerance) =
        if storage == Storage::Bf16 { (5e-3, 0.02) } else { (2e-6, 1e-5) };
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let off = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    let whole = norm(&mut expected.iter().copied());
    assert!(off <= whole_tolerance * whole, "{what}: off by {off:e} of {whole:e}");
    let most = expected.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let same = (found - expected).abs() <= tolerance * most;
        assert!(same, "{what} [{at}]: {found}, not {expected}");
    }
}

fn heads(q_len: usize, kv_len: usize, qk_dim: usize, v_dim: usize) -> Attention {
    Attention { q_len, kv_len, qk_dim, v_dim, ..Attention::causal(2, q_len, 4, 2, qk_dim) }
}

/// Shapes for every rule of the mask and of heads.
fn rules(dim: usize) -> Vec<Attention> {
    let other = dim / 2 * 3;
    vec![
        heads(70, 70, dim, dim),
        Attention { causal: false, ..heads(17, 90, other, dim) },
        Attention { window: Some(20), ..heads(80, 80, dim, dim) },
        Attention { soft_cap: Some(1.5), kv_heads: 4, ..heads(33, 33, dim, 2 * dim) },
        Attention { kv_heads: 1, ..heads(40, 40, 2 * dim, dim) },
        // A chunk of queries, with keys that begin before it and end within it; and keys that no
        // query sees.
        Attention { q_offset: 50, kv_offset: 30, ..heads(40, 45, dim, dim) },
        Attention { q_offset: 0, kv_offset: 20, ..heads(40, 40, dim, dim) },
    ]
}

pub fn attention(gpu: &Gpu) {
    for a in rules(32) {
        check_attention::<bf16>(gpu, &a);
    }
    // Blocks with fewer rows.
    check_attention::<bf16>(gpu, &Attention { batch: 1, ..heads(20, 20, 144, 32) });
}

/// Heads wide enough that dk and dv come from separate blocks.
pub fn wide_attention(gpu: &Gpu) {
    let one = |a: Attention| Attention { batch: 1, q_heads: 2, kv_heads: 1, ..a };
    check_attention::<bf16>(gpu, &one(heads(20, 20, 256, 256)));
    check_attention::<bf16>(gpu, &one(heads(18, 35, 208, 16)));
}

/// With dropout, for a part in the middle of the global tensor.
fn dropped(a: Attention) -> Attention {
    dropped_of(1 << 17, a)
}

fn dropped_of(total_len: u64, a: Attention) -> Attention {
    let stream = Stream { seed: 42, tensor: 3, step: 5 };
    let dropout = Some(ProbabilityDropout {
        dropout: Dropout { p: 0.25, stream },
        batch_offset: 3,
        head_offset: 4,
        total_heads: 12,
        total_len,
    });
    Attention { dropout, ..a }
}

pub fn attention_with_dropout(gpu: &Gpu) {
    // Random words come in groups of four; here rows begin within a group.
    check_attention::<bf16>(gpu, &dropped_of((1 << 17) + 1, heads(70, 70, 32, 32)));
    // Groups that begin elsewhere, and tiles of 16 keys.
    let later = Attention { q_offset: 64, kv_offset: 32, ..heads(19, 45, 16, 32) };
    check_attention::<bf16>(gpu, &dropped(later));
    check_attention::<bf16>(gpu, &dropped(heads(18, 35, 208, 16)));
    check_attention::<bf16>(gpu, &dropped(heads(70, 70, 32, 32)));
    check_attention::<bf16>(
        gpu,
        &dropped(Attention { q_offset: 51, kv_offset: 30, ..heads(19, 45, 16, 32) }),
    );
    check_attention::<f32>(gpu, &dropped(heads(35, 35, 16, 16)));
    check_attention::<f32>(
        gpu,
        &dropped(Attention { q_offset: 51, kv_offset: 30, ..heads(19, 45, 16, 24) }),
    );
}

pub fn attention_in_f32(gpu: &Gpu) {
    for a in rules(20) {
        check_attention::<f32>(gpu, &a);
    }
    // Half a warp's tiles.
    check_attention::<f32>(gpu, &Attention { batch: 1, ..heads(20, 20, 144, 130) });
}

pub fn check_attention<S: Stored>(gpu: &Gpu, a: &Attention) {
    let cpu = Cpu::serial();
    let [q, k, v, dout] = [a.q_elements(), a.k_elements(), a.v_elements(), a.out_elements()]
        .map(|len| numbers::<S>(len, len % 97));
    let [gq, gk, gv, gdout] = [&q, &k, &v, &dout].map(|tensor| up::<S>(gpu, tensor));
    let (mut gout, mut glse) = (out::<S>(gpu, dout.len()), out::<f32>(gpu, a.lse_elements()));
    attention::cuda::forward(
        gpu,
        a,
        gq.view(),
        gk.view(),
        gv.view(),
        gout.view_mut(),
        glse.view_mut(),
    )
    .unwrap();
    let (mut out_, mut lse) = (vec![0.0; dout.len()], vec![0.0; a.lse_elements()]);
    attention::reference::forward(&cpu, a, &q, &k, &v, &mut out_, &mut lse);
    let what = format!("{a:?}");
    close_by_norm(&format!("out of {what}"), S::STORAGE, &down(gpu, &gout), &out_);
    // The backward pass takes the output as it is stored.
    out_ = down(gpu, &gout);
    for (found, expected) in down(gpu, &glse).iter().zip(&lse) {
        let same = found == expected || (found - expected).abs() < 1e-5 * expected.abs().max(1.0);
        assert!(same, "lse {found}, not {expected}: {what}");
    }
    let saved = attention::cuda::Saved {
        q: gq.view(),
        k: gk.view(),
        v: gv.view(),
        out: gout.view(),
        lse: glse.view(),
    };
    for output in [Output::Overwrite, Output::Accumulate] {
        let [old_q, old_k, old_v] = [&q, &k, &v].map(Clone::clone);
        let [mut gdq, mut gdk, mut gdv] = [&q, &k, &v].map(|tensor| up::<S>(gpu, tensor));
        let mut gradients = attention::cuda::Gradients {
            dq: gdq.view_mut(),
            dk: gdk.view_mut(),
            dv: gdv.view_mut(),
        };
        attention::cuda::backward(gpu, a, &saved, gdout.view(), &mut gradients, output).unwrap();
        let (mut dq, mut dk, mut dv) = (old_q, old_k, old_v);
        let saved = attention::Saved { q: &q, k: &k, v: &v, out: &out_, lse: &lse };
        let mut gradients = attention::Gradients { dq: &mut dq, dk: &mut dk, dv: &mut dv };
        attention::reference::backward(&cpu, a, &saved, &dout, &mut gradients, output);
        for (name, found, expected) in [("dq", gdq, &dq), ("dk", gdk, &dk), ("dv", gdv, &dv)] {
            let what = format!("{name} of {what} {output:?}");
            close_by_norm(&what, S::STORAGE, &down(gpu, &found), expected);
        }
    }
}

/// Two ranges of keys merged; some queries see nothing of one of them.
pub fn merged_attention(gpu: &Gpu) {
    in_each_storage!(merged_attention_in(gpu));
}

fn merged_attention_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    let whole = heads(40, 40, 16, 16);
    let [q, k, v] = [whole.q_elements(), whole.k_elements(), whole.v_elements()]
        .map(|len| numbers::<S>(len, len % 89));
    let part = |first: usize, len: usize| Attention { kv_len: len, kv_offset: first, ..whole };
    let of = |tensor: &[f64], first: usize, len: usize| -> Vec<f64> {
        // Keys and values are [batch, keys, heads, dim], with two heads of 16.
        let keys = |sequence: &[f64]| sequence[first * 32..(first + len) * 32].to_vec();
        tensor.chunks(40 * 32).flat_map(keys).collect()
    };
    let mut glse = up::<f32>(gpu, &vec![f64::NEG_INFINITY; whole.lse_elements()]);
    let mut gout = up::<f32>(gpu, &vec![0.0; whole.out_elements()]);
    let (mut part_out, mut part_lse) =
        (out::<S>(gpu, whole.out_elements()), out::<f32>(gpu, whole.lse_elements()));
    let gq = up::<S>(gpu, &q);
    for (first, len) in [(25, 15), (0, 25)] {
        let a = part(first, len);
        let [gk, gv] = [&k, &v].map(|tensor| up::<S>(gpu, &of(tensor, first, len)));
        let (to, to_lse) = (part_out.view_mut(), part_lse.view_mut());
        attention::cuda::forward(gpu, &a, gq.view(), gk.view(), gv.view(), to, to_lse).unwrap();
        let (to, to_lse) = (gout.view_mut(), glse.view_mut());
        attention::cuda::merge(gpu, &whole, to, to_lse, part_out.view(), part_lse.view()).unwrap();
    }
    let (mut out_, mut lse) = (vec![0.0; whole.out_elements()], vec![0.0; whole.lse_elements()]);
    attention::reference::forward(&cpu, &whole, &q, &k, &v, &mut out_, &mut lse);
    close_by_norm("merged", S::STORAGE, &down(gpu, &gout), &out_);
    close("lse", Storage::F32, &down(gpu, &glse), &lse);
}

/// Number of shapes of [`fused_attention`].
pub const FUSED_SHAPES: usize = 4;

/// Every kernel for a shape, including those of a library that fuses graphs, and each backward pass
/// after each forward pass.
pub fn fused_attention(gpu: &Gpu) {
    let one = |a: Attention| Attention { batch: 1, ..a };
    let shapes: [Attention; FUSED_SHAPES] = [
        one(Attention { kv_heads: 1, ..heads(130, 130, 64, 64) }),
        Attention { q_offset: 90, ..one(heads(40, 130, 128, 128)) },
        Attention { causal: false, kv_heads: 4, ..heads(33, 70, 32, 64) },
        Attention { q_heads: 8, kv_heads: 1, ..heads(35, 35, 16, 16) },
    ];
    for a in &shapes {
        for (kernel, name) in attention::cuda::forward_kernels(gpu, a).unwrap() {
            check_pairs(gpu, a, kernel, &name);
        }
    }
}

/// One forward kernel, and all backward kernels after it.
fn check_pairs(gpu: &Gpu, a: &Attention, kernel: Kernel, name: &str) {
    let cpu = Cpu::serial();
    let [q, k, v, dout] = [a.q_elements(), a.k_elements(), a.v_elements(), a.out_elements()]
        .map(|len| numbers::<bf16>(len, len % 97));
    let [gq, gk, gv, gdout] = [&q, &k, &v, &dout].map(|tensor| up::<bf16>(gpu, tensor));
    let (mut gout, mut glse) = (out::<bf16>(gpu, dout.len()), out::<f32>(gpu, a.lse_elements()));
    let (q_, k_, v_) = (gq.view(), gk.view(), gv.view());
    let kernel = Some(kernel);
    attention::cuda::forward_by(gpu, kernel, a, q_, k_, v_, gout.view_mut(), glse.view_mut())
        .unwrap();
    let (mut out_, mut lse) = (vec![0.0; dout.len()], vec![0.0; a.lse_elements()]);
    attention::reference::forward(&cpu, a, &q, &k, &v, &mut out_, &mut lse);
    let what = format!("{a:?} by {name}");
    close_by_norm(&format!("out of {what}"), Storage::Bf16, &down(gpu, &gout), &out_);
    for (found, expected) in down(gpu, &glse).iter().zip(&lse) {
        let same = (found - expected).abs() < 1e-4 * expected.abs().max(1.0);
        assert!(same, "lse {found}, not {expected}: {what}");
    }
    // The backward pass takes the output as it is stored.
    out_ = down(gpu, &gout);
    let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|tensor| vec![0.0; tensor.len()]);
    let saved = attention::Saved { q: &q, k: &k, v: &v, out: &out_, lse: &lse };
    let mut gradients = attention::Gradients { dq: &mut dq, dk: &mut dk, dv: &mut dv };
    let output = Output::Overwrite;
    attention::reference::backward(&cpu, a, &saved, &dout, &mut gradients, output);
    let (out, lse) = (gout.view(), glse.view());
    let saved = attention::cuda::Saved { q: q_, k: k_, v: v_, out, lse };
    for (kernel, name) in attention::cuda::backward_kernels(gpu, a).unwrap() {
        let [mut gdq, mut gdk, mut gdv] = [&q, &k, &v].map(|tensor| up::<bf16>(gpu, tensor));
        let (dq_, dk_, dv_) = (gdq.view_mut(), gdk.view_mut(), gdv.view_mut());
        let mut gradients = attention::cuda::Gradients { dq: dq_, dk: dk_, dv: dv_ };
        let (kernel, gdout) = (Some(kernel), gdout.view());
        attention::cuda::backward_by(gpu, kernel, a, &saved, gdout, &mut gradients, output)
            .unwrap();
        for (gradient, found, expected) in [("dq", gdq, &dq), ("dk", gdk, &dk), ("dv", gdv, &dv)] {
            let what = format!("{gradient} of {what}, {name}");
            close_by_norm(&what, Storage::Bf16, &down(gpu, &found), expected);
        }
    }
}
