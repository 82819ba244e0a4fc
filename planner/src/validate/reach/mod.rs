//! What no prediction can reach: how far measurements of the same configuration lie apart, which of them no smooth cost
//! explains, how well the model's own terms could do, and order runs, if their constants were free, and what could be learnt of its errors.

pub mod oracle;
pub mod order;
pub mod repeats;
pub mod unseen;

use std::collections::BTreeMap;

/// Mean and median over groups of one source.
#[derive(Clone, Debug, PartialEq)]
pub struct Share {
    /// Source.
    pub source: String,
    /// Groups.
    pub groups: usize,
    /// Mean over groups.
    pub mean: f64,
    /// Median over groups.
    pub median: f64,
}

/// Errors of rows, `(source, group, error)`, averaged inside groups and over them as scores are.
fn over_groups<'a>(rows: impl Iterator<Item = (&'a str, &'a str, f64)>) -> Vec<Share> {
    let mut sources: BTreeMap<&str, BTreeMap<&str, Vec<f64>>> = BTreeMap::new();
    for (source, group, error) in rows {
        sources.entry(source).or_default().entry(group).or_default().push(error);
    }
    let share = |(source, groups): (&str, BTreeMap<&str, Vec<f64>>)| {
        let mut means: Vec<f64> = groups
            .values()
            .map(|errors| errors.iter().sum::<f64>() / errors.len() as f64)
            .collect();
        means.sort_by(f64::total_cmp);
        let middle = f64::midpoint(means[(means.len() - 1) / 2], means[means.len() / 2]);
        let mean = means.iter().sum::<f64>() / means.len() as f64;
        Share { source: source.to_owned(), groups: means.len(), mean, median: middle }
    };
    sources.into_iter().map(share).collect()
}
