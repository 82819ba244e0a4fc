//! Bound over every cut of a pipeline with several chunks per rank: layers are whole.
//!
//! A rank with `n` layers takes no less than a row: the passes before its first, all its own and
//! those that must follow them. The other stages on these paths hold as few layers as any may.
//! So a limit on the time says how many layers each rank holds at most, and where these are fewer
//! than the model's in all, no cut lies below the limit. Recomputation is what the memory of a rank
//! with `n` layers makes necessary, relaxed as in [`super::candidates`].
//!
//! Kinds of layers are counted apart: layers of the other kinds then take no time but where a stage
//! holds at least one layer, of the fastest kind.

use super::candidates::path_seconds::PathSeconds;
use super::closed;
use super::pipeline_spec::PipelineSpec;
use super::recompute_knapsack::RecomputeKnapsack;
use super::states::StateView;
use super::workload::{KindCost, MicroBatchCost, VocabEnd};
use crate::cost::state::LocalParams;
use crate::partition::Pipeline;
use crate::partition::bidirectional::Bidirectional;
use crate::partition::milestones::{ArrivalTimes, OwnSeconds, PassCounts};
use crate::pricing::layers::Counts;
use models::placement::may_be_empty;
use models::schedule::ScheduleName;

/// The inputs of the bound.
pub struct WholeLayers<'a> {
    spec: &'a PipelineSpec,
    work: &'a MicroBatchCost,
    state: &'a StateView,
    pipeline: &'a Pipeline,
    budget_bytes: f64,
    knapsack: &'a RecomputeKnapsack,
    /// Fewest layers by stage.
    fewest: Vec<usize>,
    /// The fastest layer: the least over kinds of every duration.
    least: KindCost,
    /// Seconds along stages of fewest layers.
    path: PathSeconds,
    /// By rank, its stages.
    stages: Vec<Vec<usize>>,
    /// By rank, seconds of its stages.
    own: Vec<Vec<PassCounts>>,
    /// By rank, micro-batches of each chunk in flight at the moment when there are most in all.
    held: Vec<Vec<u32>>,
    step_s: f64,
}

/// Halvings of the interval in which a bound lies.
const HALVINGS: usize = 6;

impl<'a> WholeLayers<'a> {
    /// The bound of a pipeline with parameter state `state`; `work` includes what the state adds to
    /// passes, `knapsack` is of `work`, and `budget_bytes` is infinite where memory is ignored.
    pub fn new(
        spec: &'a PipelineSpec,
        (work, knapsack): (&'a MicroBatchCost, &'a RecomputeKnapsack),
        state: &'a StateView,
        pipeline: &'a Pipeline,
        budget_bytes: f64,
    ) -> Self {
        let stages = spec.stages();
        let fewest = |stage| usize::from(!may_be_empty(spec.vocab, stage, stages));
        let fewest: Vec<usize> = (0..stages).map(fewest).collect();
        let present = work.kinds.iter().zip(&work.counts).filter(|(_, count)| **count > 0);
        let least = present.map(|(kind, _)| *kind).reduce(least_of).unwrap_or_default();
        let fastest = MicroBatchCost { kinds: vec![least], ..work.clone() };
        let counts: Vec<Counts> = fewest.iter().map(|&count| [count, 0, 0, 0]).collect();
        let path = PathSeconds::new(spec, &fastest, &counts);
        let fullest = |held: &Vec<Vec<u32>>| {
            let most = held.iter().max_by_key(|counts| counts.iter().sum::<u32>());
            most.cloned().unwrap_or_else(|| vec![0; spec.chunks])
        };
        let held = pipeline.in_flight.iter().map(fullest).collect();
        let step_s = closed::least_step_s(spec, work, state);
        let stage_of = |rank, chunk| spec.layout().stage_of(spec.ranks, rank, chunk);
        let stages: Vec<Vec<usize>> = (0..spec.ranks)
            .map(|rank| (0..spec.chunks).map(|chunk| stage_of(rank, chunk)).collect())
            .collect();
        let seconds = |stages: &Vec<usize>| stages.iter().map(|&at| path.seconds[at]).collect();
        let own = stages.iter().map(seconds).collect();
        Self {
            spec,
            work,
            state,
            pipeline,
            budget_bytes,
            knapsack,
            fewest,
            least,
            path,
            stages,
            own,
            held,
            step_s,
        }
    }

