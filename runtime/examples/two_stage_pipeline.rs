//! A trainer written by hand: the model of `tensor_parallel_mlp` in two stages of a pipeline, which
//! run 1F1B passes. The ranks are threads.
//!
//!     cargo run --release -p meshwright-runtime --example two_stage_pipeline

mod made_up;

use made_up::layers::{BlockKept, FeedForward, Output, OutputKept};
use made_up::{HIDDEN, TOKENS, VOCAB, print_losses, spec, table};
use runtime::comm::CommError;
use runtime::layers::*;
use runtime::stages::{self, Stage, StageOutput, StageResult, Stages};
use runtime::state::params::{Inventory, ParameterSlice};
use runtime::{Buffer, Device, Error, TrainerSpec, kept};

/// The trainer.
pub struct Trainer;

#[allow(dead_code)] // tests have this file as a module
fn main() -> Result<(), Error> {
    print_losses(&Trainer)
}

impl<D: Device> Stages<D> for Trainer {
    fn spec(&self) -> TrainerSpec {
        spec(1, 2, false)
    }

    fn declare(
        &self,
        index: usize,
        _: Option<ParameterSlice>,
        all: &mut Inventory,
    ) -> Box<dyn Stage<D>> {
        match index {
            0 => Box::new(First {
                tokens: TokenEmbedding::declare(table("tokens.weight"), 1.0, all),
                table: Parameters::since(0, all),
                layers: [FeedForward::declare(all)],
                elements: all.elements(),
            }),
            _ => Box::new(Last { output: Output::declare(all), elements: all.elements() }),
        }
    }
}

/// The first stage: token embedding and one feed-forward block.
struct First {
    tokens: TokenEmbedding<Whole, VOCAB, HIDDEN>,
    table: Parameters<Whole>,
    layers: [FeedForward; 1],
    elements: usize,
}

kept! {
    struct FirstKept<D> { layers: Vec<BlockKept<D>>, }
}

impl<D: Device> Stage<D> for First {
    fn parameters(&self) -> std::ops::Range<usize> {
        0..self.elements
    }

    fn forward(&self, ctx: &PassContext<'_, D>, _: Buffer<D>) -> StageResult<D> {
        let stream = Stream::begin(self.tokens.forward(&self.table.weights(ctx)?));
        let (stream, layers) = stages::forward_all(&self.layers, ctx, stream)?;
        let y = stream.whole(ctx).into_buffer(ctx);
        Ok((StageOutput::Stream(y), Box::new(FirstKept { layers })))
    }

    fn backward(
        &self,
        ctx: &PassContext<'_, D>,
        kept: Box<dyn stages::Kept<D>>,
        dy: Buffer<D>,
        gradients: &mut Gradients<'_, D>,
    ) -> Result<Buffer<D>, CommError> {
        let FirstKept { layers } = stages::own(kept);
        let dy = Tensor::received(dy);
        let dx = stages::backward_all(&self.layers, ctx, layers, dy, gradients)?;
        gradients.add(self.tokens.weights(ctx, &dx));
        self.table.complete(gradients)?;
        Ok(Buffer::empty())
    }
}

/// The last stage: the output layer.
struct Last {
    output: Output<1, TOKENS, VOCAB>,
    elements: usize,
}

kept! {
    struct LastKept<D> {
        logits: Tensor<D, Columns<Tp<1>>, TOKENS, VOCAB>,
        output: OutputKept<D, 1, TOKENS>,
    } logits in logits
}

impl<D: Device> Stage<D> for Last {
    fn parameters(&self) -> std::ops::Range<usize> {
        0..self.elements
    }

    fn forward(&self, ctx: &PassContext<'_, D>, x: Buffer<D>) -> StageResult<D> {
        let stream = Stream::begin(Tensor::received(x));
        let (losses, logits, output) = self.output.forward(ctx, stream)?;
        Ok((StageOutput::Losses(losses), Box::new(LastKept { logits, output })))
    }

    fn backward(
        &self,
        ctx: &PassContext<'_, D>,
        kept: Box<dyn stages::Kept<D>>,
        _: Buffer<D>,
        gradients: &mut Gradients<'_, D>,
    ) -> Result<Buffer<D>, CommError> {
        let LastKept { logits, output } = stages::own(kept);
        Ok(self.output.backward(ctx, logits, output, gradients)?.into_buffer(ctx))
    }
}
