//! Vectorised within rows, with blocks of rows on threads.

use super::{IGNORED, Logits};
use crate::simd::{self, block_rows, vectorized};
use crate::{Cpu, Real};

pub use super::reference::loss;

/// Number of exponentials that are summed in the element type before they are added in f64.
const SUM: usize = 2048;

/// The largest (capped) logit of each row: `max[rows]`; minus infinity if a shard holds only
/// padding.
///
/// # Panics
/// If a slice has the wrong length.
pub fn local_max<T: Real>(cpu: &Cpu, shape: &Logits, logits: &[T], max: &mut [T]) {
    shape.check(logits.len(), &[("max", max.len())]);
    let rows = block_rows(shape.columns);
    let blocks = logits.chunks((rows * shape.columns).max(1)).zip(max.chunks_mut(rows));
    if shape.columns == 0 {
        max.fill(T::NEG_INFINITY);
        return;
    }
    cpu.each(blocks, |(logits, max)| max_rows(cpu.arch(), *shape, logits, max));
}

vectorized! {
    fn max_rows<T: Real>(shape: Logits, logits: &'a [T], max: &'a mut [T]) {
        for (row, max) in logits.chunks_exact(shape.columns).zip(max) {
            let largest = simd::max(&row[..shape.real_columns]);
            let any = largest > T::NEG_INFINITY;
            *max = if any { Cap::new(&shape).of(largest) } else { largest };
        }
    }
}

/// `sum_exp[rows] = sum_j exp(z_j - max)`, and `target_logit[rows]`: `z_target` if this shard has
/// it, otherwise 0.
///
/// # Panics
/// If a slice has the wrong length.
pub fn local_sum_exp<T: Real>(
    cpu: &Cpu,
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
    if shape.columns == 0 {
        sum_exp.fill(T::ZERO);
        target_logit.fill(T::ZERO);
        return;
    }
    let rows = block_rows(shape.columns);
    let read = logits.chunks(rows * shape.columns).zip(targets.chunks(rows)).zip(max.chunks(rows));
    let written = sum_exp.chunks_mut(rows).zip(target_logit.chunks_mut(rows));
    cpu.each(read.zip(written), |(((logits, targets), max), (sum_exp, target_logit))| {
        sum_rows(cpu.arch(), *shape, logits, targets, max, sum_exp, target_logit);
    });
}

vectorized! {
    fn sum_rows<T: Real>(
        shape: Logits, logits: &'a [T], targets: &'a [i64], max: &'a [T],
        sum_exp: &'a mut [T], target_logit: &'a mut [T],
    ) {
        let cap = Cap::new(&shape);
        let read = logits.chunks_exact(shape.columns).zip(targets).zip(max);
        for (((row, &target), &max), (sum_exp, target_logit)) in read.zip(sum_exp.iter_mut().zip(target_logit)) {
            let row = &row[..shape.real_columns];
            let mut total = 0.0;
            match shape.soft_cap {
                None => {
                    for part in row.chunks(SUM) {
                        total += simd::sum(part, |z| (z - max).vexp()).to_f64();
                    }
                }
                Some(_) => {
                    for part in row.chunks(SUM) {
                        total += simd::sum(part, |z| (cap.of(z) - max).vexp()).to_f64();
                    }
                }
            }
            *sum_exp = T::from_f64(total);
            *target_logit = shape.column(target).map_or(T::ZERO, |column| cap.of(row[column]));
        }
    }
}

/// `sum_exp *= exp(local_max - max)`: converts sums relative to a shard's own maximum to sums
/// relative to the global one.
///
/// # Panics
/// If the slices differ in length.
pub fn rescale_sum_exp<T: Real>(cpu: &Cpu, local_max: &[T], max: &[T], sum_exp: &mut [T]) {
    crate::check::length("max", max.len(), local_max.len());
    crate::check::length("sum_exp", sum_exp.len(), local_max.len());
    rescale(cpu.arch(), local_max, max, sum_exp);
}

vectorized! {
    fn rescale<T: Real>(local_max: &'a [T], max: &'a [T], sum_exp: &'a mut [T]) {
        for ((sum, &local), &max) in sum_exp.iter_mut().zip(local_max).zip(max) {
            let factor = (local - max).vexp();
            *sum *= if local > T::NEG_INFINITY { factor } else { T::ZERO };
        }
    }
}

/// Replaces the logits by `scale` times the gradient of each row's loss with respect to them.
///
/// # Panics
/// If a slice has the wrong length.
pub fn gradient_in_place<T: Real>(
    cpu: &Cpu,
    shape: &Logits,
    logits: &mut [T],
    targets: &[i64],
    max: &[T],
    sum_exp: &[T],
    scale: f64,
) {
    let per_row = [("targets", targets.len()), ("max", max.len()), ("sum_exp", sum_exp.len())];
    shape.check(logits.len(), &per_row);
    if shape.columns == 0 {
        return;
    }
    let rows = block_rows(shape.columns);
    let statistics = max.chunks(rows).zip(sum_exp.chunks(rows));
    let blocks = logits.chunks_mut(rows * shape.columns).zip(targets.chunks(rows)).zip(statistics);
    cpu.each(blocks, |((logits, targets), (max, sum_exp))| {
        gradient_rows(cpu.arch(), *shape, logits, targets, max, sum_exp, T::from_f64(scale));
    });
}

