//! The GPU that a process trains on, and its memory.

use super::Flags;
use crate::error::Error;
use crate::launch::launcher::{self, ProcessPlace};
use crate::spec::TrainerSpec;
use kernels::cuda::{self, GpuError};

pub(super) const ONLY_GPU: &str =
    "the plan is in bf16, which only GPUs train in; valid: --gpu, or a plan with dtype f32";

/// Opens the GPU that is asked for and reserves the planned memory of `ranks` ranks; `None` if no
/// GPU is asked for.
pub(super) fn open_gpu(
    spec: &TrainerSpec,
    flags: &Flags,
    (may, must): (bool, bool),
    place: Option<&ProcessPlace>,
    ranks: usize,
) -> Result<Option<cuda::Gpu>, Error> {
    let wrong = |problem: String| Error::Flag { flag: "gpu", problem };
    let Some(asked) = flags.gpu else {
        return if must { Err(wrong(ONLY_GPU.to_owned())) } else { Ok(None) };
    };
    if !may {
        return Err(wrong("the plan is in f64; valid on a GPU: a plan in bf16 or f32".to_owned()));
    }
    let head_dim = spec.head_dim;
    if must && !(head_dim.is_multiple_of(16) && head_dim <= 256) {
        let valid = "valid in bf16: multiples of 16 up to 256, or a plan with dtype f32";
        return Err(wrong(format!("the model's heads have {head_dim} dimensions; {valid}")));
    }
    let number = launcher::gpu_of(asked, place, |name| std::env::var(name).ok())?;
    let gpu = cuda::Gpu::open(number).map_err(|error| wrong(why_no_gpu(&error, place)))?;
    reserve(&gpu, spec.planned_memory_bytes(), ranks)?;
    Ok(Some(gpu))
}

/// Describes a GPU that cannot be opened, and more processes than GPUs if that is the cause.
fn why_no_gpu(error: &GpuError, place: Option<&ProcessPlace>) -> String {
    match (error, place) {
        (GpuError::NoSuchGpu { .. }, Some(place)) => format!(
            "{error}; {} started a process for each GPU: valid: as many on each machine as it has GPUs, or one process \
             whose ranks share a GPU (plan launch DIR --gpu)",
            place.launcher.name()
        ),
        _ => error.to_string(),
    }
}

/// Sixteenths of the planned memory that are reserved at once. The plan also counts what the driver
/// and its libraries hold, which they allocate themselves.
const ARENA_16THS: u64 = 15;

/// Reserves the planned memory of all ranks that share the GPU. A plan that does not fit fails
/// here, not in the middle of a step.
fn reserve(gpu: &cuda::Gpu, planned_bytes: u64, ranks: usize) -> Result<(), Error> {
    if planned_bytes == 0 {
        return Ok(());
    }
    let each = planned_bytes / 16 * ARENA_16THS;
    let all = usize::try_from(each).unwrap_or(usize::MAX).saturating_mul(ranks);
    gpu.reserve(all).map_err(|error| {
        let who = if ranks == 1 { "1 rank has".to_owned() } else { format!("{ranks} ranks share") };
        let problem = format!(
            "the plan gives a rank {planned_bytes} bytes (the largest `memory.total` of plan.yaml's stages) and {who} this \
             GPU: {error}; valid: a plan for a cluster whose devices have less memory, fewer ranks on a GPU, or a GPU \
             that nobody else uses"
        );
        Error::Flag { flag: "gpu", problem }
    })
}

#[cfg(test)]
mod tests {
    use super::super::{Job, TrainedDtype};
    use super::*;
    use crate::calibration::program_of;
    use crate::comm::Solo;
    use crate::launch::interrupt::Interrupt;
    use clap::Parser;
    use kernels::cuda::AsyncEmulator;
    use kernels::cuda::cpu_emulator::CpuEmulator;
    use serde_json::Value;
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;

    /// Trains a small model on an emulated GPU; returns the losses, and what the rank report says
    /// of graphs.
    fn trained(folder: &Path, flags: &[&str]) -> (Vec<Value>, Value) {
        let text = "name: small\nlayers: 1\nhidden: 16\nheads: 2\nkv_heads: 1\nffn: 32\nvocab: 520\n\
                    seq_len: 32\n";
        let program = program_of(text, 8, 1, 1).unwrap();
        let data = "../tests/golden/llama_gqa/tokens.safetensors";
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join(data);
        let [metrics, report] = ["metrics", "report"].map(|name| folder.join(name));
        // A run appends to existing metrics.
        let _new = std::fs::remove_file(&metrics);
        let paths = [("--data", &data), ("--metrics", &metrics), ("--rank-report", &report)];
        let paths = paths.map(|(flag, path)| format!("{flag}={}", path.display()));
        let words = ["trainer", "--gpu", "--steps=4"].into_iter().chain(flags.iter().copied());
        let flags = Flags::parse_from(words.chain(paths.iter().map(String::as_str)));
        let machine = CpuEmulator::new(&folder.join("machine")).unwrap();
        let gpu = cuda::Gpu::on(Arc::new(AsyncEmulator::new(machine, Duration::ZERO)));
        let interrupt = Interrupt::default();
        let (spec, flags, interrupt) = (&f32::spec(&program), &flags, &interrupt);
        let job = Job { stages: &program, spec, flags, interrupt, ranks_in_process: 1 };
        f32::train(job, Some(&gpu), Box::new(Solo::new()), 1).unwrap();
        let lines = |path| std::fs::read_to_string(path).unwrap();
        let json = |line: &str| serde_json::from_str::<Value>(line).unwrap();
        let steps: Vec<Value> = lines(metrics).lines().map(json).collect();
        for step in &steps {
            assert!(
                step["step_s"].as_f64() > Some(0.0) && step.get("compute_s").is_none(),
                "{step}"
            );
        }
        let losses = steps.iter().map(|step| step["loss"].clone()).collect();
        (losses, json(lines(report).trim())["cuda_graphs"].clone())
    }

    #[test]
    fn steps_are_replayed_unless_that_is_refused() {
        let folder = std::env::temp_dir().join(format!("meshwright-graphs-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (losses, said) = trained(&folder, &[]);
        assert_eq!((losses.len(), &said["replayed_steps"]), (4, &Value::from(2)), "{said}");
        assert!(said["why_not"].is_null());
        let trace = format!("--trace={}", folder.join("trace").display());
        for flag in ["--no-cuda-graphs", &trace] {
            let (launcher, said) = trained(&folder, &[flag]);
            assert_eq!((&launcher, &said["replayed_steps"]), (&losses, &Value::from(0)));
            let why = said["why_not"].as_str().unwrap();
            assert!(why.starts_with(flag.split('=').next().unwrap()), "{why}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn what_the_plan_gives_is_reserved_or_refused_by_its_field() {
        let folder = std::env::temp_dir();
        let gpu = || cuda::Gpu::on(Arc::new(CpuEmulator::new(&folder).unwrap()));
        let (fits, small) = (gpu(), gpu());
        reserve(&fits, 1 << 16, 3).unwrap();
        assert_eq!((fits.bytes_reserved(), fits.bytes_beyond_arena()), ((3 * 15) << 12, 0));
        reserve(&small, 0, 3).unwrap();
        assert_eq!(small.bytes_reserved(), 0);
        // More than any GPU has.
        let text = reserve(&small, 1 << 61, 2).unwrap_err().to_string();
        for part in
            ["--gpu: ", "2305843009213693952 bytes", "`memory.total` of plan.yaml", "2 ranks share"]
        {
            assert!(text.contains(part), "{text}");
        }
    }
}
