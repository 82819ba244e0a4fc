//! Norms.

use super::{close, close_sums, down, numbers, out, up};
use kernels::cuda::{Gpu, Storage, Stored, bf16};
use kernels::layer_norm::{self, LayerNorm};
use kernels::rms_norm::{self, RmsNorm};
use kernels::{Cpu, Output};

/// Rows and columns: one pack a thread, smaller packs, several packs a thread, packs of one
/// element; and so many rows that sums over them take several at a time.
const SHAPES: [(usize, usize); 5] = [(3, 256), (5, 36), (2, 5000), (300, 33), (18_000, 8)];

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
        // From here on the sum as it is stored.
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
        close_sums("dw", rows, &down(gpu, &gdw), &dw);
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
        close_sums("dw", rows, &down(gpu, &gdw), &dw);
        close_sums("dbias", rows, &down(gpu, &gdbias), &dbias);
    }
}
