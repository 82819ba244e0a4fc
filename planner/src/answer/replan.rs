//! Plans again for another number of GPUs, from a plan that is known: after the loss of a node, for
//! instance.
//!
//! Few numbers of GPUs can be split over a model. Where the new one cannot, the best of the largest
//! numbers below it that can, and of rounder ones, is taken, and the rest idles.

use crate::answer::recheck::placed_of;
use crate::answer::shortage::least_memory;
use crate::answer::unsearched::rounder;
use crate::partition::Scratch;
use crate::pricing::Configuration;
use crate::pricing::cost_cache::CostCache;
use crate::request::restrictions::{Numbers, Restrictions};
use crate::request::{Request, Task};
use crate::search::{Effort, Empty, Found, Outcome, Progress, search};
use models::decisions::Decisions;
use models::plan::{Plan, Proof};
use serde::Serialize;
use std::time::Instant;

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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
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
            Self::CannotBeSplit => {
                "more cannot be split over this model, its batch and the settings".to_owned()
            }
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
/// Part of the GPUs that the degrees of the known plan must be able to use for that to be worth its
/// time, where another plan is known. A plan of llama70b for 1,024 GPUs uses 512 of 1,016:
/// without a search of its degrees a fifth of a second gives 16.5 to 16.9 s a step, and 16.5 to
/// 17.9 with it.
const WORTH: f64 = 0.75;

/// The fastest plan on at most the request's GPUs. `known` is a plan of the same model on another
/// number, or on the same.
///
/// # Errors
/// No number can be split, nothing fits, or the time did not show.
pub fn replan(request: &Request, known: &Plan, progress: Progress<'_>) -> Result<Replanned, Empty> {
    let begun = Instant::now();
    let mut best = carried_over(request, known);
    let mut why = Empty::Proven;
    let mut larger = largest(request, COUNTS + 1);
    let worth = larger.first().map_or(0.0, |most| WORTH * *most as f64);
    let is_worth_it = |gpus: &u64| best.is_none() || *gpus as f64 >= worth;
    let alike = with_degrees(request, &known.decisions).filter(is_worth_it);
    if let Some(gpus) = alike {
        let on = on(request, gpus);
        match near(&on, &known.decisions, cutoff_s(best.as_ref()), progress) {
            Ok(outcome) => best = Some((on, outcome)),
            Err(Empty::Undecided) => why = Empty::Undecided,
            Err(Empty::Proven) => {}
        }
    }
    // Where the known degrees gave nothing, others may on the same number.
    let first = best.as_ref().map(|(on, _)| on.gpus);
    larger.retain(|gpus| first.is_none_or(|first| *gpus > first));
    let untried = larger.split_off(larger.len().min(COUNTS)).first().copied();
    let numbers = numbers_to_try(request, first, &larger);
    // What no plan on a number takes less than, s.
    let mut bounds_s = vec![];
    for (index, &gpus) in numbers.iter().enumerate() {
        if best.as_ref().is_some_and(|(on, _)| on.gpus == gpus) {
            continue;
        }
        // Each number gets its part of the time, and the best of them what is left.
        let share = 1.0 / (numbers.len() + 1 - index) as f64;
        let on = Request { gpus, ..request.with_share(share) };
        let cutoff_s = cutoff_s(best.as_ref());
        let found = search(&Task { cutoff_s, every_cut_work: 0, ..on.task() }, progress).found();
        bounds_s.push((gpus, bound_s(&found, cutoff_s)));
        match found {
            Ok(outcome) => best = Some((Request { deadline: request.deadline, ..on }, outcome)),
            Err(Empty::Undecided) => why = Empty::Undecided,
            Err(Empty::Proven) => {}
        }
    }
    let (on, first) = best.ok_or(why)?;
    let own_s = first.best.as_ref().map_or(f64::INFINITY, |found| found.priced.iteration_s);
    let task = Task { cutoff_s: own_s, ..on.task() };
    let mut outcome = search(&task, progress);
    outcome.effort.elapsed_s = begun.elapsed().as_secs_f64();
    outcome.best = outcome.best.or(first.best);
    let own_s = outcome.best.as_ref().map_or(f64::INFINITY, |best| best.priced.iteration_s);
    bounds_s.retain(|(gpus, _)| *gpus > on.gpus);
    let untried = untried.is_some_and(|gpus| gpus > on.gpus);
    let why = WhyNoMore::of(&bounds_s, own_s, untried);
    Ok(Replanned { request: on, outcome, why, least_bytes: None })
}

