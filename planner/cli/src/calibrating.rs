//! `plan calibrate`.

use crate::args::CalibrateArgs;
use crate::failure::Failure;
use crate::generating::OWN_RUNTIME;
use crate::output::{self, Written, say};
use models::cluster::{self, ClusterSpec, Measured, MeasuredGpu};
use models::input::{InputError, Source};
use models::layer::LocalHeads;
use models::model::ModelSpec;
use planner::request::flags::{read_cluster, read_model};
use std::path::Path;
use std::process::{Command, Stdio};
use validation::calibrate::{calibrated, gpu, yaml};

/// Measures this machine, or its GPU, and writes a cluster file for it.
pub fn run(args: &CalibrateArgs) -> Result<(), Failure> {
    let base = read_cluster(&args.cluster)?;
    for (path, what) in [(&args.output, Written::Cluster), (&args.steps, Written::Steps)] {
        path.as_deref().map_or(Ok(()), |path| output::may_write(path, what))?;
    }
    if args.gpu {
        return of_gpu(args, &base);
    }
    if !base.any_gpu_count {
        let message = format!("{} is no machine whose ranks are threads", base.name);
        return Err(InputError::new(message)
            .help("valid: --cluster laptop, or a file made so")
            .into());
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let ranks = args.gpus.unwrap_or(cores);
    if ranks == 0 || ranks > MAX_RANKS {
        let message = format!("--gpus cannot be {ranks}");
        return Err(InputError::new(message).help(format!("valid: 1 to {MAX_RANKS}")).into());
    }
    let measured = measure(args.runtime.as_deref().unwrap_or(Path::new(OWN_RUNTIME)), ranks)?;
    let cluster = calibrated(&base, &measured)?;
    let text = yaml(&cluster, &measured);
    readable(&text)?;
    match &args.output {
        None => output::print(&text),
        Some(path) => {
            output::write(path, Written::Cluster, &text)?;
            let path = path.display();
            output::print(&format!(
                "wrote {path}: {ranks} ranks at a time on {cores} cores    next: plan --model ... --cluster {path} --gpus {ranks}\n"
            ))
        }
    }
}

/// Refuses a cluster file that could not be read back: its figures are beyond any machine.
fn readable(text: &str) -> Result<(), InputError> {
    cluster::read(&Source::from_bytes("measured cluster", text.as_bytes().to_vec())?).map(drop)
}

/// Measures a GPU, or reads what was measured on another machine.
fn of_gpu(args: &CalibrateArgs, base: &ClusterSpec) -> Result<(), Failure> {
    if base.any_gpu_count {
        let message = format!("the ranks of {} are threads of a processor", base.name);
        let help = "valid with --gpu: the cluster that has this GPU, such as --cluster dgx_h200";
        return Err(InputError::new(message).help(help).into());
    }
    let measured = match &args.measured {
        Some(path) => read_measured(path)?,
        None => {
            let runtime = args.runtime.as_deref().unwrap_or(Path::new(OWN_RUNTIME));
            let model = args.model.as_deref().map(read_model).transpose()?;
            let widths = model.map_or(vec![], |(model, _)| widths(&model));
            measure_gpu(runtime, args.gpus.unwrap_or(1), &widths)?
        }
    };
    let calibrated = gpu::calibrated(base, &measured)?;
    let text = gpu::yaml(&calibrated, &measured);
    readable(&text)?;
    let steps = gpu::predictions(&calibrated.cluster, &measured)?;
    if let Some(path) = &args.steps {
        output::write(path, Written::Steps, &(serde_json::to_string_pretty(&steps)? + "\n"))?;
    }
    let Some(path) = &args.output else { return output::print(&text) };
    output::write(path, Written::Cluster, &text)?;
    let mut said = format!("wrote {}: {}, {}\n", path.display(), measured.gpu, measured.versions);
    for step in &steps {
        let off = (step.predicted_s / step.measured_s - 1.0) * 100.0;
        said += &format!(
            "  step of {}: measured {:.2} ms, predicted {:.2} ms ({off:+.1} %)\n",
            step.model,
            step.measured_s * 1e3,
            step.predicted_s * 1e3
        );
    }
    output::print(&said)
}

fn read_measured(path: &Path) -> Result<MeasuredGpu, Failure> {
    let source = Source::open(path)?;
    serde_json::from_str(source.text()).map_err(|error| {
        let message = format!("{} is not what measure-gpu writes: {error}", path.display());
        InputError::new(message).help("write it with measure-gpu on the GPU's machine").into()
    })
}

/// Widths of a model's matrices.
fn widths(model: &ModelSpec) -> Vec<u64> {
    let heads = LocalHeads::new(model, 1);
    let experts = model.moe.iter().flat_map(|moe| [moe.ffn, moe.shared_ffn]);
    let dense = [model.hidden, heads.q_width(), heads.kv_heads * heads.qk_dim, model.mlp.ffn];
    let mut widths: Vec<u64> = dense.into_iter().chain(experts).filter(|&n| n > 0).collect();
    widths.sort_unstable();
    widths.dedup();
    widths
}

/// Builds the measuring program for GPUs and runs it, with products of more sizes.
fn measure_gpu(runtime: &Path, ranks: u64, sizes: &[u64]) -> Result<MeasuredGpu, Failure> {
    has_gpu()?;
    say("building measure-gpu with cargo, which takes minutes the first time");
    let file = std::env::temp_dir().join(format!("gpu-measured-{}.json", std::process::id()));
    let mut command = measuring(runtime, "measure-gpu", &["--features", "cuda"]);
    command.args(["--ranks", &ranks.to_string(), "--json"]).arg(&file).stdout(Stdio::inherit());
    let sizes: Vec<String> = sizes.iter().map(u64::to_string).collect();
    if !sizes.is_empty() {
        command.args(["--sizes", &sizes.join(",")]);
    }
    let status = command.stderr(Stdio::inherit()).status().map_err(|error| no_cargo(&error))?;
    if !status.success() {
        let help = "run it where the GPU is, or give --measured what measure-gpu wrote there";
        return Err(InputError::new("no GPU was measured; see above").help(help).into());
    }
    let measured = read_measured(&file);
    let _ = std::fs::remove_file(file);
    measured
}

/// Refuses a machine without a GPU before minutes of building.
fn has_gpu() -> Result<(), InputError> {
    if !cfg!(target_os = "linux") || GPU_FILES.iter().any(|file| Path::new(file).exists()) {
        return Ok(());
    }
    let message = "there is no NVIDIA GPU here, or no driver for it: /dev/nvidiactl is missing";
    Err(InputError::new(message).help(
        "run it on the GPU's machine (a container needs its devices: --gpus all), or give \
         --measured FILE, what measure-gpu wrote there",
    ))
}

/// Files of NVIDIA's driver: of discrete GPUs, under WSL, and of Tegra.
const GPU_FILES: [&str; 4] = ["/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu"];

/// A cargo command that builds and runs one of the measuring programs beside the runtime.
fn measuring(runtime: &Path, program: &str, features: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["run", "--release", "--quiet", "--locked", "--bin", program]).args(features);
    command.arg("--manifest-path").arg(runtime.join("measure/Cargo.toml")).arg("--");
    command
}

fn no_cargo(error: &std::io::Error) -> Failure {
    InputError::new(format!("cannot run cargo: {error}"))
        .help("install Rust (https://rustup.rs), or put cargo on the PATH")
        .into()
}

/// More threads than this say nothing about a machine.
const MAX_RANKS: u64 = 256;

/// Builds and runs the measuring program: only the runtime knows how to call its kernels.
fn measure(runtime: &Path, ranks: u64) -> Result<Measured, Failure> {
    say("building the measuring program with cargo, which takes minutes the first time");
    if !runtime.join("measure/Cargo.toml").is_file() {
        let message = format!("--runtime {}: it holds no measuring program", runtime.display());
        return Err(InputError::new(message)
            .help("give the `runtime` folder of a checkout of this project")
            .into());
    }
    let mut command = measuring(runtime, "measure", &[]);
    command.args(["--ranks", &ranks.to_string()]);
    let output = command.stderr(Stdio::inherit()).output().map_err(|error| no_cargo(&error))?;
    if !output.status.success() {
        return Err(Failure::Bug(anyhow::anyhow!("the measuring program failed; see above")));
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}
