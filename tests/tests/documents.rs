//! What a reader relies on in documents and comments: lines that fit, links that lead somewhere,
//! one meaning a word, and documents of a bearable length.

use meshwright_tests::sources::{files, lines, read, root, short};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Columns of a comment or a line of prose.
const COLUMNS: usize = 100;
/// Documents that are read from beginning to end, and the most lines that each may have.
const SHORT: [(&str, usize); 2] = [("ARCHITECTURE.md", 150), ("README.md", 150)];

/// A text for people: a comment's line, or one of prose.
struct Said {
    file: PathBuf,
    /// From 1.
    line: usize,
    text: String,
    /// Columns of the whole line, code before a comment among them.
    columns: usize,
}

impl Said {
    fn place(&self) -> String {
        format!("{}:{}", short(&self.file), self.line)
    }
}

/// How the comments of a file are marked; none in files that nobody writes by hand.
enum Marks {
    Slashes,
    Hash,
    Template,
    Markdown,
}

fn marks(file: &Path) -> Option<Marks> {
    let name = file.file_name()?.to_string_lossy();
    let ending = name.rsplit_once('.').map_or("", |(_, ending)| ending);
    match ending {
        "rs" | "cu" | "cuh" | "h" => Some(Marks::Slashes),
        "py" | "sh" => Some(Marks::Hash),
        "tera" => Some(Marks::Template),
        "md" => Some(Marks::Markdown),
        _ if name == "Makefile" => Some(Marks::Hash),
        _ => None,
    }
}

fn said_in(file: &Path) -> Vec<Said> {
    let Some(marks) = marks(file) else { return vec![] };
    let text = read(file);
    let texts: Vec<String> = match marks {
        Marks::Slashes => lines(&text).into_iter().map(|line| line.comment).collect(),
        Marks::Hash => text.lines().map(|line| begins_with(line, &["#"])).collect(),
        Marks::Template => text.lines().map(|line| begins_with(line, &["//", "{#", "#"])).collect(),
        Marks::Markdown => prose(&text),
    };
    let whole = text.lines().map(|line| match marks {
        Marks::Template => without_tags(line).chars().count(),
        _ => line.chars().count(),
    });
    let numbered = texts.into_iter().zip(whole).enumerate();
    let said = numbered.map(|(index, (text, columns))| Said {
        file: file.to_owned(),
        line: index + 1,
        text,
        columns,
    });
    said.filter(|said| !said.text.trim().is_empty()).collect()
}

/// The line if it is a comment, else nothing.
fn begins_with(line: &str, marks: &[&str]) -> String {
    let comment = marks.iter().any(|mark| line.trim_start().starts_with(mark));
    if comment { line.to_owned() } else { String::new() }
}

/// A line of a template without its tags, of which nobody knows how wide they are printed.
fn without_tags(line: &str) -> String {
    let next = |text: &str| ["{{", "{%"].iter().filter_map(|tag| text.find(tag)).min();
    let (mut kept, mut rest) = (String::new(), line);
    while let Some(at) = next(rest) {
        kept += &rest[..at];
        let end = if rest[at..].starts_with("{{") { "}}" } else { "%}" };
        rest = rest[at..].split_once(end).map_or("", |(_, after)| after);
    }
    kept + rest
}

/// Markdown with the lines of tables and code emptied.
fn prose(text: &str) -> Vec<String> {
    let (mut fenced, mut indented, mut blank) = (false, false, true);
    let mut prose = vec![];
    for line in text.lines() {
        let fence = line.trim_start().starts_with("```");
        indented = line.starts_with("    ") && (blank || indented);
        blank = line.trim().is_empty();
        let table = line.trim_start().starts_with('|');
        let kept = !fenced && !fence && !indented && !table;
        prose.push(if kept { line.to_owned() } else { String::new() });
        fenced ^= fence;
    }
    prose
}

fn everything_said() -> Vec<Said> {
    files(&root()).iter().flat_map(|file| said_in(file)).collect()
}

fn documents() -> Vec<PathBuf> {
    files(&root()).into_iter().filter(|path| path.extension().is_some_and(|e| e == "md")).collect()
}

/// All of `found` in one failure, with what to do.
fn none(found: &[String], what_to_do: &str) {
    assert!(found.is_empty(), "{} places. {what_to_do}\n{}", found.len(), found.join("\n"));
}

// Lines.

/// Whether a line cannot be broken: a link, or a row of a table in a doc comment.
fn is_whole(text: &str) -> bool {
    let text = text.trim_start_matches(['/', '!', '*', '-', '#', ' ']);
    if text.starts_with('|') {
        return true;
    }
    let text = text.trim_end_matches(['.', ',', ';', ':', ')', '>', ' ']);
    let one_word = text.contains("://") && !text.contains(' ');
    let one_link = text.starts_with('[') && text.contains("](") && text.contains("://");
    one_word || one_link
}

