//! Inputs of the bounds: one micro-batch in seconds and bytes by layer kind, and the pipeline it
//! runs on.

use crate::cost::state::LocalParams;
use crate::partition::{OrderMilestones, VocabWay};
use crate::pricing::cost_cache::{CostCache, LayerCosts};
use crate::pricing::pipelines::PipelineKey;
use crate::pricing::recompute_split::options;
use crate::pricing::stage_transfers::{
    P2pTransfer, gap_s, p2p_transfer, slowdown_beside_passes, transfer_blocks, vocab_passes,
    vocab_way,
};
use models::decisions::{Decisions, RecomputePolicy, Vocab};
use models::schedule::{ScheduleName, StageLayout, VocabPasses};
use std::rc::Rc;

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
    /// What a forward and a backward take longer that are no part of a pair, s.
    pub alone_s: [f64; 2],
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
            alone_s: layer.alone_s,
            recompute_s: layer.recompute.map(|parts| parts.total_s()),
            saved_bytes: layer.saved_bytes,
            params,
        };
        let vocab = &layer_costs.vocab;
        let (embedding_params, head_params) = cache.vocab_params(d.tp);
        let received = if d.pp > 1 { 2.0 * layer_costs.resident_bytes } else { 0.0 };
        Self {
            kinds: layer_costs.layer.iter().zip(&layer_costs.params).map(kind).collect(),
            counts: cache.layers.counts(0, cache.layers.len()),
            embedding: VocabEnd {
                forward_s: vocab.embed_forward.total_s(),
                backward_s: vocab.embed_backward.total_s(),
                weight_s: 0.0,
                params: embedding_params,
                in_flight_bytes: vocab.embed_saved_bytes,
                workspace_bytes: 0.0,
            },
            head: VocabEnd {
                forward_s: vocab.head_forward.total_s(),
                backward_s: (vocab.head_backward_input + vocab.head_backward_weight).total_s(),
                weight_s: vocab.head_backward_weight.total_s(),
                params: head_params,
                in_flight_bytes: vocab.head_saved_bytes,
                workspace_bytes: vocab.logits_bytes,
            },
            tied: cache.model.tied_embeddings,
            workspace_bytes: layer_costs.transient_bytes + received,
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
            least(&mut kind.alone_s, &other.alone_s);
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

    /// Parameters of all layers.
    pub fn params(&self) -> LocalParams {
        let all = self.kinds.iter().zip(&self.counts);
        all.fold(LocalParams::default(), |sum, (kind, &count)| sum + kind.params * count as f64)
    }
}

/// The most pipeline ranks that hold one stage.
pub const MAX_COPIES: usize = 2;

/// A pipeline as the bounds see it.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelineSpec {
    /// Order of passes.
    pub schedule: ScheduleName,
    /// Pipeline ranks, `p`.
    pub ranks: usize,
    /// Chunks per rank, `v`.
    pub chunks: usize,
    /// Micro-batches, `m`.
    pub micro_batches: usize,
    /// Lower bounds on the transfers between neighbouring ranks.
    pub transfers: Rc<P2pTransfer>,
    /// Upper bound on any of them, s.
    pub most_transfer_s: f64,
    /// Whether the transfer is part of both stages' passes; otherwise it is a latency.
    pub transfer_blocks: bool,
    /// The gap with which every pass starts, s.
    pub gap_s: f64,
    /// Where the vocabulary lives.
    pub vocab: Vocab,
    /// Vocabulary passes on each rank; the first and the last stage then hold no vocabulary layer.
    pub passes: Option<VocabWay>,
    /// What may be recomputed.
    pub recompute: RecomputePolicy,
}

impl PipelineSpec {
    /// The pipeline of `d`.
    pub fn new(cache: &CostCache<'_>, d: &Decisions, layer_costs: &LayerCosts) -> Self {
        let transfers = p2p_transfer(cache, d, layer_costs);
        Self {
            schedule: d.schedule,
            ranks: d.pp as usize,
            chunks: d.vpp as usize,
            micro_batches: d.micro_batches as usize,
            most_transfer_s: transfers.most_s(),
            transfers: Rc::new(transfers),
            transfer_blocks: transfer_blocks(cache, d),
            gap_s: gap_s(cache, d),
            vocab: d.vocab,
            passes: vocab_way(cache, d, layer_costs),
            recompute: d.recompute,
        }
    }

    /// Micro-batches, `m`.
    pub fn m(&self) -> f64 {
        self.micro_batches as f64
    }

    /// Number of ranks that hold each stage.
    pub fn copies(&self) -> usize {
        self.layout().copies()
    }

    /// Micro-batches that a rank runs of each of its chunks.
    pub fn runs(&self) -> f64 {
        self.m() / self.copies() as f64
    }

