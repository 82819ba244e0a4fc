//! Plans again for another number of GPUs, from a plan that is known: after the loss of a node, for
//! instance.
//!
//! Few numbers of GPUs can be split over a model. Where the new one cannot, the best of the largest
//! numbers below it that can is taken, and the rest idles.

use crate::answer::explain::least_memory;
use crate::request::restrictions::{Numbers, Restrictions};
use crate::request::{Request, Task};
use crate::search::{Empty, Outcome, Progress, search};
use models::decisions::Decisions;

/// Numbers of GPUs to try, and how many below the one asked for are looked at.
const COUNTS: usize = 4;
const LOOKED_AT: usize = 4096;
/// A plan on at most as many GPUs as were asked for.
#[derive(Clone, Debug)]
pub struct Replanned {
    /// The request with the number that it uses.
    pub request: Request,
    /// Its search.
    pub outcome: Outcome,
    /// Why it uses no more.
    pub why: WhyNoMore,
    /// For a plan of least memory: bytes of a device in less than which nothing fits.
    pub least_bytes: Option<f64>,
}

/// Why GPUs idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhyNoMore {
    /// No larger number can be split over the model.
    CannotBeSplit,
    /// On the larger numbers that can be split, nothing fits.
    NothingFits,
    /// On the larger numbers that can be split, no plan is as fast.
    Slower,
    /// Of the larger numbers that can be split, no plan is as fast on the largest [`COUNTS`].
    LargestSlower,
    /// The time was up before the larger numbers were decided.
    Undecided,
}

impl WhyNoMore {
    /// `bounds_s` are larger numbers of GPUs with what no plan on them takes less than, `own_s` is
    /// the plan's time, and `untried` whether there are numbers between.
    fn of(bounds_s: &[(u64, f64)], own_s: f64, untried: bool) -> Self {
        match bounds_s {
            [] => Self::CannotBeSplit,
            all if all.iter().any(|(_, bound_s)| *bound_s < own_s) => Self::Undecided,
            all if all.iter().all(|(_, bound_s)| bound_s.is_infinite()) && !untried => {
                Self::NothingFits
            }
            _ if untried => Self::LargestSlower,
            _ => Self::Slower,
        }
    }

    /// In words.
    pub fn words(self) -> String {
        match self {
            Self::CannotBeSplit => "more cannot be split over this model".to_owned(),
            Self::NothingFits => {
                "larger numbers cannot be split, or nothing fits on them".to_owned()
            }
            Self::Slower => {
                "larger numbers cannot be split, or no plan on them is as fast".to_owned()
            }
            Self::LargestSlower => format!(
                "no plan on the {COUNTS} largest numbers that can be split is as fast; those \
                 between were not tried"
            ),
            Self::Undecided => {
                "no better plan on more was found in the time; --prove goes on".to_owned()
            }
        }
    }
}

/// Share of the time for the degrees of the known plan.
const NEAR: f64 = 0.3;

