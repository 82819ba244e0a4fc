//! Runs one rank's list of passes: the same list that was planned, costed and checked.
//!
//! Transfers between stages are tagged by direction, stage and micro-batch. Sends never wait for their
//! receiver, and a pass waits only for what it reads, so an order that the schedule's own check
//! accepts cannot deadlock. Collectives of a vocabulary split over the pipeline go on beside the passes,
//! in [`crate::lanes`].

use crate::ahead::{left_over, passes_ahead};
use crate::buffer::{Buffer, Pools};
use crate::comm::{CommError, Communicator, Tag};
use crate::device::{Device, Group, Moving, Space};
use crate::groups::VocabGroups;
use crate::lanes::{Lanes, Read};
use crate::layers::{
    Context, Draws, Local, MicroBatch, Reduced, ShardKept, VocabularyShard, WeightWork, Weights,
};
use crate::params::{Inventory, Store, WeightStore};
use crate::program::Program;
use crate::reduce::Reducer;
use crate::scalar::Number;
use crate::stage::{Passed, Stage, StageKept};
use models::schedule::{Pass, PassKind, VocabPasses};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Instant;

/// What does not change from step to step.
pub struct Executor<'a, D: Space> {
    /// The program.
    pub program: &'a Program,
    /// Where tensors lie.
    pub device: &'a D,
    /// Tensor-parallel ranks.
    pub tp: &'a dyn Communicator,
    /// Pipeline devices.
    pub pp: &'a dyn Communicator,
    /// This device's stages, by chunk.
    pub stages: &'a [Stage],
    /// Its part of a vocabulary split over the pipeline.
    pub vocab: Option<OverPipeline<'a>>,
    /// This rank's parameters.
    pub inventory: &'a Inventory,
}

/// One rank's part of a vocabulary split over the pipeline, and with whom it shares.
#[derive(Clone, Copy)]
pub struct OverPipeline<'a> {
    /// Its rows.
    pub shard: &'a VocabularyShard,
    /// All ranks of its replica.
    pub groups: &'a VocabGroups,
}

/// What a step reads.
pub struct Given<'a, D: Space> {
    /// The rank's weights.
    pub weights: &'a WeightStore<D>,
    /// Its replica's micro-batches.
    pub batches: &'a [MicroBatch<D>],
    /// Dropout, where there is any.
    pub draws: Option<Draws>,
    /// Memory.
    pub pools: &'a Pools<D>,
}

impl<D: Space> Clone for Given<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Space> Copy for Given<'_, D> {}

/// Looks at what the output layer computes; not where that is split over the pipeline, and no rank has the
/// losses beside its logits.
pub type Watch<'a, T> = &'a mut dyn FnMut(usize, &[T], &[T]);

/// Whether a step may go on: asked behind the forwards that run ahead ([`crate::ahead`]), before anything is
/// added to the gradients, which are of the step before until then.
pub type Gate<'a, D> = &'a mut dyn FnMut(&mut Store<D>) -> Result<bool, CommError>;

/// One pass, as it ran.
#[derive(Clone, Copy, Debug)]
pub struct Ran {
    /// The pass.
    pub pass: Pass,
    /// When it began, with what it waited for.
    pub begin: Instant,
    /// When its computation began.
    pub computing: Instant,
    /// When it ended.
    pub end: Instant,
}

/// What came of a step's passes.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Sum of the losses of this rank's tokens, once it is read; 0 where the output layer is elsewhere.
    pub loss_sum: f64,
    /// Most bytes kept for backward passes at a time.
    pub peak_bytes: usize,
    /// Most micro-batches in flight at a time, all chunks together.
    pub peak_in_flight: usize,
    /// The passes, in the order run.
    pub ran: Vec<Ran>,
}

/// What came of a step's passes, and the sum of its losses, which is on the device yet.
pub type Ended<D> = (Outcome, <D as Space>::Total);

/// State of one step.
struct Step<'a, 'l, D: Space> {
    executor: &'a Executor<'a, D>,
    given: Given<'a, D>,
    /// Reductions of a vocabulary split over the pipeline.
    lanes: Option<Lanes<'l, D>>,
    /// Set in the tags of a step that is begun again.
    again: Tag,
    /// What the vocabulary's passes keep of a micro-batch.
    shards: HashMap<u32, ShardKept<D>>,
    /// What a chunk keeps of a micro-batch.
    kept: HashMap<(u16, u32), StageKept<D>>,
    /// Work on weights that waits for its pass.
    later: HashMap<(u16, u32), Vec<WeightWork<D>>>,
    /// What goes from one of this device's stages to another.
    here: HashMap<Tag, Buffer<D>>,
    sends: Vec<Moving<D, D::Stored>>,
    /// Sum of the losses so far.
    loss: D::Total,
    outcome: Outcome,
    computing: Instant,
}

