//! One rank's part of a training run: its parameters, and what a step does with them.

use crate::buffer::{Pools, WideBuffer};
use crate::checkpoint::{Checkpoint, Tensors};
use crate::comm::{CommError, Communicator, Op, Request};
use crate::data::{Sample, Samples};
use crate::device::{
    Device, DeviceError, Group, MemoryUse, Parameter, Proposal, Space, StepNumbers, Target, WideMut,
};
use crate::error::Error;
use crate::executor::{Executor, Given, Outcome, OverPipeline, Watch};
use crate::groups::Groups;
use crate::layers::{Draws, MicroBatch, Numbers, VocabularyShard};
use crate::params::{Gradient, Held, Init, Inventory, Part, Store, WeightStore};
use crate::program::Program;
use crate::reduce::{Reducer, Reduction, Span};
use crate::scalar::{Number, Scalar};
use crate::stage::Stage;
use crate::steady::{Done, Replays, Steady};
use kernels::adamw::AdamW;
use kernels::cross_entropy::IGNORED;
use kernels::random::{Stream, View};
use kernels::{Cpu, Real, rope};
use models::model::Positions;
use models::schedule::VocabPasses;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

/// How weights are updated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Optimizer {
    /// Decay of the moments.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decay of matrices.
    pub weight_decay: f64,
    /// Largest gradient norm; `None` does not clip.
    pub clip: Option<f64>,
}

impl Optimizer {
    /// Factor of gradients of norm `norm`.
    fn gradient_scale(&self, norm: f64) -> f64 {
        self.clip.map_or(1.0, |most| (most / (norm + 1e-6)).min(1.0))
    }

    fn decay_of(&self, held: &Held) -> f64 {
        if held.declaration.decays() { self.weight_decay } else { 0.0 }
    }
}

/// What a step's gradients came to, the same on all ranks.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// Mean cross-entropy of the iteration's tokens, before the update.
    pub loss: f64,
    /// Tokens that counted.
    pub valid_tokens: u64,
    /// Norm over all parameters, before clipping.
    pub norm: f64,
    /// How this rank's passes ran.
    pub outcome: Outcome,
    /// How its replicas' gradients were summed.
    pub reductions: Vec<Span>,
}

/// A step whose gradients are there, and whose norm is still being summed.
struct Pending {
    /// Of this rank's tensor-parallel group, on its way over the pipeline: the squared norm.
    squares: Request<f64>,
    loss_sum: Request<f64>,
    optimizer: Optimizer,
    /// Without clipping.
    adamw: AdamW,
    valid_tokens: u64,
    outcome: Outcome,
    reductions: Vec<Span>,
}

/// Weights, and the state that belongs to them.
struct State<D: Space> {
    /// As passes read them.
    weights: WeightStore<D>,
    /// As they are known to be right, where those that passes read are rounded, or, where steps begin ahead of the
    /// norm, proposals.
    exact: Option<Store<D>>,
    moments: [Store<D>; 2],
    /// Updates made so far.
    updates: u32,
}

/// What does not change from step to step.
struct Fixed<'a, D: Space> {
    program: &'a Program,
    groups: Groups,
    device: D,
    stages: Vec<Stage>,
    /// Its rows of a vocabulary split over the pipeline.
    shard: Option<VocabularyShard>,
    inventory: Inventory,
    reduction: Reduction,
    seed: u64,
    /// Positions and their table, the same for every micro-batch of whole sequences.
    positions: Numbers<D>,
    rope: Rc<WideBuffer<D>>,
    pools: Pools<D>,
}

/// What a step reads, in memory that stays where it is.
struct Inputs<D: Space> {
    /// This replica's micro-batches.
    batches: Vec<MicroBatch<D>>,
    /// The step, as draws are to be given it.
    step: u32,
}

/// One rank of a run.
pub struct Rank<'a, D: Space> {
    // First: a library that is part of what was recorded must outlive it.
    steady: Steady<D>,
    inputs: Inputs<D>,
    fixed: Fixed<'a, D>,
    state: State<D>,
    gradients: Store<D>,
    pending: Option<Pending>,
}

