//! Self-attention over this rank's heads, without its projections.

use super::Context;
use super::tiles::{Tile, scaled};
use crate::device::{Device, Gradients, Saved};
use crate::state::buffer::{Buffer, WideBuffer};
use kernels::attention::{Attention as Shape, ProbabilityDropout};
use kernels::rope;

/// One rank's heads of one layer's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Query heads of this rank.
    pub heads: usize,
    /// Key/value heads of this rank.
    pub kv_heads: usize,
    /// Query heads of all ranks.
    pub total_heads: usize,
    /// Columns of a head.
    pub head_dim: usize,
    /// Factor of the scores.
    pub scale: f64,
    /// Tokens that a query sees, if not all before it.
    pub window: Option<usize>,
    /// Bound of the scores (Gemma 2).
    pub soft_cap: Option<f64>,
    /// Which dropout this is in the model.
    pub place: u32,
}

/// What the backward pass reads: queries, keys, values, output and the rows' log-sum-exp.
pub struct AttentionSaved<'a, D: Device> {
    /// `[n, heads * head_dim]`
    pub q: &'a Buffer<D>,
    /// `[n, kv_heads * head_dim]`
    pub k: &'a Buffer<D>,
    /// `[n, kv_heads * head_dim]`
    pub v: &'a Buffer<D>,
    /// `[n, heads * head_dim]`
    pub out: &'a Buffer<D>,
    /// `[n, heads]`
    pub lse: &'a WideBuffer<D>,
}

impl Attention {
    /// The shape over whole sequences, with `heads` query and key/value heads.
    pub(super) fn shape<D: Device>(&self, ctx: &Context<'_, D>, heads: [usize; 2]) -> Shape {
        let batch = ctx.batch;
        let (b, s) = (batch.sequences, batch.seq_len);
        let first_head = ctx.tp.rank() * self.heads + ctx.cp.ulysses.rank() * heads[0];
        let draws = ctx.draws.map(|draws| ProbabilityDropout {
            dropout: draws.at(self.place),
            batch_offset: batch.first_sequence as u64,
            head_offset: first_head as u64,
            total_heads: self.total_heads as u64,
            total_len: s as u64,
        });
        Shape {
            scale: self.scale,
            window: self.window,
            soft_cap: self.soft_cap,
            dropout: draws,
            ..Shape::causal(b, s, heads[0], heads[1], self.head_dim)
        }
    }

    /// Rotates queries or keys, `[n, heads * head_dim]`, by their positions.
    pub fn rotate<D: Device>(&self, ctx: &Context<'_, D>, x: &mut Buffer<D>) {
        let rope = self.rope(ctx, x);
        ctx.device.rope(&rope, ctx.batch.rope.view(), x.view_mut());
    }

    /// The backward pass of [`Self::rotate`].
    pub fn rotate_back<D: Device>(&self, ctx: &Context<'_, D>, dx: &mut Buffer<D>) {
        let rope = self.rope(ctx, dx);
        ctx.device.rope_backward(&rope, ctx.batch.rope.view(), dx.view_mut());
    }

    fn rope<D: Device>(&self, ctx: &Context<'_, D>, x: &Buffer<D>) -> rope::Rope {
        let tokens = ctx.tokens();
        rope::Rope::half(tokens, x.len() / (tokens * self.head_dim), self.head_dim)
    }

    /// Output `[n, heads * head_dim]`, and the log-sum-exp of each row's scores.
    pub fn forward<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        q: &Buffer<D>,
        k: &Buffer<D>,
        v: &Buffer<D>,
    ) -> (Buffer<D>, WideBuffer<D>) {
        let [heads, kv_heads] = self.heads_behind(ctx.cp.parallel.ulysses);
        let [width, kv_width] = [heads, kv_heads].map(|heads| heads * self.head_dim);
        let mut out = ctx.buffer(q.len());
        let mut lse = ctx.wide(q.len() / self.head_dim);
        let whole = 0..ctx.batch.seq_len;
        let all = std::slice::from_ref(&whole);
        for Tile { shape, queries, keys } in self.tiles(ctx, [heads, kv_heads], all, all) {
            let [at, lse_at] = [width, heads].map(|columns| scaled(&queries, columns));
            let [k, v] = [k, v].map(|x| x.part(scaled(&keys, kv_width)));
            let (to, statistics) = (out.part_mut(at.clone()), lse.part_mut(lse_at));
            ctx.device.attention(&shape, q.part(at), k, v, to, statistics);
        }
        (out, lse)
    }

    /// Gradients of queries, keys and values.
    pub fn backward<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        saved: &AttentionSaved<'_, D>,
        dout: &Buffer<D>,
    ) -> [Buffer<D>; 3] {
        let AttentionSaved { q, k, v, out, lse } = saved;
        let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| ctx.buffer(x.len()));
        let [heads, kv_heads] = self.heads_behind(ctx.cp.parallel.ulysses);
        let [width, kv_width] = [heads, kv_heads].map(|heads| heads * self.head_dim);
        let whole = 0..ctx.batch.seq_len;
        let all = std::slice::from_ref(&whole);
        // Each key is in one tile, so its gradients need no sum.
        for Tile { shape, queries, keys } in self.tiles(ctx, [heads, kv_heads], all, all) {
            let [at, lse_at] = [width, heads].map(|columns| scaled(&queries, columns));
            let kv_at = scaled(&keys, kv_width);
            let [k, v] = [k, v].map(|x| x.part(kv_at.clone()));
            let (q, out) = (q.part(at.clone()), out.part(at.clone()));
            let saved = Saved { q, k, v, out, lse: lse.part(lse_at) };
            let gradients = Gradients {
                dq: dq.part_mut(at.clone()),
                dk: dk.part_mut(kv_at.clone()),
                dv: dv.part_mut(kv_at),
            };
            ctx.device.attention_backward(&shape, saved, dout.part(at), gradients);
        }
        [dq, dk, dv]
    }
}
