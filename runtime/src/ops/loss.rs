//! Cross-entropy over logits that are split over the vocabulary: ranks exchange three vectors of
//! `[n]` and no logits (Shoeybi et al. 2019, section 3).

use super::PassContext;
use crate::device::{Device, RowSums};
use crate::state::buffer::{Buffer, WideBuffer};
use kernels::cross_entropy::Logits;

/// The loss of this rank's columns of the logits, `[n, V/t]`, padding included.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropy {
    /// Columns of this rank.
    pub columns: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Bound of the logits (Gemma 2).
    pub soft_cap: Option<f64>,
}

/// Of each token: the maximum of this rank's columns, the sum of exponentials around it, and the
/// target's logit, 0 if another rank has it. `[n]` each.
pub struct OwnSums<D: Device> {
    /// The maximum.
    pub max: WideBuffer<D>,
    /// The sum around it.
    pub sum_exp: WideBuffer<D>,
    /// The target's logit.
    pub target: WideBuffer<D>,
}

/// Each row's maximum and its sum of exponentials around that, over all ranks.
pub struct Softmax<'a, D: Device> {
    /// `[n]`
    pub max: &'a WideBuffer<D>,
    /// `[n]`
    pub sum_exp: &'a WideBuffer<D>,
}

impl<D: Device> Softmax<'_, D> {
    fn sums(&self) -> RowSums<'_, D> {
        RowSums { max: self.max.view(), sum_exp: self.sum_exp.view() }
    }
}

impl CrossEntropy {
    pub(super) fn shape<D: Device>(&self, ctx: &PassContext<'_, D>) -> Logits {
        let columns = self.columns;
        let first_column = (ctx.tp.rank() * columns).min(self.vocab);
        Logits {
            rows: ctx.tokens(),
            columns,
            real_columns: columns.min(self.vocab - first_column),
            first_column,
            soft_cap: self.soft_cap,
        }
    }

    /// Maxima and sums of the local columns.
    pub fn sums<D: Device>(&self, ctx: &PassContext<'_, D>, logits: &Buffer<D>) -> OwnSums<D> {
        let shape = self.shape(ctx);
        let [mut max, mut sum_exp, mut target] = std::array::from_fn(|_| ctx.wide(shape.rows));
        let (labels, [max_to, to]) =
            (ctx.batch.labels.view(), [&mut max, &mut sum_exp].map(WideBuffer::view_mut));
        ctx.device.local_sums(&shape, logits.view(), labels, max_to, to, target.view_mut());
        OwnSums { max, sum_exp, target }
    }

    /// The sums around the maximum of all ranks, from those around this rank's own.
    pub fn around<D: Device>(
        &self,
        ctx: &PassContext<'_, D>,
        mut sum_exp: WideBuffer<D>,
        own: &WideBuffer<D>,
        max: &WideBuffer<D>,
    ) -> WideBuffer<D> {
        ctx.device.rescale_sum_exp(own.view(), max.view(), sum_exp.view_mut());
        sum_exp
    }

    /// Each token's loss, `[n]`, 0 for tokens without a label.
    pub fn loss<D: Device>(
        &self,
        ctx: &PassContext<'_, D>,
        softmax: &Softmax<'_, D>,
        target: &WideBuffer<D>,
    ) -> WideBuffer<D> {
        let mut loss = ctx.wide(ctx.tokens());
        let labels = ctx.batch.labels.view();
        ctx.device.loss(labels, softmax.sums(), target.view(), loss.view_mut());
        loss
    }

    /// Replaces the logits by their gradient.
    pub fn gradient<D: Device>(
        &self,
        ctx: &PassContext<'_, D>,
        logits: &mut Buffer<D>,
        softmax: &Softmax<'_, D>,
    ) {
        let (labels, scale) = (ctx.batch.labels.view(), ctx.batch.loss_scale);
        let to = logits.view_mut();
        ctx.device.cross_entropy_gradient(&self.shape(ctx), to, labels, softmax.sums(), scale);
    }
}
