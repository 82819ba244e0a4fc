//! Each operation's functions on a device, against the reference kernels in f64. On the machine of the tests, and on a GPU
//! by `gpu-test`.

use kernels::activation::{self, Activation};
use kernels::adamw::{self, AdamW};
use kernels::attention::fused::Kernel;
use kernels::attention::{self, Attention, ProbabilityDropout};
use kernels::cross_entropy::{self, Logits};
use kernels::cuda::{Element, Gpu, Memory, Storage, Stored, bf16};
use kernels::dropout::{self, Dropout};
use kernels::embedding::{self, Embedding};
use kernels::gemm::{self, Batch, Shape};
use kernels::layer_norm::{self, LayerNorm};
use kernels::random::{self as draws, Stream, View};
use kernels::rms_norm::{self, RmsNorm};
use kernels::rope::{self as rotary, Pairing, Rope};
use kernels::{Cpu, Output, elementwise as sums, transpose as swap};

/// A case: panics where the device is wrong.
pub type Case = fn(&Gpu);

macro_rules! cases {
    ($($case:ident)+) => {
        /// All of them.
        pub const ALL: &[(&str, Case)] = &[$((stringify!($case), $case)),+];
    };
}

cases!(
    rms_norm layer_norm activations rope packed_rope adamw elementwise embedding cross_entropy vocabulary_split dropout random
    transpose products biased_products attention wide_attention attention_with_dropout attention_in_f32 merged_attention
    fused_attention
);

/// Numbers between -1 and 1 that the storage holds exactly.
fn numbers<S: Stored>(len: usize, seed: usize) -> Vec<f64> {
    let number = |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0;
    (0..len).map(|i| f64::from(S::narrowed(number(i)).widened())).collect()
}

/// To the device, in the storage type.
fn up<S: Stored>(gpu: &Gpu, values: &[f64]) -> Memory<S> {
    let stored: Vec<S> = values.iter().map(|&x| S::narrowed(x as f32)).collect();
    gpu.upload(&stored).unwrap()
}

fn down<S: Stored>(gpu: &Gpu, memory: &Memory<S>) -> Vec<f64> {
    gpu.download(memory.view()).unwrap().into_iter().map(|x| f64::from(x.widened())).collect()
}

fn out<S: Element>(gpu: &Gpu, len: usize) -> Memory<S> {
    gpu.memory(len).unwrap()
}

/// Compares; a value in bf16 may be off by its rounding.
fn close(what: &str, storage: Storage, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let relative = if storage == Storage::Bf16 { 1.0 / 256.0 } else { 2e-6 };
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = (found - expected).abs();
        let same = found == expected || off <= relative * expected.abs() + 3e-6;
        assert!(same, "{what} [{at}] {storage:?}: {found}, not {expected}");
    }
}

/// Runs a body with `S` as each storage type.
macro_rules! in_each_storage {
    ($function:ident($gpu:expr)) => {{
        $function::<f32>($gpu);
        $function::<bf16>($gpu);
    }};
}

/// Rows, columns: one pack a thread, packs of less, several packs a thread, packs of one.
const SHAPES: [(usize, usize); 4] = [(3, 256), (5, 36), (2, 5000), (300, 33)];

pub fn rms_norm(gpu: &Gpu) {
    in_each_storage!(rms_norm_in(gpu));
}

fn rms_norm_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    for (number, (rows, columns)) in SHAPES.into_iter().enumerate() {
        let norm = RmsNorm { rows, columns, eps: 1e-5, unit_offset: number % 2 == 1 };
        let tensor = |seed| numbers::<S>(rows * columns, seed);
        let (x, more, dy, old) = (tensor(1), tensor(2), tensor(3), tensor(4));
        let (w, dw) = (numbers::<S>(columns, 5), numbers::<f32>(columns, 6));
        let [gx, gmore, gdy] = [&x, &more, &dy].map(|tensor| up::<S>(gpu, tensor));
        let (gw, mut gdw, mut gdx) = (up::<S>(gpu, &w), up::<f32>(gpu, &dw), up::<S>(gpu, &old));
        let [mut gsum, mut gy] = [(); 2].map(|()| out::<S>(gpu, rows * columns));
        let mut gr = out::<f32>(gpu, rows);

        let [mut y, mut r] = [vec![0.0; rows * columns], vec![0.0; rows]];
        rms_norm::cuda::forward(gpu, &norm, gx.view(), gw.view(), gy.view_mut(), gr.view_mut())
            .unwrap();
        rms_norm::reference::forward(&cpu, &norm, &x, &w, &mut y, &mut r);
        close("y", S::STORAGE, &down(gpu, &gy), &y);
        close("r", Storage::F32, &down(gpu, &gr), &r);

        rms_norm::cuda::forward_residual(
            gpu,
            &norm,
            gx.view(),
            gmore.view(),
            gw.view(),
            gsum.view_mut(),
            gy.view_mut(),
            gr.view_mut(),
        )
        .unwrap();
        let both: Vec<f64> = x.iter().zip(&more).map(|(a, b)| a + b).collect();
        let sum = down(gpu, &gsum);
        close("sum", S::STORAGE, &sum, &both);
        // From here on of the sum as it is stored.
        rms_norm::reference::forward(&cpu, &norm, &sum, &w, &mut y, &mut r);
        close("y of the sum", S::STORAGE, &down(gpu, &gy), &y);
        close("r of the sum", Storage::F32, &down(gpu, &gr), &r);

        for output in [Output::Accumulate, Output::Overwrite] {
            rms_norm::cuda::backward_input(
                gpu,
                &norm,
                gsum.view(),
                gw.view(),
                gr.view(),
                gdy.view(),
                gdx.view_mut(),
                output,
            )
            .unwrap();
            let mut dx = old.clone();
            rms_norm::reference::backward_input(&cpu, &norm, &sum, &w, &r, &dy, &mut dx, output);
            close("dx", S::STORAGE, &down(gpu, &gdx), &dx);
        }
        rms_norm::cuda::backward_weight(
            gpu,
            &norm,
            gsum.view(),
            gr.view(),
            gdy.view(),
            gdw.view_mut(),
        )
        .unwrap();
        let mut dw = dw;
        rms_norm::reference::backward_weight(&cpu, &norm, &sum, &r, &dy, &mut dw);
        close("dw", Storage::F32, &down(gpu, &gdw), &dw);
    }
}

