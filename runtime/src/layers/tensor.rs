//! Tensors and numbers of one rank, with their placement in the type.

use super::placement::StreamPlacement;
use crate::device::{Device, Space};
use crate::device_error::DeviceError;
use crate::ops::{Chunk, PassContext, Residual, Statistics as RowStatistics};
use crate::stages::{Held, Offloaded, Shared};
use crate::state::buffer::{Buffer, WideBuffer};
use crate::state::params::SharedBuffer;
use std::marker::PhantomData;
use std::rc::Rc;

/// A matrix as one rank holds it: `R` rows and `C` columns, placed as `P` says.
#[must_use]
pub struct Tensor<D: Space, P, const R: usize, const C: usize> {
    buffer: SharedBuffer<D>,
    placement: PhantomData<P>,
}

impl<D: Space, P, const R: usize, const C: usize> Tensor<D, P, R, C> {
    /// What arrived as a buffer: from another stage, or from an operation without types.
    ///
    /// # Panics
    /// The buffer does not have `R * C` elements.
    #[track_caller]
    pub fn received(buffer: Buffer<D>) -> Self {
        Self::shared(Rc::new(buffer))
    }

    #[track_caller]
    pub(super) fn shared(buffer: SharedBuffer<D>) -> Self {
        let (len, expected) = (buffer.len(), R * C);
        assert!(len == expected, "a tensor of {R} x {C} has {expected} elements, not {len}");
        Self { buffer, placement: PhantomData }
    }

    /// Another handle of the same memory.
    pub fn share(&self) -> Self {
        Self { buffer: self.buffer.clone(), placement: PhantomData }
    }

    /// Bytes held, shared or not.
    pub fn bytes(&self) -> usize {
        self.buffer.bytes()
    }

    /// Its elements, row by row.
    pub fn buffer(&self) -> &Buffer<D> {
        &self.buffer
    }

    pub(super) fn memory(&self) -> &SharedBuffer<D> {
        &self.buffer
    }
}

impl<D: Device, P, const R: usize, const C: usize> Tensor<D, P, R, C> {
    /// Its buffer; a copy if others share it.
    pub fn into_buffer(self, ctx: &PassContext<'_, D>) -> Buffer<D> {
        ctx.own(self.buffer)
    }

    /// The rows of a chunk.
    pub fn chunk<const PART: usize>(
        &self,
        ctx: &PassContext<'_, D>,
        chunk: Chunk,
    ) -> Tensor<D, P, PART, C> {
        Tensor::received(ctx.chunk_of(&self.buffer, chunk))
    }

    /// The rows of all chunks, one after the other.
    pub fn joined<const PART: usize>(
        ctx: &PassContext<'_, D>,
        parts: &[&Tensor<D, P, PART, C>],
    ) -> Self {
        let parts: Vec<&Buffer<D>> = parts.iter().map(|part| part.buffer()).collect();
        Self::received(ctx.joined(&parts))
    }

    /// `self + y`, in its own place.
    pub fn add(self, ctx: &PassContext<'_, D>, y: &Self) -> Self {
        self.changed(ctx, |x| ctx.device.add(y.buffer().view(), x.view_mut()))
    }

    /// Works in place, on a copy if others share it.
    pub(super) fn changed(
        self,
        ctx: &PassContext<'_, D>,
        work: impl FnOnce(&mut Buffer<D>),
    ) -> Self {
        let mut buffer = self.into_buffer(ctx);
        work(&mut buffer);
        Self::received(buffer)
    }
}

/// A number for each of `R` tokens, placed as `P` says.
#[must_use]
pub struct Numbers<D: Space, P, const R: usize> {
    buffer: Rc<WideBuffer<D>>,
    placement: PhantomData<P>,
}

impl<D: Space, P, const R: usize> Numbers<D, P, R> {
    #[track_caller]
    pub(super) fn new(buffer: WideBuffer<D>) -> Self {
        let len = buffer.len();
        assert!(len == R, "there is a number for each of {R} tokens, not {len}");
        Self { buffer: Rc::new(buffer), placement: PhantomData }
    }

    /// Another handle of the same memory.
    pub fn share(&self) -> Self {
        Self { buffer: self.buffer.clone(), placement: PhantomData }
    }

    /// Bytes held, shared or not.
    pub fn bytes(&self) -> usize {
        self.buffer.bytes()
    }

    pub(super) fn buffer(&self) -> &WideBuffer<D> {
        &self.buffer
    }
}

impl<D: Device, P, const R: usize> Numbers<D, P, R> {
    pub(super) fn into_buffer(self, ctx: &PassContext<'_, D>) -> WideBuffer<D> {
        let copy = |shared: Rc<_>| ctx.pools.wide.copy_of(ctx.device, &shared);
        Rc::try_unwrap(self.buffer).unwrap_or_else(copy)
    }
}

impl<D: Device, const R: usize> Numbers<D, super::Whole, R> {
    /// The tokens' losses, `[n]`, for [`crate::stages::StageOutput::Losses`].
    pub fn into_losses(self, ctx: &PassContext<'_, D>) -> WideBuffer<D> {
        self.into_buffer(ctx)
    }
}

