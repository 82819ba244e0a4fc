//! Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).
//!
//! Every rank has the latent vectors of all tokens, and projects them up to its own heads. So
//! gradients of latent vectors are partial sums over the ranks. What comes before is linear in
//! these gradients: norm, down-projection and rotation pass partial sums on, and the layer's input
//! gradient is reduced once, as that of any attention.

use super::attention::AttentionSums;
use super::linear::{FromRows, FusedRows, sealed};
use super::placement::{GradientPlacement, HeadPlacement, Whole};
use super::tensor::{LogSumExp, Statistics, Tensor};
use crate::comm::CommError;
use crate::device::Device;
use crate::ops::{self, AttentionSaved, Chunk, Context, Matrix, NormKind, WeightWork};
use crate::state::params::Inventory;
use kernels::Output;
use std::marker::PhantomData;
use std::rc::Rc;

/// A projection to a latent vector, which every rank holds whole and computes for all tokens.
/// Gradients are placed as `G`.
pub struct DownLinear<G: GradientPlacement, const IN: usize, const OUT: usize> {
    linear: ops::Linear,
    placement: PhantomData<G>,
}

impl<G: GradientPlacement, const IN: usize, const OUT: usize> DownLinear<G, IN, OUT> {
    /// Declares a matrix of `OUT` rows and `IN` columns.
    ///
    /// # Panics
    /// Gradients are not sums over as many ranks as there are.
    #[track_caller]
    pub fn declare(matrix: Matrix, inventory: &mut Inventory) -> Self {
        FusedRows::declare(matrix, &[(OUT, 1)], IN, inventory).part()
    }

    /// `x[R, IN] -> y[R, OUT]`
    pub fn forward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        x: &Tensor<D, Whole, R, IN>,
    ) -> Tensor<D, Whole, R, OUT> {
        Tensor::received(self.linear.forward(ctx, x.buffer()))
    }

    /// `dy[R, OUT] -> dx[R, IN]`
    pub fn backward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        dy: &Tensor<D, G, R, OUT>,
    ) -> Tensor<D, G, R, IN> {
        Tensor::received(self.linear.backward_input(ctx, dy.buffer()))
    }

    /// The same, added to the input gradient of another layer with the same input.
    pub fn add_backward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        dy: &Tensor<D, G, R, OUT>,
        dx: Tensor<D, G, R, IN>,
    ) -> Tensor<D, G, R, IN> {
        dx.changed(ctx, |dx| {
            self.linear.backward_input_to(ctx, dy.buffer(), dx, Output::Accumulate);
        })
    }

    /// The gradients of weight and bias.
    pub fn weights<D: Device, const R: usize>(
        &self,
        x: &Tensor<D, Whole, R, IN>,
        dy: &Tensor<D, G, R, OUT>,
    ) -> WeightWork<D> {
        self.linear.weights(x.memory(), dy.memory())
    }
}

impl<G: GradientPlacement, const IN: usize, const OUT: usize> FromRows for DownLinear<G, IN, OUT> {
    const SHAPE: (usize, usize) = (OUT, IN);
    const RANKS: usize = G::RANKS;
}

impl<G: GradientPlacement, const IN: usize, const OUT: usize> sealed::FromLinear
    for DownLinear<G, IN, OUT>
{
    fn from_rows(linear: ops::Linear) -> Self {
        Self { linear, placement: PhantomData }
    }
}

/// RMSNorm of a latent vector of `C` elements, `x / rms(x) * w`. Gradients are placed as `G`.
pub struct LatentNorm<G: GradientPlacement, const C: usize> {
    norm: ops::Norm,
    placement: PhantomData<G>,
}

impl<G: GradientPlacement, const C: usize> LatentNorm<G, C> {
    /// Declares the norm of this name. `eps` is added to the mean of squares.
    pub fn declare(name: &str, eps: f64, inventory: &mut Inventory) -> Self {
        let (kind, partial) = (NormKind::Rms { eps, unit_offset: false }, G::RANKS > 1);
        let norm = ops::Norm::declare(name, C, kind, partial, inventory);
        Self { norm, placement: PhantomData }
    }

