//! What all cases of one request share: the model's layers, the cluster's domains, and what has
//! already been priced.

use super::layers::Layers;
use super::listed_cuts::{
    CutList, Ranges, even_counts, every_cut, few_cuts, lighter_ends, to_ranges,
};
use super::pipelines::{PipelineKey, Pipelines};
use super::recompute_split::{self as recompute_choices, RecomputeCost};
use crate::cost::collective::{self, Collective};
use crate::cost::layer::{Body, ExpertPieces, LayerCost, LayerPricer, Pieces, Shape};
use crate::cost::layer::{ThreePasses, VocabCost};
use crate::cost::state::{LocalParams, layer_params};
use crate::partition::Pipeline;
use crate::request::space::divisors;
use models::cluster::ClusterSpec;
use models::decisions::{Decisions, Dtype, MoeOverlap, RankOrder, Recompute, Vocab};
use models::formulas::vocabulary;
use models::layer::Split;
use models::mesh::{Axis, GroupShape, Mesh};
use models::model::{LayerKind, ModelSpec, params};
use models::schedule::ScheduleError;
use rustc_hash::FxHashMap as HashMap;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// Tokens of a rank, tensor-parallel degree, sequence parallelism and number format.
type BodyKey = (u64, u64, bool, Dtype);

/// A model on a cluster of a given size, with memory of what was priced.
#[derive(Debug)]
pub struct CostCache<'a> {
    /// The model.
    pub model: &'a ModelSpec,
    /// The cluster.
    pub cluster: &'a ClusterSpec,
    /// GPUs.
    pub gpus: u64,
    /// The model's layers by kind.
    pub layers: Layers,
    /// GPUs in a domain of each link level.
    pub domains: Vec<u64>,
    pipelines: Arc<Pipelines>,
    layer_costs: RefCell<HashMap<LayerCostsKey, Rc<LayerCosts>>>,
    floors: RefCell<HashMap<LayerCostsKey, Rc<LayerCosts>>>,
    /// By everything but the split of experts.
    shared: RefCell<HashMap<LayerCostsKey, Rc<Shared>>>,
    /// By tokens of a rank, tensor-parallel degree, sequence parallelism and number format: by kind.
    bodies: RefCell<HashMap<BodyKey, Rc<[Body]>>>,
    experts: RefCell<HashMap<ExpertKey, ExpertPieces>>,
    /// By resident tokens, tensor-parallel degree and number format.
    expert_floors: RefCell<HashMap<(u64, u64, Dtype), ThreePasses>>,
    lines: RefCell<HashMap<(Collective, GroupShape), (f64, f64)>>,
    vocab_shards: RefCell<HashMap<(LayerCostsKey, u64), VocabCost>>,
}

/// Prices of one way to split a micro-batch, by layer kind.
#[derive(Clone, Debug)]
pub struct LayerCosts {
    /// Cost of a layer, by kind.
    pub layer: Vec<LayerCost>,
    /// Parameters of a layer on one rank, by kind.
    pub params: Vec<LocalParams>,
    /// Vocabulary layers split over tensor-parallel ranks.
    pub vocab: VocabCost,
    /// Tokens a rank holds of a micro-batch.
    pub tokens: f64,
    /// Bytes of the hidden states of one micro-batch on one rank.
    pub hidden_bytes: f64,
    /// The part of them that a rank holds between layers: with sequence parallelism, of its tokens.
    pub resident_bytes: f64,
    /// Largest temporaries of a layer's backward pass: gradients of the widest activations, and what stands for
    /// those of weights.
    pub transient_bytes: f64,
    recompute_choices: RefCell<KnownMixes>,
}

/// Resident tokens, expert-parallel degrees, number format and expert-parallel group.
type ExpertKey = (u64, u64, u64, Dtype, GroupShape);

/// Sheets that are kept, a kilobyte or two each.
const MOST_LAYER_COSTS: usize = 1 << 14;

/// What all splits of the experts have in common.
#[derive(Debug)]
struct Shared {
    /// By kind.
    pieces: Vec<Pieces>,
    /// Everything but the layers.
    ends: LayerCosts,
}

/// Undominated mixes by layers of each kind and what is allowed.
type KnownMixes = HashMap<(Vec<usize>, Recompute), Rc<Vec<RecomputeCost>>>;

impl LayerCosts {
    /// Recompute mixes that no other beats, of a stage with so many layers of each kind.
    pub fn recompute_choices(
        &self,
        counts: Vec<usize>,
        allowed: Recompute,
    ) -> Rc<Vec<RecomputeCost>> {
        let key = (counts, allowed);
        if let Some(known) = self.recompute_choices.borrow().get(&key) {
            return Rc::clone(known);
        }
        let found = Rc::new(recompute_choices::undominated(&self.layer, &key.0, allowed));
        self.recompute_choices.borrow_mut().insert(key, Rc::clone(&found));
        found
    }
}

