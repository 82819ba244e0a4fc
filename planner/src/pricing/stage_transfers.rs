//! What runs between a pipeline's stages: transfers, and vocabulary passes where every rank has a
//! shard.

use super::cost_cache::{CostCache, LayerCosts};
use super::vocab_times::placed_by_times;
use crate::cost::collective::{self, Collective};
use crate::cost::parts::Parts;
use crate::partition::VocabPath;
use crate::simulate::{InputDurations, VocabDurations};
use models::decisions::{Decisions, Vocab};
use models::mesh::{Axis, GroupShape, Mesh};
use models::schedule::{PassRatios, PassTimes, ScheduleName, StageLayout};

/// Point-to-point transfer of a micro-batch's hidden states to the next stage.
#[derive(Clone, Debug, PartialEq)]
pub struct P2pTransfer {
    /// Time from each pipeline rank to the next, s; the last entry is from the last rank to the
    /// first. A single entry where all are equal.
    times_s: Vec<f64>,
    /// Whether the receiver waits idle, so that the transfer is part of its pass. Otherwise it is a
    /// latency.
    pub(crate) blocks: bool,
}

impl P2pTransfer {
    /// No transfer.
    pub(crate) fn none() -> Self {
        Self { times_s: vec![0.0], blocks: true }
    }

    /// The componentwise minimum of two.
    pub(crate) fn least(self, other: &Self) -> Self {
        let ranks = self.times_s.len().max(other.times_s.len());
        let of = |own: &Self, rank: usize| own.times_s[if own.is_alike() { 0 } else { rank }];
        let times_s = (0..ranks).map(|rank| of(&self, rank).min(of(other, rank))).collect();
        Self { times_s, ..self }
    }

    /// Whether all ranks are equally far from the next.
    pub(crate) fn is_alike(&self) -> bool {
        self.times_s.len() == 1
    }

    /// Seconds between a stage and the next, 0 on one rank. In a bidirectional pipeline, the longer
    /// of the two directions.
    pub(crate) fn behind_s(&self, layout: StageLayout, ranks: usize, stage: usize) -> f64 {
        let of_copy = |copy| {
            let rank = |stage| layout.holder(ranks, stage, copy as u16).0;
            self.between_s(rank(stage), rank(stage + 1))
        };
        (0..layout.copies()).map(of_copy).fold(0.0, f64::max)
    }

    /// Seconds along `stages` stages, from the first to the last.
    pub(crate) fn along_s(&self, layout: StageLayout, ranks: usize, stages: usize) -> f64 {
        let ways = stages / ranks;
        let turns = ways.saturating_sub(1) as f64;
        let path_s = if self.is_alike() {
            (ranks - 1) as f64 * self.times_s[0]
        } else {
            self.times_s[..ranks - 1].iter().sum()
        };
        match layout {
            StageLayout::RoundRobin => ways as f64 * path_s + turns * self.between_s(ranks - 1, 0),
            StageLayout::V => ways as f64 * path_s,
            StageLayout::Bidirectional => {
                (1..stages).map(|stage| self.behind_s(layout, ranks, stage - 1)).sum()
            }
        }
    }

    /// Seconds from one rank to another that holds the next stage.
    fn between_s(&self, one: usize, other: usize) -> f64 {
        if one == other {
            return 0.0;
        }
        let turns = one.abs_diff(other) > 1;
        let index = if turns { self.times_s.len() - 1 } else { one.min(other) };
        if self.is_alike() { self.times_s[0] } else { self.times_s[index] }
    }

    /// The shortest transfer, s.
    pub(crate) fn least_s(&self) -> f64 {
        self.times_s.iter().copied().fold(f64::INFINITY, f64::min)
    }

    /// The longest transfer, s.
    pub(crate) fn most_s(&self) -> f64 {
        self.times_s.iter().copied().fold(0.0, f64::max)
    }

    /// Mean transfer from a rank to the next, without that from the last to the first, s.
    pub(crate) fn mean_s(&self) -> f64 {
        let ways = (self.times_s.len() - 1).max(1);
        self.times_s[..ways].iter().sum::<f64>() / ways as f64
    }
}

/// The vocabulary passes of one rank.
#[derive(Clone, Debug)]
pub(crate) struct VocabPassCost {
    pub(crate) durations: VocabDurations,
    /// Computation and exposed collectives of all passes of one micro-batch.
    pub(crate) parts: Parts,
    /// Bytes of logits and hidden states that the passes hold.
    pub(crate) workspace_bytes: f64,
}

