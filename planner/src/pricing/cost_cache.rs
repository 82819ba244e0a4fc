//! What all configurations of one request share: the model's layers, the cluster's link domains,
//! and a cache of prices.

use super::layers::Layers;
use super::pipelines::{PipelineKey, Pipelines};
use super::recompute_split::{self, RecomputeCost};
use crate::cost::collective::Collective;
use crate::cost::experts::ExpertPieces;
use crate::cost::layer::{Body, LayerCost, LayerPricer, Pieces, Shape, ThreePasses};
use crate::cost::parts::AttentionChunks;
use crate::cost::state::{LocalParams, StateCost, layer_params, tensors_a_parameter};
use crate::cost::vocabulary::VocabCost;
use crate::partition::Pipeline;
use crate::request::space::divisors;
use models::cluster::ClusterSpec;
use models::decisions::{
    Decisions, Dtype, MoeOverlap, Offload, RankOrder, Recompute, RecomputePolicy,
};
use models::layer::{Split, fullest_copies};
use models::mesh::{Axis, GroupShape, Mesh};
use models::model::{LayerKind, ModelSpec};
use models::schedule::ScheduleError;
use models::shapes::vocabulary_rows;
use rustc_hash::FxHashMap as HashMap;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// Tokens of a rank, tensor-parallel degree, sequence parallelism, and the bits of the copies of a
/// token on the fullest expert-parallel rank; number format; layers recomputed from one input.
type BodyKey = ((u64, u64, bool, u64), Dtype, u64);

/// Collectives as straight lines: intercept, s, and slope, s a byte.
type Lines = HashMap<GroupShape, (f64, f64)>;

/// A model on a cluster of a given size, with a cache of what has been priced.
#[derive(Debug)]
pub struct CostCache<'a> {
    /// The model.
    pub model: &'a ModelSpec,
    /// The cluster.
    pub cluster: &'a ClusterSpec,
    /// Number of GPUs.
    pub gpus: u64,
    /// The model's layers by kind.
    pub layers: Layers,
    /// GPUs in a domain of each link level.
    pub domains: Vec<u64>,
    /// [`tensors_a_parameter`] of the model.
    tensors: f64,
    pipelines: Arc<Pipelines>,
    layer_costs: RefCell<HashMap<LayerCostsKey, Rc<LayerCosts>>>,
    /// By everything but the split of the experts, as far as it does not matter.
    shared: RefCell<HashMap<LayerCostsKey, Rc<Shared>>>,
    /// By kind of layer.
    bodies: RefCell<HashMap<BodyKey, Rc<[Body]>>>,
    experts: RefCell<HashMap<ExpertKey, ExpertPieces>>,
    /// By resident tokens, tensor-parallel degree and number format.
    expert_floors: RefCell<HashMap<(u64, u64, Dtype), ThreePasses>>,
    pub(super) lines: RefCell<HashMap<Collective, Lines>>,
    pub(super) vocab_shards: RefCell<HashMap<(LayerCostsKey, u64), VocabCost>>,
}

/// Costs of the layers under one split of a micro-batch.
#[derive(Clone, Debug)]
pub struct LayerCosts {
    /// Cost of a layer, by kind.
    pub layer: Vec<LayerCost>,
    /// Parameters of a layer on one rank, by kind.
    pub params: Vec<LocalParams>,
    /// Vocabulary layers split over tensor-parallel ranks.
    pub vocab: VocabCost,
    /// Tokens of a micro-batch on one rank.
    pub tokens: f64,
    /// Bytes of the hidden states of one micro-batch on one rank.
    pub hidden_bytes: f64,
    /// Bytes of the hidden states that a rank holds between layers: with sequence parallelism,
    /// those of its own tokens.
    pub resident_bytes: f64,
    /// Largest temporaries of a layer's backward pass: gradients of the widest activations, and
    /// placeholders for weight gradients.
    pub transient_bytes: f64,
    recompute_choices: RefCell<KnownSplits>,
}