/// Numbers of GPUs in the order in which they are tried: rounder ones, on which plans are often
/// faster, then those `larger` than the number of the `first` plan. Where one of them is smaller,
/// that number comes last: the first plan on it may not be the best.
fn numbers_to_try(request: &Request, first: Option<u64>, larger: &[u64]) -> Vec<u64> {
    let mut numbers = rounder(request.gpus);
    numbers.retain(|&gpus| first != Some(gpus) && can(request, gpus, &request.restrictions));
    let again = first.filter(|first| numbers.iter().any(|gpus| gpus < first));
    let others: Vec<u64> =
        larger.iter().copied().filter(|gpus| !numbers.contains(gpus)).chain(again).collect();
    numbers.extend(others);
    numbers
}

/// What is faster than what is known takes less than this, s.
fn cutoff_s(best: Option<&(Request, Outcome)>) -> f64 {
    let found = best.and_then(|(_, outcome)| outcome.best.as_ref());
    found.map_or(f64::INFINITY, |found| found.priced.iteration_s)
}

/// The known plan with other numbers of replicas, its stages as they are: the fastest that fits on
/// the [`COUNTS`] largest numbers of GPUs that allow it. Nothing is proven of it.
fn carried_over(request: &Request, known: &Plan) -> Option<(Request, Outcome)> {
    let d = &known.decisions;
    let most = request.gpus / (d.tp * d.pp * d.cp);
    let counts = (1..=most).rev().take(LOOKED_AT);
    let found = counts.filter_map(|replicas| with_replicas(request, known, replicas)).take(COUNTS);
    let by_time = |(_, a): &(_, Found), (_, b): &(_, Found)| {
        a.priced.iteration_s.total_cmp(&b.priced.iteration_s)
    };
    let (on, found) = found.min_by(by_time)?;
    let proof = Proof { gap: 1.0, searched_gap: 1.0, ..Proof::default() };
    let (best, passed, effort) = (Some(found), vec![], Effort::default());
    Some((on, Outcome { best, passed, proof, effort }))
}

