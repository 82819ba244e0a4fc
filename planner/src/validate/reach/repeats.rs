//! Measurements of one configuration that differ, and measurements between two others that no smooth cost explains.

use super::{Share, over_groups};
use crate::validate::noted::Noted;
use crate::validate::row::Row;
use crate::validate::setup::setup;
use std::collections::BTreeMap;

/// What a predictor may look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// Every column that is not a result, the release of the software among them, and flags in the notes.
    Columns,
    /// What this planner makes of them: a model, a cluster with its software generation, and decisions.
    Setup,
}

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measured {
    /// Seconds of an iteration.
    Time,
    /// Bytes on the fullest device.
    Memory,
}

impl Measured {
    fn of(self, row: &Row) -> Option<f64> {
        match self {
            Self::Time => row.measured_s(),
            Self::Memory => row.measured_bytes().map(|(bytes, _)| bytes),
        }
    }
}

/// Rows of one configuration, at least two.
#[derive(Clone, Debug)]
pub struct Repeats {
    /// Source.
    pub source: String,
    /// Rows.
    pub ids: Vec<String>,
    /// What each measured.
    pub measured: Vec<f64>,
    /// The least mean of |predicted / measured − 1| that one prediction for all of them can have.
    pub least_error: f64,
}

/// Rows that measured one thing, by what a predictor sees of them.
fn alike(rows: &[Row], seen: Seen, measured: Measured) -> Vec<Vec<(&Row, f64)>> {
    let mut by_key: BTreeMap<String, Vec<(&Row, f64)>> = BTreeMap::new();
    for row in rows {
        let Some(value) = measured.of(row) else { continue };
        let key = match seen {
            Seen::Columns => Some(columns(row)),
            Seen::Setup => setup(row).ok().map(|setup| format!("{} {setup:?}", row.file)),
        };
        if let Some(key) = key {
            by_key.entry(key).or_default().push((row, value));
        }
    }
    by_key.into_values().collect()
}

/// Everything that a row says of how it ran.
fn columns(row: &Row) -> String {
    let nothing = String::new;
    let blind = Row {
        id: nothing(),
        iteration_s: None,
        peak_mem_gb: None,
        notes: nothing(),
        flags: nothing(),
        tier: 0,
        group: nothing(),
        ..row.clone()
    };
    format!("{blind:?} {:?}", Noted::of(row))
}

/// Configurations that were measured more than once.
pub fn repeats(rows: &[Row], seen: Seen, measured: Measured) -> Vec<Repeats> {
    let several = alike(rows, seen, measured).into_iter().filter(|same| same.len() > 1);
    several
        .map(|same| {
            let values: Vec<f64> = same.iter().map(|(_, value)| *value).collect();
            Repeats {
                source: same[0].0.file.clone(),
                ids: same.iter().map(|(row, _)| row.id.clone()).collect(),
                least_error: error_of(best(&values), &values),
                measured: values,
            }
        })
        .collect()
}

/// The least error that any predictor has, by source: below it no model comes that sees no more.
pub fn floors(rows: &[Row], seen: Seen, measured: Measured) -> Vec<Share> {
    let errors: Vec<(&Row, f64)> = alike(rows, seen, measured)
        .into_iter()
        .flat_map(|same| {
            let values: Vec<f64> = same.iter().map(|(_, value)| *value).collect();
            let predicted = best(&values);
            same.into_iter().map(move |(row, value)| (row, (predicted / value - 1.0).abs()))
        })
        .collect();
    over_groups(errors.iter().map(|(row, error)| (row.file.as_str(), row.group.as_str(), *error)))
}

/// The prediction with the least mean error: the error is convex and has its corners at the values.
fn best(values: &[f64]) -> f64 {
    let better = |a: &&f64, b: &&f64| error_of(**a, values).total_cmp(&error_of(**b, values));
    values.iter().min_by(better).copied().unwrap_or(f64::NAN)
}

fn error_of(predicted: f64, values: &[f64]) -> f64 {
    values.iter().map(|value| (predicted / value - 1.0).abs()).sum::<f64>() / values.len() as f64
}

/// What is varied, all else equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// The micro-batch. A pass that takes `a + c·b` seconds, `a, c ≥ 0`, makes an iteration of
    /// `(B/b + p − 1)(a + c·b)`, which is convex in the micro-batch `b`: no such cost has a hump.
    MicroBatch,
    /// The GPUs, each with as many sequences. An iteration takes no less time on more of them, whatever they say to
    /// each other.
    Gpus,
}

impl Axis {
    fn of(self, row: &Row) -> Option<u64> {
        match self {
            Self::MicroBatch => row.micro_batch,
            Self::Gpus => row.n_gpus,
        }
    }

    /// All columns but those that the axis moves.
    fn fixed(self, row: &Row) -> String {
        match self {
            Self::MicroBatch => columns(&Row { micro_batch: None, ..row.clone() }),
            Self::Gpus => {
                let each = row.global_batch.zip(row.n_gpus);
                let each = each.map(|(batch, gpus)| batch as f64 / gpus as f64);
                let rest = Row { n_gpus: None, global_batch: None, dp: None, ..row.clone() };
                format!("{} {each:?}", columns(&rest))
            }
        }
    }
}

/// A run that is slower than runs on both sides of it along an axis.
#[derive(Clone, Debug)]
pub struct Hump {
    /// Row.
    pub id: String,
    /// Its source.
    pub source: String,
    /// The fastest run before it, its own place, and the fastest run behind it.
    pub places: [u64; 3],
    /// By how much it is slower than the slower one of those.
    pub height: f64,
}

/// Humps along an axis of more than `least`.
pub fn humps(rows: &[Row], axis: Axis, least: f64) -> Vec<Hump> {
    let mut lines: BTreeMap<String, Vec<(u64, &Row, f64)>> = BTreeMap::new();
    for row in rows {
        let (Some(place), Some(s)) = (axis.of(row), row.measured_s()) else { continue };
        lines.entry(axis.fixed(row)).or_default().push((place, row, s));
    }
    let mut found: Vec<Hump> =
        lines.values().flat_map(|line| line.iter().filter_map(|at| hump(line, at))).collect();
    found.retain(|hump| hump.height > least);
    found
}

fn hump(line: &[(u64, &Row, f64)], at: &(u64, &Row, f64)) -> Option<Hump> {
    let fastest = |side: &dyn Fn(u64) -> bool| {
        let there = line.iter().filter(|(place, ..)| side(*place));
        there.min_by(|a, b| a.2.total_cmp(&b.2)).map(|(place, _, s)| (*place, *s))
    };
    let (place, row, s) = *at;
    let (before, behind) = (fastest(&|other| other < place)?, fastest(&|other| other > place)?);
    Some(Hump {
        id: row.id.clone(),
        source: row.file.clone(),
        places: [before.0, place, behind.0],
        height: s / before.1.max(behind.1) - 1.0,
    })
}

#[cfg(test)]
mod tests {
    use super::{best, error_of};

    #[test]
    fn the_best_prediction_of_repeats_is_one_of_them() {
        let values = [10.0, 12.0, 20.0];
        assert_eq!(best(&values), 12.0);
        for predicted in [9.0, 11.0, 13.0, 16.0, 21.0] {
            assert!(error_of(predicted, &values) > error_of(12.0, &values));
        }
    }
}