/// What a transfer carries.
#[derive(Clone, Copy)]
enum Carried {
    Stream = 0,
    Gradient = 1,
    /// One of two copies' gradients of a stage's parameters, by chunk.
    Copy = 2,
    /// The last stage's output, for an output layer that all devices share.
    Output = 3,
}

/// Marks transfers of a step that is begun again.
const AGAIN: Tag = 1 << 59;

/// Tags stay below bit 63, which marks collectives on a wire.
fn tag(carried: Carried, to_stage: usize, micro_batch: u32) -> Tag {
    ((carried as u64) << 60) | ((to_stage as u64) << 32) | u64::from(micro_batch)
}

impl<D: Device> Executor<'_, D> {
    /// Runs all passes; gradients add to what is there.
    ///
    /// # Errors
    /// As any collective call.
    pub fn run(
        &self,
        given: Given<'_, D>,
        gradients: &mut Store<D>,
        reducer: &mut Reducer<'_, D>,
        watch: Option<Watch<'_, D::Wide>>,
    ) -> Result<Ended<D>, CommError> {
        let Some(OverPipeline { shard, groups }) = self.vocab else {
            return self.run_passes(given, None, gradients, reducer, watch);
        };
        let (program, device, weights) = (self.program, self.device, given.weights);
        let read = Read { program, device, shard, weights, groups };
        let tokens: Vec<_> = given.batches.iter().map(|batch| batch.tokens.clone()).collect();
        std::thread::scope(|scope| {
            let lanes = Lanes::open(scope, read, &tokens);
            let outcome = self.run_passes(given, Some(lanes), gradients, reducer, watch);
            if let Err(error) = &outcome {
                // Else this rank's lanes would wait for the others', and theirs for this rank.
                self.pp.abort(&error.to_string());
            }
            outcome
        })
    }

    /// Runs all passes, the first of them ahead of what `gate` waits for: `None` where it says that they were
    /// in vain. `again` where that has been so once.
    ///
    /// # Errors
    /// As any collective call, and as the gate.
    pub fn run_gated(
        &self,
        given: Given<'_, D>,
        again: bool,
        gate: Gate<'_, D>,
        gradients: &mut Store<D>,
        reducer: &mut Reducer<'_, D>,
    ) -> Result<Option<Ended<D>>, CommError> {
        let (device, again) = (self.pp.rank(), if again { AGAIN } else { 0 });
        let (passes, ahead) = (&self.program.passes[device], passes_ahead(self.program));
        let mut step = self.step(given, None, again);
        for &pass in &passes[..ahead[device]] {
            step.pass(pass, false, gradients, reducer, &mut None)?;
        }
        if !gate(gradients)? {
            step.drop_left_over(&ahead)?;
            return Ok(None);
        }
        self.rest(step, ahead[device], gradients, reducer, None).map(Some)
    }

    fn run_passes(
        &self,
        given: Given<'_, D>,
        lanes: Option<Lanes<'_, D>>,
        gradients: &mut Store<D>,
        reducer: &mut Reducer<'_, D>,
        watch: Option<Watch<'_, D::Wide>>,
    ) -> Result<Ended<D>, CommError> {
        self.rest(self.step(given, lanes, 0), 0, gradients, reducer, watch)
    }

    fn step<'a, 'l>(
        &'a self,
        given: Given<'a, D>,
        lanes: Option<Lanes<'l, D>>,
        again: Tag,
    ) -> Step<'a, 'l, D> {
        Step {
            executor: self,
            given,
            lanes,
            again,
            shards: HashMap::new(),
            kept: HashMap::new(),
            later: HashMap::new(),
            here: HashMap::new(),
            sends: Vec::new(),
            loss: self.device.total(),
            outcome: Outcome::default(),
            computing: Instant::now(),
        }
    }

    /// Runs the passes from a place on, and what comes behind the last.
    fn rest(
        &self,
        mut step: Step<'_, '_, D>,
        from: usize,
        gradients: &mut Store<D>,
        reducer: &mut Reducer<'_, D>,
        mut watch: Option<Watch<'_, D::Wide>>,
    ) -> Result<Ended<D>, CommError> {
        let passes = &self.program.passes[self.pp.rank()];
        // The output layer adds to a table that it shares with the first chunk, which is then complete
        // only behind all passes.
        let shared = self.program.shares_table(self.pp.rank());
        let copied = self.program.layout.copies() > 1;
        for (n, &pass) in passes.iter().enumerate().skip(from) {
            let last = last_of_chunk(passes, n) && !(shared && pass.chunk == 0) && !copied;
            step.pass(pass, last, gradients, reducer, &mut watch)?;
        }
        step.close_lanes(gradients)?;
        if copied {
            self.add_copies(gradients)?;
        }
        for stage in self.stages {
            reducer.complete(self.inventory, gradients, stage.begin(), stage.end())?;
        }
        if let Some(OverPipeline { shard, .. }) = self.vocab {
            reducer.complete(self.inventory, gradients, shard.begin(), shard.end())?;
        }
        for send in step.sends {
            send.wait(self.device)?;
        }
        Ok((step.outcome, step.loss))
    }

    /// Gives both copies of each stage the sum of their gradients. Two numbers have the same sum in either
    /// order, so that the copies stay equal to the last bit.
    fn add_copies(&self, gradients: &mut Store<D>) -> Result<(), CommError> {
        let (other, group) = (self.pp.size() - 1 - self.pp.rank(), self.pp());
        let mut sends = Vec::new();
        for (chunk, stage) in self.stages.iter().enumerate() {
            let own = self.device.copied(gradients.range(stage.begin()..stage.end()));
            sends.push(group.start_send(own, other, tag(Carried::Copy, chunk, 0))?);
        }
        for (chunk, stage) in self.stages.iter().enumerate() {
            // What is chunk 0 here is chunk 1 there.
            let (count, tag) = (stage.end() - stage.begin(), tag(Carried::Copy, 1 - chunk, 0));
            let theirs = group.recv(count, other, tag)?;
            let own = gradients.range_mut(stage.begin()..stage.end());
            self.device.add_wide(D::view(&theirs, 0..count), own);
        }
        sends.into_iter().try_for_each(|send| send.wait(self.device).map(drop))
    }

    /// Pipeline devices, for what lies on the device.
    fn pp(&self) -> Group<'_, D> {
        Group::new(self.device, self.pp)
    }
}

