//! Candidate partitions as the bounds see them: the layers of each pipeline rank, and the
//! micro-batches that a schedule keeps in flight there.

use super::super::pipeline_spec::PipelineSpec;
use super::super::recompute_knapsack::RecomputeKnapsack;
use super::super::states::StateView;
use super::super::workload::MicroBatchCost;
use crate::partition::{OrderMilestones, Pipeline};
use crate::pricing::layers::{Counts, Layers};
use crate::pricing::listed_cuts::{Ranges, few_cuts};
use models::decisions::Vocab;
use models::schedule::ScheduleName;
use std::rc::Rc;
use std::sync::Arc;

/// Candidate partitions for a number of pipeline ranks and chunks, whatever the schedule.
#[derive(Clone, Debug, PartialEq)]
pub struct Shapes {
    /// The layer ranges of each candidate.
    pub list: Vec<Ranges>,
    pub(super) shapes: Vec<Shape>,
    /// Candidates by the layers of their fullest rank, fewest first: the fastest is likely among
    /// the first.
    pub(super) evenest_first: Vec<usize>,
    /// Number of chunk groups in all candidates.
    alike: usize,
    /// Layers of the model.
    layers: usize,
}

/// One candidate partition.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Shape {
    /// By rank, layers of the first chunks of the ranks before it.
    pub before: Vec<Counts>,
    /// By rank, its chunks.
    pub ranks: Vec<RankChunks>,
    /// Ranks whose chain has to be computed. A rank is left out where the next one has the same
    /// layers: the next one starts later, so that its chain is no shorter.
    pub corners: Vec<usize>,
    /// Layers by stage.
    pub stages: Vec<Counts>,
    /// Distinct layer counts of the stages between the first and the last.
    pub inner: Vec<Counts>,
    /// The rank with most layers.
    pub fullest: usize,
}

/// What a pipeline rank holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct RankChunks {
    /// Layers of all chunks.
    pub layers: Counts,
    /// Chunks, grouped by their layers.
    pub alike: Vec<ChunkGroup>,
    /// Most layers of one kind in one chunk.
    pub longest: usize,
    /// Index of its first chunk group among those of all candidates.
    first: usize,
}

/// Chunks of a rank with the same layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ChunkGroup {
    pub layers: Counts,
    /// Number of chunks.
    pub chunks: f64,
}

impl Shapes {
    /// The candidates `list` on the ranks of a pipeline.
    pub fn new(layers: &Layers, spec: &PipelineSpec, list: Vec<Ranges>) -> Self {
        let mut alike = 0;
        let shape = |ranges| Shape::new(layers, spec, ranges, &mut alike);
        let shapes: Vec<Shape> = list.iter().map(shape).collect();
        let mut evenest_first: Vec<usize> = (0..shapes.len()).collect();
        evenest_first.sort_by_key(|&position: &usize| shapes[position].most_layers());
        Self { list, shapes, evenest_first, alike, layers: layers.len() }
    }
}

/// Candidate partitions on one pipeline, with the micro-batches in flight.
#[derive(Clone, Debug, PartialEq)]
pub struct ListedCuts {
    /// The candidates.
    pub shapes: Rc<Shapes>,
    /// By chunk group, its micro-batches in flight at one moment.
    alike_held: Vec<f64>,
    /// By rank, micro-batches in flight of the first and of the last chunk.
    pub(super) held: Vec<(f64, f64)>,
    /// By layer kind, the least sum over all ranks of layers times micro-batches in flight of any
    /// candidate.
    least_held: [f64; 4],
    /// The most micro-batches in flight of a recomputing layer on any rank, averaged over the
    /// layers that recompute on a rung of the ladder. Where every recompute split is allowed, the
    /// most of any chunk.
    most_held: f64,
    /// Whether nothing is known of what is in flight.
    pub(super) holds_nothing: bool,
    /// By rank, the most micro-batches in flight of a chunk, where every recompute split is
    /// allowed.
    pub(super) open: Option<Vec<f64>>,
    /// By rank, the milestones of its order; empty where the chains follow without them.
    pub(super) milestones: Vec<OrderMilestones>,
    /// By rank and chunk, the forwards and backwards that are no part of a pair; empty without
    /// pairs.
    alone: Vec<Vec<[f64; 2]>>,
}

