//! Cross-entropy over logits that may be split over the vocabulary.

use super::placement::{VocabPlacement, Whole};
use super::tensor::{Numbers, Tensor};
use crate::device::Device;
use crate::ops::{self, Context, Softmax};
use std::marker::PhantomData;

/// The loss of this rank's `V` columns of the logits, padding included. Between its steps ranks
/// reduce the maxima, the sums of exponentials and the targets' logits.
pub struct CrossEntropy<P: VocabPlacement, const V: usize> {
    loss: ops::CrossEntropy,
    placement: PhantomData<P>,
}

/// Numbers of a rank's columns: sums of exponentials, and the targets' logits.
type Sums<D, P, const R: usize> =
    (Numbers<D, <P as VocabPlacement>::Sum, R>, Numbers<D, <P as VocabPlacement>::Sum, R>);

impl<P: VocabPlacement, const V: usize> CrossEntropy<P, V> {
    /// The loss over `vocab` classes, with logits bounded by `soft_cap` (Gemma 2).
    pub fn new(vocab: usize, soft_cap: Option<f64>) -> Self {
        let loss = ops::CrossEntropy { columns: V, vocab, soft_cap };
        Self { loss, placement: PhantomData }
    }

    /// The maximum of each row's local columns.
    pub fn max<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        logits: &Tensor<D, P, R, V>,
    ) -> Numbers<D, P::Max, R> {
        Numbers::new(self.loss.max(ctx, logits.buffer()))
    }

    /// Each row's sum of exponentials of its local columns around `max`, and the logit of its
    /// target, 0 if another rank has it.
    pub fn sums<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        logits: &Tensor<D, P, R, V>,
        max: &Numbers<D, Whole, R>,
    ) -> Sums<D, P, R> {
        let [sum_exp, target] = self.loss.sums(ctx, logits.buffer(), max.buffer());
        (Numbers::new(sum_exp), Numbers::new(target))
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
        Numbers::new(self.loss.loss(ctx, &softmax, target.buffer()))
    }

    /// The gradient of the logits, in their place.
    pub fn gradient<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        logits: Tensor<D, P, R, V>,
        max: &Numbers<D, Whole, R>,
        sum_exp: &Numbers<D, Whole, R>,
    ) -> Tensor<D, P, R, V> {
        let softmax = Softmax { max: max.buffer(), sum_exp: sum_exp.buffer() };
        logits.changed(ctx, |logits| self.loss.gradient(ctx, logits, &softmax))
    }
}