/// Whether no later pass of the chunk adds to its gradients.
fn last_of_chunk(passes: &[Pass], n: usize) -> bool {
    let weighs = |pass: &Pass| matches!(pass.kind, PassKind::BW | PassKind::W);
    let same = |pass: &Pass| pass.chunk == passes[n].chunk && weighs(pass);
    weighs(&passes[n]) && !passes[n + 1..].iter().any(same)
}

impl<'a, D: Device> Step<'a, '_, D> {
    fn pass(
        &mut self,
        pass: Pass,
        last: bool,
        gradients: &mut Store<D>,
        reducer: &mut Reducer<'_, D>,
        watch: &mut Option<Watch<'_, D::Wide>>,
    ) -> Result<(), CommError> {
        let begin = Instant::now();
        self.computing = begin;
        match pass.kind {
            PassKind::F => self.forward(pass, watch)?,
            PassKind::B | PassKind::BW => self.backward(pass, last, gradients, reducer)?,
            PassKind::W => self.weights(pass, last, gradients, reducer)?,
            PassKind::S => self.first_of_vocabulary(pass)?,
            PassKind::S2 => self.middle_of_vocabulary(pass)?,
            PassKind::T => self.last_of_vocabulary(pass, gradients)?,
        }
        let (computing, end) = (self.computing, Instant::now());
        self.outcome.ran.push(Ran { pass, begin, computing, end });
        Ok(())
    }

    fn stage_of(&self, pass: Pass) -> usize {
        let device = self.executor.pp.rank();
        let devices = self.executor.pp.size();
        self.executor.program.layout.stage_of(devices, device, usize::from(pass.chunk))
    }

    fn context(&self, pass: Pass) -> Context<'a, D> {
        let executor = self.executor;
        Context {
            device: executor.device,
            tp: executor.tp,
            sequence_parallel: executor.program.sequence_parallel,
            weights: self.given.weights,
            batch: &self.given.batches[pass.micro_batch as usize],
            draws: self.given.draws,
            pools: self.given.pools,
        }
    }

    fn forward(
        &mut self,
        pass: Pass,
        watch: &mut Option<Watch<'_, D::Wide>>,
    ) -> Result<(), CommError> {
        let stage = self.stage_of(pass);
        let x = match stage {
            0 => self.looked_up(pass)?,
            _ => self.receive(Carried::Stream, stage - 1, stage, pass)?,
        };
        self.computing = Instant::now();
        let held = &self.executor.stages[usize::from(pass.chunk)];
        let (passed, kept) = held.forward(&self.context(pass), x)?;
        if let (Some(watch), Passed::Losses(losses), Some(head)) = (watch, &passed, &kept.head) {
            let device = self.executor.device;
            let losses = device.download(losses.view())?;
            let logits = device.download(head.logits().view())?;
            let logits: Vec<D::Wide> =
                logits.into_iter().map(|logit| D::Wide::nearest(logit.value())).collect();
            watch(pass.micro_batch as usize, &losses, &logits);
        }
        self.keep(pass, kept);
        match passed {
            Passed::Stream(y) if self.is_last(stage) => self.send_to_all(pass, y)?,
            Passed::Stream(y) => self.send(Carried::Stream, stage + 1, pass, y)?,
            Passed::Losses(losses) => {
                self.executor.device.add_sum(losses.view(), &mut self.loss);
            }
        }
        Ok(())
    }

    fn keep(&mut self, pass: Pass, kept: StageKept<D>) {
        self.kept.insert((pass.chunk, pass.micro_batch), kept);
        self.note_peak();
    }

    fn note_peak(&mut self) {
        let works = WeightWork::bytes(self.later.values().flatten());
        let held = self.kept.values().map(StageKept::bytes).sum::<usize>();
        let shards = self.shards.values().map(ShardKept::bytes).sum::<usize>();
        let outcome = &mut self.outcome;
        outcome.peak_bytes = outcome.peak_bytes.max(held + works + shards);
        outcome.peak_in_flight = outcome.peak_in_flight.max(self.kept.len());
    }

    /// Backward to inputs; to weights too unless they have a pass of their own.
    fn backward(
        &mut self,
        pass: Pass,
        last: bool,
        gradients: &mut Store<D>,
        reducer: &mut Reducer<'_, D>,
    ) -> Result<(), CommError> {
        let (stage, chunk) = (self.stage_of(pass), usize::from(pass.chunk));
        let dy = match self.is_last(stage) {
            true => self.output_gradient(pass)?,
            false => self.receive(Carried::Gradient, stage + 1, stage, pass)?,
        };
        self.computing = Instant::now();
        let Some(kept) = self.kept.remove(&(pass.chunk, pass.micro_batch)) else {
            return Err(missing(pass));
        };
        let held = &self.executor.stages[chunk];
        let (end, inventory) = (held.end(), self.executor.inventory);
        let mut later = Vec::new();
        let mut weights = match pass.kind {
            PassKind::B => Weights::Later(&mut later, gradients),
            _ => Weights::Now(gradients),
        };
        let mut finished = |gradients: &Store<D>, from: usize| match last {
            true => reducer.complete(inventory, gradients, from, end),
            false => Ok(()),
        };
        let ctx = self.context(pass);
        let dx = held.backward(&ctx, kept, dy, &mut weights, &mut finished)?;
        if pass.kind == PassKind::B {
            self.later.insert((pass.chunk, pass.micro_batch), later);
            self.note_peak();
        }
        match stage {
            0 => self.tell_input_gradient(pass, dx),
            _ => self.send(Carried::Gradient, stage - 1, pass, dx),
        }
    }

    /// Backward to weights, of what an earlier pass left.
    fn weights(
        &mut self,
        pass: Pass,
        last: bool,
        gradients: &mut Store<D>,
        reducer: &mut Reducer<'_, D>,
    ) -> Result<(), CommError> {
        let Some(works) = self.later.remove(&(pass.chunk, pass.micro_batch)) else {
            return Err(missing(pass));
        };
        works.into_iter().for_each(|work| work.run(self.executor.device, gradients));
        let held = &self.executor.stages[usize::from(pass.chunk)];
        if last {
            reducer.complete(self.executor.inventory, gradients, held.begin(), held.end())?;
        }
        Ok(())
    }

    /// Elements of the stream that a stage hands to the next.
    fn stream_elements(&self, pass: Pass) -> usize {
        self.context(pass).rows() * self.executor.program.model.hidden as usize
    }

    /// Into how many parts a transfer is cut: where tensor-parallel ranks hold the same stream, each
    /// sends its part and the receivers gather (Megatron PTD-P, arXiv 2104.04473, section 4.1).
    fn ways(&self, pass: Pass) -> usize {
        let (tp, split) = (self.executor.tp.size(), self.executor.program.sequence_parallel);
        if split || !self.stream_elements(pass).is_multiple_of(tp) { 1 } else { tp }
    }

    /// The device that runs a neighbouring stage for the same micro-batch.
    fn device_of(&self, stage: usize, pass: Pass) -> usize {
        let layout = self.executor.program.layout;
        layout.holder(self.executor.pp.size(), stage, pass.chunk).0
    }

    fn receive(
        &mut self,
        carried: Carried,
        from_stage: usize,
        stage: usize,
        pass: Pass,
    ) -> Result<Buffer<D>, CommError> {
        let from = self.device_of(from_stage, pass);
        self.receive_from(from, tag(carried, stage, pass.micro_batch), pass)
    }

    fn receive_from(&mut self, from: usize, tag: Tag, pass: Pass) -> Result<Buffer<D>, CommError> {
        let tag = tag | self.again;
        if from == self.executor.pp.rank() {
            return self.here.remove(&tag).ok_or_else(|| missing(pass));
        }
        let (count, ways) = (self.stream_elements(pass), self.ways(pass));
        let part = self.executor.pp().recv(count / ways, from, tag)?;
        let tp = Group::new(self.executor.device, self.executor.tp);
        let whole = if ways == 1 { part } else { tp.all_gather(part)? };
        Ok(self.given.pools.stored.adopt(whole))
    }

    fn send(
        &mut self,
        carried: Carried,
        to_stage: usize,
        pass: Pass,
        data: Buffer<D>,
    ) -> Result<(), CommError> {
        let to = self.device_of(to_stage, pass);
        self.send_to(to, tag(carried, to_stage, pass.micro_batch), pass, data)
    }

    fn send_to(
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
}

