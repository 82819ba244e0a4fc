//! `plan check` and `plan diff`: commands on existing plans.

use crate::args::{CheckArgs, DiffArgs, LimitArgs};
use crate::failure::Failure;
use crate::limits::{deadline, stop_at_interrupt};
use crate::output::{self, Progress};
use models::check::{Violation, check};
use models::input::{InputError, Source};
use models::plan::Plan;
use models::program::{Unsupported, unsupported};
use planner::answer::changes::{Change, changes};
use planner::answer::contradictions;
use planner::answer::recheck::{Checked, NOT_VERIFIED, Prices, checked};
use planner::answer::report::TOOL;
use planner::answer::text::{bytes, line, seconds};
use planner::answer::verify::{Verdict, verify};
use planner::request::flags::request_of;
use serde_json::{Value, json};
use std::path::Path;

/// Reads a plan.
pub fn read(path: &Path) -> Result<Plan, InputError> {
    Plan::read(&Source::open(path)?)
}

/// Reads a plan and refuses one that `plan check` would refuse.
pub fn read_checked(path: &Path) -> Result<Plan, Failure> {
    let plan = read(path)?;
    match check(&plan).first() {
        None => Ok(plan),
        Some(first) => {
            let error = InputError::new(format!("{} does not work out: {first}", path.display()));
            Err(error.help(format!("plan check {} lists everything", path.display())).into())
        }
    }
}

/// Checks a plan; exit code 2 if anything is wrong with it.
pub fn run(args: &CheckArgs) -> Result<(), Failure> {
    let plan = read(&args.plan)?;
    let mut found = checked(&plan, args.cluster.as_deref())?;
    if args.runnable {
        found.violations.extend(not_runnable(&plan));
    }
    let proof = match args.proof && found.violations.is_empty() {
        true => Some(verified(&plan, args)?),
        false => None,
    };
    if let Some(Verdict::Wrong(violation) | Verdict::WithinOwnMemory(violation)) = &proof {
        found.violations.push(violation.clone());
    }
    let notes = match found.violations.is_empty() {
        true => {
            let request = request_of(&plan, args.cluster.as_deref()).ok();
            contradictions::notes(&plan, request.as_ref(), TOOL)
        }
        false => unstated_objective(&plan, proof.as_ref()).into_iter().collect(),
    };
    if args.json {
        output::print_json(&as_json(&found, proof.as_ref(), &notes))?;
    } else {
        let notes: String = notes.iter().map(|note| format!("note: {note}\n")).collect();
        output::print(&(as_text(args, &plan, &found, proof.as_ref()) + &notes))?;
    }
    match (found.violations.is_empty(), proof) {
        (false, _) => Err(Failure::Refused),
        (true, Some(Verdict::Open { .. } | Verdict::Stopped { .. })) => {
            Err(Failure::Undecided("error: the proof was not verified\n"))
        }
        (true, _) if found.prices == Prices::NoCluster => Err(Failure::Refused),
        (true, _) => Ok(()),
    }
}

/// The note on a plan that seems to be one of least memory, but does not say so.
fn unstated_objective(plan: &Plan, proof: Option<&Verdict>) -> Option<String> {
    let Some(Verdict::WithinOwnMemory(_)) = proof else { return None };
    let needs = bytes(plan.predicted.peak_memory_bytes);
    Some(format!(
        "in no more than its {needs} nothing is faster, so it may be a plan of least memory. Older \
         versions did not write that down: if it is one, add `objective: memory` to its `inputs`, \
         or make it again with --objective memory"
    ))
}

/// Searches for what the plan's proof says does not exist.
fn verified(plan: &Plan, args: &CheckArgs) -> Result<Verdict, Failure> {
    let mut request = request_of(plan, args.cluster.as_deref())?;
    let limit = LimitArgs { time_limit: args.time_limit, prove: args.time_limit.is_none() };
    request.deadline = deadline(limit, 0.0)?;
    stop_at_interrupt(&request)?;
    let mut progress = Progress::new();
    Ok(verify(&request, plan, &mut |standing| progress.show(standing)))
}

