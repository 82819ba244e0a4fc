//! Vectorised, with blocks of all parameters on threads.

use super::{AdamW, Factors, Parameter, Proposal};
use crate::simd::{BLOCK, vectorized};
use crate::{Cpu, Real};

/// One step of every parameter.
///
/// # Panics
/// If the slices of a parameter differ in length, or the step is 0.
pub fn update<T: Real>(cpu: &Cpu, adamw: &AdamW, parameters: &mut [Parameter<T>]) {
    parameters.iter().for_each(Parameter::check);
    let factors = adamw.factors();
    let blocks = parameters.iter_mut().flat_map(|parameter| {
        let Parameter { w, g, m, v, decay } = parameter;
        let keep = 1.0 - adamw.lr * *decay;
        let state = m.chunks_mut(BLOCK).zip(v.chunks_mut(BLOCK));
        w.chunks_mut(BLOCK).zip(g.chunks(BLOCK)).zip(state).map(move |block| (keep, block))
    });
    cpu.each(blocks, |(keep, ((w, g), (m, v)))| {
        update_block(cpu.arch(), Numbers::new(adamw, &factors, keep), w, g, m, v);
    });
}

/// The weights that [`update`] would give, with the same bits; the state stays unchanged.
///
/// # Panics
/// If the slices of a parameter differ in length, or the step is 0.
pub fn proposal<T: Real>(cpu: &Cpu, adamw: &AdamW, parameters: &mut [Proposal<T>]) {
    parameters.iter().for_each(Proposal::check);
    let factors = adamw.factors();
    let blocks = parameters.iter_mut().flat_map(|parameter| {
        let Proposal { to, w, g, m, v, decay } = parameter;
        let keep = 1.0 - adamw.lr * *decay;
        let state = m.chunks(BLOCK).zip(v.chunks(BLOCK));
        let weights = to.chunks_mut(BLOCK).zip(w.chunks(BLOCK));
        weights.zip(g.chunks(BLOCK)).zip(state).map(move |block| (keep, block))
    });
    cpu.each(blocks, |(keep, (((to, w), g), (m, v)))| {
        proposal_block(cpu.arch(), Numbers::new(adamw, &factors, keep), to, w, g, m, v);
    });
}

/// The factors of a step in the element type.
struct Numbers<T> {
    keep: T,
    gradient_scale: T,
    beta1: T,
    rest1: T,
    beta2: T,
    rest2: T,
    rate: T,
    inverse_root: T,
    eps: T,
}

impl<T: Real> Numbers<T> {
    fn new(adamw: &AdamW, factors: &Factors, keep: f64) -> Self {
        Self {
            keep: T::from_f64(keep),
            gradient_scale: T::from_f64(adamw.gradient_scale),
            beta1: T::from_f64(adamw.beta1),
            rest1: T::from_f64(1.0 - adamw.beta1),
            beta2: T::from_f64(adamw.beta2),
            rest2: T::from_f64(1.0 - adamw.beta2),
            rate: T::from_f64(factors.rate),
            inverse_root: T::from_f64(1.0 / factors.root),
            eps: T::from_f64(adamw.eps),
        }
    }
}

vectorized! {
    fn proposal_block<T: Real>(
        n: Numbers<T>, to: &'a mut [T], w: &'a [T], g: &'a [T], m: &'a [T], v: &'a [T],
    ) {
        for (((to, &w), &g), (&m, &v)) in to.iter_mut().zip(w).zip(g).zip(m.iter().zip(v)) {
            let g = n.gradient_scale * g;
            let m = n.beta1.fma(m, n.rest1 * g);
            let v = n.beta2.fma(v, n.rest2 * g * g);
            let change = n.rate * m / v.sqrt().fma(n.inverse_root, n.eps);
            *to = n.keep.fma(w, -change);
        }
    }
}

vectorized! {
    fn update_block<T: Real>(n: Numbers<T>, w: &'a mut [T], g: &'a [T], m: &'a mut [T], v: &'a mut [T]) {
        for ((w, &g), (m, v)) in w.iter_mut().zip(g).zip(m.iter_mut().zip(v)) {
            let g = n.gradient_scale * g;
            *m = n.beta1.fma(*m, n.rest1 * g);
            *v = n.beta2.fma(*v, n.rest2 * g * g);
            let change = n.rate * *m / v.sqrt().fma(n.inverse_root, n.eps);
            *w = n.keep.fma(*w, -change);
        }
    }
}
