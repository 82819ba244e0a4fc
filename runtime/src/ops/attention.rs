//! Self-attention over this rank's heads, without its projections.

use super::Context;
use super::tiles::{Tile, scaled};
use crate::device::{Device, Gradients, Saved};
use crate::state::buffer::{Buffer, WideBuffer};
use crate::state::params::ParameterSlice;
use kernels::attention::{Attention as Shape, ProbabilityDropout};
use kernels::latent_heads::LatentHeads;
use kernels::rope::{Pairing, Rope};

/// One rank's heads of one layer's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Query heads of this rank.
    pub heads: usize,
    /// Key/value heads of this rank.
    pub kv_heads: usize,
    /// Query heads of all ranks.
    pub total_heads: usize,
    /// Columns of a query or key head.
    pub head_dim: usize,
    /// What latent attention's heads have of their own; `None`: values are as wide as keys, and
    /// heads are rotated in pairs of halves, from their first column on.
    pub latent: Option<Latent>,
    /// Factor of the scores.
    pub scale: f64,
    /// Tokens that a query sees, if not all before it.
    pub window: Option<usize>,
    /// Bound of the scores (Gemma 2).
    pub soft_cap: Option<f64>,
    /// Which dropout this is in the model.
    pub place: u32,
    /// Logits that every softmax counts beside its keys', one for each of this rank's heads
    /// ([`Self::with_sinks`]).
    pub sinks: Option<ParameterSlice>,
}

/// Heads of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latent {
    /// Columns of a query or key head that are rotated: its last ones, in pairs of neighbours.
    pub rotary: usize,
    /// Columns of a value head.
    pub value: usize,
}

/// What the backward pass reads: queries, keys, values, output and the rows' log-sum-exp.
pub struct AttentionSaved<'a, D: Device> {
    /// `[n, heads * head_dim]`
    pub q: &'a Buffer<D>,
    /// `[n, kv_heads * head_dim]`
    pub k: &'a Buffer<D>,
    /// `[n, kv_heads * value_dim]`
    pub v: &'a Buffer<D>,
    /// `[n, heads * value_dim]`
    pub out: &'a Buffer<D>,
    /// `[n, heads]`
    pub lse: &'a WideBuffer<D>,
}