impl VocabPassCost {
    /// Time that a micro-batch takes through these passes.
    /// `models::schedule::VocabPasses` says what a backward waits for.
    pub(crate) fn path(&self, vocab: Vocab) -> VocabPath {
        let d = &self.durations;
        let least = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
        let first_s = d.broadcast_s + least(&d.first) + d.after_first_s;
        let rest_s = least(&d.middle) + d.after_middle_s + least(&d.last) + d.after_last_s;
        let path_s = match vocab {
            Vocab::Parallel2 => first_s,
            _ => first_s + rest_s,
        };
        let output_s = [&d.first, &d.middle, &d.last].map(|values| least(values)).iter().sum();
        let input = &d.input;
        let look_up_s = least(&input.forward) + input.after_forward_s;
        let add_s = input.before_backward_s + least(&input.backward);
        VocabPath {
            passes_s: self.parts.total_s(),
            output_s,
            path_s,
            input_s: if input.forward.is_empty() { [0.0; 2] } else { [look_up_s, add_s] },
            passes: vocab.passes(),
        }
    }
}

/// Time of one transfer between stages. With tensor parallelism each rank sends its 1/t share over
/// its own link and the receivers gather inside the host (SC'21, section 4.1, scatter/gather).
/// Where the software cannot do that, each rank sends everything.
pub(crate) fn p2p_transfer(
    cache: &CostCache<'_>,
    d: &Decisions,
    layer_costs: &LayerCosts,
) -> P2pTransfer {
    if d.pp == 1 {
        return P2pTransfer::none();
    }
    let mesh = Mesh::new(d);
    let whole = d.tp > 1 && !d.sequence_parallel;
    let scattered = cache.cluster.software.scatter_gather;
    let shares = if whole && !scattered { 1.0 } else { d.tp as f64 };
    // The ranks of a stage on one host send at the same time; transfers to the host's other stages
    // stay inside it. All-reduces after vocabulary passes run at the same time as the transfer of a
    // gradient, which is also sent after `S` (`vocab_parallel_schedule.py` of the reference).
    let with_all_reduces =
        matches!(d.vocab, Vocab::ParallelNaive | Vocab::Parallel1 | Vocab::Parallel2);
    let senders = mesh.stride(Axis::Pp) * if with_all_reduces { 2 } else { 1 };
    let bytes = layer_costs.hidden_bytes / shares;
    let gather_s = if whole && scattered {
        let group = GroupShape::strided(d.tp, 1, &cache.domains);
        collective::time_s(cache.cluster, Collective::AllGather, layer_costs.hidden_bytes, &group)
    } else {
        0.0
    };
    let slower = |level| if level == 0 { 1.0 } else { cache.cluster.software.p2p_slowdown };
    let sent_s = |level| collective::p2p_s(cache.cluster, bytes * slower(level), level, senders);
    let time_s = |level| sent_s(level) + gather_s;
    let levels = transfer_levels(&mesh, &cache.domains);
    P2pTransfer {
        times_s: levels.into_iter().map(time_s).collect(),
        blocks: transfer_blocks(cache, d),
    }
}

/// Innermost link level that joins each pipeline rank with the next, and the last with the first. A
/// single entry where all are equal.
fn transfer_levels(mesh: &Mesh, domains: &[u64]) -> Vec<usize> {
    let outermost = mesh.pipeline_level(domains);
    let inner = &domains[..outermost];
    if inner.iter().all(|gpus| 2 * mesh.stride(Axis::Pp) > *gpus) {
        return vec![outermost];
    }
    let next = (0..mesh.pp).map(|rank| (rank, (rank + 1) % mesh.pp));
    let level = |(one, other)| {
        let meet = |gpus: &u64| mesh.pipeline_ranks_meet(one, other, *gpus);
        inner.iter().position(meet).unwrap_or(outermost)
    };
    next.map(level).collect()
}

/// Time to sum `bytes` of gradients over the two copies of a stage, s: an all-reduce between the
/// two ranks that hold them.
pub(crate) fn copies_s(cache: &CostCache<'_>, d: &Decisions, stage: usize, bytes: f64) -> f64 {
    let pair = pair_of_copies(&Mesh::new(d), stage as u64, &cache.domains);
    collective::time_s(cache.cluster, Collective::AllReduce, bytes, &pair)
}

/// Linear lower bound on [`copies_s`] for any stage: start, s, and s a byte.
pub(crate) fn least_line_of_copies(cache: &CostCache<'_>, d: &Decisions) -> (f64, f64) {
    let (mesh, mut known) = (Mesh::new(d), vec![]);
    for rank in 0..mesh.pp / 2 {
        let pair = pair_of_copies(&mesh, rank, &cache.domains);
        if !known.contains(&pair) {
            known.push(pair);
        }
    }
    let lines = known.iter().map(|pair| cache.collective_line(Collective::AllReduce, pair));
    lines.reduce(|a, b| (a.0.min(b.0), a.1.min(b.1))).unwrap_or_default()
}

