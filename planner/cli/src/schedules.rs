//! `plan schedule`.

use crate::args::ScheduleArgs;
use crate::failure::Failure;
use crate::output;
use models::input::{InputError, nearest};
use models::schedule::{ScheduleError, ScheduleName, VocabPasses};
use models::text::figure;
use planner::answer::compare::{Comparison, Side, Units};
use planner::answer::text::{line, wrapped};
use planner::order::ilp::{Found, Objective, Ordering};
use planner::simulate::{LEGEND, MemoryRequest, PairTime, Report, Request, Timeline, VocabRequest};
use planner::until::Until;
use serde_json::json;
use std::time::{Duration, Instant};

/// Most pipeline ranks drawn.
const MAX_DRAWN: usize = 64;

/// Most stages times micro-batches for which an integer program finds an order within minutes.
const MAX_ORDERED: usize = 128;

/// Most passes and most stages: a schedule of this size is simulated and listed within ten seconds.
const MAX_PASSES: usize = 1 << 20;
const MAX_STAGES: usize = 1 << 12;

/// Simulates a schedule by itself.
pub fn run(args: &ScheduleArgs) -> Result<(), Failure> {
    let schedule = name(&args.name)?;
    let other = args.against.as_deref().map(name).transpose()?;
    let request = request(args, schedule, other)?;
    let proof = optimal(args, &request)?;
    let run = match &proof {
        Some(found) => request.run_order(found.schedule.clone()),
        None => request.run(),
    };
    let (schedule, timeline) = run.map_err(|error| refused(&error))?;
    let mut report = Report::new(&timeline);
    report.proven_optimal = proof.as_ref().map(|found| found.proven);
    report.gap = proof.as_ref().map(|found| found.gap);
    if args.orders {
        report = report.with_orders(&schedule);
    }
    let columns = output::columns();
    let Some(other) = other else {
        if args.json {
            return output::print_json(&report);
        }
        let passes = match args.orders {
            true => schedule.orders(),
            false => drawing(&timeline, columns),
        };
        return output::print(&format!("{}\n{passes}", head(&report, columns)));
    };
    let against = simulated(&request, other)?;
    let side = |name: ScheduleName, timeline: &Timeline| {
        Side::new(name, timeline, &timeline.peak_activations_until_w)
    };
    let of = side(request.schedule, &timeline);
    let comparison = Comparison { of, against: side(other, &against) };
    if args.json {
        let why = comparison.sentence(PLAIN);
        let json = json!({"report": report, "comparison": comparison, "why": why});
        return output::print_json(&json);
    }
    let named = |name: ScheduleName, report: &Report| {
        line("schedule", name.name()) + &head(report, columns) + "\n"
    };
    let heads = named(request.schedule, &report) + &named(other, &Report::new(&against));
    output::print(&(heads + &comparison.text(PLAIN, columns)))
}

/// Times without a unit; activations held until W in micro-batches of a rank's whole share.
const PLAIN: Units = Units { time: short, held: short };

/// Another schedule simulated with the same times, and with the nearest valid number of chunks.
fn simulated(request: &Request, schedule: ScheduleName) -> Result<Timeline, InputError> {
    let chunks = schedule.chunk_rule().nearest(request.chunks);
    let request = Request { schedule, chunks, ..*request };
    within(&request)?;
    Ok(request.run().map_err(|error| refused(&error))?.1)
}

/// The shortest order that an integer program finds, if `--optimal` asks for it.
fn optimal(args: &ScheduleArgs, request: &Request) -> Result<Option<Found>, InputError> {
    let Some(objective) = args.optimal.as_deref() else { return Ok(None) };
    let objective = match objective {
        "makespan" => Objective::Makespan,
        "stage" => Objective::LongestStage,
        other => {
            return Err(InputError::new(format!("--optimal cannot be `{other}`"))
                .help("valid: makespan, stage"));
        }
    };
    let (p, m, v) = (request.stages, request.micro_batches, request.chunks);
    if v != 1 {
        return Err(InputError::new(format!(
            "--optimal cannot order {v} chunks per pipeline rank"
        ))
        .help("it takes one: leave --chunks out"));
    }
    if p * m > MAX_ORDERED {
        return Err(InputError::new(format!("--optimal cannot order {p} stages x {m} micro-batches"))
            .help(format!(
                "stages x micro-batches may be {MAX_ORDERED} at most: the program has 3pm(m - 1)/2 choices"
            )));
    }
    let seconds = time("--time-limit", args.time_limit.unwrap_or(60.0))?;
    let (ranks, micro_batches, costs) = (p, m, request.auto_costs());
    let deadline = Instant::now() + Duration::from_secs_f64(seconds.min(1e6));
    let until = Until { deadline: Some(deadline), ..Until::default() };
    let found = Ordering { ranks, micro_batches, costs, objective }.solve(until);
    found.map(Some).map_err(|error| refused(&error))
}

