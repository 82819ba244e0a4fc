//! How long `plan` and `plan estimate` take to answer requests that nobody timed before.
//!
//! Random requests: a shipped model, a shipped cluster, 8 to 131,072 GPUs, odd counts among them.
//! Random pinnings: a random combination of such a request's space, every decision set. Each runs
//! the program itself, one after another, so the wall time is what a user waits. The seed is fixed;
//! `make latency` runs 1,000 of each.
//!
//! Arguments: `--plan PATH` (the program), `--count N`, `--seed N`, `--slowest N` (how many to
//! name), `--only requests|pinnings`, `--rows` (prints every answer's status, wall time, gap as
//! searched and command).

use meshwright_tests::random::Random;
use models::decisions::{Decision, Decisions};
use planner::request::Request;
use planner::request::flags::Flags;
use planner::request::pipeline_choices::PipelineChoices;
use planner::request::space::ParallelLayout;
use serde_json::Value;
use std::process::Command;
use std::time::Instant;

/// Longest wall time that 99.9 % of the answers may take, and that any may take, s.
const LIMITS_S: [f64; 2] = [1.2, 2.0];

fn main() {
    let options = Options::parse();
    if options.only.as_deref() != Some("pinnings") {
        let mut random = Random::new(options.seed);
        let commands: Vec<_> = (0..options.count).map(|_| request(&mut random)).collect();
        report("requests", "plan", &commands, &options);
    }
    if options.only.as_deref() != Some("requests") {
        let mut random = Random::new(options.seed + 1);
        let commands: Vec<_> = (0..options.count).map(|_| pinning(&mut random)).collect();
        report("pinnings", "estimate", &commands, &options);
    }
}

struct Options {
    plan: String,
    count: usize,
    seed: u64,
    slowest: usize,
    only: Option<String>,
    rows: bool,
}

impl Options {
    fn parse() -> Self {
        let args: Vec<String> = std::env::args().collect();
        let value = |name: &str| {
            let at = args.iter().position(|arg| arg == name)?;
            args.get(at + 1).cloned()
        };
        let number = |name: &str| value(name).and_then(|value| value.parse().ok());
        Self {
            plan: value("--plan").unwrap_or_else(|| "target/release/plan".to_owned()),
            count: number("--count").unwrap_or(1000),
            seed: number("--seed").unwrap_or(1) as u64,
            slowest: number("--slowest").unwrap_or(5),
            only: value("--only"),
            rows: args.iter().any(|arg| arg == "--rows"),
        }
    }
}

/// Model, cluster and GPUs as flags.
fn request(random: &mut Random) -> Vec<String> {
    let models: Vec<&str> = models::model::shipped_names().collect();
    let clusters: Vec<&str> = models::cluster::shipped_names().collect();
    let model = random.pick(&models);
    let cluster = random.pick(&clusters);
    let near = random.scaled(8.0, 131_072.0).round() as u64;
    // Half of the requests have whole nodes or a power of two, as most clusters have.
    let gpus = match random.whole(0, 3) {
        0 => near.next_power_of_two().clamp(8, 131_072),
        1 => (near / 8).max(1) * 8,
        _ => near,
    };
    ["--model", model, "--cluster", cluster, "--gpus", &gpus.to_string()]
        .map(ToOwned::to_owned)
        .to_vec()
}

/// A request whose space is not empty, with every decision set.
fn pinning(random: &mut Random) -> Vec<String> {
    loop {
        let mut flags = request(random);
        if let Some(decisions) = combination(&flags, random) {
            flags.extend(settings(&decisions));
            return flags;
        }
    }
}

fn combination(flags: &[String], random: &mut Random) -> Option<Decisions> {
    let flags = Flags {
        model: flags[1].clone(),
        cluster: Some(flags[3].clone()),
        gpus: flags[5].parse().ok()?,
        ..Flags::default()
    };
    let request = Request::new(&flags).ok()?;
    let task = request.task();
    let space = task.space();
    let contexts = space.contexts();
    let context = contexts.get(random.whole(0, contexts.len().max(1) - 1))?;
    let splits = space.expert_splits(&context.decisions);
    let split = splits.get(random.whole(0, splits.len().max(1) - 1))?;
    let decisions = split.of(&context.decisions);
    let choices = space.choices(&ParallelLayout { decisions: decisions.clone() });
    one_of(&choices, &decisions, random)
}

