//! Trainers written by hand: one model has the same losses in two stages, and on two
//! tensor-parallel ranks with and without sequence parallelism.

// Each example has a copy of this module.
#![allow(clippy::duplicate_mod)]

#[path = "../examples/made_up/mod.rs"]
mod made_up;
#[path = "../examples/tensor_parallel_mlp.rs"]
mod sequence_parallel;
#[path = "../examples/two_stage_pipeline.rs"]
mod two_stages;

use made_up::{HIDDEN, TOKENS, VOCAB, WIDTH, matrix, spec, table, train};
use runtime::comm::CommError;
use runtime::layers::*;
use runtime::stages::{Kept, Stage, StageOutput, StageResult, Stages, own};
use runtime::state::params::{ByDivision, Inventory, ParameterSlice};
use runtime::{Buffer, Device, TrainerSpec, Zero};
use std::ops::Range;

#[test]
fn splits_have_the_same_losses() {
    let expected = train(&two_stages::Trainer, 5).unwrap();
    assert!(expected[4] < expected[0] - 0.1, "{expected:?}");
    let others = [train(&sequence_parallel::Trainer, 5), train(&AllReduced, 5)];
    for losses in others.map(Result::unwrap) {
        let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-12;
        assert!(losses.iter().zip(&expected).all(near), "{losses:?} {expected:?}");
    }
}

#[test]
fn fused_rows_are_the_blocks_of_one_matrix() {
    let mut all = Inventory::new(1, 2);
    let mut fused = FusedRows::declare(matrix("qkv"), &[(8, 2), (2, 1)], HIDDEN, &mut all);
    let _q: ColumnLinear<Tp, HIDDEN, 4> = fused.part();
    let _k: ColumnLinear<Tp, HIDDEN, 2> = fused.part();
    assert_eq!(all.named("qkv.weight").unwrap().extent.rows, [4..8, 8..10]);
    assert_eq!(all.elements(), 6 * HIDDEN);
}

#[test]
#[should_panic(expected = "qkv: the block has shape (4, 16), the layer (8, 16)")]
fn a_block_of_another_shape_is_refused() {
    let mut all = Inventory::new(0, 2);
    let mut fused = FusedRows::declare(matrix("qkv"), &[(8, 2)], HIDDEN, &mut all);
    let _q: ColumnLinear<Tp, HIDDEN, 8> = fused.part();
}

/// An inventory with a matrix that 4 replicas share.
fn shared_by_four(stage: u8) -> Inventory {
    let zero = Zero { stage, ways: 4 };
    let replicas = ByDivision { dense: 4, expert: 1 };
    let mut all = Inventory::new(0, 1).with_replicas(zero, replicas);
    let _up = Linear::<HIDDEN, WIDTH>::declare(matrix("up"), &mut all);
    all
}

#[test]
fn parameters_of_replicas_have_their_number() {
    let parameters = Parameters::<Sharded<4>>::since(0, &shared_by_four(3));
    assert_eq!(parameters.range(), 0..HIDDEN * WIDTH);
    let each_has_all = Inventory::new(0, 1).with_replicas(Zero::NONE, ByDivision::each(|_| 4));
    assert_eq!(Parameters::<Replicated<4>>::since(0, &each_has_all).range(), 0..0);
}

#[test]
#[should_panic(expected = "compiled for 2 replicas of these parameters, there are 4")]
fn another_number_of_replicas_is_refused() {
    let _parameters = Parameters::<Sharded<2>>::since(0, &shared_by_four(3));
}

#[test]
#[should_panic(expected = "ZeRO stage is 1, the parameters are declared as held by each replica")]
fn shared_parameters_are_not_replicated() {
    let _parameters = Parameters::<Replicated<4>>::since(0, &shared_by_four(1));
}

type Tp = runtime::layers::Tp<2>;
type Rows<D> = Tensor<D, Whole, TOKENS, HIDDEN>;
type Wide<D> = Tensor<D, Columns<Tp>, TOKENS, { WIDTH / 2 }>;

/// The model on two ranks without sequence parallelism: both have all rows of the stream.
struct AllReduced;

struct Model {
    parameters: Parameters<Whole>,
    embedding: TokenEmbedding<Partial<Tp>, { VOCAB / 2 }, HIDDEN>,
    norm: RmsNorm<Whole, HIDDEN>,
    gate: ColumnLinear<Tp, HIDDEN, { WIDTH / 2 }>,
    up: ColumnLinear<Tp, HIDDEN, { WIDTH / 2 }>,
    down: RowLinear<Tp, { WIDTH / 2 }, HIDDEN>,
    last_norm: RmsNorm<Whole, HIDDEN>,
    output: ColumnLinear<Tp, HIDDEN, { VOCAB / 2 }>,
    loss: CrossEntropy<Columns<Tp>, { VOCAB / 2 }>,
}