/// What our trainer cannot run of a plan.
fn not_runnable(plan: &Plan) -> Vec<Violation> {
    let refused = unsupported(&plan.inputs.model, &plan.decisions).into_iter();
    refused
        .map(|Unsupported { decision, value, valid }| {
            let field = match decision.strip_prefix("model") {
                Some(rest) => format!("inputs.model{rest}"),
                None => format!("decisions.{decision}"),
            };
            Violation { field, found: value, valid: format!("{valid}, for the trainer") }
        })
        .collect()
}

fn as_json(found: &Checked, proof: Option<&Verdict>, notes: &[String]) -> Value {
    let moved =
        |change: &Change| json!({"field": change.field, "found": change.a, "now": change.b});
    let again = match &found.prices {
        Prices::Again(now, _) => json!({
            "iteration_s": now.plan.predicted.iteration_s,
            "peak_memory_bytes": now.plan.predicted.peak_memory_bytes,
            "agrees": found.prices.moved().is_empty(),
        }),
        _ => Value::Null,
    };
    json!({
        "valid": found.violations.is_empty(),
        "violations": found.violations,
        "priced_again": again,
        "moved": found.prices.moved().iter().map(moved).collect::<Vec<_>>(),
        "other_version": found.other_version,
        "proof": proof.map(proof_json),
        "not_verified": match proof {
            Some(Verdict::Holds { .. }) => vec![],
            _ => NOT_VERIFIED.map(|(part, _)| part).to_vec(),
        },
        "notes": notes,
    })
}

/// What nothing takes less than, s, and whether that is what the proof says.
fn proof_json(verdict: &Verdict) -> Value {
    let (holds, least_s, least_all_s) = match verdict {
        Verdict::Holds { iteration_s, all_s } => (true, Some(iteration_s), Some(all_s)),
        Verdict::Stopped { iteration_s } => (false, Some(iteration_s), None),
        Verdict::Open { iteration_s, all_s } => (false, Some(iteration_s), Some(all_s)),
        Verdict::Wrong(_) | Verdict::WithinOwnMemory(_) => (false, None, None),
    };
    json!({"holds": holds, "least_s": least_s, "least_over_all_cuts_s": least_all_s})
}

fn as_text(args: &CheckArgs, plan: &Plan, found: &Checked, proof: Option<&Verdict>) -> String {
    let (path, runnable) = (args.plan.display(), args.runnable);
    if !found.violations.is_empty() {
        let lines = found.violations.iter().map(|violation| format!("  {violation}\n"));
        let help = match found.prices {
            Prices::OtherCluster(_) => {
                "was the plan made for a cluster file of its own? give that with --cluster FILE\n"
            }
            Prices::Again(_, ref moved) if !moved.is_empty() && found.other_version.is_none() => {
                "was it edited, or made for another cluster of this name? give that with --cluster FILE\n"
            }
            _ => "",
        };
        return format!("{path} does not work out:\n{}{help}", lines.collect::<String>());
    }
    let runs = if runnable { "the trainer can run it\n" } else { "" };
    format!("{path} works out: {}\n{runs}", priced_words(plan, found)) + &proof_words(proof)
}

/// The verdict on a valid plan, by how far its prices could be checked.
fn priced_words(plan: &Plan, found: &Checked) -> String {
    let version = found.other_version.as_deref().unwrap_or_default();
    match (&found.prices, found.prices.moved()) {
        (Prices::NoCluster, _) => {
            let name = &plan.inputs.cluster.name;
            format!(
                "split, stages and schedule\nnot priced again: no cluster `{name}` is shipped; give the plan's own with --cluster FILE"
            )
        }
        (_, []) => "split, stages, schedule; priced again, every figure is the same".to_owned(),
        (_, moved) => {
            let lines =
                moved.iter().map(|Change { field, a, b }| format!("\n  {field}: {a}, here {b}"));
            let lines: String = lines.collect();
            format!(
                "split, stages and schedule\n{version} wrote it, with other figures than {TOOL}:{lines}"
            )
        }
    }
}

