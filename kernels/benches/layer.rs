//! `cargo bench -p meshwright-kernels [-- THREADS] [products|memory|layer]`: every kernel at the
//! sizes of one Llama-like layer (hidden 512, feed-forward 1408, 8 heads, 4 key-value heads, 8
//! sequences of 256 tokens, f32), then the layer forward and backward.
//!
//! Times are the minimum of many runs, because other programs disturb the mean.

use kernels::activation::{self, Activation};
use kernels::adamw::{self, AdamW, Parameter};
use kernels::attention::{self, Attention, Gradients, Saved};
use kernels::cross_entropy::{self, Logits};
use kernels::dropout::{self, Dropout};
use kernels::gemm::{Shape, gemm};
use kernels::random::{GlobalIndices, Stream, fill_normal};
use kernels::rms_norm::{self, RmsNorm};
use kernels::rope::{self, Rope};
use kernels::{Cpu, Output, elementwise};
use std::time::Instant;

const BATCH: usize = 8;
const SEQUENCE: usize = 256;
const TOKENS: usize = BATCH * SEQUENCE;
const HIDDEN: usize = 512;
const FFN: usize = 1408;
const HEADS: usize = 8;
const KV_HEADS: usize = 4;
const HEAD_DIM: usize = 64;
const KV: usize = KV_HEADS * HEAD_DIM;
const VOCABULARY: usize = 32_000;

