//! The bias of a row-parallel matrix, added once, after the sum over ranks.

use super::{Context, WeightWork};
use crate::device::Device;
use crate::state::buffer::Buffer;
use crate::state::params::{
    Declaration, Division, Gradient, Init, Inventory, ParameterSlice, Placement, SharedBuffer,
};

/// A bias of the residual stream's width, which every tensor-parallel rank holds.
#[derive(Clone, Copy, Debug)]
pub struct RowBias(ParameterSlice);

impl RowBias {
    /// Declares the bias of the matrix called `matrix`. With sequence parallelism (`split`) each
    /// rank sees other tokens, so its gradient is a partial sum.
    pub fn declare(matrix: &str, columns: usize, split: bool, inventory: &mut Inventory) -> Self {
        Self(inventory.declare(Declaration {
            name: format!("{matrix}.bias"),
            shape: vec![columns],
            transposed: false,
            division: Division::Dense,
            placement: Placement::Replicated,
            gradient: if split { Gradient::Partial } else { Gradient::Whole },
            tied_copy: false,
            init: Init::Constant(0.0),
        }))
    }

    /// `x[r, c] += bias[c]`
    pub fn add<D: Device>(&self, ctx: &Context<'_, D>, x: &mut Buffer<D>) {
        ctx.device.add_bias(ctx.weights.get(self.0), x.view_mut());
    }

    /// Its gradient: the sum of rows of `dy`.
    pub fn weights<D: Device>(self, dy: &SharedBuffer<D>) -> WeightWork<D> {
        WeightWork::Bias { bias: self.0, dy: dy.clone() }
    }
}