pub fn layer_norm(gpu: &Gpu) {
    in_each_storage!(layer_norm_in(gpu));
}

fn layer_norm_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    for (rows, columns) in SHAPES {
        let norm = LayerNorm { rows, columns, eps: 1e-5 };
        let tensor = |seed| numbers::<S>(rows * columns, seed);
        let (x, more, dy, old) = (tensor(1), tensor(2), tensor(3), tensor(7));
        let (w, bias) = (numbers::<S>(columns, 4), numbers::<S>(columns, 5));
        let start = numbers::<f32>(columns, 6);
        let [gx, gmore, gdy] = [&x, &more, &dy].map(|tensor| up::<S>(gpu, tensor));
        let [gw, gbias] = [&w, &bias].map(|tensor| up::<S>(gpu, tensor));
        let [mut gdw, mut gdbias] = [(); 2].map(|()| up::<f32>(gpu, &start));
        let mut gdx = up::<S>(gpu, &old);
        let [mut gsum, mut gy] = [(); 2].map(|()| out::<S>(gpu, rows * columns));
        let [mut gm, mut gr] = [(); 2].map(|()| out::<f32>(gpu, rows));

        let (mut y, mut m, mut r) = (vec![0.0; rows * columns], vec![0.0; rows], vec![0.0; rows]);
        layer_norm::cuda::forward(
            gpu,
            &norm,
            gx.view(),
            gw.view(),
            gbias.view(),
            gy.view_mut(),
            gm.view_mut(),
            gr.view_mut(),
        )
        .unwrap();
        layer_norm::reference::forward(&cpu, &norm, &x, &w, &bias, &mut y, &mut m, &mut r);
        close("y", S::STORAGE, &down(gpu, &gy), &y);
        layer_norm::cuda::forward_residual(
            gpu,
            &norm,
            gx.view(),
            gmore.view(),
            gw.view(),
            gbias.view(),
            gsum.view_mut(),
            gy.view_mut(),
            gm.view_mut(),
            gr.view_mut(),
        )
        .unwrap();
        let both: Vec<f64> = x.iter().zip(&more).map(|(a, b)| a + b).collect();
        let sum = down(gpu, &gsum);
        close("sum", S::STORAGE, &sum, &both);
        layer_norm::reference::forward(&cpu, &norm, &sum, &w, &bias, &mut y, &mut m, &mut r);
        close("y of the sum", S::STORAGE, &down(gpu, &gy), &y);
        close("mean", Storage::F32, &down(gpu, &gm), &m);
        close("r", Storage::F32, &down(gpu, &gr), &r);
        for output in [Output::Accumulate, Output::Overwrite] {
            layer_norm::cuda::backward_input(
                gpu,
                &norm,
                gsum.view(),
                gw.view(),
                gm.view(),
                gr.view(),
                gdy.view(),
                gdx.view_mut(),
                output,
            )
            .unwrap();
            let mut dx = old.clone();
            layer_norm::reference::backward_input(
                &cpu, &norm, &sum, &w, &m, &r, &dy, &mut dx, output,
            );
            close("dx", S::STORAGE, &down(gpu, &gdx), &dx);
        }
        layer_norm::cuda::backward_weight(
            gpu,
            &norm,
            gsum.view(),
            gm.view(),
            gr.view(),
            gdy.view(),
            gdw.view_mut(),
            gdbias.view_mut(),
        )
        .unwrap();
        let (mut dw, mut dbias) = (start.clone(), start);
        layer_norm::reference::backward_weight(&cpu, &norm, &sum, &m, &r, &dy, &mut dw, &mut dbias);
        close("dw", Storage::F32, &down(gpu, &gdw), &dw);
        close("dbias", Storage::F32, &down(gpu, &gdbias), &dbias);
    }
}

pub fn activations(gpu: &Gpu) {
    in_each_storage!(activations_in(gpu));
}

