//! Transfers between stages.

use super::{Executor, StepState, missing};
use crate::comm::{CommError, Tag};
use crate::device::{Device, DeviceGroup};
use crate::state::buffer::Buffer;
use crate::step::post_validation::left_over;
use models::schedule::Pass;

/// What a transfer carries.
#[derive(Clone, Copy)]
pub(super) enum Carried {
    Stream = 0,
    Gradient = 1,
    /// Gradients of one of a stage's two copies, by chunk.
    Copy = 2,
    /// The last stage's output, for an output layer that all pipeline ranks share.
    Output = 3,
}

/// Marks the transfers of a step that is run again.
pub(super) const AGAIN: Tag = 1 << 59;

/// Tags stay below bit 63, which marks collectives on a wire.
pub(super) fn tag(carried: Carried, to_stage: usize, micro_batch: u32) -> Tag {
    ((carried as u64) << 60) | ((to_stage as u64) << 32) | u64::from(micro_batch)
}

impl<D: Device> StepState<'_, '_, D> {
    /// Elements of the residual stream that one stage sends to the next.
    pub(super) fn stream_elements(&self, pass: Pass) -> usize {
        let Executor { spec, tp, .. } = self.executor;
        let tokens = self.given.batches[pass.micro_batch as usize].tokens.len();
        tokens / if spec.sequence_parallel { tp.size() } else { 1 } * spec.hidden
    }

    /// Number of parts of a transfer. If all tensor-parallel ranks hold the same stream, each sends
    /// one part and the receivers all-gather (Megatron PTD-P, arXiv 2104.04473, section 4.1).
    pub(super) fn ways(&self, pass: Pass) -> usize {
        let (tp, split) = (self.executor.tp.size(), self.executor.spec.sequence_parallel);
        if split || !self.stream_elements(pass).is_multiple_of(tp) { 1 } else { tp }
    }

    /// The pipeline rank that runs a neighbouring stage for the same micro-batch.
    pub(super) fn pipeline_rank_of(&self, stage: usize, pass: Pass) -> usize {
        let layout = self.executor.spec.layout;
        layout.holder(self.executor.pp.size(), stage, pass.chunk).0
    }

    pub(super) fn receive(
        &mut self,
        carried: Carried,
        from_stage: usize,
        stage: usize,
        pass: Pass,
    ) -> Result<Buffer<D>, CommError> {
        let from = self.pipeline_rank_of(from_stage, pass);
        self.receive_from(from, tag(carried, stage, pass.micro_batch), pass)
    }

    pub(super) fn receive_from(
        &mut self,
        from: usize,
        tag: Tag,
        pass: Pass,
    ) -> Result<Buffer<D>, CommError> {
        let tag = tag | self.again;
        if from == self.executor.pp.rank() {
            return self.here.remove(&tag).ok_or_else(|| missing(pass));
        }
        let (count, ways) = (self.stream_elements(pass), self.ways(pass));
        let part = self.executor.pp().recv(count / ways, from, tag)?;
        let tp = DeviceGroup::new(self.executor.device, self.executor.tp);
        let whole = if ways == 1 { part } else { tp.all_gather(part)? };
        Ok(self.given.pools.stored.adopt(whole))
    }

    pub(super) fn send(
        &mut self,
        carried: Carried,
        to_stage: usize,
        pass: Pass,
        data: Buffer<D>,
    ) -> Result<(), CommError> {
        let to = self.pipeline_rank_of(to_stage, pass);
        self.send_to(to, tag(carried, to_stage, pass.micro_batch), pass, data)
    }

    pub(super) fn send_to(
        &mut self,
        to: usize,
        tag: Tag,
        pass: Pass,
        data: Buffer<D>,
    ) -> Result<(), CommError> {
        let tag = tag | self.again;
        if to == self.executor.pp.rank() {
            self.here.insert(tag, data);
        } else {
            let (ways, rank) = (self.ways(pass), self.executor.tp.rank());
            let count = data.len() / ways;
            let part = match ways {
                1 => data.into_memory(),
                _ => self.executor.device.copied(data.part(rank * count..(rank + 1) * count)),
            };
            self.sends.push(self.executor.pp().start_send(part, to, tag)?);
        }
        Ok(())
    }

    /// Receives and drops what other ranks' forwards sent in vain, and completes this rank's sends.
    pub(super) fn drop_left_over(self, ahead: &[usize]) -> Result<(), CommError> {
        let (executor, spec) = (self.executor, self.executor.spec);
        for pass in left_over(spec, ahead, executor.pp.rank()) {
            let stage = self.stage_of(pass);
            let from = self.pipeline_rank_of(stage - 1, pass);
            let tag = tag(Carried::Stream, stage, pass.micro_batch) | self.again;
            let count = self.stream_elements(pass) / self.ways(pass);
            let _in_vain: D::Memory<D::Stored> = executor.pp().recv(count, from, tag)?;
        }
        self.sends.into_iter().try_for_each(|send| send.wait(executor.device).map(drop))
    }
}
