//! Vectorised, with blocks of elements on threads. The match over `f` is outside the loops.

use super::{Activation, BOUND, CUBIC, LOGISTIC, SQRT_2_OVER_PI};
use crate::simd::{BLOCK, vectorized};
use crate::{Cpu, Real};
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

/// A function as a type, so that loops over it are compiled for it alone.
trait Function: Send + Sync {
    /// `f(x)` and `f'(x)`.
    fn both<T: Real>(x: T) -> (T, T);

    /// `g(up)` and `g'(up)`.
    #[inline(always)]
    fn factor<T: Real>(up: T) -> (T, T) {
        (up, T::ONE)
    }
}

struct Relu;
struct SquaredRelu;
struct GeluTanh;
struct GeluErf;
struct Silu;
struct ClampedGelu;

impl Function for Relu {
    #[inline(always)]
    fn both<T: Real>(x: T) -> (T, T) {
        let slope = if x > T::ZERO { T::ONE } else { T::ZERO };
        (if x > T::ZERO { x } else { T::ZERO }, slope)
    }
}

impl Function for SquaredRelu {
    #[inline(always)]
    fn both<T: Real>(x: T) -> (T, T) {
        let x = if x > T::ZERO { x } else { T::ZERO };
        (x * x, x + x)
    }
}

impl Function for GeluTanh {
    /// `(1 + tanh u) / 2` computed as the logistic function of `2 u`, without cancellation.
    #[inline(always)]
    fn both<T: Real>(x: T) -> (T, T) {
        let slope = T::from_f64(2.0 * SQRT_2_OVER_PI);
        let cubic = T::from_f64(2.0 * SQRT_2_OVER_PI * CUBIC);
        let square = x * x;
        let s = logistic(x * cubic.fma(square, slope));
        let inner = (T::from_f64(3.0) * cubic).fma(square, slope);
        (x * s, s.fma(x * (T::ONE - s) * inner, s))
    }
}

impl Function for GeluErf {
    #[inline(always)]
    fn both<T: Real>(x: T) -> (T, T) {
        let erf = (x * T::from_f64(FRAC_1_SQRT_2)).verf();
        let cumulative = T::from_f64(0.5) * (T::ONE + erf);
        let density = T::from_f64(0.5 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2);
        (x * cumulative, (x * density).fma((T::from_f64(-0.5) * x * x).vexp(), cumulative))
    }
}

impl Function for Silu {
    #[inline(always)]
    fn both<T: Real>(x: T) -> (T, T) {
        let s = logistic(x);
        (x * s, s.fma(x * (T::ONE - s), s))
    }
}

impl Function for ClampedGelu {
    #[inline(always)]
    fn both<T: Real>(x: T) -> (T, T) {
        let (bound, rate) = (T::from_f64(BOUND), T::from_f64(LOGISTIC));
        let m = if x > bound { bound } else { x };
        let s = logistic(rate * m);
        let slope = s.fma(rate * m * (T::ONE - s), s);
        (m * s, if x > bound { T::ZERO } else { slope })
    }

    #[inline(always)]
    fn factor<T: Real>(up: T) -> (T, T) {
        let bound = T::from_f64(BOUND);
        let below = if up > bound { bound } else { up };
        let within = if below < -bound { -bound } else { below };
        (T::ONE + within, if within == up { T::ONE } else { T::ZERO })
    }
}

#[inline(always)]
fn logistic<T: Real>(x: T) -> T {
    T::ONE / (T::ONE + (-x).vexp())
}

/// Calls a function that is generic over [`Function`], for an [`Activation`].
macro_rules! of {
    ($activation:expr, $function:ident($($argument:expr),*)) => {
        match $activation {
            Activation::Relu => $function::<T, Relu>($($argument),*),
            Activation::SquaredRelu => $function::<T, SquaredRelu>($($argument),*),
            Activation::GeluTanh => $function::<T, GeluTanh>($($argument),*),
            Activation::GeluErf => $function::<T, GeluErf>($($argument),*),
            Activation::Silu => $function::<T, Silu>($($argument),*),
            Activation::ClampedGelu => $function::<T, ClampedGelu>($($argument),*),
        }
    };
}

