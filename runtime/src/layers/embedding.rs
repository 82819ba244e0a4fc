//! Token table and learned positions.

use super::activation::stream_rows;
use super::placement::{StreamPlacement, TablePlacement, Whole};
use super::tensor::Tensor;
use crate::device::Device;
use crate::ops::{self, Context, PassContext, VocabTable, WeightWork};
use crate::state::params::{Inventory, ParameterSlice};
use std::marker::PhantomData;

/// The input layer: this rank's `ROWS` rows of the token table, padding included, of `C` columns.
pub struct TokenEmbedding<P: TablePlacement, const ROWS: usize, const C: usize> {
    embedding: ops::TokenEmbedding,
    placement: PhantomData<P>,
}

impl<P: TablePlacement, const ROWS: usize, const C: usize> TokenEmbedding<P, ROWS, C> {
    /// Declares this rank's rows of the table. Looked-up rows are multiplied by `scale`.
    ///
    /// # Panics
    /// The table's shape does not fit, or it is split over another number of ranks.
    #[track_caller]
    #[allow(clippy::needless_pass_by_value)]
    pub fn declare(table: VocabTable, scale: f64, inventory: &mut Inventory) -> Self {
        let (name, parts, ranks) = (&table.name, P::PARTS, inventory.tp());
        assert!(parts == ranks, "{name} has {parts} parts, but there are {ranks} ranks");
        let columns = table.hidden;
        assert!(columns == C, "{name} has {columns} columns, not {C}");
        let (rows, needed) = (ROWS * ranks, table.vocab);
        assert!(rows >= needed, "{ranks} parts of {ROWS} rows do not hold the {needed} of {name}");
        let table = table.declare(ROWS, inventory);
        let embedding = ops::TokenEmbedding { table, hidden: C, scale };
        Self { embedding, placement: PhantomData }
    }

    /// The tokens' rows, 0 where another rank has them.
    pub fn forward<D: Device, const R: usize>(&self, ctx: &Context<'_, D>) -> Tensor<D, P, R, C> {
        Tensor::received(self.embedding.forward(ctx))
    }

    /// The table's gradient, from that of all rows.
    pub fn weights<D: Device, const R: usize>(
        &self,
        ctx: &PassContext<'_, D>,
        dy: &Tensor<D, Whole, R, C>,
    ) -> WeightWork<D> {
        self.embedding.weights(ctx, dy.memory())
    }

    /// The rows, for an output layer that shares them.
    pub fn table(&self) -> ParameterSlice {
        self.embedding.table
    }
}

/// Learned positions, a table of `ROWS` rows and `C` columns, which every rank holds.
pub struct Positions<P: StreamPlacement, const ROWS: usize, const C: usize> {
    positions: ops::Positions,
    placement: PhantomData<P>,
}

impl<P: StreamPlacement, const ROWS: usize, const C: usize> Positions<P, ROWS, C> {
    /// Declares the table of this name; its initial values have standard deviation `deviation`.
    pub fn declare(name: &str, deviation: f64, inventory: &mut Inventory) -> Self {
        let positions = ops::Positions::declare(name, ROWS, C, deviation, P::SPLIT, inventory);
        Self { positions, placement: PhantomData }
    }

    /// Adds the positions of this rank's rows of the stream.
    ///
    /// # Panics
    /// The rows are not those of the stream on this rank.
    #[track_caller]
    pub fn add<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        x: Tensor<D, P, R, C>,
    ) -> Tensor<D, P, R, C> {
        stream_rows::<D, R>(ctx);
        x.changed(ctx, |x| self.positions.add(ctx, x))
    }

    /// The table's gradient, from that of this rank's rows.
    ///
    /// # Panics
    /// The rows are not those of the stream on this rank.
    #[track_caller]
    pub fn weights<D: Device, const R: usize>(
        &self,
        ctx: &PassContext<'_, D>,
        dy: &Tensor<D, P, R, C>,
    ) -> WeightWork<D> {
        stream_rows::<D, R>(ctx);
        self.positions.weights(ctx, dy.memory())
    }
}
