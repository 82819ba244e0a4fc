//! Vectorised within rows, with blocks of rows on threads.

use super::LayerNorm;
use crate::simd::{self, block_rows, vectorized};
use crate::{Cpu, Output, Real, columns};

/// Computes `y`, `mean` and `inverse_std` from `x`. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length.
#[allow(clippy::too_many_arguments)] // tensors and their sizes, as the contract has them
pub fn forward<T: Real>(
    cpu: &Cpu,
    norm: &LayerNorm,
    x: &[T],
    w: &[T],
    bias: &[T],
    y: &mut [T],
    mean: &mut [T],
    inverse_std: &mut [T],
) {
    let weights = [("w", w.len()), ("bias", bias.len())];
    norm.check(&[("x", x.len()), ("y", y.len())], &weights, [mean.len(), inverse_std.len()]);
    let rows = block_rows(norm.columns);
    let size = rows * norm.columns;
    let statistics = mean.chunks_mut(rows).zip(inverse_std.chunks_mut(rows));
    let blocks = x.chunks(size).zip(y.chunks_mut(size)).zip(statistics);
    cpu.each(blocks, |((x, y), (mean, inverse_std))| {
        forward_rows(cpu.arch(), x, w, bias, y, mean, inverse_std, norm.eps);
    });
}

vectorized! {
    #[allow(clippy::cast_precision_loss)]
    fn forward_rows<T: Real>(
        x: &'a [T], w: &'a [T], bias: &'a [T], y: &'a mut [T], mean: &'a mut [T], inverse_std: &'a mut [T], eps: f64,
    ) {
        let columns = w.len();
        let rows = x.chunks_exact(columns).zip(y.chunks_exact_mut(columns));
        for ((x, y), (mean, inverse_std)) in rows.zip(mean.iter_mut().zip(inverse_std)) {
            let m = T::from_f64(simd::sum(x, |x| x).to_f64() / columns as f64);
            let variance = simd::sum(x, |x| (x - m) * (x - m)).to_f64() / columns as f64;
            let r = T::from_f64(1.0 / (variance + eps).sqrt());
            (*mean, *inverse_std) = (m, r);
            for (((y, &x), &w), &bias) in y.iter_mut().zip(x).zip(w).zip(bias) {
                *y = ((x - m) * r).fma(w, bias);
            }
        }
    }
}

/// Computes `dx` from `dy`. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length.
#[allow(clippy::too_many_arguments)] // tensors and their sizes, as the contract has them
pub fn backward_input<T: Real>(
    cpu: &Cpu,
    norm: &LayerNorm,
    x: &[T],
    w: &[T],
    mean: &[T],
    inverse_std: &[T],
    dy: &[T],
    dx: &mut [T],
    output: Output,
) {
    let tensors = [("x", x.len()), ("dy", dy.len()), ("dx", dx.len())];
    norm.check(&tensors, &[("w", w.len())], [mean.len(), inverse_std.len()]);
    let rows = block_rows(norm.columns);
    let size = rows * norm.columns;
    let blocks = x.chunks(size).zip(dy.chunks(size)).zip(dx.chunks_mut(size));
    let statistics = mean.chunks(rows).zip(inverse_std.chunks(rows));
    cpu.each(blocks.zip(statistics), |(((x, dy), dx), (mean, inverse_std))| {
        backward_rows(cpu.arch(), x, w, mean, inverse_std, dy, dx, output);
    });
}

vectorized! {
    #[allow(clippy::cast_precision_loss)]
    fn backward_rows<T: Real>(
        x: &'a [T], w: &'a [T], mean: &'a [T], inverse_std: &'a [T], dy: &'a [T], dx: &'a mut [T], output: Output,
    ) {
        let columns = w.len();
        let rows = x.chunks_exact(columns).zip(dy.chunks_exact(columns)).zip(dx.chunks_exact_mut(columns));
        for (((x, dy), dx), (&m, &r)) in rows.zip(mean.iter().zip(inverse_std)) {
            let sum_g = simd::dot(dy, w);
            let sum_gn = simd::sum3(dy, w, x, |dy, w, x, sum| (dy * w).fma((x - m) * r, sum));
            let mean_g = T::from_f64(sum_g.to_f64() / columns as f64);
            let mean_gn = T::from_f64(sum_gn.to_f64() / columns as f64);
            let terms = dx.iter_mut().zip(dy).zip(w).zip(x);
            match output {
                Output::Overwrite => {
                    for (((dx, &dy), &w), &x) in terms {
                        *dx = r * (dy * w - mean_g - (x - m) * r * mean_gn);
                    }
                }
                Output::Accumulate => {
                    for (((dx, &dy), &w), &x) in terms {
                        *dx += r * (dy * w - mean_g - (x - m) * r * mean_gn);
                    }
                }
            }
        }
    }
}

/// Adds the gradients to `dw` and `dbias`. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length.
#[allow(clippy::too_many_arguments)] // tensors and their sizes, as the contract has them
pub fn backward_weight<T: Real>(
    cpu: &Cpu,
    norm: &LayerNorm,
    x: &[T],
    mean: &[T],
    inverse_std: &[T],
    dy: &[T],
    dw: &mut [T],
    dbias: &mut [T],
) {
    let weights = [("dw", dw.len()), ("dbias", dbias.len())];
    norm.check(&[("x", x.len()), ("dy", dy.len())], &weights, [mean.len(), inverse_std.len()]);
    let width = norm.columns;
    columns::add_sums(cpu, norm.rows, dw, |rows, sums| {
        let at = rows.start * width..rows.end * width;
        let (mean, inverse_std) = (&mean[rows.clone()], &inverse_std[rows]);
        weight_rows(cpu.arch(), &x[at.clone()], mean, inverse_std, &dy[at], sums);
    });
    crate::elementwise::bias_gradient(cpu, dy, dbias);
}

vectorized! {
    fn weight_rows<T: Real>(x: &'a [T], mean: &'a [T], inverse_std: &'a [T], dy: &'a [T], sums: &'a mut [T]) {
        let columns = sums.len();
        let rows = x.chunks_exact(columns).zip(dy.chunks_exact(columns));
        for ((x, dy), (&m, &r)) in rows.zip(mean.iter().zip(inverse_std)) {
            for ((sum, &x), &dy) in sums.iter_mut().zip(x).zip(dy) {
                *sum = ((x - m) * r).fma(dy, *sum);
            }
        }
    }
}
