//! Loading of the collectives library.

use super::driver::GpuError;
use super::nccl::Library;
use std::sync::Arc;

/// Loads NCCL.
///
/// # Errors
/// If this build or this machine does not have it; the message says what is missing.
#[cfg(feature = "cuda")]
pub fn open_nccl() -> Result<Arc<dyn Library>, GpuError> {
    super::libnccl::open()
}

/// Loads NCCL: always an error, since this build has no code for GPUs.
///
/// # Errors
/// Always.
#[cfg(not(feature = "cuda"))]
pub fn open_nccl() -> Result<Arc<dyn Library>, GpuError> {
    Err(GpuError::CpuOnly)
}
