//! `plan` and `plan estimate`.

use crate::args::{EstimateArgs, PlanArgs};
use crate::failure::Failure;
use crate::output::{self, Progress};
use planner::explain::{self, Asker};
use planner::report::Answer;
use planner::report_text::{self, bytes, line};
use planner::request::Request;
use planner::search::{Task, search};
use planner::{explain_text, report};
use std::path::Path;

/// Finds the fastest plan that fits, prints it and writes it.
pub fn plan(args: &PlanArgs) -> Result<(), Failure> {
    let request = Request::new(&args.request.flags())?;
    let Some(mut answer) = answer(&request, &request.task()) else {
        return Err(nothing_fits(&request));
    };
    let binds = look_around(&request, &mut answer, args.top);
    if let Some(path) = &args.output {
        output::write(path, &answer.plan.to_yaml()?)?;
    }
    if args.request.json {
        return output::print_json(&answer.json());
    }
    let around = report_text::close(&answer) + &binds;
    let around = if around.is_empty() { around } else { format!("\n{around}") };
    let next = next(args.output.as_deref());
    output::print(&format!("{}{around}\n{next}", report_text::screen(&answer)))
}

/// Prices what is pinned, also where it does not fit.
pub fn estimate(args: &EstimateArgs) -> Result<(), Failure> {
    let request = Request::new(&args.request.flags())?;
    let endless = Task { ignore_memory: true, ..request.task() };
    let found = answer(&request, &request.task()).or_else(|| answer(&request, &endless));
    let answer = found.ok_or_else(|| {
        anyhow::anyhow!("the search found nothing in a space that is not empty")
    })?;
    if args.request.json {
        return output::print_json(&answer.json());
    }
    output::print(&report_text::screen(&answer))
}

fn answer(request: &Request, task: &Task<'_>) -> Option<Answer> {
    let mut progress = Progress::new();
    let outcome = search(task, &mut |settled, all| progress.show(settled, all));
    Answer::new(request, outcome)
}

/// Alternatives, and what more memory would allow.
fn look_around(request: &Request, answer: &mut Answer, top: usize) -> String {
    let mut progress = Progress::new();
    let mut show = |settled, all| progress.show(settled, all);
    let own_s = answer.plan.predicted.iteration_s;
    let mut asker = Asker::new(request, own_s, &mut show);
    answer.alternatives = asker.alternatives(&answer.plan.decisions, top);
    let (stage, ..) = report::fullest(&answer.plan);
    asker.more_memory().map_or_else(String::new, |(more, best)| {
        let gain = -100.0 * best.slower;
        let words = format!("{} more would save {gain:.1} %", bytes(more as u64));
        let shape = report_text::shape(&best.decisions);
        line("binds", &format!("memory on stage {stage}: {words} ({shape})"))
    })
}

fn nothing_fits(request: &Request) -> Failure {
    let mut progress = Progress::new();
    let found = explain::shortage(request, &mut |settled, all| progress.show(settled, all));
    Failure::Infeasible(explain_text::shortage(request, &found))
}

fn next(path: Option<&Path>) -> String {
    let Some(path) = path.map(Path::display) else {
        return line("next:", "the same with -o plan.yaml, to keep it");
    };
    format!("wrote {path}    next: plan explain {path} · plan check {path}\n")
}
