//! The element types that are trained in.

use crate::comm::Element;
use kernels::Real;

/// An element type that kernels compute in and ranks exchange: `f32` or `f64`.
pub trait Scalar: Real + Element {}

impl Scalar for f32 {}
impl Scalar for f64 {}
