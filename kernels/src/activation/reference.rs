//! Element by element, in f64.

use super::{Activation, BOUND, CUBIC, LOGISTIC, SQRT_2_OVER_PI};
use crate::{Cpu, Real};
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

/// `y = f(x)`.
///
/// # Panics
/// If the slices differ in length.
pub fn forward<T: Real>(_cpu: &Cpu, activation: Activation, x: &[T], y: &mut [T]) {
    crate::check::length("y", y.len(), x.len());
    for (y, x) in y.iter_mut().zip(x) {
        *y = T::from_f64(value(activation, x.to_f64()));
    }
}

/// `dx = dy f'(x)`.
///
/// # Panics
/// If the slices differ in length.
pub fn backward<T: Real>(_cpu: &Cpu, activation: Activation, x: &[T], dy: &[T], dx: &mut [T]) {
    crate::check::length("dy", dy.len(), x.len());
    crate::check::length("dx", dx.len(), x.len());
    for ((dx, dy), x) in dx.iter_mut().zip(dy).zip(x) {
        *dx = T::from_f64(dy.to_f64() * derivative(activation, x.to_f64()));
    }
}

/// `y = f(gate) g(up)`.
///
/// # Panics
/// If the slices differ in length.
pub fn gated_forward<T: Real>(
    _cpu: &Cpu,
    activation: Activation,
    gate: &[T],
    up: &[T],
    y: &mut [T],
) {
    crate::check::length("up", up.len(), gate.len());
    crate::check::length("y", y.len(), gate.len());
    for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
        *y = T::from_f64(value(activation, gate.to_f64()) * factor(activation, up.to_f64()));
    }
}

/// `dgate = dy g(up) f'(gate)`, `dup = dy f(gate) g'(up)`.
///
/// # Panics
/// If the slices differ in length.
pub fn gated_backward<T: Real>(
    _cpu: &Cpu,
    activation: Activation,
    gate: &[T],
    up: &[T],
    dy: &[T],
    dgate: &mut [T],
    dup: &mut [T],
) {
    super::check_gated(gate.len(), [up.len(), dy.len(), dgate.len(), dup.len()]);
    for at in 0..gate.len() {
        let (gate, up, dy) = (gate[at].to_f64(), up[at].to_f64(), dy[at].to_f64());
        dgate[at] = T::from_f64(dy * factor(activation, up) * derivative(activation, gate));
        let passes = activation != Activation::ClampedGelu || up.abs() <= BOUND;
        dup[at] = T::from_f64(if passes { dy * value(activation, gate) } else { 0.0 });
    }
}

fn value(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Relu => x.max(0.0),
        Activation::SquaredRelu => x.max(0.0).powi(2),
        Activation::GeluTanh => 0.5 * x * (1.0 + (SQRT_2_OVER_PI * (x + CUBIC * x * x * x)).tanh()),
        Activation::GeluErf => 0.5 * x * (1.0 + libm::erf(x * FRAC_1_SQRT_2)),
        Activation::Silu => x * sigmoid(x),
        Activation::ClampedGelu => x.min(BOUND) * sigmoid(LOGISTIC * x.min(BOUND)),
    }
}

fn factor(activation: Activation, up: f64) -> f64 {
    match activation {
        Activation::ClampedGelu => 1.0 + up.clamp(-BOUND, BOUND),
        _ => up,
    }
}

fn derivative(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Relu => f64::from(x > 0.0),
        Activation::SquaredRelu => 2.0 * x.max(0.0),
        Activation::GeluTanh => {
            let t = (SQRT_2_OVER_PI * (x + CUBIC * x * x * x)).tanh();
            let inner = SQRT_2_OVER_PI * (1.0 + 3.0 * CUBIC * x * x);
            0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
        }
        Activation::GeluErf => {
            let density = 0.5 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2 * (-0.5 * x * x).exp();
            0.5 * (1.0 + libm::erf(x * FRAC_1_SQRT_2)) + x * density
        }
        Activation::Silu => sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x))),
        Activation::ClampedGelu if x > BOUND => 0.0,
        Activation::ClampedGelu => {
            let s = sigmoid(LOGISTIC * x);
            s * (1.0 + LOGISTIC * x * (1.0 - s))
        }
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
