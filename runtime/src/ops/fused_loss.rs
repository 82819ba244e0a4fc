//! Output matrix and cross-entropy together, a block of tokens at a time. Logits exist for one
//! block: the loss keeps each token's maximum and sum of exponentials, and the backward pass
//! multiplies the block again (Liger Kernel, Hsu et al. 2024, arXiv 2410.10989, section 3.2).

use super::linear::Linear;
use super::weights::Gradients;
use super::{Context, CrossEntropy, OwnSums, Softmax};
use crate::device::{Device, RowSums};
use crate::state::buffer::Buffer;
use crate::state::gradients::GradientSink;
use kernels::Output;
use kernels::cross_entropy::Logits;
use kernels::gemm::Shape;
use std::ops::Range;

/// The loss over this rank's columns of the logits.
#[derive(Clone, Copy, Debug)]
pub struct FusedLoss {
    /// The loss.
    pub loss: CrossEntropy,
    /// The output matrix, `[V/t, h]`.
    pub output: Linear,
    /// Tokens of a block.
    pub rows: usize,
}

impl FusedLoss {
    fn blocks(&self, tokens: usize) -> impl Iterator<Item = Range<usize>> {
        let rows = self.rows;
        (0..tokens).step_by(rows).map(move |first| first..(first + rows).min(tokens))
    }

    /// The logits of some tokens of `x[n, h]`.
    fn logits<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        x: &Buffer<D>,
        block: &Range<usize>,
    ) -> (Logits, Buffer<D>) {
        let Linear { weight, inputs, outputs, .. } = self.output;
        let mut logits = ctx.buffer(block.len() * outputs);
        let x = x.part(block.start * inputs..block.end * inputs);
        let shape = Shape::nt(block.len(), outputs, inputs);
        let to = logits.view_mut();
        ctx.device.gemm(&shape, x, ctx.weights.get(weight), to, Output::Overwrite);
        (Logits { rows: block.len(), ..self.loss.shape(ctx) }, logits)
    }

    /// Maxima and sums of `x[n, h]`'s logits.
    pub fn sums<D: Device>(&self, ctx: &Context<'_, D>, x: &Buffer<D>) -> OwnSums<D> {
        let [mut max, mut sum_exp, mut target] = std::array::from_fn(|_| ctx.wide(ctx.tokens()));
        for block in self.blocks(ctx.tokens()) {
            let (shape, logits) = self.logits(ctx, x, &block);
            let labels = ctx.batch.labels.part(block.start, block.len());
            ctx.device.local_sums(
                &shape,
                logits.view(),
                labels.view(),
                max.part_mut(block.clone()),
                sum_exp.part_mut(block.clone()),
                target.part_mut(block),
            );
        }
        OwnSums { max, sum_exp, target }
    }

    /// Gradient of `x[n, h]`; this rank's part of it. Adds the gradient of the output matrix at
    /// once, also where the schedule has separate passes for weights: later there are no logits.
    pub fn backward<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        x: &Buffer<D>,
        softmax: &Softmax<'_, D>,
        gradients: &mut Gradients<'_, D>,
    ) -> Buffer<D> {
        let Linear { weight, inputs, outputs, .. } = self.output;
        let (device, scale) = (ctx.device, ctx.batch.loss_scale);
        let mut dx = ctx.buffer(x.len());
        for block in self.blocks(ctx.tokens()) {
            let (shape, mut dlogits) = self.logits(ctx, x, &block);
            let labels = ctx.batch.labels.part(block.start, block.len());
            let sums = RowSums {
                max: softmax.max.part(block.clone()),
                sum_exp: softmax.sum_exp.part(block.clone()),
            };
            let to = dlogits.view_mut();
            device.cross_entropy_gradient(&shape, to, labels.view(), sums, scale);
            let at = block.start * inputs..block.end * inputs;
            let product = Shape::nn(block.len(), inputs, outputs);
            let to = dx.part_mut(at.clone());
            device.gemm(&product, dlogits.view(), ctx.weights.get(weight), to, Output::Overwrite);
            let product = Shape::tn(outputs, inputs, block.len());
            let dweight = gradients.at_once().get_mut(device, weight);
            device.gemm_wide(&product, dlogits.view(), x.part(at), dweight, Output::Accumulate);
        }
        dx
    }
}
