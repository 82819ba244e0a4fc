//! How well the model's own terms could order runs, by an integer program: no factors do better.
//!
//! Of a permutation of `n` runs, `Σ (rank − place)² = 2 Σ (places between)` over its inversions, so Spearman's
//! correlation is `1 − 12/(n (n² − 1)) · Σ z (j − i)`, linear in which pairs `i < j` are inverted (`z`).

use super::oracle::{Run, runs_and_sweeps, weighted};
use crate::validate::Predicted;
use crate::validate::row::Row;
use good_lp::{
    Expression, Solution, SolverModel, Variable, WithMipGap, constraint,
    solvers::{SolutionStatus, highs::highs},
    variable, variables,
};
use std::collections::BTreeMap;

/// Factors under which the mean error over groups is more than this explain nothing: twice what is asked of any source
/// with sweeps.
pub const MOST_ERROR: f64 = 0.1;
/// Pairs count as ordered where the slower one is predicted to take longer by this part of the other's measured time.
pub const LEAST_MARGIN: f64 = 1e-3;
/// Part of what is lost to inversions that a proof may leave open.
const GAP: f64 = 1e-4;
/// A sweep with fewer configurations has no correlation.
const ENOUGH: usize = 3;

/// The most rank correlation, weighted by configurations, of any factors of a source's terms, each at least 0 and the
/// same for all its runs, fitted to the runs they are judged on. `None` where the source has no sweeps, or nothing is
/// proven within `limit_s`.
pub fn most_rank_correlation(
    source: &str,
    (rows, predicted): (&[Row], &[Predicted]),
    limit_s: f64,
) -> Option<f64> {
    let (runs, sweeps) = runs_and_sweeps(source, rows, predicted);
    let mut sweeps: Vec<Vec<Run<'_>>> = sweeps.into_iter().map(|(_, runs)| runs).collect();
    sweeps.retain(|runs| runs.len() >= ENOUGH);
    most(&runs, sweeps, limit_s)
}

fn most(runs: &[Run<'_>], mut sweeps: Vec<Vec<Run<'_>>>, limit_s: f64) -> Option<f64> {
    let all: f64 = sweeps.iter().map(|runs| runs.len() as f64).sum();
    sweeps.iter_mut().for_each(|runs| runs.sort_by(|a, b| a.measured_s.total_cmp(&b.measured_s)));
    let pairs: Vec<Pair<'_>> = sweeps.iter().flat_map(|runs| pairs(runs, all)).collect();
    if pairs.is_empty() {
        return None;
    }
    let most_factors = most_factors(runs);
    // Factors as parts of their most, which keeps the program well scaled.
    let scaled = |run: &Run<'_>| -> Vec<f64> {
        run.terms.iter().zip(&most_factors).map(|(term, most)| term * most).collect()
    };
    let mut space = variables!();
    let factors: Vec<Variable> =
        most_factors.iter().map(|_| space.add(variable().bounds(0.0..=1.0))).collect();
    let errors: Vec<Variable> = runs.iter().map(|_| space.add(variable().min(0.0))).collect();
    let inverted: Vec<Variable> = pairs.iter().map(|_| space.add(variable().binary())).collect();
    let lost: Expression =
        pairs.iter().zip(&inverted).map(|(pair, inverted)| pair.weight * *inverted).sum();
    let mut program = space.minimise(lost.clone()).using(highs);
    program.set_verbose(false);
    let program = program.set_time_limit(limit_s);
    let mut program = program.with_mip_gap(GAP as f32).ok()?;
    let mut error = Expression::from(0.0);
    for ((run, own), share) in runs.iter().zip(&errors).zip(shares(runs)) {
        let ratio = weighted(&factors, &scaled(run), run.measured_s);
        program.add_constraint(constraint!(ratio.clone() - 1.0 <= *own));
        program.add_constraint(constraint!(1.0 - ratio <= *own));
        error += share * *own;
    }
    program.add_constraint(constraint!(error <= MOST_ERROR));
    for (pair, inverted) in pairs.iter().zip(&inverted) {
        let [faster, slower] = [pair.faster, pair.slower].map(scaled);
        let apart: Vec<f64> = faster
            .iter()
            .zip(&slower)
            .map(|(faster, slower)| (faster - slower) / pair.faster.measured_s)
            .collect();
        let free = apart.iter().map(|apart| apart.max(0.0)).sum::<f64>() + LEAST_MARGIN;
        let behind = weighted(&factors, &apart, 1.0) + LEAST_MARGIN;
        program.add_constraint(constraint!(behind <= free * *inverted));
    }
    let solved = program.solve().ok()?;
    let proven = !matches!(solved.status(), SolutionStatus::TimeLimit);
    proven.then(|| 1.0 - (1.0 - GAP) * solved.eval(&lost))
}

