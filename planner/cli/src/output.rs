//! Standard output, files, and the progress line.

use crate::failure::Failure;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use models::input::{InputError, Source, in_words, parse_yaml};
use models::text::{is_hidden, shown_lines};
use planner::request::flags::cluster_warnings;
use planner::search::Standing;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fs::{self, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Prints text with hidden characters escaped, so that file names and file contents cannot control
/// the terminal. A closed pipe, as of `head`, is not an error.
pub fn print(text: &str) -> Result<(), Failure> {
    let text = shown_lines(text);
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(InputError::new(format!("cannot write to standard output: {error}")).into())
        }
        _ => Ok(()),
    }
}

/// Says a line on standard error, with hidden characters escaped. It does not matter if nobody
/// reads it.
pub fn say(line: &str) {
    let line = format!("{}\n", shown_lines(line));
    // In one write: other processes write to the terminal too.
    let _nobody_reads = io::stderr().write_all(line.as_bytes());
}

/// Says warnings about a cluster's file.
pub fn warn_of_cluster(name: Option<&str>) {
    for warning in cluster_warnings(name) {
        say(&format!("warning: {warning}"));
    }
}

/// Columns of the terminal that standard output is; of anything else, [`COLUMNS`].
pub fn columns() -> usize {
    #[cfg(unix)]
    if io::stdout().is_terminal()
        && let Ok(size) = rustix::termios::tcgetwinsize(io::stdout())
        && size.ws_col > 0
    {
        return usize::from(size.ws_col).clamp(NARROWEST, WIDEST);
    }
    COLUMNS
}

/// Columns of what is no terminal.
const COLUMNS: usize = 100;
/// Fewer columns than this are drawn over, more are left free.
const NARROWEST: usize = 40;
const WIDEST: usize = 400;

/// Prints JSON, with hidden characters escaped.
pub fn print_json<T: Serialize>(value: &T) -> Result<(), Failure> {
    print(&(escaped(&serde_json::to_string_pretty(value)?) + "\n"))
}

/// Escapes hidden characters in strings of JSON as `\u` and digits. Between strings, pretty-printed
/// JSON has none but newlines.
fn escaped(json: &str) -> Cow<'_, str> {
    let hidden = |c: char| is_hidden(c) && c != '\n';
    if !json.contains(hidden) {
        return Cow::Borrowed(json);
    }
    let mut all = String::with_capacity(json.len() + 16);
    for c in json.chars() {
        if hidden(c) {
            let mut halves = [0; 2];
            let halves = c.encode_utf16(&mut halves).iter();
            all.extend(halves.map(|half| format!("\\u{half:04x}")));
        } else {
            all.push(c);
        }
    }
    Cow::Owned(all)
}

/// A kind of file that the program writes to a path of the user's, and may overwrite there.
#[derive(Clone, Copy, Debug)]
pub enum Written {
    /// `plan -o`.
    Plan,
    /// `plan calibrate -o`.
    Cluster,
    /// `plan calibrate --steps`.
    Steps,
}

impl Written {
    fn in_words(self) -> &'static str {
        match self {
            Self::Plan => "plan",
            Self::Cluster => "cluster of `plan calibrate`",
            Self::Steps => "list of steps of `plan calibrate --steps`",
        }
    }

    /// Whether the program wrote this text: it has the keys that each such file has.
    fn is(self, source: &Source) -> bool {
        let calibrated = || source.text().starts_with("# Measured by `plan calibrate");
        match self {
            Self::Plan => parse_yaml::<PlanLike>(source)
                .is_ok_and(|plan| plan.tool.starts_with("meshwright ")),
            Self::Cluster => calibrated() && parse_yaml::<ClusterLike>(source).is_ok(),
            Self::Steps => parse_yaml::<Vec<StepLike>>(source).is_ok(),
        }
    }
}

/// Keys of every plan, of any version.
#[derive(Deserialize)]
struct PlanLike {
    tool: String,
    #[serde(rename = "version")]
    _version: IgnoredAny,
    #[serde(rename = "inputs")]
    _inputs: IgnoredAny,
    #[serde(rename = "decisions")]
    _decisions: IgnoredAny,
    #[serde(rename = "stages")]
    _stages: IgnoredAny,
}

/// Keys of every cluster file.
#[derive(Deserialize)]
struct ClusterLike {
    #[serde(rename = "name")]
    _name: String,
    #[serde(rename = "device")]
    _device: IgnoredAny,
    #[serde(rename = "levels")]
    _levels: IgnoredAny,
}