impl<'a, D: Device> Rank<'a, D> {
    /// Takes this rank's place in the program. Weights are zero until initialised or loaded.
    ///
    /// # Errors
    /// As any collective call.
    pub fn new(
        program: &'a Program,
        world: Box<dyn Communicator>,
        device: D,
        reduction: Reduction,
        seed: u64,
    ) -> Result<Self, CommError> {
        let groups = Groups::new(world, program)?;
        let mut inventory = Inventory::new(groups.tp.rank(), groups.tp.size());
        let (stages, shard) = declare(program, groups.pp.rank(), &mut inventory);
        let (positions, pools) = (positions(program), Pools::default());
        let table = device.taken(rope_table(program, device.host(), &positions));
        let rope = Rc::new(pools.wide.adopt(table));
        let positions = positions.into_iter().map(i64::from).collect();
        let positions = Numbers::new(&device, positions);
        let zeros = || Store::new(&device, &inventory);
        let exact = (D::MASTERS || program.post_validation).then(zeros);
        let state = State {
            weights: Store::new(&device, &inventory),
            exact,
            moments: [zeros(), zeros()],
            updates: 0,
        };
        Ok(Self {
            steady: Steady::new(),
            inputs: Inputs { batches: Vec::new(), step: 0 },
            gradients: zeros(),
            state,
            pending: None,
            fixed: Fixed {
                program,
                groups,
                stages,
                shard,
                inventory,
                reduction,
                seed,
                positions,
                rope,
                pools,
                device,
            },
        })
    }

    /// This rank's groups.
    pub fn groups(&self) -> &Groups {
        &self.fixed.groups
    }

    /// This rank's parameters.
    pub fn inventory(&self) -> &Inventory {
        &self.fixed.inventory
    }

    /// Bytes of weights, gradients and both moments; and of exact weights where those that passes read are others.
    pub fn state_bytes(&self) -> u64 {
        let wide = 3 + usize::from(self.state.exact.is_some());
        let element = size_of::<D::Stored>() + wide * size_of::<D::Wide>();
        (self.fixed.inventory.elements() * element) as u64
    }

    /// What its device's memory came to so far, where that is counted.
    pub fn memory_use(&self) -> Option<MemoryUse> {
        self.fixed.device.memory_use()
    }

    /// Replays steady steps as recorded work, where device, ranks and program allow it and nobody refuses it; the same on
    /// all ranks.
    pub fn replay_steps(&mut self, refused: Option<&'static str>) {
        let Fixed { program, groups, device, .. } = &self.fixed;
        let decides = "optimizer post-validation decides on the host within a step";
        let why_not = refused
            .or_else(|| device.not_recordable())
            .or_else(|| groups.world.not_recordable())
            .or(program.post_validation.then_some(decides));
        self.steady.set(why_not);
    }

    /// What was replayed so far.
    pub fn replays(&self) -> Replays {
        self.steady.replays()
    }

    /// The kernels that its device chose by measurement, where it does.
    pub fn chosen_kernels(&self) -> BTreeMap<String, Vec<String>> {
        self.fixed.device.chosen_kernels()
    }

    /// Draws initial weights by seed, name and global index: the same ones for every split.
    pub fn initialise(&mut self) {
        let Fixed { inventory, device, seed, .. } = &self.fixed;
        for held in inventory.all() {
            self.state.fill(device, held.part, |to| match held.declaration.init {
                Init::Constant(value) => device.fill(to, D::Wide::from_f64(value)),
                Init::Normal(deviation) => draw_normal(device, held, to, *seed, deviation),
            });
        }
    }

    /// Takes weights from a checkpoint.
    ///
    /// # Errors
    /// Tensors that are missing or have other shapes.
    pub fn load(&mut self, checkpoint: &Checkpoint) -> Result<(), Error> {
        for held in self.fixed.inventory.all() {
            let declaration = &held.declaration;
            let whole: Vec<D::Wide> = checkpoint.read(&declaration.name, &declaration.shape)?;
            let local = declaration.extract(&held.extent, &whole);
            self.state.set(&self.fixed.device, held.part, &local);
        }
        Ok(())
    }

    /// Loss and gradients of step `step` (0-based), summed over all ranks.
    ///
    /// # Errors
    /// Data that cannot be read, and as any collective call.
    pub fn gradients(
        &mut self,
        samples: &dyn Samples,
        step: u64,
        watch: Option<Watch<'_, D::Wide>>,
    ) -> Result<Gradients, Error> {
        let Self { fixed, state, gradients, inputs, steady, .. } = self;
        let valid_tokens = inputs.take(fixed, samples, step)?;
        let weights = &state.weights;
        let done = match watch {
            None => steady.step(&fixed.device, &fixed.groups, || {
                fixed.passes(weights, inputs, gradients, None)
            })?,
            watch => steady.launch(|| fixed.passes(weights, inputs, gradients, watch))?,
        };
        let loss_sum = fixed.device.read(&done.loss).map_err(CommError::from)?;
        let loss = mean(fixed.start_loss(loss_sum)?, valid_tokens)?;
        let norm = root(fixed.start_norm(&done.squares)?)?;
        let outcome = Outcome { loss_sum, ..done.outcome.clone() };
        Ok(Gradients { loss, valid_tokens, norm, outcome, reductions: done.reductions.clone() })
    }

