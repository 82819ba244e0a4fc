//! Layers: serial code, with declarations of how their tensors are split.
//!
//! | letter | meaning |
//! |---|---|
//! | `n` | tokens of a micro-batch, `b·s`, sequence after sequence |
//! | `r` | rows of the residual stream on this rank: `n`, with sequence parallelism `n/t` |
//! | `h`, `f`, `V` | hidden size, feed-forward width, vocabulary |
//!
//! Two conjugate operators connect the residual stream with split work (Megatron's f and g, Shoeybi
//! et al. 2019, section 3; with sequence parallelism g-bar, Korthikanti et al. 2022, section 4.2).
//! [`Context::enter`] turns the stream into the input of split work, and [`Context::leave`] turns
//! partial sums into the stream. Each is the backward pass of the other.
//!
//! A layer has three steps: forward, gradients of inputs, and gradients of weights. The second
//! returns the third as data, [`WeightWork`], to be run at once or when the schedule says.

mod attention;
mod block;
mod embedding;
mod head;
mod linear;
mod mlp;
mod names;
mod norm;
mod sublayer;
mod vocabulary;

pub use block::{Block, BlockKept};
pub use embedding::EmbeddingLayer;
pub use head::{HeadKept, HeadLayer};
pub use names::TensorNames;
pub use norm::{Norm, Residual, Statistics};
pub use vocabulary::{
    GradientParts, ShardKept, ShardLocal, ShardReduced, SoftmaxSums, VocabularyShard,
};

use crate::comm::{CommError, Communicator, Op};
use crate::device::{Device, DeviceGroup, DeviceRequest, Space};
use crate::state::buffer::{Buffer, Pools, WideBuffer};
use crate::state::params::{ParameterSlice, SharedBuffer, Store, WeightStore};
use kernels::dropout::Dropout;
use kernels::embedding as rows;
use kernels::random::{GlobalIndices, Stream};
use linear::Linear;
use std::collections::HashSet;
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
    pub(crate) fn buffer(&self, len: usize) -> Buffer<D> {
        self.pools.stored.take(self.device, len)
    }

    /// A buffer for `len` statistics, to be written before it is read.
    pub(crate) fn wide(&self, len: usize) -> WideBuffer<D> {
        self.pools.wide.take(self.device, len)
    }

    /// A copy.
    pub(crate) fn copy_of(&self, buffer: &Buffer<D>) -> Buffer<D> {
        self.pools.stored.copy_of(self.device, buffer)
    }

    /// The buffer itself if nobody else shares it, else a copy.
    pub(crate) fn own(&self, shared: SharedBuffer<D>) -> Buffer<D> {
        Rc::try_unwrap(shared).unwrap_or_else(|shared| self.copy_of(&shared))
    }

    /// Tensor-parallel ranks, for device memory.
    pub(crate) fn group(&self) -> DeviceGroup<'a, D> {
        DeviceGroup::new(self.device, self.tp)
    }

    fn splits(&self) -> bool {
        self.sequence_parallel && self.tp.size() > 1
    }

    /// Turns the stream `[r, w]` into the input of split work `[n, w]`.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn enter(&self, x: &SharedBuffer<D>) -> Result<SharedBuffer<D>, CommError> {
        self.start_enter(x)?.wait(self)
    }

    /// Starts [`Self::enter`].
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn start_enter(&self, x: &SharedBuffer<D>) -> Result<Entering<D>, CommError> {
        if self.splits() {
            let own = self.copy_of(x).into_memory();
            return self.group().start_all_gather(own).map(Entering::Gathered);
        }
        Ok(Entering::Same(x.clone()))
    }

    /// Turns partial sums `[n, w]` into the stream `[r, w]`.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn leave(&self, partial: Buffer<D>) -> Result<Buffer<D>, CommError> {
        self.start_leave(partial)?.wait(self)
    }

    /// Starts [`Self::leave`].
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn start_leave(&self, partial: Buffer<D>) -> Result<Leaving<D>, CommError> {
        if self.tp.size() == 1 {
            return Ok(Leaving::Same(partial));
        }
        let (group, partial) = (self.group(), partial.into_memory());
        let request = match self.splits() {
            true => group.start_reduce_scatter(partial, Op::Sum),
            false => group.start_all_reduce(partial, Op::Sum),
        };
        request.map(Leaving::Reduced)
    }

    /// Dropout of stream rows `[r, w]`, with the same mask however the rows are split. It is its
    /// own backward pass.
    fn drop_stream(&self, place: u32, width: usize, x: &mut Buffer<D>) {
        let Some(draws) = self.draws else { return };
        let first = self.batch.first_sequence * self.batch.seq_len + self.first_row();
        let view = GlobalIndices::contiguous((first * width) as u64, x.len());
        let mut y = self.buffer(x.len());
        self.device.dropout(&draws.at(place), &view, x.view(), y.view_mut());
        *x = y;
    }
}

impl DropoutDraws {
    fn at(&self, place: u32) -> Dropout {
        Dropout { p: self.p, stream: Stream { seed: self.seed, tensor: place, step: self.step } }
    }
}

/// The input of split work, in flight.
pub enum Entering<D: Space> {
    /// The stream itself.
    Same(SharedBuffer<D>),
    /// All-gathered over ranks.
    Gathered(DeviceRequest<D, D::Stored>),
}

