//! Vectorised over pairs, with blocks of tokens on threads.

use super::{Pairing, Rope};
use crate::simd::{block_rows, vectorized};
use crate::{Cpu, Real};

/// Fills `table[tokens, 2, frequencies]` with the cosines and the sines of `position frequency`,
/// computed in f64.
///
/// # Panics
/// If `table` does not have `2 positions frequencies` elements.
pub fn fill_table<T: Real>(
    cpu: &Cpu,
    inverse_frequencies: &[f64],
    positions: &[u32],
    table: &mut [T],
) {
    let frequencies = inverse_frequencies.len();
    crate::check::length("table", table.len(), 2 * positions.len() * frequencies);
    let tokens = 16;
    let blocks = positions.chunks(tokens).zip(table.chunks_mut((2 * tokens * frequencies).max(1)));
    cpu.each(blocks, |(positions, table)| {
        super::reference::fill_table(cpu, inverse_frequencies, positions, table);
    });
}

/// Rotates `x` in place. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length, or the rotated part does not fit a head or is odd.
pub fn forward<T: Real>(cpu: &Cpu, rope: &Rope, table: &[T], x: &mut [T]) {
    rotate(cpu, rope, table, x, T::ONE);
}

/// Rotates the gradient `dx` back, in place. Shapes: [`super`].
///
/// # Panics
/// As [`forward`].
pub fn backward<T: Real>(cpu: &Cpu, rope: &Rope, table: &[T], dx: &mut [T]) {
    rotate(cpu, rope, table, dx, -T::ONE);
}

fn rotate<T: Real>(cpu: &Cpu, rope: &Rope, table: &[T], x: &mut [T], sign: T) {
    rope.check(x.len(), table.len());
    if x.is_empty() || table.is_empty() {
        return;
    }
    let token = rope.heads * rope.head_dim;
    let tokens = block_rows(token);
    let blocks = x.chunks_mut(tokens * token).zip(table.chunks(tokens * rope.rotary_dim));
    cpu.each(blocks, |(x, table)| rotate_tokens(cpu.arch(), *rope, table, x, sign));
}

vectorized! {
    fn rotate_tokens<T: Real>(rope: Rope, table: &'a [T], x: &'a mut [T], sign: T) {
        let half = rope.rotary_dim / 2;
        let tokens = x.chunks_exact_mut(rope.heads * rope.head_dim);
        for (x, table) in tokens.zip(table.chunks_exact(rope.rotary_dim)) {
            let (cos, sin) = table.split_at(half);
            for x in x.chunks_exact_mut(rope.head_dim) {
                let x = &mut x[rope.rotary_start..rope.rotary_start + rope.rotary_dim];
                match rope.pairing {
                    Pairing::Half => rotate_halves(x, cos, sin, sign),
                    Pairing::Interleaved => rotate_pairs(x, cos, sin, sign),
                }
            }
        }
    }
}

#[inline(always)]
fn rotate_halves<T: Real>(x: &mut [T], cos: &[T], sin: &[T], sign: T) {
    let (first, second) = x.split_at_mut(cos.len());
    for (((a, b), &cos), &sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*a, *b) = turn(*a, *b, cos, sign * sin);
    }
}

#[inline(always)]
fn rotate_pairs<T: Real>(x: &mut [T], cos: &[T], sin: &[T], sign: T) {
    for ((pair, &cos), &sin) in x.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
        *pair = turn(pair[0], pair[1], cos, sign * sin).into();
    }
}

#[inline(always)]
fn turn<T: Real>(a: T, b: T, cos: T, sin: T) -> (T, T) {
    (a.fma(cos, -(b * sin)), a.fma(sin, b * cos))
}
