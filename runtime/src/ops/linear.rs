//! `y = x W^T + bias` on what one rank holds of `W`.

use super::{Context, WeightWork};
use crate::device::Device;
use crate::state::buffer::Buffer;
use crate::state::gradients::GradientSink;
use crate::state::params::{
    Declaration, Division, Gradient, Init, Inventory, ParameterSlice, Placement, RowBlock,
    SharedBuffer,
};
use kernels::Output;
use kernels::gemm::Shape;

/// A linear layer, or one rank's part of it. A row-parallel layer has no bias here: the bias is
/// added once, after the sum over ranks ([`super::RowBias`]).
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// `[outputs, inputs]`
    pub weight: ParameterSlice,
    /// `[outputs]`
    pub bias: Option<ParameterSlice>,
    /// Local inputs.
    pub inputs: usize,
    /// Local outputs.
    pub outputs: usize,
}

/// A matrix of the model, before it is split.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    /// Name in checkpoints, without `.weight` or `.bias`.
    pub name: String,
    /// Stored `[inputs, outputs]` in checkpoints (GPT-2's Conv1D).
    pub transposed: bool,
    /// Whether it has a bias.
    pub bias: bool,
    /// Standard deviation of its initial weights.
    pub deviation: f64,
}

impl Matrix {
    /// A matrix of this name, `[outputs, inputs]` in checkpoints, without bias.
    pub fn named(name: impl Into<String>, deviation: f64) -> Self {
        Self { name: name.into(), transposed: false, bias: false, deviation }
    }

    /// The same, stored `[inputs, outputs]`.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self { transposed: true, ..self }
    }

    /// The same with a bias.
    #[must_use]
    pub fn with_bias(self) -> Self {
        Self { bias: true, ..self }
    }

    fn oriented(&self, outputs: usize, inputs: usize) -> Vec<usize> {
        if self.transposed { vec![inputs, outputs] } else { vec![outputs, inputs] }
    }

    pub(super) fn weight(
        &self,
        shape: Vec<usize>,
        placement: Placement,
        gradient: Gradient,
    ) -> Declaration {
        Declaration {
            name: format!("{}.weight", self.name),
            shape,
            transposed: self.transposed,
            division: Division::Dense,
            placement,
            gradient,
            tied_copy: false,
            init: Init::Normal(self.deviation),
        }
    }

    pub(super) fn bias(
        &self,
        outputs: usize,
        placement: Placement,
        gradient: Gradient,
    ) -> Declaration {
        Declaration {
            name: format!("{}.bias", self.name),
            shape: vec![outputs],
            transposed: false,
            init: Init::Constant(0.0),
            ..self.weight(Vec::new(), placement, gradient)
        }
    }
}

/// Declares a matrix whose output rows are split over tensor-parallel ranks, block by block.
/// Returns a layer for each block. Where a block has fewer parts than there are ranks, neighbouring
/// ranks hold copies, and the gradients of the whole tensor are partial sums.
pub fn declare_rows(
    matrix: &Matrix,
    blocks: &[RowBlock],
    inputs: usize,
    inventory: &mut Inventory,
) -> Vec<Linear> {
    let copies = blocks.iter().any(|block| block.ways < inventory.tp());
    let gradient = if copies { Gradient::Partial } else { Gradient::Whole };
    let outputs = blocks.iter().map(|block| block.rows).sum();
    let placement = Placement::Rows(blocks.to_vec());
    let weight = matrix.weight(matrix.oriented(outputs, inputs), placement.clone(), gradient);
    let weight = inventory.declare(weight);
    let bias = matrix.bias.then(|| inventory.declare(matrix.bias(outputs, placement, gradient)));
    let mut first = 0;
    let layer = |block: &RowBlock| {
        let rows = first..first + block.rows / block.ways;
        first = rows.end;
        let bias = bias.map(|bias| bias.rows(rows.clone(), 1));
        Linear { weight: weight.rows(rows.clone(), inputs), bias, inputs, outputs: rows.len() }
    };
    blocks.iter().map(layer).collect()
}

/// Declares a matrix whose input columns are split over tensor-parallel ranks.
pub fn declare_columns(
    matrix: &Matrix,
    outputs: usize,
    inputs: usize,
    inventory: &mut Inventory,
) -> Linear {
    let shape = matrix.oriented(outputs, inputs);
    let weight = inventory.declare(matrix.weight(shape, Placement::Columns, Gradient::Whole));
    Linear { weight, bias: None, inputs: inputs / inventory.tp(), outputs }
}

impl Linear {
    /// `x[n, in] -> y[n, out]`
    pub fn forward<D: Device>(&self, ctx: &Context<'_, D>, x: &Buffer<D>) -> Buffer<D> {
        let (device, rows) = (ctx.device, x.len() / self.inputs);
        let mut y = ctx.buffer(rows * self.outputs);
        let shape = Shape::nt(rows, self.outputs, self.inputs);
        let w = ctx.weights.get(self.weight);
        match self.bias.map(|bias| ctx.weights.get(bias)) {
            Some(bias) => device.gemm_bias(&shape, x.view(), w, bias, y.view_mut()),
            None => device.gemm(&shape, x.view(), w, y.view_mut(), Output::Overwrite),
        }
        y
    }

    /// `dy[n, out] -> dx[n, in]`
    pub fn backward_input<D: Device>(&self, ctx: &Context<'_, D>, dy: &Buffer<D>) -> Buffer<D> {
        let mut dx = ctx.buffer(dy.len() / self.outputs * self.inputs);
        self.backward_input_to(ctx, dy, &mut dx, Output::Overwrite);
        dx
    }

    /// The same, stored in `dx` or added to it.
    pub fn backward_input_to<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        dy: &Buffer<D>,
        dx: &mut Buffer<D>,
        output: Output,
    ) {
        let shape = Shape::nn(dy.len() / self.outputs, self.inputs, self.outputs);
        let w = ctx.weights.get(self.weight);
        ctx.device.gemm(&shape, dy.view(), w, dx.view_mut(), output);
    }

    /// The gradients of weight and bias: `dW += dy^T x`, `dbias += sum of rows of dy`.
    pub fn weights<D: Device>(self, x: &SharedBuffer<D>, dy: &SharedBuffer<D>) -> WeightWork<D> {
        WeightWork::Linear { linear: self, x: x.clone(), dy: dy.clone() }
    }

    pub(super) fn backward_weight<D: Device>(
        &self,
        device: &D,
        x: &Buffer<D>,
        dy: &Buffer<D>,
        gradients: &mut impl GradientSink<D>,
    ) {
        let shape = Shape::tn(self.outputs, self.inputs, x.len() / self.inputs);
        let (dweight, output) = gradients.get_product(device, self.weight);
        device.gemm_wide(&shape, dy.view(), x.view(), dweight, output);
        if let Some(bias) = self.bias {
            device.bias_gradient(dy.view(), gradients.get_mut(device, bias));
        }
    }
}