fn refused(error: &ScheduleError) -> InputError {
    InputError::new(error.to_string())
}

/// Builds the request. Flags without effect are refused.
fn request(
    args: &ScheduleArgs,
    schedule: ScheduleName,
    other: Option<ScheduleName>,
) -> Result<Request, InputError> {
    without_effect(args, schedule, other)?;
    let request = Request {
        schedule,
        stages: args.stages,
        micro_batches: args.micro_batches,
        chunks: args.chunks.unwrap_or_else(|| schedule.chunk_rule().nearest(1)),
        forward: time("--forward", args.forward)?,
        backward: time("--backward", args.backward)?,
        weight: time("--weight", args.weight)?,
        latency: time("--latency", args.latency)?,
        vocab: vocab(args)?,
        pair: pair_time(args)?,
        memory: memory(args)?,
    };
    if request.forward + request.backward + request.weight == 0.0 {
        let error = InputError::new("--forward, --backward and --weight cannot all be 0");
        return Err(error.help("valid: at least one above 0, in any unit"));
    }
    within(&request)?;
    Ok(request)
}

fn name(name: &str) -> Result<ScheduleName, InputError> {
    ScheduleName::parse(name).map_err(|error| {
        let names = ScheduleName::ALL.map(ScheduleName::name);
        let hint = nearest(name, &names).map(|near| format!("did you mean `{near}`?"));
        let error = refused(&error);
        match hint {
            Some(hint) => error.help(hint),
            None => error,
        }
    })
}

/// Refuses flags that would have no effect.
fn without_effect(
    args: &ScheduleArgs,
    schedule: ScheduleName,
    other: Option<ScheduleName>,
) -> Result<(), InputError> {
    let overlaps = schedule.has_pairs() || other.is_some_and(ScheduleName::has_pairs);
    let ordered = schedule == ScheduleName::ZbAuto;
    let chooses = ordered || other == Some(ScheduleName::ZbAuto);
    let pairs = "only for schedules that run a forward and a backward together";
    let order = "only for schedules that choose their order by memory";
    let flags = [
        ("--pair-time", args.pair_time.is_some() && !overlaps, pairs),
        ("--act-b", args.act_b.is_some() && !chooses, order),
        ("--act-w", args.act_w.is_some() && !chooses, order),
        ("--memory-limit", args.memory_limit.is_some() && !chooses, order),
        ("--optimal", args.optimal.is_some() && !ordered, order),
        ("--orders", args.orders && other.is_some(), "only without --against"),
    ];
    match flags.into_iter().find(|(_, stray, _)| *stray) {
        None => Ok(()),
        Some((flag, _, when)) => {
            Err(InputError::new(format!("{flag} has no effect on {schedule}"))
                .help(format!("it is {when}; leave it out")))
        }
    }
}

fn pair_time(args: &ScheduleArgs) -> Result<PairTime, InputError> {
    match args.pair_time.as_deref() {
        None | Some("sum") => Ok(PairTime::Sum),
        Some("max") => Ok(PairTime::Max),
        Some(other) => {
            Err(InputError::new(format!("--pair-time cannot be `{other}`")).help("valid: sum, max"))
        }
    }
}

fn memory(args: &ScheduleArgs) -> Result<MemoryRequest, InputError> {
    let checked = |flag, value: Option<f64>| value.map(|value| time(flag, value)).transpose();
    Ok(MemoryRequest {
        freed_by_b: checked("--act-b", args.act_b)?,
        freed_by_w: checked("--act-w", args.act_w)?,
        limit: checked("--memory-limit", args.memory_limit)?,
    })
}

