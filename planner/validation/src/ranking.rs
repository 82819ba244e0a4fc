//! Whether predictions rank configurations as measurements do.
//!
//! A planner needs the ranking most: a model that is 10 % too slow everywhere still picks the
//! fastest.

use super::Predicted;
use super::memory_limit::filled;
use super::row::Row;
use planner::request::DEFAULT_HEADROOM;
use serde::Serialize;
use std::collections::BTreeMap;

/// Sources that ran one model on the same GPUs with the same batch in several ways.
const SWEPT: [&str; 5] = [
    "vtrain_multi",
    "bigscience_bloom_a100",
    "vocab_parallelism_paper",
    "vocab_parallelism",
    "zero_bubble",
];
/// Fewest configurations for which a rank correlation is meaningful.
const ENOUGH: usize = 3;
/// Pairs closer than this fraction count as equal: measurements repeat to about 1 %.
const APART: f64 = 0.03;

/// Several configurations of one model on the same GPUs with the same batch.
#[derive(Clone, Debug, Serialize)]
pub struct Sweep {
    /// Source of the rows.
    pub source: String,
    /// What is fixed.
    pub fixed: String,
    /// Configurations compared. Repeated runs count once, with their mean.
    pub configurations: usize,
    /// Rows left out because they are predicted to nearly fill memory, where allocators retry.
    pub at_edge: usize,
    /// Spearman's rank correlation of predicted and measured seconds; `None` below three
    /// configurations.
    pub rank_correlation: Option<f64>,
    /// Measured seconds of the predicted best over those of the measured best, minus one.
    pub regret: f64,
    /// Row predicted to be the fastest.
    pub predicted_best: String,
    /// Row measured to be the fastest.
    pub measured_best: String,
}

/// Score of all sweeps of a source.
#[derive(Clone, Debug, Serialize)]
pub struct SweepScore {
    /// Source of the sweeps.
    pub source: String,
    /// Number of sweeps.
    pub sweeps: usize,
    /// Mean rank correlation of sweeps that have one, weighted by configurations.
    pub rank_correlation: f64,
    /// Largest regret.
    pub worst_regret: f64,
}

/// Pairs of vocabulary strategies, and how many are ranked as measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Pairs {
    /// Pairs measured more than 3 % apart.
    pub pairs: usize,
    /// Pairs among them that are predicted in the measured order.
    pub right: usize,
}

impl Pairs {
    /// Fraction of the pairs in the right order.
    pub fn share(&self) -> f64 {
        self.right as f64 / self.pairs.max(1) as f64
    }
}

/// A configuration with its seconds.
#[derive(Clone, Copy)]
pub(super) struct Timed<'a> {
    pub(super) row: &'a Row,
    predicted_s: f64,
    pub(super) measured_s: f64,
}

fn timed<'a>(
    rows: &'a [Row],
    predicted: &'a [Predicted],
) -> impl Iterator<Item = (Timed<'a>, bool)> {
    rows.iter().zip(predicted).filter_map(|(row, predicted)| {
        let (predicted_s, measured_s) = (predicted.predicted_s?, row.measured_s()?);
        let at_edge = filled(predicted).is_some_and(|filled| filled > 1.0 - DEFAULT_HEADROOM);
        Some((Timed { row, predicted_s, measured_s }, at_edge))
    })
}

/// All sweeps with at least two configurations.
pub fn sweeps(rows: &[Row], predicted: &[Predicted]) -> Vec<Sweep> {
    swept(rows, predicted)
        .into_iter()
        .filter_map(|((source, fixed), (rows, at_edge))| {
            sweep(&rows).map(|found| Sweep { source, fixed, at_edge, ..found })
        })
        .collect()
}

/// The configurations of every sweep, by source and by what is fixed, with repeated runs merged;
/// and the number of rows left out because they nearly fill memory.
pub(super) fn swept<'a>(
    rows: &'a [Row],
    predicted: &'a [Predicted],
) -> BTreeMap<(String, String), (Vec<Timed<'a>>, usize)> {
    let mut by_key: BTreeMap<(String, String), (Vec<Timed<'_>>, usize)> = BTreeMap::new();
    for (timed, at_edge) in timed(rows, predicted) {
        if SWEPT.contains(&timed.row.file.as_str()) {
            let key = (timed.row.file.clone(), fixed(timed.row));
            let (sweep, left_out) = by_key.entry(key).or_default();
            if at_edge { *left_out += 1 } else { sweep.push(timed) }
        }
    }
    for (rows, _) in by_key.values_mut() {
        *rows = once_each(std::mem::take(rows));
    }
    by_key
}

/// What a sweep keeps fixed.
fn fixed(row: &Row) -> String {
    let number =
        |value: Option<u64>| value.map_or_else(|| "?".to_owned(), |value| value.to_string());
    format!(
        "L{} h{} a{} s{} V{} {} on {} GPUs, batch {}",
        number(row.layers),
        number(row.hidden),
        number(row.heads),
        number(row.seq_len),
        number(row.vocab),
        row.precision,
        number(row.n_gpus),
        number(row.global_batch)
    )
}

/// Relative difference up to which predictions are of the same configuration: sums in another
/// order.
const ROUNDING: f64 = 1e-9;

/// Merges repeated runs, which have the same prediction, into one with their mean.
fn once_each(mut rows: Vec<Timed<'_>>) -> Vec<Timed<'_>> {
    rows.sort_by(|a, b| a.predicted_s.total_cmp(&b.predicted_s));
    let alike = |a: &Timed<'_>, b: &Timed<'_>| b.predicted_s <= a.predicted_s * (1.0 + ROUNDING);
    rows.chunk_by(alike).filter_map(together).collect()
}

fn together<'a>(same: &[Timed<'a>]) -> Option<Timed<'a>> {
    let measured_s = same.iter().map(|row| row.measured_s).sum::<f64>() / same.len() as f64;
    same.first().map(|first| Timed { measured_s, ..*first })
}

