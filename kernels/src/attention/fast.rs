//! Blocks of queries against blocks of keys with online softmax (FlashAttention-2, algorithms 1 and 2): two products
//! forward and five backward on blocks that stay in cache.
//!
//! Forward, a task is a block of queries of one head; backward, a key-value head with all the query heads that share it. Either does
//! its blocks in ascending order, so the bits do not depend on threads.

use super::{Attention, Gradients, Saved};
use crate::dropout::Mask;
use crate::matrix::{Grid, View, ViewMut, multiply};
use crate::simd::{self, vectorized};
use crate::{Cpu, Output, Real};
use std::ops::Range;

/// Queries of a block.
const Q_BLOCK: usize = 64;
/// Keys of a block.
const KV_BLOCK: usize = 64;

/// `out` and `lse` of `q`, `k`, `v`. Shapes: [`super`].
///
/// # Panics
/// Where a slice has the wrong length, or `kv_heads` does not divide `q_heads`.
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
    cpu.each(out.zip(lse), |((number, out), (_, lse))| {
        let block = Block::new(attention, number);
        let head = block.head(attention, q, k, v);
        cpu.scratch(Q_BLOCK * (KV_BLOCK + attention.v_dim + 1), |scratch| {
            forward_block(cpu, attention, &block, &head, mask, out, lse, scratch);
        });
    });
}

#[allow(clippy::too_many_arguments)]
fn forward_block<T: Real>(
    cpu: &Cpu,
    attention: &Attention,
    block: &Block,
    head: &Head<T>,
    mask: Option<Mask<T>>,
    out: ViewMut<T>,
    mut lse: ViewMut<T>,
    scratch: &mut [T],
) {
    let (scores, scratch) = scratch.split_at_mut(Q_BLOCK * KV_BLOCK);
    let (sums, max) = scratch.split_at_mut(Q_BLOCK * attention.v_dim);
    let queries = block.queries.clone();
    let sum = lse.row(0);
    sums.fill(T::ZERO);
    sum.fill(T::ZERO);
    max.fill(T::NEG_INFINITY);
    for keys in key_blocks(attention, &queries) {
        let tile = Tile { attention, block, queries: queries.clone(), keys: keys.clone(), mask };
        tile.raw_scores(head, scores);
        softmax_tile(cpu.arch(), &tile, scores, max, sum, sums);
        let p = View::new(scores, queries.len(), keys.len(), KV_BLOCK);
        let v = head.v.block(keys, 0..attention.v_dim);
        multiply(T::ONE, p, v, T::ONE, &mut whole(sums, queries.len(), attention.v_dim));
    }
    finish_block(cpu.arch(), sums, max, out, sum);
}

vectorized! {
    /// Turns raw scores into `exp(s - max)` (times the dropout mask) around the new row maxima, and moves what was summed so far there.
    fn softmax_tile<T: Real>(
        tile: &'a Tile<'a, T>, scores: &'a mut [T], max: &'a mut [T], sum: &'a mut [T], sums: &'a mut [T],
    ) {
        let width = tile.attention.v_dim;
        let rows = scores.chunks_exact_mut(KV_BLOCK).zip(sums.chunks_exact_mut(width));
        for (((i, (row, sums)), max), sum) in rows.enumerate().zip(max).zip(sum) {
            let row = &mut row[..tile.keys.len()];
            let Some(visible) = tile.show(i, row) else { continue };
            let row = &mut row[visible.clone()];
            tile.cap(row);
            let new = simd::larger(*max, simd::max(row));
            let kept = if *max > T::NEG_INFINITY { (*max - new).vexp() } else { T::ZERO };
            row.iter_mut().for_each(|s| *s = (*s - new).vexp());
            *sum = kept.fma(*sum, simd::sum(row, |p| p));
            *max = new;
            sums.iter_mut().for_each(|sum| *sum *= kept);
            tile.drop_out(i, visible.start, row);
        }
    }
}