    /// Runs step `step` and proposes its update, without waiting for its gradient norm: the first forwards run
    /// while that of the step before is summed, and again where it clips (optimizer post-validation,
    /// Zero Bubble, arXiv 2401.10241, section 4). Where the paper undoes an update, the state stays as it is here
    /// until the norm is known, at the price of a second copy of the weights; so all numbers are those of
    /// [`Self::gradients`] and [`Self::update`], to the bit.
    ///
    /// Gives what the step before came to. Where that is not finite, nothing has been run.
    ///
    /// # Errors
    /// Data that cannot be read, and as any collective call.
    pub fn step_ahead(
        &mut self,
        samples: &dyn Samples,
        step: u64,
        optimizer: &Optimizer,
        lr: f64,
    ) -> Result<Option<Gradients>, Error> {
        let valid_tokens = self.inputs.take(&self.fixed, samples, step)?;
        let mut before = None;
        let (outcome, reductions) = match self.run_ahead(false, &mut before)? {
            Some(ran) => ran,
            None => {
                self.state.take_exact(&self.fixed);
                let finite =
                    |before: &Gradients| before.norm.is_finite() && before.loss.is_finite();
                if !before.as_ref().is_some_and(finite) {
                    return Ok(before);
                }
                let ran = self.run_ahead(true, &mut before)?;
                ran.ok_or_else(|| begun_twice(step))?
            }
        };
        let Self { fixed, state, gradients, .. } = self;
        fixed.sum_partial_gradients(gradients)?;
        fixed.sum_tied_gradients(gradients)?;
        let loss_sum = fixed.start_loss(outcome.loss_sum)?;
        let squares = fixed.start_norm(&fixed.squares(gradients))?;
        let adamw = state.next_step(optimizer, lr, 1.0);
        state.propose(fixed, optimizer, &adamw, gradients);
        let optimizer = *optimizer;
        self.pending = Some(Pending {
            squares,
            loss_sum,
            optimizer,
            adamw,
            valid_tokens,
            outcome,
            reductions,
        });
        Ok(before)
    }

    /// How the last step's passes ran, of which [`Self::step_ahead`] has not told yet.
    pub fn pending_outcome(&self) -> Option<&Outcome> {
        self.pending.as_ref().map(|pending| &pending.outcome)
    }

    /// Waits for the last step of [`Self::step_ahead`] and gives what it came to.
    ///
    /// # Errors
    /// As any collective call.
    pub fn settle(&mut self) -> Result<Option<Gradients>, Error> {
        let Some(pending) = self.pending.take() else { return Ok(None) };
        let State { exact: Some(exact), moments, .. } = &mut self.state else { return Ok(None) };
        let (result, _) = pending.settle(&self.fixed, &self.gradients, exact, moments)?;
        self.state.take_exact(&self.fixed);
        Ok(Some(result))
    }

    /// Runs the passes of a step, and settles the one before on the way; `None` where its proposal was wrong.
    fn run_ahead(
        &mut self,
        again: bool,
        before: &mut Option<Gradients>,
    ) -> Result<Option<(Outcome, Vec<Span>)>, Error> {
        let Self { fixed, state, gradients, pending, inputs, .. } = self;
        let State { weights, exact, moments, .. } = state;
        let mut gate = |gradients: &mut Store<D>| {
            let mut right = true;
            if let (Some(pending), Some(exact)) = (pending.take(), exact.as_mut()) {
                let (result, was_right) = pending.settle(fixed, gradients, exact, moments)?;
                (*before, right) = (Some(result), was_right);
            }
            fixed.device.fill(gradients.all_mut(), D::Wide::ZERO);
            Ok(right)
        };
        let mut reducer = fixed.reducer();
        let given = fixed.given(weights, inputs);
        let ran = fixed.executor().run_gated(given, again, &mut gate, gradients, &mut reducer)?;
        let Some((mut outcome, loss)) = ran else { return Ok(None) };
        outcome.loss_sum = fixed.device.read(&loss).map_err(CommError::from)?;
        Ok(Some((outcome, reducer.finish(gradients)?)))
    }

