//! A bound on what a search leaves out.
//!
//! Three families of configurations are not settled by the search: with several chunks a device and
//! many cuts, the cuts that are on no list and the mixes of recomputation between levels; vocabulary
//! passes in schedules that are not offered by default; and iterations without a barrier at their end
//! (post-validation). The bounds of [`crate::bounds::closed`] hold for all of them: some device has at
//! least the mean of the devices' work, whatever the cut and the order of passes. The least of them
//! says how much faster than the plan a configuration may be that was left out.

use super::expand::{Context, Worker};
use crate::pricing::pipelines::Pipelines;
use crate::request::Task;
use crate::request::restrictions::{Choice, Restrictions};
use models::schedule::ScheduleName;
use std::sync::Arc;

/// No configuration that the search leaves out takes less, finished, s; infinite where there is none.
///
/// `contexts` are all contexts with their bounds, finished, s.
pub(super) fn least_s(task: &Task<'_>, contexts: &[(f64, &Context)], best_s: f64) -> f64 {
    let apart = !task.restrictions.schedule.is_restricted();
    let restrictions = offered(task.restrictions);
    let task = Task { restrictions: &restrictions, ..task.clone() };
    let mut worker = Worker::new(&task, Arc::new(Pipelines::default()));
    let mut least_first: Vec<_> = contexts.to_vec();
    least_first.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut least_s = best_s;
    for (bound_s, context) in least_first {
        if bound_s >= least_s {
            break;
        }
        for parallel in worker.nodes_below(&context.node(bound_s), least_s) {
            least_s = least_s.min(worker.left_open_s(&parallel, least_s, apart));
        }
    }
    if least_s < best_s { least_s } else { f64::INFINITY }
}

/// The same restrictions with vocabulary passes in every schedule that can host them.
fn offered(asked: &Restrictions) -> Restrictions {
    let all = Choice::of(&ScheduleName::ALL);
    let schedule = if asked.schedule.is_restricted() { asked.schedule.clone() } else { all };
    Restrictions { schedule, ..asked.clone() }
}
