//! Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).
//!
//! Every rank has the latent vectors of all tokens, and projects them up to its own heads. So
//! gradients of latent vectors are partial sums over the ranks. What comes before is linear in
//! these gradients: norm, down-projection and rotation pass partial sums on, and the layer's input
//! gradient is reduced once, as that of any attention.

use super::attention::AttentionCore;
use super::linear::{FromRows, FusedRows, sealed};
use super::placement::{GradientPlacement, HeadPlacement, TokenPlacement, Whole};
use super::tensor::{Statistics, Tensor};
use crate::device::Device;
use crate::ops::{self, Context, Matrix, NormKind, WeightWork};
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

/// Latent attention, without its projections: `Q` columns of queries and of keys, `V` of values
/// and of outputs.
pub type LatentAttention<P, const Q: usize, const V: usize, T = Whole> =
    AttentionCore<P, Q, Q, V, V, T>;

impl<P: HeadPlacement, const Q: usize, const V: usize, T: TokenPlacement>
    LatentAttention<P, Q, V, T>
{
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
}