    /// Whether some cut may take less than `limit_s`, passes, reductions and step.
    pub fn is_below(&self, limit_s: f64) -> bool {
        let kinds = self.work.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        self.looped_s() < limit_s && kinds.into_iter().all(|(kind, _)| self.holds(kind, limit_s))
    }

    /// The bound, where it lies between two times; `None` where it lies above.
    pub fn between_s(&self, [mut low_s, mut high_s]: [f64; 2]) -> Option<f64> {
        if !self.is_below(high_s) {
            return None;
        }
        for _ in 0..HALVINGS {
            let middle_s = low_s.midpoint(high_s);
            *if self.is_below(middle_s) { &mut high_s } else { &mut low_s } = middle_s;
        }
        Some(low_s)
    }

    /// Whether all ranks together can hold the model's layers of a kind below a limit.
    fn holds(&self, kind: usize, limit_s: f64) -> bool {
        let ranks = self.spec.ranks / self.spec.copies();
        let mut left = self.work.counts[kind];
        for rank in 0..ranks {
            let arrivals = self.arrivals(rank, limit_s);
            let is_below = |count: usize| self.row_s(rank, (kind, count), &arrivals) < limit_s;
            if !is_below(0) {
                return false;
            }
            // The largest count below the limit.
            let (mut low, mut high) = (0, left + 1);
            while high - low > 1 {
                let middle = low.midpoint(high);
                *if is_below(middle) { &mut low } else { &mut high } = middle;
            }
            left -= low;
            if left == 0 {
                return true;
            }
        }
        false
    }

    /// When passes can start on a rank, where all ranks take less than `limit_s`.
    fn arrivals(&self, rank: usize, limit_s: f64) -> ArrivalTimes {
        let (spec, path) = (self.spec, &self.path);
        let Some(milestones) = self.pipeline.milestones.get(rank) else {
            return ArrivalTimes::default();
        };
        let splits = spec.splits_backward();
        let all: usize = self.work.counts.iter().sum();
        let fewest: usize = self.fewest.iter().sum();
        let forward_s = (all - fewest.min(all)) as f64 * self.least.forward_s;
        let first = spec.layout().stage_of(spec.ranks, rank, milestones.first_chunk);
        // First chunks hold what their ranks' other chunks leave.
        let most = (limit_s / (spec.m() * self.least.load_s())).min(all as f64).floor() as usize;
        let before = |rank: usize| {
            let others: usize =
                self.stages[rank].iter().skip(1).map(|&stage| self.fewest[stage]).sum();
            most.saturating_sub(others)
        };
        let most_before: usize = (0..=rank).map(before).sum();
        let behind: usize = self.fewest[rank + 1..].iter().sum();
        let more = all.saturating_sub(most_before + behind) as f64;
        let backward_s = if splits { self.least.input_s } else { self.least.backward_s };
        ArrivalTimes {
            arrive_s: path.down_s[rank],
            ready_s: path.round_trip_s(0, first) + forward_s,
            path_s: path.round_trip_s(rank + 1, rank)
                + path.link_s(rank)
                + more * (self.least.forward_s + backward_s),
        }
    }

    /// The row of a rank that holds at least `count` layers of a kind, s.
    fn row_s(&self, rank: usize, (kind, count): (usize, usize), arrivals: &ArrivalTimes) -> f64 {
        let (spec, path, cost) = (self.spec, &self.path, &self.work.kinds[kind]);
        let Some(again_s) = self.recompute_s(rank, kind, count) else { return f64::INFINITY };
        let fewest: usize = self.stages[rank].iter().map(|&stage| self.fewest[stage]).sum();
        let more = count.saturating_sub(fewest) as f64;
        let params = cost.params * count as f64;
        let tail_s = self.state.tail_of_s(params, spec.least_stages(), f64::INFINITY);
        let step_s =
            self.step_s.max(self.state.step_of_s(params, spec.least_stages(), f64::INFINITY));
        if spec.copies() > 1 {
            let stages =
                Bidirectional { stages: &path.seconds, down_s: &path.down_s, runs: spec.runs() };
            return stages.end_s(rank, again_s + more * cost.load_s()) + tail_s + step_s;
        }
        let own = &self.own[rank];
        if let Some(milestones) = self.pipeline.milestones.get(rank) {
            let splits = spec.splits_backward();
            let [backward_s, weight_s] =
                if splits { [cost.input_s, cost.weight_s] } else { [cost.backward_s, 0.0] };
            let shared = [more * cost.forward_s, more * backward_s + again_s, more * weight_s];
            let seconds = OwnSeconds { chunks: own, shared, vocab_s: spec.output_s() };
            let ends = milestones.ends(&seconds, arrivals);
            return (ends.own_s + tail_s).max(ends.last_backward_s + path.back_s[rank]) + step_s;
        }
        let load_s: f64 = own.iter().flatten().sum();
        let each_s = load_s + more * cost.load_s() + again_s + spec.output_s();
        path.down_s[rank] + spec.m() * each_s + tail_s.max(path.back_s[rank]) + step_s
    }