fn activations_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    // More than a block, and no whole number of them.
    let elements = 4200;
    for activation in Activation::ALL {
        let tensor = |seed| -> Vec<f64> {
            numbers::<S>(elements, seed).into_iter().map(|x| 4.0 * x).collect()
        };
        let (gate, up_, dy) = (tensor(1), tensor(2), tensor(3));
        let [ggate, gup, gdy] = [&gate, &up_, &dy].map(|tensor| up::<S>(gpu, tensor));
        let [mut gy, mut gdx, mut ggated, mut gdgate, mut gdup] =
            [(); 5].map(|()| out::<S>(gpu, elements));
        let [mut y, mut dx, mut gated, mut dgate, mut dup] = [(); 5].map(|()| vec![0.0; elements]);
        activation::cuda::forward(gpu, activation, ggate.view(), gy.view_mut()).unwrap();
        activation::reference::forward(&cpu, activation, &gate, &mut y);
        activation::cuda::backward(gpu, activation, ggate.view(), gdy.view(), gdx.view_mut())
            .unwrap();
        activation::reference::backward(&cpu, activation, &gate, &dy, &mut dx);
        activation::cuda::gated_forward(
            gpu,
            activation,
            ggate.view(),
            gup.view(),
            ggated.view_mut(),
        )
        .unwrap();
        activation::reference::gated_forward(&cpu, activation, &gate, &up_, &mut gated);
        activation::cuda::gated_backward(
            gpu,
            activation,
            ggate.view(),
            gup.view(),
            gdy.view(),
            gdgate.view_mut(),
            gdup.view_mut(),
        )
        .unwrap();
        activation::reference::gated_backward(
            &cpu, activation, &gate, &up_, &dy, &mut dgate, &mut dup,
        );
        let pairs = [
            ("y", gy, y),
            ("dx", gdx, dx),
            ("gated", ggated, gated),
            ("dgate", gdgate, dgate),
            ("dup", gdup, dup),
        ];
        for (what, found, expected) in pairs {
            close(&format!("{activation:?} {what}"), S::STORAGE, &down(gpu, &found), &expected);
        }
    }
}

/// Of tables in f32 as the device made them, and in f64.
fn table(gpu: &Gpu, positions: &[u32], dim: usize) -> (Memory<f32>, Vec<f64>) {
    let cpu = Cpu::serial();
    let frequencies = rotary::inverse_frequencies(1e4, dim);
    let mut found = out::<f32>(gpu, positions.len() * dim);
    let there = gpu.upload(positions).unwrap();
    rotary::cuda::fill_table(gpu, &frequencies, there.view(), found.view_mut()).unwrap();
    let mut expected = vec![0.0; positions.len() * dim];
    rotary::reference::fill_table(&cpu, &frequencies, positions, &mut expected);
    // Rounded once.
    let table = down(gpu, &found);
    let same = |(a, b): (&f64, &f64)| (a - b).abs() < 6e-8;
    assert!(table.iter().zip(&expected).all(same), "{table:?}, not {expected:?}");
    (found, table)
}

const POSITIONS: [u32; 5] = [0, 7, 1, 120_000, 4];

pub fn rope(gpu: &Gpu) {
    in_each_storage!(rope_in(gpu));
}

fn rope_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    for (head_dim, start, dim) in [(32, 0, 32), (40, 8, 32), (12, 2, 6)] {
        let (gtable, table) = table(gpu, &POSITIONS, dim);
        for pairing in [Pairing::Half, Pairing::Interleaved] {
            let (tokens, heads) = (5, 3);
            let rope =
                Rope { tokens, heads, head_dim, rotary_start: start, rotary_dim: dim, pairing };
            let x = numbers::<S>(tokens * heads * head_dim, 1);
            let [mut gx, mut gback] = [(); 2].map(|()| up::<S>(gpu, &x));
            rotary::cuda::forward(gpu, &rope, gtable.view(), gx.view_mut()).unwrap();
            rotary::cuda::backward(gpu, &rope, gtable.view(), gback.view_mut()).unwrap();
            let (mut y, mut dx) = (x.clone(), x);
            rotary::reference::forward(&cpu, &rope, &table, &mut y);
            rotary::reference::backward(&cpu, &rope, &table, &mut dx);
            close("rotated", S::STORAGE, &down(gpu, &gx), &y);
            close("rotated back", S::STORAGE, &down(gpu, &gback), &dx);
        }
    }
}

/// Queries and keys of a fused projection in one launch; values behind them stay as they are.
pub fn packed_rope(gpu: &Gpu) {
    let cpu = Cpu::serial();
    let (tokens, heads, kv_heads, head_dim) = (5, 4, 2, 16);
    let (gtable, table) = table(gpu, &POSITIONS, head_dim);
    let rotated = Rope::half(tokens, heads + kv_heads, head_dim);
    let stride = (heads + 2 * kv_heads) * head_dim;
    let x = numbers::<bf16>(tokens * stride, 1);
    let mut gx = up::<bf16>(gpu, &x);
    rotary::cuda::forward_packed(gpu, &rotated, stride, gtable.view(), gx.view_mut()).unwrap();
    let width = rotated.heads * head_dim;
    let one = Rope { tokens: 1, ..rotated };
    let mut y = x.clone();
    for (row, table) in y.chunks_mut(stride).zip(table.chunks(head_dim)) {
        rotary::reference::forward(&cpu, &one, table, &mut row[..width]);
    }
    close("rotated", Storage::Bf16, &down(gpu, &gx), &y);
    let mut gdx = up::<bf16>(gpu, &x);
    rotary::cuda::backward_packed(gpu, &rotated, stride, gtable.view(), gdx.view_mut()).unwrap();
    let mut dx = x;
    for (row, table) in dx.chunks_mut(stride).zip(table.chunks(head_dim)) {
        rotary::reference::backward(&cpu, &one, table, &mut row[..width]);
    }
    close("rotated back", Storage::Bf16, &down(gpu, &gdx), &dx);
}

