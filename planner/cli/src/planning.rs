//! `plan` and `plan estimate`.

use crate::args::{EstimateArgs, Order, PlanArgs, RequestArgs};
use crate::checking::read_checked;
use crate::failure::Failure;
use crate::limits::{deadline, seconds, stop_at_interrupt};
use crate::output::{self, Progress, Written};
use crate::patience::{Patience, patiently};
use codegen::escape::shell;
use models::cluster::shipped_names;
use models::decisions::Offload;
use models::input::InputError;
use models::model::warnings;
use models::plan::{Objective, Plan, Predicted};
use models::program::unsupported_decisions;
use models::text::shown;
use planner::answer::explain::Asker;
use planner::answer::explain_text;
use planner::answer::recheck::{as_priced_now, in_memory_of};
use planner::answer::replan::{Replanned, replan, replan_least_memory};
use planner::answer::report::{Answer, Idle, NotRunnable, TOOL};
use planner::answer::shortage;
use planner::answer::text::{self, bytes, line};
use planner::answer::unsearched::{faster_with, rounder};
use planner::order::choice::{self, How, Kept};
use planner::request::Request;
use planner::request::Task;
use planner::request::conflicts;
use planner::request::flags::{request_from, request_on};
use planner::request::restrictions::{Choice, Restrictions};
use planner::request::task::PROVING_WORK;
use planner::search::{Effort, Empty, search};
use planner::until::Until;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Default of `--time-limit`, s.
const ANSWER_S: f64 = 1.0;
/// The same with `--from`, s.
const AGAIN_S: f64 = 0.2;
/// How much slower a plan made from another may be than the other's time shared among the GPUs,
/// before it is searched on.
const SLOWER: f64 = 1.1;
/// The same where every decision is set, so that only layers and recomputation are open, s. Where
/// the price is not known to be within [`CLOSE`] of the best placement by then, it is sought again,
/// for [`SINGLE_AGAIN_S`].
const SINGLE_S: f64 = 0.05;
const SINGLE_AGAIN_S: f64 = 0.45;
const CLOSE: f64 = 0.005;
/// Default of `--time-limit` for `--order ilp`, s.
const ORDER_S: f64 = 60.0;

/// Share of the time for the plan itself where alternatives are asked for. The plan's search prices
/// most of them on its way, and that of README's request takes 0.7 to 0.9 s.
const BEFORE_ALTERNATIVES: f64 = 0.7;
/// The same where fewer GPUs are tried beside it.
const BEFORE_FEWER: f64 = 0.7;
/// The same where it is compared with what our trainer cannot run.
const BESIDE_ALL: f64 = 0.5;
/// Share of the time left for a configuration that fits; the rest is for what does not.
const FITTING: f64 = 0.5;
/// The same of a single configuration, of which it is mostly known soon whether it fits.
const SINGLE_FITTING: f64 = 0.8;
/// Share of the time for a single alternative.
const SINGLE: f64 = 0.1;

