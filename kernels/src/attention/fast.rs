//! Attention by blocks of queries and keys with online softmax (FlashAttention-2, algorithms 1 and
//! 2): two products forward and five backward, on blocks that stay in cache.
//!
//! A block of scores is stored as `[keys, queries]`. Numbers that belong to a query (maximum, sum,
//! log-sum-exp) lie along vectors, so softmax needs no sums across lanes. Blocks of queries (and of
//! `dout`) are transposed once for all blocks of keys; then all products read their operands
//! without a transpose.
//!
//! A forward task is a block of queries of one head; a backward task is a key-value head with all
//! query heads that share it. Each handles its blocks in ascending order, so the bits do not depend
//! on threads.

use super::blocks::{
    Block, Head, KV_BLOCK, Parts, PerQuery, Q_BLOCK, SCORES, SavedHead, blocks, key_blocks,
    lse_grid, out_grid, visible_keys,
};
use super::tile::{Tile, transpose, transpose_all};
use super::{Attention, Gradients, Saved};
use crate::dropout::Mask;
use crate::matrix::{Grid, MatrixView, MatrixViewMut, multiply};
use crate::simd::{self, vectorized};
use crate::{Cpu, Output, Real};

/// Computes `out` and `lse` from `q`, `k`, `v`. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length, or `kv_heads` does not divide `q_heads`.
pub fn forward<T: Real>(
    cpu: &Cpu,
    attention: &Attention,
    q: &[T],
    k: &[T],
    v: &[T],
    out: &mut [T],
    lse: &mut [T],
) {
    attention.check(q.len(), k.len(), v.len(), out.len(), lse.len());
    let mask = mask(attention);
    let (out, lse) = (out_grid(attention).cut(out), lse_grid(attention).cut(lse));
    cpu.each(out.zip(lse), |((number, out), (_, mut lse))| {
        let block = Block::new(attention, number);
        let head = block.head(attention, q, k, v);
        cpu.scratch(SCORES + Q_BLOCK * (attention.qk_dim + attention.v_dim), |scratch| {
            let (scores, scratch) = scratch.split_at_mut(SCORES);
            let (q, sums) = scratch.split_at_mut(Q_BLOCK * attention.qk_dim);
            let rows = head.q.block(block.queries.clone(), 0..attention.qk_dim);
            transpose(cpu.arch(), rows, T::from_f64(attention.scale), q);
            let softmax = forward_block(cpu, attention, &block, &head, mask, q, scores, sums);
            finish_block(cpu.arch(), &softmax, sums, out, lse.row(0));
        });
    });
}

/// Running maximum of the scores, and running sum of `exp(score - max)`.
struct Softmax<T> {
    max: PerQuery<T>,
    sum: PerQuery<T>,
}

/// Computes `sum over keys of exp(s - max) v` into `sums[queries, v_dim]`. `q` is scaled and
/// transposed.
#[allow(clippy::too_many_arguments)] // tensors and their sizes, as the contract has them
fn forward_block<T: Real>(
    cpu: &Cpu,
    attention: &Attention,
    block: &Block,
    head: &Head<T>,
    mask: Option<Mask<T>>,
    q: &[T],
    scores: &mut [T],
    sums: &mut [T],
) -> Softmax<T> {
    let mut softmax = Softmax { max: [T::NEG_INFINITY; Q_BLOCK], sum: [T::ZERO; Q_BLOCK] };
    let queries = block.queries.clone();
    if queries.len() < Q_BLOCK {
        scores.fill(T::ZERO);
    }
    sums.fill(T::ZERO);
    for keys in key_blocks(attention, &queries) {
        let tile = Tile { attention, block, queries: queries.clone(), keys: keys.clone(), mask };
        let k = head.k.block(keys.clone(), 0..attention.qk_dim);
        tile.products(k, q, scores);
        softmax_tile(cpu.arch(), &tile, scores, &mut softmax, sums);
        let v = head.v.block(keys, 0..attention.v_dim);
        let mut sums = MatrixViewMut::new(sums, queries.len(), attention.v_dim, attention.v_dim);
        multiply(T::ONE, tile.view(scores).transposed(), v, T::ONE, &mut sums);
    }
    softmax
}

