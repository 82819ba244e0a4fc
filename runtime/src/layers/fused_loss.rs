//! Output layer and loss together, without stored logits.

use super::linear::{ColumnLinear, Linear};
use super::loss::Own;
use super::placement::{Axis, Columns, VocabPlacement, Whole};
use super::tensor::{Numbers, Tensor};
use crate::device::Device;
use crate::ops::{self, Context, CrossEntropy, Gradients, OwnSums, Softmax};
use std::marker::PhantomData;

/// Cross-entropy over this rank's `V` columns of the logits, which exist for a block of tokens at a
/// time. It reads the output layer's weights. Between its steps ranks reduce the maxima, the sums
/// of exponentials and the targets' logits.
pub struct FusedLoss<P: VocabPlacement, const IN: usize, const V: usize> {
    loss: ops::FusedLoss,
    placement: PhantomData<P>,
}

/// Output layers that a [`FusedLoss`] can read.
pub trait OutputLayer<P: VocabPlacement, const IN: usize, const V: usize> {
    /// The matrix.
    fn matrix(&self) -> ops::Linear;
}

impl<A: Axis, const IN: usize, const V: usize> OutputLayer<Columns<A>, IN, V>
    for ColumnLinear<A, IN, V>
{
    fn matrix(&self) -> ops::Linear {
        self.linear
    }
}

impl<const IN: usize, const V: usize> OutputLayer<Whole, IN, V> for Linear<IN, V> {
    fn matrix(&self) -> ops::Linear {
        self.0
    }
}

impl<P: VocabPlacement, const IN: usize, const V: usize> FusedLoss<P, IN, V> {
    /// The loss over `vocab` classes behind `output`, with logits bounded by `soft_cap` (Gemma 2),
    /// for blocks of `rows` tokens.
    pub fn new(
        output: &impl OutputLayer<P, IN, V>,
        vocab: usize,
        soft_cap: Option<f64>,
        rows: usize,
    ) -> Self {
        let loss = CrossEntropy { columns: V, vocab, soft_cap };
        let loss = ops::FusedLoss { loss, output: output.matrix(), rows };
        Self { loss, placement: PhantomData }
    }

    /// Each token's maximum over this rank's columns, sum of exponentials around it, and logit of
    /// its target, 0 if another rank has it.
    pub fn sums<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        x: &Tensor<D, Whole, R, IN>,
    ) -> Own<D, P, R> {
        let OwnSums { max, sum_exp, target } = self.loss.sums(ctx, x.buffer());
        (Numbers::new(max), Numbers::new(sum_exp), Numbers::new(target))
    }

    /// The sums around the maximum of all ranks, from those around this rank's `own`.
    pub fn around<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        sum_exp: Numbers<D, P::Max, R>,
        own: &Numbers<D, P::Max, R>,
        max: &Numbers<D, Whole, R>,
    ) -> Numbers<D, P::Sum, R> {
        let sum_exp = sum_exp.into_buffer(ctx);
        Numbers::new(self.loss.loss.around(ctx, sum_exp, own.buffer(), max.buffer()))
    }

    /// Each token's loss, 0 for tokens without a label.
    pub fn loss<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        max: &Numbers<D, Whole, R>,
        sum_exp: &Numbers<D, Whole, R>,
        target: &Numbers<D, Whole, R>,
    ) -> Numbers<D, Whole, R> {
        let softmax = Softmax { max: max.buffer(), sum_exp: sum_exp.buffer() };
        Numbers::new(self.loss.loss.loss(ctx, &softmax, target.buffer()))
    }

    /// The gradient of `x`. Adds the gradient of the output matrix, block by block.
    pub fn backward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        x: &Tensor<D, Whole, R, IN>,
        max: &Numbers<D, Whole, R>,
        sum_exp: &Numbers<D, Whole, R>,
        gradients: &mut Gradients<'_, D>,
    ) -> Tensor<D, P::Sum, R, IN> {
        let softmax = Softmax { max: max.buffer(), sum_exp: sum_exp.buffer() };
        Tensor::received(self.loss.backward(ctx, x.buffer(), &softmax, gradients))
    }
}