#[test]
fn comments_and_prose_fit_in_a_line() {
    let long = |said: &Said| said.columns > COLUMNS && !is_whole(&said.text);
    let found: Vec<String> = everything_said()
        .iter()
        .filter(|said| long(said))
        .map(|said| format!("{}: {} columns", said.place(), said.columns))
        .collect();
    none(&found, &format!("Wrap comments and prose at {COLUMNS} columns:"));
}

#[test]
fn documents_that_are_read_whole_are_short() {
    let length = |name: &str| read(&root().join(name)).lines().count();
    let found: Vec<String> = SHORT
        .iter()
        .filter(|(name, most)| length(name) > *most)
        .map(|(name, most)| format!("{name}: {} lines, {most} at most", length(name)))
        .collect();
    none(&found, "Move details to docs/design, what was measured to docs/decisions:");
}

// Links.

/// Targets of `[text](target)` outside of code, with their lines.
fn links(file: &Path) -> Vec<(usize, String)> {
    let mut found = vec![];
    for (index, line) in linked_lines(&read(file)).iter().enumerate() {
        let mut rest = line.as_str();
        while let Some((_, after)) = rest.split_once("](") {
            let (target, after) = after.split_once(')').unwrap_or((after, ""));
            found.push((index + 1, target.to_owned()));
            rest = after;
        }
    }
    found
}

/// Markdown without fenced code and code in a line. Tables have links.
fn linked_lines(text: &str) -> Vec<String> {
    let mut fenced = false;
    let mut kept = vec![];
    for line in text.lines() {
        let fence = line.trim_start().starts_with("```");
        let code = fenced || fence || line.starts_with("    ");
        kept.push(if code { String::new() } else { without_code(line) });
        fenced ^= fence;
    }
    kept
}

/// A line without what stands between backticks.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join(" ")
}

/// Anchors that headings of a document have, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let mut anchors = BTreeSet::new();
    let mut fenced = false;
    for line in text.lines() {
        fenced ^= line.trim_start().starts_with("```");
        let heading = line.trim_start_matches('#');
        if fenced || !line.starts_with('#') || !heading.starts_with(' ') {
            continue;
        }
        let kept = heading.trim().to_lowercase();
        let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        let slug: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
        let times = seen.entry(slug.clone()).or_default();
        anchors.insert(if *times == 0 { slug } else { format!("{slug}-{times}") });
        *times += 1;
    }
    anchors
}

/// What is wrong with a link, if anything.
fn broken(file: &Path, target: &str) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let folder = file.parent().expect("documents lie in folders");
    let found = if path.is_empty() { file.to_owned() } else { folder.join(path) };
    if !found.exists() {
        return Some(format!("no file {path}"));
    }
    let known = anchor.is_empty() || anchors(&read(&found)).contains(anchor);
    (!known).then(|| format!("no heading #{anchor} in {}", short(&found)))
}

#[test]
fn relative_links_resolve() {
    let mut found = vec![];
    for file in documents() {
        for (line, target) in links(&file) {
            if let Some(why) = broken(&file, &target) {
                found.push(format!("{}:{line}: ({target}): {why}", short(&file)));
            }
        }
    }
    none(&found, "Links that lead nowhere; name a file or heading that exists:");
}

/// Documents that a comment names by their path: `docs/design/search.md`.
#[test]
fn documents_named_in_comments_exist() {
    let mut found = vec![];
    for said in everything_said() {
        let words = said.text.split(|c: char| !(c.is_alphanumeric() || "/_-.".contains(c)));
        let named = words.map(|word| word.trim_end_matches('.'));
        let named = named.filter(|word| word.starts_with("docs/") && word.ends_with(".md"));
        for missing in named.filter(|word| !root().join(word).exists()) {
            found.push(format!("{}: no file {missing}", said.place()));
        }
    }
    none(&found, "Comments that name no document:");
}

// Words.

/// A word, or a few in a row, that has another meaning where it is looked for.
struct Homonym {
    /// Lower case, with no `s` of the plural.
    words: &'static str,
    /// Files and folders it is looked for in; everywhere if empty.
    places: &'static [&'static str],
    /// Words that make it clear where one of them stands right before.
    unless_after: &'static [&'static str],
    say: &'static str,
}

const EVERYWHERE: &[&str] = &[];
const SEARCH: &[&str] = &["planner/src/search", "planner/src/bounds", "docs/design/search.md"];
/// Kernels have lanes of vectors and of warps; elsewhere nothing is a lane.
const NO_LANES: &[&str] = &["codegen", "docs/design", "models/src", "planner", "runtime/src"];

