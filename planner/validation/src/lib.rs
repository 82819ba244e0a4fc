//! The cost model against measurements.
//!
//! - **Validation** (`plan validate`) predicts published measurements and scores the errors:
//!   [`row`] reads a measurement, [`mod@setup`] makes it a pinned configuration on the cluster it
//!   ran on, [`predict_all`] prices that. [`score`] compares times and memory, [`ranking`] the
//!   order of configurations, [`memory_limit`] what fits, and [`claims`] checks comparisons that
//!   papers make.
//! - **Fitting** ([`mod@fit`], `cargo run --example fit`) fits the constants of software
//!   generations and devices that no table measures to the same measurements, cross-validates the
//!   fit, and writes the constants and error bands into the shipped files.
//! - **Calibration** ([`calibrate`], `plan calibrate`) turns measurements of the user's own machine
//!   or GPU into a cluster file.
//!
//! Whether a row is used, and what is predicted for it, depends on its configuration alone and
//! never on its result. The configuration is in the columns, completed by published recipes
//! ([`recipe`]), and by flags that only the notes or the presets of a release state
//! ([`run_flags`]).

pub mod architecture;
pub mod calibrate;
pub mod claims;
pub mod fit;
mod machine;
pub mod memory_limit;
pub mod ranking;
pub mod recipe;
pub mod row;
pub mod run_flags;
pub mod score;
mod searched;
pub mod setup;

use models::decisions::RecomputePolicy;
use models::plan::Breakdown;
use planner::answer::report::memory_warning;
use planner::partition::Scratch;
use planner::pricing::Configuration;
use planner::pricing::cost_cache::CostCache;
use planner::pricing::priced::Priced;
use row::{Reason, Row};
use serde::Serialize;
use setup::{Setup, setup};
use std::num::NonZero;
use std::panic::resume_unwind;
use std::thread::ScopedJoinHandle;
use std::vec::IntoIter;

/// The prediction for a row.
#[derive(Clone, Debug, Serialize)]
pub struct Predicted {
    /// Name of the row.
    pub id: String,
    /// Source of the row.
    pub file: String,
    /// Group of the row; groups have equal weights.
    pub group: String,
    /// Tier of the row, 1 to 3.
    pub tier: u8,
    /// Whether the row could be expressed.
    pub used: bool,
    /// Why it could not be expressed.
    pub reason: Option<Reason>,
    /// Predicted seconds per iteration.
    pub predicted_s: Option<f64>,
    /// Predicted bytes on the fullest device, with what the device reserves.
    pub predicted_bytes: Option<f64>,
    /// The same without what the device reserves: what the allocator counts as tensors.
    pub predicted_allocated_bytes: Option<f64>,
    /// Memory of the device in bytes.
    pub limit_bytes: Option<f64>,
    /// Whether it is predicted to fit.
    pub feasible: Option<bool>,
    /// A warning if it is predicted to fit within the headroom only.
    pub warning: Option<String>,
    /// Breakdown of the predicted seconds.
    pub breakdown: Option<Breakdown>,
}

/// Predicts every row on all cores. Rows are dealt out in turn, because rows that take long are
/// next to each other.
pub fn predict_all(rows: &[Row]) -> Vec<Predicted> {
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    let part = |first: usize| rows.iter().skip(first).step_by(threads).map(predict).collect();
    let mut parts: Vec<IntoIter<Predicted>> = std::thread::scope(|scope| {
        let started: Vec<ScopedJoinHandle<'_, Vec<Predicted>>> =
            (0..threads).map(|first| scope.spawn(move || part(first))).collect();
        let joined =
            started.into_iter().map(|part| part.join().unwrap_or_else(|p| resume_unwind(p)));
        joined.map(Vec::into_iter).collect()
    });
    (0..rows.len()).filter_map(|row| parts[row % threads].next()).collect()
}

fn predict(row: &Row) -> Predicted {
    let mut answer = Predicted {
        id: row.id.clone(),
        file: row.file.clone(),
        group: row.group.clone(),
        tier: row.tier,
        used: false,
        reason: None,
        predicted_s: None,
        predicted_bytes: None,
        predicted_allocated_bytes: None,
        limit_bytes: None,
        feasible: None,
        warning: None,
        breakdown: None,
    };
    let priced = setup(row).and_then(|setup| Ok((price(&setup)?, setup)));
    match priced {
        Ok((priced, setup)) => {
            answer.used = true;
            answer.predicted_s = Some(priced.iteration_s);
            answer.predicted_bytes = priced.device_bytes.iter().copied().reduce(f64::max);
            let reserved = setup.cluster.reserved_bytes();
            answer.predicted_allocated_bytes = answer.predicted_bytes.map(|bytes| bytes - reserved);
            answer.limit_bytes = Some(setup.cluster.device.hbm_bytes);
            answer.feasible = Some(priced.fits);
            answer.warning =
                memory_limit::filled(&answer).and_then(|filled| memory_warning(filled, 0.0));
            answer.breakdown = Some(priced.breakdown);
        }
        Err(reason) => answer.reason = Some(reason),
    }
    answer
}

fn price(setup: &Setup) -> Result<Priced, Reason> {
    let cache = CostCache::new(&setup.model, &setup.cluster, setup.gpus);
    let configuration =
        Configuration::new(&cache, setup.decisions.clone()).map_err(|error| error.to_string())?;
    let configuration = match &setup.searched {
        Some(searched) => searched.applied_to(configuration),
        None => configuration,
    };
    let mut setup = setup.clone();
    if setup.counts.is_empty() {
        let ranges = configuration.listed_ranges().and_then(|list| list.into_iter().next());
        let ranges = ranges.ok_or("its layers are not listed")?;
        setup.counts = ranges.iter().map(|(start, end)| end - start).collect();
    }
    let mut placed = setup.placed();
    if setup.decisions.recompute == RecomputePolicy::PerLayer {
        configuration.recompute_as_must_be(&mut placed);
    }
    Ok(configuration.price(&placed, &mut Scratch::default()))
}
