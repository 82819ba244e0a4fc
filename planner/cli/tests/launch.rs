//! `plan launch` passes each signal on to the trainer's processes once, and they end with it,
//! however it ends. A script stands in for the program that cargo builds; it records what it was
//! told and how it ended.

#![cfg(unix)]

mod cli_common;

use cli_common::{plan, scratch};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const RANKS: usize = 4;

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(30);

/// Stands in for a trainer: the first signal ends it in an orderly way, the second at once, and so
/// does the end of its input.
const TRAINER: &str = r#"#!/bin/sh
cd "$(dirname "$0")"
trap 'echo x >>"signals.$RANK"; [ "$(wc -l <"signals.$RANK")" -ge "${STUBBORN:-1}" ] && exit 130' TERM INT HUP
echo "$MESHWRIGHT_TOKEN" >"token.$RANK"
echo "$@" >"flags.$RANK"
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
    signal(&child, "TERM");
    assert_eq!(code(child), Some(130));
    assert_eq!(all(&folder, "signals"), ["x\nx\n"; RANKS]);
}

#[test]
fn ranks_that_do_not_end_at_once_are_ended() {
    let folder = trainer();
    let child = launched(&folder, 1000);
    signal(&child, "TERM");
    wait_until("a signal", || all(&folder, "signals") == ["x\n"; RANKS]);
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
        let tokens = all(&folder, "token");
        assert!(tokens.iter().all(|token| *token == tokens[0]), "{tokens:?}");
        assert_eq!(tokens[0].trim().len(), 64);
        tokens[0].clone()
    });
    assert_ne!(tokens[0], tokens[1]);
}
