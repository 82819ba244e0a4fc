//! Bound with one chunk per rank: the least over all partitions of the layers into stages.
//!
//! Each stage `q` has a row of the closed form ([`crate::partition::dynamic_program`]): the load of
//! the earlier stages for one micro-batch, its own load for all micro-batches, and its waits. The
//! start of a stage fixes the layers before it, whatever the cuts among them, and its end fixes
//! those after it. Relaxation: the other stages recompute nothing, and the stage itself as little
//! as memory allows. A row then depends on the stage's own range alone, and one pass over the
//! stages tells whether all rows can lie below a limit. Where the backward is split, a row is the
//! longest chain between the milestones of the stage's order ([`crate::partition::milestones`]).

use super::pipeline_spec::PipelineSpec;
use super::recompute_knapsack::RecomputeKnapsack;
use super::stage_view::StageView;
use super::states::StateView;
use super::workload::{KindCost, MicroBatchCost};
use crate::cost::state::LocalParams;
use crate::partition::Pipeline;
use crate::partition::milestones::ArrivalTimes;
use crate::partition::warm_up::Warm;
use crate::pricing::cost_cache::CostCache;
use crate::pricing::layers::Layers;
use models::schedule::ScheduleName;
use std::ops::RangeInclusive;

/// The layer ranges that a limit leaves open, and the bound.
#[derive(Clone, Debug, PartialEq)]
pub struct OpenCuts {
    /// Lower bound on the passes and the reductions of rank 0, s.
    pub bound_s: f64,
    /// By stage, the ranges (first layer, one past the last) that are not pruned by the limit.
    pub ranges: Vec<Vec<(usize, usize)>>,
}

/// Computes the bound over all partitions.
pub struct PartitionBound<'a> {
    spec: &'a PipelineSpec,
    work: &'a MicroBatchCost,
    state: &'a StateView,
    knapsack: RecomputeKnapsack,
    /// The least buffer of any layer that is recomputed, bytes.
    buffer_bytes: f64,
    layers: &'a Layers,
    /// Prefix sums over layers.
    before: Vec<Sums>,
    stages: Vec<StageView>,
}

/// Sums over layers.
#[derive(Clone, Copy, Default)]
struct Sums {
    forward_s: f64,
    /// Backward; to inputs alone where weight gradients are separate.
    backward_s: f64,
    /// Separate weight gradients.
    weight_s: f64,
    params: LocalParams,
    state_bytes: f64,
    /// With the first recompute option that is allowed.
    recompute_s: f64,
    in_flight_bytes: f64,
    /// Of passes that run unpaired in any order.
    unpaired_s: f64,
}

impl<'a> PartitionBound<'a> {
    /// `work` includes the communication that the parameter state adds to passes. `budget_bytes` is
    /// the device memory for parameter state and activations, infinite where memory is ignored.
    pub fn new(
        spec: &'a PipelineSpec,
        work: &'a MicroBatchCost,
        state: &'a StateView,
        layers: &'a Layers,
        budget_bytes: f64,
    ) -> Self {
        let knapsack = RecomputeKnapsack::new(&work.kinds, spec.options());
        let mut sums = Sums::default();
        let mut before = Vec::with_capacity(layers.len() + 1);
        before.push(sums);
        for layer in 0..layers.len() {
            let index = layers.kind_of(layer);
            let (kind, first) = (&work.kinds[index], knapsack.first_of(index));
            let (backward_s, weight_s) = parts_of(spec, kind);
            sums.forward_s += kind.forward_s;
            sums.backward_s += backward_s;
            sums.weight_s += weight_s;
            sums.params = sums.params + kind.params;
            sums.state_bytes += state.bytes_of(kind.params);
            sums.recompute_s += first.0;
            sums.in_flight_bytes += first.1;
            sums.unpaired_s += spec.least_unpaired() * kind.both_unpaired_s();
            before.push(sums);
        }
        Self {
            spec,
            work,
            state,
            buffer_bytes: knapsack.least_buffer(&work.counts),
            knapsack,
            layers,
            before,
            stages: StageView::all(spec, work, state, budget_bytes),
        }
    }