    /// Whether micro-batches in flight and milestones are known without generating the order of
    /// passes.
    pub fn is_known_without_order(&self) -> bool {
        let closed = self.schedule.is_whole() && self.copies() == 1;
        closed || self.counted_milestones(0).is_some()
    }

    /// The algorithm of its vocabulary passes.
    pub fn vocab_passes(&self) -> Option<VocabPasses> {
        self.passes.and_then(|_| self.vocab.passes())
    }

    /// Whether the order of forwards and backwards depends on the configuration's own times.
    pub fn order_depends_on_times(&self) -> bool {
        self.vocab_passes().is_some() && self.schedule.room_depends_on_times()
    }

    /// Seconds of the vocabulary passes of a micro-batch, without those of the input layer alone.
    pub fn output_s(&self) -> f64 {
        self.passes.map_or(0.0, |way| way.output_s)
    }

    /// Seconds of the vocabulary passes of one micro-batch.
    pub fn passes_s(&self) -> f64 {
        self.passes.map_or(0.0, |way| way.passes_s)
    }

    /// Stages: p·v, or half as many on a bidirectional pipeline.
    pub fn stages(&self) -> usize {
        self.layout().stages(self.ranks, self.chunks)
    }

    /// Stages of a rank that hold parameters, at least: where the first and the last stage share a
    /// table, the last one may hold nothing.
    pub fn least_stages(&self) -> usize {
        if self.ends_meet() { 1 } else { self.chunks }
    }

    /// Which rank holds which stage.
    pub fn layout(&self) -> StageLayout {
        self.schedule.layout(self.chunks)
    }

    /// Whether the first and the last stage share their parameters ([`Self::layout`]).
    pub fn ends_meet(&self) -> bool {
        self.layout().ends_meet(self.ranks, self.stages())
    }

    /// The transfer from `stage` to the next one, s; 0 where both lie on one rank, or there is
    /// none.
    pub fn transfer_s(&self, stage: usize) -> f64 {
        let exists = self.ranks > 1 && stage + 1 < self.stages();
        if exists { self.transfers.behind_s(self.layout(), self.ranks, stage) } else { 0.0 }
    }

    /// The transfers of one micro-batch's forward path from the first stage to `stage`, s.
    pub fn transfers_to_s(&self, stage: usize) -> f64 {
        (0..stage).map(|before| self.transfer_s(before)).sum()
    }

    /// The transfers of one micro-batch's forward path through all stages, s.
    pub fn transfers_s(&self) -> f64 {
        match self.ranks {
            1 => 0.0,
            ranks => self.transfers.along_s(self.layout(), ranks, self.stages()),
        }
    }

    /// Those of them that are part of passes, s.
    pub fn blocking_s(&self) -> f64 {
        if self.transfer_blocks { self.transfers_s() } else { 0.0 }
    }

    /// Blocking transfers in the forward and in the backward of a stage, s.
    pub fn crossings_s(&self, stage: usize) -> (f64, f64) {
        if !self.transfer_blocks {
            return (0.0, 0.0);
        }
        (if stage > 0 { self.transfer_s(stage - 1) } else { 0.0 }, self.transfer_s(stage))
    }

    /// Upper bound on the blocking transfers in one pass, s.
    pub fn most_crossing_s(&self) -> f64 {
        if self.transfer_blocks && self.ranks > 1 { self.most_transfer_s } else { 0.0 }
    }

    /// The gaps of one micro-batch on one stage, s: of its forward, its backward, and its weight
    /// gradients where these are separate.
    pub fn gaps_s(&self) -> [f64; 3] {
        [self.gap_s, self.gap_s, if self.splits_backward() { self.gap_s } else { 0.0 }]
    }

    /// Whether the backward is split into input and weight gradients.
    pub fn splits_backward(&self) -> bool {
        self.schedule.splits_backward()
    }

    /// Micro-batches in flight on a rank of 1F1B that would hold `plain` without vocabulary passes.
    fn held_by_1f1b(&self, plain: usize) -> usize {
        let held = self.vocab.passes().map_or(plain, |passes| passes.in_flight(plain));
        held.min(self.micro_batches)
    }

