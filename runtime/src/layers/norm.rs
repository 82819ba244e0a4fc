//! RMSNorm and LayerNorm of the residual stream.

use super::placement::StreamPlacement;
use super::tensor::{Statistics, Stream, Tensor};
use crate::device::Device;
use crate::ops::{self, Context, NormKind, WeightWork};
use crate::state::params::Inventory;
use kernels::Output;
use std::marker::PhantomData;
use std::rc::Rc;

/// `x / rms(x) * w`, or `* (1 + w)`.
pub struct RmsKind;
/// `(x - mean(x)) / std(x) * w + b`
pub struct LayerKind;

/// A norm of rows of `C` columns. All ranks hold its parameters; where they have different rows,
/// its gradients are partial sums.
pub struct Norm<K, P: StreamPlacement, const C: usize> {
    norm: ops::Norm,
    kind: PhantomData<(K, P)>,
}

/// `x / rms(x) * w`, or `* (1 + w)`, over rows of `C` columns.
pub type RmsNorm<P, const C: usize> = Norm<RmsKind, P, C>;

/// `(x - mean(x)) / std(x) * w + b`, over rows of `C` columns.
pub type LayerNorm<P, const C: usize> = Norm<LayerKind, P, C>;

impl<P: StreamPlacement, const C: usize> RmsNorm<P, C> {
    /// Declares the norm of this name. `eps` is added to the mean of squares. With `unit_offset`
    /// weights count from 1 (Gemma).
    pub fn declare(name: &str, eps: f64, unit_offset: bool, inventory: &mut Inventory) -> Self {
        Self::of_kind(name, NormKind::Rms { eps, unit_offset }, inventory)
    }
}

impl<P: StreamPlacement, const C: usize> LayerNorm<P, C> {
    /// Declares the norm of this name. `eps` is added to the variance.
    pub fn declare(name: &str, eps: f64, inventory: &mut Inventory) -> Self {
        Self::of_kind(name, NormKind::Layer { eps }, inventory)
    }
}

impl<K, P: StreamPlacement, const C: usize> Norm<K, P, C> {
    fn of_kind(name: &str, kind: NormKind, inventory: &mut Inventory) -> Self {
        let norm = ops::Norm::declare(name, C, kind, P::SPLIT, inventory);
        Self { norm, kind: PhantomData }
    }

    /// The stream as one tensor, its norm, and statistics of the rows. A device with a kernel for
    /// both adds up the stream on the way.
    pub fn forward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        stream: Stream<D, P, R, C>,
    ) -> (Tensor<D, P, R, C>, Tensor<D, P, R, C>, Statistics<D>) {
        let (x, y, statistics) = self.norm.of(ctx, stream.residual);
        (Tensor::shared(x), Tensor::received(y), Statistics(Rc::new(statistics)))
    }

    /// The norm of `x`, and statistics of the rows.
    pub fn of<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        x: &Tensor<D, P, R, C>,
    ) -> (Tensor<D, P, R, C>, Statistics<D>) {
        let (y, statistics) = self.norm.forward(ctx, x.buffer());
        (Tensor::received(y), Statistics(Rc::new(statistics)))
    }

    /// The norm of `x`, computed again.
    pub fn again<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        x: &Tensor<D, P, R, C>,
    ) -> Tensor<D, P, R, C> {
        Tensor::received(self.norm.forward(ctx, x.buffer()).0)
    }

    /// The gradient of `x`, from that of its norm.
    pub fn backward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        x: &Tensor<D, P, R, C>,
        s: &Statistics<D>,
        dy: &Tensor<D, P, R, C>,
    ) -> Tensor<D, P, R, C> {
        let mut dx = ctx.buffer(R * C);
        let (x, dy) = (x.buffer(), dy.buffer());
        self.norm.backward_input(ctx, x, &s.0, dy, &mut dx, Output::Overwrite);
        Tensor::received(dx)
    }

    /// The gradient of `x`, added to `sum`.
    pub fn backward_onto<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        x: &Tensor<D, P, R, C>,
        s: &Statistics<D>,
        dy: &Tensor<D, P, R, C>,
        sum: Tensor<D, P, R, C>,
    ) -> Tensor<D, P, R, C> {
        let (x, dy) = (x.buffer(), dy.buffer());
        sum.changed(ctx, |sum| self.norm.backward_input(ctx, x, &s.0, dy, sum, Output::Accumulate))
    }

    /// The gradients of its parameters.
    pub fn weights<D: Device, const R: usize>(
        &self,
        x: &Tensor<D, P, R, C>,
        s: &Statistics<D>,
        dy: &Tensor<D, P, R, C>,
    ) -> WeightWork<D> {
        self.norm.weights(x.memory(), &s.0, dy.memory())
    }
}
