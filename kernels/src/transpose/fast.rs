//! Whole rows or square tiles, with blocks of the result on threads.

use crate::simd::block_rows;
use crate::{Cpu, Real};

/// Rows and columns of a tile of single elements: a cache line of f32.
const TILE: usize = 16;

/// `y[j, i, l] = x[i, j, l]` for `x` of `[a, b, inner]`.
///
/// # Panics
/// If a slice does not have `a b inner` elements.
pub fn swap_leading<T: Real>(cpu: &Cpu, [a, b, inner]: [usize; 3], x: &[T], y: &mut [T]) {
    crate::check::length("x", x.len(), a * b * inner);
    crate::check::length("y", y.len(), a * b * inner);
    if y.is_empty() {
        return;
    }
    let slabs = block_rows(a * inner).next_multiple_of(TILE);
    cpu.each(y.chunks_mut(slabs * a * inner).enumerate(), |(block, y)| {
        let first = block * slabs;
        for j in (0..y.len() / (a * inner)).step_by(TILE) {
            for i in (0..a).step_by(TILE) {
                swap_tile([a, b, inner], first, [i, j], x, y);
            }
        }
    });
}

/// Swaps the tile at `(j, i)` of the slabs that begin at `first`.
fn swap_tile<T: Real>(
    [a, b, inner]: [usize; 3],
    first: usize,
    [i, j]: [usize; 2],
    x: &[T],
    y: &mut [T],
) {
    let slabs = y.len() / (a * inner);
    for j in j..slabs.min(j + TILE) {
        for i in i..a.min(i + TILE) {
            let (from, to) = ((i * b + first + j) * inner, (j * a + i) * inner);
            match inner {
                1 => y[to] = x[from], // a call of copy would cost more than the element
                _ => y[to..to + inner].copy_from_slice(&x[from..from + inner]),
            }
        }
    }
}
