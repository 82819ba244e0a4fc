//! Features of the published runs of each software generation: the range in which its error band
//! holds.

use crate::decisions::{Decisions, MoeOverlap, Offload};
use crate::input::{InputError, Source, parse_yaml};
use crate::model::ModelSpec;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};

/// Measured runs by software generation; `cargo run --example fit` writes the shipped file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredRuns {
    /// Error, as a share of the iteration's time, that four in five groups of runs lay within when
    /// no run of their software was in the fit.
    pub unseen_band: f64,
    /// By generation, as in software.yaml.
    pub generations: BTreeMap<String, Runs>,
}

/// Ranges and features of the measured runs of one generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Runs {
    /// Fewest and most GPUs.
    pub gpus: [u64; 2],
    /// Shortest and longest sequence, tokens.
    pub seq_len: [u64; 2],
    /// Devices and decisions, named as by [`features`].
    pub had: BTreeSet<String>,
}

/// Where the error band of a generation holds, and the band elsewhere.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// Ranges and features of its measured runs.
    pub runs: Arc<Runs>,
    /// See [`MeasuredRuns::unseen_band`].
    pub unseen_band: f64,
}

impl Seen {
    /// The record of a shipped generation; `None` where none of its runs was compared.
    ///
    /// # Errors
    /// A shipped file that cannot be read, which the tests exclude.
    pub fn of(generation: &str) -> Result<Option<Self>, InputError> {
        let MeasuredRuns { unseen_band, generations } = measured_runs()?;
        let seen = |runs: &Runs| Self { runs: Arc::new(runs.clone()), unseen_band: *unseen_band };
        Ok(generations.get(generation).map(seen))
    }
}

/// Features of a configuration that a prediction's error may depend on, in the words that are
/// printed.
pub fn features(device: &str, model: &ModelSpec, d: &Decisions) -> BTreeSet<String> {
    let experts = if model.moe.is_some() { "experts" } else { "no experts" };
    let mut found = BTreeSet::from([device.to_owned(), experts.to_owned(), d.dtype.to_string()]);
    if d.pp > 1 {
        found.insert(d.schedule.to_string());
    }
    if d.vocab.over_pipeline() {
        found.insert(format!("vocab {}", d.vocab));
    }
    if d.dp * d.cp > 1 {
        found.insert(format!("zero {}", d.zero_stage));
    }
    if d.cp > 1 {
        found.insert(format!("cp {}", d.cp_style));
    }
    if d.moe_overlap != MoeOverlap::None {
        found.insert(d.moe_overlap.to_string());
    }
    if d.offload != Offload::None {
        found.insert(format!("offload {}", d.offload));
    }
    if d.post_validation {
        found.insert("post-validation".to_owned());
    }
    found
}

impl Runs {
    /// One run.
    pub fn of(device: &str, model: &ModelSpec, gpus: u64, d: &Decisions) -> Self {
        let had = features(device, model, d);
        Self { gpus: [gpus; 2], seq_len: [model.seq_len; 2], had }
    }

    /// The union with other runs.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        let wider = |a: [u64; 2], b: [u64; 2]| [a[0].min(b[0]), a[1].max(b[1])];
        self.gpus = wider(self.gpus, other.gpus);
        self.seq_len = wider(self.seq_len, other.seq_len);
        self.had.extend(other.had);
        self
    }

    /// Features of a configuration that none of these runs had.
    pub fn lack(&self, run: &Self) -> Vec<String> {
        let beyond = |[least, most]: [u64; 2], value: u64, unit: &str| {
            let outside = !(least..=most).contains(&value);
            outside.then(|| format!("{value} {unit} (measured: {least} to {most})"))
        };
        let counts = [
            beyond(self.gpus, run.gpus[0], "GPUs"),
            beyond(self.seq_len, run.seq_len[0], "tokens a sequence"),
        ];
        run.had.difference(&self.had).cloned().chain(counts.into_iter().flatten()).collect()
    }
}

/// The shipped table.
///
/// # Errors
/// A shipped file that cannot be read, which the tests exclude.
pub fn measured_runs() -> Result<&'static MeasuredRuns, InputError> {
    const TEXT: &str = include_str!("../../shipped/measured_runs.yaml");
    static READ: OnceLock<Result<MeasuredRuns, InputError>> = OnceLock::new();
    let read = || parse_yaml(&Source::from_bytes("measured_runs.yaml", TEXT.as_bytes().to_vec())?);
    READ.get_or_init(read).as_ref().map_err(Clone::clone)
}
