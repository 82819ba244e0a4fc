//! Element by element.

use super::Dropout;
use crate::random::{GlobalIndices, philox};
use crate::{Cpu, Real};

/// `y = x mask / (1 - p)`; the backward pass is the same with `dy` for `x` and `dx` for `y`.
///
/// # Panics
/// If the length of `x` or `y` differs from the view's, or `p` is outside `[0, 1)`.
pub fn apply<T: Real>(_cpu: &Cpu, dropout: &Dropout, view: &GlobalIndices, x: &[T], y: &mut [T]) {
    crate::check::length("x", x.len(), view.len());
    crate::check::length("y", y.len(), view.len());
    let (threshold, scale) = (dropout.threshold(), dropout.scale());
    for (at, (place, x)) in y.iter_mut().zip(x).enumerate() {
        let kept = philox::word(dropout.stream, view.index(at)) >= threshold;
        *place = if kept { T::from_f64(x.to_f64() * scale) } else { T::ZERO };
    }
}
