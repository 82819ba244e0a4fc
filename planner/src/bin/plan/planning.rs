//! `plan` and `plan estimate`.

use crate::args::{EstimateArgs, PlanArgs};
use crate::failure::Failure;
use crate::output::{self, Progress};
use planner::report::Answer;
use planner::report_text;
use planner::request::Request;
use planner::search::{Task, search};
use std::path::Path;

/// Finds the fastest plan that fits, prints it and writes it.
pub fn plan(args: &PlanArgs) -> Result<(), Failure> {
    let request = Request::new(&args.request.flags())?;
    let Some(answer) = answer(&request, &request.task()) else {
        return Err(Failure::Infeasible("nothing fits\n".to_owned()));
    };
    if let Some(path) = &args.output {
        output::write(path, &answer.plan.to_yaml()?)?;
    }
    if args.request.json {
        return output::print_json(&answer.json());
    }
    output::print(&(report_text::screen(&answer) + "\n" + &next(args.output.as_deref())))
}

/// Prices what is pinned, also where it does not fit.
pub fn estimate(args: &EstimateArgs) -> Result<(), Failure> {
    let request = Request::new(&args.request.flags())?;
    let endless = Task { ignore_memory: true, ..request.task() };
    let found = answer(&request, &request.task()).or_else(|| answer(&request, &endless));
    let answer = found
        .ok_or_else(|| anyhow::anyhow!("the search found nothing in a space that is not empty"))?;
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

fn next(path: Option<&Path>) -> String {
    let Some(path) = path.map(Path::display) else {
        return report_text::line("next:", "the same with -o plan.yaml, to keep it");
    };
    format!("wrote {path}    next: plan explain {path} · plan check {path}\n")
}
