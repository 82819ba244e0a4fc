//! Activations and dropout.

use super::placement::{Elementwise, StreamPlacement};
use super::tensor::Tensor;
use crate::device::Device;
use crate::ops::{self, PassContext};
use kernels::activation::Activation;

/// `f(gate) * up`
pub fn gated<D: Device, P: Elementwise, const R: usize, const C: usize>(
    ctx: &PassContext<'_, D>,
    f: Activation,
    gate: &Tensor<D, P, R, C>,
    up: &Tensor<D, P, R, C>,
) -> Tensor<D, P, R, C> {
    Tensor::received(ops::activation::gate(ctx, f, gate.buffer(), up.buffer()))
}

/// The gradients of `gate` and `up`, from that of [`gated`].
pub fn gated_backward<D: Device, P: Elementwise, const R: usize, const C: usize>(
    ctx: &PassContext<'_, D>,
    f: Activation,
    gate: &Tensor<D, P, R, C>,
    up: &Tensor<D, P, R, C>,
    dy: &Tensor<D, P, R, C>,
) -> (Tensor<D, P, R, C>, Tensor<D, P, R, C>) {
    let (gate, up, dy) = (gate.buffer(), up.buffer(), dy.buffer());
    let [dgate, dup] = ops::activation::gate_backward(ctx, f, gate, up, dy);
    (Tensor::received(dgate), Tensor::received(dup))
}

/// `f(x)`
pub fn activate<D: Device, P: Elementwise, const R: usize, const C: usize>(
    ctx: &PassContext<'_, D>,
    f: Activation,
    x: &Tensor<D, P, R, C>,
) -> Tensor<D, P, R, C> {
    Tensor::received(ops::activation::activate(ctx, f, x.buffer()))
}

/// The gradient of `x`, from that of [`activate`].
pub fn activate_backward<D: Device, P: Elementwise, const R: usize, const C: usize>(
    ctx: &PassContext<'_, D>,
    f: Activation,
    x: &Tensor<D, P, R, C>,
    dy: &Tensor<D, P, R, C>,
) -> Tensor<D, P, R, C> {
    Tensor::received(ops::activation::activate_backward(ctx, f, x.buffer(), dy.buffer()))
}

/// Dropout of the residual stream, number `place` of the model, with the same mask however rows are
/// split. It is its own backward pass. Without dropout it does nothing.
///
/// # Panics
/// The rows are not those of the stream on this rank.
#[track_caller]
pub fn dropout<D: Device, P: StreamPlacement, const R: usize, const C: usize>(
    ctx: &PassContext<'_, D>,
    place: u32,
    x: Tensor<D, P, R, C>,
) -> Tensor<D, P, R, C> {
    if ctx.draws.is_none() {
        return x;
    }
    stream_rows::<D, R>(ctx);
    x.changed(ctx, |x| ctx.dropout(place, x))
}

/// Checks that a tensor has the stream's rows on this rank.
#[track_caller]
pub(super) fn stream_rows<D: Device, const R: usize>(ctx: &PassContext<'_, D>) {
    let rows = ctx.rows();
    assert!(R == rows, "the stream has {rows} rows on this rank, not {R}");
}