/// Finds the fastest plan that fits, prints it and writes it.
pub fn plan(args: &PlanArgs) -> Result<(), Failure> {
    let known = args.request.from.as_deref().map(read_checked).transpose()?;
    let mut request = requested(&args.request, known.as_ref())?;
    request.objective = args.objective.map_or(request.objective, Objective::from);
    let by_time = request.objective == Objective::Time;
    refuse_top(args, request.objective)?;
    let default_s = if known.is_some() { AGAIN_S } else { ANSWER_S };
    request.deadline = deadline(args.limit, default_s)?;
    args.output.as_deref().map_or(Ok(()), |path| output::may_write(path, Written::Plan))?;
    if args.limit.prove {
        request.every_cut_work = PROVING_WORK;
    }
    stop_at_interrupt(&request)?;
    // What comes after the plan needs time, too.
    let share = match by_time {
        true if request.runnable => BESIDE_ALL,
        true if args.top > 0 => BEFORE_ALTERNATIVES,
        true if known.is_none() && !rounder(request.gpus).is_empty() => BEFORE_FEWER,
        _ => 1.0,
    };
    let patience = Patience { answer_s: default_s, share, is_default: args.limit.is_default() };
    let found = patiently(&mut request, patience, |request| match &known {
        Some(plan) => again(request, plan),
        None => best(request),
    });
    let found = match &known {
        Some(plan) if by_time && args.limit.is_default() => longer(&mut request, plan, found),
        _ => found,
    };
    let mut answer = match found {
        Ok(answer) => answer,
        Err(why) => {
            // With --from, whether the GPUs can be split was not checked before.
            if why == Empty::Proven {
                conflicts::check(&request)?;
            }
            return Err(nothing_fits(&request, why, args.request.json)?);
        }
    };
    request.gpus = answer.plan.inputs.gpus;
    refuse_impossible(&answer)?;
    answer = with_alternatives(&request, answer, args);
    let compared = request.runnable && by_time;
    if compared {
        (answer.not_runnable, answer.not_runnable_gap) = not_runnable(&request, &answer);
    }
    if by_time {
        let mut progress = Progress::new();
        answer.faster_with =
            faster_with(&request, &answer, &mut |standing| progress.show(standing));
    }
    let (answer, order) = reordered(&request, answer, args)?;
    if let Some(path) = &args.output {
        output::write(path, Written::Plan, &answer.plan.to_yaml()?)?;
    }
    if args.request.json {
        output::print_json(&answer.json())?;
        return complete(&request);
    }
    let mut around = order + &text::close(&answer, args.top);
    if compared {
        around += &text::runnable(&answer);
    }
    around += &text::least_memory(&answer);
    around += &text::faster_with(&answer);
    if args.top > 0 {
        around += &binds(&request, &answer);
    }
    around += &text::idle(&answer);
    let around = if around.is_empty() { around } else { format!("\n{around}") };
    let next = next(args.output.as_deref(), args.request.cluster.as_deref());
    output::print(&format!("{}{around}\n{next}", text::screen(&answer)))?;
    complete(&request)
}

/// Refuses alternatives to a plan of least memory.
fn refuse_top(args: &PlanArgs, objective: Objective) -> Result<(), InputError> {
    if args.top == 0 || objective == Objective::Time {
        return Ok(());
    }
    let message = format!("--top {} lists alternatives by time, not by memory", args.top);
    Err(InputError::new(message).help(
        "leave it out, or plan by time with --objective time; `plan explain PLAN` shows what else \
         fits into the memory of a plan",
    ))
}

fn is_stopped(request: &Request) -> bool {
    request.stop.load(Ordering::Relaxed)
}

/// Fails if the user interrupted the search, after its best answer was printed.
pub fn complete(request: &Request) -> Result<(), Failure> {
    if is_stopped(request) {
        let text =
            "this is the best that was known; how far from the best it may be is in its proof";
        return Err(Failure::Interrupted(text));
    }
    Ok(())
}

/// Reads the request, or takes it from a plan, and prints the warnings about its files.
fn requested(args: &RequestArgs, known: Option<&Plan>) -> Result<Request, InputError> {
    if let Some(plan) = known {
        let own = request_on(plan, args.cluster.as_deref())?;
        // On a cluster of another name other figures are no wonder.
        let own = own.filter(|own| own.cluster.name == plan.inputs.cluster.name);
        let path = args.from.as_ref().map_or_else(String::new, |path| path.display().to_string());
        // A plan that does not fit here may still be begun from.
        let priced = own.and_then(|own| as_priced_now(&own, plan.clone(), &path).ok());
        if let Some((_, Some(note))) = priced {
            eprintln!("note: {}", shown(&note));
        }
        let found = request_from(plan, args.cluster.as_deref(), args.gpus, &args.settings)?;
        output::warn_of_cluster(args.cluster.as_deref());
        return Ok(found);
    }
    let request = Request::new(&args.flags())?;
    output::warn_of_cluster(args.cluster.as_deref());
    let warnings = request.file.as_ref().map(|file| warnings(file, &request.model));
    for warning in warnings.unwrap_or_default() {
        eprintln!("warning: {}", shown(&warning));
    }
    Ok(request)
}