    /// Breadth-first loops: the forward and backward path of one micro-batch, with the other
    /// forwards and backwards of the stage that holds most layers, s.
    fn looped_s(&self) -> f64 {
        let spec = self.spec;
        if spec.schedule != ScheduleName::LoopedBfs {
            return 0.0;
        }
        let first = spec.options()[0];
        let longest_s = self.work.fullest(spec.stages(), 1, |_, kind| kind.load_s());
        let spent_s = self.work.layers_s(|kind| kind.recompute_s[first]);
        let ends_s = closed::ends_s(spec, self.work);
        let transfers_s = 2.0 * (spec.transfers_s() + spec.stages() as f64 * spec.gap_s);
        let path_s = self.work.load_s() + spent_s + ends_s + transfers_s;
        path_s + (spec.m() - 1.0) * longest_s + self.step_s
    }

    /// Recomputation of one micro-batch that a rank's memory makes necessary where it holds `count`
    /// layers of a kind, s; `None` where they do not fit.
    fn recompute_s(&self, rank: usize, kind: usize, count: usize) -> Option<f64> {
        let mut counts = Counts::default();
        counts[kind] = count;
        let (first_s, each_bytes) =
            (self.knapsack.first_of(kind).0, self.knapsack.first_of(kind).1);
        let first_s = first_s * count as f64;
        if self.budget_bytes.is_infinite() {
            return Some(first_s);
        }
        let held = &self.held[rank];
        let most = held.iter().copied().max().unwrap_or(0);
        let free_bytes = self.free_bytes(rank, self.work.kinds[kind].params * count as f64);
        if most == 0 {
            return (free_bytes >= 0.0).then_some(first_s);
        }
        // Every chunk but those at the ends has a layer; the others are where fewest are in flight.
        let (mut spread, mut bytes) = (0, 0.0);
        for (&held, &stage) in held.iter().zip(&self.stages[rank]) {
            if self.fewest[stage] > 0 && spread < count && self.work.kinds.len() == 1 {
                spread += 1;
                bytes += f64::from(held) * each_bytes;
            }
        }
        let least = f64::from(held.iter().copied().min().unwrap_or(0));
        bytes += (count - spread) as f64 * least * each_bytes;
        let excess = (bytes - free_bytes) / f64::from(most);
        if excess <= 0.0 {
            return Some(first_s);
        }
        let again_s = self.knapsack.saving_s(&counts, first_s, excess);
        again_s.is_finite().then_some(again_s)
    }

    /// Bytes left on a rank for the activations of layers with `params` parameters.
    fn free_bytes(&self, rank: usize, mut params: LocalParams) -> f64 {
        let spec = self.spec;
        let (embedding, head) = (&self.work.embedding, &self.work.head_of(spec));
        let mut fixed_bytes = 0.0;
        if spec.passes.is_some() {
            params.dense += embedding.params + head.params;
        } else {
            let last = self.fewest.len() - 1;
            for (stage, held) in self.stages[rank].iter().zip(&self.held[rank]) {
                let ends = [(0, embedding), (last, head)];
                let here = ends.into_iter().filter(|(at, _)| at == stage);
                here.for_each(|(_, end): (usize, &VocabEnd)| {
                    params.dense += end.params;
                    fixed_bytes += end.workspace_bytes + f64::from(*held) * end.in_flight_bytes;
                });
            }
        }
        // Another order of summation must not rule out what just fits.
        self.budget_bytes * (1.0 + 1e-9) - self.state.bytes_of(params) - fixed_bytes
    }
}

/// The componentwise least of two kinds' durations.
fn least_of(a: KindCost, b: KindCost) -> KindCost {
    KindCost {
        forward_s: a.forward_s.min(b.forward_s),
        backward_s: a.backward_s.min(b.backward_s),
        input_s: a.input_s.min(b.input_s),
        weight_s: a.weight_s.min(b.weight_s),
        ..a
    }
}
