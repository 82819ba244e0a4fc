//! One configuration over every cut and every recompute split, as an integer program.
//!
//! With several chunks per pipeline rank the search tries listed cuts ([`super::local_search`],
//! [`super::partition_candidates`]). Here every contiguous range of layers that a stage may hold is
//! a column, with every recompute split that no other dominates. Ranges that alone take a rank
//! beyond the cut-off are left out. A linear program in which layers may lie in any order comes
//! first.

use crate::partition::relaxation::{self, Relaxation};
use crate::partition::{Choice, Column, Problem, Scratch, ilp};
use crate::pricing::priced::{Placed, PlacedStage};
use crate::pricing::{Configuration, StageCost};
use crate::simulate::CriticalPath;
use models::placement::may_be_empty;

/// The result for one configuration.
#[derive(Clone, Debug, Default)]
pub struct EveryCut {
    /// The best placement below the cut-off, with its time before overheads, s.
    pub best: Option<(Placed, f64)>,
    /// What the integer programs proved, and what they cost.
    pub report: ilp::Report,
    /// Chains of passes found, those given included.
    pub paths: Vec<CriticalPath>,
}

/// Whether layers keep their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layering {
    /// As in the model.
    InOrder,
    /// Only how many of each kind a stage holds counts. Ranges begin at 0.
    AnyOrder,
}

/// Work that counts for a column that is priced, in the unit of [`ilp::Limits::work`].
const COLUMN_WORK: u64 = 2;

/// Layer ranges of a stage, with the stage's cost under each.
type OpenRanges = Vec<((usize, usize), StageCost)>;

