//! Linear layers: whole, column-parallel and row-parallel. `IN` and `OUT` are local.

use super::placement::{Axis, Columns, Partial, StreamPlacement, Whole};
use super::tensor::Tensor;
use crate::device::Device;
use crate::ops::{self, Context, Matrix, WeightWork};
use crate::state::params::{Inventory, ParameterSlice, RowBlock};
use kernels::Output;
use std::marker::PhantomData;
use std::ops::Range;

/// A layer whose output columns are split over the ranks of `A`. Its input gradient is a partial
/// sum.
pub struct ColumnLinear<A: Axis, const IN: usize, const OUT: usize> {
    pub(super) linear: ops::Linear,
    axis: PhantomData<A>,
}

/// A layer whose input columns are split over the ranks of `A`. Its output is a partial sum. A bias
/// is added once, after the sum ([`RowBias`]).
pub struct RowLinear<A: Axis, const IN: usize, const OUT: usize> {
    linear: ops::Linear,
    axis: PhantomData<A>,
}

/// A layer that a single tensor-parallel rank holds.
pub struct Linear<const IN: usize, const OUT: usize>(pub(super) ops::Linear);

impl<A: Axis, const IN: usize, const OUT: usize> ColumnLinear<A, IN, OUT> {
    /// Declares this rank's rows of a matrix of `OUT * A::SIZE` rows.
    ///
    /// # Panics
    /// The axis has another number of ranks.
    #[track_caller]
    pub fn declare(matrix: Matrix, inventory: &mut Inventory) -> Self {
        Self::declare_copies(matrix, OUT * A::SIZE, inventory)
    }

    /// Declares this rank's rows of a matrix of `rows` rows, cut into `rows / OUT` parts. With
    /// fewer parts than ranks, neighbouring ranks hold copies (key/value heads).
    ///
    /// # Panics
    /// `OUT` does not divide `rows`, or the number of parts does not divide the number of ranks.
    #[track_caller]
    pub fn declare_copies(matrix: Matrix, rows: usize, inventory: &mut Inventory) -> Self {
        FusedRows::declare(matrix, &[(rows, rows / OUT)], IN, inventory).part()
    }

    /// The output matrix of the vocabulary, from this rank's rows of its table.
    ///
    /// # Panics
    /// The rows do not have the layer's shape.
    #[track_caller]
    pub fn from_table(table: ParameterSlice) -> Self {
        Self { linear: of_table::<IN, OUT>(table), axis: PhantomData }
    }

    /// Its weights, among all parameters of the rank.
    pub fn parameters(&self) -> Range<usize> {
        self.linear.weight.range()
    }

    /// `x[R, IN] -> y[R, OUT]`
    pub fn forward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        x: &Tensor<D, Whole, R, IN>,
    ) -> Tensor<D, Columns<A>, R, OUT> {
        Tensor::received(self.linear.forward(ctx, x.buffer()))
    }

    /// `dy[R, OUT] -> dx[R, IN]`
    pub fn backward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        dy: &Tensor<D, Columns<A>, R, OUT>,
    ) -> Tensor<D, Partial<A>, R, IN> {
        Tensor::received(self.linear.backward_input(ctx, dy.buffer()))
    }

    /// The same, added to the input gradient of another layer with the same input.
    pub fn add_backward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        dy: &Tensor<D, Columns<A>, R, OUT>,
        dx: Tensor<D, Partial<A>, R, IN>,
    ) -> Tensor<D, Partial<A>, R, IN> {
        dx.changed(ctx, |dx| {
            self.linear.backward_input_to(ctx, dy.buffer(), dx, Output::Accumulate);
        })
    }

    /// The gradients of weight and bias.
    pub fn weights<D: Device, const R: usize>(
        &self,
        x: &Tensor<D, Whole, R, IN>,
        dy: &Tensor<D, Columns<A>, R, OUT>,
    ) -> WeightWork<D> {
        self.linear.weights(x.memory(), dy.memory())
    }
}