impl ListedCuts {
    /// What [`Self::new`] needs of a pipeline: schedule, ranks, chunks, vocabulary placement, and
    /// the micro-batches as far as they limit what is in flight. Where milestones count, all
    /// micro-batches matter.
    pub fn key(spec: &PipelineSpec) -> ListedCutsKey {
        let unlimited = 2 * spec.ranks + 3;
        let whole = spec.schedule.is_whole();
        let m = match spec.micro_batches {
            _ if holds_all(spec) => 1,
            m if whole => m.min(unlimited),
            m => m,
        };
        let over_pipeline = spec.vocab.over_pipeline() && !whole;
        let vocab = if over_pipeline { spec.vocab } else { Vocab::Tensor };
        (spec.schedule, spec.ranks, spec.chunks, m, vocab)
    }

    /// Candidates on the pipeline that a key describes. `pipeline` is called only where the
    /// micro-batches in flight are unknown before the order of passes is generated.
    pub fn new(
        spec: &PipelineSpec,
        shapes: Rc<Shapes>,
        pipeline: impl FnOnce() -> Arc<Pipeline>,
    ) -> Self {
        if spec.order_depends_on_times() {
            // For other times than the usual, ranks hold at most one less of each chunk
            // (models/tests/schedule_generators.rs).
            let less = |held: usize| held.saturating_sub(1);
            let held = |held: &Vec<Vec<u32>>| fullest(held).into_iter().map(less).collect();
            let in_flight: Vec<_> = pipeline().in_flight.iter().map(held).collect();
            let any = OrderMilestones::of_any(spec.micro_batches, spec.chunks);
            return Self::with(spec, shapes, &in_flight, vec![any; spec.ranks]);
        }
        let spec = PipelineSpec { micro_batches: Self::key(spec).3, ..spec.clone() };
        if spec.is_known_without_order() {
            let counted = (0..spec.ranks).filter_map(|rank| spec.counted_milestones(rank));
            let counted = counted.collect();
            return Self::with(&spec, shapes, &held_by(&spec), counted);
        }
        let pipeline = pipeline();
        let in_flight: Vec<_> = pipeline.in_flight.iter().map(|held| fullest(held)).collect();
        let mut candidates = Self::with(&spec, shapes, &in_flight, pipeline.milestones.clone());
        if pipeline.has_pairs() {
            let of = |rank| (0..spec.chunks).map(|chunk| pipeline.alone(rank, chunk)).collect();
            candidates.alone = (0..spec.ranks).map(of).collect();
        }
        candidates
    }

    /// What the passes of a rank that are no part of a pair take longer than in pairs, s.
    pub(super) fn unpaired_s(
        &self,
        spec: &PipelineSpec,
        work: &MicroBatchCost,
        (shape, rank): (&Shape, usize),
    ) -> f64 {
        let Some(chunks) = self.alone.get(rank) else { return 0.0 };
        let of = |(chunk, counts): (usize, &[f64; 2])| {
            let layers = &shape.stages[spec.layout().stage_of(spec.ranks, rank, chunk)];
            let each_s = |part: usize| -> f64 {
                let kinds = work.kinds.iter().zip(layers);
                kinds.map(|(kind, &count)| count as f64 * kind.unpaired_s[part]).sum()
            };
            counts[0] * each_s(0) + counts[1] * each_s(1)
        };
        chunks.iter().enumerate().map(of).sum()
    }

    /// Candidates with the milestones that hold for any order, and nothing in flight.
    pub fn of_any(spec: &PipelineSpec, shapes: Rc<Shapes>) -> Self {
        let any = OrderMilestones::of_any(spec.micro_batches, spec.chunks);
        let nothing = vec![vec![0; spec.chunks]; spec.ranks];
        let mut candidates = Self::with(spec, shapes, &nothing, vec![any; spec.ranks]);
        if spec.schedule.has_pairs() && spec.copies() == 1 {
            candidates.alone = (0..spec.ranks).map(|rank| spec.unpaired(rank)).collect();
        }
        candidates
    }