    /// Indices into `Recompute::ALL` that layers may use.
    pub fn options(&self) -> &'static [usize] {
        options(self.recompute)
    }

    /// The key of its order of passes.
    pub fn key(&self) -> PipelineKey {
        PipelineKey {
            schedule: self.schedule,
            ranks: self.ranks,
            micro_batches: self.micro_batches,
            chunks: self.chunks,
            vocab: if self.vocab.over_pipeline() { self.vocab } else { Vocab::Tensor },
            post_validation: false,
            pass_times: None,
        }
    }

    /// The schedule whose order of passes it has: without vocabulary passes, two names may share
    /// one order.
    pub fn order(&self) -> ScheduleName {
        let Self { schedule, ranks, micro_batches, chunks, .. } = *self;
        let other = schedule.made_by_hand(ranks, micro_batches, chunks);
        other.filter(|_| self.passes.is_none()).unwrap_or(schedule)
    }

    /// Milestones of a rank's order, where they can be counted without generating it.
    pub fn counted_milestones(&self, rank: usize) -> Option<OrderMilestones> {
        let counts = (self.ranks, self.micro_batches, self.chunks);
        OrderMilestones::counted(self.order(), counts, rank, self.vocab_passes())
    }

    /// Micro-batches in flight of each chunk of a rank at a moment that every execution reaches:
    /// the end of its warm-up.
    pub fn in_flight(&self, rank: usize, counts: &mut Vec<usize>) {
        let (p, v, m) = (self.ranks, self.chunks, self.micro_batches);
        // Vocabulary passes need one more micro-batch in flight for each barrier.
        let room = self.vocab_passes().map_or(0, VocabPasses::barriers);
        // Of so many forwards, those of each chunk.
        let in_rounds = |forwards: usize| {
            let (rounds, rest) = (forwards.min(m * v) / (p * v), forwards.min(m * v) % (p * v));
            (0..v).map(move |chunk| rounds * p + rest.saturating_sub(chunk * p).min(p))
        };
        counts.clear();
        match self.order() {
            ScheduleName::Naive => counts.resize(v, 1),
            ScheduleName::GPipe | ScheduleName::LoopedBfs => counts.resize(v, m),
            ScheduleName::OneFOneB => counts.resize(v, self.held_by_1f1b(p - rank)),
            ScheduleName::Interleaved1F1B => {
                counts.extend(in_rounds(2 * (p - 1 - rank) + (v - 1) * p + 1));
            }
            ScheduleName::ZbH1 => counts.resize(v, (p + room).min(m)),
            ScheduleName::ZbH2 => counts.resize(v, (2 * p - 1 + room).min(m)),
            // The forwards before the first weight gradients.
            ScheduleName::InterleavedZb => counts.extend(in_rounds((p + room) * v)),
            // The forwards before the first micro-batch is back: the memory limit leaves each rank
            // fewer than the one before.
            ScheduleName::ZbAuto if v == 1 && self.passes.is_none() => {
                counts.resize(v, (p - rank).min(m));
            }
            // Counted from the generated order (`ListedCuts::new`).
            _ => counts.resize(v, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use models::schedule::Release;

    fn spec(schedule: ScheduleName, (p, m): (usize, usize), vocab: Vocab) -> PipelineSpec {
        PipelineSpec {
            schedule,
            ranks: p,
            chunks: 1,
            micro_batches: m,
            transfers: Rc::new(P2pTransfer::none()),
            most_transfer_s: 0.0,
            transfer_blocks: false,
            gap_s: 0.0,
            vocab,
            passes: vocab.over_pipeline().then(VocabWay::default),
            recompute: RecomputePolicy::None,
        }
    }

    #[test]
    fn counted_micro_batches_in_flight_are_a_lower_bound() {
        let mut least = 0;
        let plain = |schedule| (schedule, Vocab::Tensor);
        let over = [Vocab::ParallelNaive, Vocab::Parallel1, Vocab::Parallel2, Vocab::Interlaced];
        let split = [ScheduleName::ZbH1, ScheduleName::ZbH2, ScheduleName::InterleavedZb];
        let kinds = [&split[..], &[ScheduleName::ZbAuto]].concat().into_iter().map(plain);
        let with_passes = split.into_iter().flat_map(|s| over.map(|vocab| (s, vocab)));
        let kinds: Vec<_> = kinds.chain(with_passes).collect();
        for (p, m) in (2..=9).flat_map(|p| (1..=24).map(move |m| (p, m))) {
            for &(schedule, vocab) in &kinds {
                let chunks = if schedule == ScheduleName::InterleavedZb { 2 } else { 1 };
                let spec = PipelineSpec { chunks, ..spec(schedule, (p, m), vocab) };
                let Ok(order) = spec.key().schedule() else { continue };
                for rank in 0..p {
                    let mut counts = vec![];
                    spec.in_flight(rank, &mut counts);
                    let held = order.max_in_flight(rank, Release::AtW);
                    let is_reached = |held: &Vec<u32>| {
                        counts.iter().zip(held).all(|(count, held)| *count <= *held as usize)
                    };
                    let what = format!("{schedule} {vocab} p {p} m {m} rank {rank}");
                    assert!(held.iter().any(is_reached), "{what}: {counts:?} of {held:?}");
                    least += counts[0];
                }
            }
        }
        assert!(least > 60_000, "{least}");
    }
}