pub fn adamw(gpu: &Gpu) {
    in_each_storage!(adamw_in(gpu));
}

fn adamw_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    let step =
        AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.999, eps: 1e-8, step: 3, gradient_scale: 0.5 };
    // The second has no copy.
    let shapes = [(5000, 0.1), (33, 0.0), (70, 0.01)];
    let host: Vec<[Vec<f64>; 4]> = shapes
        .iter()
        .map(|&(elements, _)| {
            let [w, g, m] = [1, 2, 3].map(|seed| numbers::<f32>(elements, seed));
            let v = m.iter().map(|m| f64::from((m * m) as f32)).collect();
            [w, g, m, v]
        })
        .collect();
    let mut there: Vec<[Memory<f32>; 4]> = host
        .iter()
        .map(|tensors| tensors.each_ref().map(|tensor| up::<f32>(gpu, tensor)))
        .collect();
    let mut copies: Vec<Memory<S>> =
        shapes.iter().map(|&(elements, _)| out::<S>(gpu, elements)).collect();
    let mut proposed: Vec<Memory<f32>> =
        shapes.iter().map(|&(elements, _)| out::<f32>(gpu, elements)).collect();

    let mut proposals: Vec<adamw::cuda::Proposal<'_, S>> = there
        .iter()
        .zip(&mut proposed)
        .zip(shapes)
        .map(|(([w, g, m, v], to), (_, decay))| adamw::cuda::Proposal {
            to: to.view_mut(),
            w: w.view(),
            g: g.view(),
            m: m.view(),
            v: v.view(),
            copy: None,
            decay,
        })
        .collect();
    adamw::cuda::proposal(gpu, &step, &mut proposals).unwrap();
    let mut parameters: Vec<adamw::cuda::Parameter<'_, S>> = there
        .iter_mut()
        .zip(&mut copies)
        .zip(shapes)
        .map(|(([w, g, m, v], copy), (elements, decay))| adamw::cuda::Parameter {
            w: w.view_mut(),
            g: g.view(),
            m: m.view_mut(),
            v: v.view_mut(),
            copy: (elements != 33).then(|| copy.view_mut()),
            decay,
        })
        .collect();
    adamw::cuda::update(gpu, &step, &mut parameters).unwrap();

    for (number, (elements, decay)) in shapes.into_iter().enumerate() {
        let [mut w, g, mut m, mut v] = host[number].clone();
        let parameter = adamw::Parameter { w: &mut w, g: &g, m: &mut m, v: &mut v, decay };
        adamw::reference::update(&cpu, &step, &mut [parameter]);
        let [gw, _, gm, gv] = &there[number];
        for (what, found, expected) in [("w", gw, &w), ("m", gm, &m), ("v", gv, &v)] {
            close(&format!("{what} of {elements}"), Storage::F32, &down(gpu, found), expected);
        }
        if elements != 33 {
            close("copy", S::STORAGE, &down(gpu, &copies[number]), &w);
        }
        // To the bit.
        assert_eq!(down(gpu, &proposed[number]), down(gpu, gw));
    }
}

pub fn elementwise(gpu: &Gpu) {
    in_each_storage!(elementwise_in(gpu));
}

fn elementwise_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    for (rows, columns) in [(600, 64), (5, 33)] {
        let elements = rows * columns;
        let [a, b] = [1, 2].map(|seed| numbers::<S>(elements, seed));
        let (bias, start) = (numbers::<S>(columns, 3), numbers::<f32>(elements, 4));
        let [ga, gb] = [&a, &b].map(|tensor| up::<S>(gpu, tensor));
        let gbias = up::<S>(gpu, &bias);
        let mut gy = out::<S>(gpu, elements);

        let mut y = vec![0.0; elements];
        sums::cuda::add(gpu, ga.view(), gb.view(), gy.view_mut()).unwrap();
        sums::reference::add(&cpu, &a, &b, &mut y);
        close("sum", S::STORAGE, &down(gpu, &gy), &y);

        let (mut gy, mut y) = (up::<S>(gpu, &b), b.clone());
        sums::cuda::axpy(gpu, 0.5, ga.view(), gy.view_mut()).unwrap();
        sums::reference::axpy(&cpu, 0.5, &a, &mut y);
        close("axpy", S::STORAGE, &down(gpu, &gy), &y);

        let (mut gy, mut y) = (up::<S>(gpu, &b), b.clone());
        sums::cuda::scale(gpu, 0.75, gy.view_mut()).unwrap();
        sums::reference::scale(&cpu, 0.75, &mut y);
        close("scaled", S::STORAGE, &down(gpu, &gy), &y);

        let larger: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a.max(*b)).collect();
        let mut gy = up::<S>(gpu, &b);
        sums::cuda::maximum(gpu, ga.view(), gy.view_mut()).unwrap();
        assert_eq!(down(gpu, &gy), larger);

        let by: Vec<f64> = b.iter().map(|b| if b.abs() < 0.1 { 2.0 } else { *b }).collect();
        let (gby, mut gy, mut y) = (up::<S>(gpu, &by), up::<S>(gpu, &a), a.clone());
        sums::cuda::divide(gpu, gby.view(), gy.view_mut()).unwrap();
        sums::reference::divide(&cpu, &by, &mut y);
        close("divided", S::STORAGE, &down(gpu, &gy), &y);

        let (mut gy, mut y) = (up::<S>(gpu, &a), a.clone());
        sums::cuda::add_bias(gpu, gbias.view(), gy.view_mut()).unwrap();
        sums::reference::add_bias(&cpu, &bias, &mut y);
        close("biased", S::STORAGE, &down(gpu, &gy), &y);

        let (mut gsum, mut total) = (up::<f32>(gpu, &start), start.clone());
        sums::cuda::accumulate(gpu, ga.view(), gsum.view_mut()).unwrap();
        sums::reference::axpy(&cpu, 1.0, &a, &mut total);
        close("accumulated", Storage::F32, &down(gpu, &gsum), &total);

        let (mut gdbias, mut dbias) =
            (up::<f32>(gpu, &start[..columns]), start[..columns].to_vec());
        sums::cuda::bias_gradient(gpu, ga.view(), gdbias.view_mut()).unwrap();
        sums::reference::bias_gradient(&cpu, &a, &mut dbias);
        close("dbias", Storage::F32, &down(gpu, &gdbias), &dbias);

        let (gstart, mut gnarrow) = (up::<f32>(gpu, &start), out::<S>(gpu, elements));
        sums::cuda::narrow(gpu, gstart.view(), gnarrow.view_mut()).unwrap();
        let narrowed: Vec<f64> =
            start.iter().map(|&x| f64::from(S::narrowed(x as f32).widened())).collect();
        assert_eq!(down(gpu, &gnarrow), narrowed);
        let mut gwide = out::<f32>(gpu, elements);
        sums::cuda::widen(gpu, gnarrow.view(), gwide.view_mut()).unwrap();
        assert_eq!(down(gpu, &gwide), narrowed);

        let found = sums::cuda::sum_of_squares(gpu, ga.view()).unwrap();
        let expected = sums::reference::sum_of_squares(&cpu, &a);
        assert!((found / expected - 1.0).abs() < 1e-13, "{found} {expected}");
        let found = sums::cuda::sum(gpu, ga.view()).unwrap();
        let expected = a.iter().sum::<f64>();
        assert!((found - expected).abs() < 1e-10, "{found} {expected}");
    }
}