    fn with(
        spec: &PipelineSpec,
        shapes: Rc<Shapes>,
        in_flight: &[Vec<usize>],
        milestones: Vec<OrderMilestones>,
    ) -> Self {
        let mut alike_held = Vec::with_capacity(shapes.alike);
        shapes.shapes.iter().for_each(|shape| shape.count_held(spec, in_flight, &mut alike_held));
        let end = |counts: &Vec<usize>| (counts[0] as f64, counts[spec.chunks - 1] as f64);
        let most = |counts: &Vec<usize>| counts.iter().copied().max().unwrap_or(1) as f64;
        let once = spec.chunks > 1 && spec.copies() == 1;
        let open = once && few_cuts(shapes.layers, spec.stages());
        let open: Option<Vec<f64>> = open.then(|| in_flight.iter().map(most).collect());
        let held = in_flight.iter().map(end).collect();
        let mut candidates = Self {
            shapes,
            alike_held,
            held,
            least_held: [0.0; 4],
            most_held: 1.0,
            holds_nothing: in_flight.iter().flatten().all(|&n| n == 0),
            open,
            milestones,
            alone: vec![],
        };
        candidates.least_held = [0, 1, 2, 3].map(|kind| candidates.least_held(kind));
        candidates.most_held = candidates.most_held();
        candidates
    }

    /// Micro-batches in flight of each chunk group of a rank.
    pub(super) fn held_on(&self, rank: &RankChunks) -> &[f64] {
        &self.alike_held[rank.first..rank.first + rank.alike.len()]
    }

    /// The least sum over all ranks of a candidate of a kind's layers times their micro-batches in
    /// flight.
    fn least_held(&self, kind: usize) -> f64 {
        let on = |rank: &RankChunks| -> f64 {
            let alike = rank.alike.iter().zip(self.held_on(rank));
            alike.map(|(alike, held)| held * alike.layers[kind] as f64).sum()
        };
        let of = |shape: &Shape| shape.ranks.iter().map(on).sum::<f64>();
        self.shapes.shapes.iter().map(of).fold(f64::INFINITY, f64::min)
    }

    fn most_held(&self) -> f64 {
        let ranks = || self.shapes.shapes.iter().flat_map(|shape| &shape.ranks);
        match &self.open {
            Some(most) => most.iter().copied().fold(1.0, f64::max),
            None => ranks().map(|rank| rank.most_held(self.held_on(rank))).fold(1.0, f64::max),
        }
    }

    /// Least recomputation of one micro-batch in the whole model, s, that memory makes necessary
    /// with several chunks per rank of `budget` bytes.
    ///
    /// Relaxation: the ranks share their memory. What exceeds the sum must be saved, and a second
    /// of recomputation on one rung in all chunks of a rank saves a layer's bytes at most as often
    /// as its layers are in flight on average. Bidirectional pipelines get the trivial bound.
    pub fn recompute_s(
        &self,
        spec: &PipelineSpec,
        work: &MicroBatchCost,
        knapsack: &RecomputeKnapsack,
        state: &StateView,
        budget: f64,
    ) -> f64 {
        let first_s = knapsack.at_first(&work.counts).0;
        if spec.copies() > 1 {
            return first_s;
        }
        let scale = if holds_all(spec) { spec.m() } else { 1.0 };
        let bytes = |(kind, held): (usize, &f64)| held * scale * knapsack.first_of(kind).1;
        let held: f64 = self.least_held.iter().take(work.kinds.len()).enumerate().map(bytes).sum();
        let states = state.bytes_of(work.params());
        let free = spec.ranks as f64 * budget * (1.0 + 1e-9) - states;
        let excess = (held - free) / (self.most_held * scale);
        if excess <= 0.0 { first_s } else { knapsack.saving_s(&work.counts, first_s, excess) }
    }
}

/// See [`ListedCuts::key`].
pub type ListedCutsKey = (ScheduleName, usize, usize, usize, Vocab);

/// By rank, micro-batches in flight of each chunk at a moment that every execution reaches.
fn held_by(spec: &PipelineSpec) -> Vec<Vec<usize>> {
    let held = |rank| {
        let mut counts = vec![];
        spec.in_flight(rank, &mut counts);
        counts
    };
    (0..spec.ranks).map(held).collect()
}

