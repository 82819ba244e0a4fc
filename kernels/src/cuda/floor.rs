//! The lower bound on a kernel's work.

use std::ops::Add;

/// Bytes that any implementation must move, and operations it must perform: what a kernel's speed
/// is measured against. Each argument is read or written once; a multiplication and an addition
/// count as two operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Floor {
    /// Bytes read and written.
    pub bytes: usize,
    /// Operations: of tensor cores for matrix products, otherwise of the other units.
    pub flops: usize,
}

impl Floor {
    /// The bound of a kernel that arithmetic never limits.
    #[must_use]
    pub const fn bytes(bytes: usize) -> Self {
        Self { bytes, flops: 0 }
    }

    /// Seconds at the given bytes and operations per second, if both overlap perfectly.
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