/// The fastest plan on at most the request's GPUs. `known` are the decisions of a plan on another
/// number.
///
/// # Errors
/// No number can be split, nothing fits, or the time did not show.
pub fn replan(
    request: &Request,
    known: &Decisions,
    progress: Progress<'_>,
) -> Result<Replanned, Empty> {
    let alike = with_degrees(request, known).map(|gpus| on(request, gpus));
    let mut best = alike.and_then(|on| {
        let outcome = near(&on, known, progress).ok()?;
        Some((on, outcome))
    });
    // Where the known degrees gave nothing, others may on the same number.
    let least = best.as_ref().map(|(on, _)| on.gpus);
    let mut larger = largest(request, COUNTS + 1);
    larger.retain(|gpus| least.is_none_or(|least| *gpus > least));
    let untried = larger.split_off(larger.len().min(COUNTS)).first().copied();
    let mut why = Empty::Proven;
    // What no plan on a larger number takes less than, s.
    let mut bounds_s = vec![];
    for (index, &gpus) in larger.iter().enumerate() {
        // Each number gets its part of the time, and the best of them what is left.
        let share = 1.0 / (larger.len() + 1 - index) as f64;
        let on = Request { gpus, ..request.with_share(share) };
        let task = below(&on, best.as_ref());
        let cutoff_s = task.cutoff_s;
        let found = search(&task, progress).found();
        bounds_s.push((gpus, bound_s(&found, cutoff_s)));
        match found {
            Ok(outcome) => best = Some((Request { deadline: request.deadline, ..on }, outcome)),
            Err(Empty::Undecided) => why = Empty::Undecided,
            Err(Empty::Proven) => {}
        }
    }
    let (on, first) = best.ok_or(why)?;
    let mut outcome = search(&below(&on, Some(&(on.clone(), first.clone()))), progress);
    outcome.effort.elapsed_s += first.effort.elapsed_s;
    outcome.best = outcome.best.or(first.best);
    let own_s = outcome.best.as_ref().map_or(f64::INFINITY, |best| best.priced.iteration_s);
    bounds_s.retain(|(gpus, _)| *gpus > on.gpus);
    let untried = untried.is_some_and(|gpus| gpus > on.gpus);
    let why = WhyNoMore::of(&bounds_s, own_s, untried);
    Ok(Replanned { request: on, outcome, why, least_bytes: None })
}

/// What no plan of a search takes less than, s; no plan below `cutoff_s` was asked for.
fn bound_s(found: &Result<Outcome, Empty>, cutoff_s: f64) -> f64 {
    match found {
        Err(Empty::Proven) => cutoff_s,
        Err(Empty::Undecided) => 0.0,
        Ok(outcome) => {
            let best_s = outcome.best.as_ref().map_or(cutoff_s, |best| best.priced.iteration_s);
            best_s * (1.0 - outcome.proof.searched_gap)
        }
    }
}

/// The same for a plan of least memory: on the largest number of GPUs that can be split and where
/// anything fits.
///
/// # Errors
/// Those of [`replan`].
pub fn replan_least_memory(request: &Request, progress: Progress<'_>) -> Result<Replanned, Empty> {
    let mut why = Empty::Proven;
    for (index, gpus) in largest(request, COUNTS).into_iter().enumerate() {
        let request = on(request, gpus);
        match least_memory(&request, progress) {
            Ok((outcome, least_bytes)) => {
                let why = match why {
                    _ if index == 0 => WhyNoMore::CannotBeSplit,
                    Empty::Proven => WhyNoMore::NothingFits,
                    Empty::Undecided => WhyNoMore::Undecided,
                };
                return Ok(Replanned { request, outcome, why, least_bytes: Some(least_bytes) });
            }
            Err(Empty::Undecided) => why = Empty::Undecided,
            Err(Empty::Proven) => {}
        }
    }
    Err(why)
}

/// The request's task for what takes less time than is known.
fn below<'a>(request: &'a Request, best: Option<&(Request, Outcome)>) -> Task<'a> {
    let found = best.and_then(|(_, outcome)| outcome.best.as_ref());
    let cutoff_s = found.map_or(f64::INFINITY, |found| found.priced.iteration_s);
    Task { cutoff_s, ..request.task() }
}

fn on(request: &Request, gpus: u64) -> Request {
    Request { gpus, ..request.clone() }
}

/// The fastest plan with the degrees of the known one, or anything that fits with them where its
/// part of the time is up before.
fn near(request: &Request, known: &Decisions, progress: Progress<'_>) -> Result<Outcome, Empty> {
    let restrictions = narrowed(&request.restrictions, known);
    let limited = request.with_share(NEAR);
    let task = Task { restrictions: &restrictions, ..limited.task() };
    search(&task, progress).found().or_else(|why| match why {
        Empty::Proven => Err(why),
        Empty::Undecided => {
            let task = Task { any: true, until: request.task().until, ..task.clone() };
            search(&task, progress).found()
        }
    })
}

