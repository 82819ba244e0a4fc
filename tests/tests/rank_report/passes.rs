//! The order of passes, and what is held between them.

use super::run::{RUNS, Ran, number};
use meshwright_tests::golden::planned_on;
use models::schedule::Release;
use planner::simulate::{Durations, VocabDurations, simulate};
use serde_json::Value;

#[test]
fn passes_run_in_the_simulators_order_with_as_many_in_flight() {
    for run in &*RUNS {
        let vocab = VocabDurations::uniform(run.schedule.ranks, 0.2, 0.3);
        let durations =
            Durations { vocab, ..Durations::uniform(&run.schedule, 1.0, 1.1, 0.9, 0.1) };
        let timeline = simulate(&run.schedule, &durations).expect("it was planned");
        for rank in &run.ranks {
            let pp_rank = run.pp_rank(rank);
            let simulated: Vec<String> = timeline.spans[pp_rank]
                .iter()
                .map(|span| &span.pass)
                .map(|pass| format!("{:?}{}.{}", pass.kind, pass.micro_batch, pass.chunk))
                .collect();
            let ran = rank["passes"].as_array().expect("a list").iter();
            let ran: Vec<&str> = ran.map(|pass| pass.as_str().expect("a name")).collect();
            assert_eq!(ran, simulated, "{} pp_rank {pp_rank}", run.what);
            // With a split backward pass, what is held for `W` no longer counts as a micro-batch in
            // flight.
            let vectors = run.schedule.max_in_flight(pp_rank, Release::AtB);
            let most = vectors.iter().map(|counts| counts.iter().sum::<u32>()).max();
            assert_eq!(
                number(&rank["peak_in_flight"]),
                u64::from(most.unwrap_or(0)),
                "{}",
                run.what
            );
            // The simulator counts whole shares of a pipeline rank; a chunk is one part of a share.
            let chunks = run.schedule.share_chunks() as f64;
            let simulated = timeline.peak_activations[pp_rank] * chunks;
            assert_eq!(number(&rank["peak_in_flight"]) as f64, simulated, "{}", run.what);
        }
    }
}

/// Only what comes before and after the layers is left on the device.
#[test]
fn activations_in_host_memory_leave_the_device() {
    for case in ["llama_gqa", "mixtral"] {
        let settings = [
            "tp=2",
            "pp=2",
            "schedule=1f1b",
            "micro_batch=1",
            "fused_loss=true",
            "sequence_parallel=true",
        ];
        let bytes = |offload: &str| {
            let settings: Vec<&str> = settings.into_iter().chain([offload]).collect();
            let plan = planned_on("dgx_h100", case, 4, 8, &settings);
            let ran = Ran::of(&plan, case, &settings);
            let bytes = |rank: &Value| number(&rank["peak_activation_bytes"]);
            ran.ranks.iter().map(bytes).collect::<Vec<u64>>()
        };
        let (device, host) = (bytes("offload=none"), bytes("offload=activations"));
        for (device, host) in device.iter().zip(&host) {
            assert!(10 * host < *device, "{case}: {host} of {device} bytes");
        }
    }
}

#[test]
fn activations_take_the_bytes_that_were_planned() {
    for run in &*RUNS {
        let program = &run.program;
        for rank in &run.ranks {
            let pp_rank = run.pp_rank(rank);
            let planned = run.planned_memory[pp_rank].activations as f64;
            // Plans count logits as workspace; here they belong to what a micro-batch keeps, as do
            // the statistics of norms and softmax, which plans omit.
            let ends = program.stages_of(pp_rank).contains(&(program.stages.len() - 1));
            let holds = (ends || program.vocab.is_some()) && !program.fused_loss;
            let head = if holds { run.logits_bytes() } else { 0.0 };
            let seen = number(&rank["peak_activation_bytes"]) as f64;
            // A split backward pass leaves about as much for `W` as it frees.
            let (less, more) =
                if run.schedule.splits_backward() { (0.97, 1.03) } else { (1.0, 1.01) };
            let (least, most) = (less * planned, more * planned);
            // The gradient of logits is held for `W`, too.
            let held = run.schedule.max_in_flight(pp_rank, Release::AtW);
            let held = held.iter().map(|counts| counts.iter().sum::<u32>()).max().unwrap_or(0);
            let most = most + f64::from(held) * head;
            assert!(
                (least..=most).contains(&seen),
                "{} pp_rank {pp_rank}: {seen}, not {least} to {most}",
                run.what
            );
        }
    }
}
