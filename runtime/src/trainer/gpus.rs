//! The GPU that a process trains on, and its memory.

use super::Flags;
use crate::error::Error;
use crate::launch::launcher::{self, ProcessPlace};
use crate::spec::TrainerSpec;
use kernels::cuda::{self, GpuError};

/// Whether a number format trains on GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnGpu {
    /// It does not.
    No,
    /// It does.
    Yes,
    /// It does, on tensor cores, which take heads of some sizes alone.
    WithTensorCores,
}

/// Opens the GPU that is asked for and reserves the planned memory of `ranks` ranks; `None` if no
/// GPU is asked for.
pub(super) fn open_gpu(
    spec: &TrainerSpec,
    flags: &Flags,
    on_gpu: OnGpu,
    place: Option<&ProcessPlace>,
    ranks: usize,
) -> Result<Option<cuda::Gpu>, Error> {
    let wrong = |problem: String| Error::Flag { flag: "gpu", problem };
    let Some(asked) = flags.gpu else {
        return Ok(None);
    };
    if on_gpu == OnGpu::No {
        return Err(wrong("the plan is in f64; valid on a GPU: a plan in bf16 or f32".to_owned()));
    }
    let fits = |dim: &usize| dim.is_multiple_of(16) && *dim <= 256;
    let wrong_heads = [spec.head_dim, spec.value_dim].into_iter().find(|dim| !fits(dim));
    if let (OnGpu::WithTensorCores, Some(head_dim)) = (on_gpu, wrong_heads) {
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
    use super::*;
    use kernels::cuda::cpu_emulator::CpuEmulator;
    use std::sync::Arc;

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
