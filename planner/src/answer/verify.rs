//! Verifies what a plan's proof says, without trusting it: a search for anything that takes less
//! time than the proof allows.
//!
//! A certificate in the plan would be no quicker to verify: what takes time is to bound again what
//! a first bound does not prune (docs/decisions/033-proofs-by-searching-below.md).

use crate::answer::recheck::{in_memory_of, in_own_memory};
use crate::request::task::{EVERY_CUT_WORK, PROVING_WORK};
use crate::request::{Request, Task};
use crate::search::{Found, Progress, search};
use models::check::Violation;
use models::plan::{Objective, Plan};

/// Figures of a plan are kept to this many parts of themselves.
const KEPT: f64 = 1e-6;

/// What a plan's proof turned out to be.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Nothing takes less than `iteration_s` over the cuts tried, nor less than `all_s` over all.
    Holds {
        /// Over the cuts tried, s.
        iteration_s: f64,
        /// Over all cuts, s.
        all_s: f64,
    },
    /// The search was stopped: nothing takes less than `iteration_s`, which is less than the proof
    /// says.
    Stopped {
        /// Over the cuts tried, s.
        iteration_s: f64,
    },
    /// Over the cuts tried the proof holds. Over all cuts nothing takes less than `all_s`, which is
    /// less than the proof says: the time was up, or all work was done.
    Open {
        /// Over the cuts tried, s.
        iteration_s: f64,
        /// Over all cuts, s.
        all_s: f64,
    },
    /// The proof is wrong.
    Wrong(Violation),
    /// The proof is wrong of the shortest time, but within the memory that the plan needs it holds,
    /// and the plan does not say that it was to need the least.
    WithinOwnMemory(Violation),
}

/// Searches below the plan's time less its gap. `request` is what the plan answers.
pub fn verify(request: &Request, plan: &Plan, progress: Progress<'_>) -> Verdict {
    let verdict = verify_within(&in_memory_of(request, plan), plan, progress);
    let Verdict::Wrong(violation) = verdict else { return verdict };
    // Versions before `inputs.objective` wrote plans of least memory without saying so.
    let own = in_own_memory(request, plan).filter(|_| plan.inputs.objective == Objective::Time);
    match own.map(|own| verify_within(&own, plan, progress)) {
        Some(Verdict::Holds { .. }) => Verdict::WithinOwnMemory(violation),
        _ => Verdict::Wrong(violation),
    }
}

fn verify_within(request: &Request, plan: &Plan, progress: Progress<'_>) -> Verdict {
    let (plan_s, proof) = (plan.predicted.iteration_s, &plan.proof);
    let least_s = |gap: f64| plan_s * (1.0 - gap) * (1.0 - KEPT);
    let [tried_s, all_s] = [proof.searched_gap, proof.gap].map(least_s);
    // One that is faster is enough to refute the proof.
    let task = Task { cutoff_s: tried_s, any: true, every_cut_work: 0, ..request.task() };
    let found = search(&task, progress);
    if let Some(faster) = &found.best {
        return Verdict::Wrong(refuted("searched_gap", proof.searched_gap, faster, plan_s));
    }
    let proven_s = tried_s * (1.0 - found.proof.searched_gap);
    if proven_s < tried_s * (1.0 - KEPT) {
        return Verdict::Stopped { iteration_s: proven_s };
    }
    if proof.gap >= 1.0 {
        return Verdict::Holds { iteration_s: tried_s, all_s: 0.0 };
    }
    // As by default, and where that proves less, as with --prove.
    let mut open_s = 0.0f64;
    for every_cut_work in [2 * EVERY_CUT_WORK, 2 * PROVING_WORK] {
        let outcome = search(&Task { cutoff_s: all_s, every_cut_work, ..task.clone() }, progress);
        if let Some(faster) = &outcome.best {
            return Verdict::Wrong(refuted("gap", proof.gap, faster, plan_s));
        }
        if outcome.proof.gap <= KEPT {
            return Verdict::Holds { iteration_s: tried_s, all_s };
        }
        open_s = open_s.max(all_s * (1.0 - outcome.proof.gap));
        if task.is_stopped() {
            break;
        }
    }
    Verdict::Open { iteration_s: tried_s, all_s: open_s }
}

/// A faster plan than a figure of the proof allows.
fn refuted(field: &str, found: f64, faster: &Found, plan_s: f64) -> Violation {
    let faster_s = faster.priced.iteration_s;
    let gap = 1.0 - faster_s / plan_s;
    Violation {
        field: format!("proof.{field}"),
        found: found.to_string(),
        valid: format!("at least {gap:.6}, as a plan of {faster_s:.6} s exists: plan again"),
    }
}
