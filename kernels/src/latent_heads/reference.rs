//! Element by element; the sum in f64.

use super::LatentHeads;
use crate::{Cpu, Real};

/// Computes `k` and `v`. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length.
pub fn join<T: Real>(
    _cpu: &Cpu,
    of: &LatentHeads,
    up: &[T],
    rotary: &[T],
    k: &mut [T],
    v: &mut [T],
) {
    of.check(up.len(), rotary.len(), k.len(), v.len());
    for head in 0..of.tokens * of.heads {
        let token = head / of.heads;
        for i in 0..of.key() {
            k[head * of.key() + i] = match i.checked_sub(of.content) {
                None => up[head * of.up() + i],
                Some(i) => rotary[token * of.rotary + i],
            };
        }
        for i in 0..of.value {
            v[head * of.value + i] = up[head * of.up() + of.content + i];
        }
    }
}

/// Computes `dup` and `drotary`. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length.
pub fn split<T: Real>(
    _cpu: &Cpu,
    of: &LatentHeads,
    dk: &[T],
    dv: &[T],
    dup: &mut [T],
    drotary: &mut [T],
) {
    of.check(dup.len(), drotary.len(), dk.len(), dv.len());
    for head in 0..of.tokens * of.heads {
        for i in 0..of.up() {
            dup[head * of.up() + i] = match i.checked_sub(of.content) {
                None => dk[head * of.key() + i],
                Some(i) => dv[head * of.value + i],
            };
        }
    }
    for token in 0..of.tokens {
        for i in 0..of.rotary {
            let heads = token * of.heads..(token + 1) * of.heads;
            let sum = heads.map(|head| dk[head * of.key() + of.content + i].to_f64()).sum();
            drotary[token * of.rotary + i] = T::from_f64(sum);
        }
    }
}
