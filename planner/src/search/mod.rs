//! The search: every combination is either priced exactly or cut by a bound.
//!
//! Best first. Contexts (degrees, context parallelism, micro-batch) wait in a heap by their bound; the
//! least is taken and replaced by its parts with tighter bounds: nodes by how experts are split, then
//! pipelines (schedule, chunks, vocabulary placement, recomputation), whose states (ZeRO, shards, offload,
//! rank order) are at last settled one by one, by a simulated placement that attains its bound, or by the
//! integer program. What still waits when the least bound reaches the best time is cut. So nothing is
//! looked into whose bound does not lie below the optimum, whatever is found first ([`queue`]). Items are
//! worked on by several threads in batches that do not depend on how many there are ([`expand`]).
//!
//! Four families are cut by dominance, each because another member of the space does as well
//! (for the last: as far as passes go; ARCHITECTURE.md says what is not looked at):
//! - uniform recomputation is one of the mixes of `per_layer`;
//! - the layer ranges of `first_last` and `redistribute` are among those of `tensor`;
//! - `zb_auto` has the order of `zb_h1` or `zb_v` where there are enough micro-batches;
//! - `gpipe` and `naive` are no faster than `1f1b` and keep no fewer micro-batches in flight: without
//!   latency 1F1B takes at most `(m−1)(max F + max B) + Σ(F + B)`, which is what GPipe takes.

mod exhaustive;
mod expand;
mod left_open;
mod local_search;
pub mod partition_candidates;
mod partition_problem;
mod queue;

use crate::pricing::priced::{Placed, Priced};
use crate::request::Task;
use crate::request::restrictions::{Choice, Restrictions};
use models::decisions::Decisions;
use models::plan::Proof;
use models::schedule::ScheduleName;

/// What a search cost: wall times, which differ from run to run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Effort {
    /// The search, s.
    pub elapsed_s: f64,
    /// Integer programs on average, ms.
    pub ms_per_ilp: f64,
}

/// The best configuration found.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its decisions.
    pub decisions: Decisions,
    /// Its placement.
    pub placed: Placed,
    /// Its price.
    pub priced: Priced,
}

/// What a search returns.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The fastest configuration that fits, if any.
    pub best: Option<Found>,
    /// What is proven of it.
    pub proof: Proof,
    /// What the search cost.
    pub effort: Effort,
}

/// Called now and then with the combinations settled and those in all.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// Finds the fastest configuration that fits.
pub fn search(task: &Task<'_>, progress: Progress<'_>) -> Outcome {
    // The bounds speak of iterations that end at a barrier.
    if task.restrictions.wants_post_validation() {
        return exhaustive::run(task, progress);
    }
    queue::run(task, progress)
}

/// The same; where vocabulary passes come first, they are looked for in every schedule that hosts them. By default they are
/// searched with 1F1B alone.
pub fn search_wide(task: &Task<'_>, progress: Progress<'_>) -> Outcome {
    let narrow = search(task, progress);
    let pipelined = |found: &Found| found.decisions.vocab.over_pipeline();
    if task.restrictions.schedule.is_restricted() || !narrow.best.as_ref().is_some_and(pipelined) {
        return narrow;
    }
    let schedule = Choice::of(&ScheduleName::ALL);
    let restrictions = Restrictions { schedule, ..task.restrictions.clone() };
    let cutoff_s = narrow.best.as_ref().map_or(task.cutoff_s, |found| found.priced.iteration_s);
    let wide = search(&Task { restrictions: &restrictions, cutoff_s, ..task.clone() }, progress);
    let elapsed_s = narrow.effort.elapsed_s + wide.effort.elapsed_s;
    let effort = Effort { elapsed_s, ..wide.effort };
    Outcome { best: wide.best.or(narrow.best), proof: wide.proof, effort }
}
