//! A mixture of experts: the router, what goes to the experts and back, and their matrices.
//!
//! [`Copies`] lie where their rows do, [`Received`] rows where their experts do. Only
//! [`Route::dispatch`] makes one of the other, and only [`Route::combine`] brings them back.

use super::placement::StreamPlacement;
use super::tensor::Tensor;
use crate::comm::CommError;
use crate::device::{Device, Space};
use crate::device_error::DeviceError;
use crate::ops::{self, Chunk, Context, Matrix, WeightWork};
use crate::stages::{Held, Offloaded};
use crate::state::buffer::{Buffer, WideBuffer};
use crate::state::params::{Division, Inventory};
use kernels::Output;
use kernels::activation::Activation;
use kernels::routing::Routing;
use std::marker::PhantomData;
use std::rc::Rc;

/// A router for rows of `C` columns and `E` experts. All ranks hold it; where they have different
/// rows, its gradient is a partial sum.
pub struct Router<P: StreamPlacement, const C: usize, const E: usize> {
    router: ops::Router,
    placement: PhantomData<P>,
}

/// Where the copies of a rank's rows go, and with which weights.
#[must_use]
pub struct Route<D: Space>(Rc<ops::Route<D>>);

/// Copies of this rank's rows, one for each expert of a row: `C` columns.
#[must_use]
pub struct Copies<D: Space, const C: usize>(Rc<Buffer<D>>);

/// Copies on their way to experts, or back.
#[must_use = "an exchange that nobody waits for may never finish"]
pub struct CopiesInFlight<D: Device, const C: usize>(ops::CopiesInFlight<D>);

/// The gradient of each copy's weight.
#[must_use]
pub struct CopyNumbers<D: Space>(WideBuffer<D>);

/// Rows that this rank's experts have received, or made of them: `C` columns. How many there are
/// differs from micro-batch to micro-batch.
#[must_use]
pub struct Received<D: Space, const C: usize>(ops::Received<D>);

/// A matrix of each of this rank's experts, from `IN` to `OUT` columns.
pub struct Experts<const IN: usize, const OUT: usize>(ops::ExpertLinear);

impl<P: StreamPlacement, const C: usize, const E: usize> Router<P, C, E> {
    /// Declares the router of layer `layer`. An expert takes at most `capacity_factor` times its
    /// balanced share of a micro-batch's copies, those with the largest weights; all if `None`.
    ///
    /// # Panics
    /// It is for another number of experts.
    #[track_caller]
    pub fn declare(
        name: &str,
        layer: usize,
        routing: Routing,
        capacity_factor: Option<f64>,
        deviation: f64,
        inventory: &mut Inventory,
    ) -> Self {
        assert!(routing.experts == E, "a router for {} experts, not {E}", routing.experts);
        let router = ops::Router::declare(name, layer, C, routing, deviation, P::SPLIT, inventory);
        let router = ops::Router { capacity_factor, ..router };
        Self { router, placement: PhantomData }
    }

    /// The same router with a bias of its logits.
    #[must_use]
    pub fn with_bias(self, name: &str, inventory: &mut Inventory) -> Self {
        Self { router: self.router.with_bias(name, P::SPLIT, inventory), ..self }
    }

    /// The same where load moves the selection bias by `rate` a step: up for an expert with less
    /// than the mean, down for one with more. [`Self::note_load`] counts it.
    ///
    /// # Panics
    /// It has no selection bias.
    #[must_use]
    #[track_caller]
    pub fn with_bias_updates(self, rate: f64, inventory: &mut Inventory) -> Self {
        Self { router: self.router.with_bias_updates(rate, inventory), ..self }
    }

    /// Chooses the experts of each row, and tells the ranks that have them how many copies come.
    ///
    /// # Errors
    /// Those of any collective call, and a device that failed.
    pub fn route<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        h: &Tensor<D, P, R, C>,
    ) -> Result<Route<D>, CommError> {
        self.router.route(ctx, h.buffer(), Chunk::WHOLE).map(|route| Route(Rc::new(route)))
    }

    /// The same of a chunk's rows.
    ///
    /// # Errors
    /// As [`Self::route`].
    pub fn route_chunk<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        chunk: Chunk,
        h: &Tensor<D, P, R, C>,
    ) -> Result<Route<D>, CommError> {
        self.router.route(ctx, h.buffer(), chunk).map(|route| Route(Rc::new(route)))
    }

    /// Notes how rows load experts, for losses of routers and updates of selection biases.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn note_load<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        route: &Route<D>,
    ) -> Result<(), CommError> {
        self.router.note_load(ctx, &route.0)
    }

    /// The gradient of the logits, from that of the copies' weights and those of the router's
    /// losses.
    ///
    /// # Errors
    /// A device that failed.
    pub fn backward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        route: &Route<D>,
        dweights: &CopyNumbers<D>,
    ) -> Result<Tensor<D, P, R, E>, CommError> {
        self.router.backward(ctx, &route.0, &dweights.0).map(Tensor::received)
    }

    /// The gradient of the rows through the logits, added to `dh`.
    pub fn add_backward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        dlogits: &Tensor<D, P, R, E>,
        dh: Tensor<D, P, R, C>,
    ) -> Tensor<D, P, R, C> {
        let (linear, output) = (&self.router.linear, Output::Accumulate);
        dh.changed(ctx, |dh| linear.backward_input_to(ctx, dlogits.buffer(), dh, output))
    }

    /// The gradient of the weight.
    pub fn weights<D: Device, const R: usize>(
        &self,
        h: &Tensor<D, P, R, C>,
        dlogits: &Tensor<D, P, R, E>,
    ) -> WeightWork<D> {
        self.router.linear.weights(h.memory(), dlogits.memory())
    }
}