impl<D: Device> Step<'_, '_, D> {
    /// Takes what other devices' forwards have sent in vain, and sees own transfers to their end.
    fn drop_left_over(self, ahead: &[usize]) -> Result<(), CommError> {
        let (executor, program) = (self.executor, self.executor.program);
        for pass in left_over(program, ahead, executor.pp.rank()) {
            let stage = self.stage_of(pass);
            let from = self.device_of(stage - 1, pass);
            let tag = tag(Carried::Stream, stage, pass.micro_batch) | self.again;
            let count = self.stream_elements(pass) / self.ways(pass);
            let _in_vain: D::Memory<D::Stored> = executor.pp().recv(count, from, tag)?;
        }
        self.sends.into_iter().try_for_each(|send| send.wait(executor.device).map(drop))
    }
}

/// What the passes of a vocabulary split over the pipeline do, and its part in others.
impl<D: Device> Step<'_, '_, D> {
    fn is_last(&self, stage: usize) -> bool {
        stage + 1 == self.executor.program.stages.len()
    }

    /// Rows of the tokens, `[r, h]`, where all devices look them up; else nothing.
    fn looked_up(&mut self, pass: Pass) -> Result<Buffer<D>, CommError> {
        let Some(lanes) = &mut self.lanes else { return Ok(Buffer::empty()) };
        let rows = lanes.rows(pass.micro_batch)?;
        Ok(self.own_rows(pass, rows))
    }

