//! Sequence by sequence, blocks of rows on threads. Exponentials, one for each head, are computed
//! in f64.

use super::Sinks;
use crate::simd::block_rows;
use crate::{Cpu, Real};

/// Corrects `out` and computes `new`. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length.
pub fn apply<T: Real>(cpu: &Cpu, of: &Sinks, sinks: &[T], lse: &[T], new: &mut [T], out: &mut [T]) {
    of.check(sinks.len(), lse.len(), new.len(), out.len());
    let rows = block_rows(of.width);
    cpu.each(out.chunks_mut(rows * of.width).enumerate(), |(block, out)| {
        for (n, out) in out.chunks_exact_mut(of.width).enumerate() {
            let row = block * rows + n;
            let sink = sinks[row % of.heads].to_f64();
            let share = 1.0 / (1.0 + (sink - lse[of.statistic(row)].to_f64()).exp());
            out.iter_mut().for_each(|out| *out *= T::from_f64(share));
        }
    });
    let queries = of.queries.max(1);
    cpu.each(lse.chunks(queries).zip(new.chunks_mut(queries)).enumerate(), |(n, (lse, new))| {
        let sink = sinks[n % of.heads].to_f64();
        for (lse, new) in lse.iter().zip(new) {
            let lse = lse.to_f64();
            let (least, most) = (sink.min(lse), sink.max(lse));
            *new = T::from_f64(most + (least - most).exp().ln_1p());
        }
    });
}

/// Turns each row's product of `dout` and `out` into its part of the gradient. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length.
pub fn gradient<T: Real>(cpu: &Cpu, of: &Sinks, sinks: &[T], new: &[T], by_row: &mut [T]) {
    of.check_gradient(sinks.len(), new.len(), by_row.len());
    let rows = block_rows(1);
    cpu.each(by_row.chunks_mut(rows).enumerate(), |(block, by_row)| {
        for (n, by_row) in by_row.iter_mut().enumerate() {
            let row = block * rows + n;
            let sink = sinks[row % of.heads].to_f64();
            *by_row = -T::from_f64((sink - new[of.statistic(row)].to_f64()).exp()) * *by_row;
        }
    });
}
