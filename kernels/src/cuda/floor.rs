//! The least that a kernel has to do.

use std::ops::Add;

/// Bytes that must be moved and operations that must be made, whatever the kernel: what its speed is measured against.
/// Each argument is read or written once; a multiplication and an addition count as two operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Floor {
    /// Read and written.
    pub bytes: usize,
    /// On tensor cores where they are of matrix products, else on the others.
    pub flops: usize,
}

impl Floor {
    /// Of a kernel that arithmetic never limits.
    #[must_use]
    pub const fn bytes(bytes: usize) -> Self {
        Self { bytes, flops: 0 }
    }

    /// Seconds at so many bytes and operations a second, both at once.
    #[must_use]
    #[allow(clippy::cast_precision_loss)]
    pub fn seconds(&self, bytes_per_s: f64, flops_per_s: f64) -> f64 {
        (self.bytes as f64 / bytes_per_s).max(self.flops as f64 / flops_per_s)
    }
}

impl Add for Floor {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { bytes: self.bytes + other.bytes, flops: self.flops + other.flops }
    }
}
