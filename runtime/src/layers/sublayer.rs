//! What attention and the MLP have in common: the inside of half a layer.

use super::{Context, WeightWork};
use crate::device::Device;
use crate::state::buffer::Buffer;
use crate::state::params::SharedBuffer;

/// What tensor-parallel ranks share in half a layer: from the normed stream `[n, h]` to partial sums
/// of the output, `[n, h]`.
pub(super) trait Sublayer<D: Device> {
    /// What the backward pass of a micro-batch needs.
    type Kept: KeptActivations;
    /// What the work on weights reads, apart from the input.
    type Work;

    /// Everything up to the row-parallel matrix.
    fn forward(&self, ctx: &Context<'_, D>, h: &Buffer<D>) -> Self::Kept;

    /// The row-parallel matrix.
    fn project(&self, ctx: &Context<'_, D>, kept: &Self::Kept) -> Buffer<D>;

    /// Gradient of the input, a partial sum, from that of the output.
    fn backward(
        &self,
        ctx: &Context<'_, D>,
        kept: &Self::Kept,
        dy: &SharedBuffer<D>,
    ) -> (Buffer<D>, Self::Work);

    /// The work on weights, given the input.
    fn weights(&self, work: Self::Work, h: &SharedBuffer<D>) -> Vec<WeightWork<D>>;
}

/// What is kept for a backward pass.
pub(super) trait KeptActivations {
    /// Bytes held.
    fn bytes(&self) -> usize;

    /// Forgets what selective recomputation computes again.
    fn drop_cheap(&mut self);
}
