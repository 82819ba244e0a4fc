//! A trainer of a golden case that runs the lowered program directly, for trying out launchers and
//! for tests that need a process of their own:
//!
//!     CASE=llama_gqa TP=2 PP=2 DP=2 MICRO_BATCH=1 \
//!         mpirun -n 8 golden --init-from DIR --data FILE --steps 20
//!
//! Also: `SP=1` (sequence parallelism), `VPP` (chunks of a pipeline rank), `SCHEDULE`, `VOCAB` and
//! `RECOMPUTE` (by the names of plan.yaml), `POST_VALIDATION=1`, `PREDICTED=1` (a step of 1.25 s
//! and 64 MiB), and `MODEL`, a model file in place of `CASE`, whose global batch is 8.

#[path = "../tests/common/mod.rs"]
mod common;

use common::{Split, model};
use direct::Direct;
use models::decisions::Vocab;
use models::input::Source;
use models::model::{ModelSpec, read};
use models::program::Program;
use models::program::Recompute;
use models::schedule::ScheduleName;
use runtime::{Prediction, StepTime};
use std::process::ExitCode;

fn main() -> ExitCode {
    let stages = Direct::new(&program());
    runtime::trainer::main::<f32, _>(&match variable("PREDICTED") {
        Some(_) => stages.predicted(PREDICTION),
        None => stages,
    })
}

const PREDICTION: Prediction = Prediction {
    step: Some(StepTime {
        compute_s: 1.0,
        cp_s: 0.0,
        ep_s: 0.0,
        tp_s: 0.1,
        pp_s: 0.05,
        dp_s: 0.04,
        optimizer_s: 0.05,
        other_s: 0.01,
    }),
    peak_memory_bytes: 64 << 20,
};

fn program() -> Program {
    let split = Split {
        tp: number("TP", 1),
        pp: number("PP", 1),
        vpp: number("VPP", 1),
        dp: number("DP", 1),
        micro_batch: number("MICRO_BATCH", 1),
        sequence_parallel: variable("SP").is_some(),
        recompute: variable("RECOMPUTE").map_or(Recompute::None, |name| recompute(&name)),
        schedule: variable("SCHEDULE").map_or(ScheduleName::OneFOneB, |name| {
            ScheduleName::parse(&name).expect("a schedule of plan.yaml")
        }),
        vocab: variable("VOCAB")
            .map_or(Vocab::FirstLast, |name| Vocab::parse(&name).expect("a vocab of plan.yaml")),
        ..Split::default()
    };
    let model = match variable("MODEL") {
        Some(path) => model_of(&path),
        None => model(&variable("CASE").unwrap_or_else(|| "llama_gqa".to_owned())),
    };
    let program = split.program(&model);
    Program { post_validation: variable("POST_VALIDATION").is_some(), ..program }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn number(name: &str, default: usize) -> usize {
    variable(name).map_or(default, |text| text.parse().expect("a whole number"))
}

fn recompute(name: &str) -> Recompute {
    match name {
        "selective" => Recompute::Selective,
        "full" => Recompute::Full,
        other => panic!("RECOMPUTE={other}; valid: selective, full"),
    }
}

fn model_of(path: &str) -> ModelSpec {
    let bytes = std::fs::read(path).expect("a model file");
    read(&Source::from_bytes(path, bytes).expect("a model file")).expect("a model file")
}
