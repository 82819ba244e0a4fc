//! Where a rank's tensors lie, and who computes on them: the one door between the runtime and a machine.
//!
//! [`Space`] is memory: owned runs of elements, borrowed parts of them, copies to and from the host. [`Device`]
//! adds what layers and the optimizer compute. Nothing else in this crate reads or writes an element of a tensor.
//!
//! - **Two element types.** Weights as layers read them and activations are [`Space::Stored`]; gradients, moments,
//!   statistics of rows and exact weights are [`Space::Wide`]. On a processor both are the same type.
//! - **Order.** A handle of a device is a stream: what is asked of it is done in the order asked, maybe later.
//!   Whoever hands memory to another handle sends a [`Space::mark`] with it, and the other waits for that
//!   ([`Space::wait_for`]); communicators do so themselves.
//! - **Who waits.** Only [`Space::download`] and [`Space::read`] wait for results: a step reads its loss and one sum of
//!   squares, once each, and downloads nothing.
//! - **Failures** of what runs later are kept by the device and told by the next call that waits, and by
//!   [`Space::health`].

mod gpu;
mod group;
mod host;

pub use gpu::Gpu;
pub use group::{DeviceGroup, DeviceRequest};
pub use host::Host;

pub use crate::device_error::DeviceError;

use crate::comm::{CommError, Communicator, Element, Payload};
use crate::scalar::{Number, Scalar};
use kernels::activation::Activation;
use kernels::adamw::AdamW;
use kernels::attention::Attention;
use kernels::cross_entropy::Logits;
use kernels::dropout::Dropout;
use kernels::embedding::Embedding;
use kernels::gemm::Shape;
use kernels::layer_norm::LayerNorm;
use kernels::random::{Stream, View as Numbered};
use kernels::rms_norm::RmsNorm;
use kernels::rope::Rope;
use kernels::{Cpu, Output};
use serde::Serialize;
use std::collections::BTreeMap;
use std::ops::Range;

/// What a device's memory came to: what was reserved for all ranks that share it, how much of that was used at most, and
/// what was taken beyond it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryUse {
    /// Bytes.
    pub reserved_bytes: u64,
    /// Bytes.
    pub used_bytes: u64,
    /// Bytes; 0 where enough was reserved.
    pub beyond_bytes: u64,
}

/// Numbers that change from step to step, beside tokens and labels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepNumbers {
    /// The training step, for what is drawn anew in each.
    pub step: u32,
    /// What each token's loss counts for.
    pub loss_scale: f64,
}

