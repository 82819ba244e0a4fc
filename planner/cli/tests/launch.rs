//! `plan launch` passes each signal on to the trainer's processes once, and they end with it,
//! however it ends. It says what it builds and what it starts. A script stands in for the program
//! that cargo builds; it records what it was told and how it ended.

#![cfg(unix)]

mod cli_common;

use cli_common::{plan, scratch};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const RANKS: usize = 4;

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(30);

/// A little longer than the time in which signals count as one.
const ONE_REQUEST: Duration = Duration::from_millis(1100);

/// Stands in for a trainer: the first signal ends it in an orderly way, the second at once, and so
/// does the end of its input.
const TRAINER: &str = r#"#!/bin/sh
cd "$(dirname "$0")"
trap 'echo x >>"signals.$RANK"; [ "$(wc -l <"signals.$RANK")" -ge "${STUBBORN:-1}" ] && exit 130' TERM INT HUP
echo "$MESHWRIGHT_TOKEN" >"token.$RANK"
echo "$@" >"flags.$RANK"
env >"env.$RANK"
# A pipe for a standard input is read in the background, so that signals are heard at once.
exec 3<&0
[ "$MESHWRIGHT_ENDS_WITH_STDIN" = 1 ] && { read -r nothing <&3; touch "input.$RANK"; kill -TERM $$; } &
touch "runs.$RANK"
while :; do sleep 0.05; done
"#;

fn script(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// A folder from which [`TRAINER`] is launched.
fn trainer() -> PathBuf {
    let folder = scratch("trainer");
    let plan_file = scratch("plan.yaml").display().to_string();
    let made = plan(&format!("--model tiny --cluster laptop --gpus {RANKS} -o {plan_file}"));
    assert_eq!(made.code, 0, "{made:?}");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::copy(plan_file, folder.join("plan.yaml")).unwrap();
    std::fs::write(folder.join("Cargo.toml"), "").unwrap();
    script(&folder.join("trainer"), TRAINER);
    let executable = folder.join("trainer").display().to_string();
    let message = serde_json::json!({ "executable": executable });
    script(&folder.join("cargo"), &format!("#!/bin/sh\necho '{message}'\n"));
    folder
}

/// Starts `plan launch` and waits until all ranks run.
fn launched(folder: &Path, stubborn: u32) -> Child {
    let child = Command::new(env!("CARGO_BIN_EXE_plan"))
        .args(["launch", "-n", &RANKS.to_string()])
        .arg(folder)
        .env("CARGO", folder.join("cargo"))
        .env("STUBBORN", stubborn.to_string())
        // As under mpirun or srun.
        .envs([("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")])
        .envs([("PMI_RANK", "0"), ("PMI_SIZE", "1"), ("SLURM_PROCID", "0")])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("the ranks run", || all(folder, "runs").len() == RANKS);
    child
}

/// What the ranks have written to their files of this name.
fn all(folder: &Path, name: &str) -> Vec<String> {
    let files = (0..RANKS).map(|rank| folder.join(format!("{name}.{rank}")));
    files.filter_map(|file| std::fs::read_to_string(file).ok()).collect()
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status();
    assert!(sent.unwrap().success());
}

/// The exit code of `plan launch`, which is killed if it does not end.
fn code(mut child: Child) -> Option<i32> {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.kill().unwrap();
    panic!("still runs after {PATIENCE:?}");
}

#[test]
fn each_signal_ends_all_ranks() {
    for name in ["TERM", "HUP", "INT"] {
        let folder = trainer();
        let child = launched(&folder, 1);
        signal(&child, name);
        assert_eq!(code(child), Some(130), "{name}");
        assert_eq!(all(&folder, "signals"), ["x\n"; RANKS], "{name}");
    }
}

#[test]
fn a_second_signal_is_passed_on_too() {
    let folder = trainer();
    let mut child = launched(&folder, 2);
    signal(&child, "TERM");
    wait_until("a signal", || all(&folder, "signals") == ["x\n"; RANKS]);
    assert!(child.try_wait().unwrap().is_none());
    std::thread::sleep(ONE_REQUEST);
    signal(&child, "TERM");
    assert_eq!(code(child), Some(130));
    assert_eq!(all(&folder, "signals"), ["x\nx\n"; RANKS]);
}

/// `timeout` signals its child, and then the child's process group.
#[test]
fn signals_at_once_are_one_request() {
    let folder = trainer();
    let mut child = launched(&folder, 2);
    (0..5).for_each(|_| signal(&child, "TERM"));
    wait_until("a signal", || all(&folder, "signals") == ["x\n"; RANKS]);
    std::thread::sleep(ONE_REQUEST);
    assert!(child.try_wait().unwrap().is_none());
    assert_eq!(all(&folder, "signals"), ["x\n"; RANKS]);
    signal(&child, "TERM");
    assert_eq!(code(child), Some(130));
}

#[test]
fn ranks_that_do_not_end_at_once_are_ended() {
    let folder = trainer();
    let child = launched(&folder, 1000);
    signal(&child, "TERM");
    wait_until("a signal", || all(&folder, "signals") == ["x\n"; RANKS]);
    std::thread::sleep(ONE_REQUEST);
    signal(&child, "TERM");
    assert_eq!(code(child), Some(130));
}

#[test]
fn ranks_learn_that_their_launcher_was_killed() {
    let folder = trainer();
    let mut child = launched(&folder, 1);
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("the end of the input", || all(&folder, "input").len() == RANKS);
}

#[test]
fn ranks_meet_on_this_machine_with_a_token_of_this_run() {
    let tokens = [(); 2].map(|()| {
        let folder = trainer();
        let child = launched(&folder, 1);
        signal(&child, "TERM");
        assert_eq!(code(child), Some(130));
        for flags in all(&folder, "flags") {
            assert!(flags.starts_with("--rendezvous 127.0.0.1:"), "{flags}");
        }
        for (rank, env) in all(&folder, "env").iter().enumerate() {
            let has = |line: &str| env.lines().any(|of| of.starts_with(line));
            assert!(has(&format!("RANK={rank}")) && has("WORLD_SIZE=4"), "{env}");
            assert!(!["OMPI_", "PMI_", "SLURM_"].into_iter().any(has), "{env}");
        }
        let tokens = all(&folder, "token");
        assert!(tokens.iter().all(|token| *token == tokens[0]), "{tokens:?}");
        assert_eq!(tokens[0].trim().len(), 64);
        tokens[0].clone()
    });
    assert_ne!(tokens[0], tokens[1]);
}

/// Stands in for cargo: reports progress on standard error, and can build only with the network.
const CARGO: &str = r#"#!/bin/sh
echo "$@" >>"$(dirname "$0")/cargo.flags"
case "$*" in *--offline*) echo 'error: no matching package' >&2; exit 101; esac
echo '   Compiling trainer v0.1.0' >&2
"#;

