//! Ranks as processes over TCP, as `plan launch -n`, torchrun or srun start them: the same numbers
//! and traffic as ranks as threads, to the byte, and all end if one does.

mod trainer_runs;

use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use trainer_runs::{
    as_rank, comparable_lines, ended, endless_tokens, folder, golden, golden_data, golden_on,
    process, signal, wait_until,
};

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
        assert_eq!(comparable_lines(&apart.join(file)), comparable_lines(&together.join(file)));
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

/// Four processes in an endless training, once the first step is done.
fn training(name: &str, more: &[&str]) -> Vec<Child> {
    let folder = folder(name);
    let data = endless_tokens(&folder);
    let start = |rank| {
        let mut command = golden_on(&folder, 1_000_000, &data);
        as_rank(&mut command, rank).arg("--rendezvous").arg(folder.join("meeting")).args(more);
        command.spawn().unwrap()
    };
    let processes: Vec<Child> = (0..4).map(start).collect();
    let trains = || std::fs::metadata(folder.join("m")).is_ok_and(|file| file.len() > 0);
    wait_until("a first step", trains);
    processes
}

#[test]
fn a_process_that_is_killed_ends_the_others_which_name_it() {
    for killed in [0, 2] {
        let mut processes = training("killed", &[]);
        let begun = Instant::now();
        let named = format!("pid {}) is gone, seen by rank ", processes[killed].id());
        processes[killed].kill().unwrap();
        let told: Vec<(Option<i32>, String)> = processes.into_iter().map(ended).collect();
        assert_eq!(told[killed].0, None);
        for (rank, (code, said)) in told.iter().enumerate().filter(|(rank, _)| *rank != killed) {
            assert_eq!(*code, Some(1), "rank {rank}: {said}");
            assert!(said.contains(&format!("rank {killed} (host ")), "rank {rank}: {said}");
            assert!(said.contains(&named), "rank {rank}: {said}");
        }
        assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    }
}

#[test]
fn a_process_that_is_stopped_ends_the_others_at_the_time_limit() {
    let mut processes = training("stopped", &["--time-limit-s", "3"]);
    let begun = Instant::now();
    signal(&processes[3], "STOP");
    // Which rank they name depends on which one waits first: some wait for ranks that wait
    // themselves.
    for (code, said) in processes.drain(..3).map(ended) {
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("nothing from rank ") && said.contains(" (host "), "{said}");
    }
    processes[0].kill().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[test]
fn a_signal_to_one_process_ends_all_behind_the_same_step() {
    let processes = training("signal", &[]);
    signal(&processes[1], "INT");
    let told: Vec<(Option<i32>, String)> = processes.into_iter().map(ended).collect();
    let last = |said: &str| said.lines().last().unwrap().to_owned();
    for (code, said) in &told {
        assert_eq!(*code, Some(130), "{said}");
        assert!(said.contains("steps are done") && last(said) == last(&told[0].1), "{said}");
    }
}

#[test]
fn a_signal_while_others_are_missing_ends_a_process() {
    for rank in [0, 1] {
        let child = process(&folder(&format!("early{rank}")), rank, &[]);
        std::thread::sleep(Duration::from_millis(500));
        let begun = Instant::now();
        signal(&child, "TERM");
        let (code, said) = ended(child);
        assert_eq!(code, Some(130), "{said}");
        assert!(said.contains("interrupted"), "{said}");
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    }
}

#[test]
fn a_process_whose_launcher_has_ended_ends_behind_its_step() {
    let folder = folder("orphan");
    let mut command = golden_on(&folder, 1_000_000, &endless_tokens(&folder));
    let mut child =
        command.env("MESHWRIGHT_ENDS_WITH_STDIN", "1").stdin(Stdio::piped()).spawn().unwrap();
    wait_until("a first step", || {
        std::fs::metadata(folder.join("m")).is_ok_and(|file| file.len() > 0)
    });
    drop(child.stdin.take());
    let (code, said) = ended(child);
    assert_eq!(code, Some(130), "{said}");
    assert!(said.contains("the launcher has ended"), "{said}");
    assert!(folder.join("w").is_file());
}

