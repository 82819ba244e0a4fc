//! The feed-forward block over this rank's part of its width, from the normed stream to partial
//! sums of the output.

use super::attention::oriented;
use super::linear::Linear;
use super::sublayer::{KeptActivations, Sublayer};
use super::{Context, TensorNames, WeightWork};
use crate::device::{Device, Space};
use crate::state::buffer::Buffer;
use crate::state::params::{
    Declaration, Gradient, Init, Inventory, Placement, RowBlock, SharedBuffer,
};
use kernels::Output;
use kernels::activation::Activation;
use models::model::{self, Gelu, ModelSpec};
use std::rc::Rc;

/// One rank's part of one layer's feed-forward block.
#[derive(Clone, Debug)]
pub struct Mlp {
    gate: Option<Linear>,
    up: Linear,
    down: Linear,
    activation: Activation,
}

/// What the backward pass of a micro-batch needs.
pub struct MlpKept<D: Space> {
    /// Input of the activation if it is gated, `[n, f/t]`; else empty.
    gate: Buffer<D>,
    /// The factor that is gated, or the input of an activation without gate, `[n, f/t]`.
    up: Buffer<D>,
    /// Input of the second matrix, `[n, f/t]`, unless it is recomputed.
    product: Option<SharedBuffer<D>>,
}

impl<D: Space> KeptActivations for MlpKept<D> {
    fn bytes(&self) -> usize {
        let product = self.product.as_ref().map_or(0, |product| product.bytes());
        self.gate.bytes() + self.up.bytes() + product
    }

    fn drop_cheap(&mut self) {
        self.product = None;
    }
}

impl Mlp {
    /// Declares layer `index`'s matrices: the first column-parallel, the second row-parallel.
    pub fn declare(model: &ModelSpec, index: usize, inventory: &mut Inventory) -> Self {
        let (names, tp) = (TensorNames::of(model), inventory.tp());
        let (hidden, ffn) = (model.hidden as usize, model.mlp.ffn as usize);
        let mut declare = |part: &str, kind: &str, shape: Vec<usize>, placement, init| {
            inventory.declare(Declaration {
                name: format!("{}.{kind}", names.mlp(index, part)),
                transposed: names.is_gpt2() && shape.len() == 2,
                shape,
                placement,
                gradient: Gradient::Whole,
                tied_copy: false,
                init,
            })
        };
        let rows = || Placement::Rows(vec![RowBlock { rows: ffn, ways: tp }]);
        let mut column = |part: &str| {
            let shape = oriented(names, ffn, hidden);
            let weight = declare(part, "weight", shape, rows(), Init::Normal(super::DEVIATION));
            let zero = Init::Constant(0.0);
            let biased = model.mlp.bias;
            let bias = biased.then(|| declare(part, "bias", vec![ffn], rows(), zero));
            Linear { weight, bias, inputs: hidden, outputs: ffn / tp }
        };
        let gate = model.mlp.activation.is_gated().then(|| column("gate"));
        let up = column("up");
        let init = Init::Normal(super::output_deviation(model));
        let shape = oriented(names, hidden, ffn);
        let weight = declare("down", "weight", shape, Placement::Columns, init);
        let down = Linear { weight, bias: None, inputs: ffn / tp, outputs: hidden };
        Self { gate, up, down, activation: function(model) }
    }

    /// The activation.
    fn product<D: Device>(&self, ctx: &Context<'_, D>, kept: &MlpKept<D>) -> SharedBuffer<D> {
        if let Some(product) = &kept.product {
            return product.clone();
        }
        let mut y = ctx.buffer(kept.up.len());
        match self.gate {
            Some(_) => {
                let (gate, up) = (kept.gate.view(), kept.up.view());
                ctx.device.gated(self.activation, gate, up, y.view_mut());
            }
            None => ctx.device.activation(self.activation, kept.up.view(), y.view_mut()),
        }
        Rc::new(y)
    }
}

impl<D: Device> Sublayer<D> for Mlp {
    type Kept = MlpKept<D>;
    type Work = MlpWeightWork<D>;

    fn forward(&self, ctx: &Context<'_, D>, h: &Buffer<D>) -> MlpKept<D> {
        let gate = self.gate.map_or_else(Buffer::empty, |gate| gate.forward(ctx, h));
        let up = self.up.forward(ctx, h);
        let mut kept = MlpKept { gate, up, product: None };
        kept.product = Some(self.product(ctx, &kept));
        kept
    }

    fn project(&self, ctx: &Context<'_, D>, kept: &MlpKept<D>) -> Buffer<D> {
        self.down.forward(ctx, &self.product(ctx, kept))
    }

    fn backward(
        &self,
        ctx: &Context<'_, D>,
        kept: &MlpKept<D>,
        dy: &SharedBuffer<D>,
    ) -> (Buffer<D>, MlpWeightWork<D>) {
        let (device, function) = (ctx.device, self.activation);
        let mut dproduct = ctx.buffer(kept.up.len());
        self.down.backward_input(ctx, dy, &mut dproduct, Output::Overwrite);
        let mut dgate = ctx.buffer(kept.gate.len());
        let mut dup = ctx.buffer(kept.up.len());
        let mut dh = ctx.buffer(ctx.tokens() * self.up.inputs);
        match self.gate {
            Some(gate) => {
                device.gated_backward(
                    function,
                    kept.gate.view(),
                    kept.up.view(),
                    dproduct.view(),
                    dgate.view_mut(),
                    dup.view_mut(),
                );
                gate.backward_input(ctx, &dgate, &mut dh, Output::Overwrite);
                self.up.backward_input(ctx, &dup, &mut dh, Output::Accumulate);
            }
            None => {
                let (up, dy) = (kept.up.view(), dproduct.view());
                device.activation_backward(function, up, dy, dup.view_mut());
                self.up.backward_input(ctx, &dup, &mut dh, Output::Overwrite);
            }
        }
        let work = MlpWeightWork { product: self.product(ctx, kept), dy: dy.clone(), dgate, dup };
        (dh, work)
    }

    fn weights(&self, work: MlpWeightWork<D>, h: &SharedBuffer<D>) -> Vec<WeightWork<D>> {
        let MlpWeightWork { product, dy, dgate, dup } = work;
        let of = |linear: Linear, x: &SharedBuffer<D>, dy| WeightWork::Linear {
            linear,
            x: x.clone(),
            dy,
        };
        let gate = self.gate.map(|gate| of(gate, h, Rc::new(dgate)));
        let mut works = vec![of(self.down, &product, dy), of(self.up, h, Rc::new(dup))];
        works.extend(gate);
        works
    }
}

/// Input of the weight gradients, apart from the block's input.
pub struct MlpWeightWork<D: Space> {
    product: SharedBuffer<D>,
    dy: SharedBuffer<D>,
    dgate: Buffer<D>,
    dup: Buffer<D>,
}

/// The kernel's activation for a model.
fn function(model: &ModelSpec) -> Activation {
    let gelu = match model.numerics.gelu {
        Gelu::Tanh => Activation::GeluTanh,
        Gelu::Erf => Activation::GeluErf,
    };
    match model.mlp.activation {
        model::Activation::Relu => Activation::Relu,
        model::Activation::SquaredRelu => Activation::SquaredRelu,
        model::Activation::Swiglu => Activation::Silu,
        model::Activation::Gelu | model::Activation::Geglu => gelu,
    }
}
