//! Ranks as processes over TCP, as `plan launch -n`, torchrun or srun start them: the numbers and the traffic of ranks as
//! threads, to the byte, and an end for all where one ends.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The trainer of golden cases, which cargo builds beside its tests.
fn golden(folder: &Path, steps: u64) -> Command {
    let here = std::env::current_exe().unwrap();
    let program = here.parent().and_then(Path::parent).unwrap().join("examples/golden");
    assert!(program.is_file(), "cargo build -p meshwright-runtime --example golden");
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/llama_gqa");
    let mut command = Command::new(program);
    command.envs([("CASE", "llama_gqa"), ("TP", "2"), ("PP", "2"), ("MICRO_BATCH", "2")]);
    command.arg("--init-from").arg(&data).arg("--data").arg(data.join("tokens.safetensors"));
    command.args(["--steps", &steps.to_string(), "--threads", "4"]);
    for (flag, file) in [("--metrics", "m"), ("--dump-weights", "w"), ("--rank-report", "r")] {
        command.arg(flag).arg(folder.join(file));
    }
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("processes-{name}"));
    let _new = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Process `rank` of four, which meet in a file.
fn process(folder: &Path, rank: usize, more: &[&str]) -> Child {
    let mut command = golden(folder, 3);
    command.envs([("RANK", rank.to_string()), ("LOCAL_RANK", rank.to_string())]);
    command.envs([("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4")]);
    command.arg("--rendezvous").arg(folder.join("meeting")).args(more);
    command.spawn().unwrap()
}

fn ended(child: Child) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    (status.code(), String::from_utf8_lossy(&stderr).into_owned())
}

const OTHERWISE: [&str; 6] = [
    "tokens_per_s",
    "model_flops_per_s",
    "resident_bytes",
    "peak_resident_bytes",
    "ranks_in_process",
    "process_memory",
];

/// Lines without what depends on the clock, or on how ranks are spread over processes.
fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    let timeless = |line: &str| {
        let mut value: Value = serde_json::from_str(line).unwrap();
        let object = value.as_object_mut().unwrap();
        object.retain(|key, _| !OTHERWISE.contains(&key.as_str()));
        value
    };
    text.lines().map(timeless).collect()
}

#[test]
fn processes_come_to_the_bytes_of_threads() {
    let (apart, together) = (folder("apart"), folder("together"));
    let processes: Vec<Child> = (0..4).rev().map(|rank| process(&apart, rank, &[])).collect();
    for child in processes {
        let (code, said) = ended(child);
        assert_eq!(code, Some(0), "{said}");
    }
    let (code, said) = ended(golden(&together, 3).spawn().unwrap());
    assert_eq!(code, Some(0), "{said}");
    for file in ["m", "r"] {
        assert_eq!(lines(&apart.join(file)), lines(&together.join(file)));
    }
    let weights = |folder: &Path| std::fs::read(folder.join("w")).unwrap();
    assert!(weights(&apart) == weights(&together));
    assert!(!apart.join("meeting").exists());
}

#[test]
fn a_process_that_does_not_come_is_named() {
    let folder = folder("missing");
    let limit = ["--time-limit-s", "1"];
    let processes: Vec<Child> = [0, 1, 3].map(|rank| process(&folder, rank, &limit)).into();
    for (n, child) in processes.into_iter().enumerate() {
        let (code, said) = ended(child);
        assert_eq!(code, Some(2), "{said}");
        match n {
            0 => assert!(said.contains("ranks [2] did not come to the address in"), "{said}"),
            _ => assert!(said.contains("cannot reach rank 0 at"), "{said}"),
        }
    }
}

#[test]
fn a_process_that_is_killed_ends_the_others() {
    let folder = folder("killed");
    let start = |rank| {
        let mut command = golden(&folder, 20);
        command.envs([("RANK", rank), ("WORLD_SIZE", "4"), ("LOCAL_RANK", rank)]);
        command.arg("--rendezvous").arg(folder.join("meeting"));
        command.spawn().unwrap()
    };
    let mut processes: Vec<Child> = ["0", "1", "2", "3"].map(start).into();
    let begun = Instant::now();
    while !folder.join("m").exists() && begun.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(5));
    }
    processes[2].kill().unwrap();
    let told: Vec<(Option<i32>, String)> = processes.into_iter().map(ended).collect();
    assert_eq!(told[2].0, None);
    for (rank, (code, said)) in told.iter().enumerate().filter(|(rank, _)| *rank != 2) {
        assert_eq!(*code, Some(1), "rank {rank}: {said}");
        assert!(said.contains("is gone") || said.contains("gave up"), "rank {rank}: {said}");
    }
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
}

#[test]
fn a_gpu_that_is_not_there_ends_all_processes() {
    if cfg!(feature = "cuda") {
        return;
    }
    let folder = folder("gpu");
    let processes: Vec<Child> = (0..4).map(|rank| process(&folder, rank, &["--gpu"])).collect();
    for child in processes {
        let (code, said) = ended(child);
        assert_ne!(code, Some(0), "{said}");
        assert!(said.contains("built without them: build it with the feature `cuda`"), "{said}");
    }
}

#[test]
fn processes_that_are_not_told_where_to_meet_say_so() {
    if cfg!(feature = "mpi") {
        return;
    }
    let mut command = golden(&folder("nowhere"), 3);
    command.envs([("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "4")]);
    let (code, said) = ended(command.spawn().unwrap());
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("srun started 4 processes") && said.contains("--rendezvous"), "{said}");
}
