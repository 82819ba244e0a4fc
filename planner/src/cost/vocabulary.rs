//! Time and bytes of the vocabulary layers for one micro-batch on one rank.

use super::collective::{self, Collective};
use super::layer::{LayerPricer, Shape};
use super::memory_bound;
use super::parts::Parts;
use models::decisions::Dtype;
use models::formulas::communication::LOSS_STATISTICS;
use models::layer::{self, Gemm};
use models::mesh::GroupShape;

/// Bytes that the embedding's gradient moves for each of its entries in every micro-batch. The
/// gradient is dense: it is cleared and added to the sum although few rows were looked up. Passes
/// measured by the authors of Vocabulary Parallelism (`artifact/exp_one_host.csv`) show 8 (256k by
/// 3072 on one device) to 12 (an eighth of it).
const EMBEDDING_GRADIENT_BYTES: f64 = 8.0;

/// Cost of the vocabulary layers for one micro-batch, split `ways` ways.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct VocabCost {
    /// Embedding forward.
    pub embed_forward: Parts,
    /// Embedding backward.
    pub embed_backward: Parts,
    /// Logits and loss.
    pub head_forward: Parts,
    /// Gradient of the hidden states.
    pub head_backward_input: Parts,
    /// Gradient of the output matrix.
    pub head_backward_weight: Parts,
    /// Rescaling of a shard's softmax once all shards' sums are known: a part of `T`.
    pub softmax_rescale: Parts,
    /// Cast of a shard's softmax for a product that precedes its gradient: a part of algorithm 2's
    /// `S`.
    pub softmax_cast: Parts,
    /// Embedding activations held (the dropout mask).
    pub embed_saved_bytes: f64,
    /// Head activations held: its input and its norm's.
    pub head_saved_bytes: f64,
    /// Logits, their gradient and the output matrix's placeholder gradient, while they live.
    pub logits_bytes: f64,
}

impl VocabCost {
    /// Seconds of everything, forward and backward.
    pub fn total_s(&self) -> f64 {
        let passes = self.embed_forward
            + self.embed_backward
            + self.head_forward
            + self.head_backward_input
            + self.head_backward_weight;
        passes.total_s()
    }
}

impl LayerPricer<'_> {
    /// Cost of a shard of the vocabulary layers with `columns` entries, padding included; `group`
    /// are the ranks that share them.
    pub fn vocabulary(&self, shape: &Shape, columns: u64, group: &GroupShape) -> VocabCost {
        let (tokens, h) = (shape.split.tokens(self.model), self.model.hidden);
        let e = shape.dtype.storage_bytes();
        let hidden_bytes = tokens as f64 * h as f64 * e;
        let resident_bytes = shape.split.resident_tokens(self.model) as f64 * h as f64 * e;
        let logits = tokens as f64 * columns as f64;
        let head_dtype = if e < 4.0 { Dtype::Bf16 } else { shape.dtype };
        let head = self.products(head_dtype, &[Gemm { groups: 1, m: tokens, n: columns, k: h }]);
        let reduce_s = collective::time_s(self.cluster, Collective::AllReduce, hidden_bytes, group);
        let loss_s = LOSS_STATISTICS
            * collective::time_s(self.cluster, Collective::AllReduce, tokens as f64 * 4.0, group);
        let stream = |bytes: f64| Parts::compute(memory_bound::elementwise_s(self.cluster, bytes));
        let tp = |tp_s: f64| Parts { tp_s, ..Parts::default() };
        let mask = if self.model.dropout > 0.0 { 1.0 } else { 0.0 };
        let wide = e >= 4.0;
        let loss_bytes = if wide { e + 4.0 } else { self.cluster.software.loss_bytes };
        let loss_gradient_bytes =
            if wide { e + 4.0 } else { self.cluster.software.loss_gradient_bytes };
        let logit_bytes = if wide { e + 4.0 } else { self.cluster.software.logit_bytes };
        let placeholder_bytes = self.cluster.software.placeholder_bytes * (columns * h) as f64;
        let gradient_bytes = EMBEDDING_GRADIENT_BYTES * (columns * h) as f64;
        let dense_gradient_s = memory_bound::regular_s(self.cluster, gradient_bytes);
        let loss = |bytes: f64| {
            if wide {
                return stream(logits * bytes);
            }
            Parts::compute(memory_bound::regular_s(self.cluster, logits * bytes))
        };
        // The blocks are multiplied again, and both gradients follow at once.
        let (again, with_input, weight) = match shape.fused_loss {
            true => (head.forward, head.weight, Parts::default()),
            false => (Parts::default(), Parts::default(), head.weight),
        };
        let rows = match shape.fused_loss {
            true => layer::loss_rows(tokens, h, columns),
            false => tokens,
        };
        VocabCost {
            embed_forward: stream(hidden_bytes * 2.0) + tp(reduce_s),
            embed_backward: stream(hidden_bytes * 3.0) + Parts::compute(dense_gradient_s),
            head_forward: head.forward + loss(loss_bytes) + tp(loss_s),
            head_backward_input: again
                + head.input
                + with_input
                + loss(loss_gradient_bytes)
                + tp(reduce_s),
            head_backward_weight: weight,
            softmax_rescale: loss(2.0 * e.max(4.0)),
            softmax_cast: if wide { Parts::default() } else { loss(4.0 + e) },
            embed_saved_bytes: mask * resident_bytes / e,
            head_saved_bytes: 2.0 * resident_bytes,
            logits_bytes: (rows * columns) as f64 * logit_bytes + placeholder_bytes,
        }
    }
}
