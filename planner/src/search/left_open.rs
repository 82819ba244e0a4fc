//! Bounds what the search leaves out.
//!
//! The search leaves out two families of configurations:
//! - with several chunks per pipeline rank and many partitions, the partitions that are no
//!   candidates, and recompute splits between the rungs of the ladder;
//! - iterations without a barrier at their end (post-validation).
//!
//! The bounds of [`crate::bounds::closed`] cover all of them: some rank has at least the mean load,
//! whatever the partition and the order of passes. The least of these bounds says how much faster
//! than the plan a configuration that was left out may be.

use super::expand::{Context, Worker};
use crate::pricing::pipelines::Pipelines;
use crate::request::Task;
use std::sync::Arc;

/// What is bounded of the configurations that the search leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeftOut {
    /// All of them.
    All,
    /// Iterations without a barrier alone.
    WithoutBarrier,
}

/// Lower bound on the configurations that the search leaves out, with overheads, s; infinite where
/// it is no less than `best_s`. `contexts` are all contexts with their bounds, with overheads, s.
pub(super) fn least_s(
    task: &Task<'_>,
    contexts: &[(f64, &Context)],
    best_s: f64,
    what: LeftOut,
) -> f64 {
    let mut worker = Worker::new(task, Arc::new(Pipelines::default()));
    let mut least_first: Vec<_> = contexts.to_vec();
    least_first.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut least_s = best_s;
    for (bound_s, context) in least_first {
        if bound_s >= least_s {
            break;
        }
        if task.is_stopped() {
            least_s = bound_s;
            break;
        }
        for parallel in worker.layouts_below(&context.node(bound_s), least_s) {
            least_s = least_s.min(match what {
                LeftOut::All => worker.left_open_s(&parallel, least_s),
                LeftOut::WithoutBarrier => worker.barrier_free_s(&parallel, least_s),
            });
        }
    }
    if least_s < best_s { least_s } else { f64::INFINITY }
}
