//! `plan launch`.

use crate::args::LaunchArgs;
use crate::failure::Failure;
use models::input::InputError;
use std::process::{Command, ExitStatus};

/// Builds a trainer and runs it; this process ends with the trainer's exit code.
pub fn run(args: &LaunchArgs) -> Result<(), Failure> {
    let manifest = args.trainer.join("Cargo.toml");
    if !manifest.is_file() {
        let message = format!("there is no trainer in {}", args.trainer.display());
        return Err(InputError::new(message).help("plan generate PLAN -o DIR writes one").into());
    }
    let cargo = |verb: &str, more: &[&str]| {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.args([verb, "--release", "--quiet", "--manifest-path"]).arg(&manifest).args(more);
        command
    };
    // The lock file names what this program was tested with; only what is not on this machine yet is fetched.
    if !started(cargo("build", &["--offline"]))?.success()
        && !started(cargo("build", &[]))?.success()
    {
        return Err(Failure::Bug(anyhow::anyhow!("the trainer does not build; see above")));
    }
    let mut command = cargo("run", &["--offline", "--"]);
    command.args(&args.flags);
    match started(command)?.code() {
        Some(0) => Ok(()),
        Some(code) => Err(Failure::Trainer(u8::try_from(code).unwrap_or(1))),
        None => Err(Failure::Trainer(1)),
    }
}

fn started(mut command: Command) -> Result<ExitStatus, Failure> {
    command.status().map_err(|error| {
        InputError::new(format!("cannot run cargo: {error}"))
            .help("install Rust (https://rustup.rs), or put cargo on the PATH")
            .into()
    })
}
