//! One chunk a device: the least over all cuts of the layers into stages.
//!
//! For each stage `q` the row of the closed form ([`crate::placement::dynamic`]): what the stages before
//! it do to one micro-batch, its own work with all of them, and its waits. The layers before the stage
//! are known once it is known where it starts, however they are cut, and so are those behind it; their
//! recomputation is left out, its own is the least that memory allows. So a row depends on the stage's
//! range alone, and the least of the largest rows is found by going through stages and cuts once.

use super::states::StateView;
use super::trade::Trade;
use super::work::{End, Line, Work};
use crate::case::layers::Layers;
use crate::cost::state::LocalParams;
use crate::placement::dynamic::Warm;
use crate::simulate::CriticalPath;
use models::schedule::ScheduleName;

/// Where the stages may be cut, and the bound.
#[derive(Clone, Debug, PartialEq)]
pub struct Cuts {
    /// Lower bound on passes and the first device's reductions, s.
    pub bound_s: f64,
    /// By stage, ranges (first layer, one past the last) that may lie below the limit.
    pub ranges: Vec<Vec<(usize, usize)>>,
}

/// The least over all cuts, below `limit_s`.
pub struct Cutter<'a> {
    line: &'a Line,
    work: &'a Work,
    state: &'a StateView,
    trade: Trade,
    budget_bytes: f64,
    /// By layer, sums over the layers before it.
    before: Vec<Sums>,
    layers: &'a Layers,
    in_flight: Vec<f64>,
}

/// Sums over layers.
#[derive(Clone, Copy, Default)]
struct Sums {
    forward_s: f64,
    backward_s: f64,
    params: LocalParams,
}

impl<'a> Cutter<'a> {
    /// `work` has the states' part in its passes; `budget_bytes` is what a device has for states and
    /// activations, infinite where memory does not count.
    pub fn new(
        line: &'a Line,
        work: &'a Work,
        state: &'a StateView,
        layers: &'a Layers,
        budget_bytes: f64,
    ) -> Self {
        let mut before = vec![Sums::default()];
        let mut sums = Sums::default();
        for layer in 0..layers.len() {
            let kind = &work.kinds[layers.kind_of(layer)];
            sums.forward_s += kind.forward_s;
            sums.backward_s += kind.backward_s;
            sums.params = sums.params + kind.params;
            before.push(sums);
        }
        let mut counts = vec![];
        let mut held = |device| {
            line.in_flight(device, &mut counts);
            counts[0] as f64
        };
        let in_flight = (0..line.devices).map(&mut held).collect();
        let trade = Trade::new(&work.kinds, line.options());
        Self { line, work, state, trade, budget_bytes, before, layers, in_flight }
    }

    fn len(&self) -> usize {
        self.layers.len()
    }

    /// Fewest layers of a stage: none where it holds a vocabulary layer instead.
    fn fewest(&self, stage: usize) -> usize {
        let p = self.line.devices;
        let end = self.line.passes.is_none() && (stage == 0 || stage + 1 == p);
        usize::from(!(end && p > 1))
    }

    fn ends(&self, stage: usize) -> impl Iterator<Item = &End> {
        let first = (stage == 0).then_some(&self.work.embedding);
        let last = (stage + 1 == self.line.devices).then_some(&self.work.head);
        first.into_iter().chain(last)
    }

    /// Stage `q`'s row without waits, with its forward and its backward; infinite where it does not fit.
    fn row(&self, stage: usize, start: usize, end: usize) -> Row {
        let (from, to) = (&self.before[start], &self.before[end]);
        let (down_s, up_s) = self.line.crossings_s(stage);
        let mut forward_s = to.forward_s - from.forward_s + down_s;
        let mut backward_s = to.backward_s - from.backward_s + up_s;
        if self.line.passes.is_none() {
            for holds in self.ends(stage) {
                forward_s += holds.forward_s;
                backward_s += holds.backward_s;
            }
        }
        backward_s += self.recompute_s(stage, start, end);
        let ramp_s = self.way_to_s(stage, start);
        let own_s = self.line.m() * (forward_s + backward_s + self.line.passes_s());
        Row { forward_s, backward_s, total_s: ramp_s + own_s }
    }

