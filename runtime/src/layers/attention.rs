//! Self-attention over this rank's heads, without its projections.

use super::placement::{Cp, HeadPlacement, Split, TokenPlacement, Whole};
use super::tensor::{LogSumExp, Tensor};
use crate::comm::CommError;
use crate::device::Device;
use crate::ops::{self, AttentionSaved, Chunk, Context, WeightWork};
use std::marker::PhantomData;
use std::rc::Rc;

/// One rank's heads of one layer's attention: `Q` columns of queries, `K` of keys, `V` of values
/// and `O` of outputs. `T` says whether this rank has all tokens of its sequences.
pub struct AttentionCore<
    P: HeadPlacement,
    const Q: usize,
    const K: usize,
    const V: usize,
    const O: usize,
    T: TokenPlacement = Whole,
> {
    pub(super) core: ops::Attention,
    placement: PhantomData<(P, T)>,
}

/// Attention whose heads of queries, keys and values are equally wide: `Q` columns of queries,
/// `KV` of keys and of values.
pub type Attention<P, const Q: usize, const KV: usize, T = Whole> =
    AttentionCore<P, Q, KV, KV, Q, T>;

/// Sums over chunks of the gradients of queries, keys and values of `R` tokens.
#[must_use]
pub struct AttentionSums<D: Device, const R: usize>(ops::AttentionSums<D>);

/// What the backward pass reads: queries, keys and values of `R` tokens, output and log-sum-exp of
/// `PART` of them.
pub type Saved<
    'a,
    D,
    P,
    const R: usize,
    const PART: usize,
    const Q: usize,
    const K: usize,
    const V: usize,
    const O: usize,
> = (
    &'a Tensor<D, P, R, Q>,
    &'a Tensor<D, P, R, K>,
    &'a Tensor<D, P, R, V>,
    &'a Tensor<D, P, PART, O>,
    &'a LogSumExp<D>,
);

/// Gradients of queries, keys and values.
pub type HeadGradients<D, P, const R: usize, const Q: usize, const K: usize, const V: usize> =
    (Tensor<D, P, R, Q>, Tensor<D, P, R, K>, Tensor<D, P, R, V>);

const fn exchanges(one: usize, other: usize) {
    assert!(one == other, "an exchange of tokens for heads keeps the number of elements");
}

impl<
    P: HeadPlacement,
    const Q: usize,
    const K: usize,
    const V: usize,
    const O: usize,
    T: TokenPlacement,