/// Refuses an impossible prediction: the figures of the cluster file contradict each other.
fn refuse_impossible(answer: &Answer) -> Result<(), InputError> {
    let Predicted { iteration_s, mfu, .. } = answer.plan.predicted;
    if iteration_s.is_finite() && iteration_s > 0.0 && (0.0..=1.0).contains(&mfu) {
        return Ok(());
    }
    let cluster = &answer.plan.inputs.cluster.name;
    let message = format!(
        "by the figures of cluster `{cluster}` a step takes {iteration_s:e} s, {:.4e} % of its peak",
        100.0 * mfu
    );
    Err(InputError::new(message)
        .help("correct `peak_flops`, the slowdowns and `efficiency` in its file"))
}

/// The answer with an optimized order of passes, if `--order` asks for one and a faster one exists;
/// and a line on the result.
fn reordered(
    request: &Request,
    answer: Answer,
    args: &PlanArgs,
) -> Result<(Answer, String), Failure> {
    let Some(order) = args.order else { return Ok((answer, String::new())) };
    let decisions = answer.plan.decisions.clone();
    let seconds = (!args.limit.prove).then(|| args.limit.time_limit.unwrap_or(ORDER_S));
    let (how, by) = match order {
        Order::Ilp => (How::Program(seconds.map(Duration::from_secs_f64)), "an integer program's"),
        Order::Auto => (How::Greedy, "zb_auto's for these times"),
    };
    let named = decisions.schedule;
    let proof = |proven: bool, gap: f64| match proven {
        true => "by mean times none is shorter".to_owned(),
        false => format!("by mean times another may be up to {:.2} % shorter", 100.0 * gap),
    };
    let alike = in_memory_of(request, &answer.plan);
    Ok(match choice::shorter(&alike.task(), decisions, &answer.placed, how) {
        Ok(found) => {
            let saved = 1.0 - found.found.priced.iteration_s / answer.plan.predicted.iteration_s;
            let proof = proof(found.proven, found.gap);
            let text = format!("{by}, {:.2} % faster than {named}; {proof}", 100.0 * saved);
            (answer.in_order(request, found), line("order", &text))
        }
        Err(Kept::Unknown(why)) => (answer, line("order", &format!("unchanged, {named}: {why}"))),
        Err(Kept::Shortest { proven, gap }) => {
            let text =
                format!("unchanged, {named}: no faster one was found; {}", proof(proven, gap));
            (answer, line("order", &text))
        }
    })
}

/// The best plan on the request's GPUs or fewer, beginning from a plan that is known.
fn again(request: &Request, known: &Plan) -> Result<Answer, Empty> {
    let mut progress = Progress::new();
    let mut show = |standing| progress.show(standing);
    let all = request.gpus;
    let Replanned { request, outcome, why, least_bytes } = match request.objective {
        Objective::Time => replan(request, known, &mut show)?,
        Objective::Memory => replan_least_memory(request, &mut show)?,
    };
    let least_memory_bytes = least_bytes.map(|bytes| bytes as u64);
    let answer = Answer::new(&request, outcome).ok_or(Empty::Undecided)?;
    let idle = all - request.gpus;
    let idle = (idle > 0).then_some(Idle { gpus: idle, why });
    Ok(Answer { least_memory_bytes, idle, ..answer })
}

/// Searches on for the rest of the default second where what was found is much slower than a known
/// plan whose time were shared among the GPUs: its degrees do not suit their number.
fn longer(
    request: &mut Request,
    known: &Plan,
    found: Result<Answer, Empty>,
) -> Result<Answer, Empty> {
    let share = known.inputs.gpus as f64 / request.gpus as f64;
    let expected_s = known.predicted.iteration_s * share.max(1.0);
    let is_good = |answer: &Answer| answer.plan.predicted.iteration_s <= SLOWER * expected_s;
    if is_stopped(request) || found.as_ref().is_ok_and(is_good) {
        return found;
    }
    request.deadline = Some(Instant::now() + Duration::from_secs_f64(ANSWER_S - AGAIN_S));
    let Ok(other) = again(request, known) else { return found };
    let is_slower =
        |answer: &Answer| answer.plan.predicted.iteration_s < other.plan.predicted.iteration_s;
    if found.as_ref().is_ok_and(is_slower) { found } else { Ok(other) }
}

