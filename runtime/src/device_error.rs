//! A device's failure, as devices and communicators both report it.

use kernels::cuda::GpuError;
use thiserror::Error;

/// What a device says went wrong.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the device failed: {0}")]
pub struct DeviceError(pub String);

impl From<GpuError> for DeviceError {
    fn from(error: GpuError) -> Self {
        Self(error.to_string())
    }
}
