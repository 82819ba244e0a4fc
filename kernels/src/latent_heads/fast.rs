//! Row by row, with blocks of tokens on threads.

use super::LatentHeads;
use crate::simd::block_rows;
use crate::{Cpu, Real};

/// Computes `k` and `v`. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length.
pub fn join<T: Real>(
    cpu: &Cpu,
    of: &LatentHeads,
    up: &[T],
    rotary: &[T],
    k: &mut [T],
    v: &mut [T],
) {
    of.check(up.len(), rotary.len(), k.len(), v.len());
    let tokens = block_rows(of.heads * (of.key() + of.value));
    let blocks = rows_mut(k, tokens * of.heads * of.key())
        .zip(rows_mut(v, tokens * of.heads * of.value))
        .enumerate();
    cpu.each(blocks, |(block, (k, v))| {
        let keys = k.chunks_exact_mut(of.key()).enumerate();
        for (n, k) in keys {
            let head = block * tokens * of.heads + n;
            let (content, shared) = k.split_at_mut(of.content);
            let token = head / of.heads;
            content.copy_from_slice(&up[head * of.up()..][..of.content]);
            shared.copy_from_slice(&rotary[token * of.rotary..][..of.rotary]);
        }
        for (n, v) in v.chunks_exact_mut(of.value.max(1)).enumerate() {
            let head = block * tokens * of.heads + n;
            v.copy_from_slice(&up[head * of.up() + of.content..][..of.value]);
        }
    });
}

/// Computes `dup` and `drotary`. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length.
pub fn split<T: Real>(
    cpu: &Cpu,
    of: &LatentHeads,
    dk: &[T],
    dv: &[T],
    dup: &mut [T],
    drotary: &mut [T],
) {
    of.check(dup.len(), drotary.len(), dk.len(), dv.len());
    let tokens = block_rows(of.heads * (of.key() + of.value));
    let blocks = rows_mut(dup, tokens * of.heads * of.up())
        .zip(rows_mut(drotary, tokens * of.rotary))
        .enumerate();
    cpu.each(blocks, |(block, (dup, drotary))| {
        let first = block * tokens;
        for (n, dup) in dup.chunks_exact_mut(of.up()).enumerate() {
            let head = first * of.heads + n;
            let (content, value) = dup.split_at_mut(of.content);
            content.copy_from_slice(&dk[head * of.key()..][..of.content]);
            value.copy_from_slice(&dv[head * of.value..][..of.value]);
        }
        for (n, sums) in drotary.chunks_exact_mut(of.rotary.max(1)).enumerate() {
            let token = &dk[(first + n) * of.heads * of.key()..][..of.heads * of.key()];
            sums.fill(T::ZERO);
            for head in token.chunks_exact(of.key()) {
                sums.iter_mut().zip(&head[of.content..]).for_each(|(sum, &x)| *sum += x);
            }
        }
    });
}

/// Blocks of a result.
fn rows_mut<T>(x: &mut [T], block: usize) -> impl Iterator<Item = &mut [T]> {
    x.chunks_mut(block.max(1))
}