/// Memory of one device, as one of its streams sees it.
pub trait Space: Sized + Send + Sync + 'static {
    /// What weights that layers read and activations are stored in.
    type Stored: Number;
    /// What gradients, moments and statistics are stored in, f32 or wider, and what the host is told.
    type Wide: Scalar;
    /// The optimizer's weights are apart from those that layers read, which are rounded copies.
    const MASTERS: bool;
    /// A run of elements, owned.
    type Memory<E: Element>: Send + Sync + 'static;
    /// Elements to read.
    type View<'a, E: Element>: Copy;
    /// Elements to write.
    type ViewMut<'a, E: Element>;
    /// A sum in f64 that stays on the device until it is asked for.
    type Total: Send;
    /// A point in the order of a stream's work.
    type Mark: Send;
    /// Work that was recorded, to be done as often as is liked.
    type Recording: Send;

    /// No elements.
    fn empty<E: Element>() -> Self::Memory<E>;

    /// Elements of a run.
    fn len<E: Element>(memory: &Self::Memory<E>) -> usize;

    /// Some of them, to be read.
    fn view<E: Element>(memory: &Self::Memory<E>, range: Range<usize>) -> Self::View<'_, E>;

    /// Some of them, to be written.
    fn view_mut<E: Element>(
        memory: &mut Self::Memory<E>,
        range: Range<usize>,
    ) -> Self::ViewMut<'_, E>;

    /// The first `at` elements, and the others.
    fn split<'a, E: Element>(
        view: Self::ViewMut<'a, E>,
        at: usize,
    ) -> (Self::ViewMut<'a, E>, Self::ViewMut<'a, E>);

    /// A handle for another thread of this rank: what it is asked comes behind all that was asked here so far.
    #[must_use]
    fn fork_stream(&self) -> Self;

    /// Threads for what a rank does on the host.
    fn host(&self) -> &Cpu;

    /// Memory that another stream of this rank made is used on this one, too: it must not be used again before.
    fn adopt<E: Element>(&self, _memory: &Self::Memory<E>) {}

    /// Zeros.
    fn zeros<E: Element>(&self, len: usize) -> Self::Memory<E>;

    /// These elements. Costs nothing where the host's memory is the device's.
    fn taken<E: Element>(&self, values: Vec<E>) -> Self::Memory<E>;

    /// A copy of elements.
    fn copied<E: Element>(&self, from: Self::View<'_, E>) -> Self::Memory<E>;

    /// Copies elements, as many as there are.
    fn copy<E: Element>(&self, from: Self::View<'_, E>, to: Self::ViewMut<'_, E>);

    /// Sets elements to one value.
    fn fill<E: Element>(&self, to: Self::ViewMut<'_, E>, value: E);

    /// Sets elements to the host's.
    fn upload<E: Element>(&self, from: &[E], to: Self::ViewMut<'_, E>);

    /// The host's copy of elements; waits for them.
    ///
    /// # Errors
    /// The device has failed.
    fn download<E: Element>(&self, from: Self::View<'_, E>) -> Result<Vec<E>, DeviceError>;

    /// Rounds exact weights to those that layers read.
    fn round(&self, from: Wide<'_, Self>, to: StoredMut<'_, Self>);

    /// A sum, 0 so far.
    fn total(&self) -> Self::Total;

    /// What a sum has come to; waits for it.
    ///
    /// # Errors
    /// The device has failed.
    fn read(&self, total: &Self::Total) -> Result<f64, DeviceError>;

    /// Where this stream's work is now.
    fn mark(&self) -> Self::Mark;

    /// What is asked from now on comes behind that mark of another stream.
    fn wait_for(&self, mark: &Self::Mark);

    /// Memory as a communicator's buffer: as it is where the communicator carries this device's memory, else a copy
    /// on the host.
    ///
    /// # Errors
    /// The device has failed.
    fn wrap<E: Element>(
        &self,
        memory: Self::Memory<E>,
        comm: &dyn Communicator,
    ) -> Result<Payload, CommError>;

    /// What a communicator brought; `None` if it is of another type.
    fn unwrap<E: Element>(&self, payload: Payload) -> Option<Self::Memory<E>>;

    /// Whether all that ran so far ran well.
    ///
    /// # Errors
    /// The device has failed.
    fn health(&self) -> Result<(), DeviceError>;

    /// Takes the numbers that change from step to step, and says what calls of that step are to be given for them: the same,
    /// or, where kernels read them from memory, so that a step may be recorded, what stands for those there.
    fn step_numbers(&self, numbers: StepNumbers) -> StepNumbers {
        numbers
    }

    /// Why no work can be recorded here; nothing where it can.
    fn not_recordable(&self) -> Option<&'static str> {
        Some("the rank is on a processor")
    }

    /// From now on work is recorded and not done, also what lanes are asked. Nothing can be uploaded or read meanwhile.
    ///
    /// # Errors
    /// The device has failed, or records nothing ([`Space::not_recordable`]).
    fn start_recording(&self) -> Result<(), DeviceError> {
        Err(DeviceError("this device records nothing: our bug".to_owned()))
    }

    /// Ends [`Space::start_recording`].
    ///
    /// # Errors
    /// The device has failed, or was asked for what cannot be recorded.
    fn finish_recording(&self) -> Result<Self::Recording, DeviceError> {
        Err(DeviceError("this device records nothing: our bug".to_owned()))
    }

    /// Does recorded work, on the memory that it was recorded with; transfers over `world` and its groups are part of it.
    ///
    /// # Errors
    /// The device has failed.
    fn replay(
        &self,
        _recording: &Self::Recording,
        _world: &dyn Communicator,
    ) -> Result<(), DeviceError> {
        Err(DeviceError("this device records nothing: our bug".to_owned()))
    }

    /// What the device's memory came to so far; nothing where nobody counts it.
    fn memory_use(&self) -> Option<MemoryUse> {
        None
    }

    /// For each shape that several kernels can do, and what it was measured for: the kernel in use first, then what each
    /// took. Empty where there is nothing to choose from.
    fn chosen_kernels(&self) -> BTreeMap<String, Vec<String>> {
        BTreeMap::new()
    }
}

/// Activations or weights to read.
pub type Stored<'a, D> = <D as Space>::View<'a, <D as Space>::Stored>;
/// Activations or weights to write.
pub type StoredMut<'a, D> = <D as Space>::ViewMut<'a, <D as Space>::Stored>;
/// Gradients of weights, moments or statistics to read.
pub type Wide<'a, D> = <D as Space>::View<'a, <D as Space>::Wide>;
/// Gradients of weights, moments or statistics to write.
pub type WideMut<'a, D> = <D as Space>::ViewMut<'a, <D as Space>::Wide>;
/// Token ids, labels or positions.
pub type Ids<'a, D> = <D as Space>::View<'a, i64>;

/// What attention's backward pass reads; see [`kernels::attention::Saved`].
pub struct Saved<'a, D: Space> {
    /// Queries.
    pub q: Stored<'a, D>,
    /// Keys.
    pub k: Stored<'a, D>,
    /// Values.
    pub v: Stored<'a, D>,
    /// Output.
    pub out: Stored<'a, D>,
    /// Log-sum-exp.
    pub lse: Wide<'a, D>,
}

/// What attention's backward pass writes; see [`kernels::attention::Gradients`].
pub struct Gradients<'a, D: Space> {
    /// Of the queries.
    pub dq: StoredMut<'a, D>,
    /// Of the keys.
    pub dk: StoredMut<'a, D>,
    /// Of the values.
    pub dv: StoredMut<'a, D>,
}