const HOMONYMS: &[Homonym] = &[
    homonym("pipeline device", EVERYWHERE, &[], "pipeline rank"),
    homonym("device of the pipeline", EVERYWHERE, &[], "pipeline rank"),
    homonym("devices of the pipeline", EVERYWHERE, &[], "pipeline ranks"),
    homonym("devices of a pipeline", EVERYWHERE, &[], "pipeline ranks"),
    homonym("chunk a device", EVERYWHERE, &[], "chunk per pipeline rank"),
    homonym("chunks a device", EVERYWHERE, &[], "chunks per pipeline rank"),
    homonym("there twice", EVERYWHERE, &[], "bidirectional, or two copies of each stage"),
    homonym("node", SEARCH, NODES, "parallel layout, search node, or host"),
    homonym("schedule", &["runtime/src/trainer/lr_schedule.rs"], RATES, "learning-rate schedule"),
    homonym("schedule of learning rate", EVERYWHERE, &[], "learning-rate schedule"),
    homonym("lane", NO_LANES, LANES, "collective thread, queue thread, or track (of a trace)"),
];
const NODES: &[&str] = &["search", "search-tree", "tree", "graph", "host", "per"];
const RATES: &[&str] = &["learning-rate", "lr"];
const LANES: &[&str] = &["vector", "simd", "warp"];

const fn homonym(
    words: &'static str,
    places: &'static [&'static str],
    unless_after: &'static [&'static str],
    say: &'static str,
) -> Homonym {
    Homonym { words, places, unless_after, say }
}

/// The words of a text, lower case, each with its line. Code in backticks is no word. Where a
/// sentence or a comment ends stands an empty word.
fn words(said: &[Said]) -> Vec<(String, usize)> {
    let mut words = vec![];
    for (index, line) in said.iter().enumerate() {
        if index > 0 && said[index - 1].line + 1 != line.line {
            words.push((String::new(), index));
        }
        for word in without_code(&line.text).to_lowercase().split_whitespace() {
            let ends = word.ends_with(['.', ',', ';', ':', ')']);
            let bare = word.trim_matches(|c: char| !c.is_alphanumeric());
            let bare = bare.strip_suffix("'s").or(bare.strip_suffix("’s")).unwrap_or(bare);
            if !bare.is_empty() {
                words.push((bare.to_owned(), index));
            }
            if ends {
                words.push((String::new(), index));
            }
        }
    }
    words
}

impl Homonym {
    fn looks_at(&self, file: &str) -> bool {
        self.places.is_empty() || self.places.iter().any(|place| Path::new(file).starts_with(place))
    }

    /// Places in `words` where it begins.
    fn found_in(&self, words: &[(String, usize)]) -> Vec<usize> {
        let wanted: Vec<&str> = self.words.split(' ').collect();
        let last = wanted.len() - 1;
        let same = |at: usize, (index, wanted): (usize, &&str)| {
            let word = words[at + index].0.as_str();
            word == *wanted || (index == last && word.strip_suffix('s') == Some(wanted))
        };
        let fits = |at: &usize| wanted.iter().enumerate().all(|pair| same(*at, pair));
        let before = |at: usize| at.checked_sub(1).map_or("", |before| words[before].0.as_str());
        let meant = |at: &usize| !self.unless_after.contains(&before(*at));
        (0..words.len().saturating_sub(last)).filter(fits).filter(meant).collect()
    }
}

#[test]
fn words_have_one_meaning() {
    let mut found = vec![];
    for file in files(&root()) {
        // The glossary says which words are not used, and must name them.
        let name = short(&file);
        if name == "docs/glossary.md" || file.ends_with("documents.rs") {
            continue;
        }
        let said = said_in(&file);
        let words = words(&said);
        for homonym in HOMONYMS.iter().filter(|homonym| homonym.looks_at(&name)) {
            for at in homonym.found_in(&words) {
                let place = said[words[at].1].place();
                found.push(format!("{place}: \"{}\": say {}", homonym.words, homonym.say));
            }
        }
    }
    none(&found, "Words with another meaning (docs/glossary.md, \"Words with one meaning\"):");
}

// The glossary.

/// Terms that a glossary defines, lower case, with their lines: headings of terms, and what is in
/// bold at the beginning of an entry.
fn terms(text: &str) -> Vec<(String, usize)> {
    let mut terms = vec![];
    for (index, line) in text.lines().enumerate() {
        let entry = line.trim_start_matches(['-', '*', ' ']);
        let bold = line.starts_with("- **") || line.starts_with("**");
        if let Some((term, _)) = entry.split_once("**").filter(|_| bold) {
            let names = term.split(", ").map(|name| name.trim().to_lowercase());
            terms.extend(names.map(|name| (name.replace('`', ""), index + 1)));
        } else if let Some(heading) = line.strip_prefix("### ") {
            terms.push((heading.trim().to_lowercase(), index + 1));
        }
    }
    terms
}

#[test]
fn a_term_is_defined_once() {
    let file = root().join("docs/glossary.md");
    let mut first: BTreeMap<String, usize> = BTreeMap::new();
    let mut found = vec![];
    for (term, line) in terms(&read(&file)) {
        if let Some(before) = first.insert(term.clone(), line) {
            found.push(format!("{}:{line}: \"{term}\", already in line {before}", short(&file)));
        }
    }
    assert!(
        first.len() > 50,
        "the glossary has {} terms: is it read as it is written?",
        first.len()
    );
    none(&found, "Terms defined twice; join their entries:");
}
