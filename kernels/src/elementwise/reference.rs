//! Element by element, in f64.

use super::check_rows;
use crate::{Cpu, Real};

/// `y = a + b`.
///
/// # Panics
/// If the slices differ in length.
pub fn add<T: Real>(_cpu: &Cpu, a: &[T], b: &[T], y: &mut [T]) {
    crate::check::length("b", b.len(), a.len());
    crate::check::length("y", y.len(), a.len());
    for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
        *y = T::from_f64(a.to_f64() + b.to_f64());
    }
}

/// `y += factor x`.
///
/// # Panics
/// If the slices differ in length.
pub fn axpy<T: Real>(_cpu: &Cpu, factor: T, x: &[T], y: &mut [T]) {
    crate::check::length("y", y.len(), x.len());
    for (y, x) in y.iter_mut().zip(x) {
        *y = T::from_f64(factor.to_f64() * x.to_f64() + y.to_f64());
    }
}

/// `x *= factor`.
pub fn scale<T: Real>(_cpu: &Cpu, factor: T, x: &mut [T]) {
    for x in x {
        *x = T::from_f64(factor.to_f64() * x.to_f64());
    }
}

/// `x /= by`.
///
/// # Panics
/// If the slices differ in length.
pub fn divide<T: Real>(_cpu: &Cpu, by: &[T], x: &mut [T]) {
    crate::check::length("by", by.len(), x.len());
    for (x, by) in x.iter_mut().zip(by) {
        *x = T::from_f64(x.to_f64() / by.to_f64());
    }
}

/// `x[rows, columns] += bias[columns]`, for as many rows as `x` has.
///
/// # Panics
/// If the length of `x` is not a multiple of the length of `bias`.
pub fn add_bias<T: Real>(_cpu: &Cpu, bias: &[T], x: &mut [T]) {
    check_rows("x", x.len(), bias.len());
    for row in x.chunks_exact_mut(bias.len().max(1)) {
        for (x, b) in row.iter_mut().zip(bias) {
            *x = T::from_f64(x.to_f64() + b.to_f64());
        }
    }
}

/// `dbias[columns] += sum over rows of dy[rows, columns]`.
///
/// # Panics
/// If the length of `dy` is not a multiple of the length of `dbias`.
pub fn bias_gradient<T: Real>(_cpu: &Cpu, dy: &[T], dbias: &mut [T]) {
    check_rows("dy", dy.len(), dbias.len());
    let columns = dbias.len();
    for (column, dbias) in dbias.iter_mut().enumerate() {
        let sum: f64 = dy.iter().skip(column).step_by(columns).map(|dy| dy.to_f64()).sum();
        *dbias = T::from_f64(dbias.to_f64() + sum);
    }
}

/// `sum of x`, in f64.
#[must_use]
pub fn sum<T: Real>(_cpu: &Cpu, x: &[T]) -> f64 {
    x.iter().map(|x| x.to_f64()).sum()
}

/// `sum of x^2`, in f64.
#[must_use]
pub fn sum_of_squares<T: Real>(_cpu: &Cpu, x: &[T]) -> f64 {
    x.iter().map(|x| x.to_f64() * x.to_f64()).sum()
}
