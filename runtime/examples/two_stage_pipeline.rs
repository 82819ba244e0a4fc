//! A trainer written by hand: the model of `tensor_parallel_mlp` in two stages of a pipeline, which
//! run 1F1B passes. The ranks are threads.
//!
//!     cargo run --release -p meshwright-runtime --example two_stage_pipeline

mod made_up;

use made_up::{HIDDEN, TOKENS, VOCAB, WIDTH, matrix, spec, table, train};
use runtime::comm::CommError;
use runtime::layers::*;
use runtime::stages::{Kept, Stage, StageOutput, StageResult, Stages, own};
use runtime::state::params::{Inventory, ParameterSlice};
use runtime::{Buffer, Device, Error, TrainerSpec};
use std::ops::Range;

type Rows<D, const C: usize = HIDDEN> = Tensor<D, Whole, TOKENS, C>;
type Scalars<D> = Numbers<D, Whole, TOKENS>;

/// The trainer.
pub struct Trainer;

#[allow(dead_code)]
fn main() -> Result<(), Error> {
    for (step, loss) in train(&Trainer, 10)?.iter().enumerate() {
        println!("step {step} loss {loss:.4}");
    }
    Ok(())
}

impl<D: Device> Stages<D> for Trainer {
    fn spec(&self) -> TrainerSpec {
        spec(1, 2, false)
    }

    fn declare(
        &self,
        stage: usize,
        _: Option<ParameterSlice>,
        all: &mut Inventory,
    ) -> Box<dyn Stage<D>> {
        if stage == 0 { Box::new(First::declare(all)) } else { Box::new(Last::declare(all)) }
    }
}

/// Token embedding and feed-forward block.
struct First {
    embedding: TokenEmbedding<Whole, VOCAB, HIDDEN>,
    norm: RmsNorm<Whole, HIDDEN>,
    gate: Linear<HIDDEN, WIDTH>,
    up: Linear<HIDDEN, WIDTH>,
    down: Linear<WIDTH, HIDDEN>,
    elements: usize,
}

impl First {
    fn declare(all: &mut Inventory) -> Self {
        let embedding = TokenEmbedding::declare(table("tokens.weight"), 1.0, all);
        let norm = RmsNorm::declare("norm", 1e-6, false, all);
        let [gate, up] = ["gate", "up"].map(|name| Linear::declare(matrix(name), all));
        let down = Linear::declare(matrix("down"), all);
        Self { embedding, norm, gate, up, down, elements: all.elements() }
    }
}

/// Stream, its statistics and norm; gate, up and their product.
struct OfFirst<D: Device>((Rows<D>, Statistics<D>, Rows<D>), [Rows<D, WIDTH>; 3]);

impl<D: Device> Stage<D> for First {
    fn parameters(&self) -> Range<usize> {
        0..self.elements
    }

    fn table(&self) -> Option<ParameterSlice> {
        Some(self.embedding.table())
    }

    fn forward(&self, ctx: &Context<'_, D>, _: Buffer<D>) -> StageResult<D> {
        let x = Stream::begin(self.embedding.forward(ctx));
        let (x, h, s) = self.norm.forward(ctx, x);
        let (g, up) = (self.gate.forward(ctx, &h), self.up.forward(ctx, &h));
        let a = gated(ctx, Activation::Silu, &g, &up);
        let y = Stream::sum(&x, self.down.forward(ctx, &a)).whole(ctx).into_buffer(ctx);
        Ok((StageOutput::Stream(y), Box::new(OfFirst((x, s, h), [g, up, a]))))
    }

    fn backward(
        &self,
        ctx: &Context<'_, D>,
        kept: Box<dyn Kept<D>>,
        dy: Buffer<D>,
        gradients: &mut Gradients<'_, D>,
    ) -> Result<Buffer<D>, CommError> {
        let (OfFirst((x, s, h), [g, up, a]), dy) = (own(kept), Tensor::received(dy));
        gradients.add(self.down.weights(&a, &dy));
        let da = self.down.backward(ctx, &dy);
        let (dgate, dup) = gated_backward(ctx, Activation::Silu, &g, &up, &da);
        gradients.add(self.gate.weights(&h, &dgate));
        gradients.add(self.up.weights(&h, &dup));
        let dh = self.up.add_backward(ctx, &dup, self.gate.backward(ctx, &dgate));
        gradients.add(self.norm.weights(&x, &s, &dh));
        let dx = self.norm.backward_onto(ctx, &x, &s, &dh, dy);
        gradients.add(self.embedding.weights(ctx, &dx));
        Ok(Buffer::empty())
    }
}

impl<D: Device> Kept<D> for OfFirst<D> {
    fn bytes(&self) -> usize {
        let (x, s, h) = &self.0;
        x.bytes() + s.bytes() + h.bytes() + self.1.iter().map(Tensor::bytes).sum::<usize>()
    }

    fn logits(&self) -> Option<&Buffer<D>> {
        None
    }
}

/// Norm, output layer and loss.
struct Last {
    norm: RmsNorm<Whole, HIDDEN>,
    output: Linear<HIDDEN, VOCAB>,
    loss: CrossEntropy<Whole, VOCAB>,
    elements: usize,
}

impl Last {
    fn declare(all: &mut Inventory) -> Self {
        let norm = RmsNorm::declare("last_norm", 1e-6, false, all);
        let output = Linear::from_table(table("output.weight").declare(all));
        Self { norm, output, loss: CrossEntropy::new(VOCAB, None), elements: all.elements() }
    }
}

/// Stream, its statistics and norm; logits; maxima and sums of exponentials.
struct OfLast<D: Device>((Rows<D>, Statistics<D>, Rows<D>), Rows<D, VOCAB>, [Scalars<D>; 2]);

impl<D: Device> Stage<D> for Last {
    fn parameters(&self) -> Range<usize> {
        0..self.elements
    }

    fn table(&self) -> Option<ParameterSlice> {
        None
    }

    fn forward(&self, ctx: &Context<'_, D>, x: Buffer<D>) -> StageResult<D> {
        let (x, h, s) = self.norm.forward(ctx, Stream::begin(Tensor::received(x)));
        let logits = self.output.forward(ctx, &h);
        let max = self.loss.max(ctx, &logits);
        let (sum, target) = self.loss.sums(ctx, &logits, &max);
        let losses = self.loss.loss(ctx, &max, &sum, &target).into_losses(ctx);
        Ok((StageOutput::Losses(losses), Box::new(OfLast((x, s, h), logits, [max, sum]))))
    }

    fn backward(
        &self,
        ctx: &Context<'_, D>,
        kept: Box<dyn Kept<D>>,
        _: Buffer<D>,
        gradients: &mut Gradients<'_, D>,
    ) -> Result<Buffer<D>, CommError> {
        let OfLast((x, s, h), logits, [max, sum]) = own(kept);
        let dlogits = self.loss.gradient(ctx, logits, &max, &sum);
        gradients.add(self.output.weights(&h, &dlogits));
        let dh = self.output.backward(ctx, &dlogits);
        gradients.add(self.norm.weights(&x, &s, &dh));
        Ok(self.norm.backward(ctx, &x, &s, &dh).into_buffer(ctx))
    }
}

impl<D: Device> Kept<D> for OfLast<D> {
    fn bytes(&self) -> usize {
        let Self((x, s, h), logits, [max, sum]) = self;
        x.bytes() + s.bytes() + h.bytes() + logits.bytes() + max.bytes() + sum.bytes()
    }

    fn logits(&self) -> Option<&Buffer<D>> {
        Some(self.1.buffer())
    }
}