/// A row's maximum and sum of exponentials around it, `[rows]` each.
pub struct RowSums<'a, D: Space> {
    /// Maxima.
    pub max: Wide<'a, D>,
    /// Sums.
    pub sum_exp: Wide<'a, D>,
}

/// Which weights an update changes.
pub enum Target<'a, D: Space> {
    /// Those that layers read.
    Read(StoredMut<'a, D>),
    /// The exact ones.
    Exact(WideMut<'a, D>),
    /// The exact ones, and those that layers read are rounded from them.
    Both(WideMut<'a, D>, StoredMut<'a, D>),
}

/// One parameter's update; see [`kernels::adamw::Parameter`].
pub struct Parameter<'a, D: Space> {
    /// Weights.
    pub w: Target<'a, D>,
    /// Gradient.
    pub g: Wide<'a, D>,
    /// First moment.
    pub m: WideMut<'a, D>,
    /// Second moment.
    pub v: WideMut<'a, D>,
    /// Weight decay.
    pub decay: f64,
}

/// One parameter's update, proposed; see [`kernels::adamw::Proposal`].
pub struct Proposal<'a, D: Space> {
    /// Where the weights go.
    pub to: StoredMut<'a, D>,
    /// Exact weights.
    pub w: Wide<'a, D>,
    /// Gradient.
    pub g: Wide<'a, D>,
    /// First moment.
    pub m: Wide<'a, D>,
    /// Second moment.
    pub v: Wide<'a, D>,
    /// Weight decay.
    pub decay: f64,
}

/// What layers and the optimizer compute, on views of this device's memory. Shapes, formulas and what is saved are
/// those of the operations of the same names in [`kernels`]; slices of the wrong length panic at the door.
pub trait Device: Space {
    /// `c = op(a) op(b)`, stored or added.
    fn gemm(
        &self,
        shape: &Shape,
        a: Stored<'_, Self>,
        b: Stored<'_, Self>,
        c: StoredMut<'_, Self>,
        output: Output,
    );

    /// `c += op(a) op(b)`: gradients of weights.
    fn gemm_add(
        &self,
        shape: &Shape,
        a: Stored<'_, Self>,
        b: Stored<'_, Self>,
        c: WideMut<'_, Self>,
    );

    /// `x[r, c] += bias[c]`
    fn add_bias(&self, bias: Stored<'_, Self>, x: StoredMut<'_, Self>);

    /// `dbias += sum of rows of dy`
    fn bias_gradient(&self, dy: Stored<'_, Self>, dbias: WideMut<'_, Self>);

    /// `y += x`
    fn add(&self, x: Stored<'_, Self>, y: StoredMut<'_, Self>);

    /// `y += x`, of gradients.
    fn add_wide(&self, x: Wide<'_, Self>, y: WideMut<'_, Self>);

    /// [`kernels::dropout::apply`]
    fn dropout(
        &self,
        dropout: &Dropout,
        view: &Numbered,
        x: Stored<'_, Self>,
        y: StoredMut<'_, Self>,
    );

