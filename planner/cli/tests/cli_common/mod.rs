//! Runs the program as a user does.

#![allow(dead_code, reason = "every test binary uses some of it")]

use serde_json::Value;
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The result of a run.
pub struct Run {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Run {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

impl std::fmt::Debug for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "exit code {}\n--- stdout\n{}\n--- stderr\n{}", self.code, self.out, self.err)
    }
}

/// Runs `plan` with words separated by blanks.
pub fn plan(words: &str) -> Run {
    plan_with(words, &[])
}

/// The same with bytes on standard input.
pub fn plan_with(words: &str, input: &[u8]) -> Run {
    run_plan(words.split_whitespace().map(OsString::from), input)
}

/// The same with words that may contain blanks. A search that says nothing of time goes on to its
/// end: how far it gets in a second depends on what else the machine does. `--prove` would go on
/// over every cut.
pub fn run_plan(words: impl IntoIterator<Item = OsString>, input: &[u8]) -> Run {
    let mut words: Vec<OsString> = words.into_iter().collect();
    let has = |name: &str| words.iter().any(|word| word.to_string_lossy().starts_with(name));
    let asked = has("--model") || has("--from");
    let searches = has("explain") || (asked && !has("generate") && !has("validate"));
    if searches && !has("--time-limit") && !has("--prove") && !has("--help") {
        words.extend(["--time-limit", "1000000"].map(OsString::from));
    }
    let mut child = Command::new(env!("CARGO_BIN_EXE_plan"))
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that does not read its input closes the pipe.
    let _ = child.stdin.take().unwrap().write_all(input);
    let output = child.wait_with_output().unwrap();
    Run {
        code: output.status.code().unwrap_or(-1),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

/// A path for a file of one test; tests run in parallel.
pub fn scratch(name: &str) -> PathBuf {
    static MADE: AtomicUsize = AtomicUsize::new(0);
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let folder = folder.join(format!("{}_{number}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder.join(name)
}

/// Writes a file with this text and returns its path.
pub fn file(name: &str, text: &[u8]) -> String {
    let path = scratch(name);
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}
