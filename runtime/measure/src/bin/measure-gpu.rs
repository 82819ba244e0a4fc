//! Measures a GPU for `plan calibrate --gpu`: launches, copies, elementwise kernels, AdamW,
//! products, attention, collectives, and whole training steps. It needs only the GPU's driver and
//! CUDA's libraries. It writes [`MeasuredGpu`] as JSON, one part at a time, and keeps the file's
//! other parts, so that a GPU that is available for minutes can measure the parts in turn. It exits
//! with 2 if there is no GPU.

use clap::Parser;
use measure::{Bench, BenchPart, GpuBench, Sweep, measure};
use models::cluster::MeasuredGpu;
use runtime::CudaGraphs;
use runtime::kernels::cuda::Gpu;
use runtime::models;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Measures a GPU.
#[derive(Parser)]
struct Flags {
    /// Number of the GPU
    #[arg(long, default_value_t = 0)]
    gpu: usize,
    /// Where the figures go; those of other parts stay
    #[arg(long, default_value = "gpu-measured.json")]
    json: PathBuf,
    /// What is measured
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "memory,products,attention,collectives,steps"
    )]
    parts: Vec<BenchPart>,
    /// Ranks that share the GPU in collectives; 1 measures none
    #[arg(long, default_value_t = 1)]
    ranks: usize,
    /// Fewer sizes: a minute instead of several
    #[arg(long)]
    coarse: bool,
    /// More sizes of products, such as the widths of a model
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    sizes: Vec<usize>,
    /// Times the training step of this name alone, and prints its seconds
    #[arg(long)]
    step: Option<String>,
    /// Sequences of that step, in place of its own
    #[arg(long, requires = "step")]
    sequences: Option<u64>,
    /// When steps are replayed as CUDA graphs instead of launched kernel by kernel
    #[arg(long, value_enum, value_name = "WHEN", default_value_t)]
    cuda_graphs: CudaGraphs,
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    let done = match &flags.step {
        Some(name) => one_step(&flags, name),
        None => all(&flags),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::from(2)
        }
    }
}

#[allow(clippy::needless_pass_by_value)] // as `map_err` gives it
fn text<E: Display>(error: E) -> String {
    error.to_string()
}

fn bench(flags: &Flags) -> Result<GpuBench, String> {
    let number = flags.gpu;
    let bench = GpuBench::new(move || Gpu::open(number)).map_err(text)?;
    Ok(bench.with_graphs(flags.cuda_graphs))
}

fn all(flags: &Flags) -> Result<(), String> {
    let gpu = Gpu::open(flags.gpu).map_err(text)?;
    let device = gpu.properties();
    let mut measured = read(&flags.json)?;
    if !measured.gpu.is_empty() && measured.gpu != device.name {
        return Err(format!(
            "{} is of a {}: give another --json",
            flags.json.display(),
            measured.gpu
        ));
    }
    measured.gpu.clone_from(&device.name);
    measured.versions.clone_from(&device.versions);
    measured.multiprocessors = device.multiprocessors as u64;
    measured.memory_bytes = device.memory_bytes as f64;
    let sweep = if flags.coarse { Sweep::coarse } else { Sweep::full }(flags.ranks);
    let sweep = sweep.with_sizes(&flags.sizes);
    for &part in &flags.parts {
        let start = Instant::now();
        // Each part opens the GPU anew, which frees the memory of the part before.
        let mut keep = |measured: &MeasuredGpu| {
            let json = serde_json::to_string_pretty(measured).map_err(text);
            let written = json.and_then(|json| {
                std::fs::write(&flags.json, json + "\n").map_err(|error| named(&flags.json, &error))
            });
            written.map_err(|problem| runtime::Error::World { problem })
        };
        measure(&mut bench(flags)?, &sweep, part, &mut measured, &mut keep).map_err(text)?;
        keep(&measured).map_err(text)?;
        eprintln!("{part:?}: {:.0} s, in {}", start.elapsed().as_secs_f64(), flags.json.display());
    }
    Ok(())
}

/// What was measured before.
fn read(path: &Path) -> Result<MeasuredGpu, String> {
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| named(path, &error)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(MeasuredGpu::default()),
        Err(error) => Err(named(path, &error)),
    }
}

fn named(path: &Path, error: &dyn Display) -> String {
    format!("{}: {error}", path.display())
}

fn one_step(flags: &Flags, name: &str) -> Result<(), String> {
    let steps = Sweep::full(1).steps;
    let first_line = format!("name: {name}\n");
    let Some((model, sequences)) = steps.iter().find(|(model, _)| model.starts_with(&first_line))
    else {
        return Err(format!("--step {name}: there is no such model among those that are timed"));
    };
    let sequences = flags.sequences.unwrap_or(*sequences);
    let s = bench(flags)?.step_s(model, sequences).map_err(text)?;
    println!("{s}");
    Ok(())
}