/// Statistics of a norm's rows, for its backward pass.
#[must_use]
pub struct Statistics<D: Space>(pub(super) Rc<RowStatistics<D>>);

impl<D: Space> Statistics<D> {
    /// Another handle of the same memory.
    pub fn share(&self) -> Self {
        Self(self.0.clone())
    }

    /// Bytes held, shared or not.
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }
}

/// The log-sum-exp of attention's scores, `[n, heads]`, for its backward pass.
#[must_use]
pub struct LogSumExp<D: Space>(pub(super) Rc<WideBuffer<D>>);

impl<D: Space> LogSumExp<D> {
    /// Another handle of the same memory.
    pub fn share(&self) -> Self {
        Self(self.0.clone())
    }

    /// Bytes held, shared or not.
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }
}

/// The residual stream. Its last sum is computed by the norm that follows, on the way.
#[must_use]
pub struct Stream<D: Space, P: StreamPlacement, const R: usize, const C: usize> {
    pub(super) residual: Residual<D>,
    placement: PhantomData<P>,
}

impl<D: Space, P: StreamPlacement, const R: usize, const C: usize> Stream<D, P, R, C> {
    /// The stream is `x`.
    pub fn begin(x: Tensor<D, P, R, C>) -> Self {
        Self { residual: Residual::Whole(x.buffer), placement: PhantomData }
    }

    /// The stream is `x + branch`.
    pub fn sum(x: &Tensor<D, P, R, C>, branch: Tensor<D, P, R, C>) -> Self {
        let residual = Residual::Split(x.buffer.clone(), branch.buffer);
        Self { residual, placement: PhantomData }
    }
}

impl<D: Device, P: StreamPlacement, const R: usize, const C: usize> Stream<D, P, R, C> {
    /// The stream as one tensor.
    pub fn whole(self, ctx: &PassContext<'_, D>) -> Tensor<D, P, R, C> {
        match self.residual {
            Residual::Whole(x) => Tensor::shared(x),
            sum @ Residual::Split(..) => Tensor::received(sum.whole(ctx)),
        }
    }
}

impl<D: Device, P: StreamPlacement, const R: usize, const C: usize> Shared<D>
    for Stream<D, P, R, C>
{
    fn twice(self, ctx: &PassContext<'_, D>) -> [Self; 2] {
        let x = self.whole(ctx);
        [Self::begin(x.share()), Self::begin(x)]
    }
}

impl<D: Space, P: StreamPlacement, const R: usize, const C: usize> Held for Stream<D, P, R, C> {
    fn bytes(&self) -> usize {
        match &self.residual {
            Residual::Whole(x) => x.bytes(),
            Residual::Split(x, branch) => x.bytes() + branch.bytes(),
        }
    }
}

impl<D: Space, P, const R: usize, const C: usize> Held for Tensor<D, P, R, C> {
    fn bytes(&self) -> usize {
        Self::bytes(self)
    }
}

impl<D: Space, P, const R: usize> Held for Numbers<D, P, R> {
    fn bytes(&self) -> usize {
        Self::bytes(self)
    }
}

impl<D: Space> Held for Statistics<D> {
    fn bytes(&self) -> usize {
        Self::bytes(self)
    }
}

impl<D: Space> Held for LogSumExp<D> {
    fn bytes(&self) -> usize {
        Self::bytes(self)
    }
}

impl<D: Space, P, const R: usize, const C: usize> Offloaded<D> for Tensor<D, P, R, C> {
    fn offload(&mut self, device: &D) -> Result<(), DeviceError> {
        self.buffer.offload(device)
    }

    fn reload(&mut self, device: &D) {
        self.buffer.reload(device);
    }
}

impl<D: Space, P, const R: usize> Offloaded<D> for Numbers<D, P, R> {
    fn offload(&mut self, device: &D) -> Result<(), DeviceError> {
        self.buffer.offload(device)
    }

    fn reload(&mut self, device: &D) {
        self.buffer.reload(device);
    }
}

impl<D: Space> Offloaded<D> for Statistics<D> {
    fn offload(&mut self, device: &D) -> Result<(), DeviceError> {
        self.0.offload(device)
    }

    fn reload(&mut self, device: &D) {
        self.0.reload(device);
    }
}

impl<D: Space> Offloaded<D> for LogSumExp<D> {
    fn offload(&mut self, device: &D) -> Result<(), DeviceError> {
        self.0.offload(device)
    }

    fn reload(&mut self, device: &D) {
        self.0.reload(device);
    }
}

impl<D: Space, P: StreamPlacement, const R: usize, const C: usize> Offloaded<D>
    for Stream<D, P, R, C>
{
    fn offload(&mut self, device: &D) -> Result<(), DeviceError> {
        match &mut self.residual {
            Residual::Whole(x) => x.offload(device),
            Residual::Split(x, branch) => {
                x.offload(device)?;
                branch.offload(device)
            }
        }
    }

    fn reload(&mut self, device: &D) {
        match &mut self.residual {
            Residual::Whole(x) => x.reload(device),
            Residual::Split(x, branch) => {
                x.reload(device);
                branch.reload(device);
            }
        }
    }
}
