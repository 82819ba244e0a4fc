//! The repository's own files as text: which there are, and what in them is code and what comment.

use std::path::{Path, PathBuf};

/// The root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().expect("the root exists")
}

/// A file below the root, as messages name it.
pub fn short(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).to_string_lossy().into_owned()
}

/// The text of a file.
///
/// # Panics
/// The file cannot be read or is not UTF-8.
pub fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Files below `folder` in a fixed order. Left out are hidden folders, cargo's build folders, and
/// workspaces of their own (trainers that somebody generated here).
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let built = |path: &Path| path.ends_with("target") || path.join("CACHEDIR.TAG").exists();
    let hidden =
        |path: &Path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
    let foreign = |path: &Path| path.join("Cargo.lock").exists();
    let (mut open, mut found) = (vec![folder.to_owned()], vec![]);
    while let Some(next) = open.pop() {
        for entry in std::fs::read_dir(&next).expect("folders can be read").flatten() {
            let path = entry.path();
            if path.is_dir() && !hidden(&path) && !built(&path) && !foreign(&path) {
                open.push(path);
            } else if path.is_file() {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// A line of a source file. Strings and characters are left out of the code.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Line {
    /// Code without strings and comments.
    pub code: String,
    /// The comment with its marks (`//`, `/*`), empty where there is none.
    pub comment: String,
}

/// What a scanner is inside of.
enum Inside {
    Code,
    LineComment,
    /// Nested this deep.
    BlockComment(usize),
    Text,
    /// A raw string that ends with a quote and this many `#`.
    RawText(usize),
}

/// Rust, C++ or CUDA source, line by line, with code and comments apart.
pub fn lines(source: &str) -> Vec<Line> {
    let text: Vec<char> = source.chars().collect();
    let (mut lines, mut line) = (vec![], Line::default());
    let (mut inside, mut at) = (Inside::Code, 0);
    while at < text.len() {
        let rest = &text[at..];
        if rest[0] == '\n' {
            if matches!(inside, Inside::LineComment) {
                inside = Inside::Code;
            }
            lines.push(std::mem::take(&mut line));
            at += 1;
            continue;
        }
        let (next, taken) = step(&inside, rest, line.code.chars().last());
        let piece = &rest[..taken];
        match (&inside, &next) {
            (Inside::LineComment | Inside::BlockComment(_), _)
            | (_, Inside::LineComment | Inside::BlockComment(_)) => line.comment.extend(piece),
            (Inside::Code, Inside::Code) if taken == 1 => line.code.extend(piece),
            _ => line.code.push(' '),
        }
        inside = next;
        at += taken;
    }
    lines.push(line);
    lines
}

/// What the scanner is inside of after the next piece, and how many characters that piece has.
fn step(inside: &Inside, rest: &[char], before: Option<char>) -> (Inside, usize) {
    let starts = |mark: &str| rest.iter().copied().take(mark.len()).eq(mark.chars());
    match *inside {
        Inside::LineComment => (Inside::LineComment, 1),
        Inside::BlockComment(depth) if starts("*/") && depth == 1 => (Inside::Code, 2),
        Inside::BlockComment(depth) if starts("*/") => (Inside::BlockComment(depth - 1), 2),
        Inside::BlockComment(depth) if starts("/*") => (Inside::BlockComment(depth + 1), 2),
        Inside::BlockComment(depth) => (Inside::BlockComment(depth), 1),
        Inside::Text if rest[0] == '\\' && rest.get(1).is_some_and(|c| *c != '\n') => {
            (Inside::Text, 2)
        }
        Inside::Text => (if rest[0] == '"' { Inside::Code } else { Inside::Text }, 1),
        Inside::RawText(hashes) => {
            let closes = rest[0] == '"' && rest[1..].iter().take(hashes).all(|c| *c == '#');
            if closes { (Inside::Code, 1 + hashes) } else { (Inside::RawText(hashes), 1) }
        }
        Inside::Code if starts("//") => (Inside::LineComment, 2),
        Inside::Code if starts("/*") => (Inside::BlockComment(1), 2),
        Inside::Code if rest[0] == '"' => (Inside::Text, 1),
        Inside::Code => code(rest, before),
    }
}

/// Raw strings, characters (not lifetimes), and any other character of code.
fn code(rest: &[char], before: Option<char>) -> (Inside, usize) {
    let in_word = before.is_some_and(|c| c.is_alphanumeric() || c == '_');
    if rest[0] == 'r' && (!in_word || before == Some('b')) {
        let hashes = rest[1..].iter().take_while(|c| **c == '#').count();
        if rest.get(1 + hashes) == Some(&'"') {
            return (Inside::RawText(hashes), 2 + hashes);
        }
    }
    if rest[0] == '\'' && rest.get(1) == Some(&'\\') {
        let end = rest.iter().skip(3).take(10).position(|c| *c == '\'');
        return (Inside::Code, end.map_or(1, |end| end + 4));
    }
    if rest[0] == '\'' && rest.get(2) == Some(&'\'') {
        return (Inside::Code, 3);
    }
    (Inside::Code, 1)
}
