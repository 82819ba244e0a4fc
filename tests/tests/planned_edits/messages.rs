//! What the compiler says of an edit, and what is kept of it.

use super::edit::Edit;
use meshwright_tests::crates::first_error;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The first error, the same on every machine.
pub fn message(build: &Output) -> Option<String> {
    Some(first_error(build)?.iter().map(|part| plain(part)).collect())
}

/// The message without what differs between machines: paths of the machine, and line numbers of
/// the library and the compiler.
fn plain(rendered: &str) -> String {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("there is one");
    let text = rendered.replace(&format!("{}/", workspace.display()), "");
    // `/rustc/COMMIT/library/..`
    let text = match text.split_once("/rustc/").and_then(|(_, rest)| rest.split_once('/')) {
        Some((commit, _)) => text.replace(&format!("/rustc/{commit}/"), ""),
        None => text,
    };
    let (mut own, mut lines) = (true, Vec::new());
    // Where the compiler leaves the full names of types.
    let leaves =
        |line: &&str| line.contains("full name for the type") || line.contains("--verbose");
    for line in text.lines().filter(|line| !leaves(line)) {
        let Some((left, right)) = gutter(line) else {
            lines.push(line.to_owned());
            continue;
        };
        let (number, mark) = (left.trim(), right.split(' ').next().unwrap_or_default());
        if matches!(mark, "-->" | ":::") {
            own = right[mark.len()..].trim_start().starts_with("src/");
        }
        let place = matches!(mark, "-->" | ":::") && !own;
        let right = if place { right.split(".rs:").next().unwrap_or(right) } else { right };
        let end = if place { ".rs" } else { "" };
        let number = if own { number } else { "" };
        lines.push(format!("{number:>4} {right}{end}").trim_end().to_owned());
    }
    lines.join("\n").trim_end().to_owned() + "\n"
}

/// A line number, if any, and what stands right of it.
fn gutter(line: &str) -> Option<(&str, &str)> {
    let right = line.trim_start_matches(|c: char| c == ' ' || c.is_ascii_digit());
    let left = &line[..line.len() - right.len()];
    let begins = ["|", "-->", ":::", "= "].iter().any(|mark| right.starts_with(mark));
    (begins && !left.is_empty()).then_some((left, right))
}

/// The edit as a difference, then the message.
fn shown(edit: &Edit, message: &str) -> String {
    let (mut text, mut last) = (String::new(), "");
    for (path, from, to) in edit.replacements {
        if *path != last {
            text += &format!("src/{path}\n");
        }
        last = path;
        for (mark, part) in [('-', from), ('+', to)] {
            text.extend(part.lines().map(|line| format!("{mark} {}\n", line.trim())));
        }
    }
    text + "\n" + message
}

/// The compiler whose messages are kept.
fn compiler() -> String {
    let output = Command::new("rustc").arg("--version").output().expect("rustc runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split(' ').take(2).collect::<Vec<_>>().join(" ") + "\n"
}

/// What is kept of an edit's message.
pub struct Messages {
    folder: PathBuf,
    update: bool,
    /// Whether this compiler's words are kept. Of others only what a message must say is checked.
    comparable: bool,
}

impl Messages {
    pub fn open() -> Self {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("edits");
        let update = std::env::var_os("UPDATE_SNAPSHOTS").is_some();
        let version = folder.join("compiler.txt");
        if update {
            std::fs::create_dir_all(&folder).expect("folders can be made");
            std::fs::write(&version, compiler()).expect("snapshots can be written");
        }
        let comparable = std::fs::read_to_string(version).is_ok_and(|known| known == compiler());
        Self { folder, update, comparable }
    }

    /// What is wrong with the build of an edit.
    pub fn problems(&self, edit: &Edit, build: &Output) -> Vec<String> {
        let name = edit.name;
        let Some(found) = message(build).filter(|_| !build.status.success()) else {
            return vec![format!("{name} compiles")];
        };
        let short = found.replace("runtime::layers::", "");
        let missing = edit.says.iter().filter(|phrase| !short.contains(**phrase));
        let mut problems: Vec<String> =
            missing.map(|phrase| format!("{name} does not say `{phrase}`:\n{found}")).collect();
        let (path, text) = (self.folder.join(format!("{name}.txt")), shown(edit, &found));
        if self.update {
            std::fs::write(&path, &text).expect("snapshots can be written");
        }
        if self.comparable && std::fs::read_to_string(&path).unwrap_or_default() != text {
            problems.push(format!(
                "the message of {name} changed:\n{text}\nAccept it with\n  UPDATE_SNAPSHOTS=1 \
                 cargo test -p meshwright-tests --features slow --test planned_edits"
            ));
        }
        problems
    }
}
