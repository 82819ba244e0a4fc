//! A lowered program as Rust: values for the templates, and imports for what they print.

mod bytes;
mod layer;
mod replicas;
mod stage;
mod statement;
mod text;
mod types;

pub use stage::Kind;

use crate::lower::{Block, Lowered};
use serde_json::{Value as Json, json};
use text::used;

/// What is printed, and what its layers hold.
pub struct Printer<'a> {
    /// The program.
    pub lowered: &'a Lowered,
    /// Bytes of an element of activations.
    pub element_bytes: u64,
}

impl Printer<'_> {
    /// Whether stages hold the vocabulary's layers.
    pub fn has_loss(&self) -> bool {
        self.lowered.shard.is_none()
    }

    /// The kinds of stage that occur, in model order.
    pub fn kinds(&self) -> Vec<Kind> {
        let stages = self.lowered.program.stages.len();
        let mut kinds: Vec<Kind> = (0..stages).map(|index| Kind::of(index, stages)).collect();
        kinds.dedup();
        kinds
    }

    /// The kinds of layer that occur.
    pub fn blocks(&self) -> Vec<Block> {
        self.lowered.layers.iter().map(|(block, _)| *block).collect()
    }

    /// The first layer of a kind that occurs.
    fn first_of(&self, block: Block) -> usize {
        let model = &self.lowered.program.model;
        (0..model.layers).find(|&index| Block::of(model, index) == block).unwrap_or(0)
    }

    /// The values of `layer.rs.tera` for a kind of layer.
    pub fn layer(&self, block: Block) -> Json {
        layer::layer(self, block)
    }

    /// The values of `stage.rs.tera` for each kind of stage.
    pub fn stage(&self, kind: Kind) -> Json {
        stage::stage(self, kind)
    }

    /// The statements that choose a stage's type.
    pub fn choose(&self) -> Vec<String> {
        let kinds = self.kinds();
        let construct = |kind: Kind| {
            let table = if kind.takes_table(self) { "table, " } else { "" };
            format!(
                "Box::new({}::{}::declare(index, {table}inventory))",
                kind.module(),
                kind.name()
            )
        };
        if let [kind] = kinds.as_slice() {
            return vec![construct(*kind)];
        }
        let arm = |&kind: &Kind| {
            let pattern = match kind {
                Kind::First => "0",
                Kind::Last => "LAST",
                _ => "_",
            };
            (kind == Kind::Middle, format!("    {pattern} => {},", construct(kind)))
        };
        let mut arms: Vec<(bool, String)> = kinds.iter().map(arm).collect();
        // The arm for all others comes last.
        arms.sort_by_key(|(others, _)| *others);
        let mut lines = vec!["const LAST: usize = plan::STAGES.len() - 1;".to_owned()];
        lines.push("match index {".to_owned());
        let has_others = arms.iter().any(|(others, _)| *others);
        lines.extend(arms.into_iter().map(|(_, line)| line));
        if !has_others {
            // Two kinds: what is not the first is the last.
            if let Some(line) = lines.last_mut() {
                *line = line.replacen("LAST =>", "_ =>", 1);
            }
            lines.remove(0);
        }
        lines.push("}".to_owned());
        lines
    }
}

/// The float as Rust writes it.
pub fn float(value: f64) -> String {
    stage::float(value)
}

/// Whether the last stage gets an earlier stage's token table.
pub fn last_takes_table(printer: &Printer<'_>) -> bool {
    printer.kinds().into_iter().any(|kind| kind.takes_table(printer))
}

