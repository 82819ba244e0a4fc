//! Ranks as processes: the trainer of golden cases, started as a launcher would.

#![allow(dead_code)] // each test is a program of its own and uses a part of this

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Longer than anything here takes.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The trainer of golden cases, which cargo builds beside its tests.
pub fn golden(folder: &Path, steps: u64) -> Command {
    let data = golden_data();
    let mut command = golden_on(folder, steps, &data.join("tokens.safetensors"));
    command.arg("--init-from").arg(&data);
    command
}

/// Weights and tokens of the golden case.
pub fn golden_data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/llama_gqa")
}

/// The same on other data, and with weights of its own.
pub fn golden_on(folder: &Path, steps: u64, data: &Path) -> Command {
    let here = std::env::current_exe().unwrap();
    let program = here.parent().and_then(Path::parent).unwrap().join("examples/golden");
    assert!(program.is_file(), "cargo build -p meshwright-runtime --example golden");
    let mut command = Command::new(program);
    command.envs([("CASE", "llama_gqa"), ("TP", "2"), ("PP", "2"), ("MICRO_BATCH", "2")]);
    command.arg("--data").arg(data);
    command.args(["--steps", &steps.to_string(), "--threads", "4"]);
    for (flag, file) in [("--metrics", "m"), ("--dump-weights", "w"), ("--rank-report", "r")] {
        command.arg(flag).arg(folder.join(file));
    }
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// 4,096 tokens without end: one document of Megatron's format.
pub fn endless_tokens(folder: &Path) -> PathBuf {
    let tokens = (0..4096_u64).flat_map(|n| ((n * 7919 % 515) as u16).to_le_bytes());
    std::fs::write(folder.join("tokens.bin"), tokens.collect::<Vec<u8>>()).unwrap();
    let mut index = b"MMIDIDX\0\0".to_vec();
    index.extend(1_u64.to_le_bytes());
    index.push(8);
    [1_u64, 2].iter().for_each(|n| index.extend(n.to_le_bytes()));
    index.extend(4096_i32.to_le_bytes());
    [0_i64, 0, 1].iter().for_each(|n| index.extend(n.to_le_bytes()));
    std::fs::write(folder.join("tokens.idx"), index).unwrap();
    folder.join("tokens.bin")
}

pub fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("processes-{name}"));
    let _new = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Makes a command process `rank` of four on one machine.
pub fn as_rank(command: &mut Command, rank: usize) -> &mut Command {
    command.envs([("RANK", rank.to_string()), ("LOCAL_RANK", rank.to_string())]);
    command.envs([("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4")])
}

/// Process `rank` of four, which meet in a file.
pub fn process(folder: &Path, rank: usize, more: &[&str]) -> Child {
    let mut command = golden(folder, 3);
    as_rank(&mut command, rank);
    command.arg("--rendezvous").arg(folder.join("meeting")).args(more);
    command.spawn().unwrap()
}

/// Waits for its end, but not for ever: its exit code, and what it said.
pub fn ended(mut child: Child) -> (Option<i32>, String) {
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() && begun.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(10));
    }
    let in_time = child.try_wait().unwrap().is_some();
    child.kill().unwrap();
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&stderr).into_owned();
    assert!(in_time, "still runs after {PATIENCE:?}: {said}");
    (status.code(), said)
}

/// Waits until something holds.
pub fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Sends a process a signal: TERM, STOP, INT.
pub fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status();
    assert!(sent.unwrap().success(), "kill -{name} {}", child.id());
}

const OTHERWISE: [&str; 6] = [
    "tokens_per_s",
    "model_flops_per_s",
    "resident_bytes",
    "peak_resident_bytes",
    "ranks_in_process",
    "process_memory",
];

/// Lines without what depends on the clock.
pub fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    let timeless = |line: &str| {
        let mut value: Value = serde_json::from_str(line).unwrap();
        let object = value.as_object_mut().unwrap();
        object.retain(|key, _| !OTHERWISE.contains(&key.as_str()));
        value
    };
    text.lines().map(timeless).collect()
}
