//! One rank's part of a training run: its parameters, and what a step does with them.

use crate::buffer::Pool;
use crate::checkpoint::{Checkpoint, Whole};
use crate::comm::{CommError, Communicator, Op, Request};
use crate::data::{Sample, Samples};
use crate::error::Error;
use crate::executor::{Executor, Given, Outcome, OverPipeline, Watch};
use crate::groups::Groups;
use crate::layers::{Draws, MicroBatch, VocabularyShard};
use crate::params::{Gradient, Held, Init, Inventory, Store};
use crate::program::Program;
use crate::reduce::{Reducer, Reduction, Span};
use crate::scalar::Scalar;
use crate::stage::Stage;
use kernels::adamw::{self, AdamW, Parameter, Proposal};
use kernels::random::{self, Stream, View};
use kernels::{Cpu, elementwise, rope};
use models::model::Positions;
use std::collections::BTreeMap;
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
struct State<'a, T> {
    w: &'a mut Store<T>,
    moments: &'a mut [Store<T>; 2],
}

/// One rank of a run.
pub struct Rank<'a, T> {
    program: &'a Program,
    groups: Groups,
    cpu: Cpu,
    stages: Vec<Stage>,
    /// Its rows of a vocabulary split over the pipeline.
    shard: Option<VocabularyShard>,
    inventory: Inventory,
    weights: Store<T>,
    gradients: Store<T>,
    moments: [Store<T>; 2],
    /// Updates made so far.
    updates: u32,
    /// Where steps begin ahead of the norm: the weights as they are known to be right; those that passes read
    /// are proposals.
    settled: Option<Store<T>>,
    pending: Option<Pending>,
    reduction: Reduction,
    seed: u64,
    /// Positions and their table, the same for every micro-batch of whole sequences.
    positions: Vec<u32>,
    rope: Rc<Vec<T>>,
    pool: Pool<T>,
}

impl<'a, T: Scalar> Rank<'a, T> {
    /// Takes this rank's place in the program. Weights are zero until initialised or loaded.
    ///
    /// # Errors
    /// As any collective call.
    pub fn new(
        program: &'a Program,
        world: Box<dyn Communicator>,
        cpu: Cpu,
        reduction: Reduction,
        seed: u64,
    ) -> Result<Self, CommError> {
        let groups = Groups::new(world, program)?;
        let mut inventory = Inventory::new(groups.tp.rank(), groups.tp.size());
        let (stages, shard) = declare(program, groups.pp.rank(), &mut inventory);
        let positions = positions(program);
        let rope = Rc::new(rope_table(program, &cpu, &positions));
        let zeros = || Store::new(&inventory);
        Ok(Self {
            weights: zeros(),
            gradients: zeros(),
            moments: [zeros(), zeros()],
            updates: 0,
            settled: None,
            pending: None,
            program,
            groups,
            cpu,
            stages,
            shard,
            inventory,
            reduction,
            seed,
            positions,
            rope,
            pool: Pool::default(),
        })
    }

    /// This rank's groups.
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// This rank's parameters.
    pub fn inventory(&self) -> &Inventory {
        &self.inventory
    }

    /// Bytes of weights, gradients and both moments; with post-validation of settled weights, too.
    pub fn state_bytes(&self) -> u64 {
        let stores = if self.program.post_validation { 5 } else { 4 };
        stores * (self.inventory.elements() * size_of::<T>()) as u64
    }

    /// Draws initial weights by seed, name and global index: the same ones for every split.
    pub fn initialise(&mut self) {
        for held in self.inventory.all() {
            let values = self.weights.get_mut(held.part);
            match held.declaration.init {
                Init::Constant(value) => values.fill(T::from_f64(value)),
                Init::Normal(deviation) => {
                    draw_normal(&self.cpu, held, values, self.seed, deviation);
                }
            }
        }
    }

