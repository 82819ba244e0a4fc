//! What the search leaves out unless it is asked for, tried on a plan: settings, and fewer GPUs.

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

/// A change of the request with which a faster plan is known.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FasterWith {
    /// As for `--set`, or `--gpus N`. Post-validation may need other decisions to be set, too.
    pub setting: String,
    /// The time of that plan, s.
    pub iteration_s: f64,
    /// GPUs that it leaves idle.
    pub idle: u64,
}

/// Rounder numbers of GPUs are multiples of a power of two: the least that is at least the GPUs
/// over this, and twice that. Degrees that divide a number with few divisors suit no node.
const PARTS: u64 = 16;

/// What makes an answer faster. Nothing is proven of what else might.
pub fn faster_with(request: &Request, answer: &Answer, progress: Progress<'_>) -> Vec<FasterWith> {
    let mut found = vec![post_validation(request, answer)];
    // With `--from`, fewer GPUs were tried.
    if answer.idle.is_none() {
        found.push(fewer_gpus(request, answer, progress));
    }
    found.push(activations(request, answer, progress));
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
    let setting = "post_validation=true".to_owned();
    priced.fits.then_some(FasterWith { setting, iteration_s: priced.iteration_s, idle: 0 })
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
    let task = faster_task(request, answer.plan.predicted.iteration_s);
    let task = Task { restrictions: &restrictions, ..task };
    let Found { priced, .. } = search(&task, progress).best?;
    let setting = "offload=activations".to_owned();
    Some(FasterWith { setting, iteration_s: priced.iteration_s, idle: 0 })
}

/// The search for a plan below `own_s`, in a part of the time left.
fn faster_task(request: &Request, own_s: f64) -> Task<'_> {
    let until = request.task().until.share(SHARE);
    let latest = Instant::now() + MOST;
    let deadline = Some(until.deadline.map_or(latest, |deadline| deadline.min(latest)));
    Task {
        cutoff_s: (1.0 - LEAST_GAIN) * own_s,
        every_cut_work: 0,
        until: Until { deadline, ..until },
        ..request.task()
    }
}

/// Fewer GPUs, of rounder numbers; none for a number that is round itself.
pub fn rounder(gpus: u64) -> Vec<u64> {
    let unit = gpus.div_ceil(PARTS).next_power_of_two();
    let mut fewer = [unit, 2 * unit].map(|unit| gpus / unit * unit).to_vec();
    fewer.retain(|&fewer| 0 < fewer && fewer < gpus);
    fewer.dedup();
    fewer
}

/// The fastest plan that is found in the time left on fewer GPUs, whose number is rounder.
fn fewer_gpus(request: &Request, answer: &Answer, progress: Progress<'_>) -> Option<FasterWith> {
    let mut best: Option<FasterWith> = None;
    for gpus in rounder(request.gpus) {
        if request.task().is_stopped() {
            break;
        }
        let known_s = answer.plan.predicted.iteration_s;
        let own_s = best.as_ref().map_or(known_s, |best| best.iteration_s);
        let task = Task { gpus, ..faster_task(request, own_s) };
        if let Some(Found { priced, .. }) = search(&task, progress).best {
            let (setting, idle) = (format!("--gpus {gpus}"), request.gpus - gpus);
            best = Some(FasterWith { setting, iteration_s: priced.iteration_s, idle });
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::{faster_with, rounder};
    use crate::answer::report::Answer;
    use crate::request::flags::Flags;
    use crate::request::{Request, Task};
    use crate::search::search;

    #[test]
    fn numbers_with_few_divisors_have_rounder_ones_below() {
        assert_eq!(rounder(1000), [960, 896]);
        assert_eq!(rounder(504), [480, 448]);
        assert_eq!(rounder(7), [6]);
        assert_eq!(rounder(17), [16]);
        for round in [1, 2, 8, 64, 96, 768, 3072, 16_384] {
            assert_eq!(rounder(round), [0; 0], "{round}");
        }
    }

    #[test]
    fn fewer_gpus_that_are_faster_are_named() {
        let flags = Flags { model: "gpt_1.7b".to_owned(), gpus: 36, ..Flags::default() };
        let request = Request::new(&flags).expect("it is shipped");
        let task = Task { every_cut_work: 0, ..request.task() };
        let answer = Answer::new(&request, search(&task, &mut |_| {})).expect("it fits");
        let found = faster_with(&request, &answer, &mut |_| {});
        let fewer = found.iter().find(|found| found.setting.starts_with("--gpus"));
        let fewer = fewer.expect("9 stages are slower than 8");
        let gpus: u64 = fewer.setting[7..].parse().expect("a number");
        assert_eq!(gpus + fewer.idle, 36);
        assert!(fewer.iteration_s < answer.plan.predicted.iteration_s);
    }
}