impl<D: Device> Route<D> {
    /// Another handle of the same route.
    pub fn share(&self) -> Self {
        Self(self.0.clone())
    }

    /// Each row as often as it has experts.
    pub fn copies<P: StreamPlacement, const R: usize, const C: usize>(
        &self,
        ctx: &Context<'_, D>,
        x: &Tensor<D, P, R, C>,
    ) -> Copies<D, C> {
        Copies(Rc::new(self.0.copied(ctx, x.buffer())))
    }

    /// The sum of each row's copies: the backward pass of [`Self::copies`].
    pub fn sum<P: StreamPlacement, const R: usize, const C: usize>(
        &self,
        ctx: &Context<'_, D>,
        copies: &Copies<D, C>,
    ) -> Tensor<D, P, R, C> {
        Tensor::received(self.0.summed(ctx, &copies.0))
    }

    /// Brings copies to the ranks of their experts.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn dispatch<const C: usize>(
        &self,
        ctx: &Context<'_, D>,
        copies: Copies<D, C>,
    ) -> Result<Received<D, C>, CommError> {
        self.0.dispatch(ctx, ctx.own(copies.0)).map(Received)
    }

    /// Brings what experts made of copies back.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn combine<const C: usize>(
        &self,
        ctx: &Context<'_, D>,
        made: Received<D, C>,
    ) -> Result<Copies<D, C>, CommError> {
        self.0.combine(ctx, made.0).map(|copies| Copies(Rc::new(copies)))
    }

    /// Starts [`Self::dispatch`]; what follows runs meanwhile.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn start_dispatch<const C: usize>(
        &self,
        ctx: &Context<'_, D>,
        copies: Copies<D, C>,
    ) -> Result<CopiesInFlight<D, C>, CommError> {
        self.0.start_dispatch(ctx, ctx.own(copies.0)).map(CopiesInFlight)
    }

    /// What came of [`Self::start_dispatch`].
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn finish_dispatch<const C: usize>(
        &self,
        ctx: &Context<'_, D>,
        in_flight: CopiesInFlight<D, C>,
    ) -> Result<Received<D, C>, CommError> {
        self.0.finish_dispatch(ctx, in_flight.0).map(Received)
    }

    /// Starts [`Self::combine`]; what follows runs meanwhile.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn start_combine<const C: usize>(
        &self,
        ctx: &Context<'_, D>,
        made: Received<D, C>,
    ) -> Result<CopiesInFlight<D, C>, CommError> {
        self.0.start_combine(ctx, made.0).map(CopiesInFlight)
    }

    /// What came of [`Self::start_combine`].
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn finish_combine<const C: usize>(
        &self,
        ctx: &Context<'_, D>,
        in_flight: CopiesInFlight<D, C>,
    ) -> Result<Copies<D, C>, CommError> {
        self.0.finish_combine(ctx, in_flight.0).map(|copies| Copies(Rc::new(copies)))
    }

    /// The sum of each row's copies by their weights.
    pub fn weighted_sum<P: StreamPlacement, const R: usize, const C: usize>(
        &self,
        ctx: &Context<'_, D>,
        copies: &Copies<D, C>,
    ) -> Tensor<D, P, R, C> {
        Tensor::received(self.0.weighted_sum(ctx, &copies.0))
    }

    /// The gradients of the copies and of their weights, from that of [`Self::weighted_sum`].
    pub fn weighted_sum_backward<P: StreamPlacement, const R: usize, const C: usize>(
        &self,
        ctx: &Context<'_, D>,
        copies: &Copies<D, C>,
        dy: &Tensor<D, P, R, C>,
    ) -> (Copies<D, C>, CopyNumbers<D>) {
        let (dcopies, dweights) = self.0.weighted_sum_backward(ctx, &copies.0, dy.buffer());
        (Copies(Rc::new(dcopies)), CopyNumbers(dweights))
    }
}

