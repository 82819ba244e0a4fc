//! Element by element.

use crate::{Cpu, Real};

/// `y[j, i, l] = x[i, j, l]` for `x` of `[a, b, inner]`.
///
/// # Panics
/// If a slice does not have `a b inner` elements.
pub fn swap_leading<T: Real>(_cpu: &Cpu, [a, b, inner]: [usize; 3], x: &[T], y: &mut [T]) {
    crate::check::length("x", x.len(), a * b * inner);
    crate::check::length("y", y.len(), a * b * inner);
    for i in 0..a {
        for j in 0..b {
            for l in 0..inner {
                y[(j * a + i) * inner + l] = x[(i * b + j) * inner + l];
            }
        }
    }
}
