//! Pair by pair, in f64.

use super::{Pairing, Rope};
use crate::{Cpu, Real};

/// Fills `table[tokens, 2, frequencies]` with the cosines and the sines of `position frequency`,
/// computed in f64.
///
/// # Panics
/// If `table` does not have `2 positions frequencies` elements.
pub fn fill_table<T: Real>(
    _cpu: &Cpu,
    inverse_frequencies: &[f64],
    positions: &[u32],
    table: &mut [T],
) {
    let frequencies = inverse_frequencies.len();
    crate::check::length("table", table.len(), 2 * positions.len() * frequencies);
    for (token, &position) in positions.iter().enumerate() {
        for (j, frequency) in inverse_frequencies.iter().enumerate() {
            let (sin, cos) = (f64::from(position) * frequency).sin_cos();
            table[2 * token * frequencies + j] = T::from_f64(cos);
            table[(2 * token + 1) * frequencies + j] = T::from_f64(sin);
        }
    }
}

/// Rotates `x` in place. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length, or the rotated part does not fit a head or is odd.
pub fn forward<T: Real>(_cpu: &Cpu, rope: &Rope, table: &[T], x: &mut [T]) {
    rotate(rope, table, x, 1.0);
}

/// Rotates the gradient `dx` back, in place. Shapes: [`super`].
///
/// # Panics
/// As [`forward`].
pub fn backward<T: Real>(_cpu: &Cpu, rope: &Rope, table: &[T], dx: &mut [T]) {
    rotate(rope, table, dx, -1.0);
}

fn rotate<T: Real>(rope: &Rope, table: &[T], x: &mut [T], sign: f64) {
    rope.check(x.len(), table.len());
    let half = rope.rotary_dim / 2;
    for (head, x) in x.chunks_exact_mut(rope.head_dim).enumerate() {
        let table = &table[head / rope.heads * rope.rotary_dim..][..rope.rotary_dim];
        let x = &mut x[rope.rotary_start..];
        for j in 0..half {
            let (first, second) = match rope.pairing {
                Pairing::Half => (j, j + half),
                Pairing::Interleaved => (2 * j, 2 * j + 1),
            };
            let (cos, sin) = (table[j].to_f64(), sign * table[half + j].to_f64());
            let (a, b) = (x[first].to_f64(), x[second].to_f64());
            x[first] = T::from_f64(a * cos - b * sin);
            x[second] = T::from_f64(a * sin + b * cos);
        }
    }
}
