//! Element by element, in f64.

use super::{AdamW, Parameter, Proposal};
use crate::{Cpu, Real};

/// One step of every parameter.
///
/// # Panics
/// If the slices of a parameter differ in length, or the step is 0.
pub fn update<T: Real>(_cpu: &Cpu, adamw: &AdamW, parameters: &mut [Parameter<T>]) {
    let factors = adamw.factors();
    for parameter in parameters {
        parameter.check();
        let keep = 1.0 - adamw.lr * parameter.decay;
        for at in 0..parameter.w.len() {
            let g = adamw.gradient_scale * parameter.g[at].to_f64();
            let m = adamw.beta1 * parameter.m[at].to_f64() + (1.0 - adamw.beta1) * g;
            let v = adamw.beta2 * parameter.v[at].to_f64() + (1.0 - adamw.beta2) * g * g;
            let change = factors.rate * m / (v.sqrt() / factors.root + adamw.eps);
            parameter.w[at] = T::from_f64(parameter.w[at].to_f64() * keep - change);
            (parameter.m[at], parameter.v[at]) = (T::from_f64(m), T::from_f64(v));
        }
    }
}

/// The weights that [`update`] would give; the state stays unchanged.
///
/// # Panics
/// If the slices of a parameter differ in length, or the step is 0.
pub fn proposal<T: Real>(cpu: &Cpu, adamw: &AdamW, parameters: &mut [Proposal<T>]) {
    for Proposal { to, w, g, m, v, decay } in parameters {
        to.copy_from_slice(w);
        let (mut m, mut v) = (m.to_vec(), v.to_vec());
        update(cpu, adamw, &mut [Parameter { w: to, g, m: &mut m, v: &mut v, decay: *decay }]);
    }
}
