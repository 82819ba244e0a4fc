//! Fits the constants that no table measures to published runs, and estimates the error on unseen
//! runs.
//!
//! A constant belongs to a software generation or a device, never to a model or a row, and has a
//! prior ([`mod@knobs`]). `cargo run --release -p meshwright-validation --example fit` runs the
//! whole fit.

pub mod knobs;
pub mod solve;
pub mod write;

use super::row::Row;
use super::setup::{Setup, setup};
use knobs::{Knob, knobs};
use models::cluster::Runs;
use rayon::prelude::*;
use solve::{Observation, Prior, solve};
use std::collections::{BTreeMap, BTreeSet};

/// A measurement that the fit uses.
#[derive(Clone, Debug)]
pub struct Sample<'a> {
    /// The measurement.
    pub row: &'a Row,
    /// Its configuration.
    pub setup: Setup,
    /// Measured seconds.
    measured_s: f64,
}

/// The fitted constants.
#[derive(Clone, Debug)]
pub struct Fit {
    /// The constants, in the order of `values`.
    pub knobs: Vec<Knob>,
    /// The fitted values.
    pub values: Vec<f64>,
    /// Half width of the error band by software generation; empty until [`bands`] are computed.
    pub bands: BTreeMap<String, f64>,
}

/// Rounds of linearization; each starts from the solution of the previous one.
const ROUNDS: usize = 6;
/// Step in a constant's logarithm for numeric slopes.
const STEP: f64 = 0.1;
/// Folds of the cross-validation.
const FOLDS: usize = 5;

/// The rows that the constants are fitted to: tier 1, with a time, and priceable.
pub fn samples(rows: &[Row]) -> Vec<Sample<'_>> {
    let sample = |row| {
        let measured_s = Row::measured_s(row)?;
        let setup = setup(row).ok().filter(|setup| super::price(setup).is_ok())?;
        Some(Sample { row, setup, measured_s })
    };
    rows.iter().filter_map(sample).collect()
}

