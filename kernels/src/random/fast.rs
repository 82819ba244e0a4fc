//! Blocks of elements on threads; words of many counters at once.

use super::{Stream, View, philox, unit};
use crate::simd::BLOCK;
use crate::{Cpu, Real};
use std::f64::consts::TAU;

/// Uniform numbers in `[low, high]` by global index (the ends only by rounding).
///
/// # Panics
/// Where `out` has not as many elements as the view.
pub fn fill_uniform<T: Real>(
    cpu: &Cpu,
    out: &mut [T],
    view: &View,
    stream: Stream,
    low: f64,
    high: f64,
) {
    crate::check::length("out", out.len(), view.len());
    cpu.each(out.chunks_mut(BLOCK).enumerate(), |(block, out)| {
        for (at, place) in out.iter_mut().enumerate() {
            let u = unit(philox::word(stream, view.index(block * BLOCK + at)));
            *place = T::from_f64(low + (high - low) * u);
        }
    });
}

/// Normal numbers with mean 0 and standard deviation `std` by global index. They stay below 6.77 `std`.
///
/// # Panics
/// Where `out` has not as many elements as the view.
pub fn fill_normal<T: Real>(cpu: &Cpu, out: &mut [T], view: &View, stream: Stream, std: f64) {
    crate::check::length("out", out.len(), view.len());
    cpu.each(out.chunks_mut(BLOCK).enumerate(), |(block, out)| {
        let mut known = None;
        for (at, place) in out.iter_mut().enumerate() {
            let index = view.index(block * BLOCK + at);
            let (group, normals) = match known {
                Some((group, normals)) if group == index / 4 => (group, normals),
                _ => (index / 4, normals(philox::words(stream, index / 4))),
            };
            known = Some((group, normals));
            *place = T::from_f64(std * normals[(index % 4) as usize]);
        }
    });
}

/// Two pairs, cosine and sine member of each.
fn normals(words: [u32; 4]) -> [f64; 4] {
    let pair = |first: u32, second: u32| {
        let radius = (-2.0 * unit(first).ln()).sqrt();
        let angle = TAU * unit(second);
        [radius * angle.cos(), radius * angle.sin()]
    };
    let ([a, b], [c, d]) = (pair(words[0], words[1]), pair(words[2], words[3]));
    [a, b, c, d]
}