/// What prices of layers depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LayerCostsKey {
    split: Split,
    cp_style: models::decisions::CpStyle,
    moe_overlap: MoeOverlap,
    moe_overlap_degree: u64,
    dtype: Dtype,
    ep_group: GroupShape,
}

impl LayerCostsKey {
    fn new(shape: &Shape) -> Self {
        Self {
            split: shape.split,
            cp_style: shape.cp_style,
            moe_overlap: shape.moe_overlap,
            moe_overlap_degree: shape.moe_overlap_degree,
            dtype: shape.dtype,
            ep_group: shape.ep_group.clone(),
        }
    }
}

impl<'a> CostCache<'a> {
    /// Nothing priced yet.
    pub fn new(model: &'a ModelSpec, cluster: &'a ClusterSpec, gpus: u64) -> Self {
        Self {
            model,
            cluster,
            gpus,
            layers: Layers::new(model),
            domains: cluster.level_sizes(gpus),
            pipelines: Arc::default(),
            layer_costs: RefCell::default(),
            floors: RefCell::default(),
            shared: RefCell::default(),
            bodies: RefCell::default(),
            experts: RefCell::default(),
            expert_floors: RefCell::default(),
            vocab_shards: RefCell::default(),
            lines: RefCell::default(),
        }
    }

    /// The same with pipelines that other threads share.
    pub fn sharing(self, pipelines: Arc<Pipelines>) -> Self {
        Self { pipelines, ..self }
    }

    /// Whether the schedule of decisions exists for their counts.
    ///
    /// # Errors
    /// It does not.
    pub fn check_pipeline(&self, d: &Decisions) -> Result<(), ScheduleError> {
        let (devices, chunks) = (d.pp as usize, d.vpp as usize);
        d.schedule.check(devices, d.micro_batches as usize, chunks)
    }

    /// The pipeline of decisions that [`Self::check_pipeline`] approves.
    pub fn pipeline(&self, d: &Decisions) -> Arc<Pipeline> {
        self.pipelines.get(PipelineKey::new(d))
    }

    /// The pipeline of a key whose counts its schedule approves.
    pub fn pipeline_of(&self, key: PipelineKey) -> Arc<Pipeline> {
        self.pipelines.get(key)
    }

    /// What the prices of the layers under decisions depend on.
    pub fn layer_costs_key(&self, d: &Decisions) -> LayerCostsKey {
        LayerCostsKey::new(&self.shape(d))
    }

    /// Prices of the layers under decisions.
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