/// Starts four processes, each with its own flags and variables: all must exit with 2 and print
/// `said`.
fn refuse_to_train(
    name: &str,
    told: impl Fn(usize) -> (Vec<String>, Vec<(&'static str, &'static str)>),
    parts: &[&str],
) {
    let folder = folder(name);
    let start = |rank| {
        let (flags, variables) = told(rank);
        let mut command = golden(&folder, 3);
        as_rank(&mut command, rank).arg("--rendezvous").arg(folder.join("meeting"));
        command.args(flags).envs(variables).spawn().unwrap()
    };
    let processes: Vec<Child> = (0..4).map(start).collect();
    for child in processes {
        let (code, said) = ended(child);
        assert_eq!(code, Some(2), "{said}");
        parts.iter().for_each(|part| assert!(said.contains(part), "no `{part}` in {said}"));
    }
    assert!(!folder.join("m").exists(), "trained");
}

#[test]
fn processes_that_were_told_differently_say_who_and_what() {
    let odd = |rank, usual: &str, odd: &str| if rank == 2 { odd } else { usual }.to_owned();
    let flags = |rank: usize| {
        (
            vec![
                "--seed".to_owned(),
                rank.to_string(),
                "--lr".to_owned(),
                odd(rank, "1e-3", "2e-3"),
            ],
            vec![],
        )
    };
    let said =
        ["--seed is 0 on rank 0 (host ", "--lr is 0.002 on rank 2 (host ", "but 0.001 on rank 0"];
    refuse_to_train("seeds", flags, &said);

    let plan = |rank: usize| (vec![], vec![("MICRO_BATCH", if rank == 3 { "1" } else { "2" })]);
    refuse_to_train("plans", plan, &["the trainer's plan is ", " on rank 3 (host "]);

    // One byte of the last token differs.
    let other = folder("other-data").join("tokens.safetensors");
    let mut bytes = std::fs::read(golden_data().join("tokens.safetensors")).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&other, bytes).unwrap();
    let init = |rank: usize| match rank {
        1 => (vec!["--trace".to_owned(), "/dev/null".to_owned()], vec![]),
        _ => (vec![], vec![]),
    };
    refuse_to_train(
        "trace",
        init,
        &["--trace is given on rank 1 (host ", "but not given on rank 0"],
    );
    let folder = folder("data");
    let start = |rank| {
        let usual = golden_data().join("tokens.safetensors");
        let data: &Path = if rank == 1 { &other } else { &usual };
        let mut command = golden_on(&folder, 3, data);
        as_rank(&mut command, rank).arg("--rendezvous").arg(folder.join("meeting"));
        command.spawn().unwrap()
    };
    for child in (0..4).map(start).collect::<Vec<_>>() {
        let (code, said) = ended(child);
        assert_eq!(code, Some(2), "{said}");
        assert!(
            said.contains("the data of --data is ") && said.contains("on rank 1 (host "),
            "{said}"
        );
    }
}

#[test]
fn variables_that_cannot_be_are_refused() {
    for (variables, said) in [
        (
            [("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "0")],
            "LOCAL_WORLD_SIZE is `0`",
        ),
        ([("RANK", "0"), ("WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", "1")], "WORLD_SIZE is `0`"),
        ([("RANK", "0"), ("WORLD_SIZE", "4"), ("MESHWRIGHT_TOKEN", "short")], "valid: 16 or more"),
    ] {
        let folder = folder("variables");
        let mut command = golden(&folder, 3);
        command.envs(variables).arg("--rendezvous").arg(folder.join("meeting"));
        let (code, text) = ended(command.spawn().unwrap());
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains(said), "{text}");
    }
}

#[test]
fn a_process_that_is_alone_has_nobody_to_meet() {
    for variables in [vec![], vec![("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")]] {
        let folder = folder("alone");
        let mut command = golden(&folder, 3);
        command.envs(variables).arg("--rendezvous").arg(folder.join("meeting"));
        let (code, said) = ended(command.spawn().unwrap());
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains("--rendezvous: this is the only process"), "{said}");
    }
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
