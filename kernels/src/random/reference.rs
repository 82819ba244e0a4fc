//! One evaluation of the generator for each element.

use super::{GlobalIndices, Stream, philox, unit};
use crate::{Cpu, Real};
use std::f64::consts::TAU;

/// Uniform numbers in `[low, high]` by global index; the ends occur only by rounding.
///
/// # Panics
/// If the lengths of `out` and the view differ.
pub fn fill_uniform<T: Real>(
    _cpu: &Cpu,
    out: &mut [T],
    view: &GlobalIndices,
    stream: Stream,
    low: f64,
    high: f64,
) {
    crate::check::length("out", out.len(), view.len());
    for (at, place) in out.iter_mut().enumerate() {
        let u = unit(philox::word(stream, view.index(at)));
        *place = T::from_f64(low + (high - low) * u);
    }
}

/// Normal numbers with mean 0 and standard deviation `std` by global index, all below 6.77 `std`.
///
/// # Panics
/// If the lengths of `out` and the view differ.
pub fn fill_normal<T: Real>(
    _cpu: &Cpu,
    out: &mut [T],
    view: &GlobalIndices,
    stream: Stream,
    std: f64,
) {
    crate::check::length("out", out.len(), view.len());
    for (at, place) in out.iter_mut().enumerate() {
        *place = T::from_f64(std * normal(stream, view.index(at)));
    }
}

/// Elements `2 i` and `2 i + 1` are the cosine and the sine of one pair.
fn normal(stream: Stream, index: u64) -> f64 {
    let pair = index & !1;
    let radius = (-2.0 * unit(philox::word(stream, pair)).ln()).sqrt();
    let angle = TAU * unit(philox::word(stream, pair + 1));
    radius * if index == pair { angle.cos() } else { angle.sin() }
}
