//! Row by row, in f64.

use super::RmsNorm;
use crate::{Cpu, Output, Real};

/// Computes `y` and `inverse_rms` from `x`. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length.
#[allow(clippy::cast_precision_loss)]
pub fn forward<T: Real>(
    _cpu: &Cpu,
    norm: &RmsNorm,
    x: &[T],
    w: &[T],
    y: &mut [T],
    inverse_rms: &mut [T],
) {
    norm.check(&[("x", x.len()), ("y", y.len())], w.len(), inverse_rms.len());
    for (row, place) in inverse_rms.iter_mut().enumerate() {
        let at = row * norm.columns..(row + 1) * norm.columns;
        let squares: f64 = x[at.clone()].iter().map(|x| x.to_f64().powi(2)).sum();
        let r = 1.0 / (squares / norm.columns as f64 + norm.eps).sqrt();
        *place = T::from_f64(r);
        for ((y, x), w) in y[at.clone()].iter_mut().zip(&x[at]).zip(w) {
            *y = T::from_f64(x.to_f64() * r * (w.to_f64() + norm.offset()));
        }
    }
}

/// Computes `dx` from `dy`. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length.
#[allow(clippy::cast_precision_loss, clippy::too_many_arguments)]
pub fn backward_input<T: Real>(
    _cpu: &Cpu,
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
    let g = |at: usize| dy[at].to_f64() * (w[at % norm.columns].to_f64() + norm.offset());
    for (row, r) in inverse_rms.iter().map(|r| r.to_f64()).enumerate() {
        let at = row * norm.columns..(row + 1) * norm.columns;
        let mean = at.clone().map(|at| g(at) * x[at].to_f64()).sum::<f64>() / norm.columns as f64;
        for at in at {
            output.put(&mut dx[at], T::from_f64(r * (g(at) - x[at].to_f64() * r * r * mean)));
        }
    }
}

/// Adds the gradient to `dw`. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length.
pub fn backward_weight<T: Real>(
    _cpu: &Cpu,
    norm: &RmsNorm,
    x: &[T],
    inverse_rms: &[T],
    dy: &[T],
    dw: &mut [T],
) {
    norm.check(&[("x", x.len()), ("dy", dy.len())], dw.len(), inverse_rms.len());
    for (column, dw) in dw.iter_mut().enumerate() {
        let term = |row: usize| {
            let at = row * norm.columns + column;
            dy[at].to_f64() * x[at].to_f64() * inverse_rms[row].to_f64()
        };
        *dw = T::from_f64(dw.to_f64() + (0..norm.rows).map(term).sum::<f64>());
    }
}
