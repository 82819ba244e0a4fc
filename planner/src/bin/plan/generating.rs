//! `plan generate`.

use crate::args::GenerateArgs;
use crate::failure::Failure;
use crate::output;
use codegen::{GenerateError, RuntimeSource, generate};
use models::input::{InputError, Source};
use models::plan::Plan;
use std::fs;
use std::path::{Path, PathBuf};

/// The runtime of the workspace that this program was built from.
pub const OWN_RUNTIME: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../runtime");

/// Writes a trainer.
pub fn run(args: &GenerateArgs) -> Result<(), Failure> {
    let source = Source::open(&args.plan)?;
    let plan = Plan::read(&source)?;
    let runtime = runtime(args.runtime.as_deref())?;
    let files = generate(&plan, source.text(), &runtime).map_err(|e| refused(&args.plan, e))?;
    for (path, text) in &files {
        write(&args.output.join(path), text)?;
    }
    let folder = args.output.display();
    output::print(&format!(
        "wrote {folder}: {} files    next: plan launch {folder} -- --data FILE --steps N\n",
        files.len()
    ))
}

fn runtime(named: Option<&str>) -> Result<RuntimeSource, InputError> {
    match named {
        Some(url) if url.contains("://") || url.starts_with("git@") => {
            Ok(RuntimeSource::Git(url.to_owned()))
        }
        named => {
            let folder = Path::new(named.unwrap_or(OWN_RUNTIME));
            let found = folder.join("Cargo.toml").is_file().then(|| fs::canonicalize(folder).ok());
            let missing = || {
                InputError::new(format!("there is no runtime in {}", folder.display()))
                    .help("--runtime takes the folder of the crate `runtime`, or a git URL")
            };
            let path = found.flatten().ok_or_else(missing)?;
            Ok(RuntimeSource::Path(path.display().to_string()))
        }
    }
}

fn refused(plan: &Path, error: GenerateError) -> Failure {
    match error {
        GenerateError::Template(error) => Failure::Bug(error.into()),
        error => {
            let path = plan.display();
            let message = format!("no trainer can be made of {path}: {error}");
            InputError::new(message).help(format!("plan check {path} says what works out")).into()
        }
    }
}

fn write(path: &PathBuf, text: &str) -> Result<(), Failure> {
    if let Some(folder) = path.parent() {
        let failed = |error| {
            InputError::new(format!("cannot make the folder {}: {error}", folder.display()))
                .help("give a folder that you may write to")
        };
        fs::create_dir_all(folder).map_err(failed)?;
    }
    output::write(path, text)?;
    #[cfg(unix)]
    if path.extension().is_some_and(|extension| extension == "sh") {
        use std::os::unix::fs::PermissionsExt;
        let _ = fs::set_permissions(path, fs::Permissions::from_mode(0o755));
    }
    Ok(())
}
