//! Activations between the two matrices of a feed-forward block.

use super::PassContext;
use crate::device::Device;
use crate::state::buffer::Buffer;
use kernels::activation::Activation;

/// `f(x)`, of the shape of `x`.
pub fn activate<D: Device>(ctx: &PassContext<'_, D>, f: Activation, x: &Buffer<D>) -> Buffer<D> {
    let mut y = ctx.buffer(x.len());
    ctx.device.activation(f, x.view(), y.view_mut());
    y
}

/// The gradient of `x`, from that of [`activate`].
pub fn activate_backward<D: Device>(
    ctx: &PassContext<'_, D>,
    f: Activation,
    x: &Buffer<D>,
    dy: &Buffer<D>,
) -> Buffer<D> {
    let mut dx = ctx.buffer(x.len());
    ctx.device.activation_backward(f, x.view(), dy.view(), dx.view_mut());
    dx
}

/// `f(gate) * up`, of the shape of both.
pub fn gate<D: Device>(
    ctx: &PassContext<'_, D>,
    f: Activation,
    gate: &Buffer<D>,
    up: &Buffer<D>,
) -> Buffer<D> {
    let mut y = ctx.buffer(up.len());
    ctx.device.gated(f, gate.view(), up.view(), y.view_mut());
    y
}

/// The gradients of `gate` and `up`, from that of [`gate`].
pub fn gate_backward<D: Device>(
    ctx: &PassContext<'_, D>,
    f: Activation,
    gate: &Buffer<D>,
    up: &Buffer<D>,
    dy: &Buffer<D>,
) -> [Buffer<D>; 2] {
    let [mut dgate, mut dup] = [gate, up].map(|x| ctx.buffer(x.len()));
    let (to_gate, to_up) = (dgate.view_mut(), dup.view_mut());
    ctx.device.gated_backward(f, gate.view(), up.view(), dy.view(), to_gate, to_up);
    [dgate, dup]
}
