//! Row by row on threads.

use super::columns;
use crate::simd::vectorized;
use crate::{Cpu, Real};

/// `y_ij = w_i x_ij`
///
/// # Panics
/// If `x` has not one row for each weight, or `y` has another length.
pub fn scale<T: Real>(cpu: &Cpu, w: &[T], x: &[T], y: &mut [T]) {
    let columns = columns(x.len(), w.len());
    crate::check::length("y", y.len(), x.len());
    if columns == 0 {
        return;
    }
    let rows = x.chunks_exact(columns).zip(y.chunks_exact_mut(columns));
    cpu.each(w.iter().zip(rows), |(&w, (x, y))| scale_row(cpu.arch(), w, x, y));
}

vectorized! {
    fn scale_row<T: Real>(w: T, x: &'a [T], y: &'a mut [T]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = w * x;
        }
    }
}

/// `w_i = sum over j of x_ij y_ij`
///
/// # Panics
/// If `x` has not one row for each weight, or `y` has another length.
pub fn dot<T: Real>(cpu: &Cpu, x: &[T], y: &[T], w: &mut [T]) {
    let columns = columns(x.len(), w.len());
    crate::check::length("y", y.len(), x.len());
    if columns == 0 {
        w.fill(T::ZERO);
        return;
    }
    let rows = x.chunks_exact(columns).zip(y.chunks_exact(columns));
    // In f64, so that the order within a row is immaterial.
    cpu.each(w.iter_mut().zip(rows), |(w, (x, y))| {
        *w = T::from_f64(x.iter().zip(y).map(|(x, y)| x.to_f64() * y.to_f64()).sum());
    });
}