    /// This rank's rows of the stream, `[r, h]`, of the micro-batch's `[n, h]`.
    fn own_rows(&self, pass: Pass, whole: D::Memory<D::Stored>) -> Buffer<D> {
        let (ctx, width) = (self.context(pass), self.executor.program.model.hidden as usize);
        let (first, count) = (ctx.first_row() * width, ctx.rows() * width);
        let own = match count == D::len(&whole) {
            true => whole,
            false => ctx.device.copied(D::view(&whole, first..first + count)),
        };
        self.given.pools.stored.adopt(own)
    }

    /// The last stage's output for all devices, which share the output layer (`C0`).
    fn send_to_all(&mut self, pass: Pass, y: Buffer<D>) -> Result<(), CommError> {
        let tag = tag(Carried::Output, 0, pass.micro_batch);
        let (devices, own) = (self.executor.pp.size(), self.executor.pp.rank());
        for to in (0..devices).filter(|&to| to != own) {
            let copy = self.given.pools.stored.copy_of(self.executor.device, &y);
            self.send_to(to, tag, pass, copy)?;
        }
        self.send_to(own, tag, pass, y)
    }

    fn shared(&self, pass: Pass) -> Result<&VocabularyShard, CommError> {
        self.executor.vocab.map(|vocab| vocab.shard).ok_or_else(|| missing(pass))
    }