/// Names in a generated `plan.rs` that other files may use.
const PLAN: [&str; 66] = [
    "ACTIVATION",
    "BIAS_UPDATE_RATE",
    "CAPACITY_FACTOR",
    "CHUNK",
    "FullChunk",
    "QueryChunk",
    "RowsChunk",
    "ScoresChunk",
    "SharedInnerChunk",
    "ValueHeadsChunk",
    "DEVIATION",
    "EXPERTS",
    "EXPERT_INNER",
    "SHARED_INNER",
    "SharedInner",
    "Full",
    "GROUP",
    "HEADS",
    "HEAD_DIM",
    "HIDDEN",
    "INNER",
    "Inner",
    "KEY_VALUE",
    "KEY_VALUE_BEHIND",
    "KeyValue",
    "KeyValueBehind",
    "KEY_VALUE_RANK",
    "KeyValueLatent",
    "LATENT_EPS",
    "Logits",
    "NORM_EPS",
    "POSITIONS",
    "PP",
    "Part",
    "QUERY",
    "QUERY_BEHIND",
    "QUERY_RANK",
    "QueryLatent",
    "ROTARY_DIM",
    "SharedKey",
    "UP",
    "UpProjected",
    "VALUE",
    "VALUE_BEHIND",
    "VALUE_DIM",
    "ValueHeads",
    "ValueHeadsBehind",
    "QueryBehind",
    "ULYSSES",
    "Query",
    "RECOMPUTE",
    "ROUTING",
    "ROWS",
    "Residual",
    "Rows",
    "STAGES",
    "STREAM_DEVIATION",
    "Scores",
    "TOKENS",
    "TP",
    "Tp",
    "VOCAB",
    "VOCAB_ROWS",
    "tp",
    "MICRO_BATCHES",
    "has_experts",
];

/// Marks where a template wants the names of `plan.rs` that it uses.
const USES_PLAN: &str = "use crate::plan::{};\n";

/// Fills in the names of `plan.rs` that a file uses, and removes imports that it does not use.
pub fn with_imports(text: &str) -> String {
    let text = &tidy(text);
    let mut body = text.clone();
    if let Some((before, after)) = text.split_once(USES_PLAN) {
        let mut names = used(&PLAN, after);
        // As rustfmt sorts: an underscore comes before letters.
        names.sort_by_key(|name| name.replace('_', " "));
        body = format!("{before}{}{after}", import("crate::plan", &names));
    }
    unused(&body)
}

/// `plan.rs` without constants and types that nothing uses. `others` are all other files.
pub fn without_unused(plan: &str, others: &str) -> String {
    let mut items = items(plan);
    loop {
        let texts: Vec<String> = items.iter().map(|(_, text)| text.clone()).collect();
        let before = items.len();
        let mut index = 0;
        items.retain(|(name, _)| {
            index += 1;
            let Some(name) = name else { return true };
            let rest = texts.iter().enumerate().filter(|(n, _)| n + 1 != index);
            let in_plan =
                rest.map(|(_, text)| text.as_str()).any(|text| !used(&[name], text).is_empty());
            in_plan || !used(&[name], others).is_empty()
        });
        if items.len() == before {
            return tidy(&items.into_iter().map(|(_, text)| text).collect::<String>());
        }
    }
}

/// The items of a file with documented items: the name of each that has one, and its text.
fn items(text: &str) -> Vec<(Option<String>, String)> {
    let mut items: Vec<(Option<String>, String)> = vec![(None, String::new())];
    let mut documented = false;
    for line in text.lines() {
        let begins = line.starts_with("///");
        let ends_item = line.is_empty() || line.starts_with("const _");
        if (begins && !documented) || ends_item {
            items.push((None, String::new()));
        }
        documented = begins;
        let mut words = line.split(|c: char| !(c.is_alphanumeric() || c == '_'));
        let named = match (words.next(), words.next(), words.next()) {
            (Some("pub"), Some("const" | "type" | "fn"), Some(name)) => Some(name),
            (Some("const" | "type"), Some(name), _) if name != "_" => Some(name),
            _ => None,
        };
        if let Some((name, text)) = items.last_mut() {
            if let (None, Some(named)) = (&name, named) {
                *name = Some(named.to_owned());
            }
            text.push_str(line);
            text.push('\n');
        }
    }
    items
}

/// Without blanks at the end of lines, blank lines before a closing brace, and second blank lines.
fn tidy(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    let closes = |n: usize| lines.get(n + 1).is_none_or(|next| next.trim_start().starts_with('}'));
    let follows = |n: usize| n > 0 && lines[n - 1].is_empty();
    let kept = lines
        .iter()
        .enumerate()
        .filter(|&(n, line)| !line.is_empty() || !(closes(n) || follows(n)));
    kept.map(|(_, line)| format!("{line}\n")).collect()
}