    /// Updates the weights with gradients of norm `norm`.
    pub fn update(&mut self, optimizer: &Optimizer, lr: f64, norm: f64) {
        let Self { fixed, state, gradients, .. } = self;
        let adamw = state.next_step(optimizer, lr, optimizer.gradient_scale(norm));
        let inventory = &fixed.inventory;
        let read = state.weights.each_mut(inventory);
        let targets: Vec<_> = match &mut state.exact {
            None => read.into_iter().map(Target::Read).collect(),
            Some(exact) => {
                let both = exact.each_mut(inventory).into_iter().zip(read);
                both.map(|(exact, read)| Target::Both(exact, read)).collect()
            }
        };
        fixed.update(&adamw, optimizer, targets, gradients, &mut state.moments);
    }

    /// The model's gradients, whole, on rank 0 of the world; nothing on the others.
    ///
    /// # Errors
    /// As any collective call.
    pub fn whole_gradients(&self) -> Result<Option<Tensors<D::Wide>>, CommError> {
        self.fixed.whole(|part| self.fixed.device.download(self.gradients.get(part)))
    }

    /// The model's weights, whole, on rank 0 of the world; nothing on the others.
    ///
    /// # Errors
    /// As any collective call.
    pub fn whole_weights(&self) -> Result<Option<Tensors<D::Wide>>, CommError> {
        let (device, state) = (&self.fixed.device, &self.state);
        self.fixed.whole(|part| match &state.exact {
            Some(exact) => device.download(exact.get(part)),
            None => {
                let values = device.download(state.weights.get(part))?;
                Ok(values.into_iter().map(|value| D::Wide::nearest(value.value())).collect())
            }
        })
    }
}

