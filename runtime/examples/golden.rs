//! A trainer of a golden case, as generated ones will be, for trying out launchers:
//!
//! `CASE=llama_gqa TP=2 PP=2 DP=2 MICRO_BATCH=1 mpirun -n 8 golden --init-from DIR --data FILE --steps 20`

#[path = "../tests/common/mod.rs"]
mod common;

use common::{Split, model};
use std::process::ExitCode;

fn main() -> ExitCode {
    let variable = |name: &str| std::env::var(name).ok();
    let number = |name: &str, default| {
        variable(name).map_or(default, |text| text.parse().expect("a whole number"))
    };
    let split = Split {
        tp: number("TP", 1),
        pp: number("PP", 1),
        dp: number("DP", 1),
        micro_batch: number("MICRO_BATCH", 1),
        sequence_parallel: variable("SP").is_some(),
        ..Split::default()
    };
    let model = model(&variable("CASE").unwrap_or_else(|| "llama_gqa".to_owned()));
    runtime::trainer::main::<f32>(&split.program(&model))
}
