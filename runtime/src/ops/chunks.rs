//! Chunks of a rank's rows, which pass through attention and experts one after the other.
//!
//! Each rank cuts its own rows of the residual stream into equal runs. With sequence parallelism a
//! chunk's tokens are therefore one run on each tensor-parallel rank.

use super::attention::{Attention, AttentionSaved};
use super::context::{Context, PassContext};
use super::tiles::{Tile, scaled};
use crate::device::{Device, Gradients, Saved};
use crate::state::buffer::{Buffer, WideBuffer};
use kernels::Real;
use std::ops::Range;

/// One of the equal chunks of a rank's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Chunk {
    /// Which, 0-based.
    pub index: usize,
    /// How many there are.
    pub of: usize,
}

impl Chunk {
    /// The chunks of `N`.
    pub const fn all<const N: usize>() -> [Self; N] {
        let mut all = [Self::WHOLE; N];
        let mut index = 0;
        while index < N {
            all[index] = Self { index, of: N };
            index += 1;
        }
        all
    }

    /// All rows.
    pub const WHOLE: Self = Self { index: 0, of: 1 };

    /// Its part of `len` rows.
    pub(super) fn part(self, len: usize) -> Range<usize> {
        self.index * len / self.of..(self.index + 1) * len / self.of
    }
}

impl<D: Device> PassContext<'_, D> {
    /// A chunk's elements of a tensor of this rank's rows.
    pub fn chunk_of(&self, x: &Buffer<D>, chunk: Chunk) -> Buffer<D> {
        let part = chunk.part(x.len());
        let mut y = self.buffer(part.len());
        self.device.copy(x.part(part), y.view_mut());
        y
    }

    /// The rows of all chunks, one after the other.
    pub fn joined(&self, parts: &[&Buffer<D>]) -> Buffer<D> {
        let mut y = self.buffer(parts.iter().map(|part| part.len()).sum());
        let mut at = 0;
        for part in parts {
            self.device.copy(part.view(), y.part_mut(at..at + part.len()));
            at += part.len();
        }
        y
    }

    /// Runs of a chunk's tokens, as rows of the tokens of all tensor-parallel ranks.
    pub(super) fn runs_of(&self, chunk: Chunk) -> Vec<Range<usize>> {
        let rows = self.rows();
        let Range { start, end } = chunk.part(rows);
        (0..self.tokens() / rows).map(|rank| rank * rows + start..rank * rows + end).collect()
    }
}

/// Sums over chunks of the gradients of queries, keys and values.
pub struct AttentionSums<D: Device> {
    dq: Buffer<D>,
    dk: WideBuffer<D>,
    dv: WideBuffer<D>,
}

impl Attention {
    /// Output of a chunk's queries, `[n / chunks, heads * value_dim]`, and the log-sum-exp of their
    /// scores. `q`, `k` and `v` are those of all tokens.
    pub fn forward_chunk<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        chunk: Chunk,
        q: &Buffer<D>,
        k: &Buffer<D>,
        v: &Buffer<D>,
    ) -> (Buffer<D>, WideBuffer<D>) {
        let both = self.heads_behind(1);
        let columns = self.columns(both);
        let rows = q.len() / columns.q / chunk.of;
        let (mut out, mut lse) = (ctx.buffer(rows * columns.out), ctx.wide(rows * both[0]));
        for (Tile { shape, queries, keys }, own) in self.tiles_of(ctx, both, chunk) {
            let q = q.part(scaled(&queries, columns.q));
            let (k, v) = (k.part(scaled(&keys, columns.k)), v.part(scaled(&keys, columns.v)));
            let to = out.part_mut(scaled(&own, columns.out));
            ctx.device.attention(&shape, q, k, v, to, lse.part_mut(scaled(&own, both[0])));
        }
        self.corrected(ctx, Some(chunk), (out, lse))
    }

    /// Sums of the gradients of queries, keys and values, 0 so far.
    pub fn begin_sums<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        q: &Buffer<D>,
        k: &Buffer<D>,
        v: &Buffer<D>,
    ) -> AttentionSums<D> {
        let zeros = |len: usize| {
            let mut sum = ctx.wide(len);
            ctx.device.fill(sum.view_mut(), D::Wide::ZERO);
            sum
        };
        AttentionSums { dq: ctx.buffer(q.len()), dk: zeros(k.len()), dv: zeros(v.len()) }
    }

    /// Adds the gradients of a chunk's queries, and their part in those of keys and values. `q`,
    /// `k` and `v` are those of all tokens; `out`, `lse` and `dout` are the chunk's.
    pub fn add_to_sums<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        chunk: Chunk,
        saved: &AttentionSaved<'_, D>,
        dout: &Buffer<D>,
        mut sums: AttentionSums<D>,
    ) -> AttentionSums<D> {
        let AttentionSaved { q, k, v, out, lse } = saved;
        let both = self.heads_behind(1);
        let columns = self.columns(both);
        let AttentionSums { dq, dk, dv } = &mut sums;
        for (Tile { shape, queries, keys }, own) in self.tiles_of(ctx, both, chunk) {
            let [k_at, v_at] = [columns.k, columns.v].map(|width| scaled(&keys, width));
            let (q_at, out_at) = (scaled(&queries, columns.q), scaled(&own, columns.out));
            let (q, out) = (q.part(q_at.clone()), out.part(out_at.clone()));
            let (k, v) = (k.part(k_at.clone()), v.part(v_at.clone()));
            let saved = Saved { q, k, v, out, lse: lse.part(scaled(&own, both[0])) };
            let [mut k_part, mut v_part] = [&k_at, &v_at].map(|at| ctx.buffer(at.len()));
            let gradients =
                Gradients { dq: dq.part_mut(q_at), dk: k_part.view_mut(), dv: v_part.view_mut() };
            ctx.device.attention_backward(&shape, saved, dout.part(out_at), gradients);
            ctx.device.accumulate(k_part.view(), dk.part_mut(k_at));
            ctx.device.accumulate(v_part.view(), dv.part_mut(v_at));
        }
        sums
    }

    /// The gradients of queries, keys and values.
    pub fn finish_sums<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        sums: AttentionSums<D>,
    ) -> [Buffer<D>; 3] {
        let AttentionSums { dq, dk, dv } = sums;
        let rounded = |sum: WideBuffer<D>| {
            let mut y = ctx.buffer(sum.len());
            ctx.device.round(sum.view(), y.view_mut());
            y
        };
        [dq, rounded(dk), rounded(dv)]
    }
}
