//! Settings that the search leaves out unless they are asked for, tried on a plan.

use crate::answer::report::Answer;
use crate::pricing::cost_cache::CostCache;
use crate::request::restrictions::{Choice, Restrictions};
use crate::request::{Request, Task};
use crate::search::{Found, Progress, search};
use crate::until::Until;
use models::decisions::{Decisions, Offload, RecomputePolicy};
use models::program::unsupported_decisions;
use serde::Serialize;
use std::time::{Duration, Instant};

/// Gains below this share are not shown.
const LEAST_GAIN: f64 = 1e-3;

/// Share of the time left for a plan with activations on the host, and the most that it gets.
const SHARE: f64 = 0.5;
const MOST: Duration = Duration::from_secs(2);

/// A setting with which a faster plan is known.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FasterWith {
    /// As for `--set`. Post-validation may need other decisions to be set, too.
    pub setting: &'static str,
    /// The time of that plan, s.
    pub iteration_s: f64,
}

/// The settings that make an answer faster. Nothing is proven of others.
pub fn faster_with(request: &Request, answer: &Answer, progress: Progress<'_>) -> Vec<FasterWith> {
    let found = [post_validation(request, answer), activations(request, answer, progress)];
    let below_s = (1.0 - LEAST_GAIN) * answer.plan.predicted.iteration_s;
    found.into_iter().flatten().filter(|found| found.iteration_s < below_s).collect()
}

/// The plan itself with post-validation.
fn post_validation(request: &Request, answer: &Answer) -> Option<FasterWith> {
    let d = &answer.plan.decisions;
    let allowed = !request.restrictions.post_validation.is_restricted();
    let on_host = d.offload != Offload::None;
    let possible = d.pp > 1 && d.schedule.splits_backward() && !d.vocab.over_pipeline();
    if !allowed || !possible || on_host || d.post_validation {
        return None;
    }
    let decisions = Decisions { post_validation: true, ..d.clone() };
    let runs = unsupported_decisions(&request.model, &decisions).is_empty();
    if request.restrictions.runnable && !runs {
        return None;
    }
    let cache = CostCache::new(&request.model, &request.cluster, request.gpus);
    let Found { priced, .. } = Found::new(&cache, decisions, answer.placed.clone())?;
    let setting = "post_validation=true";
    priced.fits.then_some(FasterWith { setting, iteration_s: priced.iteration_s })
}

/// The fastest plan that is found in the time left with activations on the host, where the plan
/// recomputes for lack of memory.
fn activations(request: &Request, answer: &Answer, progress: Progress<'_>) -> Option<FasterWith> {
    let asked = &request.restrictions;
    let short = answer.plan.decisions.recompute != RecomputePolicy::None;
    if !short || asked.offload.is_restricted() || request.task().is_stopped() {
        return None;
    }
    let restrictions =
        Restrictions { offload: Choice::of(&[Offload::Activations]), ..asked.clone() };
    let until = request.task().until.share(SHARE);
    let latest = Instant::now() + MOST;
    let deadline = Some(until.deadline.map_or(latest, |deadline| deadline.min(latest)));
    let task = Task {
        restrictions: &restrictions,
        cutoff_s: (1.0 - LEAST_GAIN) * answer.plan.predicted.iteration_s,
        every_cut_work: 0,
        until: Until { deadline, ..until },
        ..request.task()
    };
    let Found { priced, .. } = search(&task, progress).best?;
    Some(FasterWith { setting: "offload=activations", iteration_s: priced.iteration_s })
}
