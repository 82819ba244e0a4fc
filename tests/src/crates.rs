//! Crates of generated text, built outside the workspace.

use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Writes files by path below `folder`. Files that have this text already keep their time, so that
/// cargo does not build them again.
///
/// # Panics
/// A file cannot be written.
pub fn write_all<'a>(folder: &Path, files: impl IntoIterator<Item = (&'a str, &'a str)>) {
    for (path, text) in files {
        let path = folder.join(path);
        if std::fs::read_to_string(&path).is_ok_and(|known| known == text) {
            continue;
        }
        let parent = path.parent().expect("every file lies in a folder");
        std::fs::create_dir_all(parent).expect("folders can be made");
        std::fs::write(path, text).expect("files can be written");
    }
}

/// The runtime's directory, as generated crates name it.
pub fn runtime() -> String {
    let tests = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let root = tests.parent().expect("the tests lie in the workspace");
    root.join("runtime").display().to_string()
}

/// Crates in which training spends its time.
const OPTIMIZED: [&str; 4] = ["meshwright-kernels", "gemm", "gemm-common", "gemm-f64"];

/// Runs `cargo build` on a crate, with messages as JSON on stdout. All but the kernels is built
/// without optimization, which is faster than what it saves.
///
/// # Panics
/// Cargo cannot be started.
pub fn build(folder: &Path, target: &Path) -> Output {
    let optimized = OPTIMIZED.map(|name| format!("profile.dev.package.{name}.opt-level=2"));
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--quiet", "--message-format=json", "--manifest-path"])
        .arg(folder.join("Cargo.toml"))
        .args(optimized.iter().flat_map(|setting| ["--config", setting]))
        .env("CARGO_TARGET_DIR", target)
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env("CARGO_INCREMENTAL", "0")
        .env_remove("RUSTFLAGS")
        .output()
        .expect("cargo runs")
}

/// What the compiler says in a build.
fn messages(build: &Output) -> Vec<Value> {
    let lines = String::from_utf8_lossy(&build.stdout);
    let lines = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter_map(|line| line.get("message").cloned()).collect()
}

fn shown(message: &Value) -> String {
    message["rendered"].as_str().unwrap_or_default().to_owned()
}

/// The warnings of a build as the compiler shows them.
pub fn warnings(build: &Output) -> String {
    messages(build).iter().filter(|message| message["level"] == "warning").map(shown).collect()
}

/// The first error of a build as the compiler shows it, with the notes that follow.
pub fn first_error(build: &Output) -> Option<Vec<String>> {
    let messages = messages(build).into_iter();
    let mut messages = messages.skip_while(|message| message["level"] != "error");
    let error = shown(&messages.next()?);
    let notes = messages.take_while(|message| message["level"] == "note");
    Some(std::iter::once(error).chain(notes.map(|note| shown(&note))).collect())
}

/// The manifest of a crate of programs.
const MANIFEST: &str = r#"[package]
name = "trainers"
version = "0.1.0"
edition = "2024"

[dependencies]
runtime = { package = "meshwright-runtime", path = "RUNTIME" }

[workspace]
"#;

/// The manifest of a crate that holds several programs as modules.
pub fn manifest() -> String {
    MANIFEST.replace("RUNTIME", &runtime())
}

/// The files of one program as a module.
///
/// # Panics
/// Its `main.rs` is not as templates write it.
pub fn module(name: &str, files: BTreeMap<&'static str, String>) -> Vec<(String, String)> {
    let mut module = Vec::new();
    for (path, text) in files {
        let Some(path) = path.strip_prefix("src/") else { continue };
        let (path, text) = match path {
            "main.rs" => ("mod.rs", as_library(&text)),
            _ => (path, text),
        };
        let text = text.replace("crate::", &format!("crate::{name}::"));
        module.push((format!("src/{name}/{path}"), text));
    }
    module
}

/// `main.rs` without `main`, with a trainer that others see.
fn as_library(text: &str) -> String {
    let (before, _) = text.split_once("fn main()").expect("it has a main function");
    let text = before.replace("use std::process::ExitCode;\n", "");
    assert!(text.contains("\nstruct Trainer;"), "{text}");
    text.replace("\nstruct Trainer;", "\npub struct Trainer;")
}
