//! Where a rank's tensors lie and what computes on them: the only interface between the runtime and
//! CPU or GPU.
//!
//! [`Space`] is memory: allocations, views of them, copies to and from the host. [`Device`] adds
//! what layers and the optimizer compute. Nothing else in this crate reads or writes an element of
//! a tensor.
//!
//! - **Two element types.** Weights as layers read them and activations are [`Space::Stored`].
//!   Gradients, moments, row statistics and exact weights are [`Space::Wide`]. On a CPU both are
//!   the same type.
//! - **Order.** A handle of a device is a stream: it does what is asked in the order asked, maybe
//!   later. To hand memory to another handle, send a [`Space::mark`] with it for the other to wait
//!   for ([`Space::wait_for`]); communicators do so themselves.
//! - **Waiting.** Only [`Space::download`] and [`Space::read`] wait for results. A step reads its
//!   loss and one sum of squares, once each. It downloads what goes to host memory, if anything
//!   does, and the logits of routers.
//! - **Failures** of asynchronous work are recorded by the device and returned by the next call
//!   that waits, and by [`Space::health`].

mod gpu;
mod group;
mod host;
mod host_bf16;
mod space;

pub use gpu::Gpu;
pub use group::{DeviceGroup, DeviceRequest};
pub use host::Host;
pub use space::{Ids, MemoryUse, Space, StepNumbers, Stored, StoredMut, Wide, WideMut};

pub use crate::device_error::DeviceError;

use kernels::Output;
use kernels::activation::Activation;
use kernels::adamw::AdamW;
use kernels::attention::Attention;
use kernels::cross_entropy::Logits;
use kernels::dropout::Dropout;
use kernels::embedding::Embedding;
use kernels::gemm::Shape;
use kernels::latent_heads::LatentHeads;
use kernels::layer_norm::LayerNorm;
use kernels::random::{GlobalIndices as Numbered, Stream};
use kernels::rms_norm::RmsNorm;
use kernels::rope::Rope;
use kernels::sinks::Sinks;

/// Input of attention's backward pass; see [`kernels::attention::Saved`].
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

/// Output of attention's backward pass; see [`kernels::attention::Gradients`].
pub struct Gradients<'a, D: Space> {
    /// Of the queries.
    pub dq: StoredMut<'a, D>,
    /// Of the keys.
    pub dk: StoredMut<'a, D>,
    /// Of the values.
    pub dv: StoredMut<'a, D>,
}

/// Each row's maximum, and its sum of exponentials relative to that, `[rows]` each.
pub struct RowSums<'a, D: Space> {
    /// Maxima.
    pub max: Wide<'a, D>,
    /// Sums.
    pub sum_exp: Wide<'a, D>,
}

