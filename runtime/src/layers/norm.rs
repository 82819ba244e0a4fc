//! RMSNorm and LayerNorm over rows of the residual stream.

use super::Context;
use crate::buffer::Buffer;
use crate::params::{Declaration, Gradient, Init, Inventory, Part, Placement, Store};
use crate::scalar::Scalar;
use kernels::layer_norm::{self, LayerNorm};
use kernels::rms_norm::{self, RmsNorm};
use kernels::{Cpu, Output};
use models::model::{ModelSpec, NormKind};

/// A norm over the hidden size.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    weight: Part,
    /// Shift; LayerNorm has one, RMSNorm none.
    bias: Option<Part>,
    columns: usize,
    eps: f64,
    unit_offset: bool,
}

/// What the backward pass needs to know of each row.
#[derive(Debug)]
pub struct Statistics<T> {
    /// LayerNorm's mean; empty for RMSNorm.
    mean: Buffer<T>,
    /// One over the root mean square, or over the standard deviation.
    inverse: Buffer<T>,
}

impl<T> Statistics<T> {
    /// Elements held.
    pub fn elements(&self) -> usize {
        self.mean.len() + self.inverse.len()
    }
}

impl Norm {
    /// Declares the norm with this name. All tensor-parallel ranks hold it; with sequence
    /// parallelism each sees other tokens and so has a part of the gradient.
    pub fn declare(
        model: &ModelSpec,
        name: &str,
        sequence_parallel: bool,
        inventory: &mut Inventory,
    ) -> Self {
        let columns = model.hidden as usize;
        let gradient = if sequence_parallel { Gradient::Partial } else { Gradient::Whole };
        let unit_offset = model.numerics.norm_unit_offset;
        let mut vector = |part: &str, value| {
            inventory.declare(Declaration {
                name: format!("{name}.{part}"),
                shape: vec![columns],
                transposed: false,
                placement: Placement::Replicated,
                gradient,
                tied_copy: false,
                init: Init::Constant(value),
            })
        };
        let weight = vector("weight", if unit_offset { 0.0 } else { 1.0 });
        let bias = (model.norm.kind == NormKind::LayerNorm).then(|| vector("bias", 0.0));
        Self { weight, bias, columns, eps: model.numerics.norm_eps, unit_offset }
    }

    fn rms(&self, rows: usize) -> RmsNorm {
        let Self { columns, eps, unit_offset, .. } = *self;
        RmsNorm { rows, columns, eps, unit_offset }
    }

    fn layer(&self, rows: usize) -> LayerNorm {
        LayerNorm { rows, columns: self.columns, eps: self.eps }
    }

    /// `x[r, h] -> y[r, h]`
    pub fn forward<T: Scalar>(&self, ctx: &Context<'_, T>, x: &[T]) -> (Buffer<T>, Statistics<T>) {
        let rows = x.len() / self.columns;
        let mut y = ctx.buffer(x.len());
        let mut inverse = ctx.buffer(rows);
        let (cpu, w) = (ctx.cpu, ctx.weights.get(self.weight));
        let Some(bias) = self.bias else {
            rms_norm::forward(cpu, &self.rms(rows), x, w, &mut y, &mut inverse);
            return (y, Statistics { mean: Buffer::empty(), inverse });
        };
        let mut mean = ctx.buffer(rows);
        let (norm, bias) = (self.layer(rows), ctx.weights.get(bias));
        layer_norm::forward(cpu, &norm, x, w, bias, &mut y, &mut mean, &mut inverse);
        (y, Statistics { mean, inverse })
    }

    /// `dy[r, h] -> dx[r, h]`, stored or added.
    pub fn backward_input<T: Scalar>(
        &self,
        ctx: &Context<'_, T>,
        x: &[T],
        statistics: &Statistics<T>,
        dy: &[T],
        dx: &mut [T],
        output: Output,
    ) {
        let rows = x.len() / self.columns;
        let (cpu, w) = (ctx.cpu, ctx.weights.get(self.weight));
        let Statistics { mean, inverse } = statistics;
        match self.bias {
            None => {
                let norm = self.rms(rows);
                rms_norm::backward_input(cpu, &norm, x, w, inverse, dy, dx, output);
            }
            Some(_) => {
                let norm = self.layer(rows);
                layer_norm::backward_input(cpu, &norm, x, w, mean, inverse, dy, dx, output);
            }
        }
    }

    /// Adds to the gradients of scale and shift.
    pub fn backward_weight<T: Scalar>(
        &self,
        cpu: &Cpu,
        x: &[T],
        statistics: &Statistics<T>,
        dy: &[T],
        gradients: &mut Store<T>,
    ) {
        let rows = x.len() / self.columns;
        let Statistics { mean, inverse } = statistics;
        let Some(bias) = self.bias else {
            let dw = gradients.get_mut(self.weight);
            return rms_norm::backward_weight(cpu, &self.rms(rows), x, inverse, dy, dw);
        };
        let (dw, dbias) = gradients.get_pair_mut(self.weight, bias);
        layer_norm::backward_weight(cpu, &self.layer(rows), x, mean, inverse, dy, dw, dbias);
    }
}