    /// One micro-batch down to a stage that starts at a layer and back up from it.
    fn way_to_s(&self, stage: usize, start: usize) -> f64 {
        let sums = &self.before[start];
        let embedding_s =
            if stage > 0 && self.line.passes.is_none() { self.work.embedding.load_s() } else { 0.0 };
        sums.forward_s + sums.backward_s + embedding_s + self.way_s(0, stage)
    }

    /// One micro-batch down from a stage that ends at a layer and back to it.
    fn way_from_s(&self, stage: usize, end: usize) -> f64 {
        let p = self.line.devices;
        let (from, to) = (&self.before[end], &self.before[self.len()]);
        let head_s =
            if stage + 1 < p && self.line.passes.is_none() { self.work.head.load_s() } else { 0.0 };
        let layers_s = to.forward_s - from.forward_s + to.backward_s - from.backward_s;
        layers_s + head_s + self.way_s(stage + 1, p)
    }

    /// Transfers of one micro-batch that stages `from..to` wait for or run themselves, and links between
    /// them, s.
    fn way_s(&self, from: usize, to: usize) -> f64 {
        if from >= to {
            return 0.0;
        }
        let ends = usize::from(from == 0) + usize::from(to == self.line.devices);
        let blocking_s = if self.line.hop_blocks { (2 * (to - from) - ends) as f64 * self.line.hop_s } else { 0.0 };
        blocking_s + (to - from) as f64 * self.line.round_trip_s()
    }

    /// Least recomputation that memory makes necessary, s.
    fn recompute_s(&self, stage: usize, start: usize, end: usize) -> f64 {
        let counts = &self.layers.between(start, end);
        if self.budget_bytes == f64::INFINITY {
            return self.trade.at_first(counts).0;
        }
        let mut params = self.before[end].params + self.before[start].params * -1.0;
        let (mut fixed, mut each) = (0.0, 0.0);
        if self.line.passes.is_some() {
            params.dense += self.work.embedding.params + self.work.head.params;
        } else {
            for holds in self.ends(stage) {
                params.dense += holds.params;
                fixed += holds.workspace_bytes;
                each += holds.in_flight_bytes;
            }
        }
        let n = self.in_flight[stage];
        // What just fits must not be declared too large by another order of summation.
        let free = self.budget_bytes * (1.0 + 1e-9) - self.state.bytes_of(params) - fixed - n * each;
        self.trade.least_s(counts, n, free)
    }

    /// A stage's waits where the closed form has them.
    fn waits_s(&self, stage: usize, end: usize, row: &Row) -> f64 {
        if self.line.schedule != ScheduleName::OneFOneB {
            return 0.0;
        }
        let (p, m) = (self.line.devices, self.line.micro_batches);
        let warm = Warm::of(p, m, stage, self.line.passes.unwrap_or_default());
        let below_s = self.way_from_s(stage, end);
        let wait_s = |pass_s: f64| warm.wait_s(pass_s, below_s);
        warm.both_s(m, wait_s(row.forward_s), wait_s(row.backward_s))
    }

    /// As [`Self::solve`]. Far limits leave many cuts open, so nearer ones are tried first: the ranges then
    /// are those that may lie below a nearer limit.
    pub fn least_s(&self, limit_s: f64) -> f64 {
        let all = &self.before[self.len()];
        let ends_s = if self.line.passes.is_none() {
            self.work.embedding.load_s() + self.work.head.load_s()
        } else {
            0.0
        };
        let layers_s = all.forward_s + all.backward_s + ends_s + self.way_s(0, self.line.devices);
        let mean_s = layers_s / self.line.devices as f64 + self.line.passes_s();
        let least_s = self.line.m() * mean_s;
        let mut near_s = 1.03 * super::closed::passes_s(self.line, self.work, 0.0).max(least_s);
        while near_s < limit_s.min(FAR * least_s) {
            if let Some(cuts) = self.solve(near_s) {
                return cuts.bound_s;
            }
            near_s *= NEARER;
        }
        self.solve(limit_s).map_or(f64::INFINITY, |cuts| cuts.bound_s)
    }

