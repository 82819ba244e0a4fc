//! Cross-entropy over logits that may be split over the vocabulary.

use super::placement::{VocabPlacement, Whole};
use super::tensor::{Numbers, Tensor};
use crate::device::Device;
use crate::ops::{self, OwnSums, PassContext, Softmax};
use std::marker::PhantomData;

/// The loss of this rank's `V` columns of the logits, padding included. Between its steps ranks
/// reduce the maxima, the sums of exponentials and the targets' logits.
pub struct CrossEntropy<P: VocabPlacement, const V: usize> {
    loss: ops::CrossEntropy,
    placement: PhantomData<P>,
}

/// Numbers of a rank's columns: maxima, sums of exponentials around them, and the targets' logits.
pub(super) type Own<D, P, const R: usize> = (
    Numbers<D, <P as VocabPlacement>::Max, R>,
    Numbers<D, <P as VocabPlacement>::Max, R>,
    Numbers<D, <P as VocabPlacement>::Sum, R>,
);

impl<P: VocabPlacement, const V: usize> CrossEntropy<P, V> {
    /// The loss over `vocab` classes, with logits bounded by `soft_cap` (Gemma 2).
    pub fn new(vocab: usize, soft_cap: Option<f64>) -> Self {
        let loss = ops::CrossEntropy { columns: V, vocab, soft_cap };
        Self { loss, placement: PhantomData }
    }

    /// Each token's maximum over this rank's columns, sum of exponentials around it, and logit of
    /// its target, 0 if another rank has it.
    pub fn sums<D: Device, const R: usize>(
        &self,
        ctx: &PassContext<'_, D>,
        logits: &Tensor<D, P, R, V>,
    ) -> Own<D, P, R> {
        let OwnSums { max, sum_exp, target } = self.loss.sums(ctx, logits.buffer());
        (Numbers::new(max), Numbers::new(sum_exp), Numbers::new(target))
    }

    /// The sums around the maximum of all ranks, from those around this rank's `own`.
    pub fn around<D: Device, const R: usize>(
        &self,
        ctx: &PassContext<'_, D>,
        sum_exp: Numbers<D, P::Max, R>,
        own: &Numbers<D, P::Max, R>,
        max: &Numbers<D, Whole, R>,
    ) -> Numbers<D, P::Sum, R> {
        let sum_exp = sum_exp.into_buffer(ctx);
        Numbers::new(self.loss.around(ctx, sum_exp, own.buffer(), max.buffer()))
    }

    /// Each token's loss, 0 for tokens without a label.
    pub fn loss<D: Device, const R: usize>(
        &self,
        ctx: &PassContext<'_, D>,
        max: &Numbers<D, Whole, R>,
        sum_exp: &Numbers<D, Whole, R>,
        target: &Numbers<D, Whole, R>,
    ) -> Numbers<D, Whole, R> {
        let softmax = Softmax { max: max.buffer(), sum_exp: sum_exp.buffer() };
        Numbers::new(self.loss.loss(ctx, &softmax, target.buffer()))
    }

    /// The gradient of the logits, in their place.
    pub fn gradient<D: Device, const R: usize>(
        &self,
        ctx: &PassContext<'_, D>,
        logits: Tensor<D, P, R, V>,
        max: &Numbers<D, Whole, R>,
        sum_exp: &Numbers<D, Whole, R>,
    ) -> Tensor<D, P, R, V> {
        let softmax = Softmax { max: max.buffer(), sum_exp: sum_exp.buffer() };
        logits.changed(ctx, |logits| self.loss.gradient(ctx, logits, &softmax))
    }
}