fn proof_words(proof: Option<&Verdict>) -> String {
    match proof {
        None => {
            let parts = NOT_VERIFIED.map(|(part, why)| format!("{part} ({why})"));
            format!("not verified: {}\n", parts.join(", "))
        }
        Some(Verdict::Holds { iteration_s, all_s }) => format!(
            "proof verified: nothing over the cuts tried takes less than {}, nor over all cuts less than {}\n",
            seconds(*iteration_s),
            seconds(*all_s)
        ),
        Some(Verdict::Stopped { iteration_s }) => format!(
            "not verified in the time: proof; so far, nothing over the cuts tried takes less than {}\n",
            seconds(*iteration_s)
        ),
        Some(Verdict::Open { iteration_s, all_s }) => format!(
            "not verified: proof.gap; nothing over the cuts tried takes less than {}, but over all cuts nothing is shown to take less than {}\n",
            seconds(*iteration_s),
            seconds(*all_s)
        ),
        // Among the violations.
        Some(Verdict::Wrong(_) | Verdict::WithinOwnMemory(_)) => String::new(),
    }
}

/// Prints where two plans differ.
pub fn diff(args: &DiffArgs) -> Result<(), Failure> {
    let (a, b) = (read(&args.a)?, read(&args.b)?);
    let changes = changes(&serde_json::to_value(&a)?, &serde_json::to_value(&b)?);
    if args.json {
        let one = |change: &Change| json!({"field": change.field, "a": change.a, "b": change.b});
        return output::print_json(&changes.iter().map(one).collect::<Vec<_>>());
    }
    output::print(&(summary(&a, &b) + &table(&changes)))
}

fn summary(a: &Plan, b: &Plan) -> String {
    let (s, t) = (a.predicted.iteration_s, b.predicted.iteration_s);
    let (m, n) = (a.predicted.peak_memory_bytes, b.predicted.peak_memory_bytes);
    let percent = 100.0 * (t / s - 1.0);
    line("time", &format!("{} -> {} a step ({percent:+.1} %)", seconds(s), seconds(t)))
        + &line("memory", &format!("{} -> {} on the fullest rank", bytes(m), bytes(n)))
        + "\n"
}

fn table(changes: &[Change]) -> String {
    if changes.is_empty() {
        return "the plans are the same\n".to_owned();
    }
    let width = changes.iter().map(|change| change.field.len()).max().unwrap_or(0);
    let row = |Change { field, a, b }: &Change| {
        let (mut from, mut to) = (word(field, a), word(field, b));
        if from == to {
            // What differs lies behind the digits that units leave.
            (from, to) = (word("", a), word("", b));
        }
        format!("{field:<width$}   {from} -> {to}\n")
    };
    changes.iter().map(row).collect()
}

/// Entries of a list or mapping that a row shows.
const ENTRIES_SHOWN: usize = 4;

/// A value of a field in words: with its unit, lists and mappings by their first entries.
fn word(field: &str, value: &Value) -> String {
    let entries = |all: Vec<String>| {
        let more = match all.len().saturating_sub(ENTRIES_SHOWN) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let shown: Vec<String> = all.into_iter().take(ENTRIES_SHOWN).collect();
        shown.join(", ") + &more
    };
    let name = field.rsplit('.').next().unwrap_or_default();
    let is_bytes = name.ends_with("_bytes") || field.contains(".memory.");
    match value {
        Value::Null => "absent".to_owned(),
        Value::Bool(on) => on.to_string(),
        Value::String(text) => text.clone(),
        Value::Number(number) => match (number.as_u64(), number.as_f64()) {
            (Some(size), _) if is_bytes => bytes(size),
            (_, Some(time_s)) if name.ends_with("_s") => seconds(time_s),
            _ => number.to_string(),
        },
        Value::Array(items) if items.is_empty() => "none".to_owned(),
        Value::Array(items) => entries(items.iter().map(|item| word(field, item)).collect()),
        Value::Object(fields) => {
            let simple = fields.iter().filter(|(_, value)| !value.is_object() && !value.is_array());
            let of = |(key, value): (&String, &Value)| format!("{key} {}", word(key, value));
            let all: Vec<String> = simple.map(of).collect();
            if all.is_empty() { "present".to_owned() } else { entries(all) }
        }
    }
}
