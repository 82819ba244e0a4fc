//! What a pass gives to the operations of its layers: tokens, weights, device, ranks, pools.

use super::around::ContextRanks;
use super::expert_loads::ExpertLoads;
use super::experts::ExpertRanks;
use super::router_losses::RouterLog;
use crate::comm::{CommError, Communicator};
use crate::device::{Device, Space, Stored};
use crate::state::buffer::{Buffer, Pools, WideBuffer};
use crate::state::params::SharedBuffer;
use crate::state::weights::{Sharing, WeightView, Weights};
use kernels::Real;
use kernels::dropout::Dropout;
use kernels::random::{GlobalIndices, Stream};
use std::ops::{Deref, Range};
use std::rc::Rc;
use std::sync::Arc;

/// The tokens of one micro-batch on one data-parallel replica, and what is derived from them.
pub struct MicroBatch<D: Space> {
    /// Sequences, `b`.
    pub sequences: usize,
    /// Tokens of a whole sequence, `s`.
    pub seq_len: usize,
    /// Positions of each sequence that this rank holds, in the order in which they lie: all
    /// without context parallelism.
    pub held: Rc<[Range<usize>]>,
    /// Index of its first sequence within the global batch.
    pub first_sequence: usize,
    /// Token ids, `[b, s]`, or those of the positions held.
    pub tokens: TokenIds<D>,
    /// Lookups of these tokens by id, for their gradient ([`kernels::embedding::by_row`]).
    pub by_token: TokenIds<D>,
    /// Ids to predict, -1 for none.
    pub labels: TokenIds<D>,
    /// Labels outside any vocabulary, -1 for none. Algorithm 2 takes a shard's softmax with them,
    /// before it subtracts the targets.
    pub elsewhere: Option<TokenIds<D>>,
    /// Positions of each sequence's documents, one after the other; empty if every sequence is
    /// one. Attention stays within a document.
    pub documents: Vec<Vec<Range<usize>>>,
    /// Positions, counted from the beginning of the token's document.
    pub positions: TokenIds<D>,
    /// Lookups of the positions of this rank's rows of the stream, likewise.
    pub by_position: TokenIds<D>,
    /// Cosines and sines of RoPE for these positions, empty without RoPE.
    pub rope: Rc<WideBuffer<D>>,
    /// Weight of each token's loss: one over the valid tokens of the global batch.
    pub loss_scale: f64,
}

impl<D: Space> MicroBatch<D> {
    /// Runs of adjacent tokens among `rows` of those held: the rows, and the number of the first
    /// token in the global batch.
    pub fn runs(&self, rows: Range<usize>) -> Vec<(Range<usize>, usize)> {
        let mut runs: Vec<(Range<usize>, usize)> = Vec::new();
        let mut row = 0;
        for sequence in self.first_sequence..self.first_sequence + self.sequences {
            for held in &*self.held {
                let (from, to) = (row.max(rows.start), (row + held.len()).min(rows.end));
                if from < to {
                    let token = sequence * self.seq_len + held.start + from - row;
                    match runs.last_mut() {
                        Some((last, first)) if *first + last.len() == token => last.end = to,
                        _ => runs.push((from..to, token)),
                    }
                }
                row += held.len();
            }
        }
        runs
    }
}

/// Token ids, labels or positions on the device; a view may cover some of them.
pub struct TokenIds<D: Space> {
    memory: Arc<D::Memory<i64>>,
    range: Range<usize>,
}

impl<D: Space> Clone for TokenIds<D> {
    fn clone(&self) -> Self {
        Self { memory: self.memory.clone(), range: self.range.clone() }
    }
}

impl<D: Space> TokenIds<D> {
    /// Uploads these ids.
    pub fn new(device: &D, values: Vec<i64>) -> Self {
        let range = 0..values.len();
        Self { memory: Arc::new(device.taken(values)), range }
    }

    /// Replaces the ids in place. Returns false if the memory is still in use, and new memory was
    /// taken instead.
    pub fn set(&mut self, device: &D, values: Vec<i64>) -> bool {
        let range = self.range.clone();
        match Arc::get_mut(&mut self.memory) {
            Some(memory) if values.len() == range.len() => {
                device.upload(&values, D::view_mut(memory, range));
                true
            }
            _ => {
                *self = Self::new(device, values);
                false
            }
        }
    }