vectorized! {
    /// Turns raw scores into `exp(s - max)` (times the dropout mask) with the new maxima, and
    /// rescales the running sums to them.
    fn softmax_tile<T: Real>(
        tile: &'a Tile<'a, T>, scores: &'a mut [T], softmax: &'a mut Softmax<T>, sums: &'a mut [T],
    ) {
        let (rows, _) = scores.as_chunks_mut::<Q_BLOCK>();
        let rows = &mut rows[..tile.keys.len()];
        let mut max = softmax.max;
        for (key, row) in tile.keys.clone().zip(rows.iter_mut()) {
            tile.cap(row);
            tile.hide(key, row, T::NEG_INFINITY);
            for (max, &s) in max.iter_mut().zip(&*row) {
                *max = simd::larger(*max, s);
            }
        }
        // With no visible key so far, exp(-inf - 0) = 0.
        let base = max.map(|max| if max > T::NEG_INFINITY { max } else { T::ZERO });
        let mut kept = softmax.max;
        for (kept, &base) in kept.iter_mut().zip(&base) {
            *kept = (*kept - base).vexp();
        }
        let mut sum = [T::ZERO; Q_BLOCK];
        for row in rows.iter_mut() {
            for ((s, &base), sum) in row.iter_mut().zip(&base).zip(&mut sum) {
                *s = (*s - base).vexp();
                *sum += *s;
            }
        }
        for ((old, &sum), &kept) in softmax.sum.iter_mut().zip(&sum).zip(&kept) {
            *old = kept.fma(*old, sum);
        }
        softmax.max = max;
        for (sums, &kept) in sums.chunks_exact_mut(tile.attention.v_dim).zip(&kept) {
            sums.iter_mut().for_each(|sum| *sum *= kept);
        }
        tile.drop_out(rows);
    }
}

vectorized! {
    /// `out = sums / sum`, `lse = max + ln sum`.
    fn finish_block<T: Real>(softmax: &'a Softmax<T>, sums: &'a [T], out: MatrixViewMut<'a, T>, lse: &'a mut [T]) {
        let mut out = out;
        let width = out.columns();
        let statistics = softmax.max.iter().zip(&softmax.sum);
        let rows = lse.iter_mut().enumerate().zip(sums.chunks_exact(width));
        for (((i, lse), sums), (&max, &sum)) in rows.zip(statistics) {
            let seen = sum > T::ZERO;
            let inverse = if seen { T::ONE / sum } else { T::ZERO };
            for (out, &value) in out.row(i).iter_mut().zip(sums) {
                *out = inverse * value;
            }
            let log_sum = T::from_f64(max.to_f64() + sum.to_f64().ln());
            *lse = if seen { log_sum } else { T::NEG_INFINITY };
        }
    }
}

