//! Generates the source of a trainer from a plan: texts by path, from templates.
//!
//! All of the plan's decisions are written out as constants; none is taken here.
//! [`models::program`] turns the plan into a program, [`models::shapes`] says what each rank holds,
//! and [`context`] passes both to the templates.

// For the one large `json!` of the templates' values.
#![recursion_limit = "256"]

mod context;
pub mod escape;
pub mod lower;
mod print;

use crate::lower::{Block, lower};
use crate::print::{Kind, Printer};
use models::check::{Violation, check};
use models::decisions::Dtype;
use models::plan::Plan;
use models::program::{Program, ProgramError};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use tera::{Context, Kwargs, State, Tera};
use thiserror::Error;

/// Templates of files that every trainer has, by the path of their output.
const TEMPLATES: [(&str, &str); 9] = [
    ("Cargo.toml", include_str!("../templates/Cargo.toml.tera")),
    ("README.md", include_str!("../templates/README.md.tera")),
    ("rustfmt.toml", include_str!("../templates/rustfmt.toml.tera")),
    ("src/main.rs", include_str!("../templates/main.rs.tera")),
    ("src/plan.rs", include_str!("../templates/plan.rs.tera")),
    ("src/layer.rs", include_str!("../templates/layer.rs.tera")),
    ("src/passes.rs", include_str!("../templates/passes.rs.tera")),
    ("launch/local.sh", include_str!("../templates/local.sh.tera")),
    ("launch/mpi.sh", include_str!("../templates/mpi.sh.tera")),
];

/// The template of layers of both kinds.
const LAYERS: &str = include_str!("../templates/layers.rs.tera");
/// The template of a stage's file.
const STAGE: &str = include_str!("../templates/stage.rs.tera");
/// The template of a vocabulary that is split over the pipeline.
const VOCABULARY: &str = include_str!("../templates/vocabulary.rs.tera");

/// Versions with which the trainer's libraries were built and tested, so that it builds offline.
const LOCK_FILE: &str = include_str!("../../Cargo.lock");

/// Where a trainer finds the runtime that it links.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuntimeSource {
    /// Directory of the crate.
    Path(String),
    /// Git repository of the crate.
    Git(String),
}

/// Why no trainer can be generated.
#[derive(Debug, Error)]
pub enum GenerateError {
    /// The plan fails its check.
    #[error("the plan does not work out: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Violations(Vec<Violation>),
    /// The plan is valid, but training does not support it yet.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// A template is broken; tests exclude this.
    #[error("a template cannot be filled: {0}")]
    Template(#[from] tera::Error),
}

/// The files of a trainer, by path inside its directory. `text` is the plan's text.
///
/// # Errors
/// A plan that fails its check, or decisions that training does not support yet.
pub fn generate(
    plan: &Plan,
    text: &str,
    runtime: &RuntimeSource,
) -> Result<BTreeMap<&'static str, String>, GenerateError> {
    let violations = check(plan);
    if !violations.is_empty() {
        return Err(GenerateError::Violations(violations));
    }
    Ok(render(plan, &Program::of(plan)?, text, runtime)?)
}

/// The files of `program`, which may come from an unchecked plan: any text in it remains text in
/// the files.
///
/// # Errors
/// A template is broken; tests exclude this.
pub fn render(
    plan: &Plan,
    program: &Program,
    text: &str,
    runtime: &RuntimeSource,
) -> Result<BTreeMap<&'static str, String>, tera::Error> {
    let hash = format!("{:x}", Sha256::digest(text.as_bytes()));
    let lowered = lower(program);
    let printer = Printer { lowered: &lowered, element_bytes: element_bytes(plan.decisions.dtype) };
    let mut context = Context::from_serialize(&context::context(plan, &printer, &hash, runtime))?;
    let mut files = BTreeMap::from([
        ("plan.yaml", text.to_owned()),
        ("Cargo.lock", LOCK_FILE.to_owned()),
        (".gitignore", "/target\n".to_owned()),
    ]);
    let mut tera = Tera::default();
    escaping(&mut tera);
    tera.add_raw_templates(TEMPLATES)?;
    tera.add_raw_templates([("layers", LAYERS), ("stage", STAGE), ("vocabulary", VOCABULARY)])?;
    for (path, _) in TEMPLATES {
        files.insert(path, finished(path, &tera.render(path, &context)?));
    }
    if printer.blocks().len() > 1 {
        let path = "src/layer.rs";
        files.insert(path, finished(path, &tera.render("layers", &context)?));
        for block in printer.blocks() {
            context.insert("layer", &printer.layer(block));
            files.insert(block_path(block), finished(path, &tera.render(path, &context)?));
        }
    }
    for kind in printer.kinds() {
        context.insert("stage", &printer.stage(kind));
        files.insert(path_of(kind), finished("stage.rs", &tera.render("stage", &context)?));
    }
    if lowered.shard.is_some() {
        let path = "src/vocabulary.rs";
        files.insert(path, finished(path, &tera.render("vocabulary", &context)?));
    }
    let others = |path: &&str| path.ends_with(".rs") && !path.ends_with("plan.rs");
    let rust: Vec<&str> =
        files.iter().filter(|(path, _)| others(path)).map(|(_, text)| text.as_str()).collect();
    let plan = print::without_unused(&files["src/plan.rs"], &rust.concat());
    files.insert("src/plan.rs", plan);
    Ok(files)
}

/// Rust files get their imports.
fn finished(path: &str, text: &str) -> String {
    if path.ends_with(".rs") { print::with_imports(text) } else { text.to_owned() }
}

fn block_path(block: Block) -> &'static str {
    match block {
        Block::Dense => "src/dense_layer.rs",
        Block::Experts => "src/expert_layer.rs",
    }
}

fn path_of(kind: Kind) -> &'static str {
    match kind {
        Kind::First => "src/first.rs",
        Kind::Middle => "src/middle.rs",
        Kind::Last => "src/last.rs",
        Kind::Only => "src/only.rs",
    }
}

/// Bytes of an element of activations.
fn element_bytes(dtype: Dtype) -> u64 {
    match dtype {
        Dtype::F64 => 8,
        Dtype::Bf16 => 2,
        _ => 4,
    }
}

/// A text escaped for a place in a file.
type Escaped = fn(&str) -> String;

/// Registers the functions of [`escape`] as filters.
fn escaping(tera: &mut Tera) {
    let functions: [(&str, Escaped); 5] = [
        ("rust", escape::rust),
        ("toml", escape::toml),
        ("shell", escape::shell),
        ("markdown", escape::markdown),
        ("comment", escape::comment),
    ];
    for (name, escaped) in functions {
        tera.register_filter(name, move |text: &str, _: Kwargs, _: &State| escaped(text));
    }
}

#[cfg(test)]
mod tests {
    use super::TEMPLATES;

    /// Everything that a template takes from `text` goes through the filter of its place.
    #[test]
    fn templates_escape_every_text() {
        for (path, template) in TEMPLATES {
            let filters: &[&str] = match path {
                "Cargo.toml" => &["toml", "comment"],
                "README.md" => &["markdown"],
                path if path.ends_with(".sh") => &["shell", "comment"],
                _ => &["rust", "markdown"],
            };
            for expression in
                template.split("{{").skip(1).filter_map(|rest| rest.split("}}").next())
            {
                let escaped =
                    filters.iter().any(|name| expression.trim().ends_with(&format!("| {name}")));
                assert!(escaped || !expression.contains("text."), "{path}: {{{{{expression}}}}}");
            }
        }
    }
}
