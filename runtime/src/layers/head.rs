//! Final norm, output layer and loss, split over the vocabulary: ranks exchange three vectors of
//! `[n]` and no logits (Shoeybi et al. 2019, section 3).

use super::linear::Linear;
use super::norm::{Norm, Statistics};
use super::{Context, Names, WeightWork, Weights};
use crate::buffer::Buffer;
use crate::comm::{CommError, Op};
use crate::params::{Inventory, Part, Shared};
use crate::scalar::Scalar;
use kernels::Output;
use kernels::cross_entropy::{self, Logits};
use models::model::ModelSpec;
use std::rc::Rc;

/// What the last stage ends with.
#[derive(Clone, Debug)]
pub struct HeadLayer {
    norm: Norm,
    output: Linear,
    vocab: usize,
    soft_cap: Option<f64>,
}

/// What the backward pass of a micro-batch needs.
pub struct HeadKept<T> {
    x: Shared<T>,
    statistics: Rc<Statistics<T>>,
    h: Shared<T>,
    logits: Buffer<T>,
    max: Buffer<T>,
    sum_exp: Buffer<T>,
}

impl<T> HeadKept<T> {
    /// Elements held.
    pub fn elements(&self) -> usize {
        let rows = self.max.len() + self.sum_exp.len();
        self.x.len() + self.statistics.elements() + self.h.len() + self.logits.len() + rows
    }

    /// This rank's columns of the logits, `[n, V/t]`, padding included.
    pub fn logits(&self) -> &[T] {
        &self.logits
    }
}

impl HeadLayer {
    /// Declares norm and output matrix; the latter is `shared` where the rank holds the embedding
    /// that it is tied to.
    pub fn declare(
        model: &ModelSpec,
        shared: Option<Part>,
        sequence_parallel: bool,
        inventory: &mut Inventory,
    ) -> Self {
        let names = Names::of(model);
        let norm = Norm::declare(model, names.final_norm(), sequence_parallel, inventory);
        let name = if model.tied_embeddings { names.embedding() } else { "lm_head.weight" };
        let declare =
            || inventory.declare(super::embedding::table(model, name, model.tied_embeddings));
        let weight = shared.unwrap_or_else(declare);
        let inputs = model.hidden as usize;
        let output = Linear { weight, bias: None, inputs, outputs: weight.len / inputs };
        Self { norm, output, vocab: model.vocab as usize, soft_cap: model.final_soft_cap }
    }

    fn shape<T: Scalar>(&self, ctx: &Context<'_, T>) -> Logits {
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

    /// Each token's loss, `[n]`, 0 where there is none.
    ///
    /// # Errors
    /// As any collective call.
    pub fn forward<T: Scalar>(
        &self,
        ctx: &Context<'_, T>,
        x: Buffer<T>,
    ) -> Result<(Buffer<T>, HeadKept<T>), CommError> {
        let (cpu, x) = (ctx.cpu, Rc::new(x));
        let (h, statistics) = self.norm.forward(ctx, &x);
        let h = Rc::new(h);
        let logits = self.output.forward(ctx, &ctx.enter(&h)?);
        let (shape, labels) = (self.shape(ctx), &ctx.batch.labels);
        let [mut max, mut sum_exp, mut target, mut loss] =
            std::array::from_fn(|_| ctx.buffer(shape.rows));
        cross_entropy::local_max(cpu, &shape, &logits, &mut max);
        self.reduce(ctx, &mut max, Op::Max)?;
        cross_entropy::local_sum_exp(cpu, &shape, &logits, labels, &max, &mut sum_exp, &mut target);
        self.reduce(ctx, &mut sum_exp, Op::Sum)?;
        self.reduce(ctx, &mut target, Op::Sum)?;
        cross_entropy::loss(cpu, labels, &max, &sum_exp, &target, &mut loss);
        Ok((loss, HeadKept { x, statistics: Rc::new(statistics), h, logits, max, sum_exp }))
    }

    fn reduce<T: Scalar>(
        &self,
        ctx: &Context<'_, T>,
        values: &mut [T],
        op: Op,
    ) -> Result<(), CommError> {
        if ctx.tp.size() == 1 { Ok(()) } else { ctx.tp.all_reduce(values, op) }
    }

    /// Gradient of the stream's last rows, `[r, h]`.
    ///
    /// # Errors
    /// As any collective call.
    pub fn backward<T: Scalar>(
        &self,
        ctx: &Context<'_, T>,
        kept: HeadKept<T>,
        weights: &mut Weights<'_, T>,
    ) -> Result<Buffer<T>, CommError> {
        let (cpu, shape) = (ctx.cpu, self.shape(ctx));
        let HeadKept { x, statistics, h, mut logits, max, sum_exp } = kept;
        let (labels, scale) = (&ctx.batch.labels, ctx.batch.loss_scale);
        cross_entropy::gradient_in_place(cpu, &shape, &mut logits, labels, &max, &sum_exp, scale);
        let dlogits = Rc::new(logits);
        let entering = ctx.start_enter(&h)?;
        let mut dh = ctx.buffer(shape.rows * self.output.inputs);
        self.output.backward_input(ctx, &dlogits, &mut dh, Output::Overwrite);
        let leaving = ctx.start_leave(dh)?;
        let (linear, entered) = (self.output, entering.wait()?);
        weights.take(cpu, [WeightWork::Linear { linear, x: entered, dy: dlogits }]);
        let dh = Rc::new(leaving.wait()?);
        let mut dx = ctx.buffer(x.len());
        let output = Output::Overwrite;
        self.norm.backward_input(ctx, &x, &statistics, &dh, &mut dx, output);
        weights.take(cpu, [WeightWork::Norm { norm: self.norm, x, statistics, dy: dh }]);
        Ok(dx)
    }
}