/// Resident tokens, degrees (expert-parallel, expert-tensor-parallel, of overlap), overlap, number
/// format and expert-parallel group.
type ExpertKey = (u64, [u64; 3], MoeOverlap, Dtype, GroupShape);

/// Most layer costs kept in the cache, at one or two kilobytes each.
const MOST_LAYER_COSTS: usize = 1 << 14;

/// Costs that all splits of the experts share.
#[derive(Debug)]
struct Shared {
    /// Pieces of a layer's cost, by kind.
    pieces: Vec<Pieces>,
    /// Attention in chunks by kind, by their number; 0 where it is whole.
    chunks: RefCell<HashMap<u64, Rc<[AttentionChunks]>>>,
    /// Everything but the layers.
    ends: LayerCosts,
}

/// Undominated recompute splits, by the number of layers of each kind and the recomputation
/// allowed.
type KnownSplits = HashMap<(Vec<usize>, RecomputePolicy), Rc<Vec<RecomputeCost>>>;

impl LayerCosts {
    /// Undominated recompute splits of a stage with `counts[k]` layers of kind `k`, fastest first.
    pub fn recompute_choices(
        &self,
        counts: Vec<usize>,
        allowed: RecomputePolicy,
    ) -> Rc<Vec<RecomputeCost>> {
        let key = (counts, allowed);
        if let Some(known) = self.recompute_choices.borrow().get(&key) {
            return Rc::clone(known);
        }
        let found = Rc::new(recompute_split::undominated(&self.layer, &key.0, allowed));
        self.recompute_choices.borrow_mut().insert(key, Rc::clone(&found));
        found
    }
}

/// Everything that the costs of layers depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LayerCostsKey {
    split: Split,
    cp_style: models::decisions::CpStyle,
    moe_overlap: MoeOverlap,
    moe_overlap_degree: u64,
    fused_loss: bool,
    recompute_group: u64,
    offload_activations: bool,
    dtype: Dtype,
    ep_group: GroupShape,
}

impl LayerCostsKey {
    pub(super) fn new(shape: &Shape) -> Self {
        Self {
            split: shape.split,
            cp_style: shape.cp_style,
            moe_overlap: shape.moe_overlap,
            moe_overlap_degree: shape.moe_overlap_degree,
            fused_loss: shape.fused_loss,
            recompute_group: shape.recompute_group,
            offload_activations: shape.offload_activations,
            dtype: shape.dtype,
            ep_group: shape.ep_group.clone(),
        }
    }
}

impl<'a> CostCache<'a> {
    /// An empty cache.
    pub fn new(model: &'a ModelSpec, cluster: &'a ClusterSpec, gpus: u64) -> Self {
        Self {
            model,
            cluster,
            gpus,
            layers: Layers::new(model),
            domains: cluster.level_sizes(gpus),
            tensors: tensors_a_parameter(model),
            pipelines: Arc::default(),
            layer_costs: RefCell::default(),
            shared: RefCell::default(),
            bodies: RefCell::default(),
            experts: RefCell::default(),
            expert_floors: RefCell::default(),
            vocab_shards: RefCell::default(),
            lines: RefCell::default(),
        }
    }

