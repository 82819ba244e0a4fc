//! What a pass gives to the operations of its layers: tokens, weights, device, ranks, pools.

use crate::comm::Communicator;
use crate::device::{Device, Space};
use crate::state::buffer::{Buffer, Pools, WideBuffer};
use crate::state::params::{SharedBuffer, WeightStore};
use kernels::dropout::Dropout;
use kernels::random::{GlobalIndices, Stream};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// The tokens of one micro-batch on one data-parallel replica, and what is derived from them.
pub struct MicroBatch<D: Space> {
    /// Sequences, `b`.
    pub sequences: usize,
    /// Tokens of a sequence, `s`.
    pub seq_len: usize,
    /// Index of its first sequence within the global batch.
    pub first_sequence: usize,
    /// `[b, s]` token ids.
    pub tokens: TokenIds<D>,
    /// `[b, s]` ids to predict, -1 for none.
    pub labels: TokenIds<D>,
    /// Labels outside any vocabulary, -1 for none. Algorithm 2 takes a shard's softmax with them,
    /// before it subtracts the targets.
    pub elsewhere: Option<TokenIds<D>>,
    /// `[b, s]` positions.
    pub positions: TokenIds<D>,
    /// Cosines and sines of RoPE for these positions, empty without RoPE.
    pub rope: Rc<WideBuffer<D>>,
    /// Weight of each token's loss: one over the valid tokens of the global batch.
    pub loss_scale: f64,
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

/// What layers are given for one pass.
pub struct Context<'a, D: Space> {
    /// The rank's device.
    pub device: &'a D,
    /// Tensor-parallel ranks.
    pub tp: &'a dyn Communicator,
    /// Whether the residual stream is split over the tensor-parallel ranks.
    pub sequence_parallel: bool,
    /// The rank's weights.
    pub weights: &'a WeightStore<D>,
    /// The tokens.
    pub batch: &'a MicroBatch<D>,
    /// Dropout, if the model has any.
    pub draws: Option<DropoutDraws>,
    /// Pools of buffers.
    pub pools: &'a Pools<D>,
}

impl<'a, D: Device> Context<'a, D> {
    /// Tokens of the micro-batch, `n`.
    pub fn tokens(&self) -> usize {
        self.batch.sequences * self.batch.seq_len
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
        let first = self.batch.first_sequence * self.batch.seq_len + self.first_row();
        let view = GlobalIndices::contiguous((first * width) as u64, x.len());
        let mut y = self.buffer(x.len());
        self.device.dropout(&draws.at(place), &view, x.view(), y.view_mut());
        *x = y;
    }
}

impl DropoutDraws {
    pub(super) fn at(&self, place: u32) -> Dropout {
        Dropout { p: self.p, stream: Stream { seed: self.seed, tensor: place, step: self.step } }
    }
}
