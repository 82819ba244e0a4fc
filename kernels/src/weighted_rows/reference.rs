//! As the formulas say, in f64.

use super::columns;
use crate::{Cpu, Real};

/// `y_ij = w_i x_ij`
pub fn scale<T: Real>(_cpu: &Cpu, w: &[T], x: &[T], y: &mut [T]) {
    let columns = columns(x.len(), w.len());
    for (n, y) in y.iter_mut().enumerate() {
        *y = T::from_f64(w[n / columns].to_f64() * x[n].to_f64());
    }
}

/// `w_i = sum over j of x_ij y_ij`
pub fn dot<T: Real>(_cpu: &Cpu, x: &[T], y: &[T], w: &mut [T]) {
    let columns = columns(x.len(), w.len());
    for (row, w) in w.iter_mut().enumerate() {
        let at = row * columns..(row + 1) * columns;
        let products = x[at.clone()].iter().zip(&y[at]);
        *w = T::from_f64(products.map(|(x, y)| x.to_f64() * y.to_f64()).sum());
    }
}
