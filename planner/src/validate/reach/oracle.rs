//! What the model's own terms could do if their constants were free, fitted to the very runs they are judged on.
//!
//! The terms of a run are the parts of its predicted time (`Breakdown`) and, finer, the part of it that each constant of
//! software and device moves. An oracle multiplies each by a factor of its own, at least 0, the same for all runs of a
//! source on one kind of GPU. What it cannot do, no fit of the model's constants can; what it can do, a fit that has not
//! seen the runs need not.

use super::{Share, over_groups};
use crate::case::priced::Breakdown;
use crate::validate::fit::knobs::{DEVICE, SOFTWARE};
use crate::validate::ranking::{Timed, spearman, swept};
use crate::validate::row::Row;
use crate::validate::setup::setup;
use crate::validate::{Predicted, price};
use good_lp::{
    Expression, Solution, SolverModel, Variable, constraint, solvers::highs::highs, variable,
    variables,
};
use std::collections::{BTreeMap, BTreeSet};

/// Step of a constant's logarithm that its part of a time is taken over.
const STEP: f64 = 0.1;
/// Runs within this of the fastest are as good as it.
const AS_GOOD: f64 = 0.02;

/// A run with its terms.
pub(super) struct Run<'a> {
    pub(super) row: &'a Row,
    pub(super) measured_s: f64,
    pub(super) terms: Vec<f64>,
}

/// What free constants make of a source.
#[derive(Clone, Debug)]
pub struct Oracle {
    /// Error of the best constants: no others have a smaller mean.
    pub error: Share,
    /// The same among constants that put the fastest run of every sweep before all that are more than 2 % slower;
    /// none where there are no such constants.
    pub ordered: Option<Share>,
    /// Sweeps, of which there may be none.
    pub sweeps: usize,
    /// Rank correlation of those constants, weighted by configurations.
    pub rank_correlation: f64,
    /// Largest regret of those constants.
    pub worst_regret: f64,
    /// Sweeps whose fastest runs some constants, free for this sweep alone, put first.
    pub sweeps_in_reach: usize,
    /// What is fixed in the others.
    pub out_of_reach: Vec<String>,
}

/// The oracle of one source.
pub fn oracle(source: &str, rows: &[Row], predicted: &[Predicted]) -> Option<Oracle> {
    let (runs, sweeps) = runs_and_sweeps(source, rows, predicted);
    let free = by_gpu(&runs, &[])?;
    let ordered = by_gpu(&runs, &sweeps);
    let out_of_reach: Vec<String> =
        sweeps.iter().filter(|(_, runs)| !in_reach(runs)).map(|(fixed, _)| fixed.clone()).collect();
    Some(Oracle {
        error: share(source, &runs, &free)?,
        ordered: ordered.and_then(|factors| share(source, &runs, &factors)),
        sweeps: sweeps.len(),
        rank_correlation: rank_correlation(&free, &sweeps),
        worst_regret: sweeps.iter().map(|(_, runs)| regret(&free, runs)).fold(0.0, f64::max),
        sweeps_in_reach: sweeps.len() - out_of_reach.len(),
        out_of_reach,
    })
}

/// A sweep: what is fixed in it, and its runs.
type Swept<'a> = (String, Vec<Run<'a>>);

/// A source's runs, and its sweeps.
pub(super) fn runs_and_sweeps<'a>(
    source: &str,
    rows: &'a [Row],
    predicted: &'a [Predicted],
) -> (Vec<Run<'a>>, Vec<Swept<'a>>) {
    let of_source = |row: &&Row| row.file == source;
    let runs = rows.iter().filter(of_source).filter_map(run).collect();
    let sweeps = swept(rows, predicted)
        .into_iter()
        .filter(|((file, _), (timed, _))| file == source && timed.len() > 1)
        .map(|((_, fixed), (timed, _))| (fixed, timed.iter().filter_map(of_timed).collect()))
        .collect();
    (runs, sweeps)
}

/// Factors of each kind of GPU.
type Factors<'a> = BTreeMap<&'a str, Vec<f64>>;

