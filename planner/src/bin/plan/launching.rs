//! `plan launch`.

use crate::args::LaunchArgs;
use crate::failure::Failure;
use models::input::{InputError, Source};
use models::plan::Plan;
use serde_json::Value;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

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
    if let Some(processes) = args.processes {
        check_processes(&args.trainer.join("plan.yaml"), processes)?;
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
    let with_flags = |mut command: Command| {
        command.args(args.gpu.then_some("--gpu")).args(&args.flags);
        command
    };
    ctrlc::set_handler(|| {}).map_err(|error| Failure::Bug(error.into()))?;
    match args.processes {
        Some(processes) if args.mpi => ended(patiently(with_flags(mpirun(&trainer, processes)))?),
        Some(processes) => {
            let commands = side_by_side(&trainer, processes)?;
            ended(together(commands.into_iter().map(with_flags).collect())?)
        }
        None => ended(patiently(with_flags(Command::new(trainer)))?),
    }
}

/// Processes are the ranks of the plan that lies beside the trainer: said before anything is built.
fn check_processes(plan: &Path, processes: u64) -> Result<(), Failure> {
    let ranks = Plan::read(&Source::open(plan)?)?.inputs.gpus;
    if processes == ranks {
        return Ok(());
    }
    let message = format!("-n {processes}: {} is for {ranks} ranks", plan.display());
    Err(InputError::new(message).help(format!("valid: -n {ranks}")).into())
}

/// One process for each rank, which meet at a free port of this machine. They are told what torchrun would tell them.
fn side_by_side(trainer: &Path, processes: u64) -> Result<Vec<Command>, Failure> {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|free| free.local_addr());
    let meeting = free.map_err(|error| Failure::Bug(error.into()))?.to_string();
    let command = |rank: u64| {
        let mut command = Command::new(trainer);
        let [rank, size] = [rank, processes].map(|n| n.to_string());
        command.envs([("RANK", &rank), ("LOCAL_RANK", &rank)]);
        command.envs([("WORLD_SIZE", &size), ("LOCAL_WORLD_SIZE", &size)]);
        command.args(["--rendezvous", &meeting]);
        command
    };
    Ok((0..processes).map(command).collect())
}

/// How long the others may go on where one has failed: they learn of it, and say so.
const GRACE: Duration = Duration::from_secs(20);

/// Runs processes to their end, and ends the others some time after one has failed: gives the first failure.
fn together(commands: Vec<Command>) -> Result<ExitStatus, Failure> {
    let mut running = Vec::with_capacity(commands.len());
    for mut command in commands {
        running.push(started(&mut command, "the trainer", "build it anew")?);
    }
    let (mut first, mut last): (Option<(ExitStatus, Instant)>, ExitStatus) =
        (None, ExitStatus::default());
    while !running.is_empty() {
        let mut still = Vec::with_capacity(running.len());
        for mut child in running {
            match child.try_wait().map_err(|error| Failure::Bug(error.into()))? {
                None => still.push(child),
                Some(status) if status.success() => last = status,
                Some(status) => {
                    first.get_or_insert_with(|| (status, Instant::now()));
                }
            }
        }
        if first.is_some_and(|(_, since)| since.elapsed() > GRACE) {
            // One that has ended meanwhile is as good as ended here.
            still.iter_mut().for_each(|child| drop(child.kill()));
        }
        running = still;
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(first.map_or(last, |(status, _)| status))
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