/// The restrictions with the degrees of a plan, where they are allowed; replicas follow from the
/// number of GPUs.
fn narrowed(asked: &Restrictions, known: &Decisions) -> Restrictions {
    let mut near = asked.clone();
    let pin = |of: &mut Numbers, value: u64| {
        if of.allows(value) {
            *of = Numbers::only(value);
        }
    };
    pin(&mut near.tp, known.tp);
    pin(&mut near.pp, known.pp);
    pin(&mut near.cp, known.cp);
    pin(&mut near.ep, known.ep);
    near
}

/// Whether a number of GPUs can be split over the model.
fn can(request: &Request, gpus: u64, restrictions: &Restrictions) -> bool {
    !Task { gpus, restrictions, ..request.task() }.space().is_empty()
}

/// The largest number of GPUs that can be split with the degrees of the known plan.
fn with_degrees(request: &Request, known: &Decisions) -> Option<u64> {
    let restrictions = narrowed(&request.restrictions, known);
    let unit = known.tp * known.pp * known.cp;
    let counts = (1..=request.gpus / unit).rev().map(|replicas| replicas * unit);
    counts.take(LOOKED_AT).find(|&gpus| can(request, gpus, &restrictions))
}

/// The `count` largest numbers of GPUs that can be split at all, largest first.
fn largest(request: &Request, count: usize) -> Vec<u64> {
    let counts = (1..=request.gpus).rev().take(LOOKED_AT);
    counts.filter(|&gpus| can(request, gpus, &request.restrictions)).take(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::flags::Flags;

    const NEVER: f64 = f64::INFINITY;

    #[test]
    fn why_gpus_idle() {
        let why = |bounds_s: &[(u64, f64)], untried| WhyNoMore::of(bounds_s, 2.0, untried);
        assert_eq!(why(&[], false), WhyNoMore::CannotBeSplit);
        assert_eq!(why(&[(15, NEVER), (14, NEVER)], false), WhyNoMore::NothingFits);
        assert_eq!(why(&[(15, NEVER), (14, 2.0)], false), WhyNoMore::Slower);
        assert_eq!(why(&[(15, NEVER), (14, 2.0)], true), WhyNoMore::LargestSlower);
        assert_eq!(why(&[(15, 3.0), (14, 1.9)], true), WhyNoMore::Undecided);
    }

    #[test]
    fn what_the_time_did_not_show_bounds_nothing() {
        assert_eq!(bound_s(&Err(Empty::Undecided), NEVER), 0.0);
        assert_eq!(bound_s(&Err(Empty::Proven), 3.0), 3.0);
    }

    /// Against searches of every larger number.
    #[test]
    fn larger_numbers_are_as_the_reason_says() {
        let flags = Flags { model: "llama8b".to_owned(), gpus: 16, ..Flags::default() };
        let request = Request::new(&flags).expect("it is shipped");
        let known = search(&request.task(), &mut |_| {}).best.expect("it fits").decisions;
        let mut reasons = vec![];
        for gpus in [9, 11, 13, 15] {
            let found = replan(&on(&request, gpus), &known, &mut |_| {}).expect("it fits");
            let own_s = found.outcome.best.expect("it fits").priced.iteration_s;
            let mut larger = (found.request.gpus + 1)..=gpus;
            let found_s = |gpus| {
                let best = search(&on(&request, gpus).task(), &mut |_| {}).best;
                best.map_or(NEVER, |best| best.priced.iteration_s)
            };
            let splits = larger.clone().any(|gpus| can(&request, gpus, &request.restrictions));
            assert_eq!(found.why == WhyNoMore::CannotBeSplit, !splits, "{gpus}");
            assert!(larger.all(|gpus| found_s(gpus) >= own_s), "{gpus}: {:?}", found.why);
            reasons.push(found.why);
        }
        assert!(reasons.contains(&WhyNoMore::Slower), "no test: {reasons:?}");
    }
}
