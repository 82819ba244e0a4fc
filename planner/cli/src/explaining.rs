//! `plan explain`.

use crate::args::ExplainArgs;
use crate::checking::read_checked;
use crate::failure::Failure;
use crate::limits::seconds;
use crate::output::{self, Progress};
use models::plan::{Objective, Plan};
use models::text::shown;
use planner::answer::compare::{SECONDS_AND_BYTES, against_one_f_one_b};
use planner::answer::explain::{Asker, Explanation, Part, Tried};
use planner::answer::explain_text;
use planner::answer::recheck::{as_priced_now, in_memory_of};
use planner::answer::text;
use planner::request::Request;
use planner::request::flags::request_of;
use serde_json::json;
use std::cell::RefCell;
use std::time::Duration;

/// Default of `--time-limit` for each alternative, s.
const EACH_S: f64 = 0.4;

/// Prints why a plan is what it is: what the plan itself tells at once, then each alternative as
/// soon as it was searched.
pub fn run(args: &ExplainArgs) -> Result<(), Failure> {
    let plan = read_checked(&args.plan)?;
    let request = request_of(&plan, args.cluster.as_deref())?;
    output::warn_of_cluster(args.cluster.as_deref());
    let (plan, note) = as_priced_now(&request, plan, &args.plan.display().to_string())?;
    if let Some(note) = note {
        eprintln!("note: {}", shown(&note));
    }
    let request = in_memory_of(&request, &plan);
    // Alternatives are searched one by one, each with a limit of its own.
    let each = seconds(args.limit, EACH_S)?.map(Duration::from_secs_f64);
    if args.json {
        let found = explanation(&request, &plan, each, &mut |_, _| Ok(()))?;
        let beside = serde_json::to_value(&found)?;
        let beside_1f1b = against_one_f_one_b(&request, &plan);
        let answer = json!({"plan": plan, "explanation": beside, "against_1f1b": beside_1f1b});
        return output::print_json(&answer);
    }
    let known = [text::summary(&plan), explain_text::grid(&plan), explain_text::stages(&plan)];
    output::print(&(known.join("\n") + "\n" + &explain_text::spent(&plan)))?;
    if plan.inputs.objective == Objective::Memory {
        let needs = text::bytes(plan.predicted.peak_memory_bytes);
        output::print(&format!(
            "\nthis plan needs the least memory: what is considered may use no more than its {needs}\n"
        ))?;
    }
    let (mut shown, mut bought) = (None, Vec::new());
    let mut faster: Option<Tried> = None;
    explanation(&request, &plan, each, &mut |part, tried| {
        let mut lines = String::new();
        if shown.replace(part) != Some(part) {
            if part == Part::Plain {
                lines += &explain_text::binds(&plan, &bought);
            }
            lines += &format!("\n{}", explain_text::heading(part, &tried.what, each));
        }
        match part {
            Part::Bought => bought.push(tried.clone()),
            _ if tried.slower() < faster.as_ref().map_or(-ROUNDED, Tried::slower) => {
                faster = Some(tried.clone());
            }
            _ => {}
        }
        output::print(&(lines + &explain_text::tried(&plan, part, tried)))
    })?;
    if let Some(faster) = &faster {
        output::print(&format!("\n{}", explain_text::faster(faster)))?;
    }
    let schedule = against_one_f_one_b(&request, &plan)
        .map(|both| both.text(SECONDS_AND_BYTES, output::columns()));
    schedule.map_or(Ok(()), |text| output::print(&format!("\n{AGAINST}\n{text}")))
}

/// Share of the time by which plan.yaml's rounded figures may be off.
const ROUNDED: f64 = 1e-6;

const AGAINST: &str =
    "the schedule against 1f1b at the same degrees, micro-batch and state; passes alone\n";

/// Prints an alternative.
type Print<'a> = &'a mut dyn FnMut(Part, &Tried) -> Result<(), Failure>;

fn explanation(
    request: &Request,
    plan: &Plan,
    each: Option<Duration>,
    print: Print<'_>,
) -> Result<Explanation, Failure> {
    let progress = RefCell::new(Progress::new());
    let mut failure = None;
    let mut show = |standing| progress.borrow_mut().show(standing);
    let own_s = plan.predicted.iteration_s;
    let least_s = own_s * (1.0 - plan.proof.searched_gap);
    let mut asker = Asker::new(request, (own_s, least_s), each, &mut show, vec![]);
    let found = asker.explain(&plan.decisions, &mut |part, tried| {
        // The progress line makes room for the alternative.
        progress.borrow_mut().clear();
        if failure.is_none() {
            failure = print(part, tried).err();
        }
    });
    failure.map_or(Ok(found), Err)
}