    /// Notes that they are used on this queue too ([`Space::adopt`]).
    pub fn adopt(&self, device: &D) {
        device.adopt(&self.memory);
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// All of them.
    pub fn view(&self) -> D::View<'_, i64> {
        D::view(&self.memory, self.range.clone())
    }

    /// A view of `count` ids from `first` on.
    #[must_use]
    pub fn part(&self, first: usize, count: usize) -> Self {
        let begin = self.range.start + first;
        Self { memory: self.memory.clone(), range: begin..begin + count }
    }
}

/// Which random numbers dropout draws.
#[derive(Clone, Copy, Debug)]
pub struct DropoutDraws {
    /// Dropout probability.
    pub p: f64,
    /// The run's seed.
    pub seed: u64,
    /// The step.
    pub step: u32,
}

/// What a stage is given for one pass: everything but weights, which have to be asked for.
pub struct PassContext<'a, D: Space> {
    /// The rank's device.
    pub device: &'a D,
    /// Tensor-parallel ranks.
    pub tp: &'a dyn Communicator,
    /// Context-parallel ranks.
    pub cp: ContextRanks<'a>,
    /// The ranks among which experts are divided, if there are any.
    pub experts: Option<ExpertRanks<'a>>,
    /// What routers choose, if any loss depends on it.
    pub routers: Option<&'a RouterLog>,
    /// How often experts are chosen, if selection biases are updated by it.
    pub loads: Option<&'a ExpertLoads>,
    /// Whether the residual stream is split over the tensor-parallel ranks.
    pub sequence_parallel: bool,
    /// The weights that the pass can ask for.
    pub units: PassUnits<'a, D>,
    /// The tokens.
    pub batch: &'a MicroBatch<D>,
    /// Dropout, if the model has any.
    pub draws: Option<DropoutDraws>,
    /// Pools of buffers.
    pub pools: &'a Pools<D>,
}

/// What layers are given: the pass, and the weights that they asked for ([`PassContext::gather`]).
/// A function that reads no weights takes a [`PassContext`], and this serves as one.
pub struct Context<'a, D: Space> {
    pass: PassContext<'a, D>,
    /// The weights.
    pub weights: WeightView<D>,
}

impl<'a, D: Space> Deref for Context<'a, D> {
    type Target = PassContext<'a, D>;

    fn deref(&self) -> &Self::Target {
        &self.pass
    }
}

impl<D: Space> Clone for PassContext<'_, D> {
    fn clone(&self) -> Self {
        Self { units: self.units.clone(), ..*self }
    }
}

/// A rank's units of weights, as one pass sees them.
pub struct PassUnits<'a, D: Space> {
    /// The rank's weights.
    pub all: &'a Weights<D>,
    /// The replicas that share them.
    pub replicas: Sharing<'a>,
    /// The units that the pass reads, one after the other.
    pub read: Range<usize>,
    /// Whether layers run from the last to the first.
    pub backward: bool,
    /// Whether the next units are gathered while one is used.
    pub prefetch: bool,
}

impl<D: Space> Clone for PassUnits<'_, D> {
    fn clone(&self) -> Self {
        Self { read: self.read.clone(), ..*self }
    }
}

impl<D: Device> PassUnits<'_, D> {
    /// Starts to gather the units with which the pass begins.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn start(&self, device: &D) -> Result<(), CommError> {
        let Range { start, end } = self.read;
        self.start_next(device, &if self.backward { end..end } else { start..start })
    }

    /// Starts to gather the units that the pass uses after `units`, until what is on the way is as
    /// large as its largest unit: a layer, or a norm and the table behind it.
    fn start_next(&self, device: &D, units: &Range<usize>) -> Result<(), CommError> {
        let Range { start, end } = self.read;
        let next: Vec<usize> = match (self.prefetch, self.backward) {
            (false, _) => Vec::new(),
            (true, false) => (units.end.max(start)..end).collect(),
            (true, true) => (start..units.start.min(end)).rev().collect(),
        };
        let elements = |unit: usize| self.all.shards().units()[unit].padded();
        let largest = self.read.clone().map(elements).max().unwrap_or(0);
        let mut on_the_way = 0;
        for unit in next {
            if on_the_way >= largest {
                break;
            }
            on_the_way += elements(unit);
            self.all.prefetch(device, self.replicas, unit)?;
        }
        Ok(())
    }
}