/// Keys of every measured and predicted training step.
#[derive(Deserialize)]
struct StepLike {
    #[serde(rename = "model")]
    _model: String,
    #[serde(rename = "measured_s")]
    _measured_s: f64,
    #[serde(rename = "predicted_s")]
    _predicted_s: f64,
}

/// Refuses to overwrite other files: the path may be free, an empty file, or a file of the same
/// kind that the program wrote.
///
/// # Errors
/// The folder does not exist, or the path is another file, a symbolic link, or not a regular file.
pub fn may_write(path: &Path, what: Written) -> Result<(), InputError> {
    let name = path.display();
    if name.to_string() == "-" {
        let help = "for a file of that name give ./-";
        return Err(InputError::new("-o takes the name of a file, not `-`").help(help));
    }
    let kind = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return folder_exists(path),
        Err(error) => return Err(cannot_write(path, &error)),
        Ok(found) if found.is_file() && found.len() == 0 => return Ok(()),
        Ok(found) => found.file_type(),
    };
    if !kind.is_file() {
        let message = format!("{name} is {}: only regular files are written", in_words(kind));
        let help = if kind.is_symlink() {
            "give the file that it leads to"
        } else {
            "give the name of a file"
        };
        return Err(InputError::new(message).help(help));
    }
    if Source::open(path).is_ok_and(|source| what.is(&source)) {
        return Ok(());
    }
    let message = format!("{name} exists and is no {}", what.in_words());
    Err(InputError::new(message).help("give another name, or remove the file first"))
}

/// The folder in which a file is to be written.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn folder_exists(path: &Path) -> Result<(), InputError> {
    let folder = folder_of(path);
    if folder.is_dir() {
        return Ok(());
    }
    let message =
        format!("cannot write {}: there is no folder {}", path.display(), folder.display());
    Err(InputError::new(message).help("make the folder first, or give a file in one that exists"))
}

fn cannot_write(path: &Path, error: &io::Error) -> InputError {
    InputError::new(format!("cannot write {}: {error}", path.display()))
        .help("give a file in a folder that you may write to")
}

/// Writes a file at a path of the user's, if [`may_write`] allows it.
pub fn write(path: &Path, what: Written, text: &str) -> Result<(), InputError> {
    may_write(path, what)?;
    replace(path, text)
}

/// Replaces a file atomically, by a temporary file that is renamed. A symbolic link is replaced
/// itself, not its target.
pub fn replace(path: &Path, text: &str) -> Result<(), InputError> {
    let temporary = folder_of(path).join(format!(".meshwright-{}.tmp", std::process::id()));
    let renamed = create(&temporary, text).and_then(|()| fs::rename(&temporary, path));
    renamed.map_err(|error| {
        let _ = fs::remove_file(&temporary);
        cannot_write(path, &error)
    })
}

fn create(path: &PathBuf, text: &str) -> io::Result<()> {
    OpenOptions::new().write(true).create_new(true).open(path)?.write_all(text.as_bytes())
}

/// How long a search runs before its progress is shown.
const QUIET: Duration = Duration::from_millis(500);

/// A progress line on standard error during a search, if that is a terminal.
pub struct Progress {
    begun: Instant,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Shows nothing until the first call of [`Self::show`].
    pub fn new() -> Self {
        Self { begun: Instant::now(), bar: None }
    }

    /// Removes the line until the next call of [`Self::show`].
    pub fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// Shows the best plan so far, how far from the best possible it may be, and how many
    /// combinations are settled.
    pub fn show(&mut self, standing: Standing) {
        let Standing { settled, all, best_s, bound_s } = standing;
        if self.bar.is_none() && self.begun.elapsed() > QUIET && io::stderr().is_terminal() {
            let bar = bar(all);
            bar.enable_steady_tick(QUIET);
            self.bar = Some(bar);
        }
        if let Some(bar) = &self.bar {
            bar.set_length(all);
            bar.set_position(settled);
            if best_s.is_finite() {
                let gap = 100.0 * (1.0 - bound_s / best_s).max(0.0);
                bar.set_message(format!("best {best_s:.4} s, at most {gap:.2} % from the best, "));
            }
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

fn bar(all: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(all), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template(
        "{msg}{human_pos} of {human_len} combinations settled, {elapsed}",
    );
    style.map_or(bar.clone(), |style| bar.with_style(style))
}