/// Computes `dq`, `dk`, `dv` from `dout` and what the forward pass saved. Shapes: [`super`].
///
/// # Panics
/// If a slice has the wrong length, or `kv_heads` does not divide `q_heads`.
pub fn backward<T: Real>(
    cpu: &Cpu,
    attention: &Attention,
    saved: &Saved<T>,
    dout: &[T],
    gradients: &mut Gradients<T>,
    output: Output,
) {
    let Saved { q, k, v, out, lse } = *saved;
    attention.check(q.len(), k.len(), v.len(), out.len(), lse.len());
    let Gradients { dq, dk, dv } = gradients;
    attention.check(dq.len(), dk.len(), dv.len(), dout.len(), lse.len());
    let mask = mask(attention);
    let (len, group) = (attention.q_len, attention.group());
    let per_head = |len: usize, heads: usize, width: usize| Grid {
        matrices: attention.batch,
        stride: len * heads * width,
        rows: len,
        columns: heads * width,
        leading: heads * width,
        tile_rows: len.max(1),
        tile_columns: width * heads / attention.kv_heads,
    };
    let dq = per_head(len, attention.q_heads, attention.qk_dim).cut(dq);
    let dk = per_head(attention.kv_len, attention.kv_heads, attention.qk_dim).cut(dk);
    let dv = per_head(attention.kv_len, attention.kv_heads, attention.v_dim).cut(dv);
    cpu.each(dq.zip(dk).zip(dv), |(((number, dq), (_, dk)), (_, dv))| {
        let (batch, kv_head) = (number / attention.kv_heads, number % attention.kv_heads);
        let mut parts = Parts { dq, dk, dv };
        if output == Output::Overwrite {
            parts.clear();
        }
        let transposed = len.next_multiple_of(Q_BLOCK) * (attention.qk_dim + attention.v_dim);
        cpu.scratch(2 * SCORES + len + transposed, |scratch| {
            if !len.is_multiple_of(Q_BLOCK) {
                scratch.fill(T::ZERO);
            }
            for member in 0..group {
                let block = Block { batch, head: kv_head * group + member, queries: 0..len };
                let head = block.head(attention, q, k, v);
                let saved = block.saved(attention, out, dout, lse);
                backward_head(
                    cpu, attention, &block, &head, &saved, mask, member, &mut parts, scratch,
                );
            }
        });
    });
}

/// One query head's contribution to the gradients.
#[allow(clippy::too_many_arguments)] // tensors and their sizes, as the contract has them
fn backward_head<T: Real>(
    cpu: &Cpu,
    attention: &Attention,
    block: &Block,
    head: &Head<T>,
    saved: &SavedHead<T>,
    mask: Option<Mask<T>>,
    member: usize,
    parts: &mut Parts<T>,
    scratch: &mut [T],
) {
    let (p, scratch) = scratch.split_at_mut(SCORES);
    let (ds, scratch) = scratch.split_at_mut(SCORES);
    let (delta, scratch) = scratch.split_at_mut(attention.q_len);
    let (d, e) = (attention.qk_dim, attention.v_dim);
    let (qs, douts) = scratch.split_at_mut(attention.q_len.next_multiple_of(Q_BLOCK) * d);
    deltas(cpu.arch(), saved, delta);
    transpose_all(cpu, head.q, T::from_f64(attention.scale), qs);
    transpose_all(cpu, saved.dout, T::ONE, douts);
    for keys in blocks(0..attention.kv_len, KV_BLOCK) {
        for queries in blocks(0..attention.q_len, Q_BLOCK) {
            let seen = visible_keys(attention, &queries);
            let keys = keys.start.max(seen.start)..keys.end.min(seen.end);
            if keys.is_empty() {
                continue;
            }
            let tile =
                Tile { attention, block, queries: queries.clone(), keys: keys.clone(), mask };
            let (q, k) = (head.q.block(queries.clone(), 0..d), head.k.block(keys.clone(), 0..d));
            let dout = saved.dout.block(queries.clone(), 0..e);
            let v = head.v.block(keys.clone(), 0..e);
            tile.products(k, &qs[queries.start * d..][..Q_BLOCK * d], p);
            tile.products(v, &douts[queries.start * e..][..Q_BLOCK * e], ds);
            let statistics = [&saved.lse[queries.clone()], &delta[queries.clone()]];
            gradient_tile(cpu.arch(), &tile, statistics, p, ds);
            let (p, ds) = (tile.view(p), tile.view(ds));
            multiply(T::ONE, p, dout, T::ONE, &mut parts.dv.block(keys.clone(), 0..e));
            multiply(T::ONE, ds, q, T::ONE, &mut parts.dk.block(keys.clone(), 0..d));
            let columns = member * d..(member + 1) * d;
            multiply(T::ONE, ds.transposed(), k, T::ONE, &mut parts.dq.block(queries, columns));
        }
    }
}