impl<'a, D: Device> PassContext<'a, D> {
    /// The pass with the weights of `elements`. What replicas share is gathered from them, and
    /// freed with what this returns if they share weights (ZeRO stage 3). The weights that the pass
    /// needs next are on their way when it returns.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn gather(&self, elements: &[Range<usize>]) -> Result<Context<'a, D>, CommError> {
        let PassUnits { all, replicas, .. } = self.units;
        let units: Vec<Range<usize>> =
            elements.iter().map(|elements| all.shards().within(elements)).collect();
        let weights = all.gather(self.device, replicas, &units)?;
        if let Some(first) = units.first() {
            self.units.start_next(self.device, first)?;
        }
        Ok(Context { pass: self.clone(), weights })
    }

    /// The same where no other weights are gathered meanwhile: for layers of a backward pass that
    /// run forward again, whose next ones it does not know.
    #[must_use]
    pub fn without_prefetch(&self) -> Self {
        Self { units: PassUnits { prefetch: false, ..self.units.clone() }, ..self.clone() }
    }

    /// The ranks among which experts are divided.
    ///
    /// # Panics
    /// The trainer's spec has no experts.
    #[track_caller]
    pub fn expert_ranks(&self) -> ExpertRanks<'a> {
        self.experts.expect("the spec says how experts lie over ranks: `experts: Some(..)`")
    }

    /// Tokens of the micro-batch on this rank, `n`.
    pub fn tokens(&self) -> usize {
        self.batch.tokens.len()
    }

    /// Rows of the residual stream on this rank, `r`.
    pub fn rows(&self) -> usize {
        self.tokens() / if self.splits() { self.tp.size() } else { 1 }
    }

    /// First token of these rows.
    pub fn first_row(&self) -> usize {
        if self.splits() { self.tp.rank() * self.rows() } else { 0 }
    }

    /// A buffer for `len` activations, to be written before it is read.
    pub fn buffer(&self, len: usize) -> Buffer<D> {
        self.pools.stored.take(self.device, len)
    }

    /// A buffer for `len` statistics, to be written before it is read.
    pub fn wide(&self, len: usize) -> WideBuffer<D> {
        self.pools.wide.take(self.device, len)
    }

    /// The elements on the host, f32 or wider; waits for them.
    ///
    /// # Errors
    /// The device has failed.
    pub(super) fn widened(&self, x: Stored<'_, D>, len: usize) -> Result<Vec<D::Wide>, CommError> {
        let mut wide = self.wide(len);
        self.device.fill(wide.view_mut(), D::Wide::ZERO);
        self.device.accumulate(x, wide.view_mut());
        Ok(self.device.download(wide.view())?)
    }

    /// A copy.
    pub fn copy_of(&self, buffer: &Buffer<D>) -> Buffer<D> {
        self.pools.stored.copy_of(self.device, buffer)
    }

    /// The buffer itself if nobody else shares it, else a copy.
    pub fn own(&self, shared: SharedBuffer<D>) -> Buffer<D> {
        Rc::try_unwrap(shared).unwrap_or_else(|shared| self.copy_of(&shared))
    }

    fn splits(&self) -> bool {
        self.sequence_parallel && self.tp.size() > 1
    }

    /// Dropout of stream rows `[r, w]`, with the same mask however the rows are split. It is its
    /// own backward pass. Without dropout it does nothing.
    pub fn dropout(&self, place: u32, x: &mut Buffer<D>) {
        let Some(draws) = self.draws else { return };
        let width = x.len() / self.rows();
        let mut y = self.buffer(x.len());
        let first = self.first_row();
        for (rows, token) in self.batch.runs(first..first + self.rows()) {
            let at = (rows.start - first) * width..(rows.end - first) * width;
            let view = GlobalIndices::contiguous((token * width) as u64, at.len());
            self.device.dropout(&draws.at(place), &view, x.part(at.clone()), y.part_mut(at));
        }
        *x = y;
    }
}

impl DropoutDraws {
    pub(super) fn at(&self, place: u32) -> Dropout {
        Dropout { p: self.p, stream: Stream { seed: self.seed, tensor: place, step: self.step } }
    }
}
