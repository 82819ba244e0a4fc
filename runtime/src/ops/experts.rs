//! The experts of a mixture on one rank: their matrices, and the rows that they get.
//!
//! | letter | meaning |
//! |---|---|
//! | `q` | rows that this rank's experts get, from all ranks; differs between micro-batches |
//! | `E` | experts of the layer |

use super::{Context, Linear, Matrix, WeightWork};
use crate::comm::Communicator;
use crate::device::{Device, Space};
use crate::state::buffer::Buffer;
use crate::state::gradients::GradientSink;
use crate::state::params::{
    Declaration, Division, Gradient, Inventory, Placement, RowBlock, SharedBuffer,
};
use kernels::Output;
use kernels::gemm::Shape;
use std::ops::Range;
use std::rc::Rc;

/// The ranks among which experts are divided.
#[derive(Clone, Copy)]
pub struct ExpertRanks<'a> {
    /// Ranks that have different experts.
    pub ep: &'a dyn Communicator,
    /// Tensor-parallel ranks of the same experts.
    pub etp: &'a dyn Communicator,
}

/// Rows for this rank's experts, sorted by expert: `[q, c]`.
pub struct Received<D: Space> {
    /// The rows.
    pub rows: SharedBuffer<D>,
    /// How many rows each expert has.
    pub of_expert: Rc<[usize]>,
}

impl<D: Space> Clone for Received<D> {
    fn clone(&self) -> Self {
        self.with_shared(self.rows.clone())
    }
}

impl<D: Space> Received<D> {
    /// Rows of another width for the same experts.
    #[must_use]
    pub fn with(&self, rows: Buffer<D>) -> Self {
        self.with_shared(Rc::new(rows))
    }

    fn with_shared(&self, rows: SharedBuffer<D>) -> Self {
        Self { rows, of_expert: self.of_expert.clone() }
    }
}

/// One matrix of each of this rank's experts.
#[derive(Clone, Debug)]
pub struct ExpertLinear {
    experts: Rc<[Linear]>,
    /// Whether this rank adds the biases: of results that are summands of several ranks, one does.
    adds_bias: bool,
}

impl ExpertLinear {
    /// Declares the matrix of this rank's experts of `all`; `name` gives that of an expert. Rows of
    /// outputs are split over the tensor-parallel ranks of an expert.
    pub fn declare_rows(
        all: usize,
        matrix: impl Fn(usize) -> Matrix,
        [outputs, inputs]: [usize; 2],
        inventory: &mut Inventory,
    ) -> Self {
        let ways = inventory.member(Division::Expert).of;
        let placement = Placement::Rows(vec![RowBlock { rows: outputs, ways }]);
        let local = [outputs / ways, inputs];
        Self::declare(all, matrix, [outputs, inputs], &placement, local, inventory)
    }

    /// The same; columns of inputs are split.
    pub fn declare_columns(
        all: usize,
        matrix: impl Fn(usize) -> Matrix,
        [outputs, inputs]: [usize; 2],
        inventory: &mut Inventory,
    ) -> Self {
        let ways = inventory.member(Division::Expert).of;
        let local = [outputs, inputs / ways];
        Self::declare(all, matrix, [outputs, inputs], &Placement::Columns, local, inventory)
    }

    fn declare(
        all: usize,
        matrix: impl Fn(usize) -> Matrix,
        shape: [usize; 2],
        placement: &Placement,
        [outputs, inputs]: [usize; 2],
        inventory: &mut Inventory,
    ) -> Self {
        let own = inventory.own_experts(all);
        let sums = *placement == Placement::Columns;
        let adds_bias = !sums || inventory.member(Division::Expert).rank == 0;
        let of_bias = if sums { Placement::Replicated } else { placement.clone() };
        let of_expert = |expert: usize| {
            let matrix = matrix(expert);
            let whole = matrix.weight(shape.to_vec(), placement.clone(), Gradient::Whole);
            let weight = inventory.declare(Declaration { division: Division::Expert, ..whole });
            let bias = matrix.bias.then(|| {
                let whole = matrix.bias(shape[0], of_bias.clone(), Gradient::Whole);
                inventory.declare(Declaration { division: Division::Expert, ..whole })
            });
            Linear { weight, bias, inputs, outputs }
        };
        Self { experts: own.map(of_expert).collect(), adds_bias }
    }

