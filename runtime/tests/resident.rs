//! A trainer's memory does not grow from step to step, however the model is split.
//!
//! Each run is a process of its own (or several), and what is compared is its resident set, so that
//! nothing escapes: neither what pools keep nor what communicators hold.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A way to split a model: a name, and what `examples/golden.rs` is told.
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
    ("two copies", &[("TP", "2"), ("PP", "2"), ("VPP", "2"), ("SP", "1"), ("SCHEDULE", "dualpipe")]),
    ("split backwards", &[("TP", "2"), ("PP", "2"), ("SP", "1"), ("SCHEDULE", "zb_h1")]),
    ("recompute", &[("TP", "2"), ("SP", "1"), ("RECOMPUTE", "full")]),
    ("post-validation", &[("TP", "2"), ("PP", "2"), ("POST_VALIDATION", "1"), ("SCHEDULE", "zb_h1")]),
];

/// How much more a process may hold at the end than behind its first steps.
const FLAT: f64 = 1.02;

fn folder(name: &str) -> PathBuf {
    let name = format!("resident-{}", name.replace(' ', "-"));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _new = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Tokens of no meaning, all below 500, as Megatron's `.bin` and `.idx`.
fn write_tokens(folder: &Path) -> PathBuf {
    const TOKENS: u64 = 20_000;
    let tokens = (0..TOKENS).map(|i| (i * i % 7919 % 500) as u16);
    let bin: Vec<u8> = tokens.flat_map(u16::to_le_bytes).collect();
    let mut idx = b"MMIDIDX\0\0".to_vec();
    idx.extend(1u64.to_le_bytes());
    // 8: 16 bits a token; one document, which is all of them.
    idx.push(8);
    idx.extend([1u64, 2].map(u64::to_le_bytes).concat());
    idx.extend((TOKENS as i32).to_le_bytes());
    idx.extend([0u64, 0, 1].map(u64::to_le_bytes).concat());
    std::fs::write(folder.join("tokens.idx"), idx).unwrap();
    std::fs::write(folder.join("tokens.bin"), bin).unwrap();
    folder.join("tokens.bin")
}

/// The trainer of golden cases, which cargo builds beside its tests.
fn trainer(folder: &Path, split: &Split, steps: u64) -> Command {
    let here = std::env::current_exe().unwrap();
    let program = here.parent().and_then(Path::parent).unwrap().join("examples/golden");
    let mut command = Command::new(program);
    command.envs(split.1.iter().copied()).arg("--data").arg(write_tokens(folder));
    command.args(["--steps", &steps.to_string(), "--threads", "2", "--metrics"]);
    command.arg(folder.join("metrics")).stderr(Stdio::piped());
    command
}

/// Resident bytes of the process with most, by step.
fn resident_bytes(folder: &Path, processes: Vec<Child>, steps: u64) -> Vec<u64> {
    for process in processes {
        let output = process.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let text = std::fs::read_to_string(folder.join("metrics")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let bytes: Vec<u64> = lines.map(|line| line["resident_bytes"].as_u64().unwrap()).collect();
    assert_eq!(bytes.len() as u64, steps);
    bytes
}

/// Ranks as threads of one process.
fn threads(split: &Split, steps: u64) -> Vec<u64> {
    let folder = folder(&format!("{} {steps}", split.0));
    let process = trainer(&folder, split, steps).spawn().unwrap();
    resident_bytes(&folder, vec![process], steps)
}

/// The most in a tenth of the run behind the warm-up, and in the last tenth, MiB; and whether the
/// second is no more than [`FLAT`] times the first.
fn compare(bytes: &[u64], warm_up: usize) -> (f64, f64, bool) {
    let tenth = bytes.len().div_ceil(10);
    let most = |part: &[u64]| part.iter().copied().max().unwrap() as f64 / f64::from(1 << 20);
    let (first, last) = (most(&bytes[warm_up..][..tenth]), most(&bytes[bytes.len() - tenth..]));
    (first, last, last <= FLAT * first)
}

/// Says what each run held, and fails where one grew.
fn check(runs: impl Iterator<Item = (String, Vec<u64>)>, warm_up: usize) {
    let mut grown = Vec::new();
    for (name, bytes) in runs {
        let (first, last, flat) = compare(&bytes, warm_up);
        let tenth = (bytes.len() / 10).max(1);
        let by_step = bytes.iter().step_by(tenth).map(|bytes| bytes >> 20).collect::<Vec<_>>();
        println!("{name:18} {first:7.1} MiB -> {last:7.1} MiB  every {tenth} steps: {by_step:?}");
        if !flat {
            grown.push(format!("{name}: {first:.1} MiB -> {last:.1} MiB"));
        }
    }
    assert!(grown.is_empty(), "these grew: {grown:#?}");
}

#[test]
fn a_short_run_of_every_split_stays_as_large_as_it_is() {
    let run = |split: &Split| (split.0.to_owned(), threads(split, 60));
    check(SPLITS.iter().map(run), 15);
}