/// Group of the two ranks that hold a stage's copies. It lies within a domain only where the pairs
/// of all replicas do.
fn pair_of_copies(mesh: &Mesh, rank: u64, domains: &[u64]) -> GroupShape {
    let meet = |gpus: u64| mesh.pipeline_ranks_meet(rank, mesh.pp - 1 - rank, gpus);
    let mut within: Vec<u64> = domains.iter().map(|&gpus| 1 + u64::from(meet(gpus))).collect();
    if let Some(outermost) = within.last_mut() {
        *outermost = 2;
    }
    GroupShape { within }
}

/// Whether transfers are part of passes. Looped schedules hide them where the software can.
pub(crate) fn transfer_blocks(cache: &CostCache<'_>, d: &Decisions) -> bool {
    // With split backward the runtime runs passes from a list. It runs transfers from the list
    // too, on a queue of their own (Zero Bubble's runtime).
    let apart = d.schedule.splits_backward() || overlaps_passes(cache, d);
    d.pp == 1 || !apart
}

/// Whether transfers of a looped schedule overlap with passes.
fn overlaps_passes(cache: &CostCache<'_>, d: &Decisions) -> bool {
    let looped = matches!(
        d.schedule,
        ScheduleName::Interleaved1F1B
            | ScheduleName::Overlapped1F1B
            | ScheduleName::LoopedBfs
            | ScheduleName::InterleavedZb
    );
    looped && cache.cluster.software.p2p_overlap
}

/// Gap before each pass, s: none where the host process waits for no transfer.
pub(crate) fn gap_s(cache: &CostCache<'_>, d: &Decisions) -> f64 {
    if d.pp == 1 || overlaps_passes(cache, d) { 0.0 } else { cache.cluster.software.pass_gap_s }
}

/// Whether the input layer has passes of its own: in an order made for a configuration's own times.
/// Otherwise these passes are part of `T`. So are interlaced ones, for which all ranks wait
/// together anyway.
pub(super) fn input_apart(d: &Decisions) -> bool {
    d.pass_times.is_some() && d.vocab != Vocab::Interlaced
}

/// How much slower layers compute beside vocabulary passes; 1 without these.
pub(crate) fn slowdown_beside_passes(cache: &CostCache<'_>, d: &Decisions) -> f64 {
    let software = &cache.cluster.software;
    match d.vocab {
        Vocab::Interlaced => software.interlaced_slowdown,
        vocab if vocab.over_pipeline() => software.vocab_slowdown,
        _ => 1.0,
    }
}

/// The vocabulary passes of a micro-batch, in the order of passes that `d` is priced with.
pub(crate) fn vocab_path(
    cache: &CostCache<'_>,
    d: &Decisions,
    layer_costs: &LayerCosts,
) -> Option<VocabPath> {
    // All passes take as long together, whether or not the input layer has passes of its own.
    let pass_times = PassRatios::nearest(PassTimes::default());
    let apart = Decisions { pass_times, ..d.clone() };
    let path = vocab_passes(cache, &apart, layer_costs)?.path(d.vocab);
    Some(if placed_by_times(d) { path } else { VocabPath { input_s: [0.0; 2], ..path } })
}

