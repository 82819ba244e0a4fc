//! How far predictions are from measurements.

use super::Predicted;
use super::row::{Counted, Row};
use serde::Serialize;
use std::collections::BTreeMap;

/// Errors of one source, groups weighted equally.
#[derive(Clone, Debug, Serialize)]
pub struct SourceScore {
    /// Source.
    pub source: String,
    /// Rows that could be compared.
    pub rows: usize,
    /// Groups among them.
    pub groups: usize,
    /// Mean over groups of the mean absolute error, a fraction.
    pub mean: f64,
    /// Median over groups of the same.
    pub median: f64,
    /// Mean over groups of the signed error: positive is predicted too slow.
    pub bias: f64,
    /// Row furthest off.
    pub worst: String,
    /// Its signed error.
    pub worst_error: f64,
}

/// A row's signed error, `predicted / measured − 1`.
#[derive(Clone, Debug)]
struct RowError<'a> {
    row: &'a Row,
    error: f64,
}

/// Scores of every source with tier 1 rows, and of all of them together (`vtrain_single` apart).
pub fn by_source(rows: &[Row], predicted: &[Predicted]) -> Vec<SourceScore> {
    let error = |(row, predicted): (&'_ Row, &Predicted)| {
        Some(predicted.predicted_s? / row.measured_s()? - 1.0)
    };
    let (rows, errors): (Vec<&Row>, Vec<f64>) = rows
        .iter()
        .zip(predicted)
        .filter_map(|(row, predicted)| Some((row, error((row, predicted))?)))
        .unzip();
    of_errors(&rows, &errors)
}

/// Scores of the predicted memory, each by the row's own definition.
pub fn memory_by_source(rows: &[Row], predicted: &[Predicted]) -> Vec<SourceScore> {
    let (rows, errors): (Vec<&Row>, Vec<f64>) = rows
        .iter()
        .zip(predicted)
        .filter_map(|(row, predicted)| Some((row, memory_error(row, predicted)?)))
        .unzip();
    of_errors(&rows, &errors)
}

/// Means over groups of how much more memory runs took than predicted, as a share of the
/// prediction, in rising order (`vtrain_single` apart).
pub fn memory_beyond(rows: &[Row], predicted: &[Predicted]) -> Vec<f64> {
    let mut groups: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for (row, predicted) in
        rows.iter().zip(predicted).filter(|(row, _)| row.file != "vtrain_single")
    {
        if let Some(error) = memory_error(row, predicted) {
            groups.entry(&row.group).or_default().push((1.0 + error).recip() - 1.0);
        }
    }
    let mut beyond: Vec<f64> = groups.values().map(|group| mean(group.iter().copied())).collect();
    beyond.sort_by(f64::total_cmp);
    beyond
}

/// Signed error of the predicted memory, by the row's own definition.
pub(super) fn memory_error(row: &Row, predicted: &Predicted) -> Option<f64> {
    let (measured, counted) = row.measured_bytes()?;
    let bytes = match counted {
        Counted::ByDriver => predicted.predicted_bytes?,
        Counted::ByAllocator => predicted.predicted_allocated_bytes?,
    };
    Some(bytes / measured - 1.0)
}

/// The same from rows and their signed errors.
pub fn of_errors(rows: &[&Row], errors: &[f64]) -> Vec<SourceScore> {
    let errors: Vec<RowError<'_>> =
        rows.iter().zip(errors).map(|(&row, &error)| RowError { row, error }).collect();
    let mut sources: BTreeMap<&str, Vec<&RowError<'_>>> = BTreeMap::new();
    for error in &errors {
        sources.entry(&error.row.file).or_default().push(error);
    }
    let mut scores: Vec<SourceScore> =
        sources.iter().map(|(source, errors)| score(source, errors)).collect();
    let all: Vec<&RowError<'_>> =
        errors.iter().filter(|error| error.row.file != "vtrain_single").collect();
    let kind = |kind: &str| -> Vec<&RowError<'_>> {
        all.iter().copied().filter(|error| error.row.kind == kind).collect()
    };
    scores.push(score("dense", &kind("dense")));
    scores.push(score("moe", &kind("moe")));
    scores.push(score("all but vtrain_single", &all));
    scores
}

fn score(source: &str, errors: &[&RowError<'_>]) -> SourceScore {
    let mut groups: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for error in errors {
        groups.entry(&error.row.group).or_default().push(error.error);
    }
    let mut absolute: Vec<f64> =
        groups.values().map(|errors| mean(errors.iter().map(|error| error.abs()))).collect();
    absolute.sort_by(f64::total_cmp);
    let worst = errors.iter().max_by(|a, b| a.error.abs().total_cmp(&b.error.abs()));
    SourceScore {
        source: source.to_owned(),
        rows: errors.len(),
        groups: groups.len(),
        mean: mean(absolute.iter().copied()),
        median: median(&absolute),
        bias: mean(groups.values().map(|errors| mean(errors.iter().copied()))),
        worst: worst.map_or_else(String::new, |worst| worst.row.id.clone()),
        worst_error: worst.map_or(0.0, |worst| worst.error),
    }
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| (sum + value, count + 1));
    if count == 0 { 0.0 } else { sum / f64::from(count) }
}

fn median(sorted: &[f64]) -> f64 {
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}
