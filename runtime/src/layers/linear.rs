//! `y = x W^T + bias` on what one rank holds of `W`.

use super::Context;
use crate::buffer::Buffer;
use crate::params::{Part, Store};
use crate::scalar::Scalar;
use kernels::gemm::{Shape, gemm};
use kernels::{Cpu, Output, elementwise};

/// A linear layer, or one rank's part of it. A row-parallel one has no bias here: it is added once,
/// after the sum over ranks.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// `[outputs, inputs]`
    pub weight: Part,
    /// `[outputs]`
    pub bias: Option<Part>,
    /// Local inputs.
    pub inputs: usize,
    /// Local outputs.
    pub outputs: usize,
}

impl Linear {
    /// `x[n, in] -> y[n, out]`
    pub fn forward<T: Scalar>(&self, ctx: &Context<'_, T>, x: &[T]) -> Buffer<T> {
        let rows = x.len() / self.inputs;
        let mut y = ctx.buffer(rows * self.outputs);
        let shape = Shape::nt(rows, self.outputs, self.inputs);
        gemm(ctx.cpu, &shape, T::ONE, x, ctx.weights.get(self.weight), T::ZERO, &mut y);
        if let Some(bias) = self.bias {
            elementwise::add_bias(ctx.cpu, ctx.weights.get(bias), &mut y);
        }
        y
    }

    /// `dy[n, out] -> dx[n, in]`, stored or added.
    pub fn backward_input<T: Scalar>(
        &self,
        ctx: &Context<'_, T>,
        dy: &[T],
        dx: &mut [T],
        output: Output,
    ) {
        let rows = dy.len() / self.outputs;
        let shape = Shape::nn(rows, self.inputs, self.outputs);
        let beta = if output == Output::Accumulate { T::ONE } else { T::ZERO };
        gemm(ctx.cpu, &shape, T::ONE, dy, ctx.weights.get(self.weight), beta, dx);
    }

    /// `dW += dy^T x`, `dbias += sum of rows of dy`.
    pub fn backward_weight<T: Scalar>(
        &self,
        cpu: &Cpu,
        x: &[T],
        dy: &[T],
        gradients: &mut Store<T>,
    ) {
        let rows = x.len() / self.inputs;
        let shape = Shape::tn(self.outputs, self.inputs, rows);
        gemm(cpu, &shape, T::ONE, dy, x, T::ONE, gradients.get_mut(self.weight));
        if let Some(bias) = self.bias {
            elementwise::bias_gradient(cpu, dy, gradients.get_mut(bias));
        }
    }
}
