//! `plan generate`.

use crate::args::GenerateArgs;
use crate::failure::Failure;
use crate::output;
use codegen::escape::shell;
use codegen::{GenerateError, RuntimeSource, generate};
use models::input::{InputError, Source, in_words};
use models::plan::Plan;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;

/// The runtime of the workspace that this program was built from.
pub const OWN_RUNTIME: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../runtime");

/// Writes a trainer.
pub fn run(args: &GenerateArgs) -> Result<(), Failure> {
    let source = Source::open(&args.plan)?;
    let plan = Plan::read(&source)?;
    let runtime = runtime(args.runtime.as_deref())?;
    let files = generate(&plan, source.text(), &runtime).map_err(|e| refused(&args.plan, e))?;
    may_hold_a_trainer(&args.output)?;
    for path in files.keys() {
        no_link(&args.output, Path::new(path))?;
    }
    let before = generated_before(&args.output, &runtime);
    if !args.overwrite {
        keeps_changes(&args.output, &files, &before)?;
    }
    // The file by which the folder is recognized is written first.
    let (known_by, others): (Vec<_>, Vec<_>) =
        files.iter().partition(|(path, _)| **path == MANIFEST);
    for (path, text) in known_by.into_iter().chain(others) {
        write(&args.output.join(path), text)?;
    }
    for path in before.keys().filter(|path| !files.contains_key(*path)) {
        // It may have been removed already.
        let _missing = fs::remove_file(args.output.join(path));
    }
    let folder = args.output.display();
    let word = shell(&folder.to_string());
    output::print(&format!(
        "wrote {folder}: {} files    next: plan launch {word} -- --data FILE --steps N\n",
        files.len()
    ))
}

/// The file whose first line marks a folder as a generated trainer's.
const MANIFEST: &str = "Cargo.toml";

/// Refuses a folder with other files: it may be missing, empty, or hold a generated trainer.
fn may_hold_a_trainer(folder: &Path) -> Result<(), InputError> {
    let name = folder.display();
    let refused = |message: String| {
        Err(InputError::new(message)
            .help("give -o a new or an empty folder, or one made by `plan generate`"))
    };
    match fs::symlink_metadata(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return refused(format!("cannot use {name}: {error}")),
        Ok(found) if !found.is_dir() => {
            return refused(format!("{name} is {}, no folder", in_words(found.file_type())));
        }
        Ok(_) => {}
    }
    let mut entries = fs::read_dir(folder)
        .map_err(|error| InputError::new(format!("cannot read the folder {name}: {error}")))?;
    if entries.next().is_none() || is_trainer(&folder.join(MANIFEST)) {
        return Ok(());
    }
    refused(format!("{name} has files that `plan generate` did not make"))
}

/// Whether a manifest begins with the first line of generated manifests, `# Written by TOOL from
/// plan HASH.`
fn is_trainer(manifest: &Path) -> bool {
    let regular = fs::symlink_metadata(manifest).is_ok_and(|found| found.is_file());
    let hash = |line: &str| {
        let (_, hash) = line.strip_prefix("# Written by ")?.rsplit_once(" from plan ")?;
        Some(hash.strip_suffix('.')?.to_owned())
    };
    let source = Source::open(manifest).ok().filter(|_| regular);
    let first = source.as_ref().and_then(|source| source.text().lines().next());
    let hash = first.and_then(hash).unwrap_or_default();
    hash.len() == 64 && hash.chars().all(|c| c.is_ascii_hexdigit())
}

/// The files of the plan in a folder, if it holds a trainer: those that were generated, unless by
/// another version.
fn generated_before(folder: &Path, runtime: &RuntimeSource) -> BTreeMap<&'static str, String> {
    let plan = Source::open(folder.join("plan.yaml")).ok();
    let files =
        plan.and_then(|source| generate(&Plan::read(&source).ok()?, source.text(), runtime).ok());
    files.unwrap_or_default()
}

/// Refuses to replace or remove files that are neither as they will be written nor as they were
/// `before`. Cargo itself changes the lock file.
fn keeps_changes(
    folder: &Path,
    files: &BTreeMap<&'static str, String>,
    before: &BTreeMap<&'static str, String>,
) -> Result<(), InputError> {
    let is_changed = |path: &&&'static str| {
        let Ok(found) = fs::read(folder.join(path)) else { return false };
        let as_written = |of: &BTreeMap<&'static str, String>| {
            of.get(**path).is_some_and(|text| alike(text, &String::from_utf8_lossy(&found)))
        };
        !as_written(files) && !as_written(before)
    };
    let paths: BTreeSet<_> = files.keys().chain(before.keys()).collect();
    let changed = paths.into_iter().filter(|path| **path != "Cargo.lock").filter(is_changed);
    let changed: Vec<&str> = changed.copied().collect();
    if changed.is_empty() {
        return Ok(());
    }
    let message = format!(
        "in {}, {} would be replaced: changed since it was generated, or of another version or plan",
        folder.display(),
        changed.join(", ")
    );
    Err(InputError::new(message)
        .help("give -o another folder, or --overwrite to lose what was changed"))
}

/// Whether two files are the same but for where the runtime is.
fn alike(a: &str, b: &str) -> bool {
    let kept = |line: &&str| !line.starts_with("runtime = ");
    a.lines().filter(kept).eq(b.lines().filter(kept))
}

/// Refuses to write through a symbolic link inside the folder, which may lead out of it.
fn no_link(folder: &Path, file: &Path) -> Result<(), InputError> {
    for part in file.ancestors().filter(|part| !part.as_os_str().is_empty()) {
        let path = folder.join(part);
        let found = fs::symlink_metadata(&path).map(|found| found.file_type());
        let expected =
            |kind: &fs::FileType| if part == file { kind.is_file() } else { kind.is_dir() };
        if let Some(kind) = found.ok().filter(|kind| !expected(kind)) {
            let message = format!("{} is {}", path.display(), in_words(kind));
            return Err(InputError::new(message).help("remove it, or give -o another folder"));
        }
    }
    Ok(())
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
            let named = path.into_os_string().into_string();
            Ok(RuntimeSource::Path(named.map_err(|path| {
                InputError::new(format!("the path {} is not UTF-8", path.display()))
                    .help("--runtime takes a folder whose path a Cargo.toml can hold")
            })?))
        }
    }
}

fn refused(plan: &Path, error: GenerateError) -> Failure {
    match error {
        GenerateError::Template(error) => Failure::Bug(error.into()),
        error => {
            let path = plan.display();
            let message = format!("no trainer can be made of {path}: {error}");
            let help = match error {
                GenerateError::Program(_) => {
                    format!("plan with --runnable; plan check {path} --runnable asks before")
                }
                _ => format!("plan check {path} lists what does not work out"),
            };
            InputError::new(message).help(help).into()
        }
    }
}

fn write(path: &Path, text: &str) -> Result<(), InputError> {
    if let Some(folder) = path.parent() {
        let failed = |error| {
            InputError::new(format!("cannot make the folder {}: {error}", folder.display()))
                .help("give a folder that you may write to")
        };
        fs::create_dir_all(folder).map_err(failed)?;
    }
    output::replace(path, text)?;
    #[cfg(unix)]
    if path.extension().is_some_and(|extension| extension == "sh") {
        use std::os::unix::fs::PermissionsExt;
        let _ = fs::set_permissions(path, fs::Permissions::from_mode(0o755));
    }
    Ok(())
}