/// Launches a trainer that ends at once; gives standard output and the lines of standard error.
fn said(folder: &Path, flags: &[&str]) -> (String, Vec<String>) {
    script(&folder.join("trainer"), "#!/bin/sh\necho trained\n");
    let (code, out, err) = output(launch(folder, flags).env("CARGO", folder.join("cargo")));
    assert_eq!(code, Some(0), "{err}");
    (out, err.lines().map(str::to_owned).collect())
}

fn launch(folder: &Path, flags: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plan"));
    command.arg("launch").arg(folder).args(flags).stdin(Stdio::null());
    command
}

/// Exit code, standard output and standard error.
fn output(command: &mut Command) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let [out, err] = [stdout, stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    (status.code(), out, err)
}

/// A folder whose trainer is built by [`CARGO`].
fn built_with_network() -> PathBuf {
    let folder = trainer();
    let path = folder.join("cargo");
    let message = std::fs::read_to_string(&path).unwrap();
    script(&path, &message.replacen("#!/bin/sh\n", CARGO, 1));
    folder
}

#[test]
fn a_launch_says_what_it_builds_and_what_it_starts() {
    let folder = built_with_network();
    let (_, without) = said(&folder, &[]);
    let note = format!("note: trainers need data: plan launch {} -- --data FILE", folder.display());
    assert_eq!(without[0], note);
    let (out, said) = said(&folder, &["--", "--data=tokens.bin"]);
    assert_eq!(out, "trained\n");
    assert_eq!(said[0], format!("building the trainer in {}", folder.display()));
    assert_eq!(said[1], "error: no matching package");
    assert_eq!(said[2], "it does not build without the network; building with it");
    assert_eq!(said[3], "   Compiling trainer v0.1.0");
    let took = said[4].strip_prefix("built in ").and_then(|took| took.strip_suffix(" s"));
    assert!(took.unwrap().parse::<f64>().unwrap() < PATIENCE.as_secs_f64(), "{said:?}");
    assert_eq!(said[5..], ["starting 4 ranks as threads of one process, on the CPU"]);
    let flags = std::fs::read_to_string(folder.join("cargo.flags")).unwrap();
    assert!(!flags.contains("quiet"), "cargo would show no progress: {flags}");
}