    /// The norm of `x`, and statistics of the rows.
    pub fn of<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        x: &Tensor<D, Whole, R, C>,
    ) -> (Tensor<D, Whole, R, C>, Statistics<D>) {
        let (y, statistics) = self.norm.forward(ctx, x.buffer());
        (Tensor::received(y), Statistics(Rc::new(statistics)))
    }

    /// The norm of `x`, computed again.
    pub fn again<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        x: &Tensor<D, Whole, R, C>,
    ) -> Tensor<D, Whole, R, C> {
        self.of(ctx, x).0
    }

    /// The gradient of `x`, from that of its norm. It is linear in that: partial sums give partial
    /// sums.
    pub fn backward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        x: &Tensor<D, Whole, R, C>,
        s: &Statistics<D>,
        dy: &Tensor<D, G, R, C>,
    ) -> Tensor<D, G, R, C> {
        let mut dx = ctx.buffer(R * C);
        let (x, dy) = (x.buffer(), dy.buffer());
        self.norm.backward_input(ctx, x, &s.0, dy, &mut dx, Output::Overwrite);
        Tensor::received(dx)
    }

    /// The gradient of the weights.
    pub fn weights<D: Device, const R: usize>(
        &self,
        x: &Tensor<D, Whole, R, C>,
        s: &Statistics<D>,
        dy: &Tensor<D, G, R, C>,
    ) -> WeightWork<D> {
        self.norm.weights(x.memory(), &s.0, dy.memory())
    }
}

/// One rank's heads of one layer's latent attention, without its projections: `Q` columns of
/// queries and of keys, `V` of values and of outputs.
pub struct LatentAttention<P: HeadPlacement, const Q: usize, const V: usize> {
    core: ops::Attention,
    placement: PhantomData<P>,
}

/// What the backward pass reads: queries, keys, values, output, and log-sum-exp.
pub type LatentSaved<'a, D, P, const R: usize, const Q: usize, const V: usize> = (
    &'a Tensor<D, P, R, Q>,
    &'a Tensor<D, P, R, Q>,
    &'a Tensor<D, P, R, V>,
    &'a Tensor<D, P, R, V>,
    &'a LogSumExp<D>,
);

/// Gradients of queries, keys and values.
pub type LatentGradients<D, P, const R: usize, const Q: usize, const V: usize> =
    (Tensor<D, P, R, Q>, Tensor<D, P, R, Q>, Tensor<D, P, R, V>);

const fn exchanges(one: usize, other: usize) {
    assert!(one == other, "an exchange of tokens for heads keeps the number of elements");
}

impl<P: HeadPlacement, const Q: usize, const V: usize> LatentAttention<P, Q, V> {
    /// Attention of these heads.
    ///
    /// # Panics
    /// Its heads do not have `Q` and `V` columns.
    #[track_caller]
    pub fn new(core: ops::Attention) -> Self {
        Self::behind(core, 1)
    }

    /// Attention of these heads, of which this rank has one of `ulysses` parts behind an exchange
    /// of tokens for heads.
    ///
    /// # Panics
    /// The part does not have `Q` and `V` columns.
    #[track_caller]
    pub fn behind(core: ops::Attention, ulysses: usize) -> Self {
        assert!(core.latent.is_some(), "latent attention says how its heads are made");
        assert!(core.heads == core.kv_heads, "each head of latent attention has its own keys");
        let columns = [core.head_dim, core.value_dim()].map(|dim| core.heads / ulysses * dim);
        assert!(columns == [Q, V], "heads have {columns:?} columns, not {:?}", [Q, V]);
        Self { core, placement: PhantomData }
    }

    /// Rotates the rotary part of queries by their positions.
    pub fn rotate<D: Device, const R: usize, const C: usize>(
        &self,
        ctx: &Context<'_, D>,
        q: Tensor<D, P, R, C>,
    ) -> Tensor<D, P, R, C> {
        q.changed(ctx, |q| self.core.rotate(ctx, q))
    }

    /// The backward pass of [`Self::rotate`].
    pub fn rotate_back<D: Device, const R: usize, const C: usize>(
        &self,
        ctx: &Context<'_, D>,
        dq: Tensor<D, P, R, C>,
    ) -> Tensor<D, P, R, C> {
        dq.changed(ctx, |dq| self.core.rotate_back(ctx, dq))
    }

    /// Rotates the part of keys that all heads share.
    pub fn rotate_shared<D: Device, const R: usize, const C: usize>(
        &self,
        ctx: &Context<'_, D>,
        rotary: Tensor<D, Whole, R, C>,
    ) -> Tensor<D, Whole, R, C> {
        rotary.changed(ctx, |rotary| self.core.rotate(ctx, rotary))
    }

