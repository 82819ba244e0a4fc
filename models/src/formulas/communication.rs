//! Elements each rank sends, ring algorithms throughout.
//!
//! `activation_elements` is `b·s·h`, one micro-batch's hidden states. Collectives take the size of
//! the whole tensor.

use super::state::Zero;

/// Elements a rank sends to all-reduce a tensor over `ranks`, `2(n − 1)/n·S`.
pub fn all_reduce_elements(elements: f64, ranks: f64) -> f64 {
    2.0 * all_gather_elements(elements, ranks)
}

/// Elements a rank sends to gather, or to reduce and scatter, a whole of `elements`, `(n − 1)/n·S`.
pub fn all_gather_elements(elements: f64, ranks: f64) -> f64 {
    elements * (ranks - 1.0) / ranks
}

/// Elements a rank sends in an all-to-all of a buffer of `elements` a rank, `(n − 1)/n·S`.
pub fn all_to_all_elements(elements: f64, ranks: f64) -> f64 {
    all_gather_elements(elements, ranks)
}

/// One layer and micro-batch under tensor parallelism, `8bsh(t − 1)/t` (SC'21 §3.2): two all-reduces
/// forward, two backward.
pub fn tensor_layer_elements(activation_elements: f64, tensor: f64) -> f64 {
    4.0 * all_reduce_elements(activation_elements, tensor)
}

/// A stage of `layers`, `l_stage·8bsh(t − 1)/t` a micro-batch (SC'21 §3.2).
pub fn tensor_stage_elements(layers: f64, activation_elements: f64, tensor: f64) -> f64 {
    layers * tensor_layer_elements(activation_elements, tensor)
}

/// [`tensor_layer_elements`] with the forward pass repeated in the backward, `12bsh(t − 1)/t` (TP
/// write-up, activation checkpointing: two more all-reduces).
pub fn tensor_layer_recompute_elements(activation_elements: f64, tensor: f64) -> f64 {
    6.0 * all_reduce_elements(activation_elements, tensor)
}

/// One layer and micro-batch under tensor and sequence parallelism: each all-reduce is split into a
/// reduce-scatter and an all-gather of the same volume, `8bsh(t − 1)/t` (Korthikanti §4.2.2). Where
/// the linear inputs are stored sharded they are gathered again backward: `10bsh(t − 1)/t`.
pub fn sequence_layer_elements(
    activation_elements: f64,
    tensor: f64,
    inputs_stored_sharded: bool,
) -> f64 {
    let gathers = if inputs_stored_sharded { 10.0 } else { 8.0 };
    gathers * all_gather_elements(activation_elements, tensor)
}

/// A part of a tensor parallel model (TP write-up, communication overhead).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Input embedding.
    InputEmbedding,
    /// Attention of one layer.
    Attention,
    /// Feed-forward of one layer.
    Mlp,
    /// Output embedding.
    OutputEmbedding,
    /// Softmax cross-entropy: the maximum, the label's logit, the sum of exponentials.
    CrossEntropy,
}

/// Elements that are all-reduced in the forward and in the backward pass of `part`, one micro-batch
/// (TP write-up, communication table). Sizes of tensors: [`all_reduce_elements`] turns one into what
/// a rank sends.
pub fn all_reduced_elements(part: Part, tokens: f64, hidden: f64) -> (f64, f64) {
    let activation = tokens * hidden;
    match part {
        Part::InputEmbedding => (activation, 0.0),
        Part::Attention | Part::Mlp => (activation, activation),
        Part::OutputEmbedding => (0.0, activation),
        Part::CrossEntropy => (3.0 * tokens, 0.0),
    }
}

/// One stage boundary, one micro-batch, one direction, `bsh·v` with `v` chunks a device (SC'21
/// §3.2, §2.2.2).
pub fn pipeline_elements(activation_elements: f64, chunks: f64) -> f64 {
    activation_elements * chunks
}

/// [`pipeline_elements`] when each tensor parallel rank sends its share over its own link and the
/// receivers gather it, `bsh·v/t` (SC'21 §4.1). Sequence parallelism has this without the gather.
pub fn pipeline_scattered_elements(activation_elements: f64, chunks: f64, tensor: f64) -> f64 {
    pipeline_elements(activation_elements, chunks) / tensor
}

