//! Input of the bounds: one micro-batch in seconds and bytes by layer kind.

use super::pipeline_spec::PipelineSpec;
use crate::cost::state::LocalParams;
use crate::cost::vocabulary::VocabCost;
use crate::pricing::cost_cache::{CostCache, LayerCosts};
use crate::pricing::stage_transfers::{slowdown_beside_passes, vocab_passes};
use models::decisions::Decisions;

/// Cost of one layer of a kind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KindCost {
    /// Forward pass, s.
    pub forward_s: f64,
    /// Backward pass without recomputation, s.
    pub backward_s: f64,
    /// Backward to inputs, a part of `backward_s`, s.
    pub input_s: f64,
    /// Weight gradients, a part of `backward_s`, s.
    pub weight_s: f64,
    /// Computation in the forward pass, the backward to inputs and the weight gradients, s.
    pub compute_s: [f64; 3],
    /// Extra seconds of a forward and of a backward pass that run unpaired.
    pub unpaired_s: [f64; 2],
    /// Recomputation by `Recompute::ALL`, s.
    pub recompute_s: [f64; 3],
    /// Activation bytes kept by `Recompute::ALL`.
    pub saved_bytes: [f64; 3],
    /// Parameters on one rank.
    pub params: LocalParams,
}

impl KindCost {
    /// Forward and backward, s.
    pub fn load_s(&self) -> f64 {
        self.forward_s + self.backward_s
    }

    /// Extra seconds of a forward and a backward pass that both run unpaired.
    pub fn both_unpaired_s(&self) -> f64 {
        self.unpaired_s[0] + self.unpaired_s[1]
    }

    /// The same with computation `slowdown` times slower. Recomputation stays as it is.
    fn slowed(self, slowdown: f64) -> Self {
        let [forward_s, input_s, weight_s] = self.compute_s.map(|own_s| (slowdown - 1.0) * own_s);
        Self {
            forward_s: self.forward_s + forward_s,
            backward_s: self.backward_s + input_s + weight_s,
            input_s: self.input_s + input_s,
            weight_s: self.weight_s + weight_s,
            compute_s: self.compute_s.map(|own_s| slowdown * own_s),
            ..self
        }
    }
}

/// Embedding or output layer on the stage that holds it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct VocabEnd {
    /// Forward pass, s.
    pub forward_s: f64,
    /// Backward pass, s.
    pub backward_s: f64,
    /// Weight gradients that may run separately, a part of `backward_s`, s.
    pub weight_s: f64,
    /// Dense parameters.
    pub params: f64,
    /// Activation bytes per micro-batch in flight.
    pub in_flight_bytes: f64,
    /// Bytes beside activations and parameter state.
    pub workspace_bytes: f64,
}

impl VocabEnd {
    /// Forward and backward, s.
    pub fn load_s(&self) -> f64 {
        self.forward_s + self.backward_s
    }
}

/// The cost of one micro-batch over the whole model.
#[derive(Clone, Debug, PartialEq)]
pub struct MicroBatchCost {
    /// By layer kind.
    pub kinds: Vec<KindCost>,
    /// Layers of each kind.
    pub counts: Vec<usize>,
    /// The embedding where the first stage holds it.
    pub embedding: VocabEnd,
    /// The output layer where the last stage holds it, with a matrix of its own.
    pub head: VocabEnd,
    /// Whether its matrix is the embedding where one rank holds both.
    pub tied: bool,
    /// Bytes that a device needs for temporaries and received micro-batches.
    pub workspace_bytes: f64,
}

impl MicroBatchCost {
    /// One micro-batch under `d`, with its vocabulary placement.
    pub fn of(cache: &CostCache<'_>, d: &Decisions, layer_costs: &LayerCosts) -> Self {
        Self::new(cache, d, layer_costs).with_passes(cache, d, layer_costs)
    }

    /// One micro-batch under `d`, with the vocabulary layers on the first and the last stage.
    pub fn new(cache: &CostCache<'_>, d: &Decisions, layer_costs: &LayerCosts) -> Self {
        let kind = |(layer, &params): (&crate::cost::layer::LayerCost, &LocalParams)| KindCost {
            forward_s: layer.forward.total_s(),
            backward_s: layer.backward().total_s(),
            input_s: layer.backward().total_s() - layer.backward_weight.total_s(),
            weight_s: layer.backward_weight.total_s(),
            compute_s: [layer.forward, layer.backward_input, layer.backward_weight]
                .map(|parts| parts.compute_s),
            unpaired_s: layer.unpaired_s,
            recompute_s: layer.recompute.map(|parts| parts.total_s()),
            saved_bytes: layer.saved_bytes,
            params,
        };
        let (embedding_params, head_params) = cache.vocab_params(d.tp);
        let end = |params| VocabEnd { params, ..VocabEnd::default() };
        let received = if d.pp > 1 { 2.0 * layer_costs.resident_bytes } else { 0.0 };
        let layers = Self {
            kinds: layer_costs.layer.iter().zip(&layer_costs.params).map(kind).collect(),
            counts: cache.layers.counts(0, cache.layers.len()),
            embedding: end(embedding_params),
            head: end(head_params),
            tied: cache.model.tied_embeddings,
            workspace_bytes: layer_costs.transient_bytes + received,
        };
        layers.with_vocabulary(&layer_costs.vocab)
    }