    /// Takes milestones and micro-batches in flight from a generated order of passes. Without
    /// milestones in `pipeline` nothing changes.
    pub fn with_order_of(mut self, pipeline: &Pipeline) -> Self {
        for (stage, (view, milestones)) in
            self.stages.iter_mut().zip(&pipeline.milestones).enumerate()
        {
            view.chains = Some(milestones.of_one_chunk());
            view.held = view.held.max(pipeline.most_in_flight(stage));
        }
        self
    }

    /// [`Self::with_order_of`] the generated order, for schedules with vocabulary passes whose
    /// milestones have no formula.
    pub fn with_generated_order(self, cache: &CostCache<'_>) -> Self {
        let spec = self.spec;
        let unknown = spec.passes.is_some() && !spec.is_known_without_order();
        if unknown { self.with_order_of(&cache.pipeline_of(spec.key())) } else { self }
    }

    fn len(&self) -> usize {
        self.layers.len()
    }

    fn fewest(&self, stage: usize) -> usize {
        self.stages[stage].fewest
    }

    /// The row of a stage without waits. The recomputation is infinite where the range does not
    /// fit.
    fn row(&self, stage: usize, start: usize, end: usize) -> Row {
        let (from, to, own) = (&self.before[start], &self.before[end], &self.stages[stage]);
        let forward_s = to.forward_s - from.forward_s + own.forward_s;
        let passes_s = to.backward_s - from.backward_s + own.backward_s;
        let backward_s = passes_s + self.recompute_s(own, start, end);
        let weight_s = to.weight_s - from.weight_s + own.weight_s;
        let ramp_s = if self.spec.splits_backward() {
            from.forward_s + own.to_s - own.back_s
        } else {
            from.forward_s + from.backward_s + own.to_s
        };
        let unpaired_s = to.unpaired_s - from.unpaired_s;
        let own_s = self.spec.m() * (forward_s + backward_s + weight_s + self.spec.output_s());
        let own_s = own_s + unpaired_s;
        Row { forward_s, backward_s, weight_s, ramp_s, total_s: ramp_s + own_s }
    }

    /// The longest chain of a stage with a split backward, with its own reductions.
    fn split_s(&self, stage: usize, (start, end): (usize, usize), row: &Row) -> f64 {
        let (from, view) = (&self.before[start], &self.stages[stage]);
        let tail_s = self.own_tail_s(stage, start, end);
        let Some(chains) = &view.chains else { return row.total_s + tail_s };
        let own = [row.forward_s, row.backward_s, row.weight_s];
        let vocab_s = self.spec.passes.map_or(0.0, |path| path.path_s);
        let path_s = self.path_from_s(stage, end) + vocab_s;
        let ready_s = row.ramp_s + row.forward_s + path_s;
        let arrivals = ArrivalTimes { arrive_s: row.ramp_s, ready_s, path_s };
        let ends = chains.ends(own, self.spec.output_s(), &arrivals);
        let last_s = row.ramp_s + self.later_s() + row.forward_s + path_s + row.backward_s;
        let back_s = from.backward_s + view.back_s;
        let own_s = ends.own_s.max(last_s) + tail_s;
        own_s.max(ends.last_backward_s.max(last_s) + back_s)
    }

    /// How much later the last micro-batch starts than the first, at least, s.
    fn later_s(&self) -> f64 {
        self.spec.passes.map_or(0.0, |path| path.later_s(self.spec.micro_batches))
    }

    /// The path of one micro-batch from the end of a stage through the later stages and back.
    fn path_from_s(&self, stage: usize, end: usize) -> f64 {
        let (from, to) = (&self.before[end], &self.before[self.len()]);
        let layers_s = to.forward_s - from.forward_s + to.backward_s - from.backward_s;
        layers_s + self.stages[stage].from_s
    }

