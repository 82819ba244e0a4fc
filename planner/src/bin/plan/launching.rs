//! `plan launch`.

use crate::args::LaunchArgs;
use crate::failure::Failure;
use models::input::InputError;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

/// What mpirun is told in its environment, where flags would be one library's alone.
const MPI: [(&str, &str); 6] = [
    // More ranks than cores (Open MPI 4, 5).
    ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
    ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
    // A rank may have several threads: not one core each (Open MPI 4, 5).
    ("OMPI_MCA_hwloc_base_binding_policy", "none"),
    ("PRTE_MCA_hwloc_default_binding_policy", "none"),
    // In a container everybody is root. Whoever else is has typed this command as root.
    ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
    ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
];

/// Builds a trainer and runs it; this process ends with the trainer's exit code.
pub fn run(args: &LaunchArgs) -> Result<(), Failure> {
    let manifest = args.trainer.join("Cargo.toml");
    if !manifest.is_file() {
        let message = format!("there is no trainer in {}", args.trainer.display());
        return Err(InputError::new(message).help("plan generate PLAN -o DIR writes one").into());
    }
    let features: &[&str] = match (args.mpi, args.gpu) {
        (true, true) => &["--features", "mpi,cuda"],
        (true, false) => &["--features", "mpi"],
        (false, true) => &["--features", "cuda"],
        (false, false) => &[],
    };
    // The lock file names what this program was tested with; only what is not on this machine yet is fetched.
    let offline = [&["--offline"], features].concat();
    let built = match build(&manifest, &offline)? {
        Some(built) => Some(built),
        None => build(&manifest, features)?,
    };
    let trainer = built.ok_or_else(|| not_built(args.mpi))?;
    let mut command = match args.processes {
        Some(processes) if args.mpi => mpirun(&trainer, processes),
        _ => Command::new(trainer),
    };
    if args.gpu {
        command.arg("--gpu");
    }
    command.args(&args.flags);
    ended(patiently(command)?)
}

/// The program that cargo built; nothing where it does not build.
fn build(manifest: &Path, more: &[&str]) -> Result<Option<PathBuf>, Failure> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--release", "--quiet", "--message-format=json-render-diagnostics"]);
    command.arg("--manifest-path").arg(manifest).args(more).stdout(Stdio::piped());
    let rust = "install Rust (https://rustup.rs), or put cargo on the PATH";
    let output = started(&mut command, "cargo", rust)?.wait_with_output();
    let output = output.map_err(|error| Failure::Bug(error.into()))?;
    if !output.status.success() {
        return Ok(None);
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut programs =
        messages.filter_map(|message| message["executable"].as_str().map(PathBuf::from));
    Ok(programs.next_back())
}

fn not_built(mpi: bool) -> Failure {
    if mpi {
        let help = "--mpi needs an MPI and libclang (Debian: apt-get install openmpi-bin libopenmpi-dev libclang-dev)";
        return InputError::new("the trainer does not build with MPI; see above").help(help).into();
    }
    Failure::Bug(anyhow::anyhow!("the trainer does not build; see above"))
}

fn mpirun(trainer: &Path, processes: u64) -> Command {
    let mut command = Command::new("mpirun");
    command.arg("-n").arg(processes.to_string()).arg(trainer).envs(MPI);
    command
}

fn started(command: &mut Command, what: &str, help: &str) -> Result<Child, Failure> {
    command
        .spawn()
        .map_err(|error| InputError::new(format!("cannot run {what}: {error}")).help(help).into())
}

/// Runs to the end. Ctrl-C reaches the trainer too, which then ends by itself: this process waits for it.
fn patiently(mut command: Command) -> Result<ExitStatus, Failure> {
    ctrlc::set_handler(|| {}).map_err(|error| Failure::Bug(error.into()))?;
    let what = command.get_program().to_string_lossy().into_owned();
    let help = "--mpi needs mpirun on the PATH (Debian: apt-get install openmpi-bin)";
    let mut child = started(&mut command, &what, help)?;
    child.wait().map_err(|error| Failure::Bug(error.into()))
}

/// The trainer's own exit code; one that a signal ended has the shell's, 128 and the signal.
fn ended(status: ExitStatus) -> Result<(), Failure> {
    #[cfg(unix)]
    let signal = std::os::unix::process::ExitStatusExt::signal(&status).map(|signal| 128 + signal);
    #[cfg(not(unix))]
    let signal = None;
    match status.code().or(signal) {
        Some(0) => Ok(()),
        code => Err(Failure::Trainer(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))),
    }
}
