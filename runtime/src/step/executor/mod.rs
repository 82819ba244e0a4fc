//! Executes one rank's list of passes: the list that was planned, costed and checked.
//!
//! Transfers between stages are tagged by direction, stage and micro-batch. Sends never wait for
//! their receiver, and a pass waits only for what it reads, so an order that the schedule's check
//! accepts cannot deadlock. Collectives of a vocabulary split over the pipeline run beside the
//! passes, in [`crate::step::vocab_collectives`].

mod transfers;
mod vocabulary;

use crate::comm::{CommError, Communicator, Tag};
use crate::device::{Device, DeviceGroup, DeviceRequest, Space};
use crate::groups::VocabGroups;
use crate::ops::{
    ContextRanks, DropoutDraws, ExpertLoads, ExpertRanks, Gradients, MicroBatch, PassContext,
    PassUnits, RouterLog, ShardKept, VocabularyShard, WeightWork,
};
use crate::scalar::Number;
use crate::spec::TrainerSpec;
use crate::stages::pair::together;
use crate::stages::{Kept, Stage, StageOutput};
use crate::state::buffer::{Buffer, Pools};
use crate::state::gradients::GradientStore;
use crate::state::params::Inventory;
use crate::state::weights::{Sharing, Weights};
use crate::step::post_validation::passes_ahead;
use crate::step::reduce::Reducer;
use crate::step::vocab_collectives::{CollectiveInputs, VocabCollectives};
use models::schedule::{Pass, PassKind, PassOrder};
use std::collections::HashMap;
use std::ops::Range;
use std::time::Instant;
use transfers::{AGAIN, Carried, tag};

/// Tag of the gradients of a chunk's copy, which two pipeline ranks exchange after their passes.
pub(crate) fn copy_tag(chunk: usize) -> Tag {
    tag(Carried::Copy, chunk, 0)
}

/// What stays the same from step to step.
pub struct Executor<'a, D: Space> {
    /// The spec.
    pub spec: &'a TrainerSpec,
    /// The rank's device.
    pub device: &'a D,
    /// Tensor-parallel ranks.
    pub tp: &'a dyn Communicator,
    /// Context-parallel ranks.
    pub cp: ContextRanks<'a>,
    /// Pipeline ranks.
    pub pp: &'a dyn Communicator,
    /// Replicas that share one copy of the state.
    pub sharing: Sharing<'a>,
    /// The ranks among which experts are divided, if there are any.
    pub experts: Option<ExpertRanks<'a>>,
    /// What routers choose, if any loss depends on it.
    pub routers: Option<&'a RouterLog>,
    /// How often experts are chosen, if selection biases are updated by it.
    pub loads: Option<&'a ExpertLoads>,
    /// All ranks.
    pub world: &'a dyn Communicator,
    /// Whether the next unit's weights are gathered while one unit computes.
    pub prefetch: bool,
    /// This pipeline rank's stages, by chunk.
    pub stages: &'a [Box<dyn Stage<D>>],
    /// This rank's shard of a vocabulary split over the pipeline.
    pub vocab: Option<VocabOverPipeline<'a>>,
    /// This rank's parameters.
    pub inventory: &'a Inventory,
}

/// One rank's shard of a vocabulary split over the pipeline, and the groups that share it.
#[derive(Clone, Copy)]
pub struct VocabOverPipeline<'a> {
    /// This rank's rows of the vocabulary.
    pub shard: &'a VocabularyShard,
    /// All ranks of the replica.
    pub groups: &'a VocabGroups,
}

/// Input of a step's passes.
pub struct PassInputs<'a, D: Space> {
    /// This rank's weights.
    pub weights: &'a Weights<D>,
    /// This replica's micro-batches.
    pub batches: &'a [MicroBatch<D>],
    /// Dropout, if the model has any.
    pub draws: Option<DropoutDraws>,
    /// Pools of buffers.
    pub pools: &'a Pools<D>,
}

impl<D: Space> Clone for PassInputs<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Space> Copy for PassInputs<'_, D> {}

