//! A pipeline stage: consecutive layers, with the embedding before the first and the output layer
//! after the last. With a vocabulary split over the pipeline, the two ends are learned positions
//! and the final norm.

use crate::comm::CommError;
use crate::device::{Device, Space};
use crate::layers::{
    Block, BlockKept, Context, EmbeddingLayer, HeadKept, HeadLayer, Norm, Residual, Statistics,
    TensorNames, WeightGradients, WeightWork,
};
use crate::stages::{Finished, Kept, StageOutput, StageResult, own};
use crate::state::buffer::Buffer;
use crate::state::params::{Inventory, ParameterSlice, SharedBuffer};
use kernels::Output;
use models::program::Program;
use std::ops::Range;
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

/// What a stage keeps of a micro-batch for the backward pass.
pub struct StageKept<D: Space> {
    blocks: Vec<BlockKept<D>>,
    /// Of the output layer.
    head: Option<HeadKept<D>>,
    /// Of the final norm, where all pipeline ranks share the output layer.
    norm: Option<NormKept<D>>,
}

/// What a norm keeps: its input `[r, h]` and its rows' statistics.
struct NormKept<D: Space> {
    x: SharedBuffer<D>,
    statistics: Rc<Statistics<D>>,
}

impl<D: Space> Kept<D> for StageKept<D> {
    fn bytes(&self) -> usize {
        let head = self.head.as_ref().map_or(0, HeadKept::bytes);
        let norm = self.norm.as_ref().map_or(0, |norm| norm.x.bytes() + norm.statistics.bytes());
        self.blocks.iter().map(BlockKept::bytes).sum::<usize>() + head + norm
    }

    fn logits(&self) -> Option<&Buffer<D>> {
        self.head.as_ref().map(HeadKept::logits)
    }
}

impl Stage {
    /// Declares stage `index`. `embedding` is the table, if this rank already holds it.
    pub fn declare(
        program: &Program,
        index: usize,
        embedding: Option<ParameterSlice>,
        inventory: &mut Inventory,
    ) -> Self {
        let (model, split) = (&program.model, program.sequence_parallel);
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
}

impl<D: Device> crate::stages::Stage<D> for Stage {
    fn parameters(&self) -> Range<usize> {
        let [begin, end] = [self.bounds.first(), self.bounds.last()];
        begin.copied().unwrap_or(0)..end.copied().unwrap_or(0)
    }

    fn table(&self) -> Option<ParameterSlice> {
        self.embedding.as_ref().and_then(EmbeddingLayer::table)
    }

    fn forward(&self, ctx: &Context<'_, D>, x: Buffer<D>) -> StageResult<D> {
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
            return Ok((StageOutput::Losses(losses), Box::new(kept)));
        }
        let Some(norm) = &self.norm else {
            let x = x.whole(ctx);
            let kept = StageKept { blocks, head: None, norm: None };
            return Ok((StageOutput::Stream(x), Box::new(kept)));
        };
        let (x, y, statistics) = norm.of(ctx, x);
        let norm = NormKept { x, statistics: Rc::new(statistics) };
        let kept = StageKept { blocks, head: None, norm: Some(norm) };
        Ok((StageOutput::Stream(y), Box::new(kept)))
    }

    fn backward(
        &self,
        ctx: &Context<'_, D>,
        kept: Box<dyn Kept<D>>,
        dy: Buffer<D>,
        weights: &mut WeightGradients<'_, D>,
        finished: Finished<'_, D>,
    ) -> Result<Buffer<D>, CommError> {
        let kept: StageKept<D> = own(kept);
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
