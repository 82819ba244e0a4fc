//! Self-attention over this rank's heads, without its projections.

use super::placement::HeadPlacement;
use super::tensor::{LogSumExp, Tensor};
use crate::device::Device;
use crate::ops::{self, AttentionSaved, Context};
use std::marker::PhantomData;
use std::rc::Rc;

/// One rank's heads of one layer's attention: `Q` columns of queries, `KV` of keys and of values.
pub struct Attention<P: HeadPlacement, const Q: usize, const KV: usize> {
    core: ops::Attention,
    placement: PhantomData<P>,
}

/// What the backward pass reads: queries, keys, values, output, and log-sum-exp.
pub type Saved<'a, D, P, const R: usize, const Q: usize, const KV: usize> = (
    &'a Tensor<D, P, R, Q>,
    &'a Tensor<D, P, R, KV>,
    &'a Tensor<D, P, R, KV>,
    &'a Tensor<D, P, R, Q>,
    &'a LogSumExp<D>,
);

impl<P: HeadPlacement, const Q: usize, const KV: usize> Attention<P, Q, KV> {
    /// Attention of these heads.
    ///
    /// # Panics
    /// Its heads do not have `Q` and `KV` columns.
    #[track_caller]
    pub fn new(core: ops::Attention) -> Self {
        let columns = [core.heads, core.kv_heads].map(|heads| heads * core.head_dim);
        assert!(columns == [Q, KV], "heads have {columns:?} columns, not {:?}", [Q, KV]);
        Self { core, placement: PhantomData }
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

    /// Output, and the log-sum-exp of each row's scores.
    pub fn forward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        q: &Tensor<D, P, R, Q>,
        k: &Tensor<D, P, R, KV>,
        v: &Tensor<D, P, R, KV>,
    ) -> (Tensor<D, P, R, Q>, LogSumExp<D>) {
        let (a, lse) = self.core.forward(ctx, q.buffer(), k.buffer(), v.buffer());
        (Tensor::received(a), LogSumExp(Rc::new(lse)))
    }

    /// The gradients of queries, keys and values, from that of the output.
    #[allow(clippy::type_complexity)]
    pub fn backward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        saved: Saved<'_, D, P, R, Q, KV>,
        da: &Tensor<D, P, R, Q>,
    ) -> (Tensor<D, P, R, Q>, Tensor<D, P, R, KV>, Tensor<D, P, R, KV>) {
        let (q, k, v, a, lse) = saved;
        let (q, k, v, out) = (q.buffer(), k.buffer(), v.buffer(), a.buffer());
        let saved = AttentionSaved { q, k, v, out, lse: &lse.0 };
        let [dq, dk, dv] = self.core.backward(ctx, &saved, da.buffer());
        (Tensor::received(dq), Tensor::received(dk), Tensor::received(dv))
    }
}
