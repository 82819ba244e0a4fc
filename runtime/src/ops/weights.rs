//! Weight gradients: as data, to be computed at once or when the schedule says.

use super::TokenIds;
use super::experts::{ExpertLinear, Received};
use super::linear::Linear;
use super::norm::{Norm, Statistics};
use crate::comm::CommError;
use crate::device::{Device, Space};
use crate::state::buffer::WideBuffer;
use crate::state::gradients::{Apart, GradientSink, GradientStore, Vectors};
use crate::state::params::{ParameterSlice, SharedBuffer};
use kernels::embedding as rows;
use std::collections::HashSet;
use std::rc::Rc;

/// A computation of weight gradients, with its input.
#[must_use = "work that is not added to the gradients is lost: `gradients.add(..)`"]
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
    /// The same for each of the rank's experts, on its rows.
    Experts {
        /// The layers.
        linear: ExpertLinear,
        /// Their input, `[q, in]`.
        x: SharedBuffer<D>,
        /// Gradient of their output, `[q, out]`.
        dy: Received<D>,
    },
    /// `db += sum of rows of dy`.
    Bias {
        /// The bias.
        bias: ParameterSlice,
        /// Gradient of the sum that it was added to.
        dy: SharedBuffer<D>,
    },
    /// Sums over rows that are as wide as gradients.
    Rows {
        /// What the sum is the gradient of.
        vector: ParameterSlice,
        /// The rows, `[n, len]`.
        rows: Rc<WideBuffer<D>>,
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
    /// A gradient that was computed before.
    Apart(Apart<D>),
    /// Rows of an embedding.
    Embedding {
        /// Range of rows, and shape.
        shape: rows::Embedding,
        /// The table.
        table: ParameterSlice,
        /// Rows that were looked up ([`rows::by_row`]).
        by_row: TokenIds<D>,
        /// Gradient of the rows.
        dy: SharedBuffer<D>,
    },
}

impl<D: Device> WeightWork<D> {
    /// Runs the computation.
    pub fn run(self, device: &D, gradients: &mut impl GradientSink<D>) {
        match self {
            Self::Linear { linear, x, dy } => linear.backward_weight(device, &x, &dy, gradients),
            Self::Experts { linear, x, dy } => linear.backward_weight(device, &x, &dy, gradients),
            Self::Bias { bias, dy } => {
                device.bias_gradient(dy.view(), gradients.get_mut(device, bias));
            }
            Self::Rows { vector, rows } => {
                device.sum_rows(rows.view(), gradients.get_mut(device, vector));
            }
            Self::Norm { norm, x, statistics, dy } => {
                norm.backward_weight(device, &x, &statistics, &dy, gradients);
            }
            Self::Apart((part, values)) => {
                let whole = D::view(&values, 0..part.len);
                device.add_wide(whole, gradients.get_mut(device, part));
            }
            Self::Embedding { shape, table, by_row, dy } => {
                let dtable = gradients.get_mut(device, table);
                device.embedding_backward(&shape, by_row.view(), dy.view(), dtable);
            }
        }
    }

    /// The unit whose gradients it adds to.
    pub fn unit(&self) -> usize {
        match self {
            Self::Linear { linear, .. } => linear.weight.unit(),
            Self::Experts { linear, .. } => linear.unit(),
            Self::Bias { bias: vector, .. } | Self::Rows { vector, .. } => vector.unit(),
            Self::Norm { norm, .. } => norm.unit(),
            Self::Apart((part, _)) => part.unit(),
            Self::Embedding { table, .. } => table.unit(),
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
            Self::Experts { x, dy, .. } => [Some(x), Some(&dy.rows)],
            Self::Linear { x, dy, .. } | Self::Norm { x, dy, .. } => [Some(x), Some(dy)],
            Self::Bias { dy, .. } | Self::Embedding { dy, .. } => [Some(dy), None],
            Self::Apart(_) | Self::Rows { .. } => [None, None],
        }
    }
}

/// Where a backward pass leaves its weight gradients.
pub struct Gradients<'a, D: Space> {
    device: &'a D,
    store: &'a mut GradientStore<D>,
    /// Deferred work, if the schedule has separate passes for weights.
    later: Option<&'a mut Vec<WeightWork<D>>>,
    /// Told from which element on the stage's gradients are complete.
    complete: Option<Complete<'a, D>>,
}

/// Says that a layer's gradients were handed to whatever sums them over replicas.
#[derive(Debug)]
pub struct Reduced(());

/// Called when the gradients are complete from this element to the end of the stage.
pub type Complete<'a, D> = &'a mut dyn FnMut(&mut GradientStore<D>, usize) -> Result<(), CommError>;

impl<'a, D: Device> Gradients<'a, D> {
    /// Work is run at once, while input gradients are being reduced. `complete` learns of complete
    /// gradients.
    pub fn now(
        device: &'a D,
        store: &'a mut GradientStore<D>,
        complete: Option<Complete<'a, D>>,
    ) -> Self {
        Self { device, store, later: None, complete }
    }

    /// Work is collected. Sums over rows are computed at once: they cost almost nothing, and
    /// deferring them would keep a norm's input and output gradient alive.
    pub fn later(
        device: &'a D,
        store: &'a mut GradientStore<D>,
        later: &'a mut Vec<WeightWork<D>>,
    ) -> Self {
        Self { device, store, later: Some(later), complete: None }
    }

    /// Runs or collects the work.
    pub fn add(&mut self, work: WeightWork<D>) {
        match (&mut self.later, &work) {
            (
                Some(later),
                WeightWork::Linear { .. }
                | WeightWork::Experts { .. }
                | WeightWork::Embedding { .. },
            ) => later.push(work),
            (Some(later), _) if self.store.opens_units() => {
                let mut vectors = Vectors(Vec::new());
                work.run(self.device, &mut vectors);
                later.extend(vectors.0.into_iter().map(WeightWork::Apart));
            }
            _ => work.run(self.device, self.store),
        }
    }

    /// Where to add gradients that cannot wait.
    pub(super) fn at_once(&mut self) -> &mut GradientStore<D> {
        self.store
    }

    /// Says that this micro-batch's gradients are complete from `element` on to the end of the
    /// stage. Data-parallel ranks can start to sum them: after the step's last micro-batch, or,
    /// where they share gradients (ZeRO stages 2 and 3), after each.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn complete_from(&mut self, element: usize) -> Result<Reduced, CommError> {
        if let Some(complete) = &mut self.complete {
            complete(self.store, element)?;
        }
        Ok(Reduced(()))
    }
}
