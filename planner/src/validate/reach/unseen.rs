//! What could be learnt of a source's errors from those of its other runs.
//!
//! Errors are those of runs that the constants had not seen (five-fold). Each term of the predicted time ([`terms`]) gets
//! a factor of its own for the source and kind of GPU, learnt from the errors of the other four folds with a prior at 1.
//! How far the prior lets factors go is chosen afterwards, by what turned out best. Where even that is no better than
//! the errors themselves, what is left of them follows no term of the model. The same of memory, group by group: no
//! constant of it is fitted, so that all its errors are unseen.

use super::oracle::terms;
use super::{Share, over_groups};
use crate::validate::fit::Sample;
use crate::validate::fit::solve::{Line, Prior, solve};
use crate::validate::ranking::{by_source, sweeps};
use crate::validate::row::{Counted, Row};
use crate::validate::score::memory_error;
use crate::validate::setup::{Setup, setup};
use crate::validate::{Predicted, price};
use models::cluster::Software;
use std::collections::{BTreeMap, BTreeSet};

/// Standard deviations of the factors' logarithms that are tried.
const SPREADS: [f64; 6] = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0];
/// Step of a constant's logarithm that its part of a memory is taken over.
const STEP: f64 = 0.1;

/// One source.
#[derive(Clone, Debug)]
pub struct Unseen {
    /// As it is.
    pub now: Share,
    /// The least mean over groups with any spread, and none, chosen in hindsight.
    pub least_mean: f64,
    /// The same of the median, with a spread of its own.
    pub least_median: f64,
    /// How its sweeps are ordered, if it has any.
    pub order: Option<Order>,
}

/// How unseen times order the sweeps of a source.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    /// Rank correlation as it is, weighted by configurations.
    pub rank_correlation: f64,
    /// Largest regret as it is.
    pub worst_regret: f64,
    /// The most of the former with any spread, and none, chosen in hindsight.
    pub most_rank_correlation: f64,
    /// The least of the latter, with a spread of its own.
    pub least_worst_regret: f64,
}

/// A run of a source.
struct Run<'a> {
    row: &'a Row,
    fold: usize,
    line: Line,
}

/// Every source; `errors` are signed, of samples that constants had not seen, and `fold` says by group when.
/// `predicted` says of `rows` what they fill.
pub fn unseen(
    samples: &[Sample<'_>],
    errors: &[f64],
    fold: &BTreeMap<String, usize>,
    (rows, predicted): (&[Row], &[Predicted]),
) -> Vec<Unseen> {
    let sources: BTreeSet<&str> = samples.iter().map(|sample| sample.row.file.as_str()).collect();
    let of = |source: &str| {
        let own = samples.iter().zip(errors).filter(|(sample, _)| sample.row.file == source);
        let own: Vec<(&Row, f64)> = own.map(|(sample, error)| (sample.row, *error)).collect();
        let (runs, factors) = timed(&own, fold)?;
        let order = |corrections: &[f64]| order(source, &runs, corrections, rows, predicted);
        learnt(source, &runs, factors, order)
    };
    sources.into_iter().filter_map(of).collect()
}

/// The memory of every source, of which each group is unseen once.
pub fn unseen_memory(rows: &[Row], predicted: &[Predicted]) -> Vec<Unseen> {
    let mut sources: BTreeMap<&str, Vec<(&Row, f64)>> = BTreeMap::new();
    for (row, predicted) in rows.iter().zip(predicted) {
        if let Some(error) = memory_error(row, predicted) {
            sources.entry(&row.file).or_default().push((row, error));
        }
    }
    let of = |(source, own): (&str, Vec<(&Row, f64)>)| {
        let (runs, factors) = held(&own)?;
        learnt(source, &runs, factors, |_| None)
    };
    sources.into_iter().filter_map(of).collect()
}

/// Rows with the logarithm of their errors and the share of each term in what was predicted, and how many factors.
fn lines<'a>(
    own: &[(&'a Row, f64)],
    fold: impl Fn(&Row) -> usize,
    terms: impl Fn(&Row) -> Option<(Vec<f64>, f64)>,
) -> Option<(Vec<Run<'a>>, usize)> {
    let gpus: BTreeSet<&str> = own.iter().map(|(row, _)| row.gpu.as_str()).collect();
    let gpus: Vec<&str> = gpus.into_iter().collect();
    let mut sizes: BTreeMap<&str, f64> = BTreeMap::new();
    for (row, _) in own {
        *sizes.entry(&row.group).or_default() += 1.0;
    }
    let mut count = 0;
    let mut runs = vec![];
    for &(row, error) in own {
        let (terms, whole) = terms(row)?;
        let gpu = gpus.iter().position(|gpu| *gpu == row.gpu)?;
        count = gpus.len() * terms.len();
        let slopes = terms.iter().enumerate();
        let slopes = slopes.map(|(at, term)| (gpu * terms.len() + at, term / whole));
        let slopes = slopes.filter(|(_, share)| *share > 0.0).collect();
        let weight = 1.0 / sizes[row.group.as_str()];
        let line = Line { residual: error.ln_1p(), slopes, weight };
        runs.push(Run { row, fold: fold(row), line });
    }
    Some((runs, count))
}

fn timed<'a>(
    own: &[(&'a Row, f64)],
    fold: &BTreeMap<String, usize>,
) -> Option<(Vec<Run<'a>>, usize)> {
    lines(own, |row| fold[&row.group], terms)
}

fn held<'a>(own: &[(&'a Row, f64)]) -> Option<(Vec<Run<'a>>, usize)> {
    let groups: BTreeSet<&str> = own.iter().map(|(row, _)| row.group.as_str()).collect();
    let fold = |row: &Row| groups.iter().take_while(|group| **group < row.group.as_str()).count();
    lines(own, fold, memory_terms)
}

