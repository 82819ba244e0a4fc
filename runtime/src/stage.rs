//! A pipeline stage: a run of layers, with the embedding before the first and the output layer behind
//! the last.

use crate::buffer::Buffer;
use crate::comm::CommError;
use crate::layers::{Block, BlockKept, Context, EmbeddingLayer, HeadKept, HeadLayer, Weights};
use crate::params::{Inventory, Part, Store};
use crate::program::Program;
use crate::scalar::Scalar;

/// One stage as one rank holds it.
#[derive(Clone, Debug)]
pub struct Stage {
    embedding: Option<EmbeddingLayer>,
    blocks: Vec<Block>,
    head: Option<HeadLayer>,
    /// First element of the embedding's, each block's and the head's parameters, and the end.
    bounds: Vec<usize>,
}

/// What comes out of a stage.
pub enum Passed<T> {
    /// The residual stream, `[r, h]`, for the next stage.
    Stream(Buffer<T>),
    /// The losses of the tokens, `[n]`.
    Losses(Buffer<T>),
}

/// What a stage keeps of a micro-batch.
pub struct StageKept<T> {
    blocks: Vec<BlockKept<T>>,
    /// The output layer's.
    pub head: Option<HeadKept<T>>,
}

impl<T> StageKept<T> {
    /// Elements held.
    pub fn elements(&self) -> usize {
        let head = self.head.as_ref().map_or(0, HeadKept::elements);
        self.blocks.iter().map(BlockKept::elements).sum::<usize>() + head
    }
}

/// Told when the gradients of the parameters from an element on, up to the end of the stage, are
/// complete.
pub type Finished<'a, T> = &'a mut dyn FnMut(&Store<T>, usize) -> Result<(), CommError>;

impl Stage {
    /// Declares stage `index`. `embedding` is the table where this rank already holds it.
    pub fn declare(
        program: &Program,
        index: usize,
        embedding: Option<Part>,
        inventory: &mut Inventory,
    ) -> Self {
        let (model, split) = (&program.model, program.sequence_parallel);
        inventory.enter_stage(index);
        let mut bounds = vec![inventory.elements()];
        let first = (index == 0).then(|| EmbeddingLayer::declare(model, split, inventory));
        bounds.push(inventory.elements());
        let stage = &program.stages[index];
        let mut blocks = Vec::new();
        for (layer, &recompute) in stage.layers().zip(&stage.recompute) {
            blocks.push(Block::declare(model, layer, recompute, split, inventory));
            bounds.push(inventory.elements());
        }
        let table = first.as_ref().map(EmbeddingLayer::table).or(embedding);
        let shared = table.filter(|_| model.tied_embeddings);
        let last = index + 1 == program.stages.len();
        let head = last.then(|| HeadLayer::declare(model, shared, split, inventory));
        bounds.push(inventory.elements());
        Self { embedding: first, blocks, head, bounds }
    }

    /// The embedding's table, if it is here.
    pub fn table(&self) -> Option<Part> {
        self.embedding.as_ref().map(EmbeddingLayer::table)
    }

    /// First element of its parameters.
    pub fn begin(&self) -> usize {
        self.bounds.first().copied().unwrap_or(0)
    }

    /// End of its parameters.
    pub fn end(&self) -> usize {
        self.bounds.last().copied().unwrap_or(0)
    }

    /// Forward; `x[r, h]` from the stage before, nothing for the first.
    ///
    /// # Errors
    /// As any collective call.
    pub fn forward<T: Scalar>(
        &self,
        ctx: &Context<'_, T>,
        x: Buffer<T>,
    ) -> Result<(Passed<T>, StageKept<T>), CommError> {
        let mut x = match &self.embedding {
            Some(embedding) => embedding.forward(ctx)?,
            None => x,
        };
        let mut blocks = Vec::with_capacity(self.blocks.len());
        for block in &self.blocks {
            let (y, kept) = block.forward(ctx, x)?;
            blocks.push(kept);
            x = y;
        }
        let Some(head) = &self.head else {
            return Ok((Passed::Stream(x), StageKept { blocks, head: None }));
        };
        let (losses, kept) = head.forward(ctx, x)?;
        Ok((Passed::Losses(losses), StageKept { blocks, head: Some(kept) }))
    }

    /// Backward; `dy[r, h]` from the stage behind, nothing for the last. Gives the gradient for the
    /// stage before; empty for the first.
    ///
    /// # Errors
    /// As any collective call.
    pub fn backward<T: Scalar>(
        &self,
        ctx: &Context<'_, T>,
        kept: StageKept<T>,
        dy: Buffer<T>,
        weights: &mut Weights<'_, T>,
        finished: Finished<'_, T>,
    ) -> Result<Buffer<T>, CommError> {
        let mut bounds = self.bounds.iter().rev().skip(1);
        let mut tell = |weights: &mut Weights<'_, T>| match (bounds.next(), weights) {
            (Some(&from), Weights::Now(gradients)) => finished(gradients, from),
            _ => Ok(()),
        };
        let mut dx = match (&self.head, kept.head) {
            (Some(head), Some(kept)) => head.backward(ctx, kept, weights)?,
            _ => dy,
        };
        tell(weights)?;
        for (block, kept) in self.blocks.iter().zip(kept.blocks).rev() {
            dx = block.backward(ctx, kept, dx, weights)?;
            tell(weights)?;
        }
        if let Some(embedding) = &self.embedding {
            embedding.backward(ctx, dx, weights)?;
            dx = Buffer::empty();
        }
        tell(weights)?;
        Ok(dx)
    }
}
