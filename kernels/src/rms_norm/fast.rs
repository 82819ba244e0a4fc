//! Vectorised within rows, with blocks of rows on threads.

use super::RmsNorm;
use crate::simd::{self, block_rows, vectorized};
use crate::{Cpu, Output, Real, columns};

/// Computes `y` and `inverse_rms` from `x`. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length.
pub fn forward<T: Real>(
    cpu: &Cpu,
    norm: &RmsNorm,
    x: &[T],
    w: &[T],
    y: &mut [T],
    inverse_rms: &mut [T],
) {
    norm.check(&[("x", x.len()), ("y", y.len())], w.len(), inverse_rms.len());
    let rows = block_rows(norm.columns);
    let size = rows * norm.columns;
    let blocks = x.chunks(size).zip(y.chunks_mut(size)).zip(inverse_rms.chunks_mut(rows));
    cpu.each(blocks, |((x, y), inverse_rms)| {
        forward_rows(cpu.arch(), x, w, y, inverse_rms, norm.eps, T::from_f64(norm.offset()));
    });
}

vectorized! {
    #[allow(clippy::cast_precision_loss)]
    fn forward_rows<T: Real>(x: &'a [T], w: &'a [T], y: &'a mut [T], inverse_rms: &'a mut [T], eps: f64, offset: T) {
        let columns = w.len();
        let rows = x.chunks_exact(columns).zip(y.chunks_exact_mut(columns)).zip(inverse_rms);
        for ((x, y), inverse_rms) in rows {
            let mean = simd::dot(x, x).to_f64() / columns as f64;
            let r = T::from_f64(1.0 / (mean + eps).sqrt());
            *inverse_rms = r;
            for ((y, &x), &w) in y.iter_mut().zip(x).zip(w) {
                *y = x * r * (w + offset);
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
    norm: &RmsNorm,
    x: &[T],
    w: &[T],
    inverse_rms: &[T],
    dy: &[T],
    dx: &mut [T],
    output: Output,
) {
    let tensors = [("x", x.len()), ("dy", dy.len()), ("dx", dx.len())];
    norm.check(&tensors, w.len(), inverse_rms.len());
    let rows = block_rows(norm.columns);
    let size = rows * norm.columns;
    let blocks = x.chunks(size).zip(dy.chunks(size)).zip(dx.chunks_mut(size));
    cpu.each(blocks.zip(inverse_rms.chunks(rows)), |(((x, dy), dx), inverse_rms)| {
        let offset = T::from_f64(norm.offset());
        backward_rows(cpu.arch(), x, w, inverse_rms, dy, dx, offset, output);
    });
}

vectorized! {
    #[allow(clippy::cast_precision_loss)]
    fn backward_rows<T: Real>(
        x: &'a [T], w: &'a [T], inverse_rms: &'a [T], dy: &'a [T], dx: &'a mut [T], offset: T, output: Output,
    ) {
        let columns = w.len();
        let rows = x.chunks_exact(columns).zip(dy.chunks_exact(columns)).zip(dx.chunks_exact_mut(columns));
        for (((x, dy), dx), &r) in rows.zip(inverse_rms) {
            let sum = simd::sum3(dy, w, x, |dy, w, x, sum| (dy * (w + offset)).fma(x, sum));
            let pull = T::from_f64(sum.to_f64() / columns as f64) * r * r;
            let terms = dx.iter_mut().zip(dy).zip(w).zip(x);
            match output {
                Output::Overwrite => {
                    for (((dx, &dy), &w), &x) in terms {
                        *dx = r * (dy * (w + offset) - x * pull);
                    }
                }
                Output::Accumulate => {
                    for (((dx, &dy), &w), &x) in terms {
                        *dx += r * (dy * (w + offset) - x * pull);
                    }
                }
            }
        }
    }
}

/// Adds the gradient to `dw`. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length.
pub fn backward_weight<T: Real>(
    cpu: &Cpu,
    norm: &RmsNorm,
    x: &[T],
    inverse_rms: &[T],
    dy: &[T],
    dw: &mut [T],
) {
    norm.check(&[("x", x.len()), ("dy", dy.len())], dw.len(), inverse_rms.len());
    let width = norm.columns;
    columns::add_sums(cpu, norm.rows, dw, |rows, sums| {
        let at = rows.start * width..rows.end * width;
        weight_rows(cpu.arch(), &x[at.clone()], &inverse_rms[rows], &dy[at], sums);
    });
}

vectorized! {
    fn weight_rows<T: Real>(x: &'a [T], inverse_rms: &'a [T], dy: &'a [T], sums: &'a mut [T]) {
        let columns = sums.len();
        for ((x, dy), &r) in x.chunks_exact(columns).zip(dy.chunks_exact(columns)).zip(inverse_rms) {
            for ((sum, &x), &dy) in sums.iter_mut().zip(x).zip(dy) {
                *sum = (dy * x).fma(r, *sum);
            }
        }
    }
}