    /// Gives what a pass left to its lane.
    fn reduce(&mut self, pass: Pass, local: Local<D>) -> Result<(), CommError> {
        let lanes = self.lanes.as_mut().ok_or_else(|| missing(pass))?;
        lanes.reduce(pass.kind, pass.micro_batch, local);
        Ok(())
    }

    /// What the reduction behind a pass of the same micro-batch knows of the logits.
    fn sums(&mut self, behind: PassKind, pass: Pass) -> Result<Reduced<D>, CommError> {
        let lanes = self.lanes.as_mut().ok_or_else(|| missing(pass))?;
        let sums = lanes.sums(behind, pass.micro_batch);
        self.computing = Instant::now();
        sums
    }

    fn first_of_vocabulary(&mut self, pass: Pass) -> Result<(), CommError> {
        let from = self.executor.program.last_device();
        let h = self.receive_from(from, tag(Carried::Output, 0, pass.micro_batch), pass)?;
        self.computing = Instant::now();
        let (kept, local) = self.shared(pass)?.first(&self.context(pass), h)?;
        self.shards.insert(pass.micro_batch, kept);
        self.note_peak();
        self.reduce(pass, local)
    }

    fn middle_of_vocabulary(&mut self, pass: Pass) -> Result<(), CommError> {
        let reduced = self.sums(PassKind::S, pass)?;
        let kept = self.shards.get(&pass.micro_batch).ok_or_else(|| missing(pass))?;
        let local = self.shared(pass)?.middle(&self.context(pass), kept, reduced)?;
        self.reduce(pass, local)
    }

    fn last_of_vocabulary(
        &mut self,
        pass: Pass,
        gradients: &mut Store<D>,
    ) -> Result<(), CommError> {
        let naive = self.shared(pass)?.passes() == VocabPasses::Naive;
        let reduced = self.sums(if naive { PassKind::S2 } else { PassKind::S }, pass)?;
        let kept = self.shards.remove(&pass.micro_batch).ok_or_else(|| missing(pass))?;
        let (shard, ctx) = (*self.shared(pass)?, self.context(pass));
        // All devices know the same losses: the last stage's tells.
        let tells = self.executor.pp.rank() == self.executor.program.last_device();
        if tells {
            shard.add_loss(&ctx, &reduced, &mut self.loss)?;
        }
        let left = shard.last(&ctx, kept, &reduced, gradients)?;
        left.map_or(Ok(()), |local| self.reduce(pass, local))
    }

    /// Gradient of the last stage's output, `[r, h]`, where all devices share the output layer; else nothing.
    fn output_gradient(&mut self, pass: Pass) -> Result<Buffer<D>, CommError> {
        let Some(lanes) = &mut self.lanes else { return Ok(Buffer::empty()) };
        let two = self.executor.program.vocab == Some(VocabPasses::Two);
        let behind = if two { PassKind::S } else { PassKind::T };
        let whole = lanes.gradient(behind, pass.micro_batch)?;
        Ok(self.own_rows(pass, whole))
    }

    /// Hands on the gradient of the tokens' rows where all devices hold the input layer.
    fn tell_input_gradient(&mut self, pass: Pass, dx: Buffer<D>) -> Result<(), CommError> {
        if self.lanes.is_none() {
            return Ok(());
        }
        let whole = self.context(pass).enter(&Rc::new(dx))?;
        if let (Some(lanes), 0) = (&mut self.lanes, self.executor.tp.rank()) {
            lanes.add_to_rows(self.executor.device.copied(whole.view()));
        }
        Ok(())
    }

    /// Waits for what is under way, and takes what came of the input layer.
    fn close_lanes(&mut self, gradients: &mut Store<D>) -> Result<(), CommError> {
        if let (Some(lanes), Some(vocab)) = (self.lanes.take(), self.executor.vocab) {
            vocab.shard.add_scattered(self.executor.device, &lanes.close()?, gradients);
        }
        Ok(())
    }
}

/// A pass whose input no earlier pass made: the schedule's check refuses such lists.
fn missing(pass: Pass) -> CommError {
    let reason = "no earlier pass made what it reads".to_owned();
    CommError::Invalid { call: format!("{pass:?}"), reason }
}
