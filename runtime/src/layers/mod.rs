//! Layers: serial code, with how their tensors are split declared beside them.
//!
//! | letter | meaning |
//! |---|---|
//! | `n` | tokens of a micro-batch, `b·s`, sequence after sequence |
//! | `r` | rows of the residual stream on this rank: `n`, with sequence parallelism `n/t` |
//! | `h`, `f`, `V` | hidden size, feed-forward width, vocabulary |
//!
//! Two conjugate operators connect the residual stream with what tensor-parallel ranks share
//! (Megatron's f and g, Shoeybi et al. 2019, section 3; with sequence parallelism g-bar, Korthikanti
//! et al. 2022, section 4.2): [`Context::enter`] makes the input of split work from the stream, and
//! [`Context::leave`] makes stream from partial sums. Each is the backward pass of the other.
//!
//! A layer has three steps: forward, backward to inputs, and backward to weights. The second returns
//! the third as data, [`WeightWork`], to be done at once or whenever the schedule says.

mod attention;
mod block;
mod embedding;
mod head;
mod inner;
mod linear;
mod mlp;
mod names;
mod norm;
mod vocabulary;

pub use block::{Block, BlockKept};
pub use embedding::EmbeddingLayer;
pub use head::{HeadKept, HeadLayer};
pub use names::Names;
pub use norm::{Norm, Statistics};
pub use vocabulary::{Local, Parts, Reduced, ShardKept, Sums, VocabularyShard};

use crate::buffer::{Buffer, Pool};
use crate::comm::{CommError, Communicator, Op, Request};
use crate::params::{Part, Shared, Store};
use crate::scalar::Scalar;
use kernels::dropout::{self, Dropout};
use kernels::random::{Stream, View};
use kernels::{Cpu, elementwise, embedding as rows};
use linear::Linear;
use std::collections::HashSet;
use std::rc::Rc;

/// The tokens of one micro-batch on one data-parallel replica, and what follows from them.
#[derive(Clone, Debug)]
pub struct MicroBatch<T> {
    /// Sequences, `b`.
    pub sequences: usize,
    /// Tokens a sequence, `s`.
    pub seq_len: usize,
    /// Number of its first sequence within the iteration's batch.
    pub first_sequence: usize,
    /// `[b, s]` token ids.
    pub tokens: Rc<Vec<i64>>,
    /// `[b, s]` ids to predict, -1 for none.
    pub labels: Vec<i64>,
    /// `[b, s]` positions.
    pub positions: Vec<u32>,
    /// Cosines and sines of RoPE for these positions, empty without RoPE.
    pub rope: Rc<Vec<T>>,
    /// What each token's loss counts for: one over the valid tokens of the iteration.
    pub loss_scale: f64,
}

/// Which draws dropout uses.
#[derive(Clone, Copy, Debug)]
pub struct Draws {
    /// Probability.
    pub p: f64,
    /// The run's seed.
    pub seed: u64,
    /// The step.
    pub step: u32,
}

/// What layers are given for one pass.
pub struct Context<'a, T> {
    /// Threads.
    pub cpu: &'a Cpu,
    /// Tensor-parallel ranks.
    pub tp: &'a dyn Communicator,
    /// The residual stream is split over them.
    pub sequence_parallel: bool,
    /// The rank's weights.
    pub weights: &'a Store<T>,
    /// The tokens.
    pub batch: &'a MicroBatch<T>,
    /// Dropout, where there is any.
    pub draws: Option<Draws>,
    /// Memory.
    pub pool: &'a Pool<T>,
}

impl<T: Scalar> Context<'_, T> {
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

    /// Memory for `len` elements, to be written before it is read.
    pub(crate) fn buffer(&self, len: usize) -> Buffer<T> {
        self.pool.take(len)
    }

    fn splits(&self) -> bool {
        self.sequence_parallel && self.tp.size() > 1
    }

    /// From the stream `[r, w]` to the input of split work `[n, w]`.
    ///
    /// # Errors
    /// As any collective call.
    pub fn enter(&self, x: &Shared<T>) -> Result<Shared<T>, CommError> {
        self.start_enter(x)?.wait()
    }

    /// Starts [`Self::enter`].
    ///
    /// # Errors
    /// As any collective call.
    pub fn start_enter(&self, x: &Shared<T>) -> Result<Entering<T>, CommError> {
        if self.splits() {
            let request = self.tp.start_all_gather(x.to_vec())?;
            return Ok(Entering::Gathered(request, self.pool.clone()));
        }
        Ok(Entering::Same(x.clone()))
    }

    /// From partial sums `[n, w]` to the stream `[r, w]`.
    ///
    /// # Errors
    /// As any collective call.
    pub fn leave(&self, partial: Buffer<T>) -> Result<Buffer<T>, CommError> {
        self.start_leave(partial)?.wait()
    }

    /// Starts [`Self::leave`].
    ///
    /// # Errors
    /// As any collective call.
    pub fn start_leave(&self, partial: Buffer<T>) -> Result<Leaving<T>, CommError> {
        if self.tp.size() == 1 {
            return Ok(Leaving::Same(partial));
        }
        let partial = partial.into_vec();
        let request = match self.splits() {
            true => self.tp.start_reduce_scatter(partial, Op::Sum),
            false => self.tp.start_all_reduce(partial, Op::Sum),
        };
        request.map(|request| Leaving::Reduced(request, self.pool.clone()))
    }

    /// Dropout of stream rows `[r, w]`, the same mask however they are split; its own backward pass.
    fn drop_stream(&self, place: u32, width: usize, x: &mut Buffer<T>) {
        let Some(draws) = self.draws else { return };
        let first = self.batch.first_sequence * self.batch.seq_len + self.first_row();
        let view = View::contiguous((first * width) as u64, x.len());
        let mut y = self.buffer(x.len());
        dropout::apply(self.cpu, &draws.at(place), &view, x, &mut y);
        *x = y;
    }
}

