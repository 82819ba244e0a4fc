//! RMSNorm of each head of queries or keys (Qwen 3).

use super::placement::HeadPlacement;
use super::tensor::{Statistics, Tensor};
use crate::device::Device;
use crate::ops::{self, Context, NormKind, WeightWork};
use crate::state::params::Inventory;
use kernels::Output;
use std::marker::PhantomData;
use std::rc::Rc;

/// `x / rms(x) * w` over the `H` columns of each head. All heads and ranks have the same weights;
/// ranks have different heads, so gradients are partial sums.
pub struct HeadNorm<P: HeadPlacement, const H: usize> {
    norm: ops::Norm,
    placement: PhantomData<P>,
}

impl<P: HeadPlacement, const H: usize> HeadNorm<P, H> {
    /// Declares the norm of this name. `eps` is added to the mean of squares.
    pub fn declare(name: &str, eps: f64, inventory: &mut Inventory) -> Self {
        let (kind, split) = (NormKind::Rms { eps, unit_offset: false }, inventory.tp() > 1);
        let norm = ops::Norm::declare(name, H, kind, split, inventory);
        Self { norm, placement: PhantomData }
    }

    /// The norm of each head, and statistics of the heads.
    pub fn of<D: Device, const R: usize, const C: usize>(
        &self,
        ctx: &Context<'_, D>,
        x: &Tensor<D, P, R, C>,
    ) -> (Tensor<D, P, R, C>, Statistics<D>) {
        const { assert!(C.is_multiple_of(H), "columns are whole heads") };
        let (y, statistics) = self.norm.forward(ctx, x.buffer());
        (Tensor::received(y), Statistics(Rc::new(statistics)))
    }

    /// The same where statistics are known.
    pub fn again<D: Device, const R: usize, const C: usize>(
        &self,
        ctx: &Context<'_, D>,
        x: &Tensor<D, P, R, C>,
    ) -> Tensor<D, P, R, C> {
        self.of(ctx, x).0
    }

    /// The gradient of the input.
    pub fn backward<D: Device, const R: usize, const C: usize>(
        &self,
        ctx: &Context<'_, D>,
        x: &Tensor<D, P, R, C>,
        statistics: &Statistics<D>,
        dy: &Tensor<D, P, R, C>,
    ) -> Tensor<D, P, R, C> {
        let mut dx = ctx.buffer(x.buffer().len());
        let (x, dy) = (x.buffer(), dy.buffer());
        self.norm.backward_input(ctx, x, &statistics.0, dy, &mut dx, Output::Overwrite);
        Tensor::received(dx)
    }

    /// The gradient of the weights.
    pub fn weights<D: Device, const R: usize, const C: usize>(
        &self,
        x: &Tensor<D, P, R, C>,
        statistics: &Statistics<D>,
        dy: &Tensor<D, P, R, C>,
    ) -> WeightWork<D> {
        self.norm.weights(x.memory(), &statistics.0, dy.memory())
    }
}
