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
use models::schedule::ScheduleName;
use serde::{Deserialize, Serialize};

/// How the search went: the proof.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Proof {
    /// Combinations that satisfy every divisibility rule.
    pub candidates: u64,
    /// Cut: their bound on time is not below the plan's time.
    pub cut_by_time: u64,
    /// Cut: their bound on memory is above the device's.
    pub cut_by_memory: u64,
    /// Cut: another combination does as well in every respect.
    pub cut_by_dominance: u64,
    /// Placement problems looked into.
    pub placed: u64,
    /// Integer programs solved.
    pub ilps: u64,
    /// Mean wall time of an integer program, ms.
    pub ms_per_ilp: f64,
    /// Wall time of the search, s.
    pub elapsed_s: f64,
    /// Nothing faster exists in the space, by this cost model: `gap` is 0.
    pub proven_optimal: bool,
    /// By what share of the plan's time another configuration may be faster at most: (time − bound) / time over
    /// every cut of the layers and every mix of recomputation, vocabulary passes in every schedule, and iterations
    /// without a barrier at their end. 1 where there is no bound.
    pub gap: f64,
    /// The same over the combinations and the cuts that are searched.
    #[serde(default)]
    pub searched_gap: f64,
    /// Some combinations have several chunks a device and so many cuts that a family of them is tried.
    pub family: bool,
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
    /// How it was found.
    pub proof: Proof,
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
    let elapsed_s = narrow.proof.elapsed_s + wide.proof.elapsed_s;
    Outcome { best: wide.best.or(narrow.best), proof: Proof { elapsed_s, ..wide.proof } }
}
