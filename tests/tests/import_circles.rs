//! No circle of imports between the modules of a crate, found from the sources.
//!
//! A node of the graph is a file; an edge says that a file names something of another by `use` or
//! by a path. A name that a module only hands on (`pub use`) leads to the file that defines it.
//! Files of one top-level folder may need one another: a circle counts where it leaves the folder.
//! Tests inside sources are left out.

use meshwright_tests::sources::{Line, files, lines, read, root, short};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A path of names from the root of its crate: `["cost", "gemm"]`.
type Names = Vec<String>;

/// A file of a crate.
#[derive(Default)]
struct Module {
    /// Names that stand for a path elsewhere in the crate.
    imports: BTreeMap<String, Names>,
    /// Paths that the file names.
    paths: BTreeSet<Names>,
}

type Modules = BTreeMap<Names, Module>;
type Edges = BTreeMap<Names, BTreeSet<Names>>;

/// Folders of sources of every crate in the workspace.
fn crates() -> Vec<PathBuf> {
    let roots = files(&root())
        .into_iter()
        .filter(|path| path.ends_with("src/lib.rs") || path.ends_with("src/main.rs"));
    let folders: BTreeSet<PathBuf> =
        roots.filter_map(|path| path.parent().map(Path::to_owned)).collect();
    folders.into_iter().collect()
}

/// The module that a file holds: `cost/gemm.rs` and `cost/gemm/mod.rs` are `cost::gemm`.
fn module_of(file: &Path, src: &Path) -> Names {
    let path = file.strip_prefix(src).expect("it lies in there").with_extension("");
    let mut names: Names =
        path.components().map(|part| part.as_os_str().to_string_lossy().into_owned()).collect();
    if names.last().is_some_and(|last| matches!(last.as_str(), "mod" | "lib" | "main")) {
        names.pop();
    }
    names
}

/// The code of a file in one line each, up to its tests.
fn code(text: &str) -> String {
    let all = lines(text);
    let tests = |pair: &[Line]| {
        pair[0].code.trim() == "#[cfg(test)]" && pair[1].code.trim_start().starts_with("mod tests")
    };
    let end = all.windows(2).position(tests).unwrap_or(all.len());
    all[..end].iter().map(|line| line.code.as_str()).collect::<Vec<_>>().join("\n")
}

/// Words (`crate`, `cost_s`) and marks (`::`, `{`), in order.
fn tokens(code: &str) -> Vec<String> {
    let mut tokens: Vec<String> = vec![];
    let mut joined = false;
    for c in code.chars() {
        let word = c.is_alphanumeric() || c == '_';
        let more = joined
            && tokens.last().is_some_and(|last| {
                if word {
                    last.ends_with(|l: char| l.is_alphanumeric() || l == '_')
                } else {
                    last == ":" && c == ':'
                }
            });
        match tokens.last_mut() {
            Some(last) if more => last.push(c),
            _ if c.is_whitespace() => {}
            _ => tokens.push(c.to_string()),
        }
        joined = !c.is_whitespace();
    }
    tokens
}

/// A path from the crate's root. `crate`, `self` and `super` are resolved; a path that begins with
/// a module beside or below `here` is one of ours; any other belongs to another crate.
fn absolute(path: &[String], here: &[String], known: &BTreeSet<Names>) -> Option<Names> {
    let mut from = here.to_vec();
    let mut rest = path;
    match path.first().map(String::as_str)? {
        "crate" => {
            from.clear();
            rest = &path[1..];
        }
        "self" => rest = &path[1..],
        "super" => {}
        first => {
            from.push(first.to_owned());
            if !known.contains(&from) {
                return None;
            }
            rest = &path[1..];
        }
    }
    while rest.first().is_some_and(|name| name == "super") {
        from.pop();
        rest = &rest[1..];
    }
    from.extend(rest.iter().cloned());
    Some(from)
}

/// The paths of a `use`, with the name that each has here. `at` is behind the word `use`.
fn tree(tokens: &[String], at: &mut usize, prefix: &[String], found: &mut Vec<(Names, String)>) {
    let mut path = prefix.to_vec();
    let mut name = None;
    while let Some(token) = tokens.get(*at) {
        match token.as_str() {
            "::" => {}
            "{" => {
                *at += 1;
                while tokens.get(*at).is_some_and(|token| token != "}" && token != ";") {
                    tree(tokens, at, &path, found);
                    if tokens.get(*at).is_some_and(|token| token == ",") {
                        *at += 1;
                    }
                }
                *at += 1;
                return;
            }
            "as" => {
                *at += 1;
                name = tokens.get(*at).cloned();
            }
            "," | "}" | ";" => break,
            "self" if !path.is_empty() => {}
            word => path.push(word.to_owned()),
        }
        *at += 1;
    }
    let name = name.or_else(|| path.last().cloned()).unwrap_or_default();
    found.push((path, name));
}

/// What a file imports and names.
fn parse(text: &str, here: &[String], known: &BTreeSet<Names>) -> Module {
    let tokens = tokens(&code(text));
    let mut module = Module::default();
    let mut at = 0;
    while at < tokens.len() {
        let import = tokens[at] == "use" && tokens.get(at + 1).is_some_and(|next| next != "<");
        if import {
            at += 1;
            let public = at >= 2 && (tokens[at - 2] == "pub" || tokens[at - 2] == ")");
            let mut found = vec![];
            tree(&tokens, &mut at, &[], &mut found);
            for (path, name) in found {
                let Some(path) = absolute(&path, here, known) else { continue };
                if !public {
                    module.paths.insert(path.clone());
                }
                module.imports.insert(name, path);
            }
        } else if matches!(tokens[at].as_str(), "crate" | "super") {
            let mut path = vec![tokens[at].clone()];
            while tokens.get(at + 1).is_some_and(|token| token == "::")
                && tokens
                    .get(at + 2)
                    .is_some_and(|t| t.starts_with(|c: char| c.is_alphabetic() || c == '_'))
            {
                path.push(tokens[at + 2].clone());
                at += 2;
            }
            if path.len() > 1 {
                module.paths.extend(absolute(&path, here, known));
            }
        }
        at += 1;
    }
    module
}