/// The factors with the least error for each kind of GPU, among those that order the given sweeps rightly.
fn by_gpu<'a>(runs: &[Run<'a>], sweeps: &[(String, Vec<Run<'a>>)]) -> Option<Factors<'a>> {
    let gpus: BTreeSet<&str> = runs.iter().map(|run| run.row.gpu.as_str()).collect();
    let of = |gpu: &'a str| {
        let on = |run: &&Run<'a>| run.row.gpu == gpu;
        let sweeps: Vec<&[Run<'a>]> = sweeps
            .iter()
            .map(|(_, runs)| runs.as_slice())
            .filter(|runs| runs.first().is_some_and(|run| run.row.gpu == gpu))
            .collect();
        let runs: Vec<&Run<'a>> = runs.iter().filter(on).collect();
        Some((gpu, least_error(&runs, &sweeps)?))
    };
    gpus.into_iter().map(of).collect()
}

fn said(factors: &Factors<'_>, run: &Run<'_>) -> f64 {
    factors.get(run.row.gpu.as_str()).map_or(f64::NAN, |factors| dot(factors, &run.terms))
}

fn share(source: &str, runs: &[Run<'_>], factors: &Factors<'_>) -> Option<Share> {
    let errors = runs.iter().map(|run| {
        let error = said(factors, run) / run.measured_s - 1.0;
        (source, run.row.group.as_str(), error.abs())
    });
    over_groups(errors).into_iter().next()
}

fn run(row: &Row) -> Option<Run<'_>> {
    Some(Run { row, measured_s: row.measured_s()?, terms: terms(row)?.0 })
}

/// A configuration of a sweep, whose repetitions count with their mean.
fn of_timed<'a>(timed: &Timed<'a>) -> Option<Run<'a>> {
    Some(Run { measured_s: timed.measured_s, ..run(timed.row)? })
}

/// Seconds of each term, and of the run.
pub(super) fn terms(row: &Row) -> Option<(Vec<f64>, f64)> {
    let setup = setup(row).ok()?;
    let priced = price(&setup).ok()?;
    let Breakdown {
        compute_s,
        tp_s,
        cp_s,
        ep_s,
        pp_s,
        dp_s,
        bubble_s,
        recompute_s,
        optimizer_s,
        other_s,
    } = priced.breakdown;
    let parts =
        [compute_s, tp_s, cp_s, ep_s, pp_s, dp_s, bubble_s, recompute_s, optimizer_s, other_s];
    let moved = SOFTWARE.iter().chain(&DEVICE).map(|field| {
        let mut slower = setup.clone();
        *field.of(&mut slower.cluster) *= STEP.exp();
        let longer_s = price(&slower).map_or(0.0, |moved| moved.iteration_s - priced.iteration_s);
        (longer_s / STEP).max(0.0)
    });
    Some((parts.into_iter().chain(moved).collect(), priced.iteration_s))
}

fn dot(factors: &[f64], terms: &[f64]) -> f64 {
    factors.iter().zip(terms).map(|(factor, term)| factor * term).sum()
}

/// `Σ factor·term / by`.
pub(super) fn weighted(factors: &[Variable], terms: &[f64], by: f64) -> Expression {
    factors.iter().zip(terms).map(|(factor, term)| (term / by) * *factor).sum()
}

/// The factors with the least mean error over groups, of those that put the fastest run of each sweep before all that
/// are not as good: a linear program, so there are no better ones.
fn least_error(runs: &[&Run<'_>], sweeps: &[&[Run<'_>]]) -> Option<Vec<f64>> {
    let mut sizes: BTreeMap<&str, f64> = BTreeMap::new();
    for run in runs {
        *sizes.entry(&run.row.group).or_default() += 1.0;
    }
    let mut space = variables!();
    let count = runs.first()?.terms.len();
    let factors: Vec<Variable> = (0..count).map(|_| space.add(variable().min(0.0))).collect();
    let errors: Vec<Variable> = runs.iter().map(|_| space.add(variable().min(0.0))).collect();
    let objective: Expression = runs
        .iter()
        .zip(&errors)
        .map(|(run, error)| sizes[run.row.group.as_str()].recip() * *error)
        .sum();
    let mut program = space.minimise(objective).using(highs);
    program.set_verbose(false);
    for (run, error) in runs.iter().zip(&errors) {
        let ratio = weighted(&factors, &run.terms, run.measured_s);
        program.add_constraint(constraint!(ratio.clone() - 1.0 <= *error));
        program.add_constraint(constraint!(1.0 - ratio <= *error));
    }
    for sweep in sweeps {
        for (ahead, behind) in ahead_of(sweep, first(sweep), &factors) {
            program.add_constraint(constraint!(behind >= ahead));
        }
    }
    let solved = program.solve().ok()?;
    Some(factors.iter().map(|factor| solved.value(*factor)).collect())
}

