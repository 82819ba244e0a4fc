//! Checks a trainer's passes before its first step.

use crate::error::Error;
use crate::spec::TrainerSpec;
use models::schedule::Schedule;

/// In an order that the schedule's check accepts, no rank waits for ever.
///
/// # Errors
/// The place of the table, and what is wrong.
pub(super) fn check_passes(spec: &TrainerSpec) -> Result<(), Error> {
    let wrong = |problem: String| Err(Error::Passes { at: spec.passes.place(), problem });
    if let Some(problem) = spec.passes.wrong() {
        return wrong(problem.to_owned());
    }
    let ranks = spec.mesh.pp as usize;
    if spec.passes.len() != ranks {
        return wrong(format!("{} lines for {ranks} pipeline ranks", spec.passes.len()));
    }
    let schedule = Schedule {
        ranks,
        chunks: spec.stages * spec.layout.copies() / ranks,
        micro_batches: spec.micro_batches,
        layout: spec.layout,
        vocab: spec.vocab,
        passes: spec.passes.iter().map(|order| order.passes.clone()).collect(),
        pairs: spec.passes.iter().map(|order| order.pairs.clone()).collect(),
    };
    schedule.validate().or_else(|error| wrong(error.to_string()))
}
