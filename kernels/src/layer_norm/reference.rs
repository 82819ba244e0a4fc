//! Row by row, in f64.

use super::LayerNorm;
use crate::{Cpu, Output, Real};

/// Computes `y`, `mean` and `inverse_std` from `x`. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length.
#[allow(clippy::cast_precision_loss, clippy::too_many_arguments)]
pub fn forward<T: Real>(
    _cpu: &Cpu,
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
    let columns = norm.columns as f64;
    for row in 0..norm.rows {
        let start = row * norm.columns;
        let x = &x[start..start + norm.columns];
        let m = x.iter().map(|x| x.to_f64()).sum::<f64>() / columns;
        let variance = x.iter().map(|x| (x.to_f64() - m).powi(2)).sum::<f64>() / columns;
        let r = 1.0 / (variance + norm.eps).sqrt();
        (mean[row], inverse_std[row]) = (T::from_f64(m), T::from_f64(r));
        for (column, x) in x.iter().enumerate() {
            let n = (x.to_f64() - m) * r;
            y[start + column] = T::from_f64(n * w[column].to_f64() + bias[column].to_f64());
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
    let columns = norm.columns as f64;
    for row in 0..norm.rows {
        let (m, r) = (mean[row].to_f64(), inverse_std[row].to_f64());
        let at = |column: usize| row * norm.columns + column;
        let n = |column: usize| (x[at(column)].to_f64() - m) * r;
        let g = |column: usize| dy[at(column)].to_f64() * w[column].to_f64();
        let mean_g = (0..norm.columns).map(g).sum::<f64>() / columns;
        let mean_gn = (0..norm.columns).map(|c| g(c) * n(c)).sum::<f64>() / columns;
        for c in 0..norm.columns {
            output.put(&mut dx[at(c)], T::from_f64(r * (g(c) - mean_g - n(c) * mean_gn)));
        }
    }
}

/// Adds the gradients to `dw` and `dbias`. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length.
#[allow(clippy::too_many_arguments)] // tensors and their sizes, as the contract has them
pub fn backward_weight<T: Real>(
    _cpu: &Cpu,
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
    for column in 0..norm.columns {
        let dy = |row: usize| dy[row * norm.columns + column].to_f64();
        let n = |row: usize| {
            (x[row * norm.columns + column].to_f64() - mean[row].to_f64())
                * inverse_std[row].to_f64()
        };
        let w: f64 = (0..norm.rows).map(|row| dy(row) * n(row)).sum();
        let bias: f64 = (0..norm.rows).map(dy).sum();
        dw[column] = T::from_f64(dw[column].to_f64() + w);
        dbias[column] = T::from_f64(dbias[column].to_f64() + bias);
    }
}