/// What a run takes, and what each run takes that is not as good as the fastest, in units of the run's time.
fn ahead_of(runs: &[Run<'_>], index: usize, factors: &[Variable]) -> Vec<(Expression, Expression)> {
    let ahead = &runs[index];
    let own = weighted(factors, &ahead.terms, ahead.measured_s);
    let slower = runs.iter().filter(|run| !is_as_good(runs, run));
    slower.map(|run| (own.clone(), weighted(factors, &run.terms, ahead.measured_s))).collect()
}

/// The fastest run as measured.
fn first(runs: &[Run<'_>]) -> usize {
    let faster = |a: &usize, b: &usize| runs[*a].measured_s.total_cmp(&runs[*b].measured_s);
    (0..runs.len()).min_by(faster).unwrap_or(0)
}

fn is_as_good(runs: &[Run<'_>], run: &Run<'_>) -> bool {
    run.measured_s <= (1.0 + AS_GOOD) * runs[first(runs)].measured_s
}

/// Whether some factors put a run first that is as good as the fastest.
fn in_reach(runs: &[Run<'_>]) -> bool {
    let mut good = (0..runs.len()).filter(|index| is_as_good(runs, &runs[*index]));
    good.any(|index| can_lead(runs, index))
}

/// Whether some factors, not all 0, put a run before all that are not as good as the fastest.
fn can_lead(runs: &[Run<'_>], index: usize) -> bool {
    let mut space = variables!();
    let count = runs[index].terms.len();
    let factors: Vec<Variable> = (0..count).map(|_| space.add(variable().min(0.0))).collect();
    let margin = space.add(variable().max(1.0));
    let mut program = space.maximise(margin).using(highs);
    program.set_verbose(false);
    for (ahead, behind) in ahead_of(runs, index, &factors) {
        program.add_constraint(constraint!(behind - ahead >= margin));
    }
    let own = weighted(&factors, &runs[index].terms, runs[index].measured_s);
    program.add_constraint(constraint!(own == 1.0));
    program.solve().is_ok_and(|solved| solved.value(margin) > -1e-9)
}

fn regret(factors: &Factors<'_>, runs: &[Run<'_>]) -> f64 {
    let faster = |a: &&Run<'_>, b: &&Run<'_>| said(factors, a).total_cmp(&said(factors, b));
    let chosen = runs.iter().min_by(faster);
    chosen.map_or(0.0, |run| run.measured_s / runs[first(runs)].measured_s - 1.0)
}

/// Weighted by configurations, of sweeps with at least three.
fn rank_correlation(factors: &Factors<'_>, sweeps: &[(String, Vec<Run<'_>>)]) -> f64 {
    let long = sweeps.iter().filter(|(_, runs)| runs.len() >= 3);
    let (sum, weight) = long.fold((0.0, 0.0), |(sum, weight), (_, runs)| {
        let said: Vec<f64> = runs.iter().map(|run| said(factors, run)).collect();
        let measured: Vec<f64> = runs.iter().map(|run| run.measured_s).collect();
        let size = runs.len() as f64;
        (sum + size * spearman(&said, &measured), weight + size)
    });
    sum / weight
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Runs with two terms each.
    pub fn runs<'a>(row: &'a Row, of: &[(f64, [f64; 2])]) -> Vec<Run<'a>> {
        of.iter()
            .map(|(measured_s, terms)| Run { row, measured_s: *measured_s, terms: terms.to_vec() })
            .collect()
    }

    pub fn any_row() -> Row {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/papers/measured.csv");
        let rows =
            crate::validate::row::read(std::path::Path::new(path)).expect("the file is here");
        rows.into_iter().next().expect("it has rows")
    }

    #[test]
    fn factors_that_explain_all_runs_are_found() {
        let row = any_row();
        let runs = runs(&row, &[(5.0, [1.0, 1.0]), (7.0, [2.0, 1.0]), (8.0, [1.0, 2.0])]);
        let all: Vec<&Run<'_>> = runs.iter().collect();
        let factors = least_error(&all, &[]).expect("a solution");
        assert!((factors[0] - 2.0).abs() < 1e-6 && (factors[1] - 3.0).abs() < 1e-6, "{factors:?}");
        assert!(regret(&Factors::from([(row.gpu.as_str(), factors)]), &runs) == 0.0);
    }

    #[test]
    fn a_run_that_is_more_of_everything_cannot_come_first() {
        let row = any_row();
        // The first is measured to be the fastest, but has more of both terms than the second.
        let beaten = runs(&row, &[(5.0, [2.0, 2.0]), (6.0, [1.0, 1.0])]);
        assert!(!in_reach(&beaten));
        let traded = runs(&row, &[(5.0, [2.0, 1.0]), (6.0, [1.0, 2.0])]);
        assert!(in_reach(&traded));
        // As good as the fastest is enough.
        let close = runs(&row, &[(5.0, [2.0, 2.0]), (5.05, [1.0, 1.0])]);
        assert!(in_reach(&close));
    }
}
