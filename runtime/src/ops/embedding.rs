//! Token table, split over the vocabulary, and learned positions.

use super::{Context, PassContext, TokenIds, WeightWork};
use crate::device::Device;
use crate::state::buffer::Buffer;
use crate::state::params::{
    Declaration, Division, Gradient, Init, Inventory, ParameterSlice, Placement, SharedBuffer,
};
use kernels::embedding::Embedding;

/// A table of the vocabulary, `[vocab, hidden]`: token embedding or output matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct VocabTable {
    /// Name in checkpoints.
    pub name: String,
    /// Rows.
    pub vocab: usize,
    /// Columns.
    pub hidden: usize,
    /// Standard deviation of its initial values.
    pub deviation: f64,
    /// Whether an earlier stage holds the same tensor.
    pub tied_copy: bool,
}

impl VocabTable {
    /// A table of this name, `[vocab, hidden]`, that no earlier stage holds.
    pub fn new(name: &str, vocab: usize, hidden: usize, deviation: f64) -> Self {
        Self { name: name.to_owned(), vocab, hidden, deviation, tied_copy: false }
    }

    /// The same, as the copy of an earlier stage's.
    #[must_use]
    pub fn tied_copy(self) -> Self {
        Self { tied_copy: true, ..self }
    }

    pub(super) fn declaration(&self, placement: Placement) -> Declaration {
        Declaration {
            name: self.name.clone(),
            shape: vec![self.vocab, self.hidden],
            transposed: false,
            division: Division::Dense,
            placement,
            gradient: Gradient::Whole,
            tied_copy: self.tied_copy,
            init: Init::Normal(self.deviation),
        }
    }

    /// Declares this rank's `rows` of the table, padding included.
    pub fn declare(&self, rows: usize, inventory: &mut Inventory) -> ParameterSlice {
        inventory.declare(self.declaration(Placement::Vocabulary { rows }))
    }
}

/// The input layer: this rank's rows of the token table.
#[derive(Clone, Copy, Debug)]
pub struct TokenEmbedding {
    /// The rows.
    pub table: ParameterSlice,
    /// Columns of the residual stream.
    pub hidden: usize,
    /// Factor of the rows.
    pub scale: f64,
}

impl TokenEmbedding {
    fn shape<D: Device>(&self, ctx: &PassContext<'_, D>) -> Embedding {
        let rows = self.table.len / self.hidden;
        let first_row = ctx.tp.rank() * rows;
        let (tokens, columns, scale) = (ctx.tokens(), self.hidden, self.scale);
        Embedding { tokens, columns, rows, first_row, scale }
    }

    /// The tokens' rows, `[n, h]`, 0 where another rank has them.
    pub fn forward<D: Device>(&self, ctx: &Context<'_, D>) -> Buffer<D> {
        let shape = self.shape(ctx);
        let mut partial = ctx.buffer(shape.tokens * self.hidden);
        let (ids, table) = (ctx.batch.tokens.view(), ctx.weights.get(self.table));
        ctx.device.embedding(&shape, ids, table, partial.view_mut());
        partial
    }

    /// The table's gradient, from that of all rows, `[n, h]`.
    pub fn weights<D: Device>(
        &self,
        ctx: &PassContext<'_, D>,
        dy: &SharedBuffer<D>,
    ) -> WeightWork<D> {
        let (shape, table) = (self.shape(ctx), self.table);
        let by_row = ctx.batch.by_token.clone();
        WeightWork::Embedding { shape, table, by_row, dy: dy.clone() }
    }
}

/// Learned positions. Every rank holds all of them, but uses only those of its rows.
#[derive(Clone, Copy, Debug)]
pub struct Positions {
    table: ParameterSlice,
    hidden: usize,
    rows: usize,
}

impl Positions {
    /// Declares the table of `rows` positions. With sequence parallelism (`split`) each rank sees
    /// other tokens, so its gradient is a partial sum.
    pub fn declare(
        name: &str,
        rows: usize,
        hidden: usize,
        deviation: f64,
        split: bool,
        inventory: &mut Inventory,
    ) -> Self {
        let table = inventory.declare(Declaration {
            name: name.to_owned(),
            shape: vec![rows, hidden],
            transposed: false,
            division: Division::Dense,
            placement: Placement::Replicated,
            gradient: if split { Gradient::Partial } else { Gradient::Whole },
            tied_copy: false,
            init: Init::Normal(deviation),
        });
        Self { table, hidden, rows }
    }

    fn shape<D: Device>(&self, ctx: &PassContext<'_, D>) -> (Embedding, TokenIds<D>) {
        let tokens = ctx.rows();
        let ids = ctx.batch.positions.part(ctx.first_row(), tokens);
        let (columns, rows) = (self.hidden, self.rows);
        (Embedding { tokens, columns, rows, first_row: 0, scale: 1.0 }, ids)
    }

    /// Adds the positions of this rank's rows of the stream to `x[r, h]`.
    pub fn add<D: Device>(&self, ctx: &Context<'_, D>, x: &mut Buffer<D>) {
        let (shape, ids) = self.shape(ctx);
        let mut y = ctx.buffer(x.len());
        ctx.device.embedding(&shape, ids.view(), ctx.weights.get(self.table), y.view_mut());
        ctx.device.add(y.view(), x.view_mut());
    }

    /// The table's gradient, from that of this rank's rows, `[r, h]`.
    pub fn weights<D: Device>(
        &self,
        ctx: &PassContext<'_, D>,
        dy: &SharedBuffer<D>,
    ) -> WeightWork<D> {
        let (shape, _) = self.shape(ctx);
        let by_row = ctx.batch.by_position.clone();
        WeightWork::Embedding { shape, table: self.table, by_row, dy: dy.clone() }
    }
}