/// Bytes that all else holds, that each of the software's constants of memory does, and that the fullest device does.
fn memory_terms(row: &Row) -> Option<(Vec<f64>, f64)> {
    type Constant = fn(&mut Software) -> &mut f64;
    const HELD: [Constant; 7] = [
        |software| &mut software.buffer_bytes,
        |software| &mut software.fp16_gradient_bytes,
        |software| &mut software.bf16_gradient_bytes,
        |software| &mut software.optimizer_state_bytes,
        |software| &mut software.logit_bytes,
        |software| &mut software.placeholder_bytes,
        |software| &mut software.vocab_hidden_states,
    ];
    let setup = setup(row).ok()?;
    let by_allocator = row.measured_bytes()?.1 == Counted::ByAllocator;
    let bytes = |setup: &Setup| {
        let bytes = price(setup).ok()?.device_bytes.into_iter().reduce(f64::max)?;
        Some(bytes - if by_allocator { setup.cluster.reserved_bytes() } else { 0.0 })
    };
    let whole = bytes(&setup)?;
    let held = HELD.iter().map(|constant| {
        let mut more = setup.clone();
        *constant(&mut more.cluster.software) *= STEP.exp();
        let more = bytes(&more).map_or(0.0, |more| more - whole);
        (more / STEP.exp_m1()).max(0.0)
    });
    let held: Vec<f64> = held.collect();
    let rest = (whole - held.iter().sum::<f64>()).max(0.0);
    Some((std::iter::once(rest).chain(held).collect(), whole))
}