/// Fits the constants to all samples.
pub fn fit(samples: &[Sample<'_>]) -> Fit {
    let setups: Vec<Setup> = samples.iter().map(|sample| sample.setup.clone()).collect();
    let knobs = knobs(&setups);
    let values = knobs.iter().map(Knob::prior).collect();
    let mut fit = Fit { knobs, values, bands: BTreeMap::new() };
    for _ in 0..ROUNDS {
        let observations = fit.observations(samples);
        fit = fit.stepped(&observations.iter().collect::<Vec<_>>());
    }
    fit
}

/// Signed errors of samples, each predicted by constants fitted without the samples of its part and
/// without all groups of these samples, since sources repeat each other's runs.
///
/// `observations` are those of the samples under `fit` ([`Fit::observations`]).
pub fn held_out(
    fit: &Fit,
    samples: &[Sample<'_>],
    observations: &[Observation],
    part: impl Fn(&Sample<'_>) -> String,
) -> Vec<f64> {
    let names: Vec<String> = samples.iter().map(part).collect();
    let parts: BTreeSet<&String> = names.iter().collect();
    let mut errors = vec![0.0; samples.len()];
    for part in parts {
        let own = samples.iter().zip(&names).filter(|(_, name)| *name == part);
        let groups: BTreeSet<&String> = own.map(|(sample, _)| &sample.row.group).collect();
        let others =
            observations.iter().zip(samples).filter(|(_, s)| !groups.contains(&s.row.group));
        let seen: Vec<&Observation> = others.map(|(observation, _)| observation).collect();
        let without = fit.stepped(&seen);
        for (index, sample) in samples.iter().enumerate().filter(|(i, _)| names[*i] == *part) {
            errors[index] = without.log_ratio(sample).exp() - 1.0;
        }
    }
    errors
}

/// The samples that determine the scale of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaledBy {
    /// All groups of the source: the best scale in hindsight.
    All,
    /// All groups but the one that is scaled. A source with a single group is not scaled.
    Others,
}

/// Signed errors after scaling the predictions of each source by one factor, chosen so that as many
/// groups err in one direction as in the other.
pub fn calibrated(samples: &[Sample<'_>], errors: &[f64], by: ScaledBy) -> Vec<f64> {
    let mut scales: BTreeMap<(&str, &str), f64> = BTreeMap::new();
    for sample in samples {
        let key = (sample.row.file.as_str(), sample.row.group.as_str());
        scales.entry(key).or_insert_with(|| middle(samples, errors, key, by));
    }
    let scaled = |(sample, error): (&Sample<'_>, &f64)| {
        (1.0 + error) / scales[&(sample.row.file.as_str(), sample.row.group.as_str())] - 1.0
    };
    samples.iter().zip(errors).map(scaled).collect()
}

/// Median over groups of a source of their (geometric) mean ratio of prediction to measurement.
fn middle(
    samples: &[Sample<'_>],
    errors: &[f64],
    (file, group): (&str, &str),
    by: ScaledBy,
) -> f64 {
    let mut groups: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for (sample, error) in samples.iter().zip(errors).filter(|(s, _)| s.row.file == file) {
        if by == ScaledBy::All || sample.row.group != group {
            groups.entry(&sample.row.group).or_default().push((1.0 + error).ln());
        }
    }
    let mut means: Vec<f64> =
        groups.values().map(|logs| logs.iter().sum::<f64>() / logs.len() as f64).collect();
    if means.is_empty() {
        return 1.0;
    }
    means.sort_by(f64::total_cmp);
    let (low, high) = (means[(means.len() - 1) / 2], means[means.len() / 2]);
    f64::midpoint(low, high).exp()
}

/// Fewest groups for a band of a generation's own.
const OWN_BAND: usize = 3;
/// Fraction of the groups within a band.
const WITHIN: f64 = 0.8;

/// Error bands by software generation: four in five groups of runs lie within the band when
/// predicted by constants fitted without them. Generations with few groups get the band of all
/// runs, or their own largest error if that is wider.
pub fn bands(samples: &[Sample<'_>], held_out: &[f64]) -> BTreeMap<String, f64> {
    let all = band(samples, held_out);
    let generations: BTreeSet<&str> =
        samples.iter().map(|sample| sample.setup.generation.as_str()).collect();
    let of = |generation: &str| {
        let own = group_errors(samples, held_out, Some(generation));
        if own.len() >= OWN_BAND { within(&own) } else { all.max(own[own.len() - 1]) }
    };
    generations.into_iter().map(|generation| (generation.to_owned(), of(generation))).collect()
}

/// The band that holds four in five groups of all runs.
pub fn band(samples: &[Sample<'_>], held_out: &[f64]) -> f64 {
    within(&group_errors(samples, held_out, None))
}

/// Mean absolute errors of groups, of one generation or of all, in rising order.
fn group_errors(samples: &[Sample<'_>], held_out: &[f64], generation: Option<&str>) -> Vec<f64> {
    let mut groups: BTreeMap<(&str, &str), Vec<f64>> = BTreeMap::new();
    for (sample, error) in samples.iter().zip(held_out) {
        let own = sample.setup.generation.as_str();
        if generation.is_none_or(|generation| generation == own) {
            groups.entry((own, &sample.row.group)).or_default().push(error.abs());
        }
    }
    let mean = |errors: &Vec<f64>| errors.iter().sum::<f64>() / errors.len() as f64;
    let mut errors: Vec<f64> = groups.values().map(mean).collect();
    errors.sort_by(f64::total_cmp);
    errors
}

fn within(errors: &[f64]) -> f64 {
    errors[((errors.len() as f64 * WITHIN).ceil() as usize).max(1) - 1]
}

/// The devices, models and decisions of the measured runs, by generation.
pub fn measured_runs(samples: &[Sample<'_>]) -> BTreeMap<String, Runs> {
    let mut found: BTreeMap<String, Runs> = BTreeMap::new();
    for Sample { setup, .. } in samples {
        let device = &setup.cluster.device.name;
        let run = Runs::of(device, &setup.model, setup.gpus, &setup.decisions);
        let all = match found.remove(&setup.generation) {
            Some(others) => others.and(run),
            None => run,
        };
        found.insert(setup.generation.clone(), all);
    }
    found
}

/// The fold of each group for cross-validation: groups are dealt out in alphabetical order.
pub fn folds(samples: &[Sample<'_>]) -> BTreeMap<String, usize> {
    let groups: BTreeSet<&String> = samples.iter().map(|sample| &sample.row.group).collect();
    groups.into_iter().enumerate().map(|(i, group)| (group.clone(), i % FOLDS)).collect()
}

impl Fit {
    /// Signed errors of samples with these constants.
    pub fn errors(&self, samples: &[Sample<'_>]) -> Vec<f64> {
        samples.iter().map(|sample| self.log_ratio(sample).exp() - 1.0).collect()
    }

    /// `ln(predicted / measured)`.
    fn log_ratio(&self, sample: &Sample<'_>) -> f64 {
        let mut setup = sample.setup.clone();
        for (knob, value) in self.knobs.iter().zip(&self.values) {
            if knob.concerns(&setup) {
                *knob.field.of(&mut setup.cluster) = *value;
            }
        }
        let predicted_s = super::price(&setup).map_or(f64::NAN, |priced| priced.iteration_s);
        (predicted_s / sample.measured_s).ln()
    }

    /// The samples, linearized around these constants.
    pub fn observations(&self, samples: &[Sample<'_>]) -> Vec<Observation> {
        let mut sizes: BTreeMap<&String, f64> = BTreeMap::new();
        for sample in samples {
            *sizes.entry(&sample.row.group).or_default() += 1.0;
        }
        let observed = |sample: &Sample<'_>| {
            let residual = self.log_ratio(sample);
            let slope = |(index, knob): (usize, &Knob)| {
                let mut moved = self.clone();
                moved.values[index] *= STEP.exp();
                let slope = (moved.log_ratio(sample) - residual) / STEP;
                (knob.concerns(&sample.setup) && slope != 0.0).then_some((index, slope))
            };
            let concerned = self.knobs.iter().enumerate();
            let slopes = concerned
                .filter(|(_, knob)| knob.concerns(&sample.setup) && knob.is_moved_by(sample.row))
                .filter_map(slope)
                .collect();
            let weight = 1.0 / sizes[&sample.row.group];
            Observation { residual, slopes, weight }
        };
        samples.par_iter().map(observed).collect()
    }

    /// Index of the constant whose value is a knob's prior mean.
    fn parent(&self, knob: &Knob) -> Option<usize> {
        let owner = knob.expected_of()?;
        let same = |other: &Knob| other.owner == owner && other.field.key == knob.field.key;
        self.knobs.iter().position(same)
    }

    fn stepped(&self, observations: &[&Observation]) -> Self {
        let prior = |(knob, value): (&Knob, &f64)| {
            let parent = self.parent(knob);
            let expected = parent.map_or_else(|| knob.prior(), |parent| self.values[parent]);
            Prior { offset: (value / expected).ln(), spread: knob.field.spread, parent }
        };
        let priors: Vec<Prior> = self.knobs.iter().zip(&self.values).map(prior).collect();
        let observations: Vec<Observation> =
            observations.iter().map(|&observation| observation.clone()).collect();
        let steps = solve(&observations, &priors);
        let values =
            self.values.iter().zip(steps).map(|(value, step)| value * step.exp()).collect();
        Self { knobs: self.knobs.clone(), values, bands: BTreeMap::new() }
    }
}
