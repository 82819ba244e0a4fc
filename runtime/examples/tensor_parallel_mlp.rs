//! A trainer written by hand: a feed-forward model on two tensor-parallel ranks, with sequence
//! parallelism. The ranks are threads.
//!
//!     cargo run --release -p meshwright-runtime --example tensor_parallel_mlp

mod made_up;

use made_up::layers::{Output, OutputKept};
use made_up::{HIDDEN, TOKENS, VOCAB, WIDTH, matrix, print_losses, spec, table};
use runtime::comm::CommError;
use runtime::layers::*;
use runtime::stages::{self, Stage, StageOutput, StageResult, Stages};
use runtime::state::params::{Inventory, ParameterSlice};
use runtime::{Buffer, Device, Error, TrainerSpec, kept};

type Tp = runtime::layers::Tp<2>;
const ROWS: usize = TOKENS / Tp::SIZE; // of the residual stream on a rank
const INNER: usize = WIDTH / Tp::SIZE; // columns of the feed-forward block on a rank
const VOCAB_ROWS: usize = VOCAB / Tp::SIZE; // rows of the vocabulary on a rank
type Rows<D> = Tensor<D, Split<Tp>, ROWS, HIDDEN>;
type Full<D> = Tensor<D, Whole, TOKENS, HIDDEN>;
type Inner<D> = Tensor<D, Columns<Tp>, TOKENS, INNER>;

/// The trainer.
pub struct Trainer;

#[allow(dead_code)] // tests have this file as a module
fn main() -> Result<(), Error> {
    print_losses(&Trainer)
}

/// The parameters of a rank.
struct Model {
    /// All but the output layer's.
    parameters: Parameters<Whole>,
    tokens: TokenEmbedding<Partial<Tp>, VOCAB_ROWS, HIDDEN>,
    norm: RmsNorm<Split<Tp>, HIDDEN>,
    gate: ColumnLinear<Tp, HIDDEN, INNER>,
    up: ColumnLinear<Tp, HIDDEN, INNER>,
    down: RowLinear<Tp, INNER, HIDDEN>,
    output: Output<2, ROWS, VOCAB_ROWS>,
    elements: usize,
}

kept! {
    /// What the backward pass reads.
    struct Kept<D> {
        x: Rows<D>,
        s: Statistics<D>,
        h: Full<D>,
        gate: Inner<D>,
        up: Inner<D>,
        a: Inner<D>,
        logits: Tensor<D, Columns<Tp>, TOKENS, VOCAB_ROWS>,
        output: OutputKept<D, 2, ROWS>,
    } logits in logits
}

impl<D: Device> Stages<D> for Trainer {
    fn spec(&self) -> TrainerSpec {
        spec(Tp::SIZE, 1, true)
    }

    fn declare(
        &self,
        _: usize,
        _: Option<ParameterSlice>,
        all: &mut Inventory,
    ) -> Box<dyn Stage<D>> {
        let tokens = TokenEmbedding::declare(table("tokens.weight"), 1.0, all);
        let norm = RmsNorm::declare("norm", 1e-6, false, all);
        let gate = ColumnLinear::declare(matrix("gate"), all);
        let up = ColumnLinear::declare(matrix("up"), all);
        let down = RowLinear::declare(matrix("down"), all);
        let parameters = Parameters::since(0, all);
        let (output, elements) = (Output::declare(all), all.elements());
        Box::new(Model { parameters, tokens, norm, gate, up, down, output, elements })
    }
}

impl<D: Device> Stage<D> for Model {
    fn parameters(&self) -> std::ops::Range<usize> {
        0..self.elements
    }

    fn forward(&self, ctx: &PassContext<'_, D>, _: Buffer<D>) -> StageResult<D> {
        let ctx = &self.parameters.weights(ctx)?;
        let tp = Group::<D, Tp>::tp(ctx);
        let x: Rows<D> = tp.reduce_scatter(self.tokens.forward::<D, TOKENS>(ctx))?;
        let (x, h, s) = self.norm.forward(ctx, Stream::begin(x));
        let h: Full<D> = tp.all_gather(&h)?;
        let (gate, up) = (self.gate.forward(ctx, &h), self.up.forward(ctx, &h));
        let a = gated(ctx, Activation::Silu, &gate, &up);
        let sum: Rows<D> = tp.reduce_scatter(self.down.forward(ctx, &a))?;
        let (losses, logits, output) = self.output.forward(ctx, Stream::sum(&x, sum))?;
        Ok((StageOutput::Losses(losses), Box::new(Kept { x, s, h, gate, up, a, logits, output })))
    }

    fn backward(
        &self,
        ctx: &PassContext<'_, D>,
        kept: Box<dyn stages::Kept<D>>,
        _: Buffer<D>,
        gradients: &mut Gradients<'_, D>,
    ) -> Result<Buffer<D>, CommError> {
        let ctx = &self.parameters.weights(ctx)?;
        let tp = Group::<D, Tp>::tp(ctx);
        let Kept { x, s, h, gate, up, a, logits, output } = stages::own(kept);
        let dy = self.output.backward(ctx, logits, output, gradients)?;
        let dfull: Full<D> = tp.all_gather(&dy)?;
        gradients.add(self.down.weights(&a, &dfull));
        let da = self.down.backward(ctx, &dfull);
        let (dgate, dup) = gated_backward(ctx, Activation::Silu, &gate, &up, &da);
        gradients.add(self.gate.weights(&h, &dgate));
        gradients.add(self.up.weights(&h, &dup));
        let dpart = self.up.add_backward(ctx, &dup, self.gate.backward(ctx, &dgate));
        let dh = tp.reduce_scatter(dpart)?;
        gradients.add(self.norm.weights(&x, &s, &dh));
        let dx = self.norm.backward_onto(ctx, &x, &s, &dh, dy);
        let dx: Full<D> = tp.all_gather(&dx)?;
        gradients.add(self.tokens.weights(ctx, &dx));
        self.parameters.complete(gradients)?;
        Ok(Buffer::empty())
    }
}