    /// Lower bound on the recomputation that memory makes necessary, s. The buffer is the least of
    /// any layer, so that fewer layers never need more.
    fn recompute_s(&self, own: &StageView, start: usize, end: usize) -> f64 {
        let (from, to) = (&self.before[start], &self.before[end]);
        let first_s = to.recompute_s - from.recompute_s;
        let first_bytes = to.in_flight_bytes - from.in_flight_bytes;
        let bytes = own.free_bytes - (to.state_bytes - from.state_bytes);
        if own.held * first_bytes <= bytes {
            return first_s;
        }
        let counts = self.layers.between(start, end);
        let excess = first_bytes - (bytes - self.buffer_bytes) / own.held;
        self.knapsack.saving_s(&counts, first_s, excess)
    }

    /// The waits of a stage, for schedules whose closed form has them.
    fn waits_s(&self, stage: usize, end: usize, row: &Row) -> f64 {
        if self.spec.schedule != ScheduleName::OneFOneB {
            return 0.0;
        }
        let (p, m) = (self.spec.ranks, self.spec.micro_batches);
        let warm = Warm::of(p, m, stage, self.spec.passes.unwrap_or_default());
        let below_s = self.path_from_s(stage, end);
        let wait_s = |pass_s: f64| warm.wait_s(pass_s, below_s);
        warm.both_s(m, wait_s(row.forward_s), wait_s(row.backward_s))
    }

    /// Lower bound on the bound of [`Self::solve`], mostly within [`PRECISION`]; `limit_s` where
    /// that is not below it, and infinite where nothing fits.
    pub fn least_s(&self, limit_s: f64) -> f64 {
        let Some(mut most_s) = self.largest_below(limit_s) else {
            let fits = limit_s == f64::INFINITY || self.largest_below(f64::INFINITY).is_some();
            return if fits { limit_s } else { f64::INFINITY };
        };
        let mean_s = self.work.load_s() / self.spec.ranks as f64 + self.spec.output_s();
        let mut least_s = (self.spec.m() * mean_s).min(most_s);
        while least_s < most_s * (1.0 - PRECISION) {
            let middle_s = f64::midpoint(least_s, most_s);
            match self.largest_below(middle_s) {
                Some(largest_s) => most_s = largest_s,
                None => least_s = middle_s,
            }
        }
        least_s
    }

    /// The largest row of a partition all of whose rows are below `limit_s`; `None` where there is
    /// none. Each stage ends as late as it may.
    ///
    /// A row falls with a later start: a chain loses at least one forward and one backward of the
    /// layer, and gains no more from the stage before. So of the starts that the earlier stages
    /// leave open the last one is the best, unless even the fewest layers from there take too long.
    /// Starts between the first and the last are taken to be open without a look.
    fn largest_below(&self, limit_s: f64) -> Option<f64> {
        let (mut first, mut last, mut largest_s) = (0, 0, 0.0_f64);
        let mut needed: usize = self.stages.iter().map(|view| view.fewest).sum();
        if needed > self.len() {
            return None;
        }
        for (stage, view) in self.stages.iter().enumerate() {
            needed -= view.fewest;
            let most = self.len().checked_sub(needed)?;
            let is_last = stage + 1 == self.stages.len();
            let soonest = if is_last { most } else { (last + view.fewest).min(most) };
            let start_of = |end: usize| last.min(end - view.fewest);
            let is_open = |end: &usize| self.is_open(stage, (start_of(*end), *end), limit_s);
            let value_s = |start: usize, end: usize| {
                let value_s = self.value_s(stage, (start, end), &self.row(stage, start, end));
                (value_s < limit_s).then_some((end, value_s))
            };
            let longest = furthest(soonest..=most, is_open);
            let reached = longest.and_then(|longest| {
                (soonest..=longest).rev().find_map(|end| value_s(start_of(end), end))
            });
            let earlier = || {
                let starts = (first..last).rev().map(|start| (start, start + view.fewest));
                let mut all = starts.filter(|(_, end)| *end <= most && !is_last);
                all.find_map(|(start, end)| value_s(start, end))
            };
            let (end, value_s) = reached.or_else(earlier)?;
            (first, last) = (first + view.fewest, end);
            largest_s = largest_s.max(value_s);
        }
        Some(largest_s)
    }