> AttentionCore<P, Q, K, V, O, T>
{
    /// Attention of these heads.
    ///
    /// # Panics
    /// Its heads have other columns.
    #[track_caller]
    pub fn new(core: ops::Attention) -> Self {
        Self::behind(core, 1)
    }

    /// Attention of these heads, of which this rank has one of `ulysses` parts behind an exchange
    /// of tokens for heads.
    ///
    /// # Panics
    /// The part has other columns.
    #[track_caller]
    pub fn behind(core: ops::Attention, ulysses: usize) -> Self {
        let columns = core.columns_behind(ulysses);
        assert!(columns == [Q, K, V, O], "heads have {columns:?} columns, not {:?}", [Q, K, V, O]);
        Self { core, placement: PhantomData }
    }

    /// The gradient of the sinks, from the output of `R` queries, its log-sum-exp and its
    /// gradient.
    ///
    /// # Panics
    /// There are no sinks.
    #[track_caller]
    pub fn sink_weights<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        chunk: Option<Chunk>,
        (a, lse): (&Tensor<D, P, R, O>, &LogSumExp<D>),
        da: &Tensor<D, P, R, O>,
    ) -> WeightWork<D> {
        self.core.sink_weights(ctx, chunk, (a.buffer(), &lse.0), da.buffer())
    }

    /// Exchanges the queries of this rank's tokens for those of fewer heads.
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

    /// The same with keys. If there are fewer heads than ranks, ranks get copies.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn keys_to_heads<D: Device, const R: usize, const C: usize, const B: usize>(
        &self,
        ctx: &Context<'_, D>,
        k: &Tensor<D, P, R, C>,
    ) -> Result<Tensor<D, P, B, K>, CommError> {
        self.core.to_heads(ctx, k.buffer(), self.core.kv_heads).map(Tensor::received)
    }

    /// The same with values.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn values_to_heads<D: Device, const R: usize, const C: usize, const B: usize>(
        &self,
        ctx: &Context<'_, D>,
        v: &Tensor<D, P, R, C>,
    ) -> Result<Tensor<D, P, B, V>, CommError> {
        self.core.to_heads(ctx, v.buffer(), self.core.kv_heads).map(Tensor::received)
    }

    /// Exchanges back: outputs, or gradients of queries.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn queries_to_tokens<D: Device, const R: usize, const C: usize, const B: usize>(
        &self,
        ctx: &Context<'_, D>,
        a: &Tensor<D, P, B, Q>,
    ) -> Result<Tensor<D, P, R, C>, CommError> {
        const { exchanges(R * C, B * Q) };
        self.core.to_tokens(ctx, a.buffer(), self.core.heads).map(Tensor::received)
    }

    /// The same with gradients of keys. Those of copies are summed.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn keys_to_tokens<D: Device, const R: usize, const C: usize, const B: usize>(
        &self,
        ctx: &Context<'_, D>,
        dk: &Tensor<D, P, B, K>,
    ) -> Result<Tensor<D, P, R, C>, CommError> {
        self.core.to_tokens(ctx, dk.buffer(), self.core.kv_heads).map(Tensor::received)
    }

    /// The same with gradients of values.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn values_to_tokens<D: Device, const R: usize, const C: usize, const B: usize>(
        &self,
        ctx: &Context<'_, D>,
        dv: &Tensor<D, P, B, V>,
    ) -> Result<Tensor<D, P, R, C>, CommError> {
        self.core.to_tokens(ctx, dv.buffer(), self.core.kv_heads).map(Tensor::received)
    }

    /// Rotates queries or keys by their positions.
    pub fn rotate<D: Device, const R: usize, const C: usize>(
        &self,
        ctx: &Context<'_, D>,
        x: Tensor<D, P, R, C>,
    ) -> Tensor<D, P, R, C> {
        x.changed(ctx, |x| self.core.rotate(ctx, x))
    }

    /// The backward pass of [`Self::rotate`].
    pub fn rotate_back<D: Device, const R: usize, const C: usize>(
        &self,
        ctx: &Context<'_, D>,
        dx: Tensor<D, P, R, C>,
    ) -> Tensor<D, P, R, C> {
        dx.changed(ctx, |dx| self.core.rotate_back(ctx, dx))
    }

    /// Output of a chunk's queries, and the log-sum-exp of their scores. Queries, keys and values
    /// are those of all tokens.
    pub fn forward_chunk<D: Device, const R: usize, const PART: usize>(
        &self,
        ctx: &Context<'_, D>,
        chunk: Chunk,
        q: &Tensor<D, P, R, Q>,
        k: &Tensor<D, P, R, K>,
        v: &Tensor<D, P, R, V>,
    ) -> (Tensor<D, P, PART, O>, LogSumExp<D>) {
        let (q, k, v) = (q.buffer(), k.buffer(), v.buffer());
        let (a, lse) = self.core.forward_chunk(ctx, chunk, q, k, v);
        (Tensor::received(a), LogSumExp(Rc::new(lse)))
    }

    /// Sums of the gradients of queries, keys and values over chunks, 0 so far.
    pub fn begin_sums<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        q: &Tensor<D, P, R, Q>,
        k: &Tensor<D, P, R, K>,
        v: &Tensor<D, P, R, V>,
    ) -> AttentionSums<D, R> {
        AttentionSums(self.core.begin_sums(ctx, q.buffer(), k.buffer(), v.buffer()))
    }

    /// Adds the gradients of a chunk's queries, and their part in those of keys and values.
    pub fn add_to_sums<D: Device, const R: usize, const PART: usize>(
        &self,
        ctx: &Context<'_, D>,
        chunk: Chunk,
        (q, k, v, a, lse): Saved<'_, D, P, R, PART, Q, K, V, O>,
        da: &Tensor<D, P, PART, O>,
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
    ) -> HeadGradients<D, P, R, Q, K, V> {
        let [dq, dk, dv] = self.core.finish_sums(ctx, sums.0);
        (Tensor::received(dq), Tensor::received(dk), Tensor::received(dv))
    }
}