/// Observes the losses and logits that the output layer computes. Not called if the vocabulary is
/// split over the pipeline: no rank then has the losses beside its logits.
pub type LossObserver<'a, T> = &'a mut dyn FnMut(usize, &[T], &[T]);

/// Whether a step may go on. Asked after the forwards that run ahead
/// ([`crate::step::post_validation`]), before anything is added to the gradients, which until then
/// are the previous step's.
pub type Gate<'a, D> = &'a mut dyn FnMut(&mut GradientStore<D>) -> Result<bool, CommError>;

/// When one pass ran.
#[derive(Clone, Copy, Debug)]
pub struct PassTiming {
    /// The pass.
    pub pass: Pass,
    /// When it began, including its wait for input.
    pub begin: Instant,
    /// When its computation began.
    pub computing: Instant,
    /// When it ended.
    pub end: Instant,
}

/// How a step's passes ran.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Sum of the losses of this rank's tokens, once read from the device; 0 without an output
    /// layer.
    pub loss_sum: f64,
    /// Most bytes kept for backward passes at any time.
    pub peak_bytes: usize,
    /// Most micro-batches in flight at any time, over all chunks.
    pub peak_in_flight: usize,
    /// The passes, in the order run.
    pub ran: Vec<PassTiming>,
    /// Seconds of the passes without their calls to other ranks.
    pub computing_s: f64,
}

/// How a step's passes ran, and the sum of its losses, still on the device.
pub type Ended<D> = (Outcome, <D as Space>::Total);

/// What a backward pass reads: its context, what the forward pass kept, and a gradient.
type BackwardInputs<'a, D> = (PassContext<'a, D>, Box<dyn Kept<D>>, Buffer<D>);

/// State of one step in progress.
struct StepState<'a, 'l, D: Space> {
    executor: &'a Executor<'a, D>,
    given: PassInputs<'a, D>,
    /// Collectives of a vocabulary split over the pipeline.
    collectives: Option<VocabCollectives<'l, D>>,
    /// Set in the tags of a step that is run again.
    again: Tag,
    /// What the vocabulary passes keep, by micro-batch.
    shards: HashMap<u32, ShardKept<D>>,
    /// What stages keep, by chunk and micro-batch.
    kept: HashMap<(u16, u32), Box<dyn Kept<D>>>,
    /// Deferred weight gradients, by chunk and micro-batch.
    later: HashMap<(u16, u32), Vec<WeightWork<D>>>,
    /// Transfers between two stages of this pipeline rank.
    here: HashMap<Tag, Buffer<D>>,
    sends: Vec<DeviceRequest<D, D::Stored>>,
    /// Sum of the losses so far.
    loss: D::Total,
    outcome: Outcome,
    computing: Instant,
}