/// `y = f(x)`.
///
/// # Panics
/// If the slices differ in length.
pub fn forward<T: Real>(cpu: &Cpu, activation: Activation, x: &[T], y: &mut [T]) {
    crate::check::length("y", y.len(), x.len());
    cpu.each(x.chunks(BLOCK).zip(y.chunks_mut(BLOCK)), |(x, y)| {
        of!(activation, forward_block(cpu.arch(), x, y));
    });
}

vectorized! {
    fn forward_block<T: Real, F: Function>(x: &'a [T], y: &'a mut [T]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = F::both(x).0;
        }
    }
}

/// `dx = dy f'(x)`.
///
/// # Panics
/// If the slices differ in length.
pub fn backward<T: Real>(cpu: &Cpu, activation: Activation, x: &[T], dy: &[T], dx: &mut [T]) {
    crate::check::length("dy", dy.len(), x.len());
    crate::check::length("dx", dx.len(), x.len());
    let blocks = x.chunks(BLOCK).zip(dy.chunks(BLOCK)).zip(dx.chunks_mut(BLOCK));
    cpu.each(blocks, |((x, dy), dx)| {
        of!(activation, backward_block(cpu.arch(), x, dy, dx));
    });
}

vectorized! {
    fn backward_block<T: Real, F: Function>(x: &'a [T], dy: &'a [T], dx: &'a mut [T]) {
        for ((dx, &dy), &x) in dx.iter_mut().zip(dy).zip(x) {
            *dx = dy * F::both(x).1;
        }
    }
}

/// `y = f(gate) g(up)`.
///
/// # Panics
/// If the slices differ in length.
pub fn gated_forward<T: Real>(
    cpu: &Cpu,
    activation: Activation,
    gate: &[T],
    up: &[T],
    y: &mut [T],
) {
    crate::check::length("up", up.len(), gate.len());
    crate::check::length("y", y.len(), gate.len());
    let blocks = gate.chunks(BLOCK).zip(up.chunks(BLOCK)).zip(y.chunks_mut(BLOCK));
    cpu.each(blocks, |((gate, up), y)| {
        of!(activation, gated_forward_block(cpu.arch(), gate, up, y));
    });
}

vectorized! {
    fn gated_forward_block<T: Real, F: Function>(gate: &'a [T], up: &'a [T], y: &'a mut [T]) {
        for ((y, &gate), &up) in y.iter_mut().zip(gate).zip(up) {
            *y = F::both(gate).0 * F::factor(up).0;
        }
    }
}

/// `dgate = dy g(up) f'(gate)`, `dup = dy f(gate) g'(up)`.
///
/// # Panics
/// If the slices differ in length.
pub fn gated_backward<T: Real>(
    cpu: &Cpu,
    activation: Activation,
    gate: &[T],
    up: &[T],
    dy: &[T],
    dgate: &mut [T],
    dup: &mut [T],
) {
    super::check_gated(gate.len(), [up.len(), dy.len(), dgate.len(), dup.len()]);
    let read = gate.chunks(BLOCK).zip(up.chunks(BLOCK)).zip(dy.chunks(BLOCK));
    let written = dgate.chunks_mut(BLOCK).zip(dup.chunks_mut(BLOCK));
    cpu.each(read.zip(written), |(((gate, up), dy), (dgate, dup))| {
        of!(activation, gated_backward_block(cpu.arch(), gate, up, dy, dgate, dup));
    });
}

vectorized! {
    fn gated_backward_block<T: Real, F: Function>(
        gate: &'a [T], up: &'a [T], dy: &'a [T], dgate: &'a mut [T], dup: &'a mut [T],
    ) {
        let read = gate.iter().zip(up).zip(dy);
        for (((&gate, &up), &dy), (dgate, dup)) in read.zip(dgate.iter_mut().zip(dup)) {
            let ((value, slope), (factor, slope_of_factor)) = (F::both(gate), F::factor(up));
            *dgate = dy * factor * slope;
            *dup = dy * value * slope_of_factor;
        }
    }
}