fn best(request: &Request) -> Result<Answer, Empty> {
    if request.objective == Objective::Time {
        return fastest(request);
    }
    let mut progress = Progress::new();
    let found = shortage::least_memory(request, &mut |standing| progress.show(standing));
    let (outcome, least_bytes) = found?;
    let answer = Answer::new(request, outcome).ok_or(Empty::Undecided)?;
    Ok(Answer { least_memory_bytes: Some(least_bytes as u64), ..answer })
}

/// The fastest plan. If the host's memory does not hold what it offloads, the fastest without
/// offloading.
fn fastest(request: &Request) -> Result<Answer, Empty> {
    let found = answer(request, &request.task())?;
    if found.feasible {
        return Ok(found);
    }
    if !request.restrictions.offload.allows(Offload::None) {
        return Err(Empty::Proven);
    }
    let offload = Choice::of(&[Offload::None]);
    let kept = Restrictions { offload, ..request.restrictions.clone() };
    answer(request, &Task { restrictions: &kept, ..request.task() })
}

/// Prices the pinned configuration, even if it does not fit. One that fits without the headroom is
/// feasible, with a warning.
pub fn estimate(args: &EstimateArgs) -> Result<(), Failure> {
    let known = args.request.from.as_deref().map(read_checked).transpose()?;
    let mut request = requested(&args.request, known.as_ref())?;
    if known.is_some() {
        conflicts::check(&request)?;
    }
    let single = request.task().space().is_single();
    request.deadline = deadline(args.limit, if single { SINGLE_S } else { ANSWER_S })?;
    stop_at_interrupt(&request)?;
    let share = if single { SINGLE_FITTING } else { FITTING };
    let mut found = priced(&request, share);
    let is_close = |answer: &Answer| answer.proof.searched_gap <= CLOSE;
    let may_go_on = single && args.limit.is_default() && !is_stopped(&request);
    if may_go_on && !found.as_ref().is_some_and(is_close) {
        request.deadline = Some(Instant::now() + Duration::from_secs_f64(SINGLE_AGAIN_S));
        let again = priced(&request, share);
        let slower =
            |a: &Answer, b: &Answer| a.plan.predicted.iteration_s > b.plan.predicted.iteration_s;
        if !again.as_ref().zip(found.as_ref()).is_some_and(|(again, first)| slower(again, first)) {
            found = again.or(found);
        }
    }
    let Some(answer) = found else {
        complete_nothing(&request)?;
        return Err(anyhow::anyhow!("the search found nothing in a space that is not empty").into());
    };
    refuse_impossible(&answer)?;
    if args.request.json {
        output::print_json(&answer.json())?;
    } else {
        output::print(&text::screen(&answer))?;
    }
    complete(&request)
}

/// The best answer that fits, else the best one without the headroom, else the best one whatever
/// memory it takes. Each gets a share of the time left.
fn priced(request: &Request, share: f64) -> Option<Answer> {
    let without_headroom = request.without_headroom();
    let unlimited = Task { ignore_memory: true, ..without_headroom.task() };
    let whole = || surely(&without_headroom, &without_headroom.task(), share);
    surely(request, &request.task(), share)
        .or_else(|| if request.headroom > 0.0 { whole() } else { None })
        .or_else(|| surely(&without_headroom, &unlimited, share))
}

/// The best answer in a share of the time left. Where that is too little to tell whether there is
/// one, any answer, however long it takes: whether something fits must not depend on the time.
fn surely(request: &Request, task: &Task<'_>, share: f64) -> Option<Answer> {
    let limited = Task { until: task.until.share(share), ..task.clone() };
    answer(request, &limited)
        .or_else(|why| {
            let until = Until { deadline: None, ..task.until };
            let any = Task { any: true, until, ..task.clone() };
            if why != Empty::Undecided {
                return Err(why);
            }
            // What is not proven of it, the time did not suffice for.
            let found = answer(request, &any)?;
            Ok(Answer { effort: Effort { limited: true, ..found.effort }, ..found })
        })
        .ok()
}

