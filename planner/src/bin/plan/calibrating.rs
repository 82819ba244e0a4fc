//! `plan calibrate`.

use crate::args::CalibrateArgs;
use crate::failure::Failure;
use crate::generating::OWN_RUNTIME;
use crate::output;
use models::cluster::Measured;
use models::input::InputError;
use planner::calibrate::{calibrated, yaml};
use planner::flags::read_cluster;
use std::path::Path;
use std::process::{Command, Stdio};

/// Measures this machine and writes its cluster.
pub fn run(args: &CalibrateArgs) -> Result<(), Failure> {
    let base = read_cluster(&args.cluster)?;
    if !base.any_gpu_count {
        let message = format!("{} is no machine whose ranks are threads", base.name);
        return Err(InputError::new(message)
            .help("valid: --cluster laptop, or a file made so")
            .into());
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let ranks = args.gpus.unwrap_or(cores);
    if ranks == 0 || ranks > MOST_RANKS {
        let message = format!("--gpus cannot be {ranks}");
        return Err(InputError::new(message).help(format!("valid: 1 to {MOST_RANKS}")).into());
    }
    let measured = measure(args.runtime.as_deref().unwrap_or(Path::new(OWN_RUNTIME)), ranks)?;
    let cluster = calibrated(&base, &measured)?;
    let text = yaml(&cluster, &measured);
    match &args.output {
        None => output::print(&text),
        Some(path) => {
            output::write(path, &text)?;
            let path = path.display();
            output::print(&format!(
                "wrote {path}: {ranks} ranks at a time on {cores} cores    next: plan --model ... --cluster {path} --gpus {ranks}\n"
            ))
        }
    }
}

/// More threads than this tell nothing of a machine.
const MOST_RANKS: u64 = 256;

/// Builds and runs the runtime's own program, since nothing here knows how a kernel is called.
fn measure(runtime: &Path, ranks: u64) -> Result<Measured, Failure> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args([
        "run",
        "--release",
        "--quiet",
        "--locked",
        "--bin",
        "measure",
        "--manifest-path",
    ]);
    command.arg(runtime.join("Cargo.toml")).args(["--", "--ranks", &ranks.to_string()]);
    let output = command.stderr(Stdio::inherit()).output().map_err(|error| {
        InputError::new(format!("cannot run cargo: {error}"))
            .help("install Rust (https://rustup.rs), or put cargo on the PATH")
    })?;
    if !output.status.success() {
        return Err(Failure::Bug(anyhow::anyhow!("the measuring program failed; see above")));
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}