pub fn embedding(gpu: &Gpu) {
    in_each_storage!(embedding_in(gpu));
}

fn embedding_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    // Ids beyond both ends, ids met again in the next look at all of them (more tokens than threads), and once only.
    let ids: Vec<i64> =
        (0..80).map(|i| if i == 70 { 8 } else { [5, 9, 5, 2, 12, 7, 5, 9, 3][i % 9] }).collect();
    let gids = gpu.upload(&ids).unwrap();
    for columns in [64, 33, 2100] {
        let embedding = Embedding { tokens: ids.len(), columns, rows: 6, first_row: 4, scale: 1.5 };
        let (table, dout) = (numbers::<S>(6 * columns, 1), numbers::<S>(ids.len() * columns, 2));
        let start = numbers::<f32>(6 * columns, 3);
        let [gtable, gdout] = [&table, &dout].map(|tensor| up::<S>(gpu, tensor));
        let (mut gout, mut gdtable) = (out::<S>(gpu, ids.len() * columns), up::<f32>(gpu, &start));
        embedding::cuda::forward(gpu, &embedding, gids.view(), gtable.view(), gout.view_mut())
            .unwrap();
        let mut out = vec![0.0; ids.len() * columns];
        embedding::reference::forward(&cpu, &embedding, &ids, &table, &mut out);
        close("out", S::STORAGE, &down(gpu, &gout), &out);
        embedding::cuda::backward(gpu, &embedding, gids.view(), gdout.view(), gdtable.view_mut())
            .unwrap();
        let mut dtable = start;
        embedding::reference::backward(&cpu, &embedding, &ids, &dout, &mut dtable);
        close("dtable", Storage::F32, &down(gpu, &gdtable), &dtable);
    }
}

pub fn cross_entropy(gpu: &Gpu) {
    in_each_storage!(cross_entropy_in(gpu));
}