/// Two runs of a sweep, and what their inversion takes from the correlation.
struct Pair<'a> {
    faster: &'a Run<'a>,
    slower: &'a Run<'a>,
    weight: f64,
}

/// Pairs of a sweep that rises in measured time; `all` are the configurations of all sweeps.
fn pairs<'a>(runs: &'a [Run<'a>], all: f64) -> Vec<Pair<'a>> {
    let n = runs.len() as f64;
    let of_place = 12.0 / (n * (n * n - 1.0)) * n / all;
    let mut found = Vec::new();
    for (j, slower) in runs.iter().enumerate() {
        for (i, faster) in runs[..j].iter().enumerate() {
            if faster.measured_s < slower.measured_s {
                found.push(Pair { faster, slower, weight: of_place * (j - i) as f64 });
            }
        }
    }
    found
}

/// The share of each run's error in the mean over groups.
fn shares(runs: &[Run<'_>]) -> Vec<f64> {
    let mut sizes: BTreeMap<&str, f64> = BTreeMap::new();
    for run in runs {
        *sizes.entry(&run.row.group).or_default() += 1.0;
    }
    let groups = sizes.len() as f64;
    runs.iter().map(|run| 1.0 / (sizes[run.row.group.as_str()] * groups)).collect()
}

/// Parts of a run's time that are rounding.
const ROUNDING: f64 = 1e-7;

/// The most that each factor can be with no more than [`MOST_ERROR`]: no run's term is more than the run takes and its
/// error allows. A term that no run has is 0.
fn most_factors(runs: &[Run<'_>]) -> Vec<f64> {
    let shares = shares(runs);
    let most = |index: usize| {
        let there = runs
            .iter()
            .zip(&shares)
            .filter(|(run, _)| run.terms[index] > ROUNDING * run.measured_s);
        let of_run = there
            .map(|(run, share)| (1.0 + MOST_ERROR / share) * run.measured_s / run.terms[index]);
        of_run.reduce(f64::min).unwrap_or(0.0)
    };
    (0..runs.first().map_or(0, |run| run.terms.len())).map(most).collect()
}

#[cfg(test)]
mod tests {
    use super::super::oracle::tests::{any_row, runs};
    use super::*;

    #[test]
    fn what_some_factors_order_is_found_and_what_none_do_is_not() {
        let row = any_row();
        let most_of = |of: &[(f64, [f64; 2])]| {
            most(&runs(&row, of), vec![runs(&row, of)], 60.0).expect("a proof")
        };
        // Twice the second term, and nothing of the first.
        assert_eq!(most_of(&[(1.0, [2.0, 0.5]), (2.0, [1.0, 1.0]), (3.0, [0.0, 1.5])]), 1.0);
        // The fastest has most of everything: it comes last, 1 - 6·(4 + 1 + 1)/(3·8).
        let last = most_of(&[(1.0, [1.05, 1.05]), (1.02, [1.0, 1.0]), (1.04, [1.02, 1.02])]);
        assert!((last + 0.5).abs() < 1e-3, "{last}");
        // The second and the third have the same: they are not told apart.
        let alike = most_of(&[(1.0, [1.0, 1.0]), (2.0, [2.0, 2.0]), (2.4, [2.0, 2.0])]);
        assert!((alike - 0.5).abs() < 1e-3, "{alike}");
    }
}
