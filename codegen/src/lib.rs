//! A plan as the source of a trainer: texts by path, from templates.
//!
//! Everything that was decided is written out as constants; nothing is decided here. [`models::program`]
//! turns a plan into what runs, [`models::shapes`] says what each rank then holds, [`context`] gives both to the templates.

mod context;
pub mod escape;

use models::check::{Violation, check};
use models::plan::Plan;
use models::program::{Program, ProgramError};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use tera::{Context, Kwargs, State, Tera};
use thiserror::Error;

/// A template, and the path of what it makes.
const TEMPLATES: [(&str, &str); 8] = [
    ("Cargo.toml", include_str!("../templates/Cargo.toml.tera")),
    ("README.md", include_str!("../templates/README.md.tera")),
    ("src/main.rs", include_str!("../templates/main.rs.tera")),
    ("src/model.rs", include_str!("../templates/model.rs.tera")),
    ("src/passes.rs", include_str!("../templates/passes.rs.tera")),
    ("src/stages.rs", include_str!("../templates/stages.rs.tera")),
    ("launch/local.sh", include_str!("../templates/local.sh.tera")),
    ("launch/mpi.sh", include_str!("../templates/mpi.sh.tera")),
];

/// Versions that the trainer's libraries were built and tested with, so that it builds offline.
const LOCK_FILE: &str = include_str!("../../Cargo.lock");

/// Where a trainer finds the runtime it links with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuntimeSource {
    /// Folder of the crate.
    Path(String),
    /// Git repository that has it.
    Git(String),
}

/// Why no trainer can be made of a plan.
#[derive(Debug, Error)]
pub enum GenerateError {
    /// The plan does not work out.
    #[error("the plan does not work out: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Violations(Vec<Violation>),
    /// It works out, but training cannot carry it out yet.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// A template is broken, which tests exclude.
    #[error("a template cannot be filled: {0}")]
    Template(#[from] tera::Error),
}

/// The files of a trainer, by path inside its folder. `text` is the plan as it was read.
///
/// # Errors
/// A plan that the checker refuses, or decisions that training cannot carry out yet.
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

/// The files of `program`, which a plan that need not have been checked was made into: whatever texts are in it, each
/// stays a text where it stands.
///
/// # Errors
/// A template is broken, which tests exclude.
pub fn render(
    plan: &Plan,
    program: &Program,
    text: &str,
    runtime: &RuntimeSource,
) -> Result<BTreeMap<&'static str, String>, tera::Error> {
    let hash = format!("{:x}", Sha256::digest(text.as_bytes()));
    let context = Context::from_serialize(&context::context(plan, program, &hash, runtime))?;
    let mut files = BTreeMap::from([
        ("plan.yaml", text.to_owned()),
        ("Cargo.lock", LOCK_FILE.to_owned()),
        (".gitignore", "/target\n".to_owned()),
    ]);
    let mut tera = Tera::default();
    escaping(&mut tera);
    tera.add_raw_templates(TEMPLATES)?;
    for (path, _) in TEMPLATES {
        files.insert(path, tera.render(path, &context)?);
    }
    Ok(files)
}

/// A text as it may stand in a file.
type Escaped = fn(&str) -> String;

/// The functions of [`escape`] as filters.
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

    /// Whatever a template takes from `text` goes through the filter of the place where it stands.
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