impl Configuration<'_> {
    /// A bound over every cut and recompute split, and the chains of passes that give it. `known`
    /// are chains of passes of the same order.
    pub fn bound_of_every_cut(
        &self,
        known: Vec<CriticalPath>,
        (cutoff_s, ignore_memory): (f64, bool),
        limits: ilp::Limits<'_>,
        scratch: &mut Scratch,
    ) -> Relaxation {
        match self.every_cut(cutoff_s, ignore_memory, Layering::AnyOrder) {
            None => Relaxation { bound_s: cutoff_s, nothing_below: true, paths: known, work: 0 },
            Some(problem) => {
                let columns: usize = problem.columns.iter().map(Vec::len).sum();
                let found = relaxation::solve(&problem, known, cutoff_s, limits, scratch);
                Relaxation { work: found.work + COLUMN_WORK * columns as u64, ..found }
            }
        }
    }

    /// The best placement below `cutoff_s` over every cut and recompute split. `known` are chains
    /// of passes of the same order.
    pub fn best_of_every_cut(
        &self,
        known: Vec<CriticalPath>,
        (cutoff_s, ignore_memory): (f64, bool),
        limits: ilp::Limits<'_>,
        scratch: &mut Scratch,
    ) -> EveryCut {
        let Relaxation { bound_s, nothing_below: proven, paths, work } =
            self.bound_of_every_cut(known, (cutoff_s, ignore_memory), limits, scratch);
        let problem = match proven || work >= limits.work {
            true => None,
            false => self.every_cut(cutoff_s, ignore_memory, Layering::InOrder),
        };
        let Some(problem) = problem else {
            let effort = ilp::Effort { work, ..ilp::Effort::default() };
            let report = ilp::Report { proven, bound_s, effort, best: None };
            return EveryCut { best: None, report, paths };
        };
        let left = ilp::Limits { work: limits.work - work, ..limits };
        let (mut report, paths) = ilp::solve_with(&problem, paths, cutoff_s, left, scratch);
        report.effort.work += work;
        report.bound_s = report.bound_s.max(bound_s);
        let best = report.best.as_ref();
        let best = best.map(|(choice, value_s)| (self.placed_of(&problem, choice), *value_s));
        EveryCut { best, report, paths }
    }

    /// The partition problem over every cut and recompute split. Ranges with which a rank's own
    /// work takes `cutoff_s` or more are left out; `None` where some stage has no other.
    pub fn every_cut(
        &self,
        cutoff_s: f64,
        ignore_memory: bool,
        layering: Layering,
    ) -> Option<Problem> {
        let counted = layering == Layering::AnyOrder || self.cache.layers.is_uniform();
        let ranges = self.open_ranges(cutoff_s, counted)?;
        let all = |columns: fn(&Self, usize, &OpenRanges) -> Vec<Column>| {
            let stages = ranges.iter().enumerate();
            stages.map(|(stage, ranges)| columns(self, stage, ranges)).collect()
        };
        let mut problem = self.problem_of(all(Self::fastest_columns));
        if ignore_memory {
            problem.budget_bytes.fill(f64::INFINITY);
        } else {
            problem.host_budget_bytes = self.cache.cluster.host.memory_bytes;
            if !every_choice_fits(&problem) {
                problem.columns = all(Self::split_columns);
            }
        }
        if counted {
            for column in problem.columns.iter_mut().flatten() {
                (column.start, column.end) = (0, column.end - column.start);
            }
        }
        problem.columns.iter().all(|columns| !columns.is_empty()).then_some(problem)
    }

    /// A stage's columns with the least recomputation.
    fn fastest_columns(&self, stage: usize, ranges: &OpenRanges) -> Vec<Column> {
        let of = |((start, end), cost): &((usize, usize), StageCost)| {
            let split = self.least_recompute(*start, *end);
            let host_bytes = self.stage_host_bytes(stage, cost);
            Column { host_bytes, ..self.column((*start, *end), 0, cost, &split) }
        };
        ranges.iter().map(of).collect()
    }

    /// A stage's columns with every recompute split with which it fits alone.
    fn split_columns(&self, stage: usize, ranges: &OpenRanges) -> Vec<Column> {
        let (budget, mut columns) = (self.budget_bytes(), vec![]);
        for ((start, end), cost) in ranges {
            let host_bytes = self.stage_host_bytes(stage, cost);
            for (index, split) in self.recompute_choices(*start, *end).iter().enumerate() {
                let column = self.column((*start, *end), index, cost, split);
                if self.fits_alone(stage, &column, budget) {
                    columns.push(Column { host_bytes, ..column });
                }
            }
        }
        columns
    }

    /// Layer ranges by stage that some cut has in which no stage's own passes, reductions and step
    /// take `cutoff_s`. With `counted`, one range for each number of layers of each kind.
    fn open_ranges(&self, cutoff_s: f64, counted: bool) -> Option<Vec<OpenRanges>> {
        let (layers, stages) = (self.cache.layers.len(), self.stages());
        let mut starts = vec![false; layers + 1];
        starts[0] = true;
        let mut open: Vec<OpenRanges> = vec![];
        for stage in 0..stages {
            let (ranges, ends) = self.ranges_from(stage, &starts, cutoff_s);
            open.push(ranges);
            starts = ends;
        }
        // Backwards: only ranges that the later stages can follow.
        let mut ends = vec![false; layers + 1];
        ends[layers] = true;
        for ranges in open.iter_mut().rev() {
            ranges.retain(|((_, end), _)| ends[*end]);
            ends.fill(false);
            ranges.iter().for_each(|((start, _), _)| ends[*start] = true);
            if counted {
                let kinds =
                    |range: &((usize, usize), _)| self.cache.layers.between(range.0.0, range.0.1);
                ranges.sort_by_key(kinds);
                ranges.dedup_by_key(|range| kinds(range));
            }
        }
        open.iter().all(|ranges| !ranges.is_empty()).then_some(open)
    }

    /// The ranges of a stage that start where the stages before may end, and where they end. All
    /// that the stage does takes less than `limit_s`.
    fn ranges_from(&self, stage: usize, starts: &[bool], limit_s: f64) -> (OpenRanges, Vec<bool>) {
        let layers = self.cache.layers.len();
        let (mut ranges, mut ends) = (vec![], vec![false; layers + 1]);
        let mut known: Vec<StageCost> = vec![];
        for start in (0..=layers).filter(|&start| starts[start]) {
            let first = start + self.fewest_layers(stage);
            for end in first..=layers {
                let cost = match known.get(end - first) {
                    Some(cost) => cost.clone(),
                    None => self.stage(stage, start, end),
                };
                if self.own_s(start..end, &cost) >= limit_s {
                    break;
                }
                if self.cache.layers.is_uniform() && known.len() == end - first {
                    known.push(cost.clone());
                }
                ranges.push(((start, end), cost));
            }
        }
        ranges.iter().for_each(|((_, end), _)| ends[*end] = true);
        (ranges, ends)
    }

    /// Fewest layers of a stage: only the stages that hold the vocabulary layers may have none.
    fn fewest_layers(&self, stage: usize) -> usize {
        usize::from(!may_be_empty(self.decisions.vocab, stage, self.stages()))
    }

    /// A stage's own passes, reductions and step with the least recomputation, s.
    fn own_s(&self, range: std::ops::Range<usize>, cost: &StageCost) -> f64 {
        let again_s = self.least_recompute(range.start, range.end).recompute_s;
        let runs = self.pipeline().runs();
        runs * (cost.load_s() + again_s) + cost.tail_s + cost.optimizer_s + cost.gather_s
    }

    /// The placement that a choice of [`Self::every_cut`] stands for.
    fn placed_of(&self, problem: &Problem, choice: &Choice) -> Placed {
        let mut start = 0;
        let stage = |(stage, &index): (usize, &usize)| {
            let column = &problem.columns[stage][index];
            let range = (start, start + column.layers());
            start = range.1;
            let splits = self.recompute_choices(range.0, range.1);
            let recompute = splits[column.recompute].recompute.clone();
            PlacedStage { start: range.0, end: range.1, recompute }
        };
        choice.iter().enumerate().map(stage).collect()
    }
}

/// Whether every rank's memory suffices whatever columns its stages have.
fn every_choice_fits(problem: &Problem) -> bool {
    let pipeline = &problem.pipeline;
    let fits = |rank: usize| {
        pipeline.in_flight[rank].iter().all(|counts| {
            let most = |(stage, chunk): (usize, usize)| {
                let bytes =
                    |c: &Column| c.state_bytes + f64::from(counts[chunk]) * c.in_flight_bytes;
                problem.columns[stage].iter().map(bytes).fold(0.0, f64::max)
            };
            pipeline.stages_on(rank).map(most).sum::<f64>() <= problem.budget_bytes[rank]
        })
    };
    (0..pipeline.ranks).all(fits)
}