fn complete_nothing(request: &Request) -> Result<(), Failure> {
    match is_stopped(request) {
        true => Err(Failure::Interrupted("nothing that fits was known yet")),
        false => Ok(()),
    }
}

fn answer(request: &Request, task: &Task<'_>) -> Result<Answer, Empty> {
    let mut progress = Progress::new();
    let outcome = search(task, &mut |standing| progress.show(standing)).found()?;
    Answer::new(request, outcome).ok_or(Empty::Proven)
}

/// The answer with alternatives that are nearly as fast.
fn with_alternatives(request: &Request, mut answer: Answer, args: &PlanArgs) -> Answer {
    let mut progress = Progress::new();
    let mut show = |standing| progress.show(standing);
    let passed = std::mem::take(&mut answer.passed);
    let mut asker = Asker::new(request, times_s(&answer), each(args), &mut show, passed);
    let (alternatives, all_alternatives) = asker.alternatives(&answer.plan.decisions, args.top);
    Answer { alternatives, all_alternatives, ..answer }.or_faster(request)
}

/// What the plan takes, and what nothing that was searched takes less than, s.
fn times_s(answer: &Answer) -> (f64, f64) {
    let own_s = answer.plan.predicted.iteration_s;
    (own_s, own_s * (1.0 - answer.proof.searched_gap))
}

/// The time for a single alternative.
fn each(args: &PlanArgs) -> Option<Duration> {
    let limit_s = seconds(args.limit, ANSWER_S).ok().flatten();
    limit_s.map(|limit_s| Duration::from_secs_f64(SINGLE * limit_s))
}

/// What more memory per GPU would save.
fn binds(request: &Request, answer: &Answer) -> String {
    let mut progress = Progress::new();
    let mut show = |standing| progress.show(standing);
    if request.task().is_stopped() {
        return String::new();
    }
    let mut asker = Asker::new(request, times_s(answer), None, &mut show, vec![]);
    let more = asker.more_memory();
    more.map_or_else(String::new, |(more, best)| {
        let gain = -100.0 * best.slower;
        let shape = text::shape(&best.decisions);
        let size = bytes(more as u64);
        let way = format!("{shape} · micro-batch {}", best.decisions.micro_batch);
        line("limit", &format!("memory: {size} more per GPU would save {gain:.2} % ({way})"))
    })
}

/// The fastest plan without `--runnable`, if it is faster; and the share of its time, or of the
/// answer's, that another may save beyond it.
fn not_runnable(request: &Request, answer: &Answer) -> (Option<NotRunnable>, f64) {
    let mut progress = Progress::new();
    let own_s = answer.plan.predicted.iteration_s;
    let all = Restrictions { runnable: false, ..request.restrictions.clone() };
    let task = Task { restrictions: &all, cutoff_s: own_s, every_cut_work: 0, ..request.task() };
    let outcome = search(&task, &mut |standing| progress.show(standing));
    let gap = outcome.proof.searched_gap;
    let Some(found) = outcome.best else { return (None, gap) };
    let reasons = unsupported_decisions(&request.model, &found.decisions);
    let iteration_s = found.priced.iteration_s;
    // The search may also end with the answer itself, or another plan as fast.
    let faster = (!reasons.is_empty()).then(|| NotRunnable {
        costs: own_s / iteration_s - 1.0,
        iteration_s,
        reasons: reasons.iter().map(ToString::to_string).collect(),
        decisions: found.decisions,
    });
    (faster, gap)
}

