//! A trainer written by hand: a feed-forward model on two tensor-parallel ranks, with sequence
//! parallelism. The ranks are threads.
//!
//!     cargo run --release -p meshwright-runtime --example tensor_parallel_mlp

mod made_up;

use made_up::{HIDDEN, TOKENS, VOCAB, WIDTH, matrix, spec, table, train};
use runtime::comm::CommError;
use runtime::layers::*;
use runtime::stages::{Kept, Stage, StageOutput, StageResult, Stages, own};
use runtime::state::params::{Inventory, ParameterSlice};
use runtime::{Buffer, Device, Error, TrainerSpec};
use std::ops::Range;

type Tp = runtime::layers::Tp<2>;
const ROWS: usize = TOKENS / Tp::SIZE; // of the residual stream on a rank
const F: usize = WIDTH / Tp::SIZE; // columns of the feed-forward block on a rank
const V: usize = VOCAB / Tp::SIZE; // columns of the logits on a rank
type Rows<D> = Tensor<D, Split<Tp>, ROWS, HIDDEN>;
type Gathered<D> = Tensor<D, Whole, TOKENS, HIDDEN>;
type Wide<D> = Tensor<D, Columns<Tp>, TOKENS, F>;

/// The trainer.
pub struct Trainer;

#[allow(dead_code)]
fn main() -> Result<(), Error> {
    for (step, loss) in train(&Trainer, 10)?.iter().enumerate() {
        println!("step {step} loss {loss:.4}");
    }
    Ok(())
}

/// A rank's parameters, as declared.
struct Model {
    embedding: TokenEmbedding<Partial<Tp>, V, HIDDEN>,
    norm: RmsNorm<Split<Tp>, HIDDEN>,
    gate: ColumnLinear<Tp, HIDDEN, F>,
    up: ColumnLinear<Tp, HIDDEN, F>,
    down: RowLinear<Tp, F, HIDDEN>,
    last_norm: RmsNorm<Split<Tp>, HIDDEN>,
    output: ColumnLinear<Tp, HIDDEN, V>,
    loss: CrossEntropy<Columns<Tp>, V>,
    elements: usize,
}

/// What the backward pass reads.
struct Saved<D: Device> {
    block: (Rows<D>, Statistics<D>, Gathered<D>),
    wide: (Wide<D>, Wide<D>, Wide<D>),
    last: (Rows<D>, Statistics<D>, Gathered<D>),
    logits: Tensor<D, Columns<Tp>, TOKENS, V>,
    softmax: (Numbers<D, Whole, TOKENS>, Numbers<D, Whole, TOKENS>),
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
        let embedding = TokenEmbedding::declare(table("tokens.weight"), 1.0, all);
        let norm = RmsNorm::declare("norm", 1e-6, false, all);
        let gate = ColumnLinear::declare(matrix("gate"), all);
        let up = ColumnLinear::declare(matrix("up"), all);
        let down = RowLinear::declare(matrix("down"), all);
        let last_norm = RmsNorm::declare("last_norm", 1e-6, false, all);
        let output = ColumnLinear::from_table(table("output.weight").declare(all));
        let (loss, elements) = (CrossEntropy::new(VOCAB, None), all.elements());
        Box::new(Model { embedding, norm, gate, up, down, last_norm, output, loss, elements })
    }
}

impl<D: Device> Stage<D> for Model {
    fn parameters(&self) -> Range<usize> {
        0..self.elements
    }

    fn table(&self) -> Option<ParameterSlice> {
        Some(self.embedding.table())
    }

    fn forward(&self, ctx: &Context<'_, D>, _: Buffer<D>) -> StageResult<D> {
        let tp = Group::<D, Tp>::tp(ctx);
        let x: Rows<D> = tp.reduce_scatter(self.embedding.forward::<D, TOKENS>(ctx))?;
        let (x, h, s) = self.norm.forward(ctx, Stream::begin(x));
        let h: Gathered<D> = tp.all_gather(&h)?;
        let (g, up) = (self.gate.forward(ctx, &h), self.up.forward(ctx, &h));
        let a = gated(ctx, Activation::Silu, &g, &up);
        let branch = tp.reduce_scatter(self.down.forward(ctx, &a))?;
        // The second norm computes the sum.
        let (y, n, t) = self.last_norm.forward(ctx, Stream::sum(&x, branch));
        let n = tp.all_gather(&n)?;
        let logits = self.output.forward(ctx, &n);
        // Ranks exchange three numbers a token, and no logits.
        let max = tp.max(self.loss.max(ctx, &logits))?;
        let (sum, target) = self.loss.sums(ctx, &logits, &max);
        let (sum, target) = (tp.sum(sum)?, tp.sum(target)?);
        let losses = self.loss.loss(ctx, &max, &sum, &target).into_losses(ctx);
        let (block, wide, last) = ((x, s, h), (g, up, a), (y, t, n));
        let saved = Saved { block, wide, last, logits, softmax: (max, sum) };
        Ok((StageOutput::Losses(losses), Box::new(saved)))
    }

    fn backward(
        &self,
        ctx: &Context<'_, D>,
        kept: Box<dyn Kept<D>>,
        _: Buffer<D>,
        gradients: &mut Gradients<'_, D>,
    ) -> Result<Buffer<D>, CommError> {
        let tp = Group::<D, Tp>::tp(ctx);
        let Saved { block, wide, last, logits, softmax } = own(kept);
        let ((x, s, h), (g, up, a), (y, t, n)) = (block, wide, last);
        let dlogits = self.loss.gradient(ctx, logits, &softmax.0, &softmax.1);
        gradients.add(self.output.weights(&n, &dlogits));
        let dn = tp.reduce_scatter(self.output.backward(ctx, &dlogits))?;
        gradients.add(self.last_norm.weights(&y, &t, &dn));
        let dy = self.last_norm.backward(ctx, &y, &t, &dn);
        let dbranch = tp.all_gather(&dy)?;
        gradients.add(self.down.weights(&a, &dbranch));
        let da = self.down.backward(ctx, &dbranch);
        let (dgate, dup) = gated_backward(ctx, Activation::Silu, &g, &up, &da);
        gradients.add(self.gate.weights(&h, &dgate));
        gradients.add(self.up.weights(&h, &dup));
        let dh = self.up.add_backward(ctx, &dup, self.gate.backward(ctx, &dgate));
        let dh = tp.reduce_scatter(dh)?;
        gradients.add(self.norm.weights(&x, &s, &dh));
        let dx = self.norm.backward_onto(ctx, &x, &s, &dh, dy);
        let dx: Gathered<D> = tp.all_gather(&dx)?;
        gradients.add(self.embedding.weights(ctx, &dx));
        Ok(Buffer::empty())
    }
}

impl<D: Device> Kept<D> for Saved<D> {
    fn bytes(&self) -> usize {
        let Self { block, wide, last, logits, softmax } = self;
        let rows =
            |(x, s, h): &(Rows<D>, Statistics<D>, Gathered<D>)| x.bytes() + s.bytes() + h.bytes();
        rows(block) + rows(last) + 3 * wide.0.bytes() + logits.bytes() + 2 * softmax.0.bytes()
    }

    fn logits(&self) -> Option<&Buffer<D>> {
        Some(self.logits.buffer())
    }
}
