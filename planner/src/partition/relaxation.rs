//! The partition with columns chosen in part: a bound, and the chains of passes that matter.
//!
//! Relaxation: a stage may be filled by shares of several columns. Its seconds are then the shares'
//! sum, and the critical path of the simulation with these seconds is a chain that bounds every
//! placement. It becomes a row, until the linear program and the simulation agree.
//!
//! Layers may lie in any order, so that only the numbers of each kind count.

use super::ilp::{Limits, Program, Relaxed, Values, could_beat};
use super::{Column, Problem, Scratch};
use crate::simulate::CriticalPath;

/// The bound of a relaxation.
#[derive(Clone, Debug, Default)]
pub struct Relaxation {
    /// Lower bound on every partition, s; the cut-off where nothing lies below it.
    pub bound_s: f64,
    /// Whether nothing lies below the cut-off.
    pub nothing_below: bool,
    /// Chains of passes found and given.
    pub paths: Vec<CriticalPath>,
    /// Counted as in [`Limits::work`].
    pub work: u64,
}

/// Relative difference of simulation and program below which no further chain is added.
const CLOSE: f64 = 1e-3;

/// Linear programs solved at most.
const MOST_PROGRAMS: usize = 100;

/// Adds chains to those known until the linear program agrees with the simulation. All ranges of
/// `problem` begin at 0.
pub fn solve(
    problem: &Problem,
    paths: Vec<CriticalPath>,
    cutoff_s: f64,
    limits: Limits<'_>,
    scratch: &mut Scratch,
) -> Relaxation {
    debug_assert!(problem.is_uniform(), "layers lie in any order");
    let problem = &without_replaceable(&below(problem, cutoff_s));
    let mut found = Relaxation { paths, ..Relaxation::default() };
    for _ in 0..MOST_PROGRAMS {
        if found.work >= limits.work || limits.until.is_over() {
            break;
        }
        let program = Program::build(problem, &found.paths, cutoff_s, Values::Parts);
        let left = Limits { work: limits.work - found.work, ..limits };
        let solved = program.map_or((1, Some(None)), |program| program.relaxed(left));
        found.work += solved.0;
        let relaxed = match solved.1 {
            None => break,
            Some(None) => {
                (found.bound_s, found.nothing_below) = (cutoff_s, true);
                break;
            }
            Some(Some(relaxed)) => relaxed,
        };
        // Every program is a relaxation, so its bound holds for all later ones.
        found.bound_s = found.bound_s.max(relaxed.bound_s.min(cutoff_s));
        let mixed = mixed(problem, &relaxed);
        let choice = vec![0; problem.stages()];
        let path = mixed.critical_path(&choice, scratch);
        let value_s = mixed.iteration_s(&choice, scratch);
        if value_s <= relaxed.bound_s * (1.0 + CLOSE) || found.paths.contains(&path) {
            break;
        }
        found.paths.push(path);
    }
    found
}

/// The problem with one column for each stage: the sum of its shares.
fn mixed(problem: &Problem, relaxed: &Relaxed) -> Problem {
    let stage = |(columns, shares): (&Vec<Column>, &Vec<(usize, f64)>)| {
        let mut sum = Column::default();
        for &(at, share) in shares.iter().filter(|(_, share)| *share > 0.0) {
            let column = &columns[at];
            sum.forward_s += share * column.forward_s;
            sum.backward_s += share * column.backward_s;
            sum.weight_s += share * column.weight_s;
            sum.tail_s += share * column.tail_s;
            sum.step_s += share * column.step_s;
            for (sum_s, unpaired_s) in sum.unpaired_s.iter_mut().zip(column.unpaired_s) {
                *sum_s += share * unpaired_s;
            }
        }
        vec![sum]
    };
    let columns = problem.columns.iter().zip(&relaxed.shares).map(stage).collect();
    Problem { columns, ..problem.clone() }
}

