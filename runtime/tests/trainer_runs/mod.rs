//! Runs of the trainer of golden cases (`examples/golden.rs`): its command line, its files, and its
//! processes, started as a launcher would.

#![allow(dead_code)] // each test is a program of its own and uses a part of this

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Longer than any of these runs takes.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A temporary directory of one test, removed when dropped.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("meshwright-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Names of all files in it, sorted.
    pub fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name();
        let mut names: Vec<_> = entries.map(|e| name(e).into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A new, empty directory below cargo's, which stays after the test.
pub fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("runs-{name}"));
    let _new = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// The trainer of golden cases, which cargo builds beside its tests.
pub fn trainer() -> Command {
    let here = std::env::current_exe().unwrap();
    let program = here.parent().and_then(Path::parent).unwrap().join("examples/golden");
    assert!(program.is_file(), "cargo build -p meshwright-runtime --example golden");
    Command::new(program)
}

/// The golden case's directory: its weights.
pub fn golden_data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/llama_gqa")
}

/// The golden case's tokens.
pub fn golden_tokens() -> PathBuf {
    golden_data().join("tokens.safetensors")
}

/// A run of the golden case from its weights on four ranks, `tp = pp = 2`.
pub fn golden(folder: &Path, steps: u64) -> Command {
    let mut command = golden_on(folder, steps, &golden_tokens());
    command.arg("--init-from").arg(golden_data());
    command
}

/// The same on other data, from weights drawn from the seed.
pub fn golden_on(folder: &Path, steps: u64, data: &Path) -> Command {
    let mut command = trainer();
    command.envs([("CASE", "llama_gqa"), ("TP", "2"), ("PP", "2"), ("MICRO_BATCH", "2")]);
    command.arg("--data").arg(data);
    command.args(["--steps", &steps.to_string(), "--threads", "4"]);
    for (flag, file) in [("--metrics", "m"), ("--dump-weights", "w"), ("--rank-report", "r")] {
        command.arg(flag).arg(folder.join(file));
    }
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Writes tokens as one document of Megatron's format, `.bin` and `.idx`; gives the `.bin`. Such
/// data can be read for any number of steps.
pub fn write_indexed(folder: &Path, tokens: impl ExactSizeIterator<Item = u16>) -> PathBuf {
    let count = tokens.len() as i32;
    let bin: Vec<u8> = tokens.flat_map(u16::to_le_bytes).collect();
    let mut index = b"MMIDIDX\0\0".to_vec();
    index.extend(1_u64.to_le_bytes());
    // 8: 16 bits a token.
    index.push(8);
    index.extend([1_u64, 2].map(u64::to_le_bytes).concat());
    index.extend(count.to_le_bytes());
    index.extend([0_u64, 0, 1].map(u64::to_le_bytes).concat());
    std::fs::write(folder.join("tokens.idx"), index).unwrap();
    std::fs::write(folder.join("tokens.bin"), bin).unwrap();
    folder.join("tokens.bin")
}

/// 4,096 tokens of all ids of the golden case.
pub fn endless_tokens(folder: &Path) -> PathBuf {
    write_indexed(folder, (0..4096_u32).map(|n| (n * 7919 % 515) as u16))
}

/// 20,000 arbitrary tokens, all below 500.
pub fn many_tokens(folder: &Path) -> PathBuf {
    write_indexed(folder, (0..20_000_u32).map(|n| (n * n % 7919 % 500) as u16))
}

/// Makes a command process `rank` of `world` on one machine.
pub fn as_rank_of(command: &mut Command, rank: usize, world: usize) -> &mut Command {
    let (rank, world) = (rank.to_string(), world.to_string());
    command.env("RANK", &rank).env("LOCAL_RANK", &rank);
    command.env("WORLD_SIZE", &world).env("LOCAL_WORLD_SIZE", &world)
}

/// Makes a command process `rank` of four on one machine.
pub fn as_rank(command: &mut Command, rank: usize) -> &mut Command {
    as_rank_of(command, rank, 4)
}

/// Process `rank` of four, which meet in a file.
pub fn process(folder: &Path, rank: usize, more: &[&str]) -> Child {
    let mut command = golden(folder, 3);
    as_rank(&mut command, rank);
    command.arg("--rendezvous").arg(folder.join("meeting")).args(more);
    command.spawn().unwrap()
}

/// Waits for a process to end, up to [`PATIENCE`]; gives its exit code and standard error.
pub fn ended(child: Child) -> (Option<i32>, String) {
    ended_within(PATIENCE, child)
}

/// As [`ended`], with another limit.
pub fn ended_within(patience: Duration, mut child: Child) -> (Option<i32>, String) {
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() && begun.elapsed() < patience {
        std::thread::sleep(Duration::from_millis(10));
    }
    let in_time = child.try_wait().unwrap().is_some();
    child.kill().unwrap();
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&stderr).into_owned();
    assert!(in_time, "still runs after {patience:?}: {said}");
    (status.code(), said)
}

/// Waits until a condition holds.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The JSON objects of a file, one a line.
pub fn json_lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
}

/// Sends a process a signal: TERM, STOP, INT.
pub fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status();
    assert!(sent.unwrap().success(), "kill -{name} {}", child.id());
}

/// Keys whose values depend on the clock or on how ranks are spread over processes.
const VARYING: [&str; 13] = [
    "tokens_per_s",
    "model_flops_per_s",
    "step_s",
    "compute_s",
    "tp_s",
    "pp_s",
    "dp_s",
    "optimizer_s",
    "other_s",
    "resident_bytes",
    "peak_resident_bytes",
    "ranks_in_process",
    "process_memory",
];

/// The JSON objects of a file without [`VARYING`] keys.
pub fn comparable_lines(path: &Path) -> Vec<Value> {
    let mut lines = json_lines(path);
    for line in &mut lines {
        line.as_object_mut().unwrap().retain(|key, _| !VARYING.contains(&key.as_str()));
    }
    lines
}