fn cross_entropy_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    // A target on this shard, one on another, an ignored one, and the last real column.
    let targets = [103_i64, 5, -1, 100 + 46];
    let gtargets = gpu.upload(&targets).unwrap();
    for (columns, real, cap) in
        [(64, 47, None), (48, 47, Some(3.0)), (51, 47, None), (64, 0, None), (9000, 8990, None)]
    {
        let rows = targets.len();
        let shape = Logits { rows, columns, real_columns: real, first_column: 100, soft_cap: cap };
        let logits: Vec<f64> =
            numbers::<S>(rows * columns, 1).into_iter().map(|x| 8.0 * x).collect();
        let mut glogits = up::<S>(gpu, &logits);
        let [mut gmax, mut gsum, mut gtarget, mut gloss] = [(); 4].map(|()| out::<f32>(gpu, rows));
        let [mut gmax2, mut gsum2, mut gtarget2] = [(); 3].map(|()| out::<f32>(gpu, rows));
        let mut z = logits;
        let [mut max, mut sum, mut target, mut loss] = [(); 4].map(|()| vec![0.0; rows]);
        cross_entropy::reference::local_max(&cpu, &shape, &z, &mut max);
        cross_entropy::reference::local_sum_exp(
            &cpu,
            &shape,
            &z,
            &targets,
            &max,
            &mut sum,
            &mut target,
        );
        cross_entropy::cuda::local_max(gpu, &shape, glogits.view(), gmax.view_mut()).unwrap();
        close("max", Storage::F32, &down(gpu, &gmax), &max);
        cross_entropy::cuda::local_sum_exp(
            gpu,
            &shape,
            glogits.view(),
            gtargets.view(),
            gmax.view(),
            gsum.view_mut(),
            gtarget.view_mut(),
        )
        .unwrap();
        cross_entropy::cuda::statistics(
            gpu,
            &shape,
            glogits.view(),
            gtargets.view(),
            gmax2.view_mut(),
            gsum2.view_mut(),
            gtarget2.view_mut(),
        )
        .unwrap();
        for (gmax, gsum, gtarget) in [(&gmax, &gsum, &gtarget), (&gmax2, &gsum2, &gtarget2)] {
            close("max", Storage::F32, &down(gpu, gmax), &max);
            close("sum", Storage::F32, &down(gpu, gsum), &sum);
            close("target", Storage::F32, &down(gpu, gtarget), &target);
        }
        // As if another shard had a larger maximum.
        let common = vec![8.5; rows];
        let gcommon = up::<f32>(gpu, &common);
        cross_entropy::cuda::rescale_sum_exp(gpu, gmax.view(), gcommon.view(), gsum.view_mut())
            .unwrap();
        cross_entropy::reference::rescale_sum_exp(&cpu, &max, &common, &mut sum);
        close("rescaled", Storage::F32, &down(gpu, &gsum), &sum);
        if real == 0 {
            continue;
        }
        let total: Vec<f64> = down(gpu, &gsum);
        cross_entropy::cuda::loss(
            gpu,
            gtargets.view(),
            gcommon.view(),
            gsum.view(),
            gtarget.view(),
            gloss.view_mut(),
        )
        .unwrap();
        cross_entropy::reference::loss(&cpu, &targets, &common, &total, &target, &mut loss);
        close("loss", Storage::F32, &down(gpu, &gloss), &loss);
        cross_entropy::cuda::gradient_in_place(
            gpu,
            &shape,
            glogits.view_mut(),
            gtargets.view(),
            gcommon.view(),
            gsum.view(),
            0.25,
        )
        .unwrap();
        cross_entropy::reference::gradient_in_place(
            &cpu, &shape, &mut z, &targets, &common, &total, 0.25,
        );
        close("gradient", S::STORAGE, &down(gpu, &glogits), &z);
    }
}

pub fn vocabulary_split(gpu: &Gpu) {
    in_each_storage!(vocabulary_split_in(gpu));
}

/// What algorithm 2 of a split vocabulary computes beside its products.
fn vocabulary_split_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    let targets = [103_i64, 5, -1, 100 + 46, 100 + 47];
    let gtargets = gpu.upload(&targets).unwrap();
    let rows = targets.len();
    let (factor, target) = (numbers::<f32>(rows, 1), numbers::<f32>(rows, 2));
    let [gfactor, gtarget] = [&factor, &target].map(|tensor| up::<f32>(gpu, tensor));
    for (columns, real, soft_cap) in [(64, 47, None), (48, 47, Some(3.0)), (51, 47, Some(1.5))] {
        let shape = Logits { rows, columns, real_columns: real, first_column: 100, soft_cap };
        let [x, hits] = [3, 4].map(|seed| numbers::<S>(rows * columns, seed));
        let ghits = up::<S>(gpu, &hits);

        let (mut gx, mut y) = (up::<S>(gpu, &x), x.clone());
        cross_entropy::cuda::scale_by_slope(gpu, soft_cap, gtarget.view(), gx.view_mut()).unwrap();
        cross_entropy::reference::scale_by_slope(&cpu, soft_cap, &target, &mut y);
        close("slope", S::STORAGE, &down(gpu, &gx), &y);

        let (mut gx, mut y) = (up::<S>(gpu, &x), x.clone());
        cross_entropy::cuda::softmax_to_gradient(
            gpu,
            &shape,
            gx.view_mut(),
            gtargets.view(),
            gfactor.view(),
            gtarget.view(),
            0.25,
        )
        .unwrap();
        cross_entropy::reference::softmax_to_gradient(
            &cpu, &shape, &mut y, &targets, &factor, &target, 0.25,
        );
        close("softmax to gradient", S::STORAGE, &down(gpu, &gx), &y);

        let (mut gx, mut y) = (up::<S>(gpu, &x), x);
        let (to, hit) = (gx.view_mut(), ghits.view());
        cross_entropy::cuda::join_gradient(gpu, to, hit, gfactor.view(), 0.25).unwrap();
        cross_entropy::reference::join_gradient(&cpu, &mut y, &hits, &factor, 0.25);
        close("joined", S::STORAGE, &down(gpu, &gx), &y);
    }
}

pub fn dropout(gpu: &Gpu) {
    in_each_storage!(dropout_in(gpu));
}