struct Saved<D: Device> {
    block: (Rows<D>, Statistics<D>, Rows<D>),
    wide: (Wide<D>, Wide<D>, Wide<D>),
    last: (Rows<D>, Statistics<D>, Rows<D>),
    logits: Tensor<D, Columns<Tp>, TOKENS, { VOCAB / 2 }>,
    softmax: (Numbers<D, Whole, TOKENS>, Numbers<D, Whole, TOKENS>),
}

impl<D: Device> Stages<D> for AllReduced {
    fn spec(&self) -> TrainerSpec {
        spec(2, 1, false)
    }

    fn declare(
        &self,
        _: usize,
        _: Option<ParameterSlice>,
        all: &mut Inventory,
    ) -> Box<dyn Stage<D>> {
        let embedding = TokenEmbedding::declare(table("tokens.weight"), 1.0, all);
        let norm = RmsNorm::declare("norm", 1e-6, false, all);
        let gate = ColumnLinear::declare(matrix("gate"), all);
        let up = ColumnLinear::declare(matrix("up"), all);
        let down = RowLinear::declare(matrix("down"), all);
        let last_norm = RmsNorm::declare("last_norm", 1e-6, false, all);
        let output = ColumnLinear::from_table(table("output.weight").declare(VOCAB / 2, all));
        let (loss, parameters) = (CrossEntropy::new(VOCAB, None), Parameters::since(0, all));
        Box::new(Model { parameters, embedding, norm, gate, up, down, last_norm, output, loss })
    }
}

impl<D: Device> Stage<D> for Model {
    fn parameters(&self) -> Range<usize> {
        self.parameters.range()
    }

    fn table(&self) -> Option<ParameterSlice> {
        Some(self.embedding.table())
    }

    fn forward(&self, ctx: &PassContext<'_, D>, _: Buffer<D>) -> StageResult<D> {
        let ctx = &self.parameters.weights(ctx)?;
        let tp = Group::<D, Tp>::tp(ctx);
        let x = tp.all_reduce(self.embedding.forward(ctx))?;
        let (x, h, s) = self.norm.forward(ctx, Stream::begin(x));
        let (g, up) = (self.gate.forward(ctx, &h), self.up.forward(ctx, &h));
        let a = gated(ctx, Activation::Silu, &g, &up);
        let branch = tp.all_reduce(self.down.forward(ctx, &a))?;
        let (y, n, t) = self.last_norm.forward(ctx, Stream::sum(&x, branch));
        let logits = self.output.forward(ctx, &n);
        let (own_max, sum, target) = self.loss.sums(ctx, &logits);
        let max = tp.max(own_max.share())?;
        let sum = self.loss.around(ctx, sum, &own_max, &max);
        let (sum, target) = (tp.sum(sum)?, tp.sum(target)?);
        let losses = self.loss.loss(ctx, &max, &sum, &target).into_losses(ctx);
        let (block, wide, last) = ((x, s, h), (g, up, a), (y, t, n));
        let saved = Saved { block, wide, last, logits, softmax: (max, sum) };
        Ok((StageOutput::Losses(losses), Box::new(saved)))
    }

    fn backward(
        &self,
        ctx: &PassContext<'_, D>,
        kept: Box<dyn Kept<D>>,
        _: Buffer<D>,
        gradients: &mut Gradients<'_, D>,
    ) -> Result<Buffer<D>, CommError> {
        let ctx = &self.parameters.weights(ctx)?;
        let tp = Group::<D, Tp>::tp(ctx);
        let Saved { block, wide, last, logits, softmax } = own(kept);
        let ((x, s, h), (g, up, a), (y, t, n)) = (block, wide, last);
        let dlogits = self.loss.gradient(ctx, logits, &softmax.0, &softmax.1);
        gradients.add(self.output.weights(&n, &dlogits));
        let dn = tp.all_reduce(self.output.backward(ctx, &dlogits))?;
        gradients.add(self.last_norm.weights(&y, &t, &dn));
        let dy = self.last_norm.backward(ctx, &y, &t, &dn);
        gradients.add(self.down.weights(&a, &dy));
        let da = self.down.backward(ctx, &dy);
        let (dgate, dup) = gated_backward(ctx, Activation::Silu, &g, &up, &da);
        gradients.add(self.gate.weights(&h, &dgate));
        gradients.add(self.up.weights(&h, &dup));
        let dh = self.up.add_backward(ctx, &dup, self.gate.backward(ctx, &dgate));
        let dh = tp.all_reduce(dh)?;
        gradients.add(self.norm.weights(&x, &s, &dh));
        let dx = self.norm.backward_onto(ctx, &x, &s, &dh, dy);
        gradients.add(self.embedding.weights(ctx, &dx));
        self.parameters.complete(gradients)?;
        Ok(Buffer::empty())
    }
}

impl<D: Device> Kept<D> for Saved<D> {
    fn bytes(&self) -> usize {
        self.logits.bytes()
    }

    fn logits(&self) -> Option<&Buffer<D>> {
        Some(self.logits.buffer())
    }
}
