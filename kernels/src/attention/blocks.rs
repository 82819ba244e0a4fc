//! The units of work of attention: blocks of queries and keys, and the matrices of a head.

use super::Attention;
use crate::Real;
use crate::matrix::{Grid, MatrixView, MatrixViewMut};
use std::ops::Range;

/// Queries of a block: columns of the scores. Loops run over all of them, even if the last block
/// has fewer.
pub(super) const Q_BLOCK: usize = 64;
/// Keys of a block: rows of the scores.
pub(super) const KV_BLOCK: usize = 128;
/// Number of scores of a block.
pub(super) const SCORES: usize = KV_BLOCK * Q_BLOCK;

/// One number for each query of a block.
pub(super) type PerQuery<T> = [T; Q_BLOCK];

pub(super) fn out_grid(attention: &Attention) -> Grid {
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

/// A grid whose tiles have the order of [`out_grid`]'s.
pub(super) fn lse_grid(attention: &Attention) -> Grid {
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

/// Splits `range` into pieces of at most `size`.
pub(super) fn blocks(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(size).map(move |start| start..end.min(start + size))
}

/// The keys that any of the queries sees. Both ends of a query's visible range grow with the query.
pub(super) fn visible_keys(attention: &Attention, queries: &Range<usize>) -> Range<usize> {
    attention.visible(queries.start).start..attention.visible(queries.end - 1).end
}

/// The blocks of keys of which the queries see some.
pub(super) fn key_blocks(
    attention: &Attention,
    queries: &Range<usize>,
) -> impl Iterator<Item = Range<usize>> {
    let seen = visible_keys(attention, queries);
    blocks(seen.start / KV_BLOCK * KV_BLOCK..seen.end, KV_BLOCK)
}

/// A block of queries of one head of one sequence.
pub(super) struct Block {
    pub(super) batch: usize,
    pub(super) head: usize,
    pub(super) queries: Range<usize>,
}

/// Inputs of a query head: `[q_len, qk_dim]`, `[kv_len, qk_dim]`, `[kv_len, v_dim]`.
pub(super) struct Head<'a, T> {
    pub(super) q: MatrixView<'a, T>,
    pub(super) k: MatrixView<'a, T>,
    pub(super) v: MatrixView<'a, T>,
}

/// Further inputs of a query head's backward pass: `[q_len, v_dim]` twice, `[q_len]`.
pub(super) struct SavedHead<'a, T> {
    pub(super) out: MatrixView<'a, T>,
    pub(super) dout: MatrixView<'a, T>,
    pub(super) lse: &'a [T],
}

/// Gradients of a key-value head and of the query heads that share it.
pub(super) struct Parts<'a, T> {
    pub(super) dq: MatrixViewMut<'a, T>,
    pub(super) dk: MatrixViewMut<'a, T>,
    pub(super) dv: MatrixViewMut<'a, T>,
}

impl<T: Real> Parts<'_, T> {
    pub(super) fn clear(&mut self) {
        for view in [&mut self.dq, &mut self.dk, &mut self.dv] {
            (0..view.rows()).for_each(|row| view.row(row).fill(T::ZERO));
        }
    }
}

/// Head `head` of the tensor `[batch, len, heads, width]` as a matrix `[len, width]`.
pub(super) fn head_view<T>(
    data: &[T],
    batch: usize,
    len: usize,
    [heads, head, width]: [usize; 3],
) -> MatrixView<'_, T> {
    let data = &data[batch * len * heads * width..(batch + 1) * len * heads * width];
    MatrixView::new(data, len, heads * width, heads * width)
        .block(0..len, head * width..(head + 1) * width)
}

impl Block {
    /// The block of tile `number` of [`out_grid`].
    pub(super) fn new(attention: &Attention, number: usize) -> Self {
        let (batch, queries, columns) = out_grid(attention).place(number);
        Self { batch, head: columns.start / attention.v_dim, queries }
    }

    pub(super) fn head<'a, T>(
        &self,
        a: &Attention,
        q: &'a [T],
        k: &'a [T],
        v: &'a [T],
    ) -> Head<'a, T> {
        let shared = self.head / a.group();
        Head {
            q: head_view(q, self.batch, a.q_len, [a.q_heads, self.head, a.qk_dim]),
            k: head_view(k, self.batch, a.kv_len, [a.kv_heads, shared, a.qk_dim]),
            v: head_view(v, self.batch, a.kv_len, [a.kv_heads, shared, a.v_dim]),
        }
    }

    pub(super) fn saved<'a, T>(
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

    /// The block's rows of a tensor shaped like `out`.
    pub(super) fn out<'a, T>(&self, a: &Attention, out: &'a [T]) -> MatrixView<'a, T> {
        head_view(out, self.batch, a.q_len, [a.q_heads, self.head, a.v_dim])
            .block(self.queries.clone(), 0..a.v_dim)
    }

    pub(super) fn lse_start(&self, a: &Attention) -> usize {
        (self.batch * a.q_heads + self.head) * a.q_len + self.queries.start
    }
}
