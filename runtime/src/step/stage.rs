//! A pipeline stage: consecutive layers, with the embedding before the first and the output layer
//! after the last. With a vocabulary split over the pipeline, the two ends are learned positions
//! and the final norm.

use crate::comm::CommError;
use crate::device::{Device, Space};
use crate::layers::{
    Block, BlockKept, Context, EmbeddingLayer, HeadKept, HeadLayer, Norm, Residual, Statistics,
    TensorNames, WeightGradients, WeightWork,
};
use crate::program::Program;
use crate::state::buffer::{Buffer, WideBuffer};
use crate::state::params::{Inventory, ParameterSlice, SharedBuffer, Store};
use kernels::Output;
use std::rc::Rc;

/// One stage as one rank holds it.
#[derive(Clone, Debug)]
pub struct Stage {
    embedding: Option<EmbeddingLayer>,
    blocks: Vec<Block>,
    head: Option<HeadLayer>,
    /// The norm before an output layer that all pipeline ranks share.
    norm: Option<Norm>,
    /// First element of the parameters of the embedding, of each block and of the head; then the
    /// end.
    bounds: Vec<usize>,
}

/// Output of a stage.
pub enum StageOutput<D: Space> {
    /// The residual stream, `[r, h]`, for the next stage.
    Stream(Buffer<D>),
    /// The losses of the tokens, `[n]`.
    Losses(WideBuffer<D>),
}

/// What a stage keeps of a micro-batch for the backward pass.
pub struct StageKept<D: Space> {
    blocks: Vec<BlockKept<D>>,
    /// Of the output layer.
    pub head: Option<HeadKept<D>>,
    /// Of the final norm, where all pipeline ranks share the output layer.
    norm: Option<NormKept<D>>,
}

/// What a norm keeps: its input `[r, h]` and its rows' statistics.
struct NormKept<D: Space> {
    x: SharedBuffer<D>,
    statistics: Rc<Statistics<D>>,
}

impl<D: Space> StageKept<D> {
    /// Bytes held.
    pub fn bytes(&self) -> usize {
        let head = self.head.as_ref().map_or(0, HeadKept::bytes);
        let norm = self.norm.as_ref().map_or(0, |norm| norm.x.bytes() + norm.statistics.bytes());
        self.blocks.iter().map(BlockKept::bytes).sum::<usize>() + head + norm
    }
}

/// Called when the gradients are complete from this element to the end of the stage.
pub type Finished<'a, D> = &'a mut dyn FnMut(&Store<D>, usize) -> Result<(), CommError>;

impl Stage {
    /// Declares stage `index`. `embedding` is the table, if this rank already holds it.
    pub fn declare(
        program: &Program,
        index: usize,
        embedding: Option<ParameterSlice>,
        inventory: &mut Inventory,
    ) -> Self {
        let (model, split) = (&program.model, program.sequence_parallel);
        inventory.enter_stage(index);
        let mut bounds = vec![inventory.elements()];
        let here = program.vocab.is_none();
        let first = (index == 0).then(|| EmbeddingLayer::declare(model, here, split, inventory));
        bounds.push(inventory.elements());
        let stage = &program.stages[index];
        let mut blocks = Vec::new();
        for (layer, &recompute) in stage.layers().zip(&stage.recompute) {
            blocks.push(Block::declare(model, layer, recompute, split, inventory));
            bounds.push(inventory.elements());
        }
        let table = first.as_ref().and_then(EmbeddingLayer::table).or(embedding);
        let shared = table.filter(|_| model.tied_embeddings);
        let last = index + 1 == program.stages.len();
        let head = (last && here).then(|| HeadLayer::declare(model, shared, split, inventory));
        let name = TensorNames::of(model).final_norm();
        let norm = (last && !here).then(|| Norm::declare(model, name, split, inventory));
        bounds.push(inventory.elements());
        Self { embedding: first, blocks, head, norm, bounds }
    }

