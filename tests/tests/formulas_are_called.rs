//! `models::formulas` holds nothing that only tests call, found from the sources.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const FORMULAS: &str = "models/src/formulas";
/// Where product code lies.
const PRODUCT: [&str; 5] = ["models/src", "planner", "codegen/src", "runtime/src", "kernels/src"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Every Rust source under a folder but those of tests.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("folders can be read").flatten() {
        let path = entry.path();
        let name = entry.file_name();
        if path.is_dir() && !["tests", "benches", "target"].iter().any(|skipped| name == *skipped) {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// A file's code: no comments, and nothing from its test module on.
fn code(path: &Path) -> String {
    let text = std::fs::read_to_string(path).expect("sources can be read");
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let lines = code.lines().map(|line| line.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

/// The identifiers of some code.
fn words(code: &str) -> BTreeSet<String> {
    let apart = code.split(|c: char| !(c.is_alphanumeric() || c == '_'));
    apart.filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// What the formulas declare for others, with the identifiers of each declaration. A declaration
/// ends where the next one begins; private ones belong to the public one before them.
fn declared(code: &str, found: &mut BTreeMap<String, BTreeSet<String>>) {
    let starts = ["pub fn ", "pub const ", "pub struct ", "pub enum "];
    let mut name = None;
    for line in code.lines() {
        let declares = starts.iter().find_map(|start| line.trim_start().strip_prefix(start));
        if let Some(rest) = declares {
            let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_'));
            name = Some(rest[..end.unwrap_or(rest.len())].to_owned());
        }
        if let Some(name) = &name {
            found.entry(name.clone()).or_default().extend(words(line));
        }
    }
}

#[test]
fn every_formula_is_called_by_product_code() {
    let formulas = root().join(FORMULAS);
    let mut files = Vec::new();
    sources(&formulas, &mut files);
    let mut formula_words = BTreeMap::new();
    files.iter().for_each(|path| declared(&code(path), &mut formula_words));
    assert!(formula_words.len() > 10, "the formulas are found: {formula_words:?}");

    let mut files = Vec::new();
    PRODUCT.iter().for_each(|folder| sources(&root().join(folder), &mut files));
    files.retain(|path| !path.starts_with(&formulas));
    let users = files.iter().map(|path| code(path)).filter(|code| code.contains("formulas"));
    let product: BTreeSet<String> = users.flat_map(|code| words(&code)).collect();

    let mut called: BTreeSet<&str> = BTreeSet::new();
    let mut open: Vec<&str> =
        formula_words.keys().map(String::as_str).filter(|name| product.contains(*name)).collect();
    while let Some(name) = open.pop() {
        if called.insert(name) {
            let used = formula_words.keys().map(String::as_str);
            open.extend(used.filter(|other| formula_words[name].contains(*other)));
        }
    }
    let idle: Vec<&str> =
        formula_words.keys().map(String::as_str).filter(|name| !called.contains(name)).collect();
    assert!(idle.is_empty(), "only tests call {idle:?} of {FORMULAS}");
}
