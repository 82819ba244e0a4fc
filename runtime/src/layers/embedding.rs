//! Token embedding, split over the vocabulary, and learned positions. If the vocabulary is split
//! over the whole pipeline, [`super::VocabularyShard`] has the tokens and the first stage only
//! positions.

use super::{Context, TensorNames, TokenIds, WeightGradients, WeightWork};
use crate::comm::CommError;
use crate::device::Device;
use crate::state::buffer::Buffer;
use crate::state::params::{Declaration, Gradient, Init, Inventory, ParameterSlice, Placement};
use kernels::embedding::Embedding;
use models::model::{ModelSpec, Positions};
use std::rc::Rc;

/// Input layer of the first stage.
#[derive(Clone, Debug)]
pub struct EmbeddingLayer {
    /// The token table, unless it is split over the pipeline.
    table: Option<ParameterSlice>,
    positions: Option<(ParameterSlice, usize)>,
    hidden: usize,
    /// Vocabulary rows on each rank.
    rows: usize,
    scale: f64,
}

/// Declaration of the token table; `tied_copy` on a later stage that shares it.
pub(super) fn table(model: &ModelSpec, name: &str, tied_copy: bool) -> Declaration {
    Declaration {
        name: name.to_owned(),
        shape: vec![model.vocab as usize, model.hidden as usize],
        transposed: false,
        placement: Placement::Vocabulary,
        gradient: Gradient::Whole,
        tied_copy,
        init: Init::Normal(super::DEVIATION),
    }
}

impl EmbeddingLayer {
    /// Declares the tables; the token table only if it is not split over the pipeline. Every rank
    /// holds all positions, but with sequence parallelism uses only some of them.
    pub fn declare(
        model: &ModelSpec,
        tokens: bool,
        sequence_parallel: bool,
        inventory: &mut Inventory,
    ) -> Self {
        let (names, hidden) = (TensorNames::of(model), model.hidden as usize);
        let table = tokens.then(|| inventory.declare(table(model, names.embedding(), false)));
        let positions = match model.positions {
            Positions::Rope => None,
            Positions::Learned { max } => {
                let part = inventory.declare(Declaration {
                    name: names.positions().to_owned(),
                    shape: vec![max as usize, hidden],
                    transposed: false,
                    placement: Placement::Replicated,
                    gradient: if sequence_parallel { Gradient::Partial } else { Gradient::Whole },
                    tied_copy: false,
                    init: Init::Normal(super::DEVIATION),
                });
                Some((part, max as usize))
            }
        };
        let rows = table.map_or(0, |table| table.len / hidden);
        let scale = model.numerics.embedding_scale;
        Self { table, positions, hidden, rows, scale }
    }

    /// The token table, which the output layer may share.
    pub fn table(&self) -> Option<ParameterSlice> {
        self.table
    }

    fn vocabulary<D: Device>(&self, ctx: &Context<'_, D>) -> Embedding {
        Embedding {
            tokens: ctx.tokens(),
            columns: self.hidden,
            rows: self.rows,
            first_row: ctx.tp.rank() * self.rows,
            scale: self.scale,
        }
    }

    /// Learned positions of this rank's rows of the stream.
    fn positions<D: Device>(&self, ctx: &Context<'_, D>, rows: usize) -> (Embedding, TokenIds<D>) {
        let tokens = ctx.rows();
        let ids = ctx.batch.positions.part(ctx.first_row(), tokens);
        (Embedding { tokens, columns: self.hidden, rows, first_row: 0, scale: 1.0 }, ids)
    }

    /// The residual stream's first activations, `[r, h]`. `looked_up` holds the tokens' rows if
    /// their table is split over the pipeline.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn forward<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        looked_up: Buffer<D>,
    ) -> Result<Buffer<D>, CommError> {
        let mut x = match self.table {
            Some(table) => self.look_up(ctx, table)?,
            None => looked_up,
        };
        if let Some((part, rows)) = self.positions {
            let (shape, ids) = self.positions(ctx, rows);
            let mut y = ctx.buffer(x.len());
            ctx.device.embedding(&shape, ids.view(), ctx.weights.get(part), y.view_mut());
            ctx.device.add(y.view(), x.view_mut());
        }
        ctx.drop_stream(super::EMBEDDING_PLACE, self.hidden, &mut x);
        Ok(x)
    }

    fn look_up<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        table: ParameterSlice,
    ) -> Result<Buffer<D>, CommError> {
        let shape = self.vocabulary(ctx);
        let mut partial = ctx.buffer(shape.tokens * self.hidden);
        let table = ctx.weights.get(table);
        ctx.device.embedding(&shape, ctx.batch.tokens.view(), table, partial.view_mut());
        ctx.leave(partial)
    }

    /// Weight gradients of the tables. Returns the gradient of the tokens' rows, `[r, h]`, if their
    /// table is split over the pipeline; else an empty buffer.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn backward<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        mut dx: Buffer<D>,
        weights: &mut WeightGradients<'_, D>,
    ) -> Result<Buffer<D>, CommError> {
        ctx.drop_stream(super::EMBEDDING_PLACE, self.hidden, &mut dx);
        let dx = Rc::new(dx);
        if let Some((table, rows)) = self.positions {
            let (shape, ids) = self.positions(ctx, rows);
            let dy = dx.clone();
            weights.take(ctx.device, [WeightWork::Embedding { shape, table, ids, dy }]);
        }
        let Some(table) = self.table else {
            return Ok(ctx.own(dx));
        };
        let (shape, ids, dy) = (self.vocabulary(ctx), ctx.batch.tokens.clone(), ctx.enter(&dx)?);
        weights.take(ctx.device, [WeightWork::Embedding { shape, table, ids, dy }]);
        Ok(Buffer::empty())
    }
}