/// Seconds of the fastest of many runs.
fn best_s(mut work: impl FnMut()) -> f64 {
    work();
    let (begin, mut best) = (Instant::now(), f64::MAX);
    while begin.elapsed().as_secs_f64() < 1.0 {
        let start = Instant::now();
        work();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

fn normal(cpu: &Cpu, tensor: u32, len: usize) -> Vec<f32> {
    let mut x = vec![0.0; len];
    let stream = Stream { seed: 1, tensor, step: 0 };
    fill_normal(cpu, &mut x, &GlobalIndices::contiguous(0, len), stream, 0.5);
    x
}

/// The products of a layer: name, shape, number in a layer, and whether it adds to its result.
fn products() -> Vec<(&'static str, Shape, usize, bool)> {
    let linear = [
        ("q, o", HIDDEN, HIDDEN, 2),
        ("k, v", KV, HIDDEN, 2),
        ("gate, up", FFN, HIDDEN, 2),
        ("down", HIDDEN, FFN, 1),
    ];
    let of = |(name, o, i, times)| {
        [
            (name, Shape::nt(TOKENS, o, i), times, false),
            (name, Shape::nn(TOKENS, i, o), times, false),
            (name, Shape::tn(o, i, TOKENS), times, true),
        ]
    };
    linear.into_iter().flat_map(of).collect()
}

/// Measures the rate of every product.
fn bench_products(cpu: &Cpu) {
    for (name, shape, _, add) in products() {
        let mut product = Product::new(cpu, shape, add);
        let s = best_s(|| product.run(cpu));
        let rate = shape.flops() as f64 / s / 1e9;
        println!(
            "gemm {name:<10} {:>5} x {:>5} x {:>5} {rate:>8.1} GFLOP/s",
            shape.m, shape.n, shape.k
        );
    }
}

fn report(name: &str, bytes: usize, work: impl FnMut()) {
    let s = best_s(work);
    println!("{name:<28} {:>8.3} ms {:>8.1} GB/s", s * 1e3, bytes as f64 / s / 1e9);
}

fn bench_memory_bound(cpu: &Cpu) {
    let n = TOKENS * HIDDEN;
    let (x, w) = (normal(cpu, 1, n), normal(cpu, 2, HIDDEN));
    let (mut y, mut r, mut dw) = (x.clone(), vec![0.0; TOKENS], w.clone());
    let norm = RmsNorm { rows: TOKENS, columns: HIDDEN, eps: 1e-5, unit_offset: false };
    report("rms_norm forward", 8 * n, || rms_norm::forward(cpu, &norm, &x, &w, &mut y, &mut r));
    report("rms_norm backward_input", 16 * n, || {
        rms_norm::backward_input(cpu, &norm, &x, &w, &r, &x, &mut y, Output::Accumulate);
    });
    report("rms_norm backward_weight", 8 * n, || {
        rms_norm::backward_weight(cpu, &norm, &x, &r, &x, &mut dw);
    });
    let shape = Rope::half(TOKENS, HEADS, HEAD_DIM);
    let mut table = vec![0.0; shape.table_elements()];
    let positions: Vec<u32> = (0..TOKENS as u32).map(|t| t % SEQUENCE as u32).collect();
    rope::fill_table(cpu, &rope::inverse_frequencies(1e4, HEAD_DIM), &positions, &mut table);
    report("rope forward", 8 * n, || rope::forward(cpu, &shape, &table, &mut y));
    report("elementwise add", 12 * n, || elementwise::add(cpu, &x, &x, &mut y));
    let dropout = Dropout { p: 0.1, stream: Stream { seed: 1, tensor: 2, step: 3 } };
    report("dropout", 8 * n, || {
        dropout::apply(cpu, &dropout, &GlobalIndices::contiguous(0, n), &x, &mut y);
    });
    let n = TOKENS * FFN;
    let (gate, up, dy) = (normal(cpu, 1, n), normal(cpu, 2, n), normal(cpu, 3, n));
    let (mut a, mut b) = (gate.clone(), up.clone());
    for f in Activation::ALL {
        report(&format!("{f:?} gated_forward"), 12 * n, || {
            activation::gated_forward(cpu, f, &gate, &up, &mut a);
        });
        report(&format!("{f:?} gated_backward"), 20 * n, || {
            activation::gated_backward(cpu, f, &gate, &up, &dy, &mut a, &mut b);
        });
    }
    let shape = Logits::whole(512, VOCABULARY);
    let mut logits = normal(cpu, 1, 512 * VOCABULARY);
    let targets = vec![3i64; 512];
    let (mut max, mut sum, mut hit) = (vec![0.0; 512], vec![0.0; 512], vec![0.0; 512]);
    let bytes = 4 * logits.len();
    report("cross_entropy local_max", bytes, || {
        cross_entropy::local_max(cpu, &shape, &logits, &mut max);
    });
    report("cross_entropy sum_exp", bytes, || {
        cross_entropy::local_sum_exp(cpu, &shape, &logits, &targets, &max, &mut sum, &mut hit);
    });
    report("cross_entropy gradient", 2 * bytes, || {
        cross_entropy::gradient_in_place(cpu, &shape, &mut logits, &targets, &max, &sum, 0.5);
    });
    let n = 8 << 20;
    let (mut w, g, mut m, mut v) =
        (normal(cpu, 1, n), normal(cpu, 2, n), vec![0.0; n], vec![0.0; n]);
    let numbers =
        AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, step: 10, gradient_scale: 1.0 };
    report("adamw", 28 * n, || {
        let parameter = Parameter { w: &mut w, g: &g, m: &mut m, v: &mut v, decay: 0.1 };
        adamw::update(cpu, &numbers, &mut [parameter]);
    });
    report("sum_of_squares", 4 * n, || _ = elementwise::sum_of_squares(cpu, &g));
}

/// Weights, gradients and activations of one layer.
struct Layer {
    norm: RmsNorm,
    attention: Attention,
    table: Vec<f32>,
    weights: [Vec<f32>; 9],
    gradients: [Vec<f32>; 9],
    x: Vec<f32>,
    n1: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    o: Vec<f32>,
    lse: Vec<f32>,
    h: Vec<f32>,
    n2: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    act: Vec<f32>,
    y: Vec<f32>,
    r1: Vec<f32>,
    r2: Vec<f32>,
    dh: Vec<f32>,
    dn: Vec<f32>,
    dact: Vec<f32>,
    dgate: Vec<f32>,
    dup: Vec<f32>,
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
    dx: Vec<f32>,
}

impl Layer {
    fn new(cpu: &Cpu) -> Self {
        let sizes = [
            HIDDEN,
            HIDDEN * HIDDEN,
            KV * HIDDEN,
            KV * HIDDEN,
            HIDDEN * HIDDEN,
            HIDDEN,
            FFN * HIDDEN,
            FFN * HIDDEN,
            HIDDEN * FFN,
        ];
        let mut table = vec![0.0; TOKENS * HEAD_DIM];
        let positions: Vec<u32> = (0..TOKENS as u32).map(|t| t % SEQUENCE as u32).collect();
        rope::fill_table(cpu, &rope::inverse_frequencies(1e4, HEAD_DIM), &positions, &mut table);
        let zeros = |columns: usize| vec![0.0; TOKENS * columns];
        Self {
            norm: RmsNorm { rows: TOKENS, columns: HIDDEN, eps: 1e-5, unit_offset: false },
            attention: Attention::causal(BATCH, SEQUENCE, HEADS, KV_HEADS, HEAD_DIM),
            table,
            weights: sizes.map(|n| normal(cpu, n as u32, n).into_iter().map(|w| 0.1 * w).collect()),
            gradients: sizes.map(|n| vec![0.0; n]),
            x: normal(cpu, 1, TOKENS * HIDDEN),
            n1: zeros(HIDDEN),
            q: zeros(HIDDEN),
            k: zeros(KV),
            v: zeros(KV),
            o: zeros(HIDDEN),
            lse: zeros(HEADS),
            h: zeros(HIDDEN),
            n2: zeros(HIDDEN),
            gate: zeros(FFN),
            up: zeros(FFN),
            act: zeros(FFN),
            y: zeros(HIDDEN),
            r1: zeros(1),
            r2: zeros(1),
            dh: zeros(HIDDEN),
            dn: zeros(HIDDEN),
            dact: zeros(FFN),
            dgate: zeros(FFN),
            dup: zeros(FFN),
            dq: zeros(HIDDEN),
            dk: zeros(KV),
            dv: zeros(KV),
            dx: zeros(HIDDEN),
        }
    }

    fn forward(&mut self, cpu: &Cpu) {
        let [w1, wq, wk, wv, wo, w2, wg, wu, wd] = &self.weights;
        rms_norm::forward(cpu, &self.norm, &self.x, w1, &mut self.n1, &mut self.r1);
        gemm(cpu, &Shape::nt(TOKENS, HIDDEN, HIDDEN), 1.0, &self.n1, wq, 0.0, &mut self.q);
        gemm(cpu, &Shape::nt(TOKENS, KV, HIDDEN), 1.0, &self.n1, wk, 0.0, &mut self.k);
        gemm(cpu, &Shape::nt(TOKENS, KV, HIDDEN), 1.0, &self.n1, wv, 0.0, &mut self.v);
        rope::forward(cpu, &Rope::half(TOKENS, HEADS, HEAD_DIM), &self.table, &mut self.q);
        rope::forward(cpu, &Rope::half(TOKENS, KV_HEADS, HEAD_DIM), &self.table, &mut self.k);
        attention::forward(
            cpu,
            &self.attention,
            &self.q,
            &self.k,
            &self.v,
            &mut self.o,
            &mut self.lse,
        );
        self.h.copy_from_slice(&self.x);
        gemm(cpu, &Shape::nt(TOKENS, HIDDEN, HIDDEN), 1.0, &self.o, wo, 1.0, &mut self.h);
        rms_norm::forward(cpu, &self.norm, &self.h, w2, &mut self.n2, &mut self.r2);
        gemm(cpu, &Shape::nt(TOKENS, FFN, HIDDEN), 1.0, &self.n2, wg, 0.0, &mut self.gate);
        gemm(cpu, &Shape::nt(TOKENS, FFN, HIDDEN), 1.0, &self.n2, wu, 0.0, &mut self.up);
        activation::gated_forward(cpu, Activation::Silu, &self.gate, &self.up, &mut self.act);
        self.y.copy_from_slice(&self.h);
        gemm(cpu, &Shape::nt(TOKENS, HIDDEN, FFN), 1.0, &self.act, wd, 1.0, &mut self.y);
    }

    fn attention_forward(&mut self, cpu: &Cpu) {
        let (out, lse) = (&mut self.o, &mut self.lse);
        attention::forward(cpu, &self.attention, &self.q, &self.k, &self.v, out, lse);
    }

    /// Uses the residual stream as gradient of the output.
    fn attention_backward(&mut self, cpu: &Cpu) {
        let saved = Saved { q: &self.q, k: &self.k, v: &self.v, out: &self.o, lse: &self.lse };
        let mut gradients = Gradients { dq: &mut self.dq, dk: &mut self.dk, dv: &mut self.dv };
        attention::backward(
            cpu,
            &self.attention,
            &saved,
            &self.h,
            &mut gradients,
            Output::Overwrite,
        );
    }

    /// Uses the output as its own gradient.
    fn backward(&mut self, cpu: &Cpu) {
        let [w1, wq, wk, wv, wo, w2, wg, wu, wd] = &self.weights;
        let [g1, gq, gk, gv, go, g2, gg, gu, gd] = &mut self.gradients;
        let dy = &self.y;
        gemm(cpu, &Shape::nn(TOKENS, FFN, HIDDEN), 1.0, dy, wd, 0.0, &mut self.dact);
        gemm(cpu, &Shape::tn(HIDDEN, FFN, TOKENS), 1.0, dy, &self.act, 1.0, gd);
        let (dgate, dup) = (&mut self.dgate, &mut self.dup);
        activation::gated_backward(
            cpu,
            Activation::Silu,
            &self.gate,
            &self.up,
            &self.dact,
            dgate,
            dup,
        );
        gemm(cpu, &Shape::nn(TOKENS, HIDDEN, FFN), 1.0, dgate, wg, 0.0, &mut self.dn);
        gemm(cpu, &Shape::nn(TOKENS, HIDDEN, FFN), 1.0, dup, wu, 1.0, &mut self.dn);
        gemm(cpu, &Shape::tn(FFN, HIDDEN, TOKENS), 1.0, dgate, &self.n2, 1.0, gg);
        gemm(cpu, &Shape::tn(FFN, HIDDEN, TOKENS), 1.0, dup, &self.n2, 1.0, gu);
        self.dh.copy_from_slice(dy);
        rms_norm::backward_input(
            cpu,
            &self.norm,
            &self.h,
            w2,
            &self.r2,
            &self.dn,
            &mut self.dh,
            Output::Accumulate,
        );
        rms_norm::backward_weight(cpu, &self.norm, &self.h, &self.r2, &self.dn, g2);
        gemm(cpu, &Shape::nn(TOKENS, HIDDEN, HIDDEN), 1.0, &self.dh, wo, 0.0, &mut self.dn);
        gemm(cpu, &Shape::tn(HIDDEN, HIDDEN, TOKENS), 1.0, &self.dh, &self.o, 1.0, go);
        let saved = Saved { q: &self.q, k: &self.k, v: &self.v, out: &self.o, lse: &self.lse };
        let mut gradients = Gradients { dq: &mut self.dq, dk: &mut self.dk, dv: &mut self.dv };
        attention::backward(
            cpu,
            &self.attention,
            &saved,
            &self.dn,
            &mut gradients,
            Output::Overwrite,
        );
        rope::backward(cpu, &Rope::half(TOKENS, HEADS, HEAD_DIM), &self.table, &mut self.dq);
        rope::backward(cpu, &Rope::half(TOKENS, KV_HEADS, HEAD_DIM), &self.table, &mut self.dk);
        gemm(cpu, &Shape::nn(TOKENS, HIDDEN, HIDDEN), 1.0, &self.dq, wq, 0.0, &mut self.dn);
        gemm(cpu, &Shape::nn(TOKENS, HIDDEN, KV), 1.0, &self.dk, wk, 1.0, &mut self.dn);
        gemm(cpu, &Shape::nn(TOKENS, HIDDEN, KV), 1.0, &self.dv, wv, 1.0, &mut self.dn);
        gemm(cpu, &Shape::tn(HIDDEN, HIDDEN, TOKENS), 1.0, &self.dq, &self.n1, 1.0, gq);
        gemm(cpu, &Shape::tn(KV, HIDDEN, TOKENS), 1.0, &self.dk, &self.n1, 1.0, gk);
        gemm(cpu, &Shape::tn(KV, HIDDEN, TOKENS), 1.0, &self.dv, &self.n1, 1.0, gv);
        self.dx.copy_from_slice(&self.dh);
        rms_norm::backward_input(
            cpu,
            &self.norm,
            &self.x,
            w1,
            &self.r1,
            &self.dn,
            &mut self.dx,
            Output::Accumulate,
        );
        rms_norm::backward_weight(cpu, &self.norm, &self.x, &self.r1, &self.dn, g1);
    }
}

/// All products of a layer in turn: the layer's time if nothing else took any.
struct Products {
    operands: Vec<Product>,
}

struct Product {
    shape: Shape,
    beta: f32,
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
}

impl Product {
    fn new(cpu: &Cpu, shape: Shape, add: bool) -> Self {
        let (a, b) = (normal(cpu, 1, shape.m * shape.k), normal(cpu, 2, shape.k * shape.n));
        Self { shape, beta: if add { 1.0 } else { 0.0 }, a, b, c: vec![0.0; shape.m * shape.n] }
    }

    fn run(&mut self, cpu: &Cpu) {
        gemm(cpu, &self.shape, 1.0, &self.a, &self.b, self.beta, &mut self.c);
    }
}

impl Products {
    fn new(cpu: &Cpu) -> Self {
        let of = |(_, shape, times, add): (&str, Shape, usize, bool)| {
            (0..times).map(move |_| Product::new(cpu, shape, add))
        };
        Self { operands: products().into_iter().flat_map(of).collect() }
    }

    fn run(&mut self, cpu: &Cpu) {
        self.operands.iter_mut().for_each(|product| product.run(cpu));
    }
}

/// Measures the parts of a layer in turn, so that a disturbance of the machine affects all of them.
/// The minimum counts.
fn bench_layer(cpu: &Cpu) {
    let mut layer = Layer::new(cpu);
    let mut products = Products::new(cpu);
    layer.forward(cpu);
    let mut best = [f64::MAX; 5];
    let begin = Instant::now();
    while begin.elapsed().as_secs_f64() < 10.0 {
        let mut time = |part: usize, work: &mut dyn FnMut()| {
            let start = Instant::now();
            work();
            best[part] = best[part].min(start.elapsed().as_secs_f64());
        };
        time(0, &mut || products.run(cpu));
        time(1, &mut || layer.attention_forward(cpu));
        time(2, &mut || layer.attention_backward(cpu));
        time(3, &mut || layer.forward(cpu));
        time(4, &mut || layer.backward(cpu));
    }
    let flops = products.operands.iter().map(|product| product.shape.flops()).sum::<usize>() as f64;
    // Half of the scores are visible; two products forward and five backward.
    let score_flops = (BATCH * HEADS * SEQUENCE * SEQUENCE * HEAD_DIM) as f64;
    // Counted as in model FLOPs: attention in full, backward twice forward.
    let model_flops = flops + 12.0 * score_flops;
    let both_s = best[3] + best[4];
    let peak = flops / best[0];
    let line = |name: &str, s: f64, flops: f64| {
        println!("{name:<28} {:>8.3} ms {:>8.1} GFLOP/s", s * 1e3, flops / s / 1e9);
    };
    line("products of a layer", best[0], flops);
    line("attention forward", best[1], 2.0 * score_flops);
    line("attention backward", best[2], 5.0 * score_flops);
    line("layer forward", best[3], model_flops / 3.0);
    line("layer backward", best[4], model_flops / 1.5);
    line("layer", both_s, model_flops);
    println!(
        "the layer runs at {:.0} % of the rate of its products",
        100.0 * model_flops / both_s / peak
    );
}

fn main() {
    // Cargo adds `--bench`.
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let threads = arguments.iter().find_map(|argument| argument.parse().ok());
    let threads =
        threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let parts: Vec<&String> = arguments.iter().filter(|a| a.parse::<usize>().is_err()).collect();
    let wanted = |part: &str| parts.is_empty() || parts.iter().any(|&wanted| wanted == part);
    let cpu = Cpu::new(threads).expect("threads start");
    println!("{threads} threads");
    if wanted("products") {
        bench_products(&cpu);
    }
    if wanted("memory") {
        bench_memory_bound(&cpu);
    }
    if wanted("layer") {
        bench_layer(&cpu);
    }
}