fn one_of(choices: &PipelineChoices, d: &Decisions, random: &mut Random) -> Option<Decisions> {
    let pipelines: Vec<Decisions> = choices.pipelines(d).collect();
    let pipeline = pipelines.get(random.whole(0, pipelines.len().max(1) - 1))?;
    let (zero_stage, dp_shard) = random.pick(&choices.shards);
    Some(Decisions {
        recompute: random.pick(&choices.recompute),
        zero_stage,
        dp_shard,
        offload: random.pick(&choices.offload),
        rank_order: random.pick(&choices.rank_order),
        ..pipeline.clone()
    })
}

/// `--set` for every decision that users set.
fn settings(decisions: &Decisions) -> Vec<String> {
    let Ok(Value::Object(values)) = serde_json::to_value(decisions) else { return vec![] };
    let set = Decision::names().filter_map(|name| {
        let value = match values.get(name)? {
            Value::Null => return None,
            Value::String(value) => value.clone(),
            value => value.to_string(),
        };
        Some(["--set".to_owned(), format!("{name}={value}")])
    });
    set.flatten().collect()
}

/// One answer.
struct Run {
    command: String,
    wall_s: f64,
    status: i32,
    first_s: Option<f64>,
    gap: Option<f64>,
    searched_gap: Option<f64>,
}

fn report(what: &str, verb: &str, commands: &[Vec<String>], options: &Options) {
    let mut runs: Vec<Run> = commands.iter().map(|flags| run(verb, flags, options)).collect();
    let of = |status: i32| runs.iter().filter(|run| run.status == status).count();
    println!(
        "{what}: {} answered, {} do not fit, {} do not exist, {} failed",
        of(0),
        of(3),
        of(2),
        runs.len() - of(0) - of(3) - of(2)
    );
    println!("  wall time        {}", quantiles(runs.iter().map(|run| run.wall_s), 1e3, "ms"));
    let first = runs.iter().filter_map(|run| run.first_s);
    println!("  first answer     {}", quantiles(first, 1e3, "ms"));
    println!("  gap              {}", quantiles(runs.iter().filter_map(|r| r.gap), 1e2, "%"));
    let searched = runs.iter().filter_map(|run| run.searched_gap);
    println!("  gap as searched  {}", quantiles(searched, 1e2, "%"));
    let proven = runs.iter().filter(|run| run.searched_gap == Some(0.0)).count();
    println!("  proven           {proven} of {} answered", of(0));
    for limit_s in LIMITS_S {
        let over = runs.iter().filter(|run| run.wall_s > limit_s).count();
        println!("  over {limit_s} s       {over}");
    }
    runs.sort_by(|a, b| b.wall_s.total_cmp(&a.wall_s));
    for Run { command, wall_s, status, searched_gap, .. } in runs.iter().filter(|_| options.rows) {
        println!("  row {status} {wall_s:.3} {:.6} {command}", searched_gap.unwrap_or(1.0));
    }
    for Run { command, wall_s, status, .. } in runs.iter().take(options.slowest) {
        println!("  {wall_s:7.3} s  exit {status}  {command}");
    }
}

fn run(verb: &str, flags: &[String], options: &Options) -> Run {
    let verbs: &[&str] = if verb == "plan" { &[] } else { &[verb] };
    let begun = Instant::now();
    let output = Command::new(&options.plan).args(verbs).args(flags).arg("--json").output();
    let wall_s = begun.elapsed().as_secs_f64();
    let output = output.unwrap_or_else(|error| panic!("cannot run {}: {error}", options.plan));
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let search = |name: &str| answer["search"][name].as_f64();
    Run {
        command: [&[verb], &flags.iter().map(String::as_str).collect::<Vec<_>>()[..]]
            .concat()
            .join(" "),
        wall_s,
        status: output.status.code().unwrap_or(-1),
        first_s: search("first_s"),
        gap: search("gap"),
        searched_gap: search("searched_gap"),
    }
}

/// Median, 95th, 99th and 99.9th percentile and maximum.
fn quantiles(values: impl Iterator<Item = f64>, scale: f64, unit: &str) -> String {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    if values.is_empty() {
        return "none".to_owned();
    }
    let at = |share: f64| {
        let index = (share * values.len() as f64).ceil() as usize;
        scale * values[index.clamp(1, values.len()) - 1]
    };
    format!(
        "median {:.2} {unit}, 95 % {:.2}, 99 % {:.2}, 99.9 % {:.2}, most {:.2}",
        at(0.5),
        at(0.95),
        at(0.99),
        at(0.999),
        at(1.0)
    )
}