vectorized! {
    /// `out = sums / sum`, and the log-sum-exp in place of the sum.
    fn finish_block<T: Real>(sums: &'a [T], max: &'a [T], out: ViewMut<'a, T>, sum: &'a mut [T]) {
        let mut out = out;
        let width = out.columns();
        for ((i, sums), (sum, &max)) in sums.chunks_exact(width).enumerate().zip(sum.iter_mut().zip(max)) {
            let seen = *sum > T::ZERO;
            let inverse = if seen { T::ONE / *sum } else { T::ZERO };
            for (out, &value) in out.row(i).iter_mut().zip(sums) {
                *out = inverse * value;
            }
            let log_sum = T::from_f64(max.to_f64() + sum.to_f64().ln());
            *sum = if seen { log_sum } else { T::NEG_INFINITY };
        }
    }
}

/// `dq`, `dk`, `dv` of `dout`, from what the forward pass left. Shapes: [`super`].
///
/// # Panics
/// Where a slice has the wrong length, or `kv_heads` does not divide `q_heads`.
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
        cpu.scratch(2 * Q_BLOCK * KV_BLOCK + len, |scratch| {
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

/// One query head's part of the gradients.
#[allow(clippy::too_many_arguments)]
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
    let (p, scratch) = scratch.split_at_mut(Q_BLOCK * KV_BLOCK);
    let (ds, delta) = scratch.split_at_mut(Q_BLOCK * KV_BLOCK);
    deltas(cpu.arch(), saved, delta);
    let (d, e) = (attention.qk_dim, attention.v_dim);
    for keys in blocks(0..attention.kv_len, KV_BLOCK) {
        for queries in blocks(0..attention.q_len, Q_BLOCK) {
            let seen = visible_keys(attention, &queries);
            if seen.end <= keys.start || keys.end <= seen.start {
                continue;
            }
            let tile =
                Tile { attention, block, queries: queries.clone(), keys: keys.clone(), mask };
            let dout = saved.dout.block(queries.clone(), 0..e);
            let v = head.v.block(keys.clone(), 0..e).transposed();
            tile.raw_scores(head, p);
            multiply(T::ONE, dout, v, T::ZERO, &mut tile.within(ds));
            gradient_tile(
                cpu.arch(),
                &tile,
                &saved.lse[queries.clone()],
                &delta[queries.clone()],
                p,
                ds,
            );
            let p = View::new(p, queries.len(), keys.len(), KV_BLOCK).transposed();
            let ds = View::new(ds, queries.len(), keys.len(), KV_BLOCK);
            let (q, k) = (head.q.block(queries.clone(), 0..d), head.k.block(keys.clone(), 0..d));
            multiply(T::ONE, p, dout, T::ONE, &mut parts.dv.block(keys.clone(), 0..e));
            multiply(T::ONE, ds.transposed(), q, T::ONE, &mut parts.dk.block(keys.clone(), 0..d));
            let columns = member * d..(member + 1) * d;
            multiply(T::ONE, ds, k, T::ONE, &mut parts.dq.block(queries, columns));
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
    /// Raw scores become masked probabilities, `dp` becomes the gradient of the products `q . k`.
    fn gradient_tile<T: Real>(
        tile: &'a Tile<'a, T>, lse: &'a [T], delta: &'a [T], p: &'a mut [T], ds: &'a mut [T],
    ) {
        let rows = p.chunks_exact_mut(KV_BLOCK).zip(ds.chunks_exact_mut(KV_BLOCK));
        for ((i, (p, ds)), (&lse, &delta)) in rows.enumerate().zip(lse.iter().zip(delta)) {
            let (p, ds) = (&mut p[..tile.keys.len()], &mut ds[..tile.keys.len()]);
            let visible = match tile.show(i, p) {
                Some(visible) if lse > T::NEG_INFINITY => visible,
                _ => {
                    p.fill(T::ZERO);
                    ds.fill(T::ZERO);
                    continue;
                }
            };
            ds[..visible.start].fill(T::ZERO);
            ds[visible.end..].fill(T::ZERO);
            let (p, ds) = (&mut p[visible.clone()], &mut ds[visible.clone()]);
            tile.cap(p);
            tile.drop_out(i, visible.start, ds);
            tile.score_gradients(p, ds, lse, delta);
            tile.drop_out(i, visible.start, p);
        }
    }
}

/// Adds a part over other keys to `out` and `lse`, in place:
/// `lse <- ln(e^lse + e^lse')`, `out <- e^(lse_old - lse) out + e^(lse' - lse) out'`.
///
/// # Panics
/// Where a slice has the wrong length.
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
    fn merge_block<T: Real>(part: View<'a, T>, part_lse: &'a [T], out: ViewMut<'a, T>, lse: &'a mut [T]) {
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

fn out_grid(attention: &Attention) -> Grid {
    let columns = attention.q_heads * attention.v_dim;
    Grid {
        matrices: attention.batch,
        stride: attention.q_len * columns,
        rows: attention.q_len,
        columns,
        leading: columns,
        tile_rows: Q_BLOCK,
        tile_columns: attention.v_dim,
    }
}

/// Its tiles have the order of [`out_grid`]'s.
fn lse_grid(attention: &Attention) -> Grid {
    Grid {
        matrices: attention.batch * attention.q_heads,
        stride: attention.q_len,
        rows: 1,
        columns: attention.q_len,
        leading: attention.q_len,
        tile_rows: 1,
        tile_columns: Q_BLOCK,
    }
}

/// `range` in pieces of at most `size`.
fn blocks(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(size).map(move |start| start..end.min(start + size))
}

/// Keys that any of the queries sees. Both ends of what a query sees grow with the query.
fn visible_keys(attention: &Attention, queries: &Range<usize>) -> Range<usize> {
    attention.visible(queries.start).start..attention.visible(queries.end - 1).end
}

/// Blocks of keys with something to see for the queries.
fn key_blocks(attention: &Attention, queries: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let seen = visible_keys(attention, queries);
    blocks(seen.start / KV_BLOCK * KV_BLOCK..seen.end, KV_BLOCK)
}

/// The first `rows columns` elements as a matrix.
fn whole<T>(data: &mut [T], rows: usize, columns: usize) -> ViewMut<'_, T> {
    ViewMut::new(data, rows, columns, columns)
}

/// Queries of one head of one sequence.
struct Block {
    batch: usize,
    head: usize,
    queries: Range<usize>,
}

/// What a query head reads: `[q_len, qk_dim]`, `[kv_len, qk_dim]`, `[kv_len, v_dim]`.
struct Head<'a, T> {
    q: View<'a, T>,
    k: View<'a, T>,
    v: View<'a, T>,
}

/// What the backward pass of a query head reads besides: `[q_len, v_dim]` twice, `[q_len]`.
struct SavedHead<'a, T> {
    out: View<'a, T>,
    dout: View<'a, T>,
    lse: &'a [T],
}

/// Gradients of a key-value head and the query heads that share it.
struct Parts<'a, T> {
    dq: ViewMut<'a, T>,
    dk: ViewMut<'a, T>,
    dv: ViewMut<'a, T>,
}