    /// Takes weights from a checkpoint.
    ///
    /// # Errors
    /// Tensors that are missing or have other shapes.
    pub fn load(&mut self, checkpoint: &Checkpoint) -> Result<(), Error> {
        for held in self.inventory.all() {
            let declaration = &held.declaration;
            let whole: Vec<T> = checkpoint.read(&declaration.name, &declaration.shape)?;
            let local = declaration.extract(&held.extent, &whole);
            self.weights.get_mut(held.part).copy_from_slice(&local);
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
        watch: Option<Watch<'_, T>>,
    ) -> Result<Gradients, Error> {
        let (batches, valid_tokens) = self.batches(samples, step)?;
        self.gradients.all_mut().fill(T::ZERO);
        let draws = self.draws(step);
        let executor = Executor {
            program: self.program,
            cpu: &self.cpu,
            tp: &*self.groups.tp,
            pp: &*self.groups.pp,
            stages: &self.stages,
            vocab: match (&self.shard, &self.groups.vocab) {
                (Some(shard), Some(groups)) => Some(OverPipeline { shard, groups }),
                _ => None,
            },
            inventory: &self.inventory,
        };
        let mut reducer = Reducer::new(&*self.groups.dp, self.reduction);
        let given = Given { weights: &self.weights, batches: &batches, draws, pool: &self.pool };
        let gradients = &mut self.gradients;
        let outcome = executor.run(given, gradients, &mut reducer, watch)?;
        let reductions = reducer.finish(gradients)?;
        self.sum_partial_gradients()?;
        self.sum_tied_gradients()?;
        let loss = mean(self.start_loss(&outcome)?, valid_tokens)?;
        let norm = root(self.start_squares()?)?;
        Ok(Gradients { loss, valid_tokens, norm, outcome, reductions })
    }

    fn draws(&self, step: u64) -> Option<Draws> {
        let p = self.program.model.dropout;
        (p > 0.0).then_some(Draws { p, seed: self.seed, step: step as u32 })
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
        let (batches, valid_tokens) = self.batches(samples, step)?;
        if self.settled.is_none() {
            self.settled = Some(self.weights.clone());
        }
        let mut before = None;
        let (outcome, reductions) = match self.run_ahead(&batches, step, false, &mut before)? {
            Some(ran) => ran,
            None => {
                self.take_settled();
                let finite =
                    |before: &Gradients| before.norm.is_finite() && before.loss.is_finite();
                if !before.as_ref().is_some_and(finite) {
                    return Ok(before);
                }
                let ran = self.run_ahead(&batches, step, true, &mut before)?;
                ran.ok_or_else(|| begun_twice(step))?
            }
        };
        self.sum_partial_gradients()?;
        self.sum_tied_gradients()?;
        let (loss_sum, squares) = (self.start_loss(&outcome)?, self.start_squares()?);
        let adamw = self.next_step(optimizer, lr, 1.0);
        self.propose(optimizer, &adamw);
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
        let (Some(pending), Some(settled)) = (self.pending.take(), &mut self.settled) else {
            return Ok(None);
        };
        let state = State { w: settled, moments: &mut self.moments };
        let (result, _) = pending.settle(&self.cpu, &self.inventory, &self.gradients, state)?;
        self.take_settled();
        Ok(Some(result))
    }

    fn take_settled(&mut self) {
        if let Some(settled) = &self.settled {
            self.weights.all_mut().copy_from_slice(settled.all());
        }
    }

    /// Runs the passes of a step, and settles the one before on the way; `None` where its proposal was wrong.
    fn run_ahead(
        &mut self,
        batches: &[MicroBatch<T>],
        step: u64,
        again: bool,
        before: &mut Option<Gradients>,
    ) -> Result<Option<(Outcome, Vec<Span>)>, Error> {
        let draws = self.draws(step);
        let executor = Executor {
            program: self.program,
            cpu: &self.cpu,
            tp: &*self.groups.tp,
            pp: &*self.groups.pp,
            stages: &self.stages,
            vocab: None,
            inventory: &self.inventory,
        };
        let (pending, settled, moments) = (&mut self.pending, &mut self.settled, &mut self.moments);
        let (cpu, inventory) = (&self.cpu, &self.inventory);
        let mut gate = |gradients: &mut Store<T>| {
            let mut right = true;
            if let (Some(pending), Some(w)) = (pending.take(), settled.as_mut()) {
                let state = State { w, moments: &mut *moments };
                let (result, was_right) = pending.settle(cpu, inventory, gradients, state)?;
                (*before, right) = (Some(result), was_right);
            }
            gradients.all_mut().fill(T::ZERO);
            Ok(right)
        };
        let mut reducer = Reducer::new(&*self.groups.dp, self.reduction);
        let given = Given { weights: &self.weights, batches, draws, pool: &self.pool };
        let gradients = &mut self.gradients;
        let ran = executor.run_gated(given, again, &mut gate, gradients, &mut reducer)?;
        let Some(outcome) = ran else { return Ok(None) };
        Ok(Some((outcome, reducer.finish(gradients)?)))
    }

    /// This replica's micro-batches, and the valid tokens of all replicas.
    fn batches(
        &self,
        samples: &dyn Samples,
        step: u64,
    ) -> Result<(Vec<MicroBatch<T>>, u64), Error> {
        let program = self.program;
        let (each, count) = (program.micro_batch, program.micro_batches);
        let first = self.groups.dp.rank() * each * count;
        let begin = step * program.global_batch() as u64;
        let mut batches = Vec::with_capacity(count);
        for k in 0..count {
            let numbers = (first + k * each)..(first + (k + 1) * each);
            batches.push(self.micro_batch(samples, begin, numbers)?);
        }
        let valid = |batch: &MicroBatch<T>| batch.labels.iter().filter(|&&l| l >= 0).count();
        let mut total = [batches.iter().map(valid).sum::<usize>() as i64];
        if self.groups.dp.size() > 1 {
            self.groups.dp.all_reduce(&mut total, Op::Sum)?;
        }
        let valid_tokens = total[0].max(0) as u64;
        for batch in &mut batches {
            batch.loss_scale = 1.0 / (valid_tokens.max(1) as f64);
        }
        Ok((batches, valid_tokens))
    }

    fn micro_batch(
        &self,
        samples: &dyn Samples,
        begin: u64,
        numbers: std::ops::Range<usize>,
    ) -> Result<MicroBatch<T>, Error> {
        let (sequences, seq_len) = (numbers.len(), self.program.seq_len());
        let first_sequence = numbers.start;
        let (mut tokens, mut labels) = (Vec::new(), Vec::new());
        for number in numbers {
            let index = begin + number as u64;
            let sample = samples.read(index)?;
            check_tokens(&sample, self.program.model.vocab, index)?;
            tokens.extend_from_slice(&sample.tokens);
            labels.extend_from_slice(&sample.labels);
        }
        Ok(MicroBatch {
            sequences,
            seq_len,
            first_sequence,
            tokens: Rc::new(tokens),
            labels,
            positions: self.positions.clone(),
            rope: self.rope.clone(),
            loss_scale: 0.0,
        })
    }

    /// Sums over tensor-parallel ranks what each has only a part of: all such parameters in one call,
    /// each in its place of the whole, so that copies meet whoever holds them.
    fn sum_partial_gradients(&mut self) -> Result<(), CommError> {
        let partial = |held: &&Held| held.declaration.gradient == Gradient::Partial;
        let held: Vec<&Held> = self.inventory.all().iter().filter(partial).collect();
        if self.groups.tp.size() == 1 || held.is_empty() {
            return Ok(());
        }
        let mut all = Vec::new();
        for held in &held {
            let mut whole = vec![T::ZERO; held.declaration.elements()];
            held.declaration.insert(&held.extent, self.gradients.get(held.part), &mut whole);
            all.append(&mut whole);
        }
        self.groups.tp.all_reduce(&mut all, Op::Sum)?;
        let mut rest = all.as_slice();
        for held in held {
            let (whole, behind) = rest.split_at(held.declaration.elements());
            let local = held.declaration.extract(&held.extent, whole);
            self.gradients.get_mut(held.part).copy_from_slice(&local);
            rest = behind;
        }
        Ok(())
    }

    /// Sums the gradients of an embedding that first and last device share.
    fn sum_tied_gradients(&mut self) -> Result<(), CommError> {
        let apart = self.program.last_device() != 0 && self.shard.is_none();
        if self.groups.ends.size() == 1 || !self.program.model.tied_embeddings || !apart {
            return Ok(());
        }
        let name = crate::layers::Names::of(&self.program.model).embedding();
        let Some(held) = self.inventory.named(name) else { return Ok(()) };
        let part = held.part;
        self.groups.ends.all_reduce(self.gradients.get_mut(part), Op::Sum)
    }

    /// Starts summing the iteration's losses, from the ranks that hold the output layer.
    fn start_loss(&self, outcome: &Outcome) -> Result<Request<f64>, CommError> {
        // All tensor-parallel ranks know the same losses: one of them tells.
        let sum = if self.groups.tp.rank() == 0 { outcome.loss_sum } else { 0.0 };
        self.groups.world.start_all_reduce(vec![sum], Op::Sum)
    }

    /// Starts summing squares over all parameters of the model, each element counted once.
    fn start_squares(&self) -> Result<Request<f64>, CommError> {
        let counted = self.inventory.all().iter().filter(|held| held.counted);
        let squares = counted
            .map(|held| elementwise::sum_of_squares(&self.cpu, self.gradients.get(held.part)));
        let mut sum = [squares.sum::<f64>()];
        // Replicas have the same gradients by now.
        self.groups.tp.all_reduce(&mut sum, Op::Sum)?;
        self.groups.pp.start_all_reduce(sum.to_vec(), Op::Sum)
    }

    /// Updates the weights with gradients of norm `norm`.
    pub fn update(&mut self, optimizer: &Optimizer, lr: f64, norm: f64) {
        let adamw = self.next_step(optimizer, lr, optimizer.gradient_scale(norm));
        let state = State { w: &mut self.weights, moments: &mut self.moments };
        state.update(&self.cpu, &self.inventory, &adamw, optimizer, &self.gradients);
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
    fn propose(&mut self, optimizer: &Optimizer, adamw: &AdamW) {
        let Some(settled) = &self.settled else { return };
        let [m, v] = &self.moments;
        let mut weights = self.weights.all_mut();
        let mut parameters = Vec::with_capacity(self.inventory.all().len());
        for held in self.inventory.all() {
            let to = take(&mut weights, held.part.len);
            let [w, g, m, v] = [settled, &self.gradients, m, v].map(|store| store.get(held.part));
            parameters.push(Proposal { to, w, g, m, v, decay: optimizer.decay_of(held) });
        }
        adamw::proposal(&self.cpu, adamw, &mut parameters);
    }

    /// The model's gradients, whole, on rank 0 of the world; nothing on the others.
    ///
    /// # Errors
    /// As any collective call.
    pub fn whole_gradients(&self) -> Result<Option<BTreeMap<String, Whole<T>>>, CommError> {
        self.whole(&self.gradients)
    }

    /// The model's weights, whole, on rank 0 of the world; nothing on the others.
    ///
    /// # Errors
    /// As any collective call.
    pub fn whole_weights(&self) -> Result<Option<BTreeMap<String, Whole<T>>>, CommError> {
        self.whole(&self.weights)
    }

    /// Every rank of the first replica sends what it counts; rank 0, who can declare what others
    /// hold, puts it together.
    fn whole(&self, store: &Store<T>) -> Result<Option<BTreeMap<String, Whole<T>>>, CommError> {
        const TAG: u64 = 1 << 61;
        let world = &self.groups.world;
        if world.rank() > 0 {
            let counted = self.inventory.all().iter().filter(|held| held.counted);
            let told: Vec<T> =
                counted.flat_map(|held| store.get(held.part).iter().copied()).collect();
            if self.groups.dp.rank() == 0 {
                world.send(&told, 0, TAG)?;
            }
            return Ok(None);
        }
        let mut tensors: BTreeMap<String, Whole<T>> = BTreeMap::new();
        for rank in 0..world.size() {
            let at = self.program.mesh.coordinates(rank as u64);
            if at.dp > 0 {
                continue;
            }
            let mut theirs = Inventory::new(at.tp as usize, self.groups.tp.size());
            declare(self.program, at.pp as usize, &mut theirs);
            let counted: Vec<&Held> = theirs.all().iter().filter(|held| held.counted).collect();
            let count = counted.iter().map(|held| held.part.len).sum();
            let told: Vec<T> = match rank {
                0 => counted.iter().flat_map(|h| store.get(h.part).iter().copied()).collect(),
                _ => world.recv(count, rank, TAG)?,
            };
            let mut rest = told.as_slice();
            for held in counted {
                let (local, behind) = rest.split_at(held.part.len);
                let declaration = &held.declaration;
                let empty = || (declaration.shape.clone(), vec![T::ZERO; declaration.elements()]);
                let (_, whole) = tensors.entry(declaration.name.clone()).or_insert_with(empty);
                declaration.insert(&held.extent, local, whole);
                rest = behind;
            }
        }
        Ok(Some(tensors))
    }
}

impl<T: Scalar> State<'_, T> {
    fn update(
        self,
        cpu: &Cpu,
        inventory: &Inventory,
        adamw: &AdamW,
        optimizer: &Optimizer,
        gradients: &Store<T>,
    ) {
        let [m, v] = self.moments;
        let (mut w, mut m, mut v) = (self.w.all_mut(), m.all_mut(), v.all_mut());
        let mut parameters = Vec::with_capacity(inventory.all().len());
        for held in inventory.all() {
            let g = gradients.get(held.part);
            let (w, m, v) = (take(&mut w, g.len()), take(&mut m, g.len()), take(&mut v, g.len()));
            parameters.push(Parameter { w, g, m, v, decay: optimizer.decay_of(held) });
        }
        adamw::update(cpu, adamw, &mut parameters);
    }
}

impl Pending {
    /// Waits for the norm and updates the state, unless the numbers are not finite. Says what the step came
    /// to, and whether its proposal was right.
    fn settle<T: Scalar>(
        self,
        cpu: &Cpu,
        inventory: &Inventory,
        gradients: &Store<T>,
        state: State<'_, T>,
    ) -> Result<(Gradients, bool), CommError> {
        let Self { valid_tokens, outcome, reductions, optimizer, adamw, .. } = self;
        let (loss, norm) = (mean(self.loss_sum, valid_tokens)?, root(self.squares)?);
        let gradient_scale = optimizer.gradient_scale(norm);
        let finite = norm.is_finite() && loss.is_finite();
        if finite {
            let adamw = AdamW { gradient_scale, ..adamw };
            state.update(cpu, inventory, &adamw, &optimizer, gradients);
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

fn take<'a, T>(rest: &mut &'a mut [T], count: usize) -> &'a mut [T] {
    let (first, behind) = std::mem::take(rest).split_at_mut(count);
    *rest = behind;
    first
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
        table = table.or(stage.table());
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
fn draw_normal<T: Scalar>(cpu: &Cpu, held: &Held, values: &mut [T], seed: u64, deviation: f64) {
    let (_, columns) = held.declaration.stored_shape();
    let stream = Stream { seed, tensor: name_hash(&held.declaration.name), step: 0 };
    let (extent, mut rest) = (&held.extent, values);
    for rows in &extent.rows {
        let (first, width) = (extent.columns.start as u64, extent.columns.len());
        let view = View::matrix(rows.start as u64, rows.len(), first, width, columns as u64);
        random::fill_normal(cpu, take(&mut rest, view.len()), &view, stream, deviation);
    }
}

/// FNV-1a, 32 bits: which random numbers a tensor draws.
fn name_hash(name: &str) -> u32 {
    name.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}
