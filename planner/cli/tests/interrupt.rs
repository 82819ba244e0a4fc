//! Ctrl-C during a search: the best plan so far is printed, with what is proven about it.
#![cfg(unix)]

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn an_interrupted_search_prints_the_best_so_far() {
    // A request whose integer programs take about twenty seconds.
    let words = "--model llama8b --cluster selene --gpus 16384 --set tp=4 --set pp=16 --top 0";
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