impl<D: Device> Executor<'_, D> {
    /// Runs all passes. Gradients are added to `gradients`.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn run(
        &self,
        given: PassInputs<'_, D>,
        gradients: &mut GradientStore<D>,
        reducer: &mut Reducer<'_, D>,
        observer: Option<LossObserver<'_, D::Wide>>,
    ) -> Result<Ended<D>, CommError> {
        let Some(VocabOverPipeline { groups, .. }) = self.vocab else {
            return self.run_passes(given, None, gradients, reducer, observer);
        };
        let looked_up = |pass: &Pass| pass.kind == PassKind::IF;
        if !self.order().passes.iter().any(looked_up) {
            return Err(no_look_ups());
        }
        let read = CollectiveInputs { spec: self.spec, device: self.device, groups };
        let width = self.spec.hidden;
        let elements = given.batches.iter().map(|batch| batch.tokens.len() * width);
        let elements: Vec<usize> = elements.collect();
        std::thread::scope(|scope| {
            let collectives = VocabCollectives::open(scope, read, &elements);
            let outcome = self.run_passes(given, Some(collectives), gradients, reducer, observer);
            if let Err(error) = &outcome {
                // Otherwise this rank's threads and the others' would wait for each other.
                self.pp.abort(&error.to_string());
            }
            outcome
        })
    }

    /// Runs all passes. The forwards that run ahead do not wait for `gate`. Returns `None` if the
    /// gate says that they were in vain; `again` says that this has happened once.
    ///
    /// # Errors
    /// Those of any collective call and of the gate.
    pub fn run_gated(
        &self,
        given: PassInputs<'_, D>,
        again: bool,
        gate: Gate<'_, D>,
        gradients: &mut GradientStore<D>,
        reducer: &mut Reducer<'_, D>,
    ) -> Result<Option<Ended<D>>, CommError> {
        let (pipeline_rank, again) = (self.pp.rank(), if again { AGAIN } else { 0 });
        let (passes, ahead) = (&self.order().passes, passes_ahead(self.spec));
        let mut step = self.step(given, None, again);
        for &pass in &passes[..ahead[pipeline_rank]] {
            step.pass(pass, false, gradients, reducer, &mut None)?;
        }
        if !gate(gradients)? {
            step.drop_left_over(&ahead)?;
            return Ok(None);
        }
        self.rest(step, ahead[pipeline_rank], gradients, reducer, None).map(Some)
    }

    fn run_passes(
        &self,
        given: PassInputs<'_, D>,
        collectives: Option<VocabCollectives<'_, D>>,
        gradients: &mut GradientStore<D>,
        reducer: &mut Reducer<'_, D>,
        observer: Option<LossObserver<'_, D::Wide>>,
    ) -> Result<Ended<D>, CommError> {
        self.rest(self.step(given, collectives, 0), 0, gradients, reducer, observer)
    }

    fn step<'a, 'l>(
        &'a self,
        given: PassInputs<'a, D>,
        collectives: Option<VocabCollectives<'l, D>>,
        again: Tag,
    ) -> StepState<'a, 'l, D> {
        StepState {
            executor: self,
            given,
            collectives,
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

    /// Runs the passes from index `from`, and what follows the last pass.
    fn rest(
        &self,
        mut step: StepState<'_, '_, D>,
        from: usize,
        gradients: &mut GradientStore<D>,
        reducer: &mut Reducer<'_, D>,
        mut observer: Option<LossObserver<'_, D::Wide>>,
    ) -> Result<Ended<D>, CommError> {
        let PassOrder { passes, pairs } = self.order();
        // An output layer that shares its table with the first chunk adds to the table's gradient,
        // which is then complete only after all passes.
        let shared = self.spec.shares_table(self.pp.rank());
        let is_last = |n: usize| last_of_chunk(passes, n) && !(shared && passes[n].chunk == 0);
        let mut next = from;
        while next < passes.len() {
            if pairs.binary_search(&(next as u32)).is_ok() {
                let (pair, last) = ([passes[next], passes[next + 1]], is_last(next + 1));
                step.pair(pair, last, gradients, reducer, &mut observer)?;
                next += 2;
            } else {
                step.pass(passes[next], is_last(next), gradients, reducer, &mut observer)?;
                next += 1;
            }
        }
        step.close_collectives()?;
        for stage in self.stages {
            let Range { start, end } = stage.parameters();
            reducer.complete(self.inventory, gradients, start, end)?;
        }
        if let Some(VocabOverPipeline { shard, .. }) = self.vocab {
            reducer.complete(self.inventory, gradients, shard.begin(), shard.end())?;
        }
        for send in step.sends {
            send.wait(self.device)?;
        }
        Ok((step.outcome, step.loss))
    }

    /// This pipeline rank's passes.
    fn order(&self) -> &PassOrder {
        &self.spec.passes[self.pp.rank()]
    }

    /// Seconds so far in calls that passes make.
    fn waited_s(&self) -> f64 {
        self.pp.stats().waited_s(&[
            "tp",
            "cp_ring",
            "cp_ulysses",
            "ep",
            "etp",
            "pp",
            "dp",
            "dp_shard",
            "edp",
            "edp_shard",
        ])
    }

    /// Pipeline ranks, for memory of the device.
    fn pp(&self) -> DeviceGroup<'_, D> {
        DeviceGroup::new(self.device, self.pp)
    }
}