    /// The longest chain of a stage.
    fn value_s(&self, stage: usize, range: (usize, usize), row: &Row) -> f64 {
        let look_up_s = self.spec.passes.map_or(0.0, |path| path.input_s[0]);
        look_up_s
            + if self.spec.splits_backward() {
                self.split_s(stage, range, row)
            } else {
                self.whole_s(stage, range, row)
            }
    }

    /// The longest chain of a stage with whole backwards: its passes and waits, and then the last
    /// micro-batch's backward path to rank 0, or its own reductions.
    fn whole_s(&self, stage: usize, (start, end): (usize, usize), row: &Row) -> f64 {
        let back_s = self.before[start].backward_s + self.stages[stage].back_s;
        let behind_s = self.own_tail_s(stage, start, end) - back_s;
        let own_s = row.total_s + self.waits_s(stage, end, row);
        let around_s =
            self.path_from_s(stage, end) + self.spec.passes.map_or(0.0, |path| path.path_s);
        let last_s = row.ramp_s + self.later_s() + row.forward_s + around_s + row.backward_s;
        own_s.max(last_s) + behind_s.max(0.0)
    }

    /// The least of the largest rows; `None` where every partition has a row of `limit_s` or more.
    /// A dynamic program over stages, the last one first.
    pub fn solve(&self, limit_s: f64) -> Option<OpenCuts> {
        let (least, most) = (self.first_starts(limit_s)?, self.last_starts(limit_s));
        let mut ranges = vec![vec![]; self.spec.ranks];
        let mut behind = vec![f64::INFINITY; self.len() + 1];
        behind[self.len()] = 0.0;
        for (stage, ranges) in ranges.iter_mut().enumerate().rev() {
            let mut here = vec![f64::INFINITY; self.len() + 1];
            let ends = (least[stage + 1], most[stage + 1]);
            let starts = here.iter_mut().enumerate().take(most[stage] + 1).skip(least[stage]);
            for (start, best_s) in starts {
                *best_s = self.best_from((stage, start), ends, &behind, limit_s, ranges);
            }
            behind = here;
        }
        let bound_s = behind[0];
        (bound_s < limit_s).then_some(OpenCuts { bound_s, ranges })
    }

    /// The least of the largest rows of a stage that starts at `start` and of the later stages,
    /// which start within `ends`. Adds the ranges below the limit to `ranges`.
    fn best_from(
        &self,
        (stage, start): (usize, usize),
        ends: (usize, usize),
        behind: &[f64],
        limit_s: f64,
        ranges: &mut Vec<(usize, usize)>,
    ) -> f64 {
        let mut best_s = f64::INFINITY;
        let first = ends.0.max(start + self.fewest(stage));
        for (end, behind_s) in behind.iter().enumerate().take(ends.1 + 1).skip(first) {
            let row = self.row(stage, start, end);
            if row.total_s + self.sure_tail_s(stage, start, end) >= limit_s {
                break;
            }
            if *behind_s >= limit_s {
                continue;
            }
            let value_s = self.value_s(stage, (start, end), &row).max(*behind_s);
            if value_s < limit_s {
                best_s = best_s.min(value_s);
                ranges.push((start, end));
            }
        }
        best_s
    }

