//! Row by row, in f64.

use super::{IGNORED, Logits};
use crate::{Cpu, Real};

/// The largest (capped) logit of each row: `max[rows]`; minus infinity if a shard holds only
/// padding.
///
/// # Panics
/// If a slice has the wrong length.
pub fn local_max<T: Real>(_cpu: &Cpu, shape: &Logits, logits: &[T], max: &mut [T]) {
    shape.check(logits.len(), &[("max", max.len())]);
    for (row, max) in max.iter_mut().enumerate() {
        let values = real(shape, logits, row).map(|z| cap(shape, z).0);
        *max = T::from_f64(values.fold(f64::NEG_INFINITY, f64::max));
    }
}

/// `sum_exp[rows] = sum_j exp(z_j - max)`, and `target_logit[rows]`: `z_target` if this shard has
/// it, otherwise 0.
///
/// # Panics
/// If a slice has the wrong length.
pub fn local_sum_exp<T: Real>(
    _cpu: &Cpu,
    shape: &Logits,
    logits: &[T],
    targets: &[i64],
    max: &[T],
    sum_exp: &mut [T],
    target_logit: &mut [T],
) {
    let per_row = [("targets", targets.len()), ("max", max.len()), ("sum_exp", sum_exp.len())];
    shape.check(logits.len(), &per_row);
    shape.check(logits.len(), &[("target_logit", target_logit.len())]);
    for row in 0..shape.rows {
        let exp = |z: f64| (cap(shape, z).0 - max[row].to_f64()).exp();
        sum_exp[row] = T::from_f64(real(shape, logits, row).map(exp).sum());
        let target = shape.column(targets[row]);
        target_logit[row] = target.map_or(T::ZERO, |column| {
            T::from_f64(cap(shape, logits[row * shape.columns + column].to_f64()).0)
        });
    }
}

/// `sum_exp *= exp(local_max - max)`: converts sums relative to a shard's own maximum to sums
/// relative to the global one.
///
/// # Panics
/// If the slices differ in length.
pub fn rescale_sum_exp<T: Real>(_cpu: &Cpu, local_max: &[T], max: &[T], sum_exp: &mut [T]) {
    crate::check::length("max", max.len(), local_max.len());
    crate::check::length("sum_exp", sum_exp.len(), local_max.len());
    for ((sum, local), max) in sum_exp.iter_mut().zip(local_max).zip(max) {
        let factor =
            if *local == T::NEG_INFINITY { 0.0 } else { (local.to_f64() - max.to_f64()).exp() };
        *sum = T::from_f64(sum.to_f64() * factor);
    }
}

/// `loss[rows] = ln(sum_exp) + max - target_logit`, 0 where the target is ignored.
///
/// # Panics
/// If the slices differ in length.
pub fn loss<T: Real>(
    _cpu: &Cpu,
    targets: &[i64],
    max: &[T],
    sum_exp: &[T],
    target_logit: &[T],
    loss: &mut [T],
) {
    let rows = targets.len();
    crate::check::length("max", max.len(), rows);
    crate::check::length("sum_exp", sum_exp.len(), rows);
    crate::check::length("target_logit", target_logit.len(), rows);
    crate::check::length("loss", loss.len(), rows);
    for row in 0..rows {
        let value = sum_exp[row].to_f64().ln() + (max[row].to_f64() - target_logit[row].to_f64());
        loss[row] = if targets[row] == IGNORED { T::ZERO } else { T::from_f64(value) };
    }
}

/// Replaces the logits by `scale` times the gradient of each row's loss with respect to them.
///
/// # Panics
/// If a slice has the wrong length.
pub fn gradient_in_place<T: Real>(
    _cpu: &Cpu,
    shape: &Logits,
    logits: &mut [T],
    targets: &[i64],
    max: &[T],
    sum_exp: &[T],
    scale: f64,
) {
    let per_row = [("targets", targets.len()), ("max", max.len()), ("sum_exp", sum_exp.len())];
    shape.check(logits.len(), &per_row);
    for row in 0..shape.rows {
        let target = shape.column(targets[row]);
        for column in 0..shape.columns {
            let place = &mut logits[row * shape.columns + column];
            if targets[row] == IGNORED || column >= shape.real_columns {
                *place = T::ZERO;
                continue;
            }
            let (z, slope) = cap(shape, place.to_f64());
            let p = (z - max[row].to_f64()).exp() / sum_exp[row].to_f64();
            let hit = if target == Some(column) { 1.0 } else { 0.0 };
            *place = T::from_f64(scale * (p - hit) * slope);
        }
    }
}

/// Multiplies `rows[rows, columns]` by the derivative of each row's capped target logit with
/// respect to the logit.
///
/// # Panics
/// If a slice has the wrong length.
pub fn scale_by_slope<T: Real>(
    _cpu: &Cpu,
    soft_cap: Option<f64>,
    target_logit: &[T],
    rows: &mut [T],
) {
    let columns = super::columns_of("rows", rows.len(), target_logit.len());
    for (at, x) in rows.iter_mut().enumerate() {
        *x = T::from_f64(x.to_f64() * slope(soft_cap, target_logit[at / columns].to_f64()));
    }
}

/// Turns a shard's softmax relative to its own maximum into the gradient of its logits.
///
/// # Panics
/// If a slice has the wrong length.
pub fn softmax_to_gradient<T: Real>(
    _cpu: &Cpu,
    shape: &Logits,
    softmax: &mut [T],
    targets: &[i64],
    factor: &[T],
    target_logit: &[T],
    scale: f64,
) {
    let per_row = [
        ("targets", targets.len()),
        ("factor", factor.len()),
        ("target_logit", target_logit.len()),
    ];
    shape.check(softmax.len(), &per_row);
    for (at, p) in softmax.iter_mut().enumerate() {
        let (row, column) = (at / shape.columns, at % shape.columns);
        let own = match shape.column(targets[row]) {
            Some(hit) if hit == column => slope(shape.soft_cap, target_logit[row].to_f64()),
            _ => 0.0,
        };
        *p = T::from_f64(scale * (factor[row].to_f64() * p.to_f64() - own));
    }
}

/// `weighted = scale (factor weighted - hits)`, row by row.
///
/// # Panics
/// If a slice has the wrong length.
pub fn join_gradient<T: Real>(
    _cpu: &Cpu,
    weighted: &mut [T],
    hits: &[T],
    factor: &[T],
    scale: f64,
) {
    let columns = super::columns_of("weighted", weighted.len(), factor.len());
    crate::check::length("hits", hits.len(), weighted.len());
    for (at, own) in weighted.iter_mut().enumerate() {
        let factor = factor[at / columns].to_f64();
        *own = T::from_f64(scale * (factor * own.to_f64() - hits[at].to_f64()));
    }
}

/// The derivative of the capped logit `z` with respect to the logit.
fn slope(soft_cap: Option<f64>, z: f64) -> f64 {
    soft_cap.map_or(1.0, |cap| 1.0 - (z / cap).powi(2))
}

fn real<T: Real>(shape: &Logits, logits: &[T], row: usize) -> impl Iterator<Item = f64> {
    let start = row * shape.columns;
    logits[start..start + shape.real_columns].iter().map(|z| z.to_f64())
}

/// The capped logit and its derivative.
fn cap(shape: &Logits, z: f64) -> (f64, f64) {
    match shape.soft_cap {
        None => (z, 1.0),
        Some(cap) => (cap * (z / cap).tanh(), 1.0 - (z / cap).tanh().powi(2)),
    }
}
