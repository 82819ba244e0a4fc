//! `plan explain`.

use crate::args::ExplainArgs;
use crate::checking::read_checked;
use crate::failure::Failure;
use crate::output::{self, Progress};
use models::plan::Plan;
use planner::answer::compare::{SECONDS_AND_BYTES, against_one_f_one_b};
use planner::answer::explain::{Asker, Explanation};
use planner::answer::explain_text;
use planner::answer::text;
use planner::request::Request;
use planner::request::flags::request_of;
use serde_json::json;

/// Prints why a plan is what it is.
pub fn run(args: &ExplainArgs) -> Result<(), Failure> {
    let plan = read_checked(&args.plan)?;
    let request = request_of(&plan, args.cluster.as_deref())?;
    let found = explanation(&request, &plan);
    let beside_1f1b = against_one_f_one_b(&request, &plan);
    if args.json {
        let beside = serde_json::to_value(&found)?;
        let answer = json!({"plan": plan, "explanation": beside, "against_1f1b": beside_1f1b});
        return output::print_json(&answer);
    }
    let schedule = beside_1f1b.map(|both| both.text(SECONDS_AND_BYTES));
    let schedule = schedule.map_or_else(String::new, |text| format!("\n{AGAINST}\n{text}"));
    output::print(&(text(&plan, &found) + &schedule))
}

const AGAINST: &str =
    "the schedule against 1f1b at the same degrees, micro-batch and state; passes alone\n";

fn explanation(request: &Request, plan: &Plan) -> Explanation {
    let mut progress = Progress::new();
    let mut show = |settled, all| progress.show(settled, all);
    Asker::new(request, plan.predicted.iteration_s, &mut show).explain(&plan.decisions)
}

fn text(plan: &Plan, found: &Explanation) -> String {
    [
        text::summary(plan),
        explain_text::grid(plan),
        explain_text::stages(plan),
        explain_text::spent(plan) + &explain_text::binds(plan, &found.bought),
        explain_text::explanation(plan, found),
    ]
    .join("\n")
}