fn dropout_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    let stream = Stream { seed: 0x1234_5678_9abc_def0, tensor: 7, step: 11 };
    let dropout = Dropout { p: 0.3, stream };
    let views = [
        View { offset: 1 << 33 | 3, sizes: [1, 5, 40], strides: [0, 56, 1] },
        View { offset: 9, sizes: [3, 5, 16], strides: [1000, 24, 1] },
        View { offset: 2, sizes: [2, 3, 33], strides: [1, 7, 2] },
        View::contiguous(6, 4200),
    ];
    for view in views {
        let x = numbers::<S>(view.len(), 1);
        let (gx, mut gy) = (up::<S>(gpu, &x), out::<S>(gpu, view.len()));
        dropout::cuda::apply(gpu, &dropout, &view, gx.view(), gy.view_mut()).unwrap();
        let mut y = vec![0.0; view.len()];
        dropout::reference::apply(&cpu, &dropout, &view, &x, &mut y);
        close(&format!("y of {view:?}"), S::STORAGE, &down(gpu, &gy), &y);
        let kept = y.iter().filter(|&&y| y != 0.0).count() as f64 / y.len() as f64;
        assert!((0.5..0.9).contains(&kept), "{kept}");
    }
}

pub fn random(gpu: &Gpu) {
    let cpu = Cpu::serial();
    let stream = Stream { seed: 0x0123_4567_89ab_cdef, tensor: 7, step: 0 };
    let views = [
        View::contiguous(3, 1001),
        View::matrix(5, 30, 7, 11, 103),
        View { offset: (1 << 34) + 1, sizes: [3, 5, 7], strides: [1000, 60, 8] },
    ];
    for view in views {
        let mut found = out::<f32>(gpu, view.len());
        draws::cuda::fill_normal(gpu, found.view_mut(), &view, stream, 0.02).unwrap();
        let mut expected = vec![0.0_f32; view.len()];
        draws::reference::fill_normal(&cpu, &mut expected, &view, stream, 0.02);
        let found = gpu.download(found.view()).unwrap();
        let ulps = |(a, b): (&f32, &f32)| a.to_bits().abs_diff(b.to_bits());
        let off = found.iter().zip(&expected).map(ulps).max();
        assert!(off <= Some(1), "{view:?}: {found:?}, not {expected:?}");
    }
}

pub fn transpose(gpu: &Gpu) {
    in_each_storage!(transpose_in(gpu));
}

fn transpose_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    for shape in [[3, 5, 8], [40, 70, 1], [32, 64, 1], [2, 3, 5], [7, 1, 12]] {
        let elements = shape.iter().product();
        let x = numbers::<S>(elements, 1);
        let (gx, mut gy) = (up::<S>(gpu, &x), out::<S>(gpu, elements));
        swap::cuda::swap_leading(gpu, shape, gx.view(), gy.view_mut()).unwrap();
        let mut y = vec![0.0; elements];
        swap::reference::swap_leading(&cpu, shape, &x, &mut y);
        assert_eq!(down(gpu, &gy), y, "{shape:?}");
    }
}

/// Of products of many small numbers, off by the rounding of the largest.
fn close_products(what: &str, storage: Storage, found: &[f64], expected: &[f64]) {
    let most = expected.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    let relative = if storage == Storage::Bf16 { 1.0 / 256.0 } else { 2e-6 };
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let same = (found - expected).abs() <= relative * most;
        assert!(same, "{what} [{at}] {storage:?}: {found}, not {expected}");
    }
}

pub fn products(gpu: &Gpu) {
    products_in::<f32, f32>(gpu);
    products_in::<bf16, bf16>(gpu);
    products_in::<bf16, f32>(gpu);
}

fn products_in<S: Stored, O: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    let (m, n, k) = (24, 40, 16);
    let shapes = [
        (Shape::nn(m, n, k), 1),
        (Shape::nt(m, n, k), 1),
        (Shape::tn(m, n, k), 1),
        // Rows with gaps, and several products.
        (Shape::nn(m, n, k).with_leading(k + 8, n + 16, n + 8), 1),
        (Shape::nt(m, n, k).with_leading(k + 8, k, n), 3),
        (Shape::tn(m, n, k), 2),
    ];
    for (number, (shape, count)) in shapes.into_iter().enumerate() {
        let rows = m.max(n).max(k);
        let strides = [rows * shape.lda, rows * shape.ldb, m * shape.ldc];
        // The second factor of a batch is shared.
        let stride_b = if count == 3 { 0 } else { strides[1] };
        let batch = Batch { count, stride_a: strides[0], stride_b, stride_c: strides[2] };
        let [a, b] = [0, 1].map(|i| numbers::<S>(count * strides[i], i + number));
        let c = numbers::<O>(count * strides[2], 7);
        let (ga, gb) = (up::<S>(gpu, &a), up::<S>(gpu, &b));
        for (alpha, beta) in [(1.0, 0.0), (0.5, 1.0), (1.0, -0.25)] {
            let (mut gc, mut expected) = (up::<O>(gpu, &c), c.clone());
            let (what, out) = (format!("{shape:?} {alpha} {beta}"), O::STORAGE);
            let (galpha, gbeta) = (alpha as f32, beta as f32);
            if count == 1 {
                gemm::cuda::gemm(gpu, &shape, galpha, ga.view(), gb.view(), gbeta, gc.view_mut())
                    .unwrap();
                gemm::reference::gemm(&cpu, &shape, alpha, &a, &b, beta, &mut expected);
            } else {
                gemm::cuda::gemm_batched(
                    gpu,
                    &shape,
                    &batch,
                    galpha,
                    ga.view(),
                    gb.view(),
                    gbeta,
                    gc.view_mut(),
                )
                .unwrap();
                gemm::reference::gemm_batched(
                    &cpu,
                    &shape,
                    &batch,
                    alpha,
                    &a,
                    &b,
                    beta,
                    &mut expected,
                );
            }
            close_products(&what, out, &down(gpu, &gc), &expected);
        }
    }
}