    /// [`kernels::rms_norm::forward`]
    fn rms_norm(
        &self,
        norm: &RmsNorm,
        x: Stored<'_, Self>,
        w: Stored<'_, Self>,
        y: StoredMut<'_, Self>,
        inverse_rms: WideMut<'_, Self>,
    );

    /// Whether a residual is added up by the norm behind it: [`Self::add_and_rms_norm`] and
    /// [`Self::add_and_layer_norm`] are what they are asked for then.
    const ADDS_BEFORE_NORM: bool;

    /// `sum` of two parts of the residual stream, and [`Self::rms_norm`] of it as it is stored.
    fn add_and_rms_norm(
        &self,
        norm: &RmsNorm,
        parts: [Stored<'_, Self>; 2],
        w: Stored<'_, Self>,
        sum: StoredMut<'_, Self>,
        y: StoredMut<'_, Self>,
        inverse_rms: WideMut<'_, Self>,
    );

    /// [`kernels::rms_norm::backward_input`]
    #[allow(clippy::too_many_arguments)]
    fn rms_norm_backward_input(
        &self,
        norm: &RmsNorm,
        x: Stored<'_, Self>,
        w: Stored<'_, Self>,
        inverse_rms: Wide<'_, Self>,
        dy: Stored<'_, Self>,
        dx: StoredMut<'_, Self>,
        output: Output,
    );

    /// [`kernels::rms_norm::backward_weight`]
    fn rms_norm_backward_weight(
        &self,
        norm: &RmsNorm,
        x: Stored<'_, Self>,
        inverse_rms: Wide<'_, Self>,
        dy: Stored<'_, Self>,
        dw: WideMut<'_, Self>,
    );

    /// [`kernels::layer_norm::forward`]
    #[allow(clippy::too_many_arguments)]
    fn layer_norm(
        &self,
        norm: &LayerNorm,
        x: Stored<'_, Self>,
        w: Stored<'_, Self>,
        bias: Stored<'_, Self>,
        y: StoredMut<'_, Self>,
        mean: WideMut<'_, Self>,
        inverse_std: WideMut<'_, Self>,
    );

    /// Sum of two parts of the residual stream, and [`Self::layer_norm`] of it as it is stored, with scale and shift,
    /// `to` those two.
    fn add_and_layer_norm(
        &self,
        norm: &LayerNorm,
        parts: [Stored<'_, Self>; 2],
        weights: [Stored<'_, Self>; 2],
        to: [StoredMut<'_, Self>; 2],
        mean: WideMut<'_, Self>,
        inverse_std: WideMut<'_, Self>,
    );

    /// [`kernels::layer_norm::backward_input`]
    #[allow(clippy::too_many_arguments)]
    fn layer_norm_backward_input(
        &self,
        norm: &LayerNorm,
        x: Stored<'_, Self>,
        w: Stored<'_, Self>,
        mean: Wide<'_, Self>,
        inverse_std: Wide<'_, Self>,
        dy: Stored<'_, Self>,
        dx: StoredMut<'_, Self>,
        output: Output,
    );

    /// [`kernels::layer_norm::backward_weight`]
    #[allow(clippy::too_many_arguments)]
    fn layer_norm_backward_weight(
        &self,
        norm: &LayerNorm,
        x: Stored<'_, Self>,
        mean: Wide<'_, Self>,
        inverse_std: Wide<'_, Self>,
        dy: Stored<'_, Self>,
        dw: WideMut<'_, Self>,
        dbias: WideMut<'_, Self>,
    );

    /// [`kernels::rope::forward`]
    fn rope(&self, rope: &Rope, table: Wide<'_, Self>, x: StoredMut<'_, Self>);

    /// [`kernels::rope::backward`]
    fn rope_backward(&self, rope: &Rope, table: Wide<'_, Self>, dx: StoredMut<'_, Self>);

    /// [`kernels::attention::forward`]
    fn attention(
        &self,
        attention: &Attention,
        q: Stored<'_, Self>,
        k: Stored<'_, Self>,
        v: Stored<'_, Self>,
        out: StoredMut<'_, Self>,
        lse: WideMut<'_, Self>,
    );

    /// [`kernels::attention::backward`]; gradients are replaced.
    fn attention_backward(
        &self,
        attention: &Attention,
        saved: Saved<'_, Self>,
        dout: Stored<'_, Self>,
        gradients: Gradients<'_, Self>,
    );

    /// [`kernels::activation::forward`]
    fn activation(&self, activation: Activation, x: Stored<'_, Self>, y: StoredMut<'_, Self>);

    /// [`kernels::activation::backward`]
    fn activation_backward(
        &self,
        activation: Activation,
        x: Stored<'_, Self>,
        dy: Stored<'_, Self>,
        dx: StoredMut<'_, Self>,
    );

    /// [`kernels::activation::gated_forward`]
    fn gated(
        &self,
        activation: Activation,
        gate: Stored<'_, Self>,
        up: Stored<'_, Self>,
        y: StoredMut<'_, Self>,
    );

    /// [`kernels::activation::gated_backward`]
    fn gated_backward(
        &self,
        activation: Activation,
        gate: Stored<'_, Self>,
        up: Stored<'_, Self>,
        dy: Stored<'_, Self>,
        dgate: StoredMut<'_, Self>,
        dup: StoredMut<'_, Self>,
    );

    /// [`kernels::embedding::forward`]
    fn embedding(
        &self,
        embedding: &Embedding,
        ids: Ids<'_, Self>,
        table: Stored<'_, Self>,
        out: StoredMut<'_, Self>,
    );

    /// [`kernels::embedding::backward`]
    fn embedding_backward(
        &self,
        embedding: &Embedding,
        ids: Ids<'_, Self>,
        dout: Stored<'_, Self>,
        dtable: WideMut<'_, Self>,
    );

    /// [`kernels::cross_entropy::local_max`]
    fn local_max(&self, shape: &Logits, logits: Stored<'_, Self>, max: WideMut<'_, Self>);

    /// [`kernels::cross_entropy::local_sum_exp`]
    fn local_sum_exp(
        &self,
        shape: &Logits,
        logits: Stored<'_, Self>,
        targets: Ids<'_, Self>,
        max: Wide<'_, Self>,
        sum_exp: WideMut<'_, Self>,
        target_logit: WideMut<'_, Self>,
    );

    /// [`kernels::cross_entropy::rescale_sum_exp`]
    fn rescale_sum_exp(
        &self,
        local_max: Wide<'_, Self>,
        max: Wide<'_, Self>,
        sum_exp: WideMut<'_, Self>,
    );

    /// [`kernels::cross_entropy::loss`]
    fn loss(
        &self,
        targets: Ids<'_, Self>,
        sums: RowSums<'_, Self>,
        target_logit: Wide<'_, Self>,
        loss: WideMut<'_, Self>,
    );

    /// [`kernels::cross_entropy::gradient_in_place`]
    fn cross_entropy_gradient(
        &self,
        shape: &Logits,
        logits: StoredMut<'_, Self>,
        targets: Ids<'_, Self>,
        sums: RowSums<'_, Self>,
        scale: f64,
    );

    /// [`kernels::cross_entropy::scale_by_slope`]
    fn scale_by_slope(
        &self,
        soft_cap: Option<f64>,
        target_logit: Wide<'_, Self>,
        rows: StoredMut<'_, Self>,
    );

    /// [`kernels::cross_entropy::softmax_to_gradient`]
    fn softmax_to_gradient(
        &self,
        shape: &Logits,
        softmax: StoredMut<'_, Self>,
        targets: Ids<'_, Self>,
        factor: Wide<'_, Self>,
        target_logit: Wide<'_, Self>,
        scale: f64,
    );

    /// [`kernels::cross_entropy::join_gradient`]
    fn join_gradient(
        &self,
        weighted: StoredMut<'_, Self>,
        hits: Stored<'_, Self>,
        factor: Wide<'_, Self>,
        scale: f64,
    );

    /// `x /= by`
    fn divide(&self, by: Wide<'_, Self>, x: WideMut<'_, Self>);

    /// [`kernels::random::fill_normal`]
    fn fill_normal(&self, to: WideMut<'_, Self>, view: &Numbered, stream: Stream, std: f64);

    /// Adds the sum of elements to a total.
    fn add_sum(&self, x: Wide<'_, Self>, total: &mut Self::Total);

    /// Adds the sum of squares to a total.
    fn add_squares(&self, x: Wide<'_, Self>, total: &mut Self::Total);

    /// [`kernels::adamw::update`]
    fn adamw(&self, adamw: &AdamW, parameters: Vec<Parameter<'_, Self>>);

    /// [`kernels::adamw::proposal`]
    fn adamw_proposal(&self, adamw: &AdamW, parameters: Vec<Proposal<'_, Self>>);
}