    /// The same with other costs of the vocabulary layers.
    pub fn with_vocabulary(&self, vocab: &VocabCost) -> Self {
        Self {
            embedding: VocabEnd {
                forward_s: vocab.embed_forward.total_s(),
                backward_s: vocab.embed_backward.total_s(),
                weight_s: 0.0,
                params: self.embedding.params,
                in_flight_bytes: vocab.embed_saved_bytes,
                workspace_bytes: 0.0,
            },
            head: VocabEnd {
                forward_s: vocab.head_forward.total_s(),
                backward_s: (vocab.head_backward_input + vocab.head_backward_weight).total_s(),
                weight_s: vocab.head_backward_weight.total_s(),
                params: self.head.params,
                in_flight_bytes: vocab.head_saved_bytes,
                workspace_bytes: vocab.logits_bytes,
            },
            ..self.clone()
        }
    }

    /// The same with vocabulary passes on every rank instead, where `d` has them.
    pub fn with_passes(
        &self,
        cache: &CostCache<'_>,
        d: &Decisions,
        layer_costs: &LayerCosts,
    ) -> Self {
        let Some(passes) = vocab_passes(cache, d, layer_costs) else { return self.clone() };
        let (embedding, head) = cache.vocab_shard_params(d);
        let head = if cache.model.tied_embeddings { 0.0 } else { head };
        Self {
            embedding: VocabEnd { params: embedding + head, ..VocabEnd::default() },
            head: VocabEnd::default(),
            workspace_bytes: self.workspace_bytes + passes.workspace_bytes,
            ..self.beside_passes(cache, d)
        }
    }

    /// The same with layers as slow as they are beside the vocabulary passes of `d`.
    pub fn beside_passes(&self, cache: &CostCache<'_>, d: &Decisions) -> Self {
        let slowdown = slowdown_beside_passes(cache, d);
        let kinds = self.kinds.iter().map(|kind| kind.slowed(slowdown)).collect();
        Self { kinds, ..self.clone() }
    }

    /// The same where no pass runs unpaired.
    pub fn always_paired(mut self) -> Self {
        self.kinds.iter_mut().for_each(|kind| kind.unpaired_s = [0.0; 2]);
        self
    }

    /// The output layer in a pipeline: without a matrix of its own where it is the embedding.
    pub fn head_of(&self, spec: &PipelineSpec) -> VocabEnd {
        let params = if self.tied && spec.ends_meet() { 0.0 } else { self.head.params };
        VocabEnd { params, ..self.head }
    }

    /// The componentwise minimum of two costs that differ only in the seconds of layers.
    pub fn least(mut self, other: &Self) -> Self {
        for (kind, other) in self.kinds.iter_mut().zip(&other.kinds) {
            kind.forward_s = kind.forward_s.min(other.forward_s);
            kind.backward_s = kind.backward_s.min(other.backward_s);
            kind.input_s = kind.input_s.min(other.input_s);
            kind.weight_s = kind.weight_s.min(other.weight_s);
            let least = |own_s: &mut [f64], other_s: &[f64]| {
                own_s.iter_mut().zip(other_s).for_each(|(own, other)| *own = own.min(*other));
            };
            least(&mut kind.compute_s, &other.compute_s);
            least(&mut kind.unpaired_s, &other.unpaired_s);
            least(&mut kind.recompute_s, &other.recompute_s);
        }
        self
    }

    /// The sum of `value` over all layers.
    pub fn layers_s(&self, value: impl Fn(&KindCost) -> f64) -> f64 {
        self.kinds.iter().zip(&self.counts).map(|(kind, &count)| count as f64 * value(kind)).sum()
    }

    /// The largest sum of `value` over layers of one kind that some rank holds in every partition:
    /// of `n` layers some rank holds at least `⌈n/p⌉`. With `copies` of each stage, every copy runs
    /// its share of the micro-batches, and `⌈copies·n/p⌉/copies` layers count.
    pub fn fullest(
        &self,
        ranks: usize,
        copies: usize,
        value: impl Fn(usize, &KindCost) -> f64,
    ) -> f64 {
        let of = |(index, (kind, &count)): (usize, (&KindCost, &usize))| {
            let most = (copies * count).div_ceil(ranks) as f64 / copies as f64;
            if count == 0 { 0.0 } else { most * value(index, kind) }
        };
        self.kinds.iter().zip(&self.counts).enumerate().map(of).fold(0.0, f64::max)
    }

    /// Forward and backward of all layers, s.
    pub fn load_s(&self) -> f64 {
        self.layers_s(KindCost::load_s)
    }

    /// Extra seconds of one forward and one backward pass of all layers that run unpaired.
    pub fn unpaired_s(&self) -> f64 {
        self.layers_s(KindCost::both_unpaired_s)
    }

    /// Parameters of all layers.
    pub fn params(&self) -> LocalParams {
        let all = self.kinds.iter().zip(&self.counts);
        all.fold(LocalParams::default(), |sum, (kind, &count)| sum + kind.params * count as f64)
    }
}

/// The most pipeline ranks that hold one stage.
pub const MAX_COPIES: usize = 2;