/// The problem without columns that the program would leave out. They must not replace others.
fn below(problem: &Problem, cutoff_s: f64) -> Problem {
    let of_stage = |(stage, columns): (usize, &Vec<Column>)| {
        let kept = |column: &usize| could_beat(problem, stage, *column, cutoff_s);
        (0..columns.len()).filter(kept).map(|column| columns[column]).collect()
    };
    let columns = problem.columns.iter().enumerate().map(of_stage).collect();
    Problem { columns, ..problem.clone() }
}

/// Rounding that may hide that a column is replaceable, as a factor.
const ROUNDING: f64 = 1.0 + 1e-12;

/// The problem without columns that shares of two others replace: they cost no more, and stand for
/// the same layers. All rows are linear and none falls with a cost, so the optimum stays the same.
/// (The waits of 1F1B fall with a stage's passes, but no faster than its own work rises.)
fn without_replaceable(problem: &Problem) -> Problem {
    let kinds = problem.kinds.iter().enumerate();
    let main = kinds.max_by_key(|(_, layers)| **layers).map_or(0, |(kind, _)| kind);
    let others = |column: &Column| {
        let mut kinds = column.kinds;
        kinds[main] = 0;
        kinds
    };
    let of_stage = |columns: &Vec<Column>| {
        let mut sorted = columns.clone();
        sorted.sort_by_key(|column| (others(column), column.kinds[main]));
        let alike = sorted.chunk_by(|a, b| others(a) == others(b));
        alike.flat_map(|alike| corners(alike, main)).collect()
    };
    Problem { columns: problem.columns.iter().map(of_stage).collect(), ..problem.clone() }
}

/// What is left of columns that differ in the number of layers of one kind, in ascending order, and
/// in recomputation.
fn corners(columns: &[Column], kind: usize) -> Vec<Column> {
    let counts = columns.chunk_by(|a, b| a.kinds == b.kinds);
    let mut counts: Vec<Vec<Column>> =
        counts.map(|same| hull(same.iter(), |column| column.in_flight_bytes)).collect();
    // What is left of one number of layers recomputes all of them in the same way. Where there are
    // as many ways, these correspond.
    let ways = counts.iter().map(Vec::len).max().unwrap_or(0);
    let fewer: Vec<Vec<Column>> = counts.extract_if(.., |ways_of| ways_of.len() < ways).collect();
    let by_way = (0..ways).flat_map(|way| {
        let own = counts.iter().map(|ways_of| &ways_of[way]);
        hull(own, |column| column.kinds[kind] as f64)
    });
    fewer.into_iter().flatten().chain(by_way).collect()
}

/// Columns in ascending order of `by`, without those that shares of their neighbours replace.
fn hull<'a>(columns: impl Iterator<Item = &'a Column>, by: impl Fn(&Column) -> f64) -> Vec<Column> {
    let mut sorted: Vec<Column> = columns.copied().collect();
    sorted.sort_by(|a, b| by(a).total_cmp(&by(b)));
    let mut kept: Vec<Column> = vec![];
    for next in sorted {
        while let [.., before, last] = kept[..]
            && replace([&before, &next], &last, &by)
        {
            kept.pop();
        }
        kept.push(next);
    }
    kept
}

/// Whether shares of two columns cost no more than a third, which lies between them in `by`.
fn replace([before, after]: [&Column; 2], column: &Column, by: impl Fn(&Column) -> f64) -> bool {
    let whole = by(after) - by(before);
    let share = if whole > 0.0 { (by(after) - by(column)) / whole } else { 0.5 };
    let mixed = |of: &dyn Fn(&Column) -> f64| share * of(before) + (1.0 - share) * of(after);
    let costs: [fn(&Column) -> f64; 10] = [
        |c| c.forward_s,
        |c| c.backward_s,
        |c| c.weight_s,
        |c| c.unpaired_s[0],
        |c| c.unpaired_s[1],
        |c| c.tail_s,
        |c| c.step_s,
        |c| c.in_flight_bytes,
        |c| c.state_bytes,
        |c| c.host_bytes,
    ];
    costs.iter().all(|cost| mixed(cost) <= cost(column) * ROUNDING)
}