fn learnt(
    source: &str,
    runs: &[Run<'_>],
    factors: usize,
    order: impl Fn(&[f64]) -> Option<(f64, f64)>,
) -> Option<Unseen> {
    let still = vec![0.0; runs.len()];
    let now = share(source, runs, &still)?;
    let as_it_is = order(&still).map(|(rank_correlation, worst_regret)| Order {
        rank_correlation,
        worst_regret,
        most_rank_correlation: rank_correlation,
        least_worst_regret: worst_regret,
    });
    let mut found = Unseen { least_mean: now.mean, least_median: now.median, now, order: as_it_is };
    for spread in SPREADS {
        let corrections = corrections(runs, factors, spread);
        let share = share(source, runs, &corrections)?;
        found.least_mean = found.least_mean.min(share.mean);
        found.least_median = found.least_median.min(share.median);
        if let (Some(best), Some((correlation, regret))) = (&mut found.order, order(&corrections)) {
            best.most_rank_correlation = best.most_rank_correlation.max(correlation);
            best.least_worst_regret = best.least_worst_regret.min(regret);
        }
    }
    Some(found)
}

/// Rank correlation and largest regret of a source's sweeps by corrected times.
fn order(
    source: &str,
    runs: &[Run<'_>],
    corrections: &[f64],
    rows: &[Row],
    predicted: &[Predicted],
) -> Option<(f64, f64)> {
    let said_s: BTreeMap<&str, f64> = runs
        .iter()
        .zip(corrections)
        .filter_map(|(run, by)| {
            let ratio = (run.line.residual + by).exp();
            Some((run.row.id.as_str(), run.row.measured_s()? * ratio))
        })
        .collect();
    let corrected: Vec<Predicted> = predicted
        .iter()
        .map(|p| Predicted { predicted_s: said_s.get(p.id.as_str()).copied(), ..p.clone() })
        .collect();
    let scores = by_source(&sweeps(rows, &corrected));
    let score = scores.into_iter().find(|score| score.source == source)?;
    Some((score.rank_correlation, score.worst_regret))
}

fn share(source: &str, runs: &[Run<'_>], corrections: &[f64]) -> Option<Share> {
    let error = |(run, by): (&Run<'_>, &f64)| (run.line.residual + by).exp_m1().abs();
    let pairs = runs.iter().zip(corrections);
    over_groups(pairs.map(|(run, by)| (source, run.row.group.as_str(), error((run, by)))))
        .into_iter()
        .next()
}

/// What factors learnt from the other folds add to each run's logarithm.
fn corrections(runs: &[Run<'_>], count: usize, spread: f64) -> Vec<f64> {
    let mut added = vec![0.0; runs.len()];
    let folds: BTreeSet<usize> = runs.iter().map(|run| run.fold).collect();
    for fold in folds {
        let seen: Vec<Line> =
            runs.iter().filter(|run| run.fold != fold).map(|run| run.line.clone()).collect();
        let steps = solve(&seen, &vec![Prior { offset: 0.0, spread, parent: None }; count]);
        for (run, added) in runs.iter().zip(&mut added).filter(|(run, _)| run.fold == fold) {
            *added = run.line.slopes.iter().map(|(at, share)| share * steps[*at]).sum();
        }
    }
    added
}

#[cfg(test)]
mod tests {
    use super::*;

    fn five_rows() -> Vec<Row> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/papers/measured.csv");
        let rows = crate::validate::row::read(std::path::Path::new(path)).expect("it is here");
        let mut groups = BTreeSet::new();
        rows.into_iter().filter(|row| groups.insert(row.group.clone())).take(5).collect()
    }

    fn runs<'a>(rows: &'a [Row], errors: &[(f64, f64)]) -> Vec<Run<'a>> {
        let run = |(at, &(residual, share)): (usize, &(f64, f64))| Run {
            row: &rows[at % rows.len()],
            fold: at % rows.len(),
            line: Line { residual, slopes: vec![(0, 1.0 - share), (1, share)], weight: 1.0 },
        };
        errors.iter().enumerate().map(run).collect()
    }

    #[test]
    fn an_error_that_follows_a_term_is_learnt_and_one_that_follows_none_is_not() {
        let rows = five_rows();
        let shares: [f64; 10] = [0.1, 0.5, 0.3, 0.7, 0.2, 0.6, 0.4, 0.8, 0.05, 0.45];
        let follows = runs(&rows, &shares.map(|share| (-0.1 * share, share)));
        let mean = |runs: &[Run<'_>], by: &[f64]| share("x", runs, by).map_or(f64::NAN, |s| s.mean);
        let still = vec![0.0; shares.len()];
        assert!(mean(&follows, &corrections(&follows, 2, 1.0)) < 0.1 * mean(&follows, &still));
        // Each share once too slow and once too fast.
        let turn = |at: usize| (if at.is_multiple_of(2) { 0.05 } else { -0.05 }, shares[at / 2]);
        let apart = runs(&rows, &std::array::from_fn::<_, 10, _>(turn));
        assert!(mean(&apart, &corrections(&apart, 2, 1.0)) > 0.9 * mean(&apart, &still));
    }

    #[test]
    fn the_terms_of_a_memory_are_all_of_it() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/papers/measured.csv");
        let rows = crate::validate::row::read(std::path::Path::new(path)).expect("it is here");
        let row = rows.iter().find(|row| row.id == "zb-012").expect("a row of Zero Bubble");
        let (terms, whole) = memory_terms(row).expect("it is priced");
        assert!((terms.iter().sum::<f64>() / whole - 1.0).abs() < 1e-9, "{terms:?}");
        // Two layers of 12·6144² parameters, with 4 bytes of gradients and 12 of state each.
        let parameters = 24.0 * 6144.0_f64.powi(2);
        for (term, each) in [(2, 4.0), (4, 12.0)] {
            assert!((terms[term] / (each * parameters) - 1.0).abs() < 0.01, "{terms:?}");
        }
    }
}
