//! `plan check` and `plan diff`: commands about plans that exist.

use crate::args::{CheckArgs, DiffArgs};
use crate::failure::Failure;
use crate::output;
use models::check::{Violation, check};
use models::input::{InputError, Source};
use models::plan::Plan;
use planner::contradictions::{self, contradictions};
use planner::flags::request_of;
use planner::report::TOOL;
use planner::report_text::{bytes, line, seconds};
use planner::repriced::{Repriced, repriced};
use serde_json::{Value, json};
use std::path::Path;

/// Reads a plan.
pub fn read(path: &Path) -> Result<Plan, InputError> {
    Plan::read(&Source::open(path)?)
}

/// Reads a plan and refuses one that does not work out.
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

/// Checks a plan; exit code 2 if anything is wrong.
pub fn run(args: &CheckArgs) -> Result<(), Failure> {
    let plan = read(&args.plan)?;
    let mut violations = check(&plan);
    let again = match violations.is_empty() {
        true => priced_again(&plan, args.cluster.as_deref())?,
        false => Again::Not,
    };
    violations.extend(again.violation());
    let request = request_of(&plan, args.cluster.as_deref()).ok().filter(|_| violations.is_empty());
    let mut notes = vec![];
    if violations.is_empty() {
        violations = contradictions(&plan, request.as_ref());
        notes = contradictions::notes(&plan, request.as_ref(), TOOL);
    }
    if args.json {
        let figures = again.figures(&plan);
        output::print_json(
            &json!({"valid": violations.is_empty(), "violations": violations, "priced_again": figures, "notes": notes}),
        )?;
    } else {
        let note = if violations.is_empty() { again.note(&plan) } else { String::new() };
        let notes: String = notes.iter().map(|note| format!("note: {note}\n")).collect();
        output::print(&(verdict(&args.plan, &violations) + &note + &notes))?;
    }
    if violations.is_empty() { Ok(()) } else { Err(Failure::Refused) }
}

/// A plan under this version's prices.
enum Again {
    /// Something else is wrong.
    Not,
    /// There is no such cluster here; why.
    Unknown(String),
    /// It can be priced, or its schedule cannot even be made.
    Priced(Option<Repriced>),
}

/// Prices a plan where its cluster is known; one that the user names must be.
fn priced_again(plan: &Plan, cluster: Option<&str>) -> Result<Again, InputError> {
    match request_of(plan, cluster) {
        Ok(request) => Ok(Again::Priced(repriced(&request, plan))),
        Err(error) if cluster.is_some() => Err(error),
        Err(_) => Ok(Again::Unknown(plan.inputs.cluster.name.clone())),
    }
}

impl Again {
    /// What keeps the plan from running.
    fn violation(&self) -> Option<Violation> {
        let violation = |field: &str, found: String, valid: &str| {
            Some(Violation { field: field.to_owned(), found, valid: valid.to_owned() })
        };
        match self {
            Self::Priced(None) => violation(
                "decisions.schedule",
                "what cannot be made for these degrees".to_owned(),
                "a schedule that exists for them",
            ),
            Self::Priced(Some(now)) if !now.fits => violation(
                "predicted.peak_memory_bytes",
                format!("what it says: priced again it is {}", bytes(now.peak_bytes as u64)),
                "what a device has",
            ),
            _ => None,
        }
    }

    fn figures(&self, plan: &Plan) -> Option<Value> {
        let Self::Priced(Some(now)) = self else { return None };
        let (time_s, memory) = (now.iteration_s, now.peak_bytes as u64);
        Some(
            json!({"iteration_s": time_s, "peak_memory_bytes": memory, "agrees": now.agrees(plan)}),
        )
    }

    fn note(&self, plan: &Plan) -> String {
        match self {
            Self::Unknown(cluster) => format!(
                "not priced again: no cluster `{cluster}` with these figures is shipped; give the plan's own with --cluster FILE\n"
            ),
            Self::Priced(Some(now)) if !now.agrees(plan) => format!(
                "priced again it takes {} a step and {} on the fullest rank, not {} and {}: another version made it, or it was edited\n",
                seconds(now.iteration_s),
                bytes(now.peak_bytes as u64),
                seconds(plan.predicted.iteration_s),
                bytes(plan.predicted.peak_memory_bytes)
            ),
            _ => String::new(),
        }
    }
}

fn verdict(path: &Path, violations: &[Violation]) -> String {
    let path = path.display();
    if violations.is_empty() {
        return format!("{path} works out: split, stages, schedule, memory and figures agree\n");
    }
    let lines: String = violations.iter().map(|violation| format!("  {violation}\n")).collect();
    format!("{path} does not work out:\n{lines}")
}

/// Says where two plans differ.
pub fn diff(args: &DiffArgs) -> Result<(), Failure> {
    let (a, b) = (read(&args.a)?, read(&args.b)?);
    let changes = changes(&serde_json::to_value(&a)?, &serde_json::to_value(&b)?);
    if args.json {
        let one = |(field, a, b): &(String, Value, Value)| json!({"field": field, "a": a, "b": b});
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

fn table(changes: &[(String, Value, Value)]) -> String {
    if changes.is_empty() {
        return "the plans are the same\n".to_owned();
    }
    let width = changes.iter().map(|(field, ..)| field.len()).max().unwrap_or(0);
    let row = |(field, a, b): &(String, Value, Value)| {
        format!("{field:<width$}   {} -> {}\n", word(a), word(b))
    };
    changes.iter().map(row).collect()
}

fn word(value: &Value) -> String {
    match value {
        Value::Null => "absent".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Fields with different values, by path, in the order of the first plan.
fn changes(a: &Value, b: &Value) -> Vec<(String, Value, Value)> {
    let mut found = vec![];
    compare("", a, b, &mut found);
    found
}

fn compare(path: &str, a: &Value, b: &Value, found: &mut Vec<(String, Value, Value)>) {
    match (a, b) {
        _ if a == b => {}
        (Value::Object(x), Value::Object(y)) => {
            let more = y.keys().filter(|key| !x.contains_key(*key));
            for key in x.keys().chain(more) {
                let at = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                compare(&at, &a[key], &b[key], found);
            }
        }
        (Value::Array(x), Value::Array(y)) => {
            for index in 0..x.len().max(y.len()) {
                let at = |list: &[Value]| list.get(index).cloned().unwrap_or(Value::Null);
                compare(&format!("{path}[{index}]"), &at(x), &at(y), found);
            }
        }
        _ => found.push((path.to_owned(), a.clone(), b.clone())),
    }
}
