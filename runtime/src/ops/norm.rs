//! RMSNorm and LayerNorm over rows of the residual stream.

use super::{Context, PassContext, WeightWork};
use crate::device::{Device, Space};
use crate::device_error::DeviceError;
use crate::state::buffer::{Buffer, WideBuffer};
use crate::state::gradients::GradientSink;
use crate::state::params::{
    Declaration, Division, Gradient, Init, Inventory, ParameterSlice, Placement, SharedBuffer,
};
use kernels::Output;
use kernels::layer_norm::LayerNorm;
use kernels::rms_norm::RmsNorm;
use std::rc::Rc;

/// A norm over the hidden size.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    weight: ParameterSlice,
    /// Shift; LayerNorm has one, RMSNorm none.
    bias: Option<ParameterSlice>,
    columns: usize,
    eps: f64,
    unit_offset: bool,
}

/// The residual stream, `[r, h]`.
pub enum Residual<D: Space> {
    /// One tensor.
    Whole(SharedBuffer<D>),
    /// Input and output of half a layer, which the next norm adds up on the way.
    Split(SharedBuffer<D>, SharedBuffer<D>),
}

impl<D: Device> Residual<D> {
    /// The stream as one tensor.
    pub fn whole(self, ctx: &PassContext<'_, D>) -> Buffer<D> {
        match self {
            Self::Whole(x) => ctx.own(x),
            Self::Split(x, branch) => {
                let mut sum = ctx.own(branch);
                ctx.device.add(x.view(), sum.view_mut());
                sum
            }
        }
    }
}

/// Result of a norm of the stream: the stream as one tensor, the normed stream, and row statistics.
pub type Normed<D> = (SharedBuffer<D>, Buffer<D>, Statistics<D>);

/// Statistics of each row for the backward pass.
pub struct Statistics<D: Space> {
    /// LayerNorm's mean; empty for RMSNorm.
    mean: WideBuffer<D>,
    /// One over the root mean square, or over the standard deviation.
    inverse: WideBuffer<D>,
}

impl<D: Space> Statistics<D> {
    /// Moves them to host memory ([`crate::Buffer::offload`]).
    ///
    /// # Errors
    /// The device has failed.
    pub fn offload(&mut self, device: &D) -> Result<(), DeviceError> {
        self.mean.offload(device)?;
        self.inverse.offload(device)
    }

    /// Moves them back.
    pub fn reload(&mut self, device: &D) {
        self.mean.reload(device);
        self.inverse.reload(device);
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.mean.bytes() + self.inverse.bytes()
    }
}

/// What distinguishes a norm, apart from its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NormKind {
    /// `x / rms(x) * w`, or `* (1 + w)` with `unit_offset`.
    Rms {
        /// Added to the mean of squares.
        eps: f64,
        /// Whether weights count from 1 (Gemma).
        unit_offset: bool,
    },
    /// `(x - mean(x)) / std(x) * w + b`
    Layer {
        /// Added to the variance.
        eps: f64,
    },
}

impl Norm {
    /// Declares the norm of this name. All tensor-parallel ranks hold it. With sequence parallelism
    /// (`split`) each sees other tokens, so its gradient is a partial sum.
    pub fn declare(
        name: &str,
        columns: usize,
        kind: NormKind,
        split: bool,
        inventory: &mut Inventory,
    ) -> Self {
        let gradient = if split { Gradient::Partial } else { Gradient::Whole };
        let mut vector = |part: &str, value| {
            inventory.declare(Declaration {
                name: format!("{name}.{part}"),
                shape: vec![columns],
                transposed: false,
                division: Division::Dense,
                placement: Placement::Replicated,
                gradient,
                tied_copy: false,
                init: Init::Constant(value),
            })
        };
        match kind {
            NormKind::Rms { eps, unit_offset } => {
                let weight = vector("weight", if unit_offset { 0.0 } else { 1.0 });
                Self { weight, bias: None, columns, eps, unit_offset }
            }
            NormKind::Layer { eps } => {
                let weight = vector("weight", 1.0);
                Self { weight, bias: Some(vector("bias", 0.0)), columns, eps, unit_offset: false }
            }
        }
    }

    /// Its unit.
    pub(super) fn unit(&self) -> usize {
        self.weight.unit()
    }

    fn rms(&self, rows: usize) -> RmsNorm {
        let Self { columns, eps, unit_offset, .. } = *self;
        RmsNorm { rows, columns, eps, unit_offset }
    }

    fn layer(&self, rows: usize) -> LayerNorm {
        LayerNorm { rows, columns: self.columns, eps: self.eps }
    }