/// The score of at least two rows.
fn sweep(rows: &[Timed<'_>]) -> Option<Sweep> {
    let least =
        |value: fn(&Timed<'_>) -> f64| rows.iter().min_by(|a, b| value(a).total_cmp(&value(b)));
    let predicted_best = least(|row| row.predicted_s)?;
    let measured_best = least(|row| row.measured_s)?;
    let of = |value: fn(&Timed<'_>) -> f64| rows.iter().map(value).collect::<Vec<f64>>();
    let correlation = || spearman(&of(|row| row.predicted_s), &of(|row| row.measured_s));
    (rows.len() >= 2).then(|| Sweep {
        source: String::new(),
        fixed: String::new(),
        configurations: rows.len(),
        at_edge: 0,
        rank_correlation: (rows.len() >= ENOUGH).then(correlation),
        regret: predicted_best.measured_s / measured_best.measured_s - 1.0,
        predicted_best: predicted_best.row.id.clone(),
        measured_best: measured_best.row.id.clone(),
    })
}

/// Spearman's rank correlation: Pearson's of the ranks, equal values sharing their mean rank.
pub(super) fn spearman(a: &[f64], b: &[f64]) -> f64 {
    let (a, b) = (ranks(a), ranks(b));
    let middle = (a.len() as f64 + 1.0) / 2.0;
    let product = |x: &[f64], y: &[f64]| -> f64 {
        x.iter().zip(y).map(|(x, y)| (x - middle) * (y - middle)).sum()
    };
    product(&a, &b) / (product(&a, &a) * product(&b, &b)).sqrt()
}

fn ranks(values: &[f64]) -> Vec<f64> {
    let rank = |value: &f64| {
        let below = values.iter().filter(|other| *other < value).count() as f64;
        let equal = values.iter().filter(|other| *other == value).count() as f64;
        below + f64::midpoint(1.0, equal)
    };
    values.iter().map(rank).collect()
}

/// Scores of sweeps by source.
pub fn by_source(sweeps: &[Sweep]) -> Vec<SweepScore> {
    sweeps
        .chunk_by(|a, b| a.source == b.source)
        .map(|sweeps| {
            let long = || {
                sweeps.iter().filter_map(|s| Some((s.configurations as f64, s.rank_correlation?)))
            };
            let weight: f64 = long().map(|(weight, _)| weight).sum();
            SweepScore {
                source: sweeps[0].source.clone(),
                sweeps: sweeps.len(),
                rank_correlation: long().map(|(weight, value)| weight * value).sum::<f64>()
                    / weight,
                worst_regret: sweeps.iter().map(|s| s.regret).fold(0.0, f64::max),
            }
        })
        .collect()
}

/// Pairs of rows that differ only in their vocabulary strategy.
pub fn vocabulary_pairs(rows: &[Row], predicted: &[Predicted]) -> Pairs {
    let all: Vec<Timed<'_>> = timed(rows, predicted)
        .map(|(timed, _)| timed)
        .filter(|timed| timed.row.file.starts_with("vocab_parallelism"))
        .collect();
    let comparable = |a: &Row, b: &Row| {
        let same = (&a.file, chunked(a), fixed(a)) == (&b.file, chunked(b), fixed(b));
        same && a.vocab_strategy != b.vocab_strategy
    };
    let mut found = Pairs::default();
    for (index, a) in all.iter().enumerate() {
        for b in all[index + 1..].iter().filter(|b| comparable(a.row, b.row)) {
            let apart = (a.measured_s / b.measured_s).ln();
            if apart.abs() > (1.0 + APART).ln() {
                found.pairs += 1;
                let said = a.predicted_s - b.predicted_s;
                found.right += usize::from(said * apart > 0.0);
            }
        }
    }
    found
}

/// Whether a row ran several chunks per pipeline rank, which is another schedule.
fn chunked(row: &Row) -> bool {
    row.vpp.is_some_and(|chunks| chunks > 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_correlate_as_in_the_textbook() {
        assert_eq!(spearman(&[1.0, 2.0, 3.0], &[10.0, 20.0, 30.0]), 1.0);
        assert_eq!(spearman(&[1.0, 2.0, 3.0], &[3.0, 2.0, 1.0]), -1.0);
        // d² = 0 + 1 + 1, so 1 - 6·2/(3·8).
        assert_eq!(spearman(&[1.0, 2.0, 3.0], &[1.0, 3.0, 2.0]), 0.5);
        assert_eq!(ranks(&[5.0, 1.0, 5.0]), [2.5, 1.0, 2.5]);
    }
}
