//! What attention and the feed-forward block have in common.

use super::{Context, WeightWork};
use crate::device::Device;
use crate::state::buffer::Buffer;
use crate::state::params::SharedBuffer;

/// The split part of half a layer: from the normed stream `[n, h]` to partial sums of the output,
/// `[n, h]`.
pub(super) trait Sublayer<D: Device> {
    /// What the backward pass of a micro-batch needs.
    type Kept: KeptActivations;
    /// Input of the weight gradients, apart from the sublayer's input.
    type Work;

    /// Everything before the row-parallel matrix.
    fn forward(&self, ctx: &Context<'_, D>, h: &Buffer<D>) -> Self::Kept;

    /// The row-parallel matrix.
    fn project(&self, ctx: &Context<'_, D>, kept: &Self::Kept) -> Buffer<D>;

    /// Gradient of the input, a partial sum, from the gradient of the output.
    fn backward(
        &self,
        ctx: &Context<'_, D>,
        kept: &Self::Kept,
        dy: &SharedBuffer<D>,
    ) -> (Buffer<D>, Self::Work);

    /// The weight gradients, given the input.
    fn weights(&self, work: Self::Work, h: &SharedBuffer<D>) -> Vec<WeightWork<D>>;
}

/// Activations kept for a backward pass.
pub(super) trait KeptActivations {
    /// Bytes held.
    fn bytes(&self) -> usize;

    /// Drops what selective recomputation computes again.
    fn drop_cheap(&mut self);
}