/// Imports of single names and lists, without those that nothing after them uses.
fn unused(text: &str) -> String {
    let mut kept = Vec::new();
    for line in text.lines() {
        let list = line.strip_prefix("use ").and_then(|line| line.strip_suffix(';'));
        let Some(path) = list.filter(|path| !path.ends_with('*')) else {
            kept.push(line.to_owned());
            continue;
        };
        let after = text.split_once(line).map_or("", |(_, after)| after);
        match path.split_once("::{") {
            Some((from, names)) => {
                let names: Vec<&str> = names.trim_end_matches('}').split(", ").collect();
                let needed: Vec<&str> = names
                    .iter()
                    .copied()
                    .filter(|&name| {
                        let name = if name == "self" { last_part(from) } else { name };
                        !used(&[name], after).is_empty()
                    })
                    .collect();
                if !needed.is_empty() {
                    kept.push(import(from, &needed).trim_end().to_owned());
                }
            }
            None if used(&[last_part(path)], after).is_empty() => {}
            None => kept.push(line.to_owned()),
        }
    }
    kept.join("\n") + "\n"
}

fn last_part(path: &str) -> &str {
    path.rsplit("::").next().unwrap_or(path)
}

/// An import of these names, in lines of at most 100 columns.
fn import(from: &str, names: &[&str]) -> String {
    match names {
        [] => return String::new(),
        ["self"] => return format!("use {from};\n"),
        [name] => return format!("use {from}::{name};\n"),
        _ => {}
    }
    let line = format!("use {from}::{{{}}};\n", names.join(", "));
    // With the newline; rustfmt breaks a list of exactly 100 columns.
    if line.len() <= 100 {
        return line;
    }
    let mut lines = vec![String::new()];
    for name in names {
        let last = lines.last_mut().expect("there is a line");
        if 4 + last.len() + name.len() + 2 >= 100 {
            lines.push(String::new());
        }
        let last = lines.last_mut().expect("there is a line");
        if !last.is_empty() {
            last.push(' ');
        }
        last.push_str(name);
        last.push(',');
    }
    let lines: Vec<String> = lines.into_iter().map(|line| format!("    {line}\n")).collect();
    format!("use {from}::{{\n{}}};\n", lines.concat())
}

/// Values of the shared vocabulary's template.
pub fn shard(lowered: &Lowered, element_bytes: u64) -> Json {
    let Some(shard) = &lowered.shard else { return Json::Null };
    let sizes = &lowered.sizes;
    let tokens = text::size(sizes.tokens * sizes.hidden * element_bytes);
    let numbers = text::size(element_bytes.max(4) * sizes.tokens);
    use models::schedule::VocabPasses::{Interlaced, Naive, One, Two};
    let traffic = match shard.passes {
        Naive => vec![
            format!("after S: maxima, all-reduce of {numbers}"),
            format!("after S2: sums and target logits, all-reduce of twice {numbers}"),
            format!("after T: input gradient, all-reduce of {tokens}"),
        ],
        One | Interlaced => vec![
            format!(
                "after S: maxima, sums and target logits, all-reduces of three times {numbers}"
            ),
            format!("after T: input gradient, all-reduce of {tokens}"),
        ],
        Two => vec![format!(
            "after S: maxima, sums and target logits, all-reduces of three times {numbers}, and the \
             input gradient, {tokens}"
        )],
    };
    let mut traffic: Vec<String> = traffic;
    traffic.push(format!(
        "embedding rows, all-reduce of {tokens}; their gradient, broadcast of {tokens}"
    ));
    let output = shard
        .output
        .as_ref()
        .map_or_else(|| "None".to_owned(), |table| format!("Some(table(\"{}\"))", table.name));
    json!({
        "rows": shard.rows,
        "input": shard.input.name,
        "output": output,
        "passes": format!("{:?}", shard.passes),
        "traffic": traffic,
    })
}