fn time(flag: &str, value: f64) -> Result<f64, InputError> {
    let refused = || InputError::new(format!("{flag} cannot be {}", figure(value)));
    let valid = (0.0..=1e12).contains(&value);
    valid.then_some(value).ok_or_else(|| refused().help("valid: 0 or more, in any unit"))
}

fn vocab(args: &ScheduleArgs) -> Result<Option<VocabRequest>, InputError> {
    let Some(name) = &args.vocab else {
        let stray = [
            ("--vocab-s", args.vocab_s),
            ("--vocab-t", args.vocab_t),
            ("--vocab-if", args.vocab_if),
            ("--vocab-ib", args.vocab_ib),
        ];
        let stray = stray.into_iter().find(|(_, time)| time.is_some());
        return stray.map_or(Ok(None), |(flag, _)| {
            Err(InputError::new(format!("{flag} has no effect without --vocab"))
                .help("add --vocab parallel_naive, parallel_1, parallel_2 or interlaced"))
        });
    };
    let passes = VocabPasses::parse(name).ok_or_else(|| {
        InputError::new(format!("--vocab cannot be `{name}`"))
            .help("valid: parallel_naive, parallel_1, parallel_2, interlaced")
    })?;
    Ok(Some(VocabRequest {
        passes,
        first: time("--vocab-s", args.vocab_s.unwrap_or(0.25))?,
        last: time("--vocab-t", args.vocab_t.unwrap_or(0.25))?,
        look_up: time("--vocab-if", args.vocab_if.unwrap_or(0.0))?,
        look_up_backward: time("--vocab-ib", args.vocab_ib.unwrap_or(0.0))?,
    }))
}

fn within(request: &Request) -> Result<(), InputError> {
    let counts = [request.stages, request.micro_batches, request.chunks];
    let passes = counts.into_iter().try_fold(2, usize::checked_mul);
    let within = request.stages <= MAX_STAGES && passes.is_some_and(|passes| passes <= MAX_PASSES);
    if within {
        return Ok(());
    }
    let [p, m, v] = counts;
    Err(InputError::new(format!(
        "--stages {p} --micro-batches {m} --chunks {v} are too many passes"
    ))
    .help(format!(
        "stages x micro-batches x chunks x 2 may be {MAX_PASSES} at most, and stages {MAX_STAGES}"
    )))
}

/// The figures of a simulated schedule.
fn head(report: &Report, columns: usize) -> String {
    let mut text = line("makespan", &short(report.makespan));
    text += &line("bubble", &format!("{:.2} %", 100.0 * report.bubble_fraction));
    text += &line("stage time", &short(report.stage_time));
    text += &line("in flight", &peaks(&report.peak_activations, columns));
    if report.peak_activations_until_w != report.peak_activations {
        text += &line("until W", &peaks(&report.peak_activations_until_w, columns));
    }
    if let (Some(proven), Some(gap)) = (report.proven_optimal, report.gap) {
        let gap = format!("not proven: an order may be up to {:.2} % shorter", 100.0 * gap);
        text += &line("optimal", if proven { "proven: no order is shorter" } else { &gap });
    }
    text
}

fn drawing(timeline: &Timeline, columns: usize) -> String {
    let whole = timeline.fits(columns);
    let head = if whole { "" } else { "its start // its end\n" };
    let drawn = timeline.drawing(columns, MAX_DRAWN, whole);
    format!("{head}{drawn}\n{}", wrapped(LEGEND, columns))
}

/// A number without trailing zeros.
fn short(value: f64) -> String {
    let text = format!("{value:.6}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Activations by pipeline rank: the first ones, as many as a line holds.
fn peaks(values: &[f64], columns: usize) -> String {
    let mut text = String::new();
    for (rank, &value) in values.iter().enumerate() {
        let more = if rank + 1 < values.len() { " ...".len() } else { 0 };
        let next = format!("{} ", short(value));
        if LABEL + text.len() + next.len() + more > columns || rank == MOST_PEAKS {
            return text + "...";
        }
        text += &next;
    }
    text.trim_end().to_owned()
}

/// Columns of the label before them, and the most of them.
const LABEL: usize = 11;
const MOST_PEAKS: usize = 16;
