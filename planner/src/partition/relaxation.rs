//! The partition with columns chosen in part: a bound, and the chains of passes that matter.
//!
//! Relaxation: a stage may be filled by shares of several columns. Its seconds are then the shares'
//! sum, and the critical path of the simulation with these seconds is a chain that bounds every
//! placement. It becomes a row, until the linear program and the simulation agree.

use super::ilp::{Limits, Program, Relaxed, Values};
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

/// Adds chains to those known until the linear program agrees with the simulation.
pub fn solve(
    problem: &Problem,
    paths: Vec<CriticalPath>,
    cutoff_s: f64,
    limits: Limits<'_>,
    scratch: &mut Scratch,
) -> Relaxation {
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
            for (sum_s, alone_s) in sum.alone_s.iter_mut().zip(column.alone_s) {
                *sum_s += share * alone_s;
            }
        }
        vec![sum]
    };
    let columns = problem.columns.iter().zip(&relaxed.shares).map(stage).collect();
    Problem { columns, ..problem.clone() }
}
