//! Ctrl-C during a search: the best plan so far is printed, with what is proven about it.
#![cfg(unix)]

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What a plan itself tells is there before anything is searched, and each alternative as soon as
/// it was: whoever reads the first lines need not wait for the last.
#[test]
fn an_explanation_begins_before_it_has_searched() {
    let file = std::env::temp_dir().join(format!("explained-{}.yaml", std::process::id()));
    let program = || Command::new(env!("CARGO_BIN_EXE_plan"));
    let words = ["--model", "llama70b", "--gpus", "16384", "--time-limit", "5", "-o"];
    assert!(program().args(words).arg(&file).stdout(Stdio::null()).status().unwrap().success());
    let mut explaining =
        program().args(["explain", "--prove"]).arg(&file).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(explaining.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("ranks in ")));
    assert!(lines.any(|line| line.starts_with("alternatives: ")));
    assert!(lines.any(|line| line.starts_with("  tp ")));
    assert!(explaining.try_wait().unwrap().is_none(), "it goes on to search");
    explaining.kill().unwrap();
    explaining.wait().unwrap();
    std::fs::remove_file(file).unwrap();
}

#[test]
fn an_interrupted_search_prints_the_best_so_far() {
    // A request whose integer programs take about twenty seconds.
    let words = "--model llama8b --cluster selene --gpus 16384 --set tp=4 --set pp=16 --prove";
    let search = Command::new(env!("CARGO_BIN_EXE_plan"))
        .args(words.split(' '))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_secs(4));
    let asked = Instant::now();
    let sent = Command::new("kill").args(["-INT", &search.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let ended = search.wait_with_output().unwrap();
    let (out, said) = (
        String::from_utf8_lossy(&ended.stdout).into_owned(),
        String::from_utf8_lossy(&ended.stderr).into_owned(),
    );
    assert_eq!(ended.status.code(), Some(130), "{out}{said}");
    assert!(out.contains("\nplan       tp 4") && out.contains("\nproven     "), "{out}{said}");
    assert!(said.contains("interrupted: this is the best that was known"), "{said}");
    assert!(asked.elapsed() < Duration::from_secs(30), "{:?}", asked.elapsed());
}
