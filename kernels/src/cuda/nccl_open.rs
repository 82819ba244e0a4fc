//! Where a library of collectives comes from.

use super::driver::GpuError;
use super::nccl::Library;
use std::sync::Arc;

/// NCCL, looked for now.
///
/// # Errors
/// Where this build or this machine has none: the message says what is missing.
#[cfg(feature = "cuda")]
pub fn open_nccl() -> Result<Arc<dyn Library>, GpuError> {
    super::libnccl::open()
}

/// NCCL: an error here, since this build has no code for GPUs.
///
/// # Errors
/// Always.
#[cfg(not(feature = "cuda"))]
pub fn open_nccl() -> Result<Arc<dyn Library>, GpuError> {
    Err(GpuError::CpuOnly)
}