impl<P: HeadPlacement, const Q: usize, const K: usize, const V: usize, const O: usize>
    AttentionCore<P, Q, K, V, O>
{
    /// Output, and the log-sum-exp of each row's scores.
    pub fn forward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        q: &Tensor<D, P, R, Q>,
        k: &Tensor<D, P, R, K>,
        v: &Tensor<D, P, R, V>,
    ) -> (Tensor<D, P, R, O>, LogSumExp<D>) {
        let (a, lse) = self.core.forward(ctx, q.buffer(), k.buffer(), v.buffer());
        (Tensor::received(a), LogSumExp(Rc::new(lse)))
    }

    /// The gradients of queries, keys and values, from that of the output.
    pub fn backward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        saved: Saved<'_, D, P, R, R, Q, K, V, O>,
        da: &Tensor<D, P, R, O>,
    ) -> HeadGradients<D, P, R, Q, K, V> {
        let (q, k, v, a, lse) = saved;
        let (q, k, v, out) = (q.buffer(), k.buffer(), v.buffer(), a.buffer());
        let saved = AttentionSaved { q, k, v, out, lse: &lse.0 };
        let [dq, dk, dv] = self.core.backward(ctx, &saved, da.buffer());
        (Tensor::received(dq), Tensor::received(dk), Tensor::received(dv))
    }
}

impl<
    P: HeadPlacement,
    const Q: usize,
    const K: usize,
    const V: usize,
    const O: usize,
    const N: usize,
> AttentionCore<P, Q, K, V, O, Split<Cp<N>>>
{
    /// Output, and the log-sum-exp of each row's scores, where other ranks have other keys and
    /// values of the same sequences.
    ///
    /// # Errors
    /// Those of any collective call.
    ///
    /// # Panics
    /// Not `N` ranks exchange keys and values.
    #[track_caller]
    pub fn forward_around<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        q: &Tensor<D, P, R, Q>,
        k: &Tensor<D, P, R, K>,
        v: &Tensor<D, P, R, V>,
    ) -> Result<(Tensor<D, P, R, O>, LogSumExp<D>), CommError> {
        let ranks = ctx.cp.ring.size();
        assert!(ranks == N, "{ranks} ranks exchange keys and values, not {N}");
        let (a, lse) = self.core.forward_around(ctx, q.buffer(), k.buffer(), v.buffer())?;
        Ok((Tensor::received(a), LogSumExp(Rc::new(lse))))
    }

    /// The backward pass of [`Self::forward_around`].
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn backward_around<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        saved: Saved<'_, D, P, R, R, Q, K, V, O>,
        da: &Tensor<D, P, R, O>,
    ) -> Result<HeadGradients<D, P, R, Q, K, V>, CommError> {
        let (q, k, v, a, lse) = saved;
        let (q, k, v, out) = (q.buffer(), k.buffer(), v.buffer(), a.buffer());
        let saved = AttentionSaved { q, k, v, out, lse: &lse.0 };
        let [dq, dk, dv] = self.core.backward_around(ctx, &saved, da.buffer())?;
        Ok((Tensor::received(dq), Tensor::received(dk), Tensor::received(dv)))
    }
}
