//! A trainer's memory does not grow from step to step, for any split.
//!
//! Each run has a process of its own (or several), and the resident set is compared, so that
//! neither pools nor communicators escape.

mod trainer_runs;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use trainer_runs::{as_rank_of, json_lines, many_tokens};

/// A split: its name, and environment variables for `examples/golden.rs`.
type Split = (&'static str, &'static [(&'static str, &'static str)]);

/// Every kind of split, and everything that moves memory between ranks in its own way.
const SPLITS: [Split; 14] = [
    ("one rank", &[]),
    ("tp", &[("TP", "2")]),
    ("tp sp", &[("TP", "2"), ("SP", "1")]),
    ("pp", &[("PP", "2")]),
    ("dp", &[("DP", "2")]),
    ("tp pp", &[("TP", "2"), ("PP", "2")]),
    ("tp pp dp sp", &[("TP", "2"), ("PP", "2"), ("DP", "2"), ("SP", "1")]),
    ("chunks", &[("PP", "2"), ("VPP", "2"), ("SCHEDULE", "interleaved_1f1b")]),
    ("vocabulary", &[("PP", "2"), ("VOCAB", "parallel_1")]),
    ("vocabulary tp sp", &[("TP", "2"), ("PP", "2"), ("SP", "1"), ("VOCAB", "parallel_2")]),
    (
        "two copies",
        &[("TP", "2"), ("PP", "2"), ("VPP", "2"), ("SP", "1"), ("SCHEDULE", "dualpipe")],
    ),
    ("split backwards", &[("TP", "2"), ("PP", "2"), ("SP", "1"), ("SCHEDULE", "zb_h1")]),
    ("recompute", &[("TP", "2"), ("SP", "1"), ("RECOMPUTE", "full")]),
    (
        "post-validation",
        &[("TP", "2"), ("PP", "2"), ("POST_VALIDATION", "1"), ("SCHEDULE", "zb_h1")],
    ),
];

/// How much larger a process may be at the end than after its first steps.
const FLAT: f64 = 1.02;

/// How much the resident set of a short run of a tiny model varies: threads come and go, and the
/// allocator gives each an arena. Leaks found by this test were 2 to 100 times as large.
const VARIES_BYTES: u64 = 1 << 20;

/// A tiny model whose tensors are larger than that variation.
const SMALL: &str = "name: small\nlayers: 4\nhidden: 64\nheads: 4\nkv_heads: 2\nffn: 176\n\
    vocab: 8192\nseq_len: 32\nglobal_batch: 8\n";

/// The kinds of layers of gpt2_124m, but small.
const GPT2: &str = "name: gpt2\nlayers: 4\nhidden: 64\nheads: 4\nffn: 256\nvocab: 8192\n\
    activation: gelu\nnorm: layer_norm\npositions: learned\nmax_positions: 64\n\
    tied_embeddings: true\nbias: true\ndropout: 0.1\nseq_len: 32\nglobal_batch: 8\n";

fn folder(name: &str) -> PathBuf {
    trainer_runs::folder(&format!("resident-{}", name.replace(' ', "-")))
}

/// A run with this split.
fn trainer(folder: &Path, split: &Split, steps: u64) -> Command {
    let mut command = trainer_runs::trainer();
    command.envs(split.1.iter().copied()).arg("--data").arg(many_tokens(folder));
    command.args(["--steps", &steps.to_string(), "--threads", "2", "--metrics"]);
    command.arg(folder.join("metrics")).stderr(Stdio::piped());
    command
}

/// Resident bytes of the largest process, by step.
fn resident_bytes(folder: &Path, processes: Vec<Child>, steps: u64) -> Vec<u64> {
    for process in processes {
        let output = process.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let lines = json_lines(&folder.join("metrics")).into_iter();
    let bytes: Vec<u64> = lines.map(|line| line["resident_bytes"].as_u64().unwrap()).collect();
    assert_eq!(bytes.len() as u64, steps);
    bytes
}

/// Ranks as threads of one process.
fn threads(split: &Split, steps: u64, model: Option<&str>) -> Vec<u64> {
    let folder = folder(&format!("{} {steps}", split.0));
    let mut command = trainer(&folder, split, steps);
    use_model(&folder, &mut command, model);
    resident_bytes(&folder, vec![command.spawn().unwrap()], steps)
}

/// Eight ranks as processes over TCP.
fn processes(split: &Split, steps: u64, model: &str) -> Vec<u64> {
    let folder = folder(&format!("{} {steps} tcp", split.0));
    let start = |rank: usize| {
        let mut command = trainer(&folder, split, steps);
        use_model(&folder, &mut command, Some(model));
        as_rank_of(&mut command, rank, 8);
        command.arg("--rendezvous").arg(folder.join("meeting")).spawn().unwrap()
    };
    resident_bytes(&folder, (0..8).map(start).collect(), steps)
}

fn use_model(folder: &Path, command: &mut Command, model: Option<&str>) {
    if let Some(text) = model {
        let path = folder.join("model.yaml");
        std::fs::write(&path, text).unwrap();
        command.env("MODEL", path);
    }
}

/// Prints what each run held, and fails if one grew: if the maximum in the last tenth of its steps
/// exceeds the maximum in the tenth after the warm-up by more than is allowed, and either half of
/// the steps between them has its part in that. A leak grows all the time. Threads that happen to
/// need their most at once make a process larger once.
fn check(runs: impl Iterator<Item = (String, Vec<u64>)>, warm_up: usize, varies_bytes: u64) {
    let mut grown = Vec::new();
    for (name, bytes) in runs {
        let tenth = (bytes.len() / 10).max(1);
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        let end = bytes.len() - tenth;
        let most = |from: usize| *bytes[from..][..tenth].iter().max().unwrap() as f64;
        let [first, middle, last] = [warm_up, usize::midpoint(warm_up, end), end].map(most);
        let by_step: Vec<u64> = bytes.iter().step_by(tenth).map(|bytes| bytes >> 20).collect();
        let said = format!("{name}: {:.1} MiB -> {:.1} MiB", mib(first), mib(last));
        println!("{said}; every {tenth} steps: {by_step:?}");
        let allowed = (FLAT - 1.0) * first + varies_bytes as f64;
        let least_part = (middle - first).min(last - middle);
        if last - first > allowed && least_part > allowed / 4.0 {
            grown.push(said);
        }
    }
    assert!(grown.is_empty(), "these grew: {grown:#?}");
}

#[test]
fn a_short_run_of_every_split_stays_as_large_as_it_is() {
    let run = |split: &Split| (split.0.to_owned(), threads(split, 60, None));
    check(SPLITS.iter().map(run), 15, VARIES_BYTES);
}

#[test]
#[ignore = "minutes: make hostile"]
fn hostile_300_steps_of_every_split_stay_as_large_as_they_are() {
    let run = |split: &Split| (split.0.to_owned(), threads(split, 300, Some(SMALL)));
    check(SPLITS.iter().map(run), 60, 0);
}

#[test]
#[ignore = "minutes: make hostile"]
fn hostile_2000_steps_as_threads_and_as_processes_stay_as_large_as_they_are() {
    let settings = &[("TP", "2"), ("PP", "2"), ("DP", "2"), ("SP", "1")];
    let split: Split = ("gpt2", settings);
    let runs = [
        ("threads".to_owned(), threads(&split, 2000, Some(GPT2))),
        ("processes".to_owned(), processes(&split, 2000, GPT2)),
    ];
    check(runs.into_iter(), 200, 0);
}
