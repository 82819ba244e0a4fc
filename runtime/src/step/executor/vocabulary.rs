//! Passes of a vocabulary split over the pipeline, and how other passes use them.

use super::transfers::{Carried, tag};
use super::{StepState, missing};
use crate::comm::CommError;
use crate::device::Device;
use crate::ops::{Context, MicroBatch, ShardLocal, ShardReduced, VocabularyShard};
use crate::state::buffer::Buffer;
use crate::state::gradients::GradientStore;
use crate::step::reduce::Reducer;
use crate::step::vocab_collectives::VocabCollectives;
use models::schedule::{Pass, PassKind, VocabPasses};
use std::time::Instant;

impl<'a, 'l, D: Device> StepState<'a, 'l, D> {
    /// Waits for a collective of all pipeline ranks, whose time counts as the pipeline's; `None` if
    /// the vocabulary is not split over the pipeline.
    fn collected<R>(&mut self, wait: impl FnOnce(&mut VocabCollectives<'l, D>) -> R) -> Option<R> {
        let (collectives, pp) = (self.collectives.as_mut()?, self.executor.pp);
        Some(pp.stats().timed(pp.group(), || wait(collectives)))
    }

    pub(super) fn is_last(&self, stage: usize) -> bool {
        stage + 1 == self.executor.spec.stages
    }

    /// Embedding rows of the tokens, `[r, h]`, if all pipeline ranks look them up; else empty.
    pub(super) fn looked_up(&mut self, pass: Pass) -> Result<Buffer<D>, CommError> {
        let rows = self.collected(|collectives| collectives.rows(pass.micro_batch));
        rows.map_or(Ok(Buffer::empty()), |rows| self.own_rows(pass, rows?))
    }

    /// This rank's rows of the stream, `[r, h]`, from all rows of the micro-batch, `[n, h]`.
    pub(super) fn own_rows(
        &self,
        pass: Pass,
        whole: D::Memory<D::Stored>,
    ) -> Result<Buffer<D>, CommError> {
        let (ctx, width) = (self.context(pass), self.executor.spec.hidden);
        let (first, count) = (ctx.first_row() * width, ctx.rows() * width);
        let own = match count == D::len(&whole) {
            true => whole,
            false => ctx.device.copied(D::view(&whole, first..first + count)),
        };
        Ok(self.given.pools.stored.adopt(own))
    }

    /// Sends the last stage's output to all pipeline ranks, which share the output layer (`C0`).
    pub(super) fn send_to_all(&mut self, pass: Pass, y: Buffer<D>) -> Result<(), CommError> {
        let tag = tag(Carried::Output, 0, pass.micro_batch);
        let (ranks, own) = (self.executor.pp.size(), self.executor.pp.rank());
        for to in (0..ranks).filter(|&to| to != own) {
            let copy = self.given.pools.stored.copy_of(self.executor.device, &y);
            self.send_to(to, tag, pass, copy)?;
        }
        self.send_to(own, tag, pass, y)
    }

    pub(super) fn shared(&self, pass: Pass) -> Result<&VocabularyShard, CommError> {
        self.executor.vocab.map(|vocab| vocab.shard).ok_or_else(|| missing(pass))
    }

    /// What passes over this rank's rows of the vocabulary are given: their weights, too.
    fn shard_context(&self, pass: Pass) -> Result<Context<'a, D>, CommError> {
        let shard = self.shared(pass)?;
        self.context(pass).gather(std::slice::from_ref(&(shard.begin()..shard.end())))
    }

    /// Says that a pass has added to the gradients of this rank's rows of the vocabulary, so that
    /// replicas that share them can sum them.
    fn shard_added(
        &self,
        pass: Pass,
        gradients: &mut GradientStore<D>,
        reducer: &mut Reducer<'_, D>,
    ) -> Result<(), CommError> {
        if !gradients.opens_units() {
            return Ok(());
        }
        let shard = self.shared(pass)?;
        reducer.complete(self.executor.inventory, gradients, shard.begin(), shard.end())
    }

    /// Hands what a pass left to the reduction that follows it.
    pub(super) fn reduce(&mut self, pass: Pass, local: ShardLocal<D>) -> Result<(), CommError> {
        let collectives = self.collectives.as_mut().ok_or_else(|| missing(pass))?;
        collectives.reduce(pass.kind, pass.micro_batch, local);
        Ok(())
    }

    /// What the reduction after pass `behind` of the same micro-batch found out about the logits.
    pub(super) fn sums(
        &mut self,
        behind: PassKind,
        pass: Pass,
    ) -> Result<ShardReduced<D>, CommError> {
        let sums = self.collected(|collectives| collectives.sums(behind, pass.micro_batch));
        self.computing = Instant::now();
        sums.ok_or_else(|| missing(pass))?
    }

