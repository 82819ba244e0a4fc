//! Equal bits for 1, 2, 3 and 5 threads.

use crate::support::{integers, normal, poison};
use kernels::activation::Activation;
use kernels::adamw::{AdamW, Parameter};
use kernels::attention::{Attention, Gradients, Saved};
use kernels::cross_entropy::Logits;
use kernels::embedding::Embedding;
use kernels::gemm::Shape;
use kernels::layer_norm::LayerNorm;
use kernels::rms_norm::RmsNorm;
use kernels::*;

/// Runs `work` with several numbers of threads; everything it returns must have the same bits.
#[track_caller]
fn same<T: Real>(what: &str, work: impl Fn(&Cpu) -> Vec<Vec<T>>) {
    let bits = |cpu: &Cpu| -> Vec<Vec<u64>> {
        let bits = |x: Vec<T>| x.into_iter().map(|x| x.to_f64().to_bits()).collect();
        work(cpu).into_iter().map(bits).collect()
    };
    let serial = bits(&Cpu::serial());
    for threads in [2, 3, 5] {
        let cpu = Cpu::new(threads).expect("threads start");
        assert!(bits(&cpu) == serial, "{what}: other bits with {threads} threads");
    }
}

fn products<T: Real>() {
    for (m, n, k) in [
        (512, 700, 1100),
        (1000, 64, 513),
        (70, 1000, 300),
        (3, 2000, 77),
        (2000, 1, 600),
        (129, 130, 5),
    ] {
        for shape in [Shape::nn(m, n, k), Shape::nt(m, n, k), Shape::tn(m, n, k)] {
            let (a, b) = (normal::<T>(1, m * k), normal::<T>(2, n * k));
            same(&format!("{shape:?}"), |cpu| {
                let mut c = normal(3, m * n);
                gemm::gemm(cpu, &shape, T::ONE, &a, &b, T::ONE, &mut c);
                vec![c]
            });
        }
    }
}

#[test]
fn of_products() {
    products::<f32>();
    products::<f64>();
}

#[test]
fn of_attention() {
    let a = Attention::causal(2, 150, 4, 2, 16);
    let (q, k) = (normal::<f32>(1, a.q_elements()), normal(2, a.k_elements()));
    let (v, dout) = (normal(3, a.v_elements()), normal(4, a.out_elements()));
    same("attention", |cpu| {
        let (mut out, mut lse) = (poison(a.out_elements()), poison(a.lse_elements()));
        attention::forward(cpu, &a, &q, &k, &v, &mut out, &mut lse);
        let (mut dq, mut dk, mut dv) = (poison(q.len()), poison(k.len()), poison(v.len()));
        let saved = Saved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
        let mut gradients = Gradients { dq: &mut dq, dk: &mut dk, dv: &mut dv };
        attention::backward(cpu, &a, &saved, &dout, &mut gradients, Output::Overwrite);
        let (part_out, part_lse) = (out.clone(), lse.clone());
        attention::merge(cpu, &a, &mut out, &mut lse, &part_out, &part_lse);
        vec![out, lse, dq, dk, dv]
    });
}

#[test]
fn of_cross_entropy() {
    let shape = Logits::whole(100, 3001);
    let (logits, targets) = (normal::<f32>(1, 100 * 3001), integers(2, 100, 0..3001));
    same("cross-entropy", |cpu| {
        let (mut max, mut sum, mut hit) = (poison(100), poison(100), poison(100));
        cross_entropy::local_max(cpu, &shape, &logits, &mut max);
        cross_entropy::local_sum_exp(cpu, &shape, &logits, &targets, &max, &mut sum, &mut hit);
        let mut gradient = logits.clone();
        cross_entropy::gradient_in_place(cpu, &shape, &mut gradient, &targets, &max, &sum, 0.1);
        vec![max, sum, hit, gradient]
    });
}

#[test]
fn of_norms_and_sums() {
    let (rows, columns) = (777, 130);
    let n = rows * columns;
    let (x, dy, w) = (normal::<f32>(1, n), normal::<f32>(2, n), normal::<f32>(3, columns));
    same("norms", |cpu| {
        let norm = RmsNorm { rows, columns, eps: 1e-5, unit_offset: false };
        let (mut y, mut r, mut dx, mut dw) =
            (poison(n), poison(rows), poison(n), vec![0.0; columns]);
        rms_norm::forward(cpu, &norm, &x, &w, &mut y, &mut r);
        rms_norm::backward_input(cpu, &norm, &x, &w, &r, &dy, &mut dx, Output::Overwrite);
        rms_norm::backward_weight(cpu, &norm, &x, &r, &dy, &mut dw);
        let norm = LayerNorm { rows, columns, eps: 1e-5 };
        let (mut y2, mut mean, mut r2) = (poison(n), poison(rows), poison(rows));
        layer_norm::forward(cpu, &norm, &x, &w, &w, &mut y2, &mut mean, &mut r2);
        let mut dw2 = (vec![0.0; columns], vec![0.0; columns]);
        layer_norm::backward_weight(cpu, &norm, &x, &mean, &r2, &dy, &mut dw2.0, &mut dw2.1);
        vec![y, r, dx, dw, y2, mean, r2, dw2.0, dw2.1]
    });
    same("sums", |cpu| vec![vec![elementwise::sum_of_squares(cpu, &x), elementwise::sum(cpu, &x)]]);
}

#[test]
fn of_embedding_activation_and_optimizer() {
    let e = Embedding { tokens: 3000, columns: 20, rows: 100, first_row: 0, scale: 1.0 };
    let ids = integers(1, 3000, 0..100);
    let x = normal::<f32>(2, 60_000);
    let numbers =
        AdamW { lr: 0.1, beta1: 0.9, beta2: 0.99, eps: 1e-8, step: 3, gradient_scale: 0.3 };
    same("embedding, activation, optimizer", |cpu| {
        let mut dtable = vec![0.0; 2000];
        embedding::backward(cpu, &e, &embedding::by_row(&ids), &x, &mut dtable);
        let (mut dgate, mut dup) = (poison(60_000), poison(60_000));
        activation::gated_backward(cpu, Activation::Silu, &x, &x, &x, &mut dgate, &mut dup);
        let (mut w, mut m, mut v) = (x.clone(), x.clone(), vec![1.0; 60_000]);
        let parameter = Parameter { w: &mut w, g: &x, m: &mut m, v: &mut v, decay: 0.1 };
        adamw::update(cpu, &numbers, &mut [parameter]);
        vec![dtable, dgate, dup, w, m, v]
    });
}