/// One optimizer step of data parallelism over `ranks`: `2Ψ(d − 1)/d` up to stage 2 (reduce-scatter
/// gradients, all-gather parameters; or one all-reduce), `3Ψ(d − 1)/d` at stage 3 (Overview,
/// analysis of data parallelism; its tables print Ψ and 0 for stage 0, whose all-reduce is 2Ψ).
pub fn zero_elements(zero: Zero, parameters: f64, ranks: f64) -> f64 {
    match zero {
        Zero::Stage3 => zero3_elements(parameters, ranks, 2.0, 1.0),
        _ => all_reduce_elements(parameters, ranks),
    }
}

/// One step at stage 3 with `gathers` of the parameters and `reductions` of the gradients: 2 and 1
/// for one micro-batch, `2m` and `m` when `m` of them keep neither parameters nor a whole gradient.
pub fn zero3_elements(parameters: f64, ranks: f64, gathers: f64, reductions: f64) -> f64 {
    (gathers + reductions) * all_gather_elements(parameters, ranks)
}

/// What context parallelism moves for one layer and micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Context {
    /// Tokens of the micro-batch over all ranks, `b·s`.
    pub tokens: f64,
    /// Query width on this tensor parallel rank.
    pub query_width: f64,
    /// Key width on this tensor parallel rank (values are as wide).
    pub kv_width: f64,
    /// Context parallel degree `c`.
    pub ranks: f64,
}

/// Ring attention, forward: keys and values of every other rank pass by, `(c − 1)·2·(bs/c)·k`
/// (Overview, context parallelism: `c − 1` sends).
pub fn ring_forward_elements(context: &Context) -> f64 {
    2.0 * all_gather_elements(context.tokens * context.kv_width, context.ranks)
}

/// Ring attention, backward, in bytes: keys and values go round again and their gradients with them,
/// the latter often in fp32 (`gradient_bytes` 4). The gradients' one further hop home is left out.
pub fn ring_backward_bytes(context: &Context, element_bytes: f64, gradient_bytes: f64) -> f64 {
    ring_forward_elements(context) * (element_bytes + gradient_bytes)
}

/// All-gather context parallelism, forward: as many elements as the ring, at once; the backward
/// reduce-scatter of their gradients is the same again.
pub fn gathered_context_elements(context: &Context) -> f64 {
    ring_forward_elements(context)
}

/// Ulysses, forward or backward: all-to-alls of Q, K, V and the output,
/// `(c − 1)/c·(bs/c)·(2q + 2k)` (Overview, all-to-all context parallelism).
pub fn ulysses_elements(context: &Context) -> f64 {
    let Context { tokens, query_width, kv_width, ranks } = *context;
    all_to_all_elements(tokens / ranks * 2.0 * (query_width + kv_width), ranks)
}

/// Expert parallel dispatch, or combine, of `tokens` on this rank under even routing,
/// `T·k·h·(ep − 1)/ep`. A layer has four (two forward, two backward), six with recompute.
pub fn expert_elements(tokens: f64, top_k: f64, hidden: f64, ranks: f64) -> f64 {
    all_to_all_elements(tokens * top_k * hidden, ranks)
}

/// [`expert_elements`] when every expert is padded to `capacity` tokens, `E·C·h·(ep − 1)/ep`,
/// whatever the routing (AMPipe §2.2).
pub fn expert_capacity_elements(experts: f64, capacity: f64, hidden: f64, ranks: f64) -> f64 {
    all_to_all_elements(experts * capacity * hidden, ranks)
}

/// Sizes of what one micro-batch moves in a vocabulary parallel output layer (Vocabulary Parallelism
/// §4, Algorithms 1 and 2).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VocabularyElements {
    /// C0: the last layer's output, broadcast.
    pub broadcast: f64,
    /// C1: maximum, label logit and sum of exponentials, all-reduced.
    pub statistics: f64,
    /// The input's gradient, reduced: C2 of Algorithm 1, in C1 of Algorithm 2.
    pub input_gradient: f64,
}

/// [`VocabularyElements`] of `tokens` of width `hidden`. Tensor sizes, as in
/// [`all_reduced_elements`]: both reductions are run as all-reduces (Vocabulary Parallelism §6.1).
pub fn vocabulary_elements(tokens: f64, hidden: f64) -> VocabularyElements {
    let activation = tokens * hidden;
    VocabularyElements {
        broadcast: activation,
        statistics: 3.0 * tokens,
        input_gradient: activation,
    }
}