impl Attention {
    /// Columns of a value head.
    pub fn value_dim(&self) -> usize {
        self.latent.map_or(self.head_dim, |latent| latent.value)
    }

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
            v_dim: self.value_dim(),
            ..Shape::causal(b, s, heads[0], heads[1], self.head_dim)
        }
    }

    /// Rotates queries or keys, `[n, heads * head_dim]`, by their positions; or the part of keys
    /// that latent attention's heads share, `[n, rotary]`.
    pub fn rotate<D: Device>(&self, ctx: &Context<'_, D>, x: &mut Buffer<D>) {
        let rope = self.rope(ctx, x);
        ctx.device.rope(&rope, ctx.batch.rope.view(), x.view_mut());
    }

    /// The backward pass of [`Self::rotate`].
    pub fn rotate_back<D: Device>(&self, ctx: &Context<'_, D>, dx: &mut Buffer<D>) {
        let rope = self.rope(ctx, dx);
        ctx.device.rope_backward(&rope, ctx.batch.rope.view(), dx.view_mut());
    }

    /// As many columns of a head are rotated as the table has cosines and sines.
    fn rope<D: Device>(&self, ctx: &Context<'_, D>, x: &Buffer<D>) -> Rope {
        let tokens = ctx.tokens();
        let (columns, rotary_dim) = (x.len() / tokens, ctx.batch.rope.len() / tokens);
        let shared = self.latent.is_some() && columns == rotary_dim;
        let head_dim = if shared { rotary_dim } else { self.head_dim };
        let (rotary_start, pairing) = match self.latent {
            Some(_) => (head_dim - rotary_dim, Pairing::Interleaved),
            None => (0, Pairing::Half),
        };
        let heads = columns / head_dim;
        Rope { tokens, heads, head_dim, rotary_start, rotary_dim, pairing }
    }

    #[track_caller]
    fn latent_heads<D: Device>(&self, ctx: &Context<'_, D>) -> LatentHeads {
        let Latent { rotary, value } = self.latent.expect("the attention is latent");
        let content = self.head_dim - rotary;
        LatentHeads { tokens: ctx.tokens(), heads: self.kv_heads, content, rotary, value }
    }

    /// Keys `[n, heads * head_dim]` and values `[n, heads * value]` of latent attention, from what
    /// was projected up, `[n, heads * (head_dim - rotary + value)]`, and the rotated part that all
    /// heads share, `[n, rotary]`.
    ///
    /// # Panics
    /// The attention is not latent.
    #[track_caller]
    pub fn join<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        up: &Buffer<D>,
        rotary: &Buffer<D>,
    ) -> [Buffer<D>; 2] {
        let of = self.latent_heads(ctx);
        let heads = of.tokens * of.heads;
        let [mut k, mut v] = [of.key(), of.value].map(|width| ctx.buffer(heads * width));
        let (to_k, to_v) = (k.view_mut(), v.view_mut());
        ctx.device.join_latent_heads(&of, up.view(), rotary.view(), to_k, to_v);
        [k, v]
    }

    /// The backward pass of [`Self::join`]: gradients of what was projected up, and of the shared
    /// part, summed over this rank's heads.
    ///
    /// # Panics
    /// The attention is not latent.
    #[track_caller]
    pub fn split<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        dk: &Buffer<D>,
        dv: &Buffer<D>,
    ) -> [Buffer<D>; 2] {
        let of = self.latent_heads(ctx);
        let mut dup = ctx.buffer(of.tokens * of.heads * of.up());
        let mut drotary = ctx.buffer(of.tokens * of.rotary);
        let (to, sums) = (dup.view_mut(), drotary.view_mut());
        ctx.device.split_latent_heads(&of, dk.view(), dv.view(), to, sums);
        [dup, drotary]
    }

    /// Columns of this rank's queries, keys, values and outputs, for this many query and key/value
    /// heads.
    pub(super) fn columns(&self, [heads, kv_heads]: [usize; 2]) -> Columns {
        let (key, value) = (self.head_dim, self.value_dim());
        Columns { q: heads * key, k: kv_heads * key, v: kv_heads * value, out: heads * value }
    }

    /// Columns of this rank's queries, keys, values and outputs, behind an exchange of tokens for
    /// heads over `ulysses` ranks.
    pub(crate) fn columns_behind(&self, ulysses: usize) -> [usize; 4] {
        let Columns { q, k, v, out } = self.columns(self.heads_behind(ulysses));
        [q, k, v, out]
    }

    /// Output `[n, heads * value_dim]`, and the log-sum-exp of each row's scores.
    pub fn forward<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        q: &Buffer<D>,
        k: &Buffer<D>,
        v: &Buffer<D>,
    ) -> (Buffer<D>, WideBuffer<D>) {
        let both = self.heads_behind(ctx.cp.parallel.ulysses);
        let (columns, rows) = (self.columns(both), q.len() / self.columns(both).q);
        let mut out = ctx.buffer(rows * columns.out);
        let mut lse = ctx.wide(rows * both[0]);
        let whole = 0..ctx.batch.seq_len;
        let all = std::slice::from_ref(&whole);
        for Tile { shape, queries, keys } in self.tiles(ctx, both, all, all) {
            let lse_at = scaled(&queries, both[0]);
            let q = q.part(scaled(&queries, columns.q));
            let (k, v) = (k.part(scaled(&keys, columns.k)), v.part(scaled(&keys, columns.v)));
            let to = out.part_mut(scaled(&queries, columns.out));
            ctx.device.attention(&shape, q, k, v, to, lse.part_mut(lse_at));
        }
        self.corrected(ctx, None, (out, lse))
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
        let both = self.heads_behind(ctx.cp.parallel.ulysses);
        let columns = self.columns(both);
        let whole = 0..ctx.batch.seq_len;
        let all = std::slice::from_ref(&whole);
        // Each key is in one tile, so its gradients need no sum.
        for Tile { shape, queries, keys } in self.tiles(ctx, both, all, all) {
            let [q_at, out_at] = [columns.q, columns.out].map(|width| scaled(&queries, width));
            let [k_at, v_at] = [columns.k, columns.v].map(|width| scaled(&keys, width));
            let (k, v) = (k.part(k_at.clone()), v.part(v_at.clone()));
            let (q, out) = (q.part(q_at.clone()), out.part(out_at.clone()));
            let saved = Saved { q, k, v, out, lse: lse.part(scaled(&queries, both[0])) };
            let gradients =
                Gradients { dq: dq.part_mut(q_at), dk: dk.part_mut(k_at), dv: dv.part_mut(v_at) };
            ctx.device.attention_backward(&shape, saved, dout.part(out_at), gradients);
        }
        [dq, dk, dv]
    }
}

/// Columns of some heads.
#[derive(Clone, Copy)]
pub(super) struct Columns {
    pub q: usize,
    pub k: usize,
    pub v: usize,
    pub out: usize,
}
