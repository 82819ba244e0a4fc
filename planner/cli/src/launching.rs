//! `plan launch`.

use crate::args::LaunchArgs;
use crate::children::{Asked, run_all, start};
use crate::failure::Failure;
use crate::output::say;
use codegen::escape::shell;
use models::decisions::Dtype;
use models::input::{InputError, Source};
use models::plan::Plan;
use serde_json::Value;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Environment variables for mpirun. They are ignored by other MPI libraries, as flags would not
/// be.
const MPI: [(&str, &str); 6] = [
    // Allows more ranks than cores (Open MPI 4, 5).
    ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
    ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
    // Does not bind each rank to one core: a rank may have several threads (Open MPI 4, 5).
    ("OMPI_MCA_hwloc_base_binding_policy", "none"),
    ("PRTE_MCA_hwloc_default_binding_policy", "none"),
    // Allows root, which is the usual user inside a container.
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
    let plan = args.trainer.join("plan.yaml");
    if let Some(processes) = args.processes {
        check_processes(&plan, processes)?;
    }
    if args.gpu {
        trains_on_gpus(&plan)?;
    }
    note_missing_data(args);
    let trainer = built(args, &manifest)?;
    say(&format!("starting {}", in_words(args, ranks(&plan))));
    let with_flags = |mut command: Command| {
        command.args(args.gpu.then_some("--gpu")).args(&args.flags);
        let (variable, most) = CONNECTIONS;
        if args.gpu && std::env::var_os(variable).is_none() {
            command.env(variable, most);
        }
        command
    };
    let (commands, help) = match args.processes {
        Some(processes) if args.mpi => (vec![mpirun(&trainer, processes)], MPIRUN),
        Some(processes) => (side_by_side(&trainer, processes)?, REBUILD),
        None => (vec![of_no_launcher(&trainer)], REBUILD),
    };
    run_all(commands.into_iter().map(with_flags).collect(), help, &Asked::listen()?)
}

/// The driver's variable for the number of hardware queues of a process, and the most it takes. By
/// default all streams share 8, in which one that waits for another rank holds up others.
const CONNECTIONS: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "32");

const MPIRUN: &str = "--mpi needs mpirun on the PATH (Debian: apt-get install openmpi-bin)";
const REBUILD: &str = "build the trainer anew";

/// What is started, and on what it trains. `ranks`: of the plan, if it can be read.
fn in_words(args: &LaunchArgs, ranks: Option<u64>) -> String {
    let number = match args.processes.or(ranks) {
        Some(1) => "1 rank".to_owned(),
        Some(ranks) => format!("{ranks} ranks"),
        None => "ranks".to_owned(),
    };
    let (how, place) = match (args.processes, args.mpi, args.gpu) {
        (None, _, false) => ("threads of one process", "on the CPU"),
        (None, _, true) => ("threads of one process", "on one GPU"),
        (Some(_), false, false) => ("processes over TCP", "on CPUs"),
        (Some(_), false, true) => ("processes over TCP and NCCL", "each on a GPU of its own"),
        (Some(_), true, false) => ("processes of MPI", "on CPUs"),
        (Some(_), true, true) => ("processes of MPI, with NCCL", "each on a GPU of its own"),
    };
    format!("{number} as {how}, {place}")
}

/// Ranks of a plan, if it can be read.
fn ranks(plan: &Path) -> Option<u64> {
    let plan = Plan::read(&Source::open(plan).ok()?).ok()?;
    Some(plan.inputs.gpus)
}

/// Checks that the number of processes is the plan's number of ranks, before anything is built.
fn check_processes(plan: &Path, processes: u64) -> Result<(), Failure> {
    let ranks = Plan::read(&Source::open(plan)?)?.inputs.gpus;
    if processes == ranks {
        return Ok(());
    }
    let message = format!("-n {processes}: {} is for {ranks} ranks", plan.display());
    Err(InputError::new(message).help(format!("valid: -n {ranks}")).into())
}

/// Refuses a plan in numbers that GPUs do not train with, before anything is built.
fn trains_on_gpus(plan: &Path) -> Result<(), Failure> {
    // The trainer itself refuses where this file cannot be read.
    let read = Source::open(plan).and_then(|source| Plan::read(&source));
    if read.is_ok_and(|plan| plan.decisions.dtype == Dtype::F64) {
        let message = format!("--gpu: {} has dtype f64", plan.display());
        return Err(InputError::new(message)
            .help("valid on a GPU: a plan with --set dtype=bf16 or f32; or leave out --gpu")
            .into());
    }
    Ok(())
}

/// Says, before a build that takes minutes, that the trainer is not told what to train on. It is no
/// error: a trainer that its user has changed may not need to be told.
fn note_missing_data(args: &LaunchArgs) {
    let tells = |flag: &String| {
        let name = flag.split('=').next().unwrap_or_default();
        ["--data", "--help", "-h", "--version", "-V"].contains(&name)
    };
    if !args.flags.iter().any(tells) {
        let folder = shell(&args.trainer.display().to_string());
        say(&format!("note: trainers need data: plan launch {folder} -- --data FILE"));
    }
}

