//! Plans again for another number of GPUs, from a plan that is known: after the loss of a node, for
//! instance.
//!
//! Few numbers of GPUs can be split over a model. Where the new one cannot, the best of the largest
//! numbers below it that can is taken, and the rest idles.

use crate::answer::explain::least_memory;
use crate::request::restrictions::{Numbers, Restrictions};
use crate::request::{Request, Task};
use crate::search::{Empty, Outcome, Progress, search, search_wide};
use models::decisions::Decisions;

/// Numbers of GPUs to try, and how many below the one asked for are looked at.
const COUNTS: usize = 4;
const LOOKED_AT: usize = 4096;
/// Share of the time for the degrees of the known plan.
const NEAR: f64 = 0.3;

/// The fastest plan on at most the request's GPUs: the request with the number that it uses, and
/// the outcome of its search. `known` are the decisions of a plan on another number.
///
/// # Errors
/// No number can be split, nothing fits, or the time did not show.
pub fn replan(
    request: &Request,
    known: &Decisions,
    progress: Progress<'_>,
) -> Result<(Request, Outcome), Empty> {
    let alike = with_degrees(request, known).map(|gpus| on(request, gpus));
    let mut best = alike.and_then(|on| {
        let outcome = near(&on, known, progress).ok()?;
        Some((on, outcome))
    });
    // Where the known degrees gave nothing, others may on the same number.
    let least = best.as_ref().map(|(on, _)| on.gpus);
    let mut larger = largest(request);
    larger.retain(|gpus| least.is_none_or(|least| *gpus > least));
    let mut why = Empty::Proven;
    for (index, &gpus) in larger.iter().enumerate() {
        // Each number gets its part of the time, and the best of them what is left.
        let share = 1.0 / (larger.len() + 1 - index) as f64;
        let on = Request { gpus, ..request.with_share(share) };
        match search_wide(&below(&on, best.as_ref()), progress).found() {
            Ok(outcome) => best = Some((Request { deadline: request.deadline, ..on }, outcome)),
            Err(Empty::Undecided) => why = Empty::Undecided,
            Err(Empty::Proven) => {}
        }
    }
    let (on, first) = best.ok_or(why)?;
    let mut outcome = search_wide(&below(&on, Some(&(on.clone(), first.clone()))), progress);
    outcome.effort.elapsed_s += first.effort.elapsed_s;
    outcome.best = outcome.best.or(first.best);
    Ok((on, outcome))
}

/// The same for a plan of least memory: on the largest number of GPUs that can be split and where
/// anything fits. With it the bytes below which nothing fits.
///
/// # Errors
/// Those of [`replan`].
pub fn replan_least_memory(
    request: &Request,
    progress: Progress<'_>,
) -> Result<(Request, Outcome, f64), Empty> {
    let mut why = Empty::Proven;
    for gpus in largest(request) {
        let on = on(request, gpus);
        match least_memory(&on, progress) {
            Ok((outcome, least_bytes)) => return Ok((on, outcome, least_bytes)),
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

/// The largest numbers of GPUs that can be split at all, largest first.
fn largest(request: &Request) -> Vec<u64> {
    let counts = (1..=request.gpus).rev().take(LOOKED_AT);
    counts.filter(|&gpus| can(request, gpus, &request.restrictions)).take(COUNTS).collect()
}