    /// `x[r, h] -> y[r, h]`
    pub fn forward<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        x: &Buffer<D>,
    ) -> (Buffer<D>, Statistics<D>) {
        let rows = x.len() / self.columns;
        let mut y = ctx.buffer(x.len());
        let mut inverse = ctx.wide(rows);
        let (device, w) = (ctx.device, ctx.weights.get(self.weight));
        let Some(bias) = self.bias else {
            let norm = self.rms(rows);
            device.rms_norm(&norm, x.view(), w, y.view_mut(), inverse.view_mut());
            return (y, Statistics { mean: Buffer::empty(), inverse });
        };
        let mut mean = ctx.wide(rows);
        let (norm, bias) = (self.layer(rows), ctx.weights.get(bias));
        let (to, to_mean, to_inverse) = (y.view_mut(), mean.view_mut(), inverse.view_mut());
        device.layer_norm(&norm, x.view(), w, bias, to, to_mean, to_inverse);
        (y, Statistics { mean, inverse })
    }

    /// The norm of the residual stream, which the same kernel adds up if the device has one for
    /// both.
    pub fn of<D: Device>(&self, ctx: &Context<'_, D>, stream: Residual<D>) -> Normed<D> {
        match stream {
            Residual::Split(x, branch) if D::ADDS_BEFORE_NORM => self.behind(ctx, &x, &branch),
            stream => {
                let x = match stream {
                    Residual::Whole(x) => x,
                    split => Rc::new(split.whole(ctx)),
                };
                let (y, statistics) = self.forward(ctx, &x);
                (x, y, statistics)
            }
        }
    }

    /// `x + branch`, and the norm of the sum.
    fn behind<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        x: &Buffer<D>,
        branch: &Buffer<D>,
    ) -> Normed<D> {
        let rows = x.len() / self.columns;
        let (mut sum, mut y) = (ctx.buffer(x.len()), ctx.buffer(x.len()));
        let (mut mean, mut inverse) = (Buffer::empty(), ctx.wide(rows));
        let (device, w) = (ctx.device, ctx.weights.get(self.weight));
        let (parts, to_sum, to_inverse) =
            ([x.view(), branch.view()], sum.view_mut(), inverse.view_mut());
        match self.bias {
            None => {
                let norm = self.rms(rows);
                device.add_and_rms_norm(&norm, parts, w, to_sum, y.view_mut(), to_inverse);
            }
            Some(bias) => {
                mean = ctx.wide(rows);
                let (norm, bias) = (self.layer(rows), ctx.weights.get(bias));
                let to = [to_sum, y.view_mut()];
                device.add_and_layer_norm(&norm, parts, [w, bias], to, mean.view_mut(), to_inverse);
            }
        }
        (Rc::new(sum), y, Statistics { mean, inverse })
    }

    /// `dy[r, h] -> dx[r, h]`, stored or added.
    pub fn backward_input<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        x: &Buffer<D>,
        statistics: &Statistics<D>,
        dy: &Buffer<D>,
        dx: &mut Buffer<D>,
        output: Output,
    ) {
        let rows = x.len() / self.columns;
        let (device, w) = (ctx.device, ctx.weights.get(self.weight));
        let (mean, inverse) = (statistics.mean.view(), statistics.inverse.view());
        let (x, dy, dx) = (x.view(), dy.view(), dx.view_mut());
        match self.bias {
            None => {
                let norm = self.rms(rows);
                device.rms_norm_backward_input(&norm, x, w, inverse, dy, dx, output);
            }
            Some(_) => {
                let norm = self.layer(rows);
                device.layer_norm_backward_input(&norm, x, w, mean, inverse, dy, dx, output);
            }
        }
    }

    /// The gradients of scale and shift.
    pub fn weights<D: Device>(
        self,
        x: &SharedBuffer<D>,
        statistics: &Rc<Statistics<D>>,
        dy: &SharedBuffer<D>,
    ) -> WeightWork<D> {
        WeightWork::Norm {
            norm: self,
            x: x.clone(),
            statistics: statistics.clone(),
            dy: dy.clone(),
        }
    }

    pub(super) fn backward_weight<D: Device>(
        &self,
        device: &D,
        x: &Buffer<D>,
        statistics: &Statistics<D>,
        dy: &Buffer<D>,
        gradients: &mut impl GradientSink<D>,
    ) {
        let rows = x.len() / self.columns;
        let (mean, inverse) = (statistics.mean.view(), statistics.inverse.view());
        let (x, dy) = (x.view(), dy.view());
        let Some(bias) = self.bias else {
            let dw = gradients.get_mut(device, self.weight);
            return device.rms_norm_backward_weight(&self.rms(rows), x, inverse, dy, dw);
        };
        let (dw, dbias) = gradients.get_pair_mut(device, self.weight, bias);
        device.layer_norm_backward_weight(&self.layer(rows), x, mean, inverse, dy, dw, dbias);
    }
}