fn modules(src: &Path) -> Modules {
    let sources: Vec<PathBuf> = files(src)
        .into_iter()
        .filter(|path| path.extension().is_some_and(|end| end == "rs"))
        .filter(|path| !path.starts_with(src.join("bin")))
        .collect();
    let known: BTreeSet<Names> = sources.iter().map(|path| module_of(path, src)).collect();
    let parsed = sources.iter().map(|path| {
        let here = module_of(path, src);
        let module = parse(&read(path), &here, &known);
        (here, module)
    });
    parsed.collect()
}

/// The file that defines what `path` names: imports are followed, as often as there are modules.
fn defined_in(path: &[String], modules: &Modules) -> Option<Names> {
    let mut path = path.to_vec();
    for _ in 0..=modules.len() {
        let depth = (0..=path.len()).rev().find(|depth| modules.contains_key(&path[..*depth]))?;
        let module = &modules[&path[..depth]];
        match path.get(depth).and_then(|name| module.imports.get(name)) {
            Some(elsewhere) if *elsewhere != path[..=depth] => {
                path = elsewhere.iter().chain(&path[depth + 1..]).cloned().collect();
            }
            _ => return Some(path[..depth].to_vec()),
        }
    }
    None
}

fn edges(modules: &Modules) -> Edges {
    let needs = |(here, module): (&Names, &Module)| {
        let found = module.paths.iter().filter_map(|path| defined_in(path, modules));
        (here.clone(), found.filter(|file| file != here).collect())
    };
    modules.iter().map(needs).collect()
}

/// Everything that can be reached from a module.
fn reached<'a>(from: &'a Names, edges: &'a Edges) -> BTreeSet<&'a Names> {
    let (mut open, mut seen) = (vec![from], BTreeSet::new());
    while let Some(next) = open.pop() {
        for needed in edges.get(next).into_iter().flatten() {
            if seen.insert(needed) {
                open.push(needed);
            }
        }
    }
    seen
}

/// Groups of files that reach one another and lie in more than one top-level folder. The crate's
/// root is left out: it hands names on.
fn circles(edges: &Edges) -> Vec<BTreeSet<&Names>> {
    let reach: BTreeMap<&Names, BTreeSet<&Names>> =
        edges.keys().map(|from| (from, reached(from, edges))).collect();
    let groups: BTreeSet<BTreeSet<&Names>> = reach
        .iter()
        .map(|(from, all)| all.iter().copied().filter(|to| reach[*to].contains(*from)).collect())
        .collect();
    let tops = |group: &BTreeSet<&Names>| {
        group.iter().filter_map(|names| names.first()).collect::<BTreeSet<_>>().len()
    };
    groups.into_iter().filter(|group| tops(group) > 1).collect()
}

/// The edges of a circle that leave a top-level folder, as they are printed.
fn ways(group: &BTreeSet<&Names>, edges: &Edges) -> String {
    let mut text = String::new();
    for from in group {
        for to in edges[*from].iter().filter(|to| group.contains(to) && to.first() != from.first())
        {
            text += &format!("    {} -> {}\n", from.join("::"), to.join("::"));
        }
    }
    text
}

#[test]
fn no_crate_has_a_circle_of_imports() {
    let mut found = String::new();
    for src in crates() {
        let edges = edges(&modules(&src));
        for group in circles(&edges) {
            found += &format!("  {}:\n{}", short(&src), ways(&group, &edges));
        }
    }
    assert!(
        found.is_empty(),
        "import circles; move what both sides need below them, or what needs both above:\n{found}"
    );
}

#[test]
fn every_crate_of_the_workspace_is_looked_at() {
    let found: BTreeSet<String> = crates().iter().map(|src| short(src)).collect();
    for name in ["codegen", "kernels", "models", "planner", "runtime"] {
        assert!(found.contains(&format!("{name}/src")), "{name}/src is not among {found:?}");
    }
}

/// Three files of an invented crate: `text` of modules by name.
fn invented(texts: &[(&str, &str)]) -> Edges {
    let names = |name: &str| -> Names {
        name.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect()
    };
    let known: BTreeSet<Names> = texts.iter().map(|(name, _)| names(name)).collect();
    let parsed = texts.iter().map(|(name, text)| (names(name), parse(text, &names(name), &known)));
    edges(&parsed.collect())
}

#[test]
fn a_circle_is_found_through_nested_imports_and_names_that_are_handed_on() {
    let found = invented(&[
        ("", "mod a; mod b; pub use b::inner::Deep;"),
        ("a", "use crate::{Deep, other::{self}};"),
        ("b", "mod inner;"),
        ("b::inner", "/* use crate::a */ fn f() { super::super::a::g(\"crate::c\"); }"),
    ]);
    assert_eq!(circles(&found).len(), 1, "{found:?}");
}

#[test]
fn files_of_one_folder_may_need_one_another() {
    let found = invented(&[
        ("", "mod a;"),
        ("a", "mod inner; use inner::Deep; pub struct Shallow;"),
        ("a::inner", "use super::Shallow; #[cfg(test)]\nmod tests { use crate::a; }"),
    ]);
    assert!(circles(&found).is_empty(), "{found:?}");
}