/// Why there is no plan. With `--json` its facts go to standard output, too.
fn nothing_fits(request: &Request, why: Empty, json: bool) -> Result<Failure, Failure> {
    complete_nothing(request)?;
    if why == Empty::Undecided {
        if json {
            output::print_json(&without_plan(request, UNDECIDED, &Value::Null))?;
        }
        return Ok(Failure::Undecided(
            "error: no plan was found in the time, nor that there is none\n\
             help     give it more with --time-limit, or --prove to go on to an answer\n",
        ));
    }
    let mut progress = Progress::new();
    let found = shortage::shortage(request, &mut |standing| progress.show(standing));
    if json {
        let shortage = explain_text::shortage_json(request, &found);
        output::print_json(&without_plan(request, INFEASIBLE, &shortage))?;
    }
    Ok(Failure::Infeasible(explain_text::shortage(request, &found)))
}

/// `error` of the JSON where nothing fits: exit code 3.
const INFEASIBLE: &str = "nothing fits";
/// The same where the time was too little to tell: exit code 4.
const UNDECIDED: &str = "no plan was found in the time, nor that there is none";

/// The request of an answer without a plan, by the names that answers have.
fn without_plan(request: &Request, error: &str, shortage: &Value) -> Value {
    let Request { model, cluster, gpus, headroom, tokens, .. } = request;
    json!({
        "model": model.name,
        "cluster": cluster.name,
        "gpus": gpus,
        "global_batch": model.global_batch,
        "seq_len": model.seq_len,
        "tokens": tokens,
        "headroom": headroom,
        "assumptions": model.assumptions,
        "feasible": (error == INFEASIBLE).then_some(false),
        "error": error,
        "shortage": shortage,
        "tool": TOOL,
    })
}

/// Which command to run next, quoted for a shell.
fn next(path: Option<&Path>, cluster: Option<&str>) -> String {
    let Some(path) = path.map(Path::display) else {
        return line("next", "add -o plan.yaml to keep this plan");
    };
    let path = shell(&path.to_string());
    // A plan holds only the name of its cluster, which is enough for shipped ones.
    let own = cluster.filter(|name| !shipped_names().any(|shipped| shipped == *name));
    let cluster = own.map_or_else(String::new, |own| format!(" --cluster {}", shell(own)));
    format!("wrote {path}    next: plan explain {path}{cluster} · plan check {path}{cluster}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::Parser;
    use std::time::Instant;

    #[test]
    fn a_plan_is_found_where_half_the_default_time_was_too_little() {
        let words = ["plan", "--model", "llama8b", "--gpus", "8"];
        let args = Cli::parse_from(words).plan;
        let mut request = Request::new(&args.request.flags()).expect("both are shipped");
        request.deadline = Some(Instant::now());
        assert_eq!(best(&request).err(), Some(Empty::Undecided));
        let is_default = args.limit.is_default();
        let patience = Patience { answer_s: ANSWER_S, share: BESIDE_ALL, is_default };
        let found = patiently(&mut request, patience, best);
        assert!(found.is_ok_and(|answer| answer.feasible));
        assert!(request.deadline > Some(Instant::now()), "what follows has time, too");
    }

    /// A search ends before the time is up, to have some left for what follows. That is no proof.
    #[test]
    fn what_the_time_did_not_show_is_not_said_to_fit_nowhere() {
        let words = ["plan", "--model", "gpt_1t", "--gpus", "46", "--cluster", "gb300_nvl72"];
        let mut request = Request::new(&Cli::parse_from(words).plan.request.flags()).unwrap();
        let known = {
            let words = ["plan", "--model", "llama8b", "--gpus", "8"];
            let request = Request::new(&Cli::parse_from(words).plan.request.flags()).unwrap();
            best(&request).unwrap().plan
        };
        for objective in [Objective::Time, Objective::Memory] {
            request.objective = objective;
            for time_s in [0.002, 0.02] {
                request.deadline = Some(Instant::now() + Duration::from_secs_f64(time_s));
                assert_eq!(best(&request).err(), Some(Empty::Undecided), "{objective:?}");
                request.deadline = Some(Instant::now() + Duration::from_secs_f64(time_s));
                assert_eq!(again(&request, &known).err(), Some(Empty::Undecided), "{objective:?}");
            }
        }
    }
}
