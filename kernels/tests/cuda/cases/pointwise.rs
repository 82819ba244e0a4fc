//! Elementwise operations, and operations by rows.

use super::{close, close_sums, down, numbers, out, up};
use kernels::activation::{self, Activation};
use kernels::cuda::{Gpu, Storage, Stored, bf16};
use kernels::dropout::{self, Dropout};
use kernels::latent_heads::LatentHeads;
use kernels::random::{self as draws, GlobalIndices, Stream};
use kernels::sinks::Sinks;
use kernels::{
    Cpu, elementwise as sums, latent_heads as latent, sinks as extra, transpose as swap,
    weighted_rows as weighted,
};

pub fn activations(gpu: &Gpu) {
    in_each_storage!(activations_in(gpu));
}

fn activations_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    // More than one block, and not a whole number of blocks.
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

pub fn elementwise(gpu: &Gpu) {
    in_each_storage!(elementwise_in(gpu));
}

fn elementwise_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    for (rows, columns) in [(600, 64), (5, 33), (36_000, 8)] {
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
        close_sums("dbias", elements / columns, &down(gpu, &gdbias), &dbias);

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
        assert!((found / expected - 1.0).abs() < 1e-12, "{found} {expected}");
        let found = sums::cuda::sum(gpu, ga.view()).unwrap();
        let expected = a.iter().sum::<f64>();
        assert!((found - expected).abs() < 1e-9, "{found} {expected}");
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
        GlobalIndices { offset: 1 << 33 | 3, sizes: [1, 5, 40], strides: [0, 56, 1] },
        GlobalIndices { offset: 9, sizes: [3, 5, 16], strides: [1000, 24, 1] },
        GlobalIndices { offset: 2, sizes: [2, 3, 33], strides: [1, 7, 2] },
        GlobalIndices::contiguous(6, 4200),
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
        GlobalIndices::contiguous(3, 1001),
        GlobalIndices::matrix(5, 30, 7, 11, 103),
        GlobalIndices { offset: (1 << 34) + 1, sizes: [3, 5, 7], strides: [1000, 60, 8] },
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

pub fn weighted_rows(gpu: &Gpu) {
    in_each_storage!(weighted_rows_in(gpu));
}

fn weighted_rows_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    for (rows, columns) in [(5, 64), (3, 33), (1, 4200)] {
        let [x, y] = [1, 2].map(|seed| numbers::<S>(rows * columns, seed));
        let w = numbers::<f32>(rows, 3);
        let [gx, gy] = [&x, &y].map(|tensor| up::<S>(gpu, tensor));
        let (gw, mut scaled) = (up::<f32>(gpu, &w), out::<S>(gpu, x.len()));
        weighted::cuda::scale(gpu, gw.view(), gx.view(), scaled.view_mut()).unwrap();
        let mut expected = vec![0.0; x.len()];
        weighted::reference::scale(&cpu, &w, &x, &mut expected);
        close("scaled", S::STORAGE, &down(gpu, &scaled), &expected);
        let (mut dots, mut expected) = (out::<f32>(gpu, rows), vec![0.0; rows]);
        weighted::cuda::dot(gpu, gx.view(), gy.view(), dots.view_mut()).unwrap();
        weighted::reference::dot(&cpu, &x, &y, &mut expected);
        close("dots", Storage::F32, &down(gpu, &dots), &expected);
    }
}

pub fn latent_heads(gpu: &Gpu) {
    in_each_storage!(latent_heads_in(gpu));
}

fn latent_heads_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    // Packs of 8 elements, of 2, and of 1.
    for (tokens, heads, [content, rotary, value]) in
        [(5, 4, [16, 8, 24]), (70, 3, [6, 2, 4]), (3, 2, [5, 2, 3]), (2, 1, [0, 4, 4])]
    {
        let of = LatentHeads { tokens, heads, content, rotary, value };
        let [up_len, k_len, v_len] =
            [of.up(), of.key(), of.value].map(|width| tokens * heads * width);
        let (up_all, shared) = (numbers::<S>(up_len, 1), numbers::<S>(tokens * rotary, 2));
        let [gup, gshared] = [&up_all, &shared].map(|tensor| up::<S>(gpu, tensor));
        let [mut gk, mut gv] = [k_len, v_len].map(|len| out::<S>(gpu, len));
        let (to_k, to_v) = (gk.view_mut(), gv.view_mut());
        latent::cuda::join(gpu, &of, gup.view(), gshared.view(), to_k, to_v).unwrap();
        let [mut k, mut v] = [k_len, v_len].map(|len| vec![0.0; len]);
        latent::reference::join(&cpu, &of, &up_all, &shared, &mut k, &mut v);
        assert_eq!([down(gpu, &gk), down(gpu, &gv)], [k, v], "{of:?}");
        let (dk, dv) = (numbers::<S>(k_len, 3), numbers::<S>(v_len, 4));
        let [gdk, gdv] = [&dk, &dv].map(|tensor| up::<S>(gpu, tensor));
        let [mut gdup, mut gsums] = [up_len, tokens * rotary].map(|len| out::<S>(gpu, len));
        let (to, sums) = (gdup.view_mut(), gsums.view_mut());
        latent::cuda::split(gpu, &of, gdk.view(), gdv.view(), to, sums).unwrap();
        let [mut dup, mut sums] = [up_len, tokens * rotary].map(|len| vec![0.0; len]);
        latent::reference::split(&cpu, &of, &dk, &dv, &mut dup, &mut sums);
        assert_eq!(down(gpu, &gdup), dup, "{of:?}");
        close("drotary", S::STORAGE, &down(gpu, &gsums), &sums);
    }
}

pub fn sinks(gpu: &Gpu) {
    in_each_storage!(sinks_in(gpu));
}

fn sinks_in<S: Stored>(gpu: &Gpu) {
    let cpu = Cpu::serial();
    for [batch, heads, queries, width] in [[2, 4, 9, 16], [1, 3, 70, 6], [3, 1, 5, 5]] {
        let of = Sinks { batch, heads, queries, width };
        let rows = of.rows();
        let (logits, output) = (numbers::<S>(heads, 1), numbers::<S>(rows * width, 2));
        let lse: Vec<f64> = numbers::<f32>(rows, 3).into_iter().map(|x| 4.0 * x).collect();
        let (glogits, glse) = (up::<S>(gpu, &logits), up::<f32>(gpu, &lse));
        let (mut gout, mut gnew) = (up::<S>(gpu, &output), out::<f32>(gpu, rows));
        let (new, to) = (gnew.view_mut(), gout.view_mut());
        extra::cuda::apply(gpu, &of, glogits.view(), glse.view(), new, to).unwrap();
        let (mut new, mut corrected) = (vec![0.0; rows], output);
        extra::reference::apply(&cpu, &of, &logits, &lse, &mut new, &mut corrected);
        close("out", S::STORAGE, &down(gpu, &gout), &corrected);
        close("new", Storage::F32, &down(gpu, &gnew), &new);
        let mut by_row = numbers::<f32>(rows, 4);
        let mut gby_row = up::<f32>(gpu, &by_row);
        let to = gby_row.view_mut();
        extra::cuda::gradient(gpu, &of, glogits.view(), glse.view(), to).unwrap();
        extra::reference::gradient(&cpu, &of, &logits, &lse, &mut by_row);
        close("by_row", Storage::F32, &down(gpu, &gby_row), &by_row);
    }
}