impl<D: Device> Entering<D> {
    /// Waits for the input.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn wait(self, ctx: &Context<'_, D>) -> Result<SharedBuffer<D>, CommError> {
        match self {
            Self::Same(x) => Ok(x),
            Self::Gathered(moving) => {
                moving.wait(ctx.device).map(|x| Rc::new(ctx.pools.stored.adopt(x)))
            }
        }
    }
}

/// Rows of the stream, in flight.
pub enum Leaving<D: Space> {
    /// The partial sums themselves.
    Same(Buffer<D>),
    /// Reduced over ranks.
    Reduced(DeviceRequest<D, D::Stored>),
}

impl<D: Device> Leaving<D> {
    /// Waits for the rows.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn wait(self, ctx: &Context<'_, D>) -> Result<Buffer<D>, CommError> {
        match self {
            Self::Same(x) => Ok(x),
            Self::Reduced(moving) => moving.wait(ctx.device).map(|x| ctx.pools.stored.adopt(x)),
        }
    }
}

/// A computation of weight gradients, with its input.
pub enum WeightWork<D: Space> {
    /// `dW += dy^T x`, and the bias gradient if there is a bias.
    Linear {
        /// The layer.
        linear: Linear,
        /// Its input, `[n, in]`.
        x: SharedBuffer<D>,
        /// Gradient of its output, `[n, out]`.
        dy: SharedBuffer<D>,
    },
    /// `db += sum of rows of dy`.
    Bias {
        /// The bias.
        bias: ParameterSlice,
        /// Gradient of the sum that it was added to.
        dy: SharedBuffer<D>,
    },
    /// Scale and shift of a norm.
    Norm {
        /// The norm.
        norm: Norm,
        /// Its input, `[r, h]`.
        x: SharedBuffer<D>,
        /// Statistics of its rows.
        statistics: Rc<Statistics<D>>,
        /// Gradient of its output.
        dy: SharedBuffer<D>,
    },
    /// Rows of an embedding.
    Embedding {
        /// Range of rows, and shape.
        shape: rows::Embedding,
        /// The table.
        table: ParameterSlice,
        /// Rows that were looked up.
        ids: TokenIds<D>,
        /// Gradient of the rows.
        dy: SharedBuffer<D>,
    },
}

impl<D: Device> WeightWork<D> {
    /// Runs the computation.
    pub fn run(self, device: &D, gradients: &mut Store<D>) {
        match self {
            Self::Linear { linear, x, dy } => linear.backward_weight(device, &x, &dy, gradients),
            Self::Bias { bias, dy } => device.bias_gradient(dy.view(), gradients.get_mut(bias)),
            Self::Norm { norm, x, statistics, dy } => {
                norm.backward_weight(device, &x, &statistics, &dy, gradients);
            }
            Self::Embedding { shape, table, ids, dy } => {
                let dtable = gradients.get_mut(table);
                device.embedding_backward(&shape, ids.view(), dy.view(), dtable);
            }
        }
    }

    /// Bytes that deferred work keeps alive; buffers that several projections share count once.
    pub fn bytes<'a>(works: impl Iterator<Item = &'a Self>) -> usize {
        let mut seen = HashSet::new();
        let buffers = works.flat_map(Self::buffers).flatten();
        buffers.filter(|buffer| seen.insert(Rc::as_ptr(buffer))).map(|buffer| buffer.bytes()).sum()
    }

    fn buffers(&self) -> [Option<&SharedBuffer<D>>; 2] {
        match self {
            Self::Linear { x, dy, .. } | Self::Norm { x, dy, .. } => [Some(x), Some(dy)],
            Self::Bias { dy, .. } | Self::Embedding { dy, .. } => [Some(dy), None],
        }
    }
}

/// When weight gradients are computed.
pub enum WeightGradients<'a, D: Space> {
    /// At once, while input gradients are being reduced.
    Now(&'a mut Store<D>),
    /// Later: the work is collected. Sums over rows are computed at once: they cost almost nothing,
    /// and deferring them would keep a norm's input and output gradient alive.
    Later(&'a mut Vec<WeightWork<D>>, &'a mut Store<D>),
}

impl<D: Device> WeightGradients<'_, D> {
    /// Runs or collects the work.
    pub(crate) fn take(&mut self, device: &D, works: impl IntoIterator<Item = WeightWork<D>>) {
        match self {
            Self::Now(gradients) => works.into_iter().for_each(|work| work.run(device, gradients)),
            Self::Later(later, gradients) => {
                for work in works {
                    match work {
                        WeightWork::Norm { .. } | WeightWork::Bias { .. } => {
                            work.run(device, gradients);
                        }
                        WeightWork::Linear { .. } | WeightWork::Embedding { .. } => {
                            later.push(work);
                        }
                    }
                }
            }
        }
    }
}

/// Standard deviation of initial weights (GPT-2, section 2.3).
const DEVIATION: f64 = 0.02;

/// Standard deviation of matrices that add to the residual stream, smaller by √(2L) (GPT-2, section
/// 2.3).
fn output_deviation(model: &models::model::ModelSpec) -> f64 {
    DEVIATION / (2.0 * model.layers as f64).sqrt()
}

/// Number of a dropout in the model: three in a layer, and the embedding's.
fn place(layer: usize, within: u32) -> u32 {
    layer as u32 * 4 + within
}

/// Number of the embedding's dropout.
const EMBEDDING_PLACE: u32 = u32::MAX;