impl Draws {
    fn at(&self, place: u32) -> Dropout {
        Dropout { p: self.p, stream: Stream { seed: self.seed, tensor: place, step: self.step } }
    }
}

/// The input of split work, under way.
pub enum Entering<T> {
    /// Nothing to do.
    Same(Shared<T>),
    /// Gathered from other ranks.
    Gathered(Request<T>, Pool<T>),
}

impl<T: Scalar> Entering<T> {
    /// The input.
    ///
    /// # Errors
    /// As any collective call.
    pub fn wait(self) -> Result<Shared<T>, CommError> {
        match self {
            Self::Same(x) => Ok(x),
            Self::Gathered(request, pool) => request.wait().map(|x| Rc::new(pool.adopt(x))),
        }
    }
}

/// Stream rows, under way.
pub enum Leaving<T> {
    /// Nothing to do.
    Same(Buffer<T>),
    /// Summed over other ranks.
    Reduced(Request<T>, Pool<T>),
}

impl<T: Scalar> Leaving<T> {
    /// The rows.
    ///
    /// # Errors
    /// As any collective call.
    pub fn wait(self) -> Result<Buffer<T>, CommError> {
        match self {
            Self::Same(x) => Ok(x),
            Self::Reduced(request, pool) => request.wait().map(|x| pool.adopt(x)),
        }
    }
}

/// Work of the backward pass to weights, with what it reads.
pub enum WeightWork<T> {
    /// `dW += dy^T x`, and the bias where there is one.
    Linear {
        /// The layer.
        linear: Linear,
        /// Its input, `[n, in]`.
        x: Shared<T>,
        /// Gradient of its output, `[n, out]`.
        dy: Shared<T>,
    },
    /// `db += sum of rows of dy`.
    Bias {
        /// The bias.
        bias: Part,
        /// Gradient of what it was added to.
        dy: Shared<T>,
    },
    /// Scale and shift of a norm.
    Norm {
        /// The norm.
        norm: Norm,
        /// Its input, `[r, h]`.
        x: Shared<T>,
        /// Of its rows.
        statistics: Rc<Statistics<T>>,
        /// Gradient of its output.
        dy: Shared<T>,
    },
    /// Rows of an embedding.
    Embedding {
        /// Range and shape.
        shape: rows::Embedding,
        /// The table.
        table: Part,
        /// Rows taken.
        ids: Rc<Vec<i64>>,
        /// Gradient of the rows.
        dy: Shared<T>,
    },
}

impl<T: Scalar> WeightWork<T> {
    /// Does it.
    pub fn run(self, cpu: &Cpu, gradients: &mut Store<T>) {
        match self {
            Self::Linear { linear, x, dy } => linear.backward_weight(cpu, &x, &dy, gradients),
            Self::Bias { bias, dy } => {
                elementwise::bias_gradient(cpu, &dy, gradients.get_mut(bias));
            }
            Self::Norm { norm, x, statistics, dy } => {
                norm.backward_weight(cpu, &x, &statistics, &dy, gradients);
            }
            Self::Embedding { shape, table, ids, dy } => {
                rows::backward(cpu, &shape, &ids, &dy, gradients.get_mut(table));
            }
        }
    }

    /// Elements that these keep alive, each buffer once: projections of one input share it.
    pub fn elements<'a>(works: impl Iterator<Item = &'a Self>) -> usize
    where
        T: 'a,
    {
        let mut seen = HashSet::new();
        let buffers = works.flat_map(Self::buffers).flatten();
        buffers.filter(|buffer| seen.insert(Rc::as_ptr(buffer))).map(|buffer| buffer.len()).sum()
    }

    fn buffers(&self) -> [Option<&Shared<T>>; 2] {
        match self {
            Self::Linear { x, dy, .. } | Self::Norm { x, dy, .. } => [Some(x), Some(dy)],
            Self::Bias { dy, .. } | Self::Embedding { dy, .. } => [Some(dy), None],
        }
    }
}

/// When the backward pass to weights is done.
pub enum Weights<'a, T> {
    /// As soon as possible, while reductions of input gradients are under way.
    Now(&'a mut Store<T>),
    /// Later: it is collected, but for sums over rows, which cost next to nothing and would keep a norm's input
    /// and the gradient of its output.
    Later(&'a mut Vec<WeightWork<T>>, &'a mut Store<T>),
}

impl<T: Scalar> Weights<'_, T> {
    /// Does or collects it.
    pub(crate) fn take(&mut self, cpu: &Cpu, works: impl IntoIterator<Item = WeightWork<T>>) {
        match self {
            Self::Now(gradients) => works.into_iter().for_each(|work| work.run(cpu, gradients)),
            Self::Later(later, gradients) => {
                for work in works {
                    match work {
                        WeightWork::Norm { .. } | WeightWork::Bias { .. } => {
                            work.run(cpu, gradients);
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

/// Deviation of initial weights (GPT-2, section 2.3).
const DEVIATION: f64 = 0.02;

/// Deviation of matrices that add to the residual stream: less by √(2L) (GPT-2, section 2.3).
fn output_deviation(model: &models::model::ModelSpec) -> f64 {
    DEVIATION / (2.0 * model.layers as f64).sqrt()
}

/// Number of a place in the model where something is dropped: three a layer, and the embedding.
fn place(layer: usize, within: u32) -> u32 {
    layer as u32 * 4 + within
}

/// The embedding's place.
const EMBEDDING_PLACE: u32 = u32::MAX;