/// Passes and barriers of vocabulary layers split over the pipeline (Vocabulary Parallelism,
/// section 4). All-reduces also serve as reduces, as in the paper's implementation.
pub(crate) fn vocab_passes(
    cache: &CostCache<'_>,
    d: &Decisions,
    layer_costs: &LayerCosts,
) -> Option<VocabPassCost> {
    if !d.vocab.over_pipeline() {
        return None;
    }
    let cost = cache.vocabulary_over_pipeline(d);
    let stride = Mesh::new(d).stride(Axis::Pp);
    let group = GroupShape::strided(d.pp, stride, &cache.domains);
    let time = |op, bytes| collective::time_s(cache.cluster, op, bytes, &group);
    let broadcast_s = time(Collective::Broadcast, layer_costs.hidden_bytes);
    let statistics_s = time(Collective::AllReduce, layer_costs.tokens * 4.0);
    let gradient_s = time(Collective::AllReduce, layer_costs.hidden_bytes);
    let (embed, apart) = match input_apart(d) {
        true => (Parts::default(), [cost.embed_forward, cost.embed_backward]),
        false => (cost.embed_forward + cost.embed_backward, [Parts::default(); 2]),
    };
    let (forward, input) = (cost.head_forward, cost.head_backward_input);
    let weight = cost.head_backward_weight;
    let blocking = |tp_s: f64| Parts { pp_s: tp_s, ..Parts::default() };
    let (first, middle, last, barriers) = match d.vocab {
        Vocab::ParallelNaive => (
            forward,
            Parts::default(),
            input + weight + embed,
            [broadcast_s, statistics_s, statistics_s, gradient_s],
        ),
        Vocab::Parallel2 => (
            forward + cost.softmax_cast + input,
            Parts::default(),
            cost.softmax_rescale + weight + embed,
            [broadcast_s, 2.0 * statistics_s + gradient_s, 0.0, 0.0],
        ),
        // The input layer's broadcast overlaps its forward, and its all-reduce overlaps its
        // backward. All ranks wait for both.
        Vocab::Interlaced => {
            let input_s = (broadcast_s - cost.embed_forward.total_s()).max(0.0)
                + (gradient_s - cost.embed_backward.total_s()).max(0.0);
            (
                forward + blocking(broadcast_s + 2.0 * statistics_s),
                Parts::default(),
                input + weight + embed + blocking(gradient_s + input_s),
                [0.0; 4],
            )
        }
        _ => (
            forward,
            Parts::default(),
            cost.softmax_rescale + input + weight + embed,
            [broadcast_s, 2.0 * statistics_s, 0.0, gradient_s],
        ),
    };
    let ranks = d.pp as usize;
    let input_ranks = if input_apart(d) { ranks } else { 0 };
    let [input_forward, input_backward] = apart;
    let parts = first + middle + last + input_forward + input_backward;
    let durations = VocabDurations {
        first: vec![first.total_s(); ranks],
        middle: vec![middle.total_s(); ranks],
        last: vec![last.total_s(); ranks],
        broadcast_s: barriers[0],
        after_first_s: barriers[1],
        after_middle_s: barriers[2],
        after_last_s: barriers[3],
        input: InputDurations {
            after_forward_s: gradient_s,
            before_backward_s: broadcast_s,
            ..InputDurations::uniform(
                input_ranks,
                input_forward.total_s(),
                input_backward.total_s(),
            )
        },
    };
    let held = cache.cluster.software.vocab_hidden_states * layer_costs.hidden_bytes;
    let workspace_bytes = cost.logits_bytes + held;
    Some(VocabPassCost { durations, parts, workspace_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use models::decisions::RankOrder;

    #[test]
    fn ranks_on_one_host_are_nearer_than_those_beyond_it() {
        let mesh = Mesh { tp: 1, cp: 1, dp: 1, pp: 16, order: RankOrder::DpInner };
        let levels = transfer_levels(&mesh, &[8, u64::MAX]);
        // Only the transfers from 7 to 8 and from 15 to 0 leave the host.
        let beyond = [7, 15];
        let expected: Vec<usize> =
            (0..16).map(|rank| usize::from(beyond.contains(&rank))).collect();
        assert_eq!(levels, expected);
        let replicated = Mesh { dp: 8, ..mesh };
        assert_eq!(transfer_levels(&replicated, &[8, u64::MAX]), [1]);
        assert_eq!(transfer_levels(&Mesh { pp: 8, ..mesh }, &[8, u64::MAX]), [0]);
    }

    #[test]
    fn a_transfer_takes_the_time_of_its_own_boundary() {
        let p2p_transfer = P2pTransfer { times_s: vec![1.0, 2.0, 3.0, 4.0], blocks: true };
        assert_eq!(
            [
                p2p_transfer.between_s(1, 2),
                p2p_transfer.between_s(2, 1),
                p2p_transfer.between_s(2, 2)
            ],
            [2.0, 2.0, 0.0]
        );
        // In a looped pipeline the last rank sends to the first.
        assert_eq!(p2p_transfer.between_s(3, 0), 4.0);
        assert_eq!([p2p_transfer.least_s(), p2p_transfer.mean_s()], [1.0, 2.0]);
        // The other copies of stages 2 and 3 are on ranks 1 and 0.
        let both = |stage| p2p_transfer.behind_s(StageLayout::Bidirectional, 4, stage);
        assert_eq!([both(0), both(1), both(2)], [3.0, 2.0, 3.0]);
        let v = |stage| p2p_transfer.behind_s(StageLayout::V, 4, stage);
        assert_eq!([v(2), v(3), v(4)], [3.0, 0.0, 3.0]);
        let alike = P2pTransfer { times_s: vec![5.0], blocks: true };
        assert_eq!([alike.between_s(0, 1), alike.between_s(3, 0), alike.mean_s()], [5.0; 3]);
    }
}