impl<T: Real> Parts<'_, T> {
    fn clear(&mut self) {
        for view in [&mut self.dq, &mut self.dk, &mut self.dv] {
            (0..view.rows()).for_each(|row| view.row(row).fill(T::ZERO));
        }
    }
}

/// Head `head` of the tensor `[batch, len, heads, width]` as a matrix `[len, width]`.
fn head_view<T>(
    data: &[T],
    batch: usize,
    len: usize,
    [heads, head, width]: [usize; 3],
) -> View<'_, T> {
    let data = &data[batch * len * heads * width..(batch + 1) * len * heads * width];
    View::new(data, len, heads * width, heads * width)
        .block(0..len, head * width..(head + 1) * width)
}

impl Block {
    /// The tile `number` of [`out_grid`].
    fn new(attention: &Attention, number: usize) -> Self {
        let (batch, queries, columns) = out_grid(attention).place(number);
        Self { batch, head: columns.start / attention.v_dim, queries }
    }

    fn head<'a, T>(&self, a: &Attention, q: &'a [T], k: &'a [T], v: &'a [T]) -> Head<'a, T> {
        let shared = self.head / a.group();
        Head {
            q: head_view(q, self.batch, a.q_len, [a.q_heads, self.head, a.qk_dim]),
            k: head_view(k, self.batch, a.kv_len, [a.kv_heads, shared, a.qk_dim]),
            v: head_view(v, self.batch, a.kv_len, [a.kv_heads, shared, a.v_dim]),
        }
    }

    fn saved<'a, T>(
        &self,
        a: &Attention,
        out: &'a [T],
        dout: &'a [T],
        lse: &'a [T],
    ) -> SavedHead<'a, T> {
        let start = self.lse_start(a);
        SavedHead {
            out: self.out(a, out),
            dout: self.out(a, dout),
            lse: &lse[start..start + self.queries.len()],
        }
    }

    /// The rows of a tensor like `out`.
    fn out<'a, T>(&self, a: &Attention, out: &'a [T]) -> View<'a, T> {
        head_view(out, self.batch, a.q_len, [a.q_heads, self.head, a.v_dim])
            .block(self.queries.clone(), 0..a.v_dim)
    }

    fn lse_start(&self, a: &Attention) -> usize {
        (self.batch * a.q_heads + self.head) * a.q_len + self.queries.start
    }
}

