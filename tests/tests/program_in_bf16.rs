//! A generated program in bf16 builds, and trains on the CPU to the losses of PyTorch's one rank in
//! f64, within what bf16 rounds away.
#![cfg(feature = "thorough")]

use codegen::{RuntimeSource, generate};
use meshwright_tests::crates::{build, first_error, runtime, write_all};
use meshwright_tests::golden::{folder as golden, planned_on};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

const CASE: &str = "llama_gqa";
const STEPS: usize = 3;
/// Largest relative difference of a loss: bf16 has eight bits.
const TOLERANCE: f64 = 2e-3;
/// Losses in f32 differ by less.
const ROUNDED: f64 = 1e-6;

/// Builds the program in a folder of its own; returns that of what was built.
fn built(folder: &Path) -> PathBuf {
    let settings = [
        "tp=2",
        "pp=1",
        "cp=1",
        "dp=2",
        "zero_stage=3",
        "dp_shard=2",
        "micro_batch=2",
        "sequence_parallel=true",
        "dtype=bf16",
    ];
    let plan = planned_on("dgx_h100", CASE, 4, 8, &settings);
    let text = plan.to_yaml().expect("plans can be written");
    let files = generate(&plan, &text, &RuntimeSource::Path(runtime())).expect("it can be trained");
    write_all(folder, files.iter().map(|(path, text)| (*path, text.as_str())));
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("unoptimized");
    let output = build(folder, &target);
    let error = first_error(&output).unwrap_or_default().concat();
    assert!(output.status.success(), "{error}{}", String::from_utf8_lossy(&output.stderr));
    target.join("debug/trainer-llama-gqa")
}

/// Losses of a run.
fn losses(trainer: &Path, metrics: &Path) -> Vec<f64> {
    // A run appends to existing metrics.
    let _new = std::fs::remove_file(metrics);
    let status = Command::new(trainer)
        .arg("--init-from")
        .arg(golden(CASE))
        .arg("--data")
        .arg(golden(CASE).join("tokens.safetensors"))
        .args(["--steps", &STEPS.to_string(), "--metrics"])
        .arg(metrics)
        .status()
        .expect("it was built");
    assert!(status.success(), "{status}");
    let lines = std::fs::read_to_string(metrics).expect("the trainer wrote it");
    let loss = |line: &str| {
        let line: Value = serde_json::from_str(line).expect("a JSON line");
        line["loss"].as_f64().expect("a number")
    };
    lines.lines().map(loss).collect()
}

#[test]
fn a_program_in_bf16_trains_to_the_losses_of_f64() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("trainer-bf16");
    let found = losses(&built(&folder), &folder.join("run.jsonl"));
    let expected = std::fs::read_to_string(golden(CASE).join("expected.json")).expect("it is here");
    let expected: Value = serde_json::from_str(&expected).expect("it is JSON");
    let expected = expected["trajectory"]["loss_f64"].as_array().expect("20 losses");
    assert_eq!(found.len(), STEPS);
    let off = |(found, expected): (&f64, &Value)| {
        (found / expected.as_f64().expect("a number") - 1.0).abs()
    };
    let most = found.iter().zip(expected).map(off).fold(0.0, f64::max);
    println!("{found:?}, off by {most:e}");
    assert!((ROUNDED..=TOLERANCE).contains(&most), "{found:?} are off by {most:e}");
}