    /// The exposed reductions of a stage, s. They follow its passes, or, on stage 0,
    /// the last micro-batch's backward path.
    fn own_tail_s(&self, stage: usize, start: usize, end: usize) -> f64 {
        let (from, to, own) = (&self.before[start], &self.before[end], &self.stages[stage]);
        let (low, high) = (from.params, to.params);
        let params = LocalParams {
            dense: high.dense - low.dense + own.params,
            expert: high.expert - low.expert,
        };
        let backward_s = to.backward_s - from.backward_s + own.backward_s;
        let weight_s = to.weight_s - from.weight_s + own.weight_s;
        self.state.tail_of_s(params, 1, backward_s + weight_s)
    }

    /// The reductions that follow a rank's passes in every row, s: with a split backward, its own.
    fn sure_tail_s(&self, stage: usize, start: usize, end: usize) -> f64 {
        if self.spec.splits_backward() { self.own_tail_s(stage, start, end) } else { 0.0 }
    }

    /// Whether a row without waits lies below a limit.
    fn is_open(&self, stage: usize, (start, end): (usize, usize), limit_s: f64) -> bool {
        self.row(stage, start, end).total_s + self.sure_tail_s(stage, start, end) < limit_s
    }

    /// By stage, the earliest layer at which it can start if it and the later stages hold all the
    /// rest; `None` where the limit rules out every partition. A row without waits grows with its
    /// range and falls with a later start.
    fn first_starts(&self, limit_s: f64) -> Option<Vec<usize>> {
        let p = self.spec.ranks;
        let mut least = vec![self.len(); p + 1];
        for stage in (0..p).rev() {
            // The range ends at the earliest start of the next stage, or later where that does not
            // fit.
            let fits = |end: &usize| {
                let start = end.checked_sub(self.fewest(stage));
                start.is_some_and(|start| self.is_open(stage, (start, *end), limit_s))
            };
            let end = (least[stage + 1]..=self.len()).find(fits)?;
            let mut start = end - self.fewest(stage);
            while start > 0 && self.is_open(stage, (start - 1, end), limit_s) {
                start -= 1;
            }
            least[stage] = start;
        }
        (least[0] == 0).then_some(least)
    }

    /// By stage, the latest layer at which it can start.
    fn last_starts(&self, limit_s: f64) -> Vec<usize> {
        let p = self.spec.ranks;
        let mut most = vec![0; p + 1];
        for stage in 0..p {
            let start = most[stage];
            let mut end = (start + self.fewest(stage)).min(self.len());
            while end < self.len() && self.is_open(stage, (start, end + 1), limit_s) {
                end += 1;
            }
            most[stage + 1] = end;
        }
        most
    }
}

/// The last of some numbers for which something holds, where it holds for no number after one for
/// which it does not. The first numbers are tried first.
fn furthest(all: RangeInclusive<usize>, holds: impl Fn(&usize) -> bool) -> Option<usize> {
    let (first, last) = all.into_inner();
    if first > last || !holds(&first) {
        return None;
    }
    let (mut low, mut step) = (first, 1);
    while low + step <= last && holds(&(low + step)) {
        (low, step) = (low + step, 2 * step);
    }
    let mut high = (low + step).min(last + 1);
    while low + 1 < high {
        let middle = usize::midpoint(low, high);
        (low, high) = if holds(&middle) { (middle, high) } else { (low, middle) };
    }
    Some(low)
}

/// How far [`PartitionBound::least_s`] may lie below the least of the largest rows, as a share.
const PRECISION: f64 = 1e-3;

struct Row {
    forward_s: f64,
    backward_s: f64,
    weight_s: f64,
    /// When the first micro-batch arrives; where the backward is whole, plus the last micro-batch's
    /// backward path to rank 0.
    ramp_s: f64,
    total_s: f64,
}

/// Backward and separate weight gradients of a layer, s.
fn parts_of(spec: &PipelineSpec, kind: &KindCost) -> (f64, f64) {
    if spec.splits_backward() { (kind.input_s, kind.weight_s) } else { (kind.backward_s, 0.0) }
}
