//! One block of queries against one block of keys.

use super::Attention;
use super::blocks::{Block, KV_BLOCK, PerQuery, Q_BLOCK, blocks};
use crate::dropout::Mask;
use crate::matrix::{MatrixView, MatrixViewMut, multiply};
use crate::simd::vectorized;
use crate::{Cpu, Real};
use std::ops::Range;

/// Queries and columns that are transposed at a time.
const SQUARE: usize = 16;

vectorized! {
    /// `to[width, Q_BLOCK] = scale from[queries, width]^T`, in squares that fit in registers and
    /// the L1 cache.
    pub(super) fn transpose<T: Real>(from: MatrixView<'a, T>, scale: T, to: &'a mut [T]) {
        for queries in blocks(0..from.rows(), SQUARE) {
            for columns in blocks(0..from.columns(), SQUARE) {
                let mut square = [[T::ZERO; SQUARE]; SQUARE];
                for (square, i) in square.iter_mut().zip(queries.clone()) {
                    let row = &from.row(i)[columns.clone()];
                    match row.first_chunk() {
                        Some(row) => *square = *row,
                        None => square[..row.len()].copy_from_slice(row),
                    }
                }
                for (column, at) in columns.enumerate() {
                    let to = &mut to[at * Q_BLOCK + queries.start..][..SQUARE];
                    for (to, row) in to.iter_mut().zip(&square) {
                        *to = scale * row[column];
                    }
                }
            }
        }
    }
}

/// Transposes all blocks of queries, one after the other.
pub(super) fn transpose_all<T: Real>(cpu: &Cpu, from: MatrixView<T>, scale: T, to: &mut [T]) {
    let width = from.columns();
    let to = to.chunks_exact_mut(Q_BLOCK * width);
    for (queries, to) in blocks(0..from.rows(), Q_BLOCK).zip(to) {
        transpose(cpu.arch(), from.block(queries, 0..width), scale, to);
    }
}

/// A block of queries against a block of keys.
pub(super) struct Tile<'a, T> {
    pub(super) attention: &'a Attention,
    pub(super) block: &'a Block,
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
    pub(super) mask: Option<Mask<T>>,
}

impl<T: Real> Tile<'_, T> {
    /// The tile's part of a buffer of scores, `[keys, queries]`, to write.
    pub(super) fn within<'a>(&self, scores: &'a mut [T]) -> MatrixViewMut<'a, T> {
        MatrixViewMut::new(scores, self.keys.len(), self.queries.len(), Q_BLOCK)
    }

    /// The tile's part of a buffer of scores, `[keys, queries]`, to read.
    pub(super) fn view<'a>(&self, scores: &'a [T]) -> MatrixView<'a, T> {
        MatrixView::new(scores, self.keys.len(), self.queries.len(), Q_BLOCK)
    }

    /// Multiplies rows of keys or values by the transposed block `columns[width, Q_BLOCK]`.
    pub(super) fn products(&self, rows: MatrixView<T>, columns: &[T], scores: &mut [T]) {
        let width = columns.len() / Q_BLOCK;
        let columns = MatrixView::new(columns, width, self.queries.len(), Q_BLOCK);
        multiply(T::ONE, rows, columns, T::ZERO, &mut self.within(scores));
    }

    #[inline(always)]
    pub(super) fn cap(&self, row: &mut PerQuery<T>) {
        if let Some(cap) = self.attention.soft_cap {
            let (cap, inverse) = (T::from_f64(cap), T::from_f64(1.0 / cap));
            row.iter_mut().for_each(|s| *s = cap * (*s * inverse).vtanh());
        }
    }

    /// Sets scores to `value` where a query does not see the key.
    #[inline(always)]
    pub(super) fn hide(&self, key: usize, row: &mut PerQuery<T>, value: T) {
        let viewers = self.attention.viewers(key);
        let local =
            |query: usize| query.clamp(self.queries.start, self.queries.end) - self.queries.start;
        let (start, end) = (local(viewers.start), local(viewers.end));
        if start > 0 || end < self.queries.len() {
            for (i, s) in row.iter_mut().enumerate() {
                *s = if i < start || i >= end { value } else { *s };
            }
        }
    }

    /// Multiplies by the dropout mask, in runs along the keys.
    #[inline(always)]
    pub(super) fn drop_out(&self, rows: &mut [PerQuery<T>]) {
        let (Some(mask), Some(dropout)) = (self.mask, &self.attention.dropout) else { return };
        let key = self.attention.kv_offset + self.keys.start;
        for query in self.queries.clone() {
            let position = self.attention.q_offset + query;
            let row = dropout.row_index(self.block.batch, self.block.head, position);
            let mut factors = [T::ONE; KV_BLOCK];
            let factors = &mut factors[..rows.len()];
            mask.multiply(row + key as u64, factors);
            for (row, &factor) in rows.iter_mut().zip(&*factors) {
                row[query - self.queries.start] *= factor;
            }
        }
    }

    /// Turns capped scores into probabilities `p`, and `dp` (masked) into the gradient `p (dp -
    /// delta) slope scale`.
    #[inline(always)]
    pub(super) fn score_gradients(
        &self,
        scores: &mut PerQuery<T>,
        dp: &mut PerQuery<T>,
        lse: &PerQuery<T>,
        delta: &PerQuery<T>,
    ) {
        let scale = T::from_f64(self.attention.scale);
        let inverse = T::from_f64(self.attention.soft_cap.map_or(0.0, |cap| 1.0 / cap));
        for i in 0..Q_BLOCK {
            let t = scores[i] * inverse;
            let p = (scores[i] - lse[i]).vexp();
            (scores[i], dp[i]) = (p, scale * p * (dp[i] - delta[i]) * (T::ONE - t * t));
        }
    }
}
