//! Runs a schedule with given pass durations.
//!
//! Every pipeline rank runs its passes in the schedule's order. A pass starts when its rank is free
//! and its input has arrived. A transfer or a barrier takes time but keeps no rank busy.
//!
//! [`Prepared`] turns a schedule into flat arrays once. Pricing it is then one walk over them
//! without allocation, so that a search can price an order a hundred thousand times.

mod costs;
mod draw;
mod path;
mod prepared;
mod report;
mod timeline;

pub use costs::{Durations, InputDurations, VocabDurations};
pub use draw::LEGEND;
pub use path::CriticalPath;
pub use prepared::{BeforeVocab, Prepared, Workspace};
pub use report::{MemoryRequest, PairTime, Report, Request, VocabRequest};
pub use timeline::{RankTime, Span, Timeline};

use models::schedule::{Schedule, ScheduleError};

/// Runs a schedule once and returns its timeline.
///
/// # Errors
/// The passes are incomplete or wait for one another.
pub fn simulate(schedule: &Schedule, durations: &Durations) -> Result<Timeline, ScheduleError> {
    let prepared = Prepared::new(schedule)?;
    Ok(prepared.timeline(schedule, durations, &mut Workspace::default()))
}