    fn pricer(&self) -> LayerPricer<'a> {
        LayerPricer { model: self.model, cluster: self.cluster }
    }

    /// Memory and time of parameter state under the decisions.
    pub fn state_cost(&self, d: &Decisions) -> StateCost<'a> {
        StateCost::new(self.cluster, self.tensors, d, &self.domains)
    }

    /// The same cache with pipelines shared between threads.
    pub fn sharing(self, pipelines: Arc<Pipelines>) -> Self {
        Self { pipelines, ..self }
    }

    /// Checks that the schedule of the decisions exists for their counts.
    ///
    /// # Errors
    /// It does not.
    pub fn check_pipeline(&self, d: &Decisions) -> Result<(), ScheduleError> {
        let (ranks, chunks) = (d.pp as usize, d.vpp as usize);
        d.schedule.check(ranks, d.micro_batches as usize, chunks)
    }

    /// The pipeline of decisions that [`Self::check_pipeline`] accepts.
    pub fn pipeline(&self, d: &Decisions) -> Arc<Pipeline> {
        self.pipelines.get(PipelineKey::new(d))
    }

    /// The pipeline of a key whose counts its schedule accepts.
    pub fn pipeline_of(&self, key: PipelineKey) -> Arc<Pipeline> {
        self.pipelines.get(key)
    }

    /// The key of the layer costs under the decisions.
    pub fn layer_costs_key(&self, d: &Decisions) -> LayerCostsKey {
        LayerCostsKey::new(&self.shape(d))
    }

    /// Layer costs under the decisions.
    pub fn layer_costs(&self, d: &Decisions) -> Rc<LayerCosts> {
        let shape = self.shape(d);
        let key = LayerCostsKey::new(&shape);
        if let Some(layer_costs) = self.layer_costs.borrow().get(&key) {
            return Rc::clone(layer_costs);
        }
        let layer_costs = Rc::new(self.price(&shape));
        let mut known = self.layer_costs.borrow_mut();
        if known.len() >= MOST_LAYER_COSTS {
            known.clear();
        }
        known.insert(key, Rc::clone(&layer_costs));
        layer_costs
    }

    /// A lower bound on the layer costs over all splits of the experts, without vocabulary layers.
    /// It ignores whether a split folds into the layout's ranks, so layouts that differ in pipeline
    /// degree and replicas share it. Nothing of it is kept: most of what is bounded by it is never
    /// looked at again.
    pub fn floor_layer_costs(&self, d: &Decisions) -> LayerCosts {
        let shape = self.shape(&Decisions { ep: 1, etp: 1, ..d.clone() });
        let shared = self.shared_with(&shape, VocabCost::default());
        if self.model.moe.is_none() {
            return self.price_with(&shape, &shared);
        }
        let pricer = self.pricer();
        let experts = self.expert_floor(&shape);
        let floor = |(&kind, pieces): (&LayerKind, &Pieces)| {
            pricer.layer_floor(kind, &shape, pieces, experts)
        };
        let layer = self.layers.kinds.iter().zip(&shared.pieces).map(floor).collect();
        self.layer_costs_of(layer, &shape, &shared)
    }

    fn expert_floor(&self, shape: &Shape) -> ThreePasses {
        let resident = shape.split.resident_tokens(self.model);
        let key = (resident, shape.split.tp, shape.dtype);
        let price = || {
            let (experts, ffn) =
                self.model.moe.as_ref().map_or((1, 1), |moe| (moe.experts, moe.ffn));
            let ways = divisors(shape.split.tp).into_iter().filter(|etp| ffn.is_multiple_of(*etp));
            let of = |etp| divisors(experts).into_iter().map(move |ep| (ep, etp));
            let splits: Vec<Split> =
                ways.flat_map(of).map(|(ep, etp)| Split { ep, etp, ..shape.split }).collect();
            let pricer = self.pricer();
            pricer.expert_floor(shape, &splits)
        };
        *self.expert_floors.borrow_mut().entry(key).or_insert_with(price)
    }

    /// How the decisions split one micro-batch, with its communication groups.
    pub fn shape(&self, d: &Decisions) -> Shape {
        let mesh = Mesh::new(d);
        let group = |size, stride| GroupShape::strided(size, stride, &self.domains);
        // Without expert parallelism the order of the outer axes does not affect a layer.
        let ep_mesh = if d.ep == 1 { Mesh { order: RankOrder::DpInner, ..mesh } } else { mesh };
        Shape {
            split: Split::of(d),
            cp_style: d.cp_style,
            moe_overlap: d.moe_overlap,
            moe_overlap_degree: d.moe_overlap_degree,
            fused_loss: d.fused_loss,
            recompute_group: d.recompute_group,
            offload_activations: d.offload == Offload::Activations,
            dtype: d.dtype,
            tp_group: group(d.tp, 1),
            cp_group: group(d.cp, mesh.stride(Axis::Cp)),
            ep_group: ep_mesh.expert_group(d.ep, d.etp, &self.domains),
            etp_group: group(d.etp, 1),
        }
    }

    /// Layer costs under the decisions, not cached: for callers that try many splits of the
    /// experts.
    pub fn price_of(&self, d: &Decisions) -> LayerCosts {
        self.price(&self.shape(d))
    }

    fn price(&self, shape: &Shape) -> LayerCosts {
        self.price_with(shape, &self.shared(shape))
    }

    fn price_with(&self, shape: &Shape, shared: &Shared) -> LayerCosts {
        let pricer = self.pricer();
        let dense = self.model.moe.is_none();
        let experts = if dense { ExpertPieces::default() } else { self.experts(shape) };
        let chunks = self.attention_chunks(shape, shared);
        let pieces = shared.pieces.iter().zip(chunks.iter());
        let layer = |(&kind, pieces)| pricer.layer_of(kind, shape, pieces, &experts);
        let layers = self.layers.kinds.iter().zip(pieces).map(layer).collect();
        self.layer_costs_of(layers, shape, shared)
    }

    fn layer_costs_of(&self, layer: Vec<LayerCost>, shape: &Shape, shared: &Shared) -> LayerCosts {
        let params = |&kind: &LayerKind| layer_params(self.model, kind, &shape.split);
        LayerCosts {
            layer,
            params: self.layers.kinds.iter().map(params).collect(),
            // These depend on how experts are split.
            transient_bytes: shared.ends.transient_bytes
                + self.group_bytes(shape)
                + self.transit_bytes(shape),
            ..shared.ends.clone()
        }
    }

    /// Costs that all splits of the experts share, cached; where experts are loaded unevenly, all
    /// splits over as many ranks, on which the fullest one's load depends.
    fn shared(&self, shape: &Shape) -> Rc<Shared> {
        let is_even = self.model.moe.as_ref().is_none_or(|moe| moe.imbalance == 1.0);
        let ep = if is_even { 1 } else { shape.split.ep };
        let split = Split { ep, etp: 1, ..shape.split };
        let ep_group = GroupShape { within: vec![] };
        let (moe_overlap, moe_overlap_degree) = (MoeOverlap::None, 1);
        let key = LayerCostsKey {
            split,
            moe_overlap,
            moe_overlap_degree,
            ep_group,
            ..LayerCostsKey::new(shape)
        };
        if let Some(known) = self.shared.borrow().get(&key) {
            return Rc::clone(known);
        }
        let shared = Rc::new(self.shared_with(shape, self.price_vocabulary(shape)));
        self.shared.borrow_mut().insert(key, Rc::clone(&shared));
        shared
    }

    fn shared_with(&self, shape: &Shape, vocab: VocabCost) -> Shared {
        let pricer = self.pricer();
        let bodies = self.bodies(shape);
        let kinds = self.layers.kinds.iter().zip(bodies.iter());
        let pieces = kinds.map(|(&kind, body)| pricer.pieces(kind, shape, body)).collect();
        Shared { pieces, chunks: RefCell::default(), ends: self.price_ends(shape, vocab) }
    }

    fn attention_chunks(&self, shape: &Shape, shared: &Shared) -> Rc<[AttentionChunks]> {
        let pricer = self.pricer();
        let of = |(&kind, pieces)| pricer.attention_chunks(kind, shape, pieces);
        let price = || self.layers.kinds.iter().zip(&shared.pieces).map(of).collect();
        let number = match shape.moe_overlap {
            MoeOverlap::Ampipe => shape.moe_overlap_degree,
            _ => 0,
        };
        Rc::clone(shared.chunks.borrow_mut().entry(number).or_insert_with(price))
    }

    fn bodies(&self, shape: &Shape) -> Rc<[Body]> {
        let split = &shape.split;
        let group = shape.recompute_group;
        let copies = fullest_copies(self.model, split.ep).to_bits();
        let cut = (split.tokens(self.model), split.tp, split.sequence_parallel, copies);
        let key = (cut, shape.dtype, group);
        let pricer = self.pricer();
        let price = || self.layers.kinds.iter().map(|&kind| pricer.body(kind, shape)).collect();
        Rc::clone(self.bodies.borrow_mut().entry(key).or_insert_with(price))
    }

    fn experts(&self, shape: &Shape) -> ExpertPieces {
        let split = &shape.split;
        let resident = split.resident_tokens(self.model);
        let degrees = [split.ep, split.etp, shape.moe_overlap_degree];
        let key = (resident, degrees, shape.moe_overlap, shape.dtype, shape.ep_group.clone());
        let pricer = self.pricer();
        *self.experts.borrow_mut().entry(key).or_insert_with(|| pricer.experts(shape))
    }

    /// Everything of the layer costs but the layers' own times.
    fn price_ends(&self, shape: &Shape, vocab: VocabCost) -> LayerCosts {
        let kinds = &self.layers.kinds;
        let tokens = shape.split.tokens(self.model) as f64;
        let resident = shape.split.resident_tokens(self.model) as f64;
        let e = shape.dtype.storage_bytes();
        let widest = self.model.mlp.ffn.max(2 * self.model.hidden) / shape.split.tp;
        let dense = |&kind: &LayerKind| layer_params(self.model, kind, &shape.split).dense;
        let largest = kinds.iter().map(dense).fold(0.0, f64::max);
        let placeholder_bytes = self.cluster.software.placeholder_bytes * largest;
        LayerCosts {
            layer: vec![],
            params: vec![],
            vocab,
            tokens,
            hidden_bytes: tokens * self.model.hidden as f64 * e,
            resident_bytes: resident * self.model.hidden as f64 * e,
            transient_bytes: 2.0 * e * tokens * widest as f64
                + placeholder_bytes
                + self.pricer().gathered_bytes(shape),
            recompute_choices: RefCell::default(),
        }
    }

    /// Vocabulary layers split over tensor-parallel ranks, not cached.
    pub fn vocabulary(&self, d: &Decisions) -> VocabCost {
        self.price_vocabulary(&self.shape(d))
    }

    fn price_vocabulary(&self, shape: &Shape) -> VocabCost {
        let rows = vocabulary_rows(self.model.vocab, shape.split.tp);
        self.pricer().vocabulary(shape, rows, &shape.tp_group)
    }

    /// What a group of recomputed layers keeps for its backward pass besides one layer's values,
    /// and the input of a group that a stage ends with.
    fn group_bytes(&self, shape: &Shape) -> f64 {
        if shape.recompute_group == 1 {
            return 0.0;
        }
        let pricer = self.pricer();
        let of = |&kind: &LayerKind| pricer.saved_bytes(kind, shape, Recompute::None);
        let largest = self.layers.kinds.iter().map(of).fold(0.0, f64::max);
        let more = (shape.recompute_group.min(self.layers.len() as u64) - 1) as f64;
        let full = |&kind: &LayerKind| pricer.saved_bytes(kind, shape, Recompute::Full);
        let input = self.layers.kinds.iter().map(full).fold(0.0, f64::max);
        more * largest + shape.recompute_group as f64 * input
    }

    /// Activations on their way to or from the host: those of the layer that moves, and those of
    /// the layer that computes meanwhile.
    fn transit_bytes(&self, shape: &Shape) -> f64 {
        if !shape.offload_activations {
            return 0.0;
        }
        let pricer = self.pricer();
        let of = |&kind: &LayerKind| pricer.saved_bytes(kind, shape, Recompute::None);
        2.0 * self.layers.kinds.iter().map(of).fold(0.0, f64::max)
    }
}