    /// Prices that no split of the experts undercuts. Whether a split folds into the context's ranks is not
    /// asked, so that contexts that differ in pipeline and replicas share them.
    pub fn floor_layer_costs(&self, d: &Decisions) -> Rc<LayerCosts> {
        let shape = self.shape(&Decisions { ep: 1, etp: 1, ..d.clone() });
        let key = LayerCostsKey::new(&shape);
        if let Some(layer_costs) = self.floors.borrow().get(&key) {
            return Rc::clone(layer_costs);
        }
        let pricer = LayerPricer { model: self.model, cluster: self.cluster };
        let experts = self.expert_floor(&shape);
        let floor = |(&kind, pieces): (&LayerKind, &Pieces)| {
            pricer.layer_floor(kind, &shape, pieces, experts)
        };
        let shared = self.price_shared(&shape);
        let layer = self.layers.kinds.iter().zip(&shared.pieces).map(floor).collect();
        let layer_costs = Rc::new(self.layer_costs_of(layer, &shape, &shared));
        self.floors.borrow_mut().insert(key, Rc::clone(&layer_costs));
        layer_costs
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
            let pricer = LayerPricer { model: self.model, cluster: self.cluster };
            pricer.expert_floor(shape, &splits)
        };
        *self.expert_floors.borrow_mut().entry(key).or_insert_with(price)
    }

    /// The layer ranges of a list; none with an empty stage where the ends hold no vocabulary layers instead.
    pub fn listed_ranges(&self, list: CutList, stages: usize, vocab: Vocab) -> Vec<Ranges> {
        let layers = self.layers.len();
        let counts = match list {
            CutList::Even => vec![even_counts(layers, stages)],
            CutList::Redis => vec![self.redis_counts(stages)],
            CutList::Family if few_cuts(layers, stages) => every_cut(layers, stages),
            CutList::Family => {
                let mut family = lighter_ends(layers, stages);
                family.push(self.redis_counts(stages));
                family.sort_unstable();
                family.dedup();
                family
            }
        };
        let full = |counts: &Vec<usize>| !vocab.over_pipeline() || !counts.contains(&0);
        counts.into_iter().filter(full).map(to_ranges).collect()
    }

    /// Layer redistribution by the compute ratio of output layer and layer (Vocabulary Parallelism,
    /// section 3; its appendix's FLOP counts).
    fn redis_counts(&self, stages: usize) -> Vec<usize> {
        let (vocab, hidden) = (self.model.vocab as f64, self.model.hidden as f64);
        let seq_len = self.model.seq_len as f64;
        let ratio = vocabulary::output_compute_ratio(vocab, hidden, seq_len);
        let input = vocabulary::input_compute_ratio(hidden, seq_len);
        let layers = self.layers.len() as u64;
        let (_, counts) = vocabulary::redis(layers, stages as u64, input, ratio);
        counts.into_iter().map(|count| count as usize).collect()
    }

    /// How decisions split one micro-batch, with the groups it communicates in.
    pub fn shape(&self, d: &Decisions) -> Shape {
        let mesh = Mesh::new(d);
        let group = |size, stride| GroupShape::strided(size, stride, &self.domains);
        // Without experts the order of the outer axes cannot matter to a layer.
        let ep_mesh = if d.ep == 1 { Mesh { order: RankOrder::DpInner, ..mesh } } else { mesh };
        Shape {
            split: Split {
                tp: d.tp,
                cp: d.cp,
                cp_ulysses: d.cp_ulysses,
                ep: d.ep,
                etp: d.etp,
                sequence_parallel: d.sequence_parallel,
                micro_batch: d.micro_batch,
            },
            cp_style: d.cp_style,
            moe_overlap: d.moe_overlap,
            moe_overlap_degree: d.moe_overlap_degree,
            dtype: d.dtype,
            tp_group: group(d.tp, 1),
            cp_group: group(d.cp, mesh.stride(Axis::Cp)),
            ep_group: ep_mesh.expert_group(d.ep, d.etp, &self.domains),
            etp_group: group(d.etp, 1),
        }
    }

    /// Prices of the layers under decisions, not remembered: for those who look at many splits of experts.
    pub fn price_of(&self, d: &Decisions) -> LayerCosts {
        self.price(&self.shape(d))
    }

    fn price(&self, shape: &Shape) -> LayerCosts {
        let pricer = LayerPricer { model: self.model, cluster: self.cluster };
        let shared = self.shared(shape);
        let dense = self.model.moe.is_none();
        let experts = if dense { ExpertPieces::default() } else { self.experts(shape) };
        let layer =
            |(&kind, pieces): (&LayerKind, &Pieces)| pricer.layer_of(kind, shape, pieces, &experts);
        let layers = self.layers.kinds.iter().zip(&shared.pieces).map(layer).collect();
        self.layer_costs_of(layers, shape, &shared)
    }

    fn layer_costs_of(&self, layer: Vec<LayerCost>, shape: &Shape, shared: &Shared) -> LayerCosts {
        let params = |&kind: &LayerKind| layer_params(self.model, kind, &shape.split);
        LayerCosts {
            layer,
            params: self.layers.kinds.iter().map(params).collect(),
            vocab: shared.ends.vocab,
            tokens: shared.ends.tokens,
            hidden_bytes: shared.ends.hidden_bytes,
            resident_bytes: shared.ends.resident_bytes,
            transient_bytes: shared.ends.transient_bytes,
            recompute_choices: RefCell::default(),
        }
    }

    /// What all splits of the experts have in common.
    fn shared(&self, shape: &Shape) -> Rc<Shared> {
        let split = Split { ep: 1, etp: 1, ..shape.split };
        let ep_group = GroupShape { within: vec![] };
        let overlap = (MoeOverlap::None, 1);
        let (moe_overlap, moe_overlap_degree) = overlap;
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
        let shared = Rc::new(self.price_shared(shape));
        self.shared.borrow_mut().insert(key, Rc::clone(&shared));
        shared
    }

    fn price_shared(&self, shape: &Shape) -> Shared {
        let pricer = LayerPricer { model: self.model, cluster: self.cluster };
        let bodies = self.bodies(shape);
        let kinds = self.layers.kinds.iter().zip(bodies.iter());
        let pieces = kinds.map(|(&kind, body)| pricer.pieces(kind, shape, body)).collect();
        Shared { pieces, ends: self.price_ends(shape) }
    }

    fn bodies(&self, shape: &Shape) -> Rc<[Body]> {
        let split = &shape.split;
        let key = (split.tokens(self.model), split.tp, split.sequence_parallel, shape.dtype);
        let pricer = LayerPricer { model: self.model, cluster: self.cluster };
        let price = || self.layers.kinds.iter().map(|&kind| pricer.body(kind, shape)).collect();
        Rc::clone(self.bodies.borrow_mut().entry(key).or_insert_with(price))
    }

    fn experts(&self, shape: &Shape) -> ExpertPieces {
        let split = &shape.split;
        let resident = split.resident_tokens(self.model);
        let key = (resident, split.ep, split.etp, shape.dtype, shape.ep_group.clone());
        let pricer = LayerPricer { model: self.model, cluster: self.cluster };
        *self.experts.borrow_mut().entry(key).or_insert_with(|| pricer.experts(shape))
    }

    /// Everything of a sheet but the layers' times.
    fn price_ends(&self, shape: &Shape) -> LayerCosts {
        let pricer = LayerPricer { model: self.model, cluster: self.cluster };
        let kinds = &self.layers.kinds;
        let tokens = shape.split.tokens(self.model) as f64;
        let resident = shape.split.resident_tokens(self.model) as f64;
        let e = shape.dtype.storage_bytes();
        let widest = self.model.mlp.ffn.max(2 * self.model.hidden) / shape.split.tp;
        let params: Vec<LocalParams> =
            kinds.iter().map(|&kind| layer_params(self.model, kind, &shape.split)).collect();
        let largest = params.iter().map(|params| params.dense).fold(0.0, f64::max);
        let placeholder_bytes = self.cluster.software.placeholder_bytes * largest;
        LayerCosts {
            layer: vec![],
            params,
            vocab: pricer.vocabulary(shape, shape.split.tp, &shape.tp_group),
            tokens,
            hidden_bytes: tokens * self.model.hidden as f64 * e,
            resident_bytes: resident * self.model.hidden as f64 * e,
            transient_bytes: 2.0 * e * tokens * widest as f64 + placeholder_bytes,
            recompute_choices: RefCell::default(),
        }
    }

    /// Vocabulary layers split over tensor-parallel ranks and pipeline devices.
    pub fn vocabulary_over_pipeline(&self, d: &Decisions) -> VocabCost {
        let shape = self.shape(d);
        let key = (LayerCostsKey::new(&shape), d.pp);
        if let Some(known) = self.vocab_shards.borrow().get(&key) {
            return *known;
        }
        let pricer = LayerPricer { model: self.model, cluster: self.cluster };
        let cost = pricer.vocabulary(&shape, d.tp * d.pp, &shape.tp_group);
        self.vocab_shards.borrow_mut().insert(key, cost);
        cost
    }

    /// A line below the time of a collective at any size up to `MOST_BYTES`: seconds, and seconds a byte.
    ///
    /// Between two sampled sizes the time is at least the smaller's and the bytes at most the larger's,
    /// because collectives never get faster with size. The slope is a little less than the least time a
    /// byte, so that what small sizes take longer is left for the line's start.
    pub fn collective_line(&self, op: Collective, group: &GroupShape) -> (f64, f64) {
        const MOST_BYTES: f64 = 1e13;
        const STEP: f64 = 1.03;
        const SLOPE: f64 = 0.98;
        if group.size() == 1 {
            return (0.0, 0.0);
        }
        let key = (op, group.clone());
        if let Some(&known) = self.lines.borrow().get(&key) {
            return known;
        }
        let sizes = std::iter::successors(Some(1.0), |bytes| Some(bytes * STEP));
        let times: Vec<(f64, f64)> = sizes
            .take_while(|&bytes| bytes < MOST_BYTES)
            .map(|bytes| (bytes * STEP, collective::time_s(self.cluster, op, bytes, group)))
            .collect();
        let least = |value: &dyn Fn(f64, f64) -> f64| {
            times.iter().map(|&(bytes, s)| value(bytes, s)).fold(f64::INFINITY, f64::min)
        };
        let slope = SLOPE * least(&|bytes, s| s / bytes);
        let line = (least(&|bytes, s| s - slope * bytes).max(0.0), slope);
        self.lines.borrow_mut().insert(key, line);
        line
    }

    /// Embedding with learned positions, and output matrix where it is not the embedding: parameters
    /// of one of `ways` shards.
    pub fn vocab_params(&self, ways: u64) -> (f64, f64) {
        let rows = (self.model.vocab.div_ceil(ways) * self.model.hidden) as f64;
        let positions = params::positions(self.model) as f64;
        (rows + positions, rows)
    }
}