/// The known plan with `dp` replicas; `None` where the request does not allow that, or it does not
/// fit.
fn with_replicas(request: &Request, known: &Plan, dp: u64) -> Option<(Request, Found)> {
    let d = &known.decisions;
    let sequences = request.model.global_batch;
    if !sequences.is_multiple_of(dp * d.micro_batch) {
        return None;
    }
    let all = dp * d.cp;
    let dp_shard = match d.dp_shard {
        1 => 1,
        some if some < d.dp * d.cp && all.is_multiple_of(some) => some,
        _ => all,
    };
    let micro_batches = sequences / (dp * d.micro_batch);
    let zero_stage = if all == 1 { 0 } else { d.zero_stage };
    let decisions = Decisions { dp, dp_shard, zero_stage, micro_batches, ..d.clone() };
    let on = on(request, d.tp * d.pp * d.cp * dp);
    let same_layers = known.inputs.model.layers == on.model.layers;
    if !same_layers || !on.task().space().contains(&decisions) {
        return None;
    }
    let cache = CostCache::new(&on.model, &on.cluster, on.gpus);
    let configuration = Configuration::new(&cache, decisions).ok()?.in_own_times();
    let placed = placed_of(&cache, &known.stages);
    let priced = configuration.price(&placed, &mut Scratch::default());
    let decisions = configuration.decisions.clone();
    priced.fits.then(|| (on.clone(), Found { decisions, placed, priced }))
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

fn on(request: &Request, gpus: u64) -> Request {
    Request { gpus, ..request.clone() }
}

/// The fastest plan below `cutoff_s` with the degrees of the known one, or any that fits with them
/// where its part of the time is up before.
fn near(
    request: &Request,
    known: &Decisions,
    cutoff_s: f64,
    progress: Progress<'_>,
) -> Result<Outcome, Empty> {
    let restrictions = narrowed(&request.restrictions, known);
    let limited = request.with_share(NEAR);
    let task = Task { restrictions: &restrictions, cutoff_s, every_cut_work: 0, ..limited.task() };
    search(&task, progress).found().or_else(|why| match why {
        Empty::Proven => Err(why),
        Empty::Undecided if cutoff_s.is_finite() => Err(why),
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
    use crate::answer::report::Answer;
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

    fn planned(model: &str, gpus: u64) -> (Request, Plan) {
        let flags = Flags { model: model.to_owned(), gpus, ..Flags::default() };
        let request = Request::new(&flags).expect("it is shipped");
        let outcome = search(&request.task(), &mut |_| {});
        let known = Answer::new(&request, outcome).expect("it fits").plan;
        (request, known)
    }

    /// Nothing faster is found, and no more is proven of what the search leaves out.
    #[test]
    fn a_known_plan_has_the_same_gap_again() {
        let (request, known) = planned("gpt_1.7b", 48);
        let whole = replan(&request, &known, &mut |_| {}).expect("it is known").outcome;
        let found = known.proof;
        assert!((whole.proof.gap - found.gap).abs() < 1e-4, "{:?} {found:?}", whole.proof);
        assert!(found.gap > 0.0, "no test: {found:?}");
    }

    /// Those below the first plan's number, and then that number again.
    #[test]
    fn rounder_numbers_come_first() {
        let flags = Flags { model: "llama405b".to_owned(), gpus: 1000, ..Flags::default() };
        let request = Request::new(&flags).expect("it is shipped");
        assert_eq!(numbers_to_try(&request, Some(1000), &[]), [960, 896, 1000]);
        assert_eq!(numbers_to_try(&request, Some(512), &[1000, 960]), [960, 896, 1000]);
        let round = Request { gpus: 1024, ..request };
        assert_eq!(numbers_to_try(&round, Some(512), &[1024]), [1024]);
    }

    /// Whatever the time: a plan that is known is not lost, nor with a replica less.
    #[test]
    fn a_known_plan_is_where_it_begins() {
        let (mut request, known) = planned("gpt2_124m", 16);
        request.deadline = Some(Instant::now());
        let own = replan(&request, &known, &mut |_| {}).expect("it is known");
        assert_eq!(own.request.gpus, 16);
        assert_eq!(own.outcome.best.expect("it is known").decisions, known.decisions);
        let d = &known.decisions;
        assert!(d.dp > 1, "no test: {d:?}");
        let less = replan(&on(&request, 15), &known, &mut |_| {}).expect("replicas are left");
        assert!(less.request.gpus < 16 && less.outcome.proof.searched_gap > 0.0);
        let best = less.outcome.best.expect("replicas are left");
        assert_eq!([best.decisions.tp, best.decisions.pp], [d.tp, d.pp]);
        assert!(best.priced.fits);
    }

    /// Against searches of every larger number.
    #[test]
    fn larger_numbers_are_as_the_reason_says() {
        let flags = Flags { model: "llama8b".to_owned(), gpus: 16, ..Flags::default() };
        let request = Request::new(&flags).expect("it is shipped");
        let outcome = search(&request.task(), &mut |_| {});
        let known = Answer::new(&request, outcome).expect("it fits").plan;
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