    pub(super) fn first_of_vocabulary(&mut self, pass: Pass) -> Result<(), CommError> {
        let from = self.executor.spec.last_rank();
        let h = self.receive_from(from, tag(Carried::Output, 0, pass.micro_batch), pass)?;
        self.computing = Instant::now();
        let (kept, local) = self.shared(pass)?.first(&self.shard_context(pass)?, h)?;
        self.shards.insert(pass.micro_batch, kept);
        self.note_peak();
        self.reduce(pass, local)
    }

    pub(super) fn middle_of_vocabulary(&mut self, pass: Pass) -> Result<(), CommError> {
        let reduced = self.sums(PassKind::S, pass)?;
        let kept = self.shards.get(&pass.micro_batch).ok_or_else(|| missing(pass))?;
        let local = self.shared(pass)?.middle(&self.context(pass), kept, reduced)?;
        self.reduce(pass, local)
    }

    pub(super) fn last_of_vocabulary(
        &mut self,
        pass: Pass,
        gradients: &mut GradientStore<D>,
        reducer: &mut Reducer<'_, D>,
    ) -> Result<(), CommError> {
        let naive = self.shared(pass)?.passes() == VocabPasses::Naive;
        let reduced = self.sums(if naive { PassKind::S2 } else { PassKind::S }, pass)?;
        let kept = self.shards.remove(&pass.micro_batch).ok_or_else(|| missing(pass))?;
        let (shard, ctx) = (*self.shared(pass)?, self.shard_context(pass)?);
        // All pipeline ranks know the same losses; the last stage's rank counts them.
        let counts = self.executor.pp.rank() == self.executor.spec.last_rank();
        if counts {
            shard.add_loss(&ctx, &reduced, &mut self.loss)?;
        }
        let left = shard.last(&ctx, kept, &reduced, gradients)?;
        self.shard_added(pass, gradients, reducer)?;
        left.map_or(Ok(()), |local| self.reduce(pass, local))
    }

    /// Gradient of the last stage's output, `[r, h]`, if all pipeline ranks share the output layer;
    /// else empty.
    pub(super) fn output_gradient(&mut self, pass: Pass) -> Result<Buffer<D>, CommError> {
        let two = self.executor.spec.vocab == Some(VocabPasses::Two);
        let behind = if two { PassKind::S } else { PassKind::T };
        let whole = self.collected(|collectives| collectives.gradient(behind, pass.micro_batch));
        whole.map_or(Ok(Buffer::empty()), |whole| self.own_rows(pass, whole?))
    }

    /// Broadcasts the gradient of the embedding rows if all pipeline ranks share the input layer.
    pub(super) fn broadcast_input_gradient(
        &mut self,
        pass: Pass,
        dx: Buffer<D>,
    ) -> Result<(), CommError> {
        if self.collectives.is_none() {
            return Ok(());
        }
        let ctx = self.context(pass);
        let whole = if ctx.rows() == ctx.tokens() { dx } else { ctx.all_gather(&dx)? };
        if let (Some(collectives), 0) = (&mut self.collectives, self.executor.tp.rank()) {
            collectives.broadcast_row_gradient(self.executor.device.copied(whole.view()));
        }
        Ok(())
    }

    /// Looks up the tokens whose rows are on this rank, and starts the sum over all ranks.
    pub(super) fn look_up(&mut self, pass: Pass) -> Result<(), CommError> {
        let (shard, ctx) = (*self.shared(pass)?, self.shard_context(pass)?);
        let tokens = &ctx.batch.tokens;
        let rows = shard.look_up(ctx.device, &ctx.weights, tokens.view(), tokens.len());
        self.collectives.as_ref().ok_or_else(|| missing(pass))?.sum_rows(pass.micro_batch, rows);
        Ok(())
    }

    /// Adds the gradient of the tokens' embedding rows to the rows on this rank.
    pub(super) fn add_to_rows(
        &mut self,
        pass: Pass,
        gradients: &mut GradientStore<D>,
        reducer: &mut Reducer<'_, D>,
    ) -> Result<(), CommError> {
        let dx = self.collected(|collectives| collectives.row_gradient(pass.micro_batch));
        let dx = dx.ok_or_else(|| missing(pass))??;
        self.computing = Instant::now();
        let (shard, ctx) = (*self.shared(pass)?, self.context(pass));
        let MicroBatch { tokens, by_token, .. } = ctx.batch;
        shard.scatter(ctx.device, (by_token.view(), tokens.len()), &dx, gradients);
        self.shard_added(pass, gradients, reducer)
    }

    /// Waits for all collectives.
    pub(super) fn close_collectives(&mut self) -> Result<(), CommError> {
        let (Some(collectives), pp) = (self.collectives.take(), self.executor.pp) else {
            return Ok(());
        };
        pp.stats().timed(pp.group(), || collectives.close())
    }
}