#[test]
fn a_launch_says_how_ranks_are_started() {
    let folder = trainer();
    let (out, over_tcp) = said(&folder, &["-n", "4"]);
    assert_eq!(out, "trained\n".repeat(RANKS));
    assert_eq!(over_tcp.last().unwrap(), "starting 4 ranks as processes over TCP, on CPUs");
    let (_, on_a_gpu) = said(&folder, &["--gpu"]);
    assert_eq!(on_a_gpu.last().unwrap(), "starting 4 ranks as threads of one process, on one GPU");
    let (_, on_gpus) = said(&folder, &["-n", "4", "--gpu"]);
    let expected = "starting 4 ranks as processes over TCP and NCCL, each on a GPU of its own";
    assert_eq!(on_gpus.last().unwrap(), expected);
    // A trainer needs no plan beside it.
    std::fs::remove_file(folder.join("plan.yaml")).unwrap();
    let (_, without_plan) = said(&folder, &[]);
    assert_eq!(
        without_plan.last().unwrap(),
        "starting ranks as threads of one process, on the CPU"
    );
}

#[test]
fn a_rank_that_was_killed_is_named() {
    let folder = trainer();
    script(
        &folder.join("trainer"),
        "#!/bin/sh\n[ \"$RANK\" = 2 ] && kill -KILL $$\nsleep 0.2\nexit 1\n",
    );
    let mut command = launch(&folder, &["-n", "4"]);
    let (code, _, said) = output(command.env("CARGO", folder.join("cargo")));
    assert_eq!(code, Some(1), "{said}");
    let line = "\nerror: rank 2 was ended by signal 9 (SIGKILL; out of memory?)\n";
    assert_eq!(said.matches("was ended").count(), 1, "{said}");
    assert!(said.contains(line), "{said}");
}

#[test]
fn a_plan_that_no_gpu_trains_is_refused_before_it_is_built() {
    let folder = trainer();
    let path = folder.join("plan.yaml");
    let text = std::fs::read_to_string(&path).unwrap();
    let dtype = text.lines().find(|line| line.trim().starts_with("dtype: ")).unwrap();
    std::fs::write(&path, text.replace(dtype, "  dtype: f64")).unwrap();
    let mut command = launch(&folder, &["--gpu", "--", "--data=tokens.bin"]);
    let (code, _, said) = output(command.env("CARGO", folder.join("cargo")));
    assert_eq!(code, Some(2), "{said}");
    let refused = format!("error: --gpu: {} has dtype f64\n", path.display());
    assert!(said.starts_with(&refused) && !said.contains("building"), "{said}");
}

/// Cargo distinguishes packages by name and version alone, and takes the newer of two programs for
/// up to date.
#[test]
fn trainers_of_one_name_may_share_a_target_folder() {
    let target = scratch("target");
    let folders = ["a", "b"].map(|name| scratch("same").with_file_name(format!("same-{name}")));
    let write = |folder: &Path, says: &str| {
        std::fs::create_dir_all(folder.join("src")).unwrap();
        let manifest = "[package]\nname = \"trainer-same\"\nedition = \"2024\"\n[workspace]\n";
        std::fs::write(folder.join("Cargo.toml"), manifest).unwrap();
        let text = format!("fn main() {{ println!(\"{says}\"); }}\n");
        std::fs::write(folder.join("src/main.rs"), text).unwrap();
    };
    let says = |folder: &Path| {
        let mut command = launch(folder, &[]);
        let (code, out, said) = output(command.env("CARGO_TARGET_DIR", &target));
        assert_eq!(code, Some(0), "{said}");
        (out.trim().to_owned(), said.contains("Compiling"))
    };
    let of = |text: &str, built| (text.to_owned(), built);
    for (folder, text) in folders.iter().zip(["a", "b"]) {
        write(folder, text);
    }
    assert_eq!(says(&folders[0]), of("a", true));
    assert_eq!(says(&folders[1]), of("b", true));
    assert_eq!(says(&folders[0]), of("a", false));
    write(&folders[1], "b, edited");
    assert_eq!(says(&folders[1]), of("b, edited", true));
    assert_eq!(says(&folders[0]), of("a", false));
}