    /// The embedding table, if this stage has it.
    pub fn table(&self) -> Option<ParameterSlice> {
        self.embedding.as_ref().and_then(EmbeddingLayer::table)
    }

    /// First element of its parameters.
    pub fn begin(&self) -> usize {
        self.bounds.first().copied().unwrap_or(0)
    }

    /// End of its parameters.
    pub fn end(&self) -> usize {
        self.bounds.last().copied().unwrap_or(0)
    }

    /// Forward pass. `x[r, h]` comes from the previous stage. The first stage gets an empty buffer,
    /// or the embedding rows of its tokens if all pipeline ranks look them up. Returns the residual
    /// stream, normed if all pipeline ranks share the output layer.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn forward<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        x: Buffer<D>,
    ) -> Result<(StageOutput<D>, StageKept<D>), CommError> {
        let x = match &self.embedding {
            Some(embedding) => embedding.forward(ctx, x)?,
            None => x,
        };
        let mut x = Residual::Whole(Rc::new(x));
        let mut blocks = Vec::with_capacity(self.blocks.len());
        for block in &self.blocks {
            let (y, kept) = block.forward(ctx, x)?;
            blocks.push(kept);
            x = y;
        }
        if let Some(head) = &self.head {
            let (losses, head) = head.forward(ctx, x)?;
            let kept = StageKept { blocks, head: Some(head), norm: None };
            return Ok((StageOutput::Losses(losses), kept));
        }
        let Some(norm) = &self.norm else {
            let x = x.whole(ctx);
            return Ok((StageOutput::Stream(x), StageKept { blocks, head: None, norm: None }));
        };
        let (x, y, statistics) = norm.of(ctx, x);
        let norm = NormKept { x, statistics: Rc::new(statistics) };
        Ok((StageOutput::Stream(y), StageKept { blocks, head: None, norm: Some(norm) }))
    }

    /// Backward pass. `dy[r, h]` comes from the next stage or from the shared output layer; it is
    /// empty for a last stage with its own output layer. Returns the gradient for the previous
    /// stage. For the first stage that is the gradient of the shared input layer, or empty if it
    /// has its own.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn backward<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        kept: StageKept<D>,
        dy: Buffer<D>,
        weights: &mut WeightGradients<'_, D>,
        finished: Finished<'_, D>,
    ) -> Result<Buffer<D>, CommError> {
        let mut bounds = self.bounds.iter().rev().skip(1);
        let mut tell = |weights: &mut WeightGradients<'_, D>| match (bounds.next(), weights) {
            (Some(&from), WeightGradients::Now(gradients)) => finished(gradients, from),
            _ => Ok(()),
        };
        let mut dx = match (&self.head, kept.head, &self.norm, kept.norm) {
            (Some(head), Some(kept), ..) => head.backward(ctx, kept, weights)?,
            (_, _, Some(norm), Some(kept)) => norm_backward(ctx, norm, kept, dy, weights),
            _ => dy,
        };
        tell(weights)?;
        for (block, kept) in self.blocks.iter().zip(kept.blocks).rev() {
            dx = block.backward(ctx, kept, dx, weights)?;
            tell(weights)?;
        }
        if let Some(embedding) = &self.embedding {
            dx = embedding.backward(ctx, dx, weights)?;
        }
        tell(weights)?;
        Ok(dx)
    }
}

fn norm_backward<D: Device>(
    ctx: &Context<'_, D>,
    norm: &Norm,
    kept: NormKept<D>,
    dy: Buffer<D>,
    weights: &mut WeightGradients<'_, D>,
) -> Buffer<D> {
    let (NormKept { x, statistics }, dy) = (kept, Rc::new(dy));
    let mut dx = ctx.buffer(x.len());
    norm.backward_input(ctx, &x, &statistics, &dy, &mut dx, Output::Overwrite);
    weights.take(ctx.device, [WeightWork::Norm { norm: *norm, x, statistics, dy }]);
    dx
}
