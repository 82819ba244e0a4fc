//! Element by element, in f64.

use super::Sinks;
use crate::{Cpu, Real};

/// Corrects `out` and computes `new`. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length.
pub fn apply<T: Real>(
    _cpu: &Cpu,
    of: &Sinks,
    sinks: &[T],
    lse: &[T],
    new: &mut [T],
    out: &mut [T],
) {
    of.check(sinks.len(), lse.len(), new.len(), out.len());
    for row in 0..of.rows() {
        let at = of.statistic(row);
        let (sink, lse) = (sinks[row % of.heads].to_f64(), lse[at].to_f64());
        new[at] = T::from_f64((lse.exp() + sink.exp()).ln());
        let share = 1.0 / (1.0 + (sink - lse).exp());
        for out in &mut out[row * of.width..(row + 1) * of.width] {
            *out = T::from_f64(out.to_f64() * share);
        }
    }
}

/// Turns each row's product of `dout` and `out` into its part of the gradient. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length.
pub fn gradient<T: Real>(_cpu: &Cpu, of: &Sinks, sinks: &[T], new: &[T], by_row: &mut [T]) {
    of.check_gradient(sinks.len(), new.len(), by_row.len());
    for (row, by_row) in by_row.iter_mut().enumerate() {
        let share = (sinks[row % of.heads].to_f64() - new[of.statistic(row)].to_f64()).exp();
        *by_row = T::from_f64(-share * by_row.to_f64());
    }
}
