//! One rank's part of a training run: its parameters, and what a step does with them.

use crate::buffer::Pool;
use crate::checkpoint::{Checkpoint, Whole};
use crate::comm::{CommError, Communicator, Op};
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
use kernels::adamw::{self, AdamW, Parameter};
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

    /// Bytes of weights, gradients and both moments.
    pub fn state_bytes(&self) -> u64 {
        4 * (self.inventory.elements() * size_of::<T>()) as u64
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
        let p = self.program.model.dropout;
        let draws = (p > 0.0).then_some(Draws { p, seed: self.seed, step: step as u32 });
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
        let loss = self.mean_loss(&outcome, valid_tokens)?;
        Ok(Gradients { loss, valid_tokens, norm: self.gradient_norm()?, outcome, reductions })
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

    /// Mean over the iteration's valid tokens, from the ranks that hold the output layer.
    fn mean_loss(&self, outcome: &Outcome, valid_tokens: u64) -> Result<f64, CommError> {
        // All tensor-parallel ranks know the same losses: one of them tells.
        let mut sum = [if self.groups.tp.rank() == 0 { outcome.loss_sum } else { 0.0 }];
        self.groups.world.all_reduce(&mut sum, Op::Sum)?;
        Ok(sum[0] / valid_tokens.max(1) as f64)
    }

    /// Norm over all parameters of the model, each element counted once.
    fn gradient_norm(&self) -> Result<f64, CommError> {
        let counted = self.inventory.all().iter().filter(|held| held.counted);
        let squares = counted
            .map(|held| elementwise::sum_of_squares(&self.cpu, self.gradients.get(held.part)));
        let mut sum = [squares.sum::<f64>()];
        // Replicas have the same gradients by now.
        self.groups.tp.all_reduce(&mut sum, Op::Sum)?;
        self.groups.pp.all_reduce(&mut sum, Op::Sum)?;
        Ok(sum[0].sqrt())
    }

    /// Updates the weights with gradients of norm `norm`.
    pub fn update(&mut self, optimizer: &Optimizer, lr: f64, norm: f64) {
        self.updates += 1;
        let clip = |most: f64| (most / (norm + 1e-6)).min(1.0);
        let adamw = AdamW {
            lr,
            beta1: optimizer.betas.0,
            beta2: optimizer.betas.1,
            eps: optimizer.eps,
            step: self.updates,
            gradient_scale: optimizer.clip.map_or(1.0, clip),
        };
        let [m, v] = &mut self.moments;
        let (mut w, mut m, mut v) = (self.weights.all_mut(), m.all_mut(), v.all_mut());
        let mut parameters = Vec::with_capacity(self.inventory.all().len());
        for held in self.inventory.all() {
            let decay = if held.declaration.decays() { optimizer.weight_decay } else { 0.0 };
            let g = self.gradients.get(held.part);
            let (w, m, v) = (take(&mut w, g.len()), take(&mut m, g.len()), take(&mut v, g.len()));
            parameters.push(Parameter { w, g, m, v, decay });
        }
        adamw::update(&self.cpu, &adamw, &mut parameters);
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