/// Micro-batches in flight of each chunk at the moment when there are most in all.
fn fullest(vectors: &[Vec<u32>]) -> Vec<usize> {
    let most = vectors.iter().max_by_key(|counts| counts.iter().sum::<u32>());
    most.map_or_else(Vec::new, |counts| counts.iter().map(|&n| n as usize).collect())
}

/// Whether all micro-batches are in flight at once. Counts are then kept for one micro-batch and
/// scaled.
pub(super) fn holds_all(spec: &PipelineSpec) -> bool {
    matches!(spec.schedule, ScheduleName::GPipe | ScheduleName::LoopedBfs)
}

impl Shape {
    /// `alike` counts the chunk groups so far.
    fn new(layers: &Layers, spec: &PipelineSpec, ranges: &Ranges, alike: &mut usize) -> Self {
        let p = spec.ranks;
        let mut ranks = vec![RankChunks::default(); p];
        let counts = |&(start, end): &(usize, usize)| layers.between(start, end);
        let stages: Vec<Counts> = ranges.iter().map(counts).collect();
        for (stage, &counts) in stages.iter().enumerate() {
            for copy in 0..spec.copies() {
                ranks[spec.layout().holder(p, stage, copy as u16).0].add(counts);
            }
        }
        for rank in &mut ranks {
            rank.first = *alike;
            *alike += rank.alike.len();
        }
        let mut sum = Counts::default();
        let mut before = vec![];
        for counts in ranges.iter().take(p).map(counts) {
            before.push(sum);
            sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        // Ranks at the ends differ by vocabulary and transfers, and are kept.
        let stands_for = |i: usize| i > 0 && i + 2 < p && ranks[i].layers == ranks[i + 1].layers;
        let corners = (0..p).filter(|&rank| !stands_for(rank)).collect();
        let fullest = (0..p).max_by_key(|&rank| ranks[rank].layers.iter().sum::<usize>());
        let mut inner: Vec<Counts> = stages.iter().copied().skip(1).collect();
        inner.pop();
        inner.sort_unstable();
        inner.dedup();
        Self { before, ranks, corners, stages, inner, fullest: fullest.unwrap_or(0) }
    }

    /// Layers of the fullest rank.
    fn most_layers(&self) -> usize {
        self.ranks[self.fullest].layers.iter().sum()
    }

    /// Appends the micro-batches in flight of each chunk group.
    fn count_held(&self, spec: &PipelineSpec, in_flight: &[Vec<usize>], held: &mut Vec<f64>) {
        let p = spec.ranks;
        for (rank, own) in self.ranks.iter().enumerate() {
            let chunks = |alike: &ChunkGroup| {
                let of = |chunk: usize| {
                    let stage = spec.layout().stage_of(p, rank, chunk);
                    if self.stages[stage] == alike.layers { in_flight[rank][chunk] } else { 0 }
                };
                (0..spec.chunks).map(of).sum::<usize>() as f64
            };
            held.extend(own.alike.iter().map(chunks));
        }
    }
}

impl RankChunks {
    fn add(&mut self, layers: Counts) {
        for (sum, count) in self.layers.iter_mut().zip(layers) {
            *sum += count;
            self.longest = self.longest.max(count);
        }
        match self.alike.iter_mut().find(|alike| alike.layers == layers) {
            Some(alike) => alike.chunks += 1.0,
            None => self.alike.push(ChunkGroup { layers, chunks: 1.0 }),
        }
    }

    /// The most micro-batches in flight of a recomputing layer, averaged over the layers that
    /// recompute on a rung: on rung `rung` the first `rung` layers of each chunk do.
    fn most_held(&self, held: &[f64]) -> f64 {
        let mut most = 1.0_f64;
        let alike = || self.alike.iter().zip(held);
        for kind in 0..Counts::default().len() {
            for rung in 1..=self.longest {
                let layers = |alike: &ChunkGroup| alike.layers[kind].min(rung) as f64;
                let all: f64 = alike().map(|(a, _)| a.chunks * layers(a)).sum();
                let held: f64 = alike().map(|(a, held)| held * layers(a)).sum();
                most = if all > 0.0 { most.max(held / all) } else { most };
            }
        }
        // Between two rungs, one more layer of the longest chunks alone.
        alike().map(|(alike, held)| held / alike.chunks).fold(most, f64::max)
    }
}
