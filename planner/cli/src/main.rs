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
mod misuse;
mod output;
mod patience;
mod planning;
mod schedules;
mod validating;

use args::{Cli, Command};
use clap::Parser;
use failure::Failure;
use misuse::misused;
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