impl<D: Device> Fixed<'_, D> {
    fn executor(&self) -> Executor<'_, D> {
        Executor {
            program: self.program,
            device: &self.device,
            tp: &*self.groups.tp,
            pp: &*self.groups.pp,
            stages: &self.stages,
            vocab: match (&self.shard, &self.groups.vocab) {
                (Some(shard), Some(groups)) => Some(OverPipeline { shard, groups }),
                _ => None,
            },
            inventory: &self.inventory,
        }
    }

    fn reducer(&self) -> Reducer<'_, D> {
        Reducer::new(&self.device, &*self.groups.dp, self.reduction)
    }

    /// What a step's passes read.
    fn given<'b>(&'b self, weights: &'b WeightStore<D>, inputs: &'b Inputs<D>) -> Given<'b, D> {
        let p = self.program.model.dropout;
        let draws = (p > 0.0).then_some(Draws { p, seed: self.seed, step: inputs.step });
        Given { weights, batches: &inputs.batches, draws, pools: &self.pools }
    }

    /// A step's passes and sums: nothing here waits for the device, and no number is other than in the step before but what
    /// is in `inputs`' memory, so that it can be recorded.
    fn passes(
        &self,
        weights: &WeightStore<D>,
        inputs: &Inputs<D>,
        gradients: &mut Store<D>,
        watch: Option<Watch<'_, D::Wide>>,
    ) -> Result<Done<D>, Error> {
        self.device.fill(gradients.all_mut(), D::Wide::ZERO);
        let mut reducer = self.reducer();
        let given = self.given(weights, inputs);
        let (outcome, loss) = self.executor().run(given, gradients, &mut reducer, watch)?;
        let reductions = reducer.finish(gradients)?;
        self.sum_partial_gradients(gradients)?;
        self.sum_tied_gradients(gradients)?;
        Ok(Done { outcome, loss, squares: self.squares(gradients), reductions })
    }

    /// Tokens and labels of this replica's micro-batches of a step, and the valid tokens of all replicas.
    fn read_all(&self, samples: &dyn Samples, step: u64) -> Result<(Vec<Tokens>, u64), Error> {
        let program = self.program;
        let (each, count) = (program.micro_batch, program.micro_batches);
        let first = self.groups.dp.rank() * each * count;
        let begin = step * program.global_batch() as u64;
        let (mut read, mut total) = (Vec::with_capacity(count), [0]);
        for k in 0..count {
            let numbers = (first + k * each)..(first + (k + 1) * each);
            let (tokens, labels) = self.read(samples, begin, numbers.clone())?;
            total[0] += labels.iter().filter(|&&label| label >= 0).count() as i64;
            read.push((numbers, tokens, labels));
        }
        if self.groups.dp.size() > 1 {
            self.groups.dp.all_reduce(&mut total, Op::Sum)?;
        }
        Ok((read, total[0].max(0) as u64))
    }

    /// Tokens and labels of some of an iteration's sequences.
    fn read(
        &self,
        samples: &dyn Samples,
        begin: u64,
        numbers: Range<usize>,
    ) -> Result<(Vec<i64>, Vec<i64>), Error> {
        let (mut tokens, mut labels) = (Vec::new(), Vec::new());
        for number in numbers {
            let index = begin + number as u64;
            let sample = samples.read(index)?;
            check_tokens(&sample, self.program.model.vocab, index)?;
            tokens.extend_from_slice(&sample.tokens);
            labels.extend_from_slice(&sample.labels);
        }
        Ok((tokens, labels))
    }

    /// Labels of rows that count, but with their target elsewhere, where they are asked for.
    fn elsewhere(&self, labels: &[i64]) -> Option<Vec<i64>> {
        let elsewhere = |&label: &i64| if label == IGNORED { IGNORED } else { i64::MAX };
        let two = self.program.vocab == Some(VocabPasses::Two);
        two.then(|| labels.iter().map(elsewhere).collect())
    }

    fn micro_batch(&self, (numbers, tokens, labels): Tokens, loss_scale: f64) -> MicroBatch<D> {
        let elsewhere = self.elsewhere(&labels);
        let numbers_of = |values| Numbers::new(&self.device, values);
        MicroBatch {
            sequences: numbers.len(),
            seq_len: self.program.seq_len(),
            first_sequence: numbers.start,
            tokens: numbers_of(tokens),
            labels: numbers_of(labels),
            elsewhere: elsewhere.map(numbers_of),
            positions: self.positions.clone(),
            rope: self.rope.clone(),
            loss_scale,
        }
    }

    /// Sums over tensor-parallel ranks what each has only a part of: all such parameters in one call,
    /// each in its place of the whole, so that copies meet whoever holds them.
    fn sum_partial_gradients(&self, gradients: &mut Store<D>) -> Result<(), CommError> {
        let partial = |held: &&Held| held.declaration.gradient == Gradient::Partial;
        let held: Vec<&Held> = self.inventory.all().iter().filter(partial).collect();
        if self.groups.tp.size() == 1 || held.is_empty() {
            return Ok(());
        }
        let device = &self.device;
        let mut runs = Vec::new();
        let mut elements = 0;
        for held in held {
            for (local, whole, len) in held.declaration.runs(&held.extent) {
                let own = held.part.begin + local;
                runs.push((own..own + len, elements + whole..elements + whole + len));
            }
            elements += held.declaration.elements();
        }
        let mut all = device.zeros(elements);
        for (own, whole) in &runs {
            let to = D::view_mut(&mut all, whole.clone());
            device.copy(gradients.range(own.clone()), to);
        }
        let all = Group::new(device, &*self.groups.tp).all_reduce(all, Op::Sum)?;
        for (own, whole) in runs {
            device.copy(D::view(&all, whole), gradients.range_mut(own));
        }
        Ok(())
    }

    /// Sums the gradients of an embedding that first and last stage share.
    fn sum_tied_gradients(&self, gradients: &mut Store<D>) -> Result<(), CommError> {
        if self.program.layout.copies() > 1 {
            self.sum_tied_copies(gradients);
            return Ok(());
        }
        let apart = self.program.last_device() != 0 && self.shard.is_none();
        if self.groups.ends.size() == 1 || !self.program.model.tied_embeddings || !apart {
            return Ok(());
        }
        let name = crate::layers::Names::of(&self.program.model).embedding();
        let Some(held) = self.inventory.named(name) else { return Ok(()) };
        let (part, device) = (held.part, &self.device);
        let own = device.copied(gradients.get(part));
        let sum = Group::new(device, &*self.groups.ends).all_reduce(own, Op::Sum)?;
        device.copy(D::view(&sum, 0..part.len), gradients.get_mut(part));
        Ok(())
    }

    /// The same where each device at an end holds a copy of both stages, each with a table, of which it has the sum
    /// over both copies: they become what they come to together.
    fn sum_tied_copies(&self, gradients: &mut Store<D>) {
        let name = crate::layers::Names::of(&self.program.model).embedding();
        let tables = self.inventory.all().iter().filter(|held| held.declaration.name == name);
        // The first stage's is not the copy: both devices add in this order, to the same bits.
        let (mut first, mut last) = (None, None);
        for held in tables {
            let place = if held.declaration.tied_copy { &mut last } else { &mut first };
            *place = Some(held.part);
        }
        let (Some(first), Some(last)) = (first, last) else { return };
        let theirs = self.device.copied(gradients.get(last));
        self.device.add_wide(D::view(&theirs, 0..last.len), gradients.get_mut(first));
        let both = self.device.copied(gradients.get(first));
        self.device.copy(D::view(&both, 0..first.len), gradients.get_mut(last));
    }

    /// Starts summing the iteration's losses, from the ranks that hold the output layer.
    fn start_loss(&self, loss_sum: f64) -> Result<Request<f64>, CommError> {
        // All tensor-parallel ranks know the same losses: one of them tells.
        let sum = if self.groups.tp.rank() == 0 { loss_sum } else { 0.0 };
        self.groups.world.start_all_reduce(vec![sum], Op::Sum)
    }

    /// The sum of squares of this rank's parameters, each element of the model counted on one rank.
    fn squares(&self, gradients: &Store<D>) -> D::Total {
        let mut total = self.device.total();
        for held in self.inventory.all().iter().filter(|held| held.counted) {
            self.device.add_squares(gradients.get(held.part), &mut total);
        }
        total
    }

    /// Starts summing squares over all parameters of the model.
    fn start_norm(&self, squares: &D::Total) -> Result<Request<f64>, CommError> {
        let mut sum = [self.device.read(squares)?];
        // Replicas have the same gradients by now.
        self.groups.tp.all_reduce(&mut sum, Op::Sum)?;
        self.groups.pp.start_all_reduce(sum.to_vec(), Op::Sum)
    }

    /// Updates weights and moments.
    fn update<'b>(
        &'b self,
        adamw: &AdamW,
        optimizer: &Optimizer,
        targets: Vec<Target<'b, D>>,
        gradients: &'b Store<D>,
        [m, v]: &'b mut [Store<D>; 2],
    ) {
        let inventory = &self.inventory;
        let moments = m.each_mut(inventory).into_iter().zip(v.each_mut(inventory));
        let state = inventory.all().iter().zip(targets).zip(moments);
        let update = |((held, w), (m, v)): ((&Held, _), _)| {
            let g = gradients.get(held.part);
            Parameter { w, g, m, v, decay: optimizer.decay_of(held) }
        };
        self.device.adamw(adamw, state.map(update).collect());
    }

    /// Every rank of the first replica sends what it counts; rank 0, who can declare what others
    /// hold, puts it together.
    fn whole(
        &self,
        read: impl Fn(Part) -> Result<Vec<D::Wide>, DeviceError>,
    ) -> Result<Option<Tensors<D::Wide>>, CommError> {
        const TAG: u64 = 1 << 61;
        let world = &self.groups.world;
        if self.groups.dp.rank() > 0 {
            return Ok(None);
        }
        let mut own = Vec::new();
        for held in self.inventory.all().iter().filter(|held| held.counted) {
            own.extend(read(held.part)?);
        }
        if world.rank() > 0 {
            world.send(&own, 0, TAG)?;
            return Ok(None);
        }
        let mut own = Some(own);
        let mut tensors: Tensors<D::Wide> = BTreeMap::new();
        for rank in 0..world.size() {
            let at = self.program.mesh.coordinates(rank as u64);
            if at.dp > 0 {
                continue;
            }
            let mut theirs = Inventory::new(at.tp as usize, self.groups.tp.size());
            declare(self.program, at.pp as usize, &mut theirs);
            let counted: Vec<&Held> = theirs.all().iter().filter(|held| held.counted).collect();
            let count = counted.iter().map(|held| held.part.len).sum();
            let told = match (rank, own.take()) {
                (0, Some(own)) => own,
                _ => world.recv(count, rank, TAG)?,
            };
            let mut rest = told.as_slice();
            for held in counted {
                let (local, behind) = rest.split_at(held.part.len);
                let declaration = &held.declaration;
                let empty =
                    || (declaration.shape.clone(), vec![D::Wide::ZERO; declaration.elements()]);
                let (_, whole) = tensors.entry(declaration.name.clone()).or_insert_with(empty);
                declaration.insert(&held.extent, local, whole);
                rest = behind;
            }
        }
        Ok(Some(tensors))
    }
}