/// Whether pass `n` is the last that adds to its chunk's gradients.
fn last_of_chunk(passes: &[Pass], n: usize) -> bool {
    let weighs = |pass: &Pass| matches!(pass.kind, PassKind::BW | PassKind::W);
    let same = |pass: &Pass| pass.chunk == passes[n].chunk && weighs(pass);
    weighs(&passes[n]) && !passes[n + 1..].iter().any(same)
}

impl<'a, D: Device> StepState<'a, '_, D> {
    fn pass(
        &mut self,
        pass: Pass,
        last: bool,
        gradients: &mut GradientStore<D>,
        reducer: &mut Reducer<'_, D>,
        observer: &mut Option<LossObserver<'_, D::Wide>>,
    ) -> Result<(), CommError> {
        let (begin, waited_s) = (Instant::now(), self.executor.waited_s());
        self.computing = begin;
        match pass.kind {
            PassKind::F => self.forward(pass, observer)?,
            PassKind::B | PassKind::BW => self.backward(pass, last, gradients, reducer)?,
            PassKind::W => self.weights(pass, last, gradients, reducer)?,
            PassKind::S => self.first_of_vocabulary(pass)?,
            PassKind::S2 => self.middle_of_vocabulary(pass)?,
            PassKind::T => self.last_of_vocabulary(pass, gradients, reducer)?,
            PassKind::IF => self.look_up(pass)?,
            PassKind::IB => self.add_to_rows(pass, gradients, reducer)?,
        }
        let (computing, end) = (self.computing, Instant::now());
        self.outcome.ran.push(PassTiming { pass, begin, computing, end });
        let in_calls_s = self.executor.waited_s() - waited_s;
        self.outcome.computing_s += (end - begin).as_secs_f64() - in_calls_s;
        Ok(())
    }

    /// The stage that runs a pass.
    fn held(&self, pass: Pass) -> &'a dyn Stage<D> {
        &*self.executor.stages[usize::from(pass.chunk)]
    }

    fn stage_of(&self, pass: Pass) -> usize {
        let (rank, ranks) = (self.executor.pp.rank(), self.executor.pp.size());
        self.executor.spec.layout.stage_of(ranks, rank, usize::from(pass.chunk))
    }

    /// What layers of a pass are given.
    fn context(&self, pass: Pass) -> PassContext<'a, D> {
        let executor = self.executor;
        let (weights, stage) = (self.given.weights, &executor.stages[usize::from(pass.chunk)]);
        let backward = pass.kind != PassKind::F;
        let read = if backward { stage.read_backward() } else { stage.parameters() };
        let units = PassUnits {
            all: weights,
            replicas: executor.sharing,
            read: weights.shards().within(&read),
            backward,
            prefetch: executor.prefetch,
        };
        PassContext {
            device: executor.device,
            tp: executor.tp,
            cp: executor.cp,
            experts: executor.experts,
            routers: executor.routers,
            loads: executor.loads,
            sequence_parallel: executor.spec.sequence_parallel,
            units,
            batch: &self.given.batches[pass.micro_batch as usize],
            draws: self.given.draws,
            pools: self.given.pools,
        }
    }

    fn forward(
        &mut self,
        pass: Pass,
        observer: &mut Option<LossObserver<'_, D::Wide>>,
    ) -> Result<(), CommError> {
        let (ctx, x) = self.enter_forward(pass)?;
        self.computing = Instant::now();
        let result = self.held(pass).forward(&ctx, x)?;
        self.leave_forward(pass, result, observer)
    }

    /// What a forward pass reads.
    fn enter_forward(&mut self, pass: Pass) -> Result<(PassContext<'a, D>, Buffer<D>), CommError> {
        let (stage, ctx) = (self.stage_of(pass), self.context(pass));
        ctx.units.start(ctx.device)?;
        let x = match stage {
            0 => self.looked_up(pass)?,
            _ => self.receive(Carried::Stream, stage - 1, stage, pass)?,
        };
        Ok((ctx, x))
    }

    /// Keeps and sends what a forward pass made.
    fn leave_forward(
        &mut self,
        pass: Pass,
        (passed, kept): (StageOutput<D>, Box<dyn Kept<D>>),
        observer: &mut Option<LossObserver<'_, D::Wide>>,
    ) -> Result<(), CommError> {
        let stage = self.stage_of(pass);
        if let (Some(observer), StageOutput::Losses(losses), Some(logits)) =
            (observer, &passed, kept.logits())
        {
            let device = self.executor.device;
            let losses = device.download(losses.view())?;
            let logits = device.download(logits.view())?;
            let logits: Vec<D::Wide> =
                logits.into_iter().map(|logit| D::Wide::nearest(logit.value())).collect();
            observer(pass.micro_batch as usize, &losses, &logits);
        }
        self.keep(pass, kept);
        match passed {
            StageOutput::Stream(y) if self.is_last(stage) => self.send_to_all(pass, y)?,
            StageOutput::Stream(y) => self.send(Carried::Stream, stage + 1, pass, y)?,
            StageOutput::Losses(losses) => {
                self.executor.device.add_sum(losses.view(), &mut self.loss);
            }
        }
        Ok(())
    }

    fn keep(&mut self, pass: Pass, kept: Box<dyn Kept<D>>) {
        self.kept.insert((pass.chunk, pass.micro_batch), kept);
        self.note_peak();
    }

    fn note_peak(&mut self) {
        self.note_peak_with(0, 0);
    }

    /// The peak with so many micro-batches and bytes besides.
    fn note_peak_with(&mut self, micro_batches: usize, bytes: usize) {
        let works = WeightWork::bytes(self.later.values().flatten());
        let held = self.kept.values().map(|kept| kept.bytes()).sum::<usize>();
        let shards = self.shards.values().map(ShardKept::bytes).sum::<usize>();
        let outcome = &mut self.outcome;
        outcome.peak_bytes = outcome.peak_bytes.max(held + works + shards + bytes);
        outcome.peak_in_flight = outcome.peak_in_flight.max(self.kept.len() + micro_batches);
    }

    /// Gradients of inputs, and of weights unless the schedule has separate passes for them.
    fn backward(
        &mut self,
        pass: Pass,
        last: bool,
        gradients: &mut GradientStore<D>,
        reducer: &mut Reducer<'_, D>,
    ) -> Result<(), CommError> {
        let (ctx, kept, dy) = self.enter_backward(pass)?;
        self.computing = Instant::now();
        let held = self.held(pass);
        let (end, inventory) = (held.parameters().end, self.executor.inventory);
        let device = self.executor.device;
        let mut later = Vec::new();
        let completes = last || gradients.opens_units();
        let mut complete = |gradients: &mut GradientStore<D>, from: usize| {
            reducer.complete(inventory, gradients, from, end)
        };
        let mut to = match pass.kind {
            PassKind::B => Gradients::later(device, gradients, &mut later),
            _ => Gradients::now(device, gradients, completes.then_some(&mut complete)),
        };
        let dx = held.backward(&ctx, kept, dy, &mut to)?;
        if pass.kind == PassKind::B {
            self.later.insert((pass.chunk, pass.micro_batch), later);
            self.note_peak();
        }
        self.leave_backward(pass, dx)
    }

    /// What a backward pass reads: the context, what the forward pass kept, and the gradient of the
    /// stage's output.
    fn enter_backward(&mut self, pass: Pass) -> Result<BackwardInputs<'a, D>, CommError> {
        let stage = self.stage_of(pass);
        if let Some(routers) = self.executor.routers {
            routers.sum_over(self.executor.world)?;
        }
        let ctx = self.context(pass);
        ctx.units.start(ctx.device)?;
        let dy = match self.is_last(stage) {
            true => self.output_gradient(pass)?,
            false => self.receive(Carried::Gradient, stage + 1, stage, pass)?,
        };
        let Some(kept) = self.kept.remove(&(pass.chunk, pass.micro_batch)) else {
            return Err(missing(pass));
        };
        Ok((ctx, kept, dy))
    }

    /// Sends the gradient of a stage's input.
    fn leave_backward(&mut self, pass: Pass, dx: Buffer<D>) -> Result<(), CommError> {
        match self.stage_of(pass) {
            0 => self.broadcast_input_gradient(pass, dx),
            stage => self.send(Carried::Gradient, stage - 1, pass, dx),
        }
    }

    /// A forward and a whole backward together, which let each other run where they would wait.
    fn pair(
        &mut self,
        [forward, backward]: [Pass; 2],
        last: bool,
        gradients: &mut GradientStore<D>,
        reducer: &mut Reducer<'_, D>,
        observer: &mut Option<LossObserver<'_, D::Wide>>,
    ) -> Result<(), CommError> {
        let (begin, waited_s) = (Instant::now(), self.executor.waited_s());
        let (ctx, x) = self.enter_forward(forward)?;
        let (ctx_backward, kept, dy) = self.enter_backward(backward)?;
        let computing = Instant::now();
        let (held, held_backward) = (self.held(forward), self.held(backward));
        let (end, inventory) = (held_backward.parameters().end, self.executor.inventory);
        let kept_bytes = kept.bytes();
        let completes = last || gradients.opens_units();
        let mut complete = |gradients: &mut GradientStore<D>, from: usize| {
            reducer.complete(inventory, gradients, from, end)
        };
        let complete = completes.then_some(&mut complete as _);
        let mut to = Gradients::now(self.executor.device, gradients, complete);
        let (result, dx) = together(
            held.start_forward(&ctx, x),
            held_backward.start_backward(&ctx_backward, kept, dy, &mut to),
        );
        self.leave_forward(forward, result?, observer)?;
        // Both passes held what they keep at the same time.
        self.note_peak_with(1, kept_bytes);
        self.leave_backward(backward, dx?)?;
        let end = Instant::now();
        for pass in [forward, backward] {
            self.outcome.ran.push(PassTiming { pass, begin, computing, end });
        }
        let in_calls_s = self.executor.waited_s() - waited_s;
        self.outcome.computing_s += (end - begin).as_secs_f64() - in_calls_s;
        Ok(())
    }

    /// Gradients of weights, from the work that an earlier pass deferred.
    fn weights(
        &mut self,
        pass: Pass,
        last: bool,
        gradients: &mut GradientStore<D>,
        reducer: &mut Reducer<'_, D>,
    ) -> Result<(), CommError> {
        let Some(works) = self.later.remove(&(pass.chunk, pass.micro_batch)) else {
            return Err(missing(pass));
        };
        let held = self.held(pass);
        let mut left: HashMap<usize, usize> = HashMap::new();
        works.iter().for_each(|work| *left.entry(work.unit()).or_default() += 1);
        for work in works {
            let unit = work.unit();
            work.run(self.executor.device, gradients);
            let works_left = left.entry(unit).or_default();
            *works_left -= 1;
            if *works_left == 0 && gradients.opens_units() {
                let Range { start, end } = gradients.shards().units()[unit].elements;
                reducer.complete(self.executor.inventory, gradients, start, end)?;
            }
        }
        if last {
            let Range { start, end } = held.parameters();
            reducer.complete(self.executor.inventory, gradients, start, end)?;
        }
        Ok(())
    }
}

/// The error of a split vocabulary without passes of the input layer: forwards would wait for ever.
fn no_look_ups() -> CommError {
    let reason = "its schedule has no passes of the input layer: make it with `with_input_passes`";
    CommError::Invalid { call: "a split vocabulary".to_owned(), reason: reason.to_owned() }
}

/// The error of a pass whose input no earlier pass made. The schedule's check refuses such lists.
fn missing(pass: Pass) -> CommError {
    let reason = "no earlier pass made what it reads".to_owned();
    CommError::Invalid { call: format!("{pass:?}"), reason }
}