impl<A: Axis, const IN: usize, const OUT: usize> RowLinear<A, IN, OUT> {
    /// Declares this rank's columns of a matrix of `IN * A::SIZE` columns.
    ///
    /// # Panics
    /// The axis has another number of ranks.
    #[track_caller]
    #[allow(clippy::needless_pass_by_value)]
    pub fn declare(matrix: Matrix, inventory: &mut Inventory) -> Self {
        ranks::<A>(&matrix.name, inventory);
        let linear = ops::declare_columns(&matrix, OUT, IN * A::SIZE, inventory);
        Self { linear, axis: PhantomData }
    }

    /// `x[R, IN] -> y[R, OUT]`
    pub fn forward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        x: &Tensor<D, Columns<A>, R, IN>,
    ) -> Tensor<D, Partial<A>, R, OUT> {
        Tensor::received(self.linear.forward(ctx, x.buffer()))
    }

    /// `dy[R, OUT] -> dx[R, IN]`
    pub fn backward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        dy: &Tensor<D, Whole, R, OUT>,
    ) -> Tensor<D, Columns<A>, R, IN> {
        Tensor::received(self.linear.backward_input(ctx, dy.buffer()))
    }

    /// The gradient of the weight.
    pub fn weights<D: Device, const R: usize>(
        &self,
        x: &Tensor<D, Columns<A>, R, IN>,
        dy: &Tensor<D, Whole, R, OUT>,
    ) -> WeightWork<D> {
        self.linear.weights(x.memory(), dy.memory())
    }
}

impl<const IN: usize, const OUT: usize> Linear<IN, OUT> {
    /// Declares a matrix of `OUT` rows and `IN` columns.
    ///
    /// # Panics
    /// There are several tensor-parallel ranks.
    #[track_caller]
    pub fn declare(matrix: Matrix, inventory: &mut Inventory) -> Self {
        FusedRows::declare(matrix, &[(OUT, 1)], IN, inventory).part()
    }

    /// The output matrix of the vocabulary, from its table.
    ///
    /// # Panics
    /// The table does not have the layer's shape.
    #[track_caller]
    pub fn from_table(table: ParameterSlice) -> Self {
        Self(of_table::<IN, OUT>(table))
    }

    /// Its weights, among all parameters of the rank.
    pub fn parameters(&self) -> Range<usize> {
        self.0.weight.range()
    }

    /// `x[R, IN] -> y[R, OUT]`
    pub fn forward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        x: &Tensor<D, Whole, R, IN>,
    ) -> Tensor<D, Whole, R, OUT> {
        Tensor::received(self.0.forward(ctx, x.buffer()))
    }

    /// `dy[R, OUT] -> dx[R, IN]`
    pub fn backward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        dy: &Tensor<D, Whole, R, OUT>,
    ) -> Tensor<D, Whole, R, IN> {
        Tensor::received(self.0.backward_input(ctx, dy.buffer()))
    }

    /// The same, added to the input gradient of another layer with the same input.
    pub fn add_backward<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        dy: &Tensor<D, Whole, R, OUT>,
        dx: Tensor<D, Whole, R, IN>,
    ) -> Tensor<D, Whole, R, IN> {
        dx.changed(ctx, |dx| self.0.backward_input_to(ctx, dy.buffer(), dx, Output::Accumulate))
    }

    /// The gradients of weight and bias.
    pub fn weights<D: Device, const R: usize>(
        &self,
        x: &Tensor<D, Whole, R, IN>,
        dy: &Tensor<D, Whole, R, OUT>,
    ) -> WeightWork<D> {
        self.0.weights(x.memory(), dy.memory())
    }
}

#[track_caller]
fn of_table<const IN: usize, const OUT: usize>(table: ParameterSlice) -> ops::Linear {
    let (len, expected) = (table.len, OUT * IN);
    assert!(len == expected, "an output matrix of {OUT} x {IN} has {expected} elements, not {len}");
    ops::Linear { weight: table, bias: None, inputs: IN, outputs: OUT }
}

/// Checks that the axis has as many ranks as tensors are split over.
#[track_caller]
fn ranks<A: Axis>(name: &str, inventory: &Inventory) {
    let (axis, size, ranks) = (A::NAME, A::SIZE, inventory.tp());
    assert!(size == ranks, "{name} is split over {axis} = {size}, but there are {ranks} ranks");
}

/// One matrix whose rows belong to several layers (queries, keys and values; gate and up).
pub struct FusedRows {
    name: String,
    ranks: usize,
    parts: std::vec::IntoIter<ops::Linear>,
}

