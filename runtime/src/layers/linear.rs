//! `y = x W^T + bias` on what one rank holds of `W`.

use super::Context;
use crate::device::Device;
use crate::state::buffer::Buffer;
use crate::state::params::{ParameterSlice, Store};
use kernels::Output;
use kernels::gemm::Shape;

/// A linear layer, or one rank's part of it. A row-parallel layer has no bias here: the bias is
/// added once, after the sum over ranks.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// `[outputs, inputs]`
    pub weight: ParameterSlice,
    /// `[outputs]`
    pub bias: Option<ParameterSlice>,
    /// Local inputs.
    pub inputs: usize,
    /// Local outputs.
    pub outputs: usize,
}

impl Linear {
    /// `x[n, in] -> y[n, out]`
    pub fn forward<D: Device>(&self, ctx: &Context<'_, D>, x: &Buffer<D>) -> Buffer<D> {
        let (device, rows) = (ctx.device, x.len() / self.inputs);
        let mut y = ctx.buffer(rows * self.outputs);
        let shape = Shape::nt(rows, self.outputs, self.inputs);
        let w = ctx.weights.get(self.weight);
        device.gemm(&shape, x.view(), w, y.view_mut(), Output::Overwrite);
        if let Some(bias) = self.bias {
            device.add_bias(ctx.weights.get(bias), y.view_mut());
        }
        y
    }

    /// `dy[n, out] -> dx[n, in]`, stored or added.
    pub fn backward_input<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        dy: &Buffer<D>,
        dx: &mut Buffer<D>,
        output: Output,
    ) {
        let shape = Shape::nn(dy.len() / self.outputs, self.inputs, self.outputs);
        let w = ctx.weights.get(self.weight);
        ctx.device.gemm(&shape, dy.view(), w, dx.view_mut(), output);
    }

    /// `dW += dy^T x`, `dbias += sum of rows of dy`.
    pub fn backward_weight<D: Device>(
        &self,
        device: &D,
        x: &Buffer<D>,
        dy: &Buffer<D>,
        gradients: &mut Store<D>,
    ) {
        let shape = Shape::tn(self.outputs, self.inputs, x.len() / self.inputs);
        device.gemm_add(&shape, dy.view(), x.view(), gradients.get_mut(self.weight));
        if let Some(bias) = self.bias {
            device.bias_gradient(dy.view(), gradients.get_mut(bias));
        }
    }
}