/// A block of queries against a block of keys.
struct Tile<'a, T> {
    attention: &'a Attention,
    block: &'a Block,
    queries: Range<usize>,
    keys: Range<usize>,
    mask: Option<Mask<T>>,
}

impl<T: Real> Tile<'_, T> {
    /// The tile's part of a buffer with rows of [`KV_BLOCK`].
    fn within<'a>(&self, buffer: &'a mut [T]) -> ViewMut<'a, T> {
        ViewMut::new(buffer, self.queries.len(), self.keys.len(), KV_BLOCK)
    }

    /// `scale q . k`, masked or not.
    fn raw_scores(&self, head: &Head<T>, scores: &mut [T]) {
        let width = 0..self.attention.qk_dim;
        let q = head.q.block(self.queries.clone(), width.clone());
        let k = head.k.block(self.keys.clone(), width).transposed();
        multiply(T::from_f64(self.attention.scale), q, k, T::ZERO, &mut self.within(scores));
    }

    /// The part of row `i` that is visible, none where nothing is; the rest is set to 0.
    #[inline(always)]
    fn show(&self, i: usize, row: &mut [T]) -> Option<Range<usize>> {
        let visible = self.attention.visible(self.queries.start + i);
        let local = |key: usize| key.clamp(self.keys.start, self.keys.end) - self.keys.start;
        let visible = local(visible.start)..local(visible.end);
        row[..visible.start].fill(T::ZERO);
        row[visible.end..].fill(T::ZERO);
        (!visible.is_empty()).then_some(visible)
    }

    #[inline(always)]
    fn cap(&self, row: &mut [T]) {
        if let Some(cap) = self.attention.soft_cap {
            let (cap, inverse) = (T::from_f64(cap), T::from_f64(1.0 / cap));
            row.iter_mut().for_each(|s| *s = cap * (*s * inverse).vtanh());
        }
    }

    /// Multiplies the elements of row `i` from column `start` on by the dropout mask.
    #[inline(always)]
    fn drop_out(&self, i: usize, start: usize, row: &mut [T]) {
        if let (Some(mask), Some(dropout)) = (self.mask, &self.attention.dropout) {
            let position = self.attention.q_offset + self.queries.start + i;
            let key = self.attention.kv_offset + self.keys.start + start;
            let index = dropout.row_index(self.block.batch, self.block.head, position) + key as u64;
            mask.multiply(index, row);
        }
    }

    /// Capped scores become probabilities `p`, and `dp` (masked) the gradient `p (dp - delta) slope scale`.
    #[inline(always)]
    fn score_gradients(&self, scores: &mut [T], dp: &mut [T], lse: T, delta: T) {
        let scale = T::from_f64(self.attention.scale);
        match self.attention.soft_cap {
            None => {
                for (s, dp) in scores.iter_mut().zip(dp) {
                    *s = (*s - lse).vexp();
                    *dp = scale * *s * (*dp - delta);
                }
            }
            Some(cap) => {
                let inverse = T::from_f64(1.0 / cap);
                for (s, dp) in scores.iter_mut().zip(dp) {
                    let t = *s * inverse;
                    *s = (*s - lse).vexp();
                    *dp = scale * *s * (*dp - delta) * (T::ONE - t * t);
                }
            }
        }
    }
}