    /// The least of the largest rows; `None` where every cut has one of `limit_s` or more.
    pub fn solve(&self, limit_s: f64) -> Option<Cuts> {
        let p = self.line.devices;
        let (least, most) = (self.first_starts(limit_s)?, self.last_starts(limit_s));
        let mut ranges = vec![vec![]; p];
        let mut behind = vec![f64::INFINITY; self.len() + 1];
        behind[self.len()] = 0.0;
        for stage in (0..p).rev() {
            let mut here = vec![f64::INFINITY; self.len() + 1];
            for start in least[stage]..=most[stage] {
                let from = least[stage + 1].max(start + self.fewest(stage));
                for end in from..=most[stage + 1] {
                    let row = self.row(stage, start, end);
                    if row.total_s >= limit_s {
                        break;
                    }
                    let row_s = row.total_s + self.waits_s(stage, end, &row);
                    let value_s = row_s.max(behind[end]);
                    if value_s < limit_s {
                        let tail_s = if stage == 0 { self.tail_s(end) } else { 0.0 };
                        here[start] = here[start].min(value_s + tail_s);
                        ranges[stage].push((start, end));
                    }
                }
            }
            behind = here;
        }
        (behind[0] < limit_s).then_some(Cuts { bound_s: behind[0], ranges })
    }

    /// Length of a chain of passes under the cut that makes it shortest, s, with `fixed_s` of transfers and
    /// vocabulary passes in it. The order of passes is a pipeline's own, so a chain found in one
    /// configuration bounds every other with the same pipeline.
    pub fn path_s(&self, cuts: &Cuts, path: &CriticalPath, fixed_s: f64) -> f64 {
        let mut behind = vec![f64::INFINITY; self.len() + 1];
        behind[self.len()] = 0.0;
        for (stage, ranges) in cuts.ranges.iter().enumerate().rev() {
            let mut here = vec![f64::INFINITY; self.len() + 1];
            let (forwards, backwards) =
                (f64::from(path.forward_count[stage]), f64::from(path.backward_count[stage]));
            for &(start, end) in ranges {
                let row = self.row(stage, start, end);
                let own_s = forwards * row.forward_s + backwards * row.backward_s;
                here[start] = here[start].min(own_s + behind[end]);
            }
            behind = here;
        }
        behind[0] + fixed_s
    }

    /// The first device's reductions: nothing hides them, and every row ends with its last pass.
    fn tail_s(&self, end: usize) -> f64 {
        self.state.tail_of_s(self.before[end].params)
    }

    /// The first layers that each stage can have at least: the stages from it on then hold all the rest. The
    /// row without waits grows with the range and falls with a later start.
    fn first_starts(&self, limit_s: f64) -> Option<Vec<usize>> {
        let p = self.line.devices;
        let mut least = vec![self.len(); p + 1];
        for stage in (0..p).rev() {
            // A range that ends where the others must begin at the earliest; where none such fits, later.
            let fits = |end: &usize| {
                let start = end.checked_sub(self.fewest(stage));
                start.is_some_and(|start| self.row(stage, start, *end).total_s < limit_s)
            };
            let end = (least[stage + 1]..=self.len()).find(fits)?;
            let mut start = end - self.fewest(stage);
            while start > 0 && self.row(stage, start - 1, end).total_s < limit_s {
                start -= 1;
            }
            least[stage] = start;
        }
        (least[0] == 0).then_some(least)
    }

    /// The last layers at which each stage can start.
    fn last_starts(&self, limit_s: f64) -> Vec<usize> {
        let p = self.line.devices;
        let mut most = vec![0; p + 1];
        for stage in 0..p {
            let start = most[stage];
            let mut end = (start + self.fewest(stage)).min(self.len());
            while end < self.len() && self.row(stage, start, end + 1).total_s < limit_s {
                end += 1;
            }
            most[stage + 1] = end;
        }
        most
    }
}

/// Growth of limits that are tried in turn, and how far beyond the mean load they are.
const NEARER: f64 = 1.1;
const FAR: f64 = 100.0;

struct Row {
    forward_s: f64,
    backward_s: f64,
    total_s: f64,
}
