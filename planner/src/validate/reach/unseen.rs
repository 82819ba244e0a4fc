//! What could be learnt of a source's errors from those of its other runs.
//!
//! Errors are those of runs that the constants had not seen (five-fold). Each term of the predicted time ([`terms`]) gets
//! a factor of its own for the source and kind of GPU, learnt from the errors of the other four folds with a prior at 1.
//! How far the prior lets factors go is chosen afterwards, by what turned out best. Where even that is no better than
//! the errors themselves, what is left of them follows no term of the model.

use super::oracle::terms;
use super::{Share, over_groups};
use crate::validate::fit::Sample;
use crate::validate::fit::solve::{Line, Prior, solve};
use std::collections::{BTreeMap, BTreeSet};

/// Standard deviations of the factors' logarithms that are tried.
const SPREADS: [f64; 6] = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0];

/// One source.
#[derive(Clone, Debug)]
pub struct Unseen {
    /// As it is: five-fold.
    pub now: Share,
    /// The least mean over groups with any spread, and none, chosen in hindsight.
    pub least_mean: f64,
    /// The same of the median, with a spread of its own.
    pub least_median: f64,
}

/// A run of a source.
struct Run<'a> {
    group: &'a str,
    fold: usize,
    line: Line,
}

/// Every source; `errors` are signed, of samples that constants had not seen, and `fold` says by group when.
pub fn unseen(
    samples: &[Sample<'_>],
    errors: &[f64],
    fold: &BTreeMap<String, usize>,
) -> Vec<Unseen> {
    let sources: BTreeSet<&str> = samples.iter().map(|sample| sample.row.file.as_str()).collect();
    let of = |source| {
        let own = samples.iter().zip(errors).filter(|(sample, _)| sample.row.file == source);
        learnt(source, &own.map(|(sample, error)| (sample, *error)).collect::<Vec<_>>(), fold)
    };
    sources.into_iter().filter_map(of).collect()
}

fn learnt(
    source: &str,
    own: &[(&Sample<'_>, f64)],
    fold: &BTreeMap<String, usize>,
) -> Option<Unseen> {
    let gpus: BTreeSet<&str> = own.iter().map(|(sample, _)| sample.row.gpu.as_str()).collect();
    let gpus: Vec<&str> = gpus.into_iter().collect();
    let mut sizes: BTreeMap<&str, f64> = BTreeMap::new();
    for (sample, _) in own {
        *sizes.entry(&sample.row.group).or_default() += 1.0;
    }
    let mut count = 0;
    let mut runs = vec![];
    for (sample, error) in own {
        let row = sample.row;
        let (terms, whole_s) = terms(row)?;
        let gpu = gpus.iter().position(|gpu| *gpu == row.gpu)?;
        count = gpus.len() * terms.len();
        let slopes = terms.iter().enumerate();
        let slopes = slopes.map(|(at, term_s)| (gpu * terms.len() + at, term_s / whole_s));
        let slopes = slopes.filter(|(_, share)| *share > 0.0).collect();
        let weight = 1.0 / sizes[row.group.as_str()];
        let line = Line { residual: error.ln_1p(), slopes, weight };
        runs.push(Run { group: &row.group, fold: fold[&row.group], line });
    }
    let now = share(source, &runs, &vec![0.0; runs.len()])?;
    let mut found = Unseen { least_mean: now.mean, least_median: now.median, now };
    for spread in SPREADS {
        let share = share(source, &runs, &corrections(&runs, count, spread))?;
        found.least_mean = found.least_mean.min(share.mean);
        found.least_median = found.least_median.min(share.median);
    }
    Some(found)
}

fn share(source: &str, runs: &[Run<'_>], corrections: &[f64]) -> Option<Share> {
    let error = |(run, by): (&Run<'_>, &f64)| (run.line.residual + by).exp_m1().abs();
    let pairs = runs.iter().zip(corrections);
    over_groups(pairs.map(|(run, by)| (source, run.group, error((run, by))))).into_iter().next()
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

    fn runs(errors: &[(f64, f64)]) -> Vec<Run<'static>> {
        let groups = ["a", "b", "c", "d", "e"];
        let run = |(at, &(residual, share)): (usize, &(f64, f64))| Run {
            group: groups[at % groups.len()],
            fold: at % groups.len(),
            line: Line { residual, slopes: vec![(0, 1.0 - share), (1, share)], weight: 1.0 },
        };
        errors.iter().enumerate().map(run).collect()
    }

    #[test]
    fn an_error_that_follows_a_term_is_learnt_and_one_that_follows_none_is_not() {
        let shares: [f64; 10] = [0.1, 0.5, 0.3, 0.7, 0.2, 0.6, 0.4, 0.8, 0.05, 0.45];
        let follows = runs(&shares.map(|share| (-0.1 * share, share)));
        let mean = |runs: &[Run<'_>], by: &[f64]| share("x", runs, by).map_or(f64::NAN, |s| s.mean);
        let still = vec![0.0; shares.len()];
        assert!(mean(&follows, &corrections(&follows, 2, 1.0)) < 0.1 * mean(&follows, &still));
        // Each share once too slow and once too fast.
        let turn = |at: usize| (if at.is_multiple_of(2) { 0.05 } else { -0.05 }, shares[at / 2]);
        let apart = runs(&std::array::from_fn::<_, 10, _>(turn));
        assert!(mean(&apart, &corrections(&apart, 2, 1.0)) > 0.9 * mean(&apart, &still));
    }
}
