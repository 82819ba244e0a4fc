//! Runs of consecutive global indices: many counters at once in vectors, blocks on threads.

use super::{Dropout, Mask};
use crate::random::GlobalIndices;
use crate::simd::{BLOCK, vectorized};
use crate::{Cpu, Real};

/// `y = x mask / (1 - p)`; the backward pass is the same with `dy` for `x` and `dx` for `y`.
///
/// # Panics
/// If the length of `x` or `y` differs from the view's, or `p` is outside `[0, 1)`.
pub fn apply<T: Real>(cpu: &Cpu, dropout: &Dropout, view: &GlobalIndices, x: &[T], y: &mut [T]) {
    crate::check::length("x", x.len(), view.len());
    crate::check::length("y", y.len(), view.len());
    let mask = Mask::new(dropout);
    cpu.each(x.chunks(BLOCK).zip(y.chunks_mut(BLOCK)).enumerate(), |(block, (x, y))| {
        y.copy_from_slice(x);
        for (start, index, length) in view.runs(block * BLOCK, y.len()) {
            apply_run(cpu.arch(), mask, index, &mut y[start..start + length]);
        }
    });
}

vectorized! {
    fn apply_run<T: Real>(mask: Mask<T>, index: u64, y: &'a mut [T]) {
        mask.multiply(index, y);
    }
}
