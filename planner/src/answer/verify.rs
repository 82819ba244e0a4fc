//! Verifies what a plan's proof says, without trusting it: a search for anything that takes less
//! time than the proof allows.
//!
//! A certificate in the plan would be no quicker to verify: what takes time is to bound again what
//! a first bound does not prune (docs/decisions/033-proofs-by-searching-below.md).

use crate::answer::recheck::{in_memory_of, in_own_memory};
use crate::request::task::EVERY_CUT_WORK;
use crate::request::{Request, Task};
use crate::search::{Outcome, Progress, search};
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
    let task = Task { cutoff_s: tried_s, any: true, bounds_left_out: true, ..request.task() };
    let found = search(&task, progress);
    if let Some(faster) = &found.best {
        let faster_s = faster.priced.iteration_s;
        let gap = 1.0 - faster_s / plan_s;
        return Verdict::Wrong(Violation {
            field: "proof.searched_gap".to_owned(),
            found: proof.searched_gap.to_string(),
            valid: format!("at least {gap:.6}, as a plan of {faster_s:.6} s exists: plan again"),
        });
    }
    let proven_s = tried_s * (1.0 - found.proof.searched_gap);
    if proven_s < tried_s * (1.0 - KEPT) {
        return Verdict::Stopped { iteration_s: proven_s };
    }
    let proven_all_s = match proof.every_cut_gap {
        None => tried_s * (1.0 - found.proof.gap),
        Some(gap) => {
            let cutoff_s = least_s(gap);
            // The plan was made with as much for programs that prove less.
            let every_cut_work = 2 * EVERY_CUT_WORK;
            let outcome = search(&Task { cutoff_s, every_cut_work, ..task }, progress);
            let over_all = cutoff_s * (1.0 - outcome.proof.gap);
            if let Some(verdict) = over_every_cut(outcome, cutoff_s, plan_s, gap) {
                return verdict;
            }
            over_all
        }
    };
    if proven_all_s < all_s * (1.0 - KEPT) {
        let gap = 1.0 - proven_all_s / plan_s;
        return Verdict::Wrong(Violation {
            field: "proof.gap".to_owned(),
            found: proof.gap.to_string(),
            valid: format!("at least {gap:.6}, which is what the bounds over all cuts give"),
        });
    }
    Verdict::Holds { iteration_s: tried_s, all_s: all_s.min(proven_all_s) }
}

/// What a search of every cut below `cutoff_s` says of a proof that nothing is there; `None` where
/// that is so.
fn over_every_cut(outcome: Outcome, cutoff_s: f64, plan_s: f64, gap: f64) -> Option<Verdict> {
    if let Some(faster) = outcome.best {
        let faster_s = faster.priced.iteration_s;
        return Some(Verdict::Wrong(Violation {
            field: "proof.every_cut_gap".to_owned(),
            found: gap.to_string(),
            valid: format!(
                "at least {:.6}, as a plan of {faster_s:.6} s exists",
                1.0 - faster_s / plan_s
            ),
        }));
    }
    let open = outcome.proof.every_cut_gap.filter(|open| *open > KEPT)?;
    Some(Verdict::Stopped { iteration_s: cutoff_s * (1.0 - open) })
}