impl FusedRows {
    /// Declares this rank's rows of a matrix with `inputs` columns. Each block has rows of the
    /// whole, and the number of parts that they are cut into.
    ///
    /// # Panics
    /// A block cannot be cut into equal parts, or its parts do not divide the number of ranks.
    #[track_caller]
    #[allow(clippy::needless_pass_by_value)]
    pub fn declare(
        matrix: Matrix,
        blocks: &[(usize, usize)],
        inputs: usize,
        inventory: &mut Inventory,
    ) -> Self {
        let (name, ranks) = (matrix.name.clone(), inventory.tp());
        let cut = |&(rows, ways): &(usize, usize)| {
            let equal = ways > 0 && rows % ways == 0 && ranks % ways == 0;
            assert!(equal, "{name}: {rows} rows in {ways} parts do not fit {ranks} ranks");
            RowBlock { rows, ways }
        };
        let blocks: Vec<RowBlock> = blocks.iter().map(cut).collect();
        let parts = ops::declare_rows(&matrix, &blocks, inputs, inventory).into_iter();
        Self { name, ranks, parts }
    }

    /// The next block's layer.
    ///
    /// # Panics
    /// There is none, or it has another shape.
    #[track_caller]
    pub fn part<L: FromRows>(&mut self) -> L {
        let Some(linear) = self.parts.next() else {
            panic!("{} has no more blocks", self.name);
        };
        let (name, ranks) = (&self.name, self.ranks);
        let (shape, expected) = ((linear.outputs, linear.inputs), L::SHAPE);
        assert!(shape == expected, "{name}: the block has shape {shape:?}, the layer {expected:?}");
        let over = L::RANKS;
        assert!(over == ranks, "{name} is a layer of {over} ranks, but there are {ranks}");
        L::from_rows(linear)
    }
}

/// Layers that a block of rows can be.
pub trait FromRows: sealed::FromLinear {
    /// Local outputs and inputs.
    const SHAPE: (usize, usize);
    /// Ranks that hold such a layer.
    const RANKS: usize;
}

pub(super) mod sealed {
    pub trait FromLinear {
        fn from_rows(linear: crate::ops::Linear) -> Self;
    }
}

impl<A: Axis, const IN: usize, const OUT: usize> FromRows for ColumnLinear<A, IN, OUT> {
    const SHAPE: (usize, usize) = (OUT, IN);
    const RANKS: usize = A::SIZE;
}

impl<A: Axis, const IN: usize, const OUT: usize> sealed::FromLinear for ColumnLinear<A, IN, OUT> {
    fn from_rows(linear: ops::Linear) -> Self {
        Self { linear, axis: PhantomData }
    }
}

impl<const IN: usize, const OUT: usize> FromRows for Linear<IN, OUT> {
    const SHAPE: (usize, usize) = (OUT, IN);
    const RANKS: usize = 1;
}

impl<const IN: usize, const OUT: usize> sealed::FromLinear for Linear<IN, OUT> {
    fn from_rows(linear: ops::Linear) -> Self {
        Self(linear)
    }
}

/// The bias of a row-parallel matrix, added to rows of the stream after the sum over ranks.
pub struct RowBias<P: StreamPlacement, const C: usize> {
    bias: ops::RowBias,
    placement: PhantomData<P>,
}

impl<P: StreamPlacement, const C: usize> RowBias<P, C> {
    /// Declares the bias of the matrix of this name.
    pub fn declare(matrix_name: &str, inventory: &mut Inventory) -> Self {
        let bias = ops::RowBias::declare(matrix_name, C, P::SPLIT, inventory);
        Self { bias, placement: PhantomData }
    }

    /// `x[r, c] + bias[c]`
    pub fn add<D: Device, const R: usize>(
        &self,
        ctx: &Context<'_, D>,
        x: Tensor<D, P, R, C>,
    ) -> Tensor<D, P, R, C> {
        x.changed(ctx, |x| self.bias.add(ctx, x))
    }

    /// Its gradient.
    pub fn weights<D: Device, const R: usize>(&self, dy: &Tensor<D, P, R, C>) -> WeightWork<D> {
        self.bias.weights(dy.memory())
    }
}
