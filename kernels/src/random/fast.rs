//! Runs of consecutive global indices, with blocks on threads.

use super::{GlobalIndices, Stream, philox, unit};
use crate::simd::BLOCK;
use crate::{Cpu, Real};
use std::f64::consts::TAU;

/// Uniform numbers in `[low, high]` by global index; the ends occur only by rounding.
///
/// # Panics
/// If the lengths of `out` and the view differ.
pub fn fill_uniform<T: Real>(
    cpu: &Cpu,
    out: &mut [T],
    view: &GlobalIndices,
    stream: Stream,
    low: f64,
    high: f64,
) {
    let uniform = |word| low + (high - low) * unit(word);
    fill(cpu, out, view, stream, |words| words.map(uniform));
}

/// Normal numbers with mean 0 and standard deviation `std` by global index, all below 6.77 `std`.
///
/// # Panics
/// If the lengths of `out` and the view differ.
pub fn fill_normal<T: Real>(
    cpu: &Cpu,
    out: &mut [T],
    view: &GlobalIndices,
    stream: Stream,
    std: f64,
) {
    fill(cpu, out, view, stream, |words| normals(words).map(|normal| std * normal));
}

/// Fills `out` with `draw` of the random words of each group of four elements.
#[track_caller]
fn fill<T: Real>(
    cpu: &Cpu,
    out: &mut [T],
    view: &GlobalIndices,
    stream: Stream,
    draw: impl Fn([u32; 4]) -> [f64; 4] + Sync,
) {
    crate::check::length("out", out.len(), view.len());
    cpu.each(out.chunks_mut(BLOCK).enumerate(), |(block, out)| {
        for (start, index, length) in view.runs(block * BLOCK, out.len()) {
            let mut rest = &mut out[start..start + length];
            let (mut group, mut skip) = (index / 4, (index % 4) as usize);
            while !rest.is_empty() {
                let drawn = draw(philox::words(stream, group));
                let (now, later) = rest.split_at_mut(rest.len().min(4 - skip));
                for (place, &value) in now.iter_mut().zip(&drawn[skip..]) {
                    *place = T::from_f64(value);
                }
                (group, skip, rest) = (group + 1, 0, later);
            }
        }
    });
}

/// Two pairs of normal numbers: cosine and sine of each.
fn normals(words: [u32; 4]) -> [f64; 4] {
    let pair = |first: u32, second: u32| {
        let radius = (-2.0 * unit(first).ln()).sqrt();
        let angle = TAU * unit(second);
        [radius * angle.cos(), radius * angle.sin()]
    };
    let ([a, b], [c, d]) = (pair(words[0], words[1]), pair(words[2], words[3]));
    [a, b, c, d]
}