/// Which of an iteration's sequences, their tokens and labels.
type Tokens = (Range<usize>, Vec<i64>, Vec<i64>);

impl<D: Device> Inputs<D> {
    /// Takes those of a step, where those of the step before lay; gives the valid tokens of all replicas.
    fn take(
        &mut self,
        fixed: &Fixed<'_, D>,
        samples: &dyn Samples,
        step: u64,
    ) -> Result<u64, Error> {
        let (read, valid_tokens) = fixed.read_all(samples, step)?;
        let loss_scale = 1.0 / (valid_tokens.max(1) as f64);
        let numbers = StepNumbers { step: step as u32, loss_scale };
        let StepNumbers { step, loss_scale } = fixed.device.step_numbers(numbers);
        self.step = step;
        for (k, tokens) in read.into_iter().enumerate() {
            match self.batches.get_mut(k) {
                None => self.batches.push(fixed.micro_batch(tokens, loss_scale)),
                Some(batch) => replace(fixed, batch, tokens, loss_scale)?,
            }
        }
        Ok(valid_tokens)
    }
}

/// Gives a micro-batch other tokens.
fn replace<D: Device>(
    fixed: &Fixed<'_, D>,
    batch: &mut MicroBatch<D>,
    (_, tokens, labels): Tokens,
    loss_scale: f64,
) -> Result<(), Error> {
    let device = &fixed.device;
    let mut stays = true;
    if let (Some(place), Some(elsewhere)) = (&mut batch.elsewhere, fixed.elsewhere(&labels)) {
        stays &= place.set(device, elsewhere);
    }
    stays &= batch.tokens.set(device, tokens);
    stays &= batch.labels.set(device, labels);
    batch.loss_scale = loss_scale;
    let moved = || DeviceError("tokens of the step before are still in use: our bug".to_owned());
    Ok(stays.then_some(()).ok_or_else(moved).map_err(CommError::from)?)
}