/// The environment variable that holds the token by which ranks authenticate each other.
const TOKEN: &str = "MESHWRIGHT_TOKEN";

/// 64 random hexadecimal digits.
fn random_token() -> Result<String, Failure> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|error| Failure::Bug(anyhow::anyhow!("{error}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Variables by which the runtime learns its rank (`runtime::launch::launcher`).
const LAUNCHERS: [&str; 12] = [
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "JOB_COMPLETION_INDEX",
    "MASTER_ADDR",
];

/// A process that is told nothing by the launcher under which this one may run.
fn of_no_launcher(trainer: &Path) -> Command {
    let mut command = Command::new(trainer);
    LAUNCHERS.iter().for_each(|variable| {
        command.env_remove(variable);
    });
    command
}

/// One process per rank, which meet at a free port of this machine and authenticate each other by a
/// random token. Their environment is the one torchrun would set.
fn side_by_side(trainer: &Path, processes: u64) -> Result<Vec<Command>, Failure> {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|free| free.local_addr());
    let meeting = free.map_err(|error| Failure::Bug(error.into()))?.to_string();
    let token = random_token()?;
    let command = |rank: u64| {
        let mut command = of_no_launcher(trainer);
        // Not on the command line, which every user of this machine can read.
        command.env(TOKEN, &token);
        let [rank, size] = [rank, processes].map(|n| n.to_string());
        command.envs([("RANK", &rank), ("LOCAL_RANK", &rank)]);
        command.envs([("WORLD_SIZE", &size), ("LOCAL_WORLD_SIZE", &size)]);
        if processes > 1 {
            command.args(["--rendezvous", &meeting]);
        }
        command
    };
    Ok((0..processes).map(command).collect())
}

/// Builds the trainer, and says so; cargo reports its progress itself.
fn built(args: &LaunchArgs, manifest: &Path) -> Result<PathBuf, Failure> {
    let features: &[&str] = match (args.mpi, args.gpu) {
        (true, true) => &["--features", "mpi,cuda"],
        (true, false) => &["--features", "mpi"],
        (false, true) => &["--features", "cuda"],
        (false, false) => &[],
    };
    say(&format!("building the trainer in {}", args.trainer.display()));
    let begun = Instant::now();
    // The lock file pins the tested versions. Only crates that this machine lacks are fetched.
    let offline = [&["--offline"], features].concat();
    let built = match build(manifest, &offline)? {
        Some(built) => Some(built),
        None => {
            say("it does not build without the network; building with it");
            build(manifest, features)?
        }
    };
    let trainer = built.ok_or_else(|| not_built(args.mpi))?;
    say(&format!("built in {:.1} s", begun.elapsed().as_secs_f64()));
    Ok(trainer)
}

/// The program that cargo built; `None` where the build failed.
fn build(manifest: &Path, more: &[&str]) -> Result<Option<PathBuf>, Failure> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["rustc", "--release", "--message-format=json-render-diagnostics"]);
    command.arg("--manifest-path").arg(manifest).args(more).stdout(Stdio::piped());
    if let Some(name) = package_name(manifest) {
        command.args(["--bin", &name]);
    }
    command.args(["--", "-C", &format!("metadata={:016x}", folder_hash(manifest))]);
    let rust = "install Rust (https://rustup.rs), or put cargo on the PATH";
    let output = start(&mut command, "cargo", rust)?.wait_with_output();
    let output = output.map_err(|error| Failure::Bug(error.into()))?;
    if !output.status.success() {
        return Ok(None);
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut programs =
        messages.filter_map(|message| message["executable"].as_str().map(PathBuf::from));
    Ok(programs.next_back().map(own_file))
}

/// Distinguishes trainers of one name and version that share a target folder. Cargo itself takes
/// one for the other, and whichever was built last for both.
fn folder_hash(manifest: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    std::fs::canonicalize(manifest).unwrap_or_else(|_| manifest.to_owned()).hash(&mut hasher);
    hasher.finish()
}

/// The package's name, which is also its program's unless the manifest says otherwise.
fn package_name(manifest: &Path) -> Option<String> {
    let text = std::fs::read_to_string(manifest).ok().filter(|text| !text.contains("[[bin]]"))?;
    let mut lines = text.lines().skip_while(|line| line.trim() != "[package]");
    let name = lines.find_map(|line| line.strip_prefix("name = \""))?;
    Some(name.split('"').next()?.to_owned())
}

/// The program under the name that only this folder's has. Cargo links it to `program`, which the
/// next trainer of this name replaces, maybe before all ranks are started.
#[cfg(unix)]
fn own_file(program: PathBuf) -> PathBuf {
    use std::os::unix::fs::MetadataExt;
    let inode = |path: &Path| std::fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    let known = inode(&program);
    let entries = std::fs::read_dir(program.with_file_name("deps")).into_iter().flatten();
    let mut paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let own = paths.find(|path| known.is_some() && inode(path) == known);
    own.unwrap_or(program)
}

#[cfg(not(unix))]
fn own_file(program: PathBuf) -> PathBuf {
    program
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