vectorized! {
    fn gradient_rows<T: Real>(
        shape: Logits, logits: &'a mut [T], targets: &'a [i64], max: &'a [T], sum_exp: &'a [T], scale: T,
    ) {
        let cap = Cap::new(&shape);
        let rows = logits.chunks_exact_mut(shape.columns).zip(targets);
        for ((row, &target), (&max, &sum_exp)) in rows.zip(max.iter().zip(sum_exp)) {
            if target == IGNORED {
                row.fill(T::ZERO);
                continue;
            }
            let (real, padding) = row.split_at_mut(shape.real_columns);
            padding.fill(T::ZERO);
            let factor = scale / sum_exp;
            let slope = shape.column(target).map(|column| cap.slope(real[column]));
            match shape.soft_cap {
                None => real.iter_mut().for_each(|z| *z = factor * (*z - max).vexp()),
                Some(_) => real.iter_mut().for_each(|z| {
                    *z = factor * (cap.of(*z) - max).vexp() * cap.slope(*z);
                }),
            }
            if let (Some(column), Some(slope)) = (shape.column(target), slope) {
                real[column] += -(scale * slope);
            }
        }
    }
}

/// Multiplies `rows[rows, columns]` by the derivative of each row's capped target logit `z` with
/// respect to the logit, `1 - (z / cap)^2`. Without a cap nothing changes.
///
/// # Panics
/// If a slice has the wrong length; the same holds for the functions below.
pub fn scale_by_slope<T: Real>(
    cpu: &Cpu,
    soft_cap: Option<f64>,
    target_logit: &[T],
    rows: &mut [T],
) {
    let columns = super::columns_of("rows", rows.len(), target_logit.len());
    if soft_cap.is_none() || columns == 0 {
        return;
    }
    let each = block_rows(columns);
    let blocks = rows.chunks_mut(each * columns).zip(target_logit.chunks(each));
    cpu.each(blocks, |(rows, target_logit)| {
        for (row, &z) in rows.chunks_exact_mut(columns).zip(target_logit) {
            let slope = slope_at(soft_cap, z);
            row.iter_mut().for_each(|x| *x *= slope);
        }
    });
}

/// Turns a shard's softmax relative to its own maximum into the gradient of its logits: each row
/// times `scale factor`, minus `scale` times the slope at the target if it is on this shard.
///
/// # Panics
/// As above.
pub fn softmax_to_gradient<T: Real>(
    cpu: &Cpu,
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
    if shape.columns == 0 {
        return;
    }
    let (each, scale) = (block_rows(shape.columns), T::from_f64(scale));
    let per_row = targets.chunks(each).zip(factor.chunks(each)).zip(target_logit.chunks(each));
    let blocks = softmax.chunks_mut(each * shape.columns).zip(per_row);
    cpu.each(blocks, |(softmax, ((targets, factor), target_logit))| {
        let rows = softmax.chunks_exact_mut(shape.columns).zip(targets);
        for ((row, &target), (&factor, &z)) in rows.zip(factor.iter().zip(target_logit)) {
            let by = scale * factor;
            row.iter_mut().for_each(|column| *column *= by);
            if let Some(column) = shape.column(target) {
                row[column] += -(scale * slope_at(shape.soft_cap, z));
            }
        }
    });
}

/// `weighted = scale (factor weighted - hits)`, row by row: a shard's part of the input gradient.
///
/// # Panics
/// As above.
pub fn join_gradient<T: Real>(cpu: &Cpu, weighted: &mut [T], hits: &[T], factor: &[T], scale: f64) {
    let columns = super::columns_of("weighted", weighted.len(), factor.len());
    crate::check::length("hits", hits.len(), weighted.len());
    if columns == 0 {
        return;
    }
    let (each, scale) = (block_rows(columns), T::from_f64(scale));
    let blocks = weighted.chunks_mut(each * columns).zip(hits.chunks(each * columns));
    cpu.each(blocks.zip(factor.chunks(each)), |((weighted, hits), factor)| {
        let rows = weighted.chunks_exact_mut(columns).zip(hits.chunks_exact(columns));
        for ((row, hits), &factor) in rows.zip(factor) {
            row.iter_mut().zip(hits).for_each(|(own, &hit)| *own = scale * (factor * *own - hit));
        }
    });
}

/// The derivative of the capped logit `z` with respect to the logit.
fn slope_at<T: Real>(soft_cap: Option<f64>, z: T) -> T {
    T::from_f64(soft_cap.map_or(1.0, |cap| 1.0 - (z.to_f64() / cap).powi(2)))
}

/// The soft cap in the element type.
#[derive(Clone, Copy)]
struct Cap<T> {
    cap: Option<(T, T)>,
}

impl<T: Real> Cap<T> {
    #[inline(always)]
    fn new(shape: &Logits) -> Self {
        Self { cap: shape.soft_cap.map(|cap| (T::from_f64(cap), T::from_f64(1.0 / cap))) }
    }
    #[inline(always)]
    fn of(self, z: T) -> T {
        self.cap.map_or(z, |(cap, inverse)| cap * (z * inverse).vtanh())
    }
    #[inline(always)]
    fn slope(self, z: T) -> T {
        self.cap.map_or(T::ONE, |(_, inverse)| {
            let t = (z * inverse).vtanh();
            T::ONE - t * t
        })
    }
}