impl<D: Device, const C: usize> Received<D, C> {
    /// `f(gate) * up`
    pub fn gated(ctx: &Context<'_, D>, f: Activation, gate: &Self, up: &Self) -> Self {
        Self(gate.0.with(ops::activation::gate(ctx, f, &gate.0.rows, &up.0.rows)))
    }

    /// The gradients of `gate` and `up`, from that of [`Self::gated`].
    pub fn gated_backward(
        ctx: &Context<'_, D>,
        f: Activation,
        gate: &Self,
        up: &Self,
        dy: &Self,
    ) -> (Self, Self) {
        let (rows, dy) = (&gate.0.rows, &dy.0.rows);
        let [dgate, dup] = ops::activation::gate_backward(ctx, f, rows, &up.0.rows, dy);
        (Self(gate.0.with(dgate)), Self(gate.0.with(dup)))
    }

    /// `f(x)`
    pub fn activate(ctx: &Context<'_, D>, f: Activation, x: &Self) -> Self {
        Self(x.0.with(ops::activation::activate(ctx, f, &x.0.rows)))
    }

    /// The gradient of `x`, from that of [`Self::activate`].
    pub fn activate_backward(ctx: &Context<'_, D>, f: Activation, x: &Self, dy: &Self) -> Self {
        Self(x.0.with(ops::activation::activate_backward(ctx, f, &x.0.rows, &dy.0.rows)))
    }

    /// Another handle of the same rows.
    pub fn share(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<const IN: usize, const OUT: usize> Experts<IN, OUT> {
    /// Declares this rank's experts of `all`, whose rows of outputs the tensor-parallel ranks of an
    /// expert divide. `matrix` gives that of an expert.
    pub fn declare_rows(
        all: usize,
        matrix: impl Fn(usize) -> Matrix,
        inventory: &mut Inventory,
    ) -> Self {
        let shape = [OUT * inventory.member(Division::Expert).of, IN];
        Self(ops::ExpertLinear::declare_rows(all, matrix, shape, inventory))
    }

    /// The same; they divide columns of inputs, so that results are summands of each rank.
    pub fn declare_columns(
        all: usize,
        matrix: impl Fn(usize) -> Matrix,
        inventory: &mut Inventory,
    ) -> Self {
        let shape = [OUT, IN * inventory.member(Division::Expert).of];
        Self(ops::ExpertLinear::declare_columns(all, matrix, shape, inventory))
    }

    /// `x[q, IN] -> y[q, OUT]`
    pub fn forward<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        x: &Received<D, IN>,
    ) -> Received<D, OUT> {
        Received(self.0.forward(ctx, &x.0))
    }

    /// `dy[q, OUT] -> dx[q, IN]`
    pub fn backward<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        dy: &Received<D, OUT>,
    ) -> Received<D, IN> {
        Received(self.0.backward_input(ctx, &dy.0, None))
    }

    /// The same, added to the input gradient of another matrix with the same input.
    pub fn add_backward<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        dy: &Received<D, OUT>,
        dx: Received<D, IN>,
    ) -> Received<D, IN> {
        Received(self.0.backward_input(ctx, &dy.0, Some(ctx.own(dx.0.rows))))
    }

    /// The gradients of the matrices.
    pub fn weights<D: Device>(&self, x: &Received<D, IN>, dy: &Received<D, OUT>) -> WeightWork<D> {
        self.0.weights(&x.0, &dy.0)
    }
}

impl<D: Device> Held for Route<D> {
    fn bytes(&self) -> usize {
        self.0.bytes()
    }
}

impl<D: Space, const C: usize> Held for Copies<D, C> {
    fn bytes(&self) -> usize {
        self.0.bytes()
    }
}

impl<D: Space, const C: usize> Held for Received<D, C> {
    fn bytes(&self) -> usize {
        self.0.rows.bytes()
    }
}

/// Row numbers and weights of copies are small, and read while others are on their way.
impl<D: Device> Offloaded<D> for Route<D> {
    fn offload(&mut self, _device: &D) -> Result<(), DeviceError> {
        Ok(())
    }

    fn reload(&mut self, _device: &D) {}
}

impl<D: Space, const C: usize> Offloaded<D> for Copies<D, C> {
    fn offload(&mut self, device: &D) -> Result<(), DeviceError> {
        self.0.offload(device)
    }

    fn reload(&mut self, device: &D) {
        self.0.reload(device);
    }
}

impl<D: Space, const C: usize> Offloaded<D> for Received<D, C> {
    fn offload(&mut self, device: &D) -> Result<(), DeviceError> {
        self.0.rows.offload(device)
    }

    fn reload(&mut self, device: &D) {
        self.0.rows.reload(device);
    }
}
