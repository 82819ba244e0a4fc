//! Input of a step: micro-batches and the positions of their tokens.

use super::Fixed;
use crate::comm::{CommError, Op};
use crate::data::{Sample, Samples};
use crate::device::{Device, DeviceError, Space, StepNumbers};
use crate::error::Error;
use crate::ops::{MicroBatch, TokenIds};
use crate::scalar::Scalar;
use crate::spec::TrainerSpec;
use crate::state::buffer::{Pools, WideBuffer};
use kernels::cross_entropy::IGNORED;
use kernels::{Cpu, embedding, rope};
use models::schedule::VocabPasses;
use std::ops::Range;
use std::rc::Rc;

/// Input of a step, in memory whose address stays the same over steps.
pub(super) struct StepInputs<D: Space> {
    /// This replica's micro-batches.
    pub batches: Vec<MicroBatch<D>>,
    /// The step number that dropout draws use ([`Space::step_numbers`]).
    pub step: u32,
    /// A later step's number and its tokens, if they have been read already.
    pub ahead: Option<(u64, Vec<Tokens>)>,
}

/// The tokens of a micro-batch.
pub(super) struct Tokens {
    /// Which of the global batch's sequences these are.
    numbers: Range<usize>,
    tokens: Vec<i64>,
    by_token: Vec<i64>,
    labels: Vec<i64>,
    /// Positions of each sequence's documents; empty if every sequence is one.
    documents: Vec<Vec<Range<usize>>>,
}

impl<D: Device> StepInputs<D> {
    /// Reads a step's micro-batches into the memory of the previous step's. Returns the number of
    /// valid tokens of all replicas.
    pub fn take(
        &mut self,
        fixed: &Fixed<'_, D>,
        samples: &dyn Samples,
        step: u64,
    ) -> Result<u64, Error> {
        let read = match self.ahead.take() {
            Some((of, read)) if of == step => read,
            _ => fixed.read_all(samples, step)?,
        };
        let valid_tokens = fixed.valid_tokens(&read)?;
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

    /// Reads the tokens of a later step.
    pub fn read_ahead(
        &mut self,
        fixed: &Fixed<'_, D>,
        samples: &dyn Samples,
        step: u64,
    ) -> Result<(), Error> {
        self.ahead = Some((step, fixed.read_all(samples, step)?));
        Ok(())
    }
}

/// Replaces a micro-batch's tokens in place.
fn replace<D: Device>(
    fixed: &Fixed<'_, D>,
    batch: &mut MicroBatch<D>,
    Tokens { tokens, by_token, labels, documents, .. }: Tokens,
    loss_scale: f64,
) -> Result<(), Error> {
    let device = &fixed.device;
    let mut stays = true;
    if !(documents.is_empty() && batch.documents.is_empty()) {
        let Positions { ids, by_position, rope } = fixed.positions_in(&documents);
        (batch.positions, batch.by_position, batch.rope) = (ids, by_position, rope);
        batch.documents = documents;
    }
    if let (Some(place), Some(elsewhere)) = (&mut batch.elsewhere, fixed.elsewhere(&labels)) {
        stays &= place.set(device, elsewhere);
    }
    stays &= batch.tokens.set(device, tokens);
    stays &= batch.by_token.set(device, by_token);
    stays &= batch.labels.set(device, labels);
    batch.loss_scale = loss_scale;
    let moved = || DeviceError("tokens of the step before are still in use: our bug".to_owned());
    Ok(stays.then_some(()).ok_or_else(moved).map_err(CommError::from)?)
}

impl<D: Device> Fixed<'_, D> {
    /// Tokens and labels of this replica's micro-batches of a step.
    fn read_all(&self, samples: &dyn Samples, step: u64) -> Result<Vec<Tokens>, Error> {
        let spec = &self.spec;
        let (each, count) = (spec.micro_batch, spec.micro_batches);
        let first = self.groups.at.dp as usize * each * count;
        let begin = step * spec.global_batch() as u64;
        let of = |k: usize| {
            let numbers = (first + k * each)..(first + (k + 1) * each);
            self.read(samples, begin, numbers)
        };
        (0..count).map(of).collect()
    }

    /// The valid tokens of all replicas.
    fn valid_tokens(&self, read: &[Tokens]) -> Result<u64, Error> {
        let labels = read.iter().flat_map(|read| &read.labels);
        let mut total = [labels.filter(|&&label| label >= 0).count() as i64];
        let replicas = &self.groups.dense.all;
        if replicas.size() > 1 {
            replicas.all_reduce(&mut total, Op::Sum)?;
        }
        Ok(total[0].max(0) as u64)
    }

    /// Tokens and labels of some of the global batch's sequences, at the positions held.
    fn read(
        &self,
        samples: &dyn Samples,
        begin: u64,
        numbers: Range<usize>,
    ) -> Result<Tokens, Error> {
        let (mut tokens, mut labels, mut documents) = (Vec::new(), Vec::new(), Vec::new());
        for number in numbers.clone() {
            let index = begin + number as u64;
            let sample = samples.read(index)?;
            check_tokens(samples, &sample, self.spec.vocab_size as u64, index)?;
            for held in &*self.held {
                tokens.extend_from_slice(&sample.tokens[held.clone()]);
                labels.extend_from_slice(&sample.labels[held.clone()]);
            }
            documents.push(sample.documents());
        }
        if documents.iter().all(|of_one| of_one.len() == 1) {
            documents.clear();
        }
        let by_token = embedding::by_row(&tokens);
        Ok(Tokens { numbers, tokens, by_token, labels, documents })
    }

