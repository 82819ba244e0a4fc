//! Collectives: nothing else changes a placement.

use super::placement::{Axis, Partial, PartialMax, Split, Tp, Whole};
use super::tensor::{Numbers, Tensor};
use crate::comm::{CommError, Op};
use crate::device::Device;
use crate::ops::{self, PassContext};
use std::marker::PhantomData;

/// The ranks of axis `A` that this rank communicates with.
pub struct Group<'a, D: Device, A> {
    ctx: &'a PassContext<'a, D>,
    axis: PhantomData<A>,
}

impl<'a, D: Device, const N: usize> Group<'a, D, Tp<N>> {
    /// The tensor-parallel ranks.
    ///
    /// # Panics
    /// There are not `N` of them.
    #[track_caller]
    pub fn tp(ctx: &'a PassContext<'_, D>) -> Self {
        let ranks = ctx.tp.size();
        assert!(N == ranks, "the program is compiled for Tp<{N}>, the group has {ranks} ranks");
        Self { ctx, axis: PhantomData }
    }
}

/// A collective in flight.
#[must_use = "a collective that nobody waits for may never finish"]
pub struct InFlight<'a, D: Device, P, const R: usize, const C: usize> {
    ctx: &'a PassContext<'a, D>,
    moving: ops::InFlight<D>,
    placement: PhantomData<P>,
}

impl<D: Device, P, const R: usize, const C: usize> InFlight<'_, D, P, R, C> {
    /// Waits for the result.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn wait(self) -> Result<Tensor<D, P, R, C>, CommError> {
        self.moving.wait(self.ctx).map(Tensor::received)
    }
}

// Each method checks rows itself: the compiler names the line that calls it.

const fn gathers(all_ranks: usize, result: usize) {
    assert!(result == all_ranks, "all_gather: the result must have the rows of all ranks");
}

const fn scatters(part: usize, all_ranks: usize) {
    assert!(part == all_ranks, "reduce_scatter: all ranks' rows must be those of the summands");
}

/// Each call reduces or gathers over all ranks of the axis, in the same order on all of them. What
/// is reduced is taken by value: it cannot be reduced twice.
///
/// Errors of all calls are those of any collective call.
#[allow(clippy::missing_errors_doc)]
impl<'a, D: Device, A: Axis> Group<'a, D, A> {
    fn started<P, const R: usize, const C: usize>(
        &self,
        moving: ops::InFlight<D>,
    ) -> InFlight<'a, D, P, R, C> {
        InFlight { ctx: self.ctx, moving, placement: PhantomData }
    }

    /// Gathers all ranks' rows: `[R, C] -> [F, C]`, `F = R * A::SIZE`.
    #[track_caller]
    pub fn all_gather<const R: usize, const C: usize, const F: usize>(
        &self,
        x: &Tensor<D, Split<A>, R, C>,
    ) -> Result<Tensor<D, Whole, F, C>, CommError> {
        const { gathers(R * A::SIZE, F) };
        self.ctx.all_gather(x.buffer()).map(Tensor::received)
    }

    /// Starts [`Self::all_gather`].
    #[track_caller]
    pub fn start_all_gather<const R: usize, const C: usize, const F: usize>(
        &self,
        x: &Tensor<D, Split<A>, R, C>,
    ) -> Result<InFlight<'a, D, Whole, F, C>, CommError> {
        const { gathers(R * A::SIZE, F) };
        self.ctx.start_all_gather(x.buffer()).map(|moving| self.started(moving))
    }

    /// Sums all ranks' parts; each gets its rows: `[F, C] -> [R, C]`, `F = R * A::SIZE`.
    #[track_caller]
    pub fn reduce_scatter<const F: usize, const C: usize, const R: usize>(
        &self,
        part: Tensor<D, Partial<A>, F, C>,
    ) -> Result<Tensor<D, Split<A>, R, C>, CommError> {
        const { scatters(F, R * A::SIZE) };
        let part = part.into_buffer(self.ctx);
        self.ctx.reduce_scatter(part).map(Tensor::received)
    }

    /// Starts [`Self::reduce_scatter`].
    #[track_caller]
    pub fn start_reduce_scatter<const F: usize, const C: usize, const R: usize>(
        &self,
        part: Tensor<D, Partial<A>, F, C>,
    ) -> Result<InFlight<'a, D, Split<A>, R, C>, CommError> {
        const { scatters(F, R * A::SIZE) };
        let part = part.into_buffer(self.ctx);
        self.ctx.start_reduce_scatter(part).map(|moving| self.started(moving))
    }

    /// Sums all ranks' parts: `[R, C] -> [R, C]`.
    #[track_caller]
    pub fn all_reduce<const R: usize, const C: usize>(
        &self,
        part: Tensor<D, Partial<A>, R, C>,
    ) -> Result<Tensor<D, Whole, R, C>, CommError> {
        self.start_all_reduce(part)?.wait()
    }

    /// Starts [`Self::all_reduce`].
    #[track_caller]
    pub fn start_all_reduce<const R: usize, const C: usize>(
        &self,
        part: Tensor<D, Partial<A>, R, C>,
    ) -> Result<InFlight<'a, D, Whole, R, C>, CommError> {
        let part = part.into_buffer(self.ctx);
        self.ctx.start_all_reduce(part).map(|moving| self.started(moving))
    }

    /// Sums all ranks' numbers.
    #[track_caller]
    pub fn sum<const R: usize>(
        &self,
        part: Numbers<D, Partial<A>, R>,
    ) -> Result<Numbers<D, Whole, R>, CommError> {
        self.ctx.all_reduce_rows(part.into_buffer(self.ctx), Op::Sum).map(Numbers::new)
    }

    /// The largest of all ranks' numbers.
    #[track_caller]
    pub fn max<const R: usize>(
        &self,
        part: Numbers<D, PartialMax<A>, R>,
    ) -> Result<Numbers<D, Whole, R>, CommError> {
        self.ctx.all_reduce_rows(part.into_buffer(self.ctx), Op::Max).map(Numbers::new)
    }
}