pub fn biased_products(gpu: &Gpu) {
    in_each_storage!(biased_products_in(gpu));
}

fn biased_products_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    let (m, n, k) = (24, 40, 16);
    for shape in [Shape::nt(m, n, k), Shape::nn(m, n, k)] {
        let (a, b, bias) = (numbers::<S>(m * k, 1), numbers::<S>(n * k, 2), numbers::<S>(n, 3));
        let [ga, gb, gbias] = [&a, &b, &bias].map(|tensor| up::<S>(gpu, tensor));
        let mut gc = out::<S>(gpu, m * n);
        gemm::cuda::gemm_bias(gpu, &shape, 1.0, ga.view(), gb.view(), gbias.view(), gc.view_mut())
            .unwrap();
        let mut c = vec![0.0; m * n];
        gemm::reference::gemm(&cpu, &shape, 1.0, &a, &b, 0.0, &mut c);
        sums::reference::add_bias(&cpu, &bias, &mut c);
        close_products("biased", S::STORAGE, &down(gpu, &gc), &c);
    }
}

/// Of tensor-core products with factors rounded to bf16: by norm, and no element far out. In f32 closer.
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

/// Every rule of the mask, and of heads.
fn rules(dim: usize) -> Vec<Attention> {
    let other = dim / 2 * 3;
    vec![
        heads(70, 70, dim, dim),
        Attention { causal: false, ..heads(17, 90, other, dim) },
        Attention { window: Some(20), ..heads(80, 80, dim, dim) },
        Attention { soft_cap: Some(1.5), kv_heads: 4, ..heads(33, 33, dim, 2 * dim) },
        Attention { kv_heads: 1, ..heads(40, 40, 2 * dim, dim) },
        // A chunk of queries and of keys that begins before them and ends within; and keys that nobody sees.
        Attention { q_offset: 50, kv_offset: 30, ..heads(40, 45, dim, dim) },
        Attention { q_offset: 0, kv_offset: 20, ..heads(40, 40, dim, dim) },
    ]
}

pub fn attention(gpu: &Gpu) {
    for a in rules(32) {
        check_attention::<bf16>(gpu, &a);
    }
    // Heads of a block of fewer rows.
    check_attention::<bf16>(gpu, &Attention { batch: 1, ..heads(20, 20, 144, 32) });
}

/// Heads whose dk and dv come from blocks of their own.
pub fn wide_attention(gpu: &Gpu) {
    let one = |a: Attention| Attention { batch: 1, q_heads: 2, kv_heads: 1, ..a };
    check_attention::<bf16>(gpu, &one(heads(20, 20, 256, 256)));
    check_attention::<bf16>(gpu, &one(heads(18, 35, 208, 16)));
}

/// Of the global tensor's draws, from the middle of it on.
fn dropped(a: Attention) -> Attention {
    let stream = Stream { seed: 42, tensor: 3, step: 5 };
    let dropout = Some(ProbabilityDropout {
        dropout: Dropout { p: 0.25, stream },
        batch_offset: 3,
        head_offset: 4,
        total_heads: 12,
        total_len: 1 << 17,
    });
    Attention { dropout, ..a }
}

pub fn attention_with_dropout(gpu: &Gpu) {
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
    // The backward pass is of the output as it is stored.
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

/// Two ranges of keys put together, one of which some queries see nothing of.
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
        // Keys and values are [batch, keys, heads, dim], of two heads of 16.
        let keys = |sequence: &[f64]| sequence[first * 32..(first + len) * 32].to_vec();
        tensor.chunks(40 * 32).flat_map(keys).collect()
    };
    let (mut gout, mut glse) =
        (out::<S>(gpu, whole.out_elements()), out::<f32>(gpu, whole.lse_elements()));
    let (mut part_out, mut part_lse) =
        (out::<S>(gpu, whole.out_elements()), out::<f32>(gpu, whole.lse_elements()));
    let gq = up::<S>(gpu, &q);
    for (number, (first, len)) in [(25, 15), (0, 25)].into_iter().enumerate() {
        let a = part(first, len);
        let [gk, gv] = [&k, &v].map(|tensor| up::<S>(gpu, &of(tensor, first, len)));
        let (to, to_lse) = if number == 0 {
            (gout.view_mut(), glse.view_mut())
        } else {
            (part_out.view_mut(), part_lse.view_mut())
        };
        attention::cuda::forward(gpu, &a, gq.view(), gk.view(), gv.view(), to, to_lse).unwrap();
    }
    attention::cuda::merge(
        gpu,
        &whole,
        gout.view_mut(),
        glse.view_mut(),
        part_out.view(),
        part_lse.view(),
    )
    .unwrap();
    let (mut out_, mut lse) = (vec![0.0; whole.out_elements()], vec![0.0; whole.lse_elements()]);
    attention::reference::forward(&cpu, &whole, &q, &k, &v, &mut out_, &mut lse);
    close_by_norm("merged", S::STORAGE, &down(gpu, &gout), &out_);
    close("lse", Storage::F32, &down(gpu, &glse), &lse);
}

/// How many shapes [`fused_attention`] has.
pub const FUSED_SHAPES: usize = 4;

/// Every kernel that there is for a shape, those of a library that fuses graphs among them, and each backward pass on what
/// each forward pass left.
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

/// One forward kernel, and all backward kernels behind it.
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
    // The backward pass is of the output as it is stored.
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
