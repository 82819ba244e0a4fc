//! Time to plan: large requests, other models and clusters, and growth with the number of GPUs.
//! `make bench` runs it. Arguments select what runs: names of models, `passes` or `growth`.

use models::schedule::ScheduleName;
use planner::request::Task;
use planner::request::restrictions::Restrictions;
use planner::search::{Outcome, search};
use planner::simulate::{Durations, Prepared, Workspace};
use std::time::Instant;

/// Model, cluster, GPUs.
type Request = (&'static str, &'static str, u64);

const LARGE: [Request; 4] = [
    ("llama70b", "dgx_h100", 16_384),
    ("deepseek_v3", "dgx_h100", 2_048),
    ("gpt_1t", "selene", 3_072),
    ("gpt_1t", "dgx_h100", 3_072),
];
const OTHERS: [Request; 6] = [
    ("gpt3_175b", "selene", 1_024),
    ("mixtral_8x22b", "dgx_h100", 512),
    ("qwen3_235b_a22b", "dgx_b200", 1_024),
    ("llama405b", "dgx_h100", 8_192),
    ("llama405b", "gb200_nvl72", 2_304),
    ("llama70b", "a100_roce", 768),
];
const FEW: Request = ("llama70b", "dgx_h100", 1_024);
const MANY: Request = ("llama70b", "dgx_h100", 131_072);

/// The same allocator as in the program `plan`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    let wanted: Vec<String> =
        std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|other| other == name);
    for request in LARGE.into_iter().chain(OTHERS).filter(|request| is_wanted(request.0)) {
        plan(request);
    }
    if is_wanted("passes") {
        passes();
    }
    if is_wanted("growth") {
        // The first search of a process is slowed by warm-up, so the fastest of three counts.
        let least_s = |request| (0..3).map(|_| plan(request)).fold(f64::INFINITY, f64::min);
        let (few_s, many_s) = (least_s(FEW), least_s(MANY));
        println!("{} GPUs take {:.2} times as long as {}", MANY.2, many_s / few_s, FEW.2);
    }
}

/// Builds, prepares and runs schedules of 16,384 passes (p 32, m 128, v 2). Schedules with split
/// backward have half as many again.
fn passes() {
    for name in ScheduleName::ALL {
        let Ok(schedule) = name.build(32, 128, 2) else { continue };
        let count: usize = schedule.passes.iter().map(Vec::len).sum();
        let durations = Durations::uniform(&schedule, 1.0, 1.0, 1.0, 0.1);
        let Ok(prepared) = Prepared::new(&schedule) else { continue };
        let mut workspace = Workspace::default();
        let build_s = least_s(3, &mut || drop(name.build(32, 128, 2)));
        let prepare_s = least_s(20, &mut || drop(Prepared::new(&schedule)));
        let run_s = least_s(200, &mut || {
            std::hint::black_box(prepared.makespan(&durations, &mut workspace));
        });
        let [build_ms, prepare_ms, run_ms] = [build_s, prepare_s, run_s].map(|s| 1e3 * s);
        println!(
            "{name}: {count} passes, made in {build_ms:.2} ms, prepared in {prepare_ms:.2} ms, \
             run in {run_ms:.3} ms"
        );
    }
}

/// Shortest time of `n` runs, s.
fn least_s(n: usize, run: &mut dyn FnMut()) -> f64 {
    let timed = |_| {
        let begun = Instant::now();
        run();
        begun.elapsed().as_secs_f64()
    };
    (0..n).map(timed).fold(f64::INFINITY, f64::min)
}

/// Plans once and returns the wall time, s.
fn plan((model, cluster, gpus): Request) -> f64 {
    let spec = models::model::shipped(model).and_then(Result::ok).expect("shipped models read");
    let machine =
        models::cluster::shipped(cluster).and_then(Result::ok).expect("shipped clusters read");
    let restrictions = Restrictions::default();
    forget_peak_memory();
    let (begun, busy_s) = (Instant::now(), processor_s());
    let outcome = search(&Task::new(&spec, &machine, gpus, &restrictions), &mut |_| {});
    let wall_s = begun.elapsed().as_secs_f64();
    println!("{model} on {gpus} GPUs of {cluster}");
    println!("  wall             {wall_s:>14.3} s, {:.2} s of processors", processor_s() - busy_s);
    println!("  peak memory      {:>14}", peak_memory());
    report(&outcome);
    wall_s
}

fn report(outcome: &Outcome) {
    let proof = &outcome.proof;
    println!("  combinations     {:>14}   proven {}", proof.candidates, proof.proven_optimal);
    println!("  cut by time      {:>14}", proof.cut_by_time);
    println!("  cut by memory    {:>14}", proof.cut_by_memory);
    println!("  cut by dominance {:>14}", proof.cut_by_dominance);
    println!("  placed           {:>14}", proof.placed);
    println!("  programs         {:>14}   {:.1} ms each", proof.ilps, outcome.effort.ms_per_ilp);
    if let Some(found) = &outcome.best {
        let d = &found.decisions;
        println!(
            "  plan             {:>14.3} s: tp {} pp {} vpp {} cp {} dp {} ep {} zero {} micro-batch {} {} {} {}",
            found.priced.iteration_s,
            d.tp,
            d.pp,
            d.vpp,
            d.cp,
            d.dp,
            d.ep,
            d.zero_stage,
            d.micro_batch,
            d.schedule.name(),
            d.vocab,
            d.recompute
        );
    }
}

/// Resets the system's measurement of peak memory, where possible.
fn forget_peak_memory() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// Peak resident size since the reset, where the system reports it.
fn peak_memory() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|size| size.trim().strip_suffix(" kB")?.parse::<f64>().ok());
    kilobytes.map_or_else(|| "unknown".to_owned(), |kb| format!("{:.0} MB", kb * 1024.0 / 1e6))
}

/// Processor seconds of this process so far, where the system reports them (in ticks of 10 ms).
fn processor_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(") ").next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}
