//! Element types of tensors.

use crate::comm::Element;
use half::bf16;
use kernels::Real;

/// An element type that tensors are stored in.
pub trait Number: Element {
    /// The nearest value of this type.
    fn nearest(value: f64) -> Self;
    /// The value as an `f64`.
    fn value(self) -> f64;
}

/// An element type that kernels compute in and ranks exchange: `f32` or `f64`.
pub trait Scalar: Real + Number {}

impl Number for f32 {
    fn nearest(value: f64) -> Self {
        value as Self
    }

    fn value(self) -> f64 {
        f64::from(self)
    }
}

impl Number for f64 {
    fn nearest(value: f64) -> Self {
        value
    }

    fn value(self) -> f64 {
        self
    }
}

impl Number for bf16 {
    fn nearest(value: f64) -> Self {
        Self::from_f64(value)
    }

    fn value(self) -> f64 {
        self.to_f64()
    }
}

impl Scalar for f32 {}
impl Scalar for f64 {}
