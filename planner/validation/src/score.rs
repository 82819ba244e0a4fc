//! Errors of predicted time and memory.

use super::Predicted;
use super::row::{Counted, Row};
use serde::Serialize;
use std::collections::BTreeMap;

/// Errors of one source. Its groups have equal weights.
#[derive(Clone, Debug, Serialize)]
pub struct SourceScore {
    /// Source of the rows.
    pub source: String,
    /// Rows that could be compared.
    pub rows: usize,
    /// Groups of these rows.
    pub groups: usize,
    /// Mean absolute error, averaged per group and then over groups, as a fraction.
    pub mean: f64,
    /// Median over groups of their mean absolute errors.
    pub median: f64,
    /// Mean signed error, averaged per group and then over groups; positive if predictions are too
    /// slow.
    pub bias: f64,
    /// Row with the largest error.
    pub worst: String,
    /// Its signed error.
    pub worst_error: f64,
}

/// Signed error of a row, `predicted / measured − 1`.
#[derive(Clone, Debug)]
struct RowError<'a> {
    row: &'a Row,
    error: f64,
}

/// Time scores of every source with tier 1 rows, and of all of them together except
/// `vtrain_single`.
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

/// Memory scores by source. Each row is compared by what its source counts.
pub fn memory_by_source(rows: &[Row], predicted: &[Predicted]) -> Vec<SourceScore> {
    let (rows, errors): (Vec<&Row>, Vec<f64>) = rows
        .iter()
        .zip(predicted)
        .filter_map(|(row, predicted)| Some((row, memory_error(row, predicted)?)))
        .unzip();
    of_errors(&rows, &errors)
}

/// By group, in rising order, how much more memory runs took than predicted, as a fraction of the
/// prediction; without `vtrain_single`.
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

/// Signed error of the predicted memory, by what the source counts.
pub(super) fn memory_error(row: &Row, predicted: &Predicted) -> Option<f64> {
    let (measured, counted) = row.measured_bytes()?;
    let bytes = match counted {
        Counted::ByDriver => predicted.predicted_bytes?,
        Counted::ByAllocator => predicted.predicted_allocated_bytes?,
    };
    Some(bytes / measured - 1.0)
}

/// Scores from rows and their signed errors.
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