impl<D: Device> State<D> {
    /// Sets a parameter's weights.
    fn set(&mut self, device: &D, part: Part, values: &[D::Wide]) {
        match &mut self.exact {
            Some(exact) => {
                device.upload(values, exact.get_mut(part));
                device.round(exact.get(part), self.weights.get_mut(part));
            }
            None => {
                let stored: Vec<D::Stored> =
                    values.iter().map(|value| D::Stored::nearest(value.value())).collect();
                device.upload(&stored, self.weights.get_mut(part));
            }
        }
    }

    /// Sets a parameter's weights to what `fill` writes.
    fn fill(&mut self, device: &D, part: Part, fill: impl FnOnce(WideMut<'_, D>)) {
        let weights = self.weights.get_mut(part);
        if let Some(exact) = &mut self.exact {
            fill(exact.get_mut(part));
            return device.round(exact.get(part), weights);
        }
        let mut values = device.zeros(part.len);
        fill(D::view_mut(&mut values, 0..part.len));
        device.round(D::view(&values, 0..part.len), weights);
    }

    /// Passes read the exact weights from now on.
    fn take_exact(&mut self, fixed: &Fixed<'_, D>) {
        if let Some(exact) = &self.exact {
            fixed.device.round(exact.all(), self.weights.all_mut());
        }
    }

    /// Numbers of the next update.
    fn next_step(&mut self, optimizer: &Optimizer, lr: f64, gradient_scale: f64) -> AdamW {
        self.updates += 1;
        AdamW {
            lr,
            beta1: optimizer.betas.0,
            beta2: optimizer.betas.1,
            eps: optimizer.eps,
            step: self.updates,
            gradient_scale,
        }
    }

    /// Weights for passes as they are behind a step; the state stays.
    fn propose(
        &mut self,
        fixed: &Fixed<'_, D>,
        optimizer: &Optimizer,
        adamw: &AdamW,
        gradients: &Store<D>,
    ) {
        let (Some(exact), [m, v]) = (&self.exact, &self.moments) else { return };
        let weights = self.weights.each_mut(&fixed.inventory);
        let proposal = |(held, to): (&Held, _)| {
            let [w, g, m, v] = [exact, gradients, m, v].map(|store| store.get(held.part));
            Proposal { to, w, g, m, v, decay: optimizer.decay_of(held) }
        };
        let proposals = fixed.inventory.all().iter().zip(weights).map(proposal).collect();
        fixed.device.adamw_proposal(adamw, proposals);
    }
}

impl Pending {
    /// Waits for the norm and updates the exact weights, unless the numbers are not finite. Says what the step came
    /// to, and whether its proposal was right.
    fn settle<D: Device>(
        self,
        fixed: &Fixed<'_, D>,
        gradients: &Store<D>,
        exact: &mut Store<D>,
        moments: &mut [Store<D>; 2],
    ) -> Result<(Gradients, bool), CommError> {
        let Self { valid_tokens, outcome, reductions, optimizer, adamw, .. } = self;
        let (loss, norm) = (mean(self.loss_sum, valid_tokens)?, root(self.squares)?);
        let gradient_scale = optimizer.gradient_scale(norm);
        let finite = norm.is_finite() && loss.is_finite();
        if finite {
            let adamw = AdamW { gradient_scale, ..adamw };
            let targets = exact.each_mut(&fixed.inventory).into_iter().map(Target::Exact).collect();
            fixed.update(&adamw, &optimizer, targets, gradients, moments);
        }
        let right = finite && gradient_scale == adamw.gradient_scale;
        Ok((Gradients { loss, valid_tokens, norm, outcome, reductions }, right))
    }
}

/// A sum over an iteration's valid tokens, divided by them.
fn mean(sum: Request<f64>, valid_tokens: u64) -> Result<f64, CommError> {
    Ok(only(sum)? / valid_tokens.max(1) as f64)
}

fn root(squares: Request<f64>) -> Result<f64, CommError> {
    Ok(only(squares)?.sqrt())
}

fn only(request: Request<f64>) -> Result<f64, CommError> {
    Ok(request.wait()?.first().copied().unwrap_or(f64::NAN))
}

/// What is settled once cannot be wrong again: our bug.
fn begun_twice(step: u64) -> CommError {
    let reason = "the step before was settled, and still the gate is closed".to_owned();
    CommError::Invalid { call: format!("step {step}"), reason }
}

/// Declares the stages of pipeline device `device`, and its part of a vocabulary split over all.
fn declare(
    program: &Program,
    device: usize,
    inventory: &mut Inventory,
) -> (Vec<Stage>, Option<VocabularyShard>) {
    let (mut stages, mut table) = (Vec::new(), None);
    for (chunk, index) in program.stages_of(device).into_iter().enumerate() {
        if chunk > 0 && program.layout.copies() > 1 {
            inventory.enter_copies();
        }
        let stage = Stage::declare(program, index, table, inventory);
        // Copies mirror each other, tables and all: none is shared between a device's stages.
        if program.layout.copies() == 1 {
            table = table.or(stage.table());
        }
        stages.push(stage);
    }
    (stages, VocabularyShard::declare(program, device, inventory))
}

/// Positions of a micro-batch of whole sequences.
fn positions(program: &Program) -> Vec<u32> {
    let s = program.seq_len();
    (0..program.micro_batch * s).map(|token| (token % s) as u32).collect()
}

fn rope_table<T: Scalar>(program: &Program, cpu: &Cpu, positions: &[u32]) -> Vec<T> {
    let model = &program.model;
    if model.positions != Positions::Rope {
        return Vec::new();
    }
    let dim = model.attention.head_dim as usize;
    let mut table = vec![T::ZERO; positions.len() * dim];
    let frequencies = rope::inverse_frequencies(model.numerics.rope_theta, dim);
    rope::fill_table(cpu, &frequencies, positions, &mut table);
    table
}

/// Tokens must be in the vocabulary, labels too or -1.
fn check_tokens(sample: &Sample, vocab: u64, index: u64) -> Result<(), Error> {
    let tokens = sample.tokens.iter().map(|&token| (token, 0));
    let labels = sample.labels.iter().map(|&label| (label, -1));
    let mut wrong =
        tokens.chain(labels).filter(|&(id, least)| !(least..vocab as i64).contains(&id));
    wrong.next().map_or(Ok(()), |(id, least)| {
        let problem =
            format!("sample {index} has the id {id}; valid: {least} to {}", vocab.max(1) - 1);
        Err(Error::Flag { flag: "data", problem })
    })
}

/// Fills what a rank holds with normal numbers by their place in the tensor as stored.
fn draw_normal<D: Device>(
    device: &D,
    held: &Held,
    mut rest: WideMut<'_, D>,
    seed: u64,
    deviation: f64,
) {
    let (_, columns) = held.declaration.stored_shape();
    let stream = Stream { seed, tensor: name_hash(&held.declaration.name), step: 0 };
    let extent = &held.extent;
    for rows in &extent.rows {
        let (first, width) = (extent.columns.start as u64, extent.columns.len());
        let view = View::matrix(rows.start as u64, rows.len(), first, width, columns as u64);
        let (now, behind) = D::split(rest, view.len());
        device.fill_normal(now, &view, stream, deviation);
        rest = behind;
    }
}

/// FNV-1a, 32 bits: which random numbers a tensor draws.
fn name_hash(name: &str) -> u32 {
    name.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}
