//! Whether runs that ran, and runs that did not fit, are told apart.

use super::Predicted;
use super::row::Row;
use planner::request::DEFAULT_HEADROOM;
use serde::Serialize;

/// Share by which the prediction of a run that ran may exceed memory and still count as near.
const NEAR: f64 = 0.02;

/// What was found of a group of rows: how many there are, and which.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Called {
    /// Predicted to fit with 5 % to spare.
    pub safe: usize,
    /// Predicted to fit, with a warning.
    pub at_edge: usize,
    /// Predicted not to fit.
    pub infeasible: usize,
}

/// The confusion matrix. The limit is the memory of the device; a prediction counts what the device reserves.
#[derive(Clone, Debug, Default, Serialize)]
pub struct MemoryLimit {
    /// Runs that ran, whose recomputation is stated.
    pub ran: Called,
    /// Runs that ran, whose source does not say what they recompute: taken as nothing.
    pub ran_recompute_unstated: Called,
    /// Runs that were out of memory.
    pub out_of_memory: Called,
    /// Runs that ran, predicted beyond the limit by more than 2 % of it (stated recomputation alone).
    pub ran_but_infeasible: Vec<String>,
    /// Runs that were out of memory, predicted safe or with no more than a warning.
    pub out_of_memory_but_fits: Vec<String>,
}

impl Called {
    fn add(&mut self, filled: f64) {
        match filled {
            _ if filled > 1.0 => self.infeasible += 1,
            _ if filled > 1.0 - DEFAULT_HEADROOM => self.at_edge += 1,
            _ => self.safe += 1,
        }
    }
}

/// Predicted share of the device's memory.
pub fn filled(predicted: &Predicted) -> Option<f64> {
    Some(predicted.predicted_bytes? / predicted.limit_bytes?)
}

/// Compares what fits with what ran.
pub fn memory_limit(rows: &[Row], predicted: &[Predicted]) -> MemoryLimit {
    let mut found = MemoryLimit::default();
    for (row, predicted) in rows.iter().zip(predicted) {
        let Some(filled) = filled(predicted) else { continue };
        // Sources of memory alone also print what was computed and never ran.
        let ran = row.tier <= 2 && row.iteration_s.is_some();
        if row.ran_out_of_memory() {
            found.out_of_memory.add(filled);
            if filled <= 1.0 {
                found.out_of_memory_but_fits.push(row.id.clone());
            }
        } else if ran && row.recompute.is_empty() {
            found.ran_recompute_unstated.add(filled);
        } else if ran {
            found.ran.add(filled);
            if filled > 1.0 + NEAR {
                found.ran_but_infeasible.push(row.id.clone());
            }
        }
    }
    found
}