    fn each(&self, of_expert: &[usize]) -> impl Iterator<Item = (&Linear, Range<usize>)> {
        let mut begin = 0;
        let with_rows = self.experts.iter().zip(of_expert.to_vec());
        with_rows.map(move |(linear, rows)| {
            begin += rows;
            (linear, begin - rows..begin)
        })
    }

    /// `x[q, in] -> y[q, out]`
    pub fn forward<D: Device>(&self, ctx: &Context<'_, D>, x: &Received<D>) -> Received<D> {
        let [outputs, inputs] = self.shape();
        let mut y = Buffer::apart(ctx.device.zeros(x.rows.len() / inputs * outputs));
        for (linear, rows) in self.each(&x.of_expert).filter(|(_, rows)| !rows.is_empty()) {
            let shape = Shape::nt(rows.len(), outputs, inputs);
            let w = ctx.weights.get(linear.weight);
            let from = x.rows.part(rows.start * inputs..rows.end * inputs);
            let to = y.part_mut(rows.start * outputs..rows.end * outputs);
            match linear.bias.filter(|_| self.adds_bias).map(|bias| ctx.weights.get(bias)) {
                Some(bias) => ctx.device.gemm_bias(&shape, from, w, bias, to),
                None => ctx.device.gemm(&shape, from, w, to, Output::Overwrite),
            }
        }
        x.with(y)
    }

    /// `dy[q, out] -> dx[q, in]`, added to `dx` if there is one.
    pub fn backward_input<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        dy: &Received<D>,
        dx: Option<Buffer<D>>,
    ) -> Received<D> {
        let [outputs, inputs] = self.shape();
        let output = if dx.is_some() { Output::Accumulate } else { Output::Overwrite };
        let rows = dy.rows.len() / outputs;
        let mut dx = dx.unwrap_or_else(|| Buffer::apart(ctx.device.zeros(rows * inputs)));
        for (linear, rows) in self.each(&dy.of_expert).filter(|(_, rows)| !rows.is_empty()) {
            let shape = Shape::nn(rows.len(), inputs, outputs);
            let w = ctx.weights.get(linear.weight);
            let from = dy.rows.part(rows.start * outputs..rows.end * outputs);
            let to = dx.part_mut(rows.start * inputs..rows.end * inputs);
            ctx.device.gemm(&shape, from, w, to, output);
        }
        dy.with(dx)
    }

    /// The gradients of the matrices. An expert without rows has a gradient of 0.
    pub fn weights<D: Device>(&self, x: &Received<D>, dy: &Received<D>) -> WeightWork<D> {
        WeightWork::Experts { linear: self.clone(), x: x.rows.clone(), dy: dy.clone() }
    }

    pub(super) fn backward_weight<D: Device>(
        &self,
        device: &D,
        x: &Buffer<D>,
        dy: &Received<D>,
        gradients: &mut impl GradientSink<D>,
    ) {
        let [outputs, inputs] = self.shape();
        for (linear, rows) in self.each(&dy.of_expert) {
            let dy = || dy.rows.part(rows.start * outputs..rows.end * outputs);
            // Asked for without rows too: the gradient is 0.
            {
                let to = gradients.get_mut(device, linear.weight);
                if !rows.is_empty() {
                    let shape = Shape::tn(outputs, inputs, rows.len());
                    let x = x.part(rows.start * inputs..rows.end * inputs);
                    device.gemm_wide(&shape, dy(), x, to, Output::Accumulate);
                }
            }
            if let Some(bias) = linear.bias {
                let to = gradients.get_mut(device, bias);
                if !rows.is_empty() {
                    device.bias_gradient(dy(), to);
                }
            }
        }
    }

    pub(super) fn unit(&self) -> usize {
        self.experts.first().map_or(0, |linear| linear.weight.unit())
    }

    /// Local outputs and inputs.
    fn shape(&self) -> [usize; 2] {
        self.experts.first().map_or([1, 1], |linear| [linear.outputs, linear.inputs])
    }
}
