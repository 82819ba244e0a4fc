//! Activations: plain `y = f(x)` and gated `y = f(gate) g(up)`. All tensors of a call have the same
//! length.
//!
//! The gated ones are SwiGLU (`Silu`), GEGLU (`GeluTanh`, `GeluErf`) and ReGLU (`Relu`), where `g`
//! is the identity (Shazeer 2020), and the clamped one of gpt-oss (`ClampedGelu`; model card, arXiv
//! 2508.10925, section 2.2). The backward pass recomputes `f` and `g` from their inputs, so the
//! product need not be saved.

pub mod cuda;
mod fast;
pub mod reference;

pub use fast::{backward, forward, gated_backward, gated_forward};

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

/// `sqrt(2 / pi)`.
const SQRT_2_OVER_PI: f64 = FRAC_2_SQRT_PI * FRAC_1_SQRT_2;
/// Cubic coefficient of GELU's approximation.
const CUBIC: f64 = 0.044_715;
/// Coefficient of GELU's approximation by a logistic function (Hendrycks and Gimpel 2016, section
/// 2).
const LOGISTIC: f64 = 1.702;
/// Bound of [`Activation::ClampedGelu`]'s inputs.
const BOUND: f64 = 7.0;

/// The function `f`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2`.
    SquaredRelu,
    /// `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`, as in GPT-2.
    GeluTanh,
    /// `x/2 (1 + erf(x / sqrt 2))`.
    GeluErf,
    /// `x / (1 + e^-x)`.
    Silu,
    /// `m / (1 + e^(-1.702 m))` for `m = min(x, 7)`; gated, `g` is `1 + max(-7, min(up, 7))`.
    ClampedGelu,
}

impl Activation {
    /// All activations.
    pub const ALL: [Self; 6] = [
        Self::Relu,
        Self::SquaredRelu,
        Self::GeluTanh,
        Self::GeluErf,
        Self::Silu,
        Self::ClampedGelu,
    ];
}

#[track_caller]
fn check_gated(gate: usize, [up, dy, dgate, dup]: [usize; 4]) {
    for (name, got) in [("up", up), ("dy", dy), ("dgate", dgate), ("dup", dup)] {
        crate::check::length(name, got, gate);
    }
}