    /// The backward pass of [`Self::rotate_shared`].
    pub fn rotate_shared_back<D: Device, const R: usize, const C: usize>(
        &self,
        ctx: &Context<'_, D>,
        drotary: Tensor<D, P::Sum, R, C>,
    ) -> Tensor<D, P::Sum, R, C> {
        drotary.changed(ctx, |drotary| self.core.rotate_back(ctx, drotary))
    }

    /// Keys and values, from what was projected up and the rotated part that all heads share.
    pub fn join<
        D: Device,
        const R: usize,
        const U: usize,
        const S: usize,
        const K: usize,
        const C: usize,
    >(
        &self,
        ctx: &Context<'_, D>,
        up: &Tensor<D, P, R, U>,
        rotary: &Tensor<D, Whole, R, S>,
    ) -> (Tensor<D, P, R, K>, Tensor<D, P, R, C>) {
        let [k, v] = self.core.join(ctx, up.buffer(), rotary.buffer());
        (Tensor::received(k), Tensor::received(v))
    }

    /// The backward pass of [`Self::join`]. That of the shared part is a sum over this rank's
    /// heads.
    #[allow(clippy::type_complexity)]
    pub fn split<
        D: Device,
        const R: usize,
        const K: usize,
        const C: usize,
        const U: usize,
        const S: usize,
    >(
        &self,
        ctx: &Context<'_, D>,
        dk: &Tensor<D, P, R, K>,
        dv: &Tensor<D, P, R, C>,
    ) -> (Tensor<D, P, R, U>, Tensor<D, P::Sum, R, S>) {
        let [dup, drotary] = self.core.split(ctx, dk.buffer(), dv.buffer());
        (Tensor::received(dup), Tensor::received(drotary))
    }

