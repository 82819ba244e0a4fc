//! Whether the memory model tells runs that fit from runs out of memory.

use super::Predicted;
use super::row::Row;
use planner::request::DEFAULT_HEADROOM;
use serde::Serialize;

/// Fraction by which the prediction for a run that fits may exceed memory and still count as close.
const CLOSE: f64 = 0.02;

/// Predictions for a group of rows, counted by verdict.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Verdicts {
    /// Predicted to fit with the default headroom to spare.
    pub safe: usize,
    /// Predicted to fit, with a warning.
    pub at_edge: usize,
    /// Predicted not to fit.
    pub infeasible: usize,
}

/// The confusion matrix. The limit is the device's memory; predictions include what the device
/// reserves.
#[derive(Clone, Debug, Default, Serialize)]
pub struct MemoryLimit {
    /// Runs that fit, with stated recomputation.
    pub ran: Verdicts,
    /// Runs that fit, whose source does not state what they recompute: assumed to be nothing.
    pub ran_recompute_unstated: Verdicts,
    /// Runs out of memory.
    pub out_of_memory: Verdicts,
    /// Runs that fit (with stated recomputation), predicted to exceed the limit by more than 2 %.
    pub ran_but_infeasible: Vec<String>,
    /// Runs out of memory, predicted to fit, with or without a warning.
    pub out_of_memory_but_fits: Vec<String>,
}

impl Verdicts {
    fn add(&mut self, filled: f64) {
        match filled {
            _ if filled > 1.0 => self.infeasible += 1,
            _ if filled > 1.0 - DEFAULT_HEADROOM => self.at_edge += 1,
            _ => self.safe += 1,
        }
    }
}

/// Predicted fraction of the device's memory.
pub fn filled(predicted: &Predicted) -> Option<f64> {
    Some(predicted.predicted_bytes? / predicted.limit_bytes?)
}

/// Compares predictions with what fit.
pub fn memory_limit(rows: &[Row], predicted: &[Predicted]) -> MemoryLimit {
    let mut found = MemoryLimit::default();
    for (row, predicted) in rows.iter().zip(predicted) {
        let Some(filled) = filled(predicted) else { continue };
        // Sources that print memory alone include configurations that never ran.
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
            if filled > 1.0 + CLOSE {
                found.ran_but_infeasible.push(row.id.clone());
            }
        }
    }
    found
}