    /// For a loss computed in two steps (algorithm 2): the labels of valid rows, moved out of any
    /// vocabulary.
    fn elsewhere(&self, labels: &[i64]) -> Option<Vec<i64>> {
        let elsewhere = |&label: &i64| if label == IGNORED { IGNORED } else { i64::MAX };
        let two = self.spec.vocab == Some(VocabPasses::Two);
        two.then(|| labels.iter().map(elsewhere).collect())
    }

    fn micro_batch(&self, read: Tokens, loss_scale: f64) -> MicroBatch<D> {
        let Tokens { numbers, tokens, by_token, labels, documents } = read;
        let elsewhere = self.elsewhere(&labels);
        let Positions { ids: positions, by_position, rope } = self.positions_in(&documents);
        let numbers_of = |values| TokenIds::new(&self.device, values);
        MicroBatch {
            sequences: numbers.len(),
            seq_len: self.spec.seq_len,
            held: self.held.clone(),
            first_sequence: numbers.start,
            tokens: numbers_of(tokens),
            by_token: numbers_of(by_token),
            labels: numbers_of(labels),
            elsewhere: elsewhere.map(numbers_of),
            documents,
            positions,
            by_position,
            rope,
            loss_scale,
        }
    }

    /// Positions of a micro-batch's tokens, each counted from its document's beginning, and their
    /// RoPE table.
    fn positions_in(&self, documents: &[Vec<Range<usize>>]) -> Positions<D> {
        if documents.is_empty() {
            return self.positions.clone();
        }
        let within = |of_one: &Vec<Range<usize>>| {
            let counted: Vec<u32> =
                of_one.iter().flat_map(|document| 0..document.len() as u32).collect();
            self.held.iter().cloned().flatten().map(|at| counted[at]).collect::<Vec<_>>()
        };
        let positions = documents.iter().flat_map(within).collect();
        on_device(&self.device, &self.pools, &self.spec, self.groups.tp.rank(), positions)
    }
}

/// What is derived from the positions of a micro-batch's tokens, on the device: see
/// [`MicroBatch`].
pub(super) struct Positions<D: Space> {
    ids: TokenIds<D>,
    by_position: TokenIds<D>,
    rope: Rc<WideBuffer<D>>,
}

impl<D: Space> Clone for Positions<D> {
    fn clone(&self) -> Self {
        let Self { ids, by_position, rope } = self;
        Self { ids: ids.clone(), by_position: by_position.clone(), rope: rope.clone() }
    }
}

/// Positions of a micro-batch's tokens, counted from the beginning of their sequence.
pub(super) fn positions<D: Device>(
    device: &D,
    pools: &Pools<D>,
    spec: &TrainerSpec,
    tp_rank: usize,
    held: &[Range<usize>],
) -> Positions<D> {
    let sequences = (0..spec.micro_batch).flat_map(|_| held.iter().cloned().flatten());
    on_device(device, pools, spec, tp_rank, sequences.map(|position| position as u32).collect())
}

fn on_device<D: Device>(
    device: &D,
    pools: &Pools<D>,
    spec: &TrainerSpec,
    tp_rank: usize,
    positions: Vec<u32>,
) -> Positions<D> {
    let table = device.taken(rope_table(spec, device.host(), &positions));
    let ids: Vec<i64> = positions.into_iter().map(i64::from).collect();
    let split = if spec.sequence_parallel { spec.mesh.tp as usize } else { 1 };
    let rows = ids.len() / split;
    let first = if split == 1 { 0 } else { tp_rank * rows };
    let by_position = TokenIds::new(device, embedding::by_row(&ids[first..first + rows]));
    let rope = Rc::new(pools.wide.adopt(table));
    Positions { ids: TokenIds::new(device, ids), by_position, rope }
}

fn rope_table<T: Scalar>(spec: &TrainerSpec, cpu: &Cpu, positions: &[u32]) -> Vec<T> {
    let Some(theta) = spec.rope_theta else { return Vec::new() };
    let dim = spec.rotary_dim;
    let mut table = vec![T::ZERO; positions.len() * dim];
    let frequencies = match spec.yarn {
        Some(yarn) => yarn.inverse_frequencies(theta, dim),
        None => rope::inverse_frequencies(theta, dim),
    };
    rope::fill_table(cpu, &frequencies, positions, &mut table);
    table
}

/// Checks that tokens are in the vocabulary, and that labels are or are -1.
fn check_tokens(
    samples: &dyn Samples,
    sample: &Sample,
    vocab: u64,
    index: u64,
) -> Result<(), Error> {
    let tokens = sample.tokens.iter().enumerate().map(|(at, &token)| (at, token, 0));
    // Each token is the label of the one before.
    let labels = sample.labels.iter().enumerate().map(|(at, &label)| (at + 1, label, -1));
    let mut wrong =
        tokens.chain(labels).filter(|&(_, id, least)| !(least..vocab as i64).contains(&id));
    wrong.next().map_or(Ok(()), |(at, id, least)| {
        let (place, last) = (samples.place(index, at), vocab.max(1) - 1);
        let problem = format!("{place} is {id}; valid: {least} to {last}, the model's tokens");
        Err(Error::Flag { flag: "data", problem })
    })
}
