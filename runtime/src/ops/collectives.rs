//! Collectives of the tensor-parallel ranks. Nothing else changes how a tensor is placed.
//!
//! Two conjugate operators connect the residual stream with split work (Megatron's f and g, Shoeybi
//! et al. 2019, section 3; with sequence parallelism g-bar, Korthikanti et al. 2022, section 4.2).
//! Without sequence parallelism they are nothing and an all-reduce, with it an all-gather and a
//! reduce-scatter. Each is the backward pass of the other.

use super::PassContext;
use crate::comm::{CommError, Op};
use crate::device::{Device, DeviceGroup, DeviceRequest};
use crate::state::buffer::{Buffer, WideBuffer};

/// A collective in flight. Its input cannot be touched until it is done.
#[must_use = "a collective that nobody waits for may never finish"]
pub struct InFlight<D: Device>(DeviceRequest<D, D::Stored>);

impl<D: Device> InFlight<D> {
    /// Waits for the result.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn wait(self, ctx: &PassContext<'_, D>) -> Result<Buffer<D>, CommError> {
        self.0.wait(ctx.device).map(|memory| ctx.pools.stored.adopt(memory))
    }
}

/// Errors of all operations are those of any collective call.
#[allow(clippy::missing_errors_doc)]
impl<D: Device> PassContext<'_, D> {
    fn group(&self) -> DeviceGroup<'_, D> {
        DeviceGroup::new(self.device, self.tp)
    }

    /// Starts gathering all ranks' rows: `[r, w] -> [n, w]`.
    #[track_caller]
    pub fn start_all_gather(&self, x: &Buffer<D>) -> Result<InFlight<D>, CommError> {
        self.group().start_all_gather(self.copy_of(x).into_memory()).map(InFlight)
    }

    /// Gathers all ranks' rows: `[r, w] -> [n, w]`.
    #[track_caller]
    pub fn all_gather(&self, x: &Buffer<D>) -> Result<Buffer<D>, CommError> {
        self.start_all_gather(x)?.wait(self)
    }

    /// Starts summing all ranks' parts; each gets its rows: `[n, w] -> [r, w]`.
    #[track_caller]
    pub fn start_reduce_scatter(&self, part: Buffer<D>) -> Result<InFlight<D>, CommError> {
        self.group().start_reduce_scatter(part.into_memory(), Op::Sum).map(InFlight)
    }

    /// Sums all ranks' parts; each gets its rows: `[n, w] -> [r, w]`.
    #[track_caller]
    pub fn reduce_scatter(&self, part: Buffer<D>) -> Result<Buffer<D>, CommError> {
        self.start_reduce_scatter(part)?.wait(self)
    }

    /// Starts summing all ranks' parts: `[n, w] -> [n, w]`.
    #[track_caller]
    pub fn start_all_reduce(&self, part: Buffer<D>) -> Result<InFlight<D>, CommError> {
        self.group().start_all_reduce(part.into_memory(), Op::Sum).map(InFlight)
    }

    /// Sums all ranks' parts: `[n, w] -> [n, w]`.
    #[track_caller]
    pub fn all_reduce(&self, part: Buffer<D>) -> Result<Buffer<D>, CommError> {
        self.start_all_reduce(part)?.wait(self)
    }

    /// Combines all ranks' numbers for each row, `[n]`.
    #[track_caller]
    pub fn all_reduce_rows(&self, part: WideBuffer<D>, op: Op) -> Result<WideBuffer<D>, CommError> {
        let all = self.group().all_reduce(part.into_memory(), op)?;
        Ok(self.pools.wide.adopt(all))
    }
}