vectorized! {
    /// `delta_i = dout_i . out_i`, which is `sum_j p_ij dp_ij`.
    fn deltas<T: Real>(saved: &'a SavedHead<'a, T>, delta: &'a mut [T]) {
        for (i, delta) in delta.iter_mut().enumerate() {
            *delta = simd::dot(saved.dout.row(i), saved.out.row(i));
        }
    }
}

vectorized! {
    /// Turns raw scores into probabilities (times the dropout mask), and `dp` into the gradient of
    /// the products `q . k`.
    fn gradient_tile<T: Real>(
        tile: &'a Tile<'a, T>, statistics: [&'a [T]; 2], p: &'a mut [T], ds: &'a mut [T],
    ) {
        let (mut lse, mut delta) = ([T::ZERO; Q_BLOCK], [T::ZERO; Q_BLOCK]);
        lse[..tile.queries.len()].copy_from_slice(statistics[0]);
        delta[..tile.queries.len()].copy_from_slice(statistics[1]);
        // If a query sees no key, all its scores are masked below.
        let lse = lse.map(|lse| if lse > T::NEG_INFINITY { lse } else { T::ZERO });
        let p = &mut p.as_chunks_mut::<Q_BLOCK>().0[..tile.keys.len()];
        let ds = &mut ds.as_chunks_mut::<Q_BLOCK>().0[..tile.keys.len()];
        tile.drop_out(ds);
        for (key, (p, ds)) in tile.keys.clone().zip(p.iter_mut().zip(ds)) {
            tile.cap(p);
            tile.score_gradients(p, ds, &lse, &delta);
            tile.hide(key, p, T::ZERO);
            tile.hide(key, ds, T::ZERO);
        }
        tile.drop_out(p);
    }
}

/// Merges the result over another range of keys into `out` and `lse`, in place: `lse <- ln(e^lse +
/// e^lse')`, `out <- e^(lse_old - lse) out + e^(lse' - lse) out'`.
///
/// # Panics
/// If a slice has the wrong length.
pub fn merge<T: Real>(
    cpu: &Cpu,
    attention: &Attention,
    out: &mut [T],
    lse: &mut [T],
    part_out: &[T],
    part_lse: &[T],
) {
    crate::check::length("out", out.len(), attention.out_elements());
    crate::check::length("lse", lse.len(), attention.lse_elements());
    crate::check::length("part_out", part_out.len(), out.len());
    crate::check::length("part_lse", part_lse.len(), lse.len());
    let (out, lse) = (out_grid(attention).cut(out), lse_grid(attention).cut(lse));
    cpu.each(out.zip(lse), |((number, out), (_, mut lse))| {
        let block = Block::new(attention, number);
        let part = block.out(attention, part_out);
        let part_lse = &part_lse[block.lse_start(attention)..];
        merge_block(cpu.arch(), part, part_lse, out, lse.row(0));
    });
}

vectorized! {
    fn merge_block<T: Real>(part: MatrixView<'a, T>, part_lse: &'a [T], out: MatrixViewMut<'a, T>, lse: &'a mut [T]) {
        let mut out = out;
        for (i, (lse, &part_lse)) in lse.iter_mut().zip(part_lse).enumerate() {
            let (mine, other) = (lse.to_f64(), part_lse.to_f64());
            let max = mine.max(other);
            if max == f64::NEG_INFINITY {
                continue;
            }
            let sum = max + ((mine - max).exp() + (other - max).exp()).ln();
            let (keep, add) = (T::from_f64((mine - sum).exp()), T::from_f64((other - sum).exp()));
            *lse = T::from_f64(sum);
            for (out, &part) in out.row(i).iter_mut().zip(part.row(i)) {
                *out = keep.fma(*out, add * part);
            }
        }
    }
}

fn mask<T: Real>(attention: &Attention) -> Option<Mask<T>> {
    attention.dropout.as_ref().map(|dropout| Mask::new(&dropout.dropout))
}
