//! Final norm, output layer and loss, split over the vocabulary: ranks exchange three vectors of
//! `[n]` and no logits (Shoeybi et al. 2019, section 3).

use super::linear::Linear;
use super::norm::{Norm, Residual, Statistics};
use super::{Context, TensorNames, WeightGradients, WeightWork};
use crate::comm::{CommError, Op};
use crate::device::{Device, RowSums, Space};
use crate::state::buffer::{Buffer, WideBuffer};
use crate::state::params::{Inventory, ParameterSlice, SharedBuffer};
use kernels::Output;
use kernels::cross_entropy::Logits;
use models::model::ModelSpec;
use std::rc::Rc;

/// Output layer of the last stage.
#[derive(Clone, Debug)]
pub struct HeadLayer {
    norm: Norm,
    output: Linear,
    vocab: usize,
    soft_cap: Option<f64>,
}

/// What the backward pass of a micro-batch needs.
pub struct HeadKept<D: Space> {
    x: SharedBuffer<D>,
    statistics: Rc<Statistics<D>>,
    h: SharedBuffer<D>,
    logits: Buffer<D>,
    max: WideBuffer<D>,
    sum_exp: WideBuffer<D>,
}

impl<D: Space> HeadKept<D> {
    /// Bytes held.
    pub fn bytes(&self) -> usize {
        let rows = self.max.bytes() + self.sum_exp.bytes();
        self.x.bytes() + self.statistics.bytes() + self.h.bytes() + self.logits.bytes() + rows
    }

    /// This rank's columns of the logits, `[n, V/t]`, padding included.
    pub fn logits(&self) -> &Buffer<D> {
        &self.logits
    }
}

impl HeadLayer {
    /// Declares norm and output matrix. The matrix is `shared` if the rank holds the embedding that
    /// it is tied to.
    pub fn declare(
        model: &ModelSpec,
        shared: Option<ParameterSlice>,
        sequence_parallel: bool,
        inventory: &mut Inventory,
    ) -> Self {
        let names = TensorNames::of(model);
        let norm = Norm::declare(model, names.final_norm(), sequence_parallel, inventory);
        let name = if model.tied_embeddings { names.embedding() } else { "lm_head.weight" };
        let declare =
            || inventory.declare(super::embedding::table(model, name, model.tied_embeddings));
        let weight = shared.unwrap_or_else(declare);
        let inputs = model.hidden as usize;
        let output = Linear { weight, bias: None, inputs, outputs: weight.len / inputs };
        Self { norm, output, vocab: model.vocab as usize, soft_cap: model.final_soft_cap }
    }

    fn shape<D: Device>(&self, ctx: &Context<'_, D>) -> Logits {
        let columns = self.output.outputs;
        let first_column = (ctx.tp.rank() * columns).min(self.vocab);
        Logits {
            rows: ctx.tokens(),
            columns,
            real_columns: columns.min(self.vocab - first_column),
            first_column,
            soft_cap: self.soft_cap,
        }
    }

    /// Each token's loss, `[n]`, 0 for tokens without a label.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn forward<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        stream: Residual<D>,
    ) -> Result<(WideBuffer<D>, HeadKept<D>), CommError> {
        let device = ctx.device;
        let (x, h, statistics) = self.norm.of(ctx, stream);
        let h = Rc::new(h);
        let entered = ctx.enter(&h)?;
        let logits = self.output.forward(ctx, &entered);
        let (shape, labels) = (self.shape(ctx), ctx.batch.labels.view());
        let [mut max, mut sum_exp, mut target, mut loss] =
            std::array::from_fn(|_| ctx.wide(shape.rows));
        device.local_max(&shape, logits.view(), max.view_mut());
        max = self.reduce(ctx, max, Op::Max)?;
        let (to, to_target) = (sum_exp.view_mut(), target.view_mut());
        device.local_sum_exp(&shape, logits.view(), labels, max.view(), to, to_target);
        sum_exp = self.reduce(ctx, sum_exp, Op::Sum)?;
        target = self.reduce(ctx, target, Op::Sum)?;
        let sums = RowSums { max: max.view(), sum_exp: sum_exp.view() };
        device.loss(labels, sums, target.view(), loss.view_mut());
        Ok((loss, HeadKept { x, statistics: Rc::new(statistics), h, logits, max, sum_exp }))
    }

    fn reduce<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        values: WideBuffer<D>,
        op: Op,
    ) -> Result<WideBuffer<D>, CommError> {
        if ctx.tp.size() == 1 {
            return Ok(values);
        }
        ctx.group().all_reduce(values.into_memory(), op).map(|values| ctx.pools.wide.adopt(values))
    }

    /// Gradient of the residual stream, `[r, h]`.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn backward<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        kept: HeadKept<D>,
        weights: &mut WeightGradients<'_, D>,
    ) -> Result<Buffer<D>, CommError> {
        let (device, shape) = (ctx.device, self.shape(ctx));
        let HeadKept { x, statistics, h, mut logits, max, sum_exp } = kept;
        let (labels, scale) = (ctx.batch.labels.view(), ctx.batch.loss_scale);
        let sums = RowSums { max: max.view(), sum_exp: sum_exp.view() };
        device.cross_entropy_gradient(&shape, logits.view_mut(), labels, sums, scale);
        let dlogits = Rc::new(logits);
        let entering = ctx.start_enter(&h)?;
        let mut dh = ctx.buffer(shape.rows * self.output.inputs);
        self.output.backward_input(ctx, &dlogits, &mut dh, Output::Overwrite);
        let leaving = ctx.start_leave(dh)?;
        let (linear, entered) = (self.output, entering.wait(ctx)?);
        weights.take(device, [WeightWork::Linear { linear, x: entered, dy: dlogits }]);
        let dh = Rc::new(leaving.wait(ctx)?);
        let mut dx = ctx.buffer(x.len());
        let output = Output::Overwrite;
        self.norm.backward_input(ctx, &x, &statistics, &dh, &mut dx, output);
        weights.take(device, [WeightWork::Norm { norm: self.norm, x, statistics, dy: dh }]);
        Ok(dx)
    }
}
