//! The program `plan`.

mod args;
mod calibrating;
mod checking;
mod children;
mod explaining;
mod failure;
mod generating;
mod launching;
mod limits;
mod lists;
mod output;
mod patience;
mod planning;
mod schedules;
mod validating;

use args::{Cli, Command};
use clap::Parser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use failure::Failure;
use models::text::{is_hidden, shown_lines};
use std::error::Error;
use std::process::ExitCode;

/// A search allocates and frees millions of small lists on several threads.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let cli = Cli::try_parse().unwrap_or_else(|error| misused(&error));
    let Err(failure) = run(&cli) else { return ExitCode::SUCCESS };
    eprint!("{failure}");
    ExitCode::from(failure.code())
}

/// Prints clap's message about misused flags, or the help that was asked for. Hidden characters of
/// arguments, which the message quotes, are escaped.
fn misused(error: &clap::Error) -> ! {
    if let Some(text) = unreadable(error) {
        eprintln!("error: {}", shown_lines(&text));
        std::process::exit(error.exit_code());
    }
    if std::env::args_os().any(|argument| argument.to_string_lossy().contains(is_hidden)) {
        eprint!("{}", shown_lines(&error.render().to_string()));
        std::process::exit(error.exit_code());
    }
    error.exit()
}

/// A flag's value that cannot be read: the flag, what it needs and what it has.
fn unreadable(error: &clap::Error) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let said = error.source().filter(|_| error.kind() == ErrorKind::ValueValidation)?.to_string();
    let flag = text(ContextKind::InvalidArg)?.split(' ').next()?;
    let value = text(ContextKind::InvalidValue)?;
    Some(format!("{flag} needs {}, not `{value}`", args::needed(&said)))
}

fn run(cli: &Cli) -> Result<(), Failure> {
    match &cli.command {
        None => planning::plan(&cli.plan),
        Some(Command::Estimate(args)) => planning::estimate(args),
        Some(Command::Explain(args)) => explaining::run(args),
        Some(Command::Check(args)) => checking::run(args),
        Some(Command::Diff(args)) => checking::diff(args),
        Some(Command::Schedule(args)) => schedules::run(args),
        Some(Command::Validate(args)) => validating::run(args),
        Some(Command::Generate(args)) => generating::run(args),
        Some(Command::Launch(args)) => launching::run(args),
        Some(Command::Calibrate(args)) => calibrating::run(args),
        Some(Command::Models(args)) => lists::models(args),
        Some(Command::Clusters(args)) => lists::clusters(args),
    }
}
