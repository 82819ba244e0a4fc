//! How long a plan takes: large requests, and how the time grows with the GPUs. `make bench` runs it;
//! with names as arguments it runs only those.

use planner::restrict::Restrictions;
use planner::search::{Outcome, Task, search};

/// Model, cluster, GPUs.
type Request = (&'static str, &'static str, u64);

const LARGE: [Request; 3] = [
    ("llama70b", "dgx_h100", 16_384),
    ("deepseek_v3", "dgx_h100", 2_048),
    ("gpt_1t", "selene", 3_072),
];
const FEW: Request = ("llama70b", "dgx_h100", 1_024);
const MANY: Request = ("llama70b", "dgx_h100", 131_072);

fn main() {
    let wanted: Vec<String> =
        std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    for request in LARGE {
        if wanted.is_empty() || wanted.iter().any(|name| name == request.0) {
            plan(request);
        }
    }
    if wanted.is_empty() || wanted.iter().any(|name| name == "growth") {
        let few_s = plan(FEW);
        let many_s = plan(MANY);
        println!("{} GPUs take {:.2} times as long as {}", MANY.2, many_s / few_s, FEW.2);
    }
    println!("peak memory {}", peak_memory());
}

/// Plans once; seconds.
fn plan((model, cluster, gpus): Request) -> f64 {
    let spec = models::model::shipped(model).and_then(Result::ok).expect("shipped models read");
    let machine =
        models::cluster::shipped(cluster).and_then(Result::ok).expect("shipped clusters read");
    let restrictions = Restrictions::default();
    let outcome = search(&Task::new(&spec, &machine, gpus, &restrictions), &mut |_, _| {});
    println!("{model} on {gpus} GPUs of {cluster}");
    report(&outcome);
    outcome.proof.elapsed_s
}

fn report(outcome: &Outcome) {
    let proof = &outcome.proof;
    println!("  combinations     {:>14}", proof.candidates);
    println!("  cut by time      {:>14}", proof.cut_by_time);
    println!("  cut by memory    {:>14}", proof.cut_by_memory);
    println!("  cut by dominance {:>14}", proof.cut_by_dominance);
    println!("  placed           {:>14}", proof.placed);
    println!("  programs         {:>14}   {:.1} ms each", proof.ilps, proof.ms_per_ilp);
    println!("  wall             {:>14.3} s, proven {}", proof.elapsed_s, proof.proven_optimal);
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

/// Largest resident size of this process so far, where the system tells.
fn peak_memory() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.map_or_else(|| "unknown".to_owned(), |size| size.trim().to_owned())
}