/// The weights that an update changes.
pub enum Target<'a, D: Space> {
    /// The weights that layers read.
    Read(StoredMut<'a, D>),
    /// The exact weights.
    Exact(WideMut<'a, D>),
    /// The exact weights, from which those that layers read are rounded.
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

/// One parameter's proposed update; see [`kernels::adamw::Proposal`].
pub struct Proposal<'a, D: Space> {
    /// Where the proposed weights go.
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

/// What layers and the optimizer compute, on views of this device's memory. Shapes, formulas and
/// saved values are those of the operations of the same names in [`kernels`]. Views of the wrong
/// length panic.
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

    /// `c = op(a) op(b)`, with `bias[n]` added to each row: a linear layer with a bias.
    fn gemm_bias(
        &self,
        shape: &Shape,
        a: Stored<'_, Self>,
        b: Stored<'_, Self>,
        bias: Stored<'_, Self>,
        c: StoredMut<'_, Self>,
    );

    /// `c = op(a) op(b)`, stored or added: gradients of weights.
    fn gemm_wide(
        &self,
        shape: &Shape,
        a: Stored<'_, Self>,
        b: Stored<'_, Self>,
        c: WideMut<'_, Self>,
        output: Output,
    );

    /// `x[r, c] += bias[c]`
    fn add_bias(&self, bias: Stored<'_, Self>, x: StoredMut<'_, Self>);

    /// `dbias += sum of rows of dy`
    fn bias_gradient(&self, dy: Stored<'_, Self>, dbias: WideMut<'_, Self>);

    /// The same of numbers as wide as gradients: `sums += sum of rows of x`.
    fn sum_rows(&self, x: Wide<'_, Self>, sums: WideMut<'_, Self>);

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

    /// Whether the device adds up a residual in the norm after it: then [`Self::add_and_rms_norm`]
    /// or [`Self::add_and_layer_norm`] is called.
    const ADDS_BEFORE_NORM: bool;

    /// `sum` of two parts of the residual stream, and [`Self::rms_norm`] of the sum as stored.
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

    /// Sum of two parts of the residual stream, and [`Self::layer_norm`] of the sum as stored.
    /// `weights` are scale and shift; `to` is sum and norm.
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

    /// [`kernels::attention::merge`], into sums that are f32 or wider.
    fn merge_attention(
        &self,
        attention: &Attention,
        sums: WideMut<'_, Self>,
        lse: WideMut<'_, Self>,
        part: Stored<'_, Self>,
        part_lse: Wide<'_, Self>,
    );

    /// `sum += x`, in f32 or wider.
    fn accumulate(&self, x: Stored<'_, Self>, sum: WideMut<'_, Self>);

    /// `[a, b, inner] -> [b, a, inner]`; see [`kernels::transpose::swap_leading`].
    fn swap_leading(&self, shape: [usize; 3], x: Stored<'_, Self>, y: StoredMut<'_, Self>);

    /// [`kernels::latent_heads::join`]
    fn join_latent_heads(
        &self,
        of: &LatentHeads,
        up: Stored<'_, Self>,
        rotary: Stored<'_, Self>,
        k: StoredMut<'_, Self>,
        v: StoredMut<'_, Self>,
    );

    /// [`kernels::latent_heads::split`]
    fn split_latent_heads(
        &self,
        of: &LatentHeads,
        dk: Stored<'_, Self>,
        dv: Stored<'_, Self>,
        dup: StoredMut<'_, Self>,
        drotary: StoredMut<'_, Self>,
    );

    /// [`kernels::sinks::apply`]
    fn sinks(
        &self,
        of: &Sinks,
        sinks: Stored<'_, Self>,
        lse: Wide<'_, Self>,
        new: WideMut<'_, Self>,
        out: StoredMut<'_, Self>,
    );

    /// [`kernels::sinks::gradient`]
    fn sinks_gradient(
        &self,
        of: &Sinks,
        sinks: Stored<'_, Self>,
        new: Wide<'_, Self>,
        by_row: WideMut<'_, Self>,
    );

    /// [`kernels::weighted_rows::scale`]
    fn scale_rows(&self, w: Wide<'_, Self>, x: Stored<'_, Self>, y: StoredMut<'_, Self>);

    /// [`kernels::weighted_rows::dot`]
    fn dot_rows(&self, x: Stored<'_, Self>, y: Stored<'_, Self>, w: WideMut<'_, Self>);

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
        by_row: Ids<'_, Self>,
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

    /// [`Self::local_max`], and [`Self::local_sum_exp`] around it, in one pass.
    fn local_sums(
        &self,
        shape: &Logits,
        logits: Stored<'_, Self>,
        targets: Ids<'_, Self>,
        max: WideMut<'_, Self>,
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

    /// Adds the sums of squares of some tensors to a total.
    fn add_squares(&self, tensors: &[Wide<'_, Self>], total: &mut Self::Total);

    /// [`kernels::adamw::update`]
    fn adamw(&self, adamw: &AdamW, parameters: Vec<Parameter<'_, Self>>);

    /// [`kernels::adamw::proposal`]
    fn adamw_proposal(&self, adamw: &AdamW, parameters: Vec<Proposal<'_, Self>>);
}