    /// Exchanges the queries or keys of this rank's tokens for those of fewer heads.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn queries_to_heads<D: Device, const R: usize, const C: usize, const B: usize>(
        &self,
        ctx: &Context<'_, D>,
        q: &Tensor<D, P, R, C>,
    ) -> Result<Tensor<D, P, B, Q>, CommError> {
        const { exchanges(R * C, B * Q) };
        self.core.to_heads(ctx, q.buffer(), self.core.heads).map(Tensor::received)
    }

    /// The same with values, or gradients of outputs.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn values_to_heads<D: Device, const R: usize, const C: usize, const B: usize>(
        &self,
        ctx: &Context<'_, D>,
        v: &Tensor<D, P, R, C>,
    ) -> Result<Tensor<D, P, B, V>, CommError> {
        const { exchanges(R * C, B * V) };
        self.core.to_heads(ctx, v.buffer(), self.core.heads).map(Tensor::received)
    }

    /// Exchanges back: gradients of queries or keys.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn queries_to_tokens<D: Device, const R: usize, const C: usize, const B: usize>(
        &self,
        ctx: &Context<'_, D>,
        dq: &Tensor<D, P, B, Q>,
    ) -> Result<Tensor<D, P, R, C>, CommError> {
        const { exchanges(R * C, B * Q) };
        self.core.to_tokens(ctx, dq.buffer(), self.core.heads).map(Tensor::received)
    }

    /// The same with outputs, or gradients of values.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn values_to_tokens<D: Device, const R: usize, const C: usize, const B: usize>(
        &self,
        ctx: &Context<'_, D>,
        a: &Tensor<D, P, B, V>,
    ) -> Result<Tensor<D, P, R, C>, CommError> {
        const { exchanges(R * C, B * V) };
        self.core.to_tokens(ctx, a.buffer(), self.core.heads).map(Tensor::received)
    }

    /// Output, and the log-sum-exp of each row's scores.
    pub fn forward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        q: &Tensor<D, P, R, Q>,
        k: &Tensor<D, P, R, Q>,
        v: &Tensor<D, P, R, V>,
    ) -> (Tensor<D, P, R, V>, LogSumExp<D>) {
        let (a, lse) = self.core.forward(ctx, q.buffer(), k.buffer(), v.buffer());
        (Tensor::received(a), LogSumExp(Rc::new(lse)))
    }

    /// [`Self::forward`], where other ranks have other keys and values of the same sequences.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn forward_around<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        q: &Tensor<D, P, R, Q>,
        k: &Tensor<D, P, R, Q>,
        v: &Tensor<D, P, R, V>,
    ) -> Result<(Tensor<D, P, R, V>, LogSumExp<D>), CommError> {
        let (a, lse) = self.core.forward_around(ctx, q.buffer(), k.buffer(), v.buffer())?;
        Ok((Tensor::received(a), LogSumExp(Rc::new(lse))))
    }

    /// The gradients of queries, keys and values, from that of the output.
    pub fn backward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        saved: LatentSaved<'_, D, P, R, Q, V>,
        da: &Tensor<D, P, R, V>,
    ) -> LatentGradients<D, P, R, Q, V> {
        let (q, k, v, a, lse) = saved;
        let (q, k, v, out) = (q.buffer(), k.buffer(), v.buffer(), a.buffer());
        let saved = AttentionSaved { q, k, v, out, lse: &lse.0 };
        let [dq, dk, dv] = self.core.backward(ctx, &saved, da.buffer());
        (Tensor::received(dq), Tensor::received(dk), Tensor::received(dv))
    }

    /// The backward pass of [`Self::forward_around`].
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn backward_around<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        saved: LatentSaved<'_, D, P, R, Q, V>,
        da: &Tensor<D, P, R, V>,
    ) -> Result<LatentGradients<D, P, R, Q, V>, CommError> {
        let (q, k, v, a, lse) = saved;
        let (q, k, v, out) = (q.buffer(), k.buffer(), v.buffer(), a.buffer());
        let saved = AttentionSaved { q, k, v, out, lse: &lse.0 };
        let [dq, dk, dv] = self.core.backward_around(ctx, &saved, da.buffer())?;
        Ok((Tensor::received(dq), Tensor::received(dk), Tensor::received(dv)))
    }
    /// Output of a chunk's queries, and the log-sum-exp of their scores. Queries, keys and values
    /// are those of all tokens.
    pub fn forward_chunk<D: Device, const R: usize, const PART: usize>(
        &self,
        ctx: &Context<'_, D>,
        chunk: Chunk,
        q: &Tensor<D, P, R, Q>,
        k: &Tensor<D, P, R, Q>,
        v: &Tensor<D, P, R, V>,
    ) -> (Tensor<D, P, PART, V>, LogSumExp<D>) {
        let (q, k, v) = (q.buffer(), k.buffer(), v.buffer());
        let (a, lse) = self.core.forward_chunk(ctx, chunk, q, k, v);
        (Tensor::received(a), LogSumExp(Rc::new(lse)))
    }

    /// Sums of the gradients of queries, keys and values over chunks, 0 so far.
    pub fn begin_sums<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        q: &Tensor<D, P, R, Q>,
        k: &Tensor<D, P, R, Q>,
        v: &Tensor<D, P, R, V>,
    ) -> AttentionSums<D, R> {
        AttentionSums(self.core.begin_sums(ctx, q.buffer(), k.buffer(), v.buffer()))
    }

    /// Adds the gradients of a chunk's queries, and their part in those of keys and values.
    #[allow(clippy::type_complexity)]
    pub fn add_to_sums<D: Device, const R: usize, const PART: usize>(
        &self,
        ctx: &Context<'_, D>,
        chunk: Chunk,
        (q, k, v, a, lse): (
            &Tensor<D, P, R, Q>,
            &Tensor<D, P, R, Q>,
            &Tensor<D, P, R, V>,
            &Tensor<D, P, PART, V>,
            &LogSumExp<D>,
        ),
        da: &Tensor<D, P, PART, V>,
        sums: AttentionSums<D, R>,
    ) -> AttentionSums<D, R> {
        let (q, k, v, out) = (q.buffer(), k.buffer(), v.buffer(), a.buffer());
        let saved = AttentionSaved { q, k, v, out, lse: &lse.0 };
        AttentionSums(self.core.add_to_sums(ctx, chunk, &saved, da.buffer(), sums.0))
    }

    /// The gradients of queries, keys and values.
    pub fn finish_sums<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        sums: AttentionSums<D, R>,
    ) -> LatentGradients<D, P, R, Q, V> {
        let [dq, dk, dv] = self.core.finish_sums(ctx, sums.0);
        (Tensor::received(dq), Tensor::received(dk), Tensor::received(dv))
    }
}
