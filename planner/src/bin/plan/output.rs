//! Standard output, files, and the progress line.

use crate::failure::Failure;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use models::input::InputError;
use serde::Serialize;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

/// Prints text. A reader that stops reading, such as `head`, is no error.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(InputError::new(format!("cannot write to standard output: {error}")).into())
        }
        _ => Ok(()),
    }
}

/// Prints JSON.
pub fn print_json<T: Serialize>(value: &T) -> Result<(), Failure> {
    print(&(serde_json::to_string_pretty(value)? + "\n"))
}

/// Writes a file whole.
pub fn write(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text).map_err(|error| {
        let message = format!("cannot write {}: {error}", path.display());
        InputError::new(message).help("give a file in a directory that you may write to").into()
    })
}

/// Refuses to put a plan where something else is: a model or cluster file, as like as not.
pub fn may_hold_a_plan(path: &Path) -> Result<(), Failure> {
    let Ok(text) = std::fs::read_to_string(path) else { return Ok(()) };
    let is_plan = text.lines().find(|line| !line.starts_with('#'));
    if text.trim().is_empty() || is_plan.is_some_and(|line| line.starts_with("version:")) {
        return Ok(());
    }
    let message = format!("{} exists and is no plan", path.display());
    Err(InputError::new(message).help("give -o another name, or remove the file first").into())
}

/// How long a search runs before it shows progress.
const QUIET: Duration = Duration::from_millis(500);

/// One line on standard error while a search runs; only where that is a terminal.
pub struct Progress {
    begun: Instant,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Nothing shown yet.
    pub fn new() -> Self {
        Self { begun: Instant::now(), bar: None }
    }

    /// Shows how far a search is.
    pub fn show(&mut self, settled: u64, all: u64) {
        if self.bar.is_none() && self.begun.elapsed() > QUIET && io::stderr().is_terminal() {
            self.bar = Some(bar(all));
        }
        if let Some(bar) = &self.bar {
            bar.set_length(all);
            bar.set_position(settled);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn bar(all: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(all), ProgressDrawTarget::stderr());
    let style =
        ProgressStyle::with_template("{human_pos} of {human_len} combinations settled, {elapsed}");
    style.map_or(bar.clone(), |style| bar.with_style(style))
}
