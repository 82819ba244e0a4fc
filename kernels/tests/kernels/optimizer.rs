//! AdamW against a transcription of its formula for one number, and fast against reference.

use crate::support::{close, cpu, normal, tolerance};
use kernels::Real;
use kernels::adamw::{AdamW, Parameter, Proposal, proposal, reference, update};
use proptest::prelude::*;

/// Decoupled decay, then the bias-corrected step, in the conventions of the golden data.
fn by_hand(t: i32, [w, g, m, v]: [f64; 4], decay: f64) -> [f64; 3] {
    let w = w * (1.0 - 1e-3 * decay);
    let m = 0.9 * m + 0.1 * g;
    let v = 0.95 * v + 0.05 * g * g;
    let corrected = v.sqrt() / (1.0 - 0.95f64.powi(t)).sqrt();
    [w - 1e-3 / (1.0 - 0.9f64.powi(t)) * m / (corrected + 1e-8), m, v]
}

fn numbers(step: u32) -> AdamW {
    AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, step, gradient_scale: 0.5 }
}

fn state<T: Real>(n: usize) -> [Vec<T>; 4] {
    let squares = normal::<T>(4, n).into_iter().map(|x| x * x).collect();
    [normal(1, n), normal(2, n), normal(3, n), squares]
}

#[test]
fn steps_follow_the_formula() {
    let n = 50;
    let [mut w, _, _, _] = state::<f64>(n);
    let (mut m, mut v) = (vec![0.0; n], vec![0.0; n]);
    let mut want: Vec<[f64; 3]> = w.iter().map(|&w| [w, 0.0, 0.0]).collect();
    for step in 1..=5 {
        let g = normal::<f64>(10 + u64::from(step), n);
        let (w1, w2) = w.split_at_mut(20);
        let ((m1, m2), (v1, v2)) = (m.split_at_mut(20), v.split_at_mut(20));
        let mut parameters = [
            Parameter { w: w1, g: &g[..20], m: m1, v: v1, decay: 0.1 },
            Parameter { w: w2, g: &g[20..], m: m2, v: v2, decay: 0.0 },
        ];
        update(&cpu(), &numbers(step), &mut parameters);
        for (i, want) in want.iter_mut().enumerate() {
            let decay = if i < 20 { 0.1 } else { 0.0 };
            *want = by_hand(step as i32, [want[0], 0.5 * g[i], want[1], want[2]], decay);
        }
    }
    let column = |c: usize| want.iter().map(|want| want[c]).collect::<Vec<_>>();
    close("w", &w, &column(0), 1e-14);
    close("m", &m, &column(1), 1e-14);
    close("v", &v, &column(2), 1e-14);
}

fn compare<T: Real>(n: usize, step: u32) {
    let ([mut w, g, mut m, mut v], [mut w2, _, mut m2, mut v2]) = (state::<T>(n), state::<T>(n));
    let mut got = [Parameter { w: &mut w, g: &g, m: &mut m, v: &mut v, decay: 0.1 }];
    let mut want = [Parameter { w: &mut w2, g: &g, m: &mut m2, v: &mut v2, decay: 0.1 }];
    update(&cpu(), &numbers(step), &mut got);
    reference::update(&cpu(), &numbers(step), &mut want);
    for (what, got, want) in [("w", &w, &w2), ("m", &m, &m2), ("v", &v, &v2)] {
        close(what, got, want, tolerance::<T>());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn blocks_are_the_reference(n in prop_oneof![0usize..70, Just(40_001)], step in 1u32..100) {
        compare::<f64>(n, step);
        compare::<f32>(n, step);
    }
}

/// A proposal has the bits of the step and changes nothing else.
fn propose<T: Real>(n: usize, step: u32) {
    let [mut w, g, mut m, mut v] = state::<T>(n);
    let (mut to, mut plain) = (vec![T::ZERO; n], vec![T::ZERO; n]);
    let of = |to| Proposal { to, w: &w, g: &g, m: &m, v: &v, decay: 0.1 };
    proposal(&cpu(), &numbers(step), &mut [of(&mut to)]);
    reference::proposal(&cpu(), &numbers(step), &mut [of(&mut plain)]);
    close("plain", &to, &plain, tolerance::<T>());
    let state = Parameter { w: &mut w, g: &g, m: &mut m, v: &mut v, decay: 0.1 };
    update(&cpu(), &numbers(step), &mut [state]);
    assert!(to == w, "step {step}");
}

#[test]
fn proposals_are_what_steps_give() {
    for (n, step) in [(0, 1), (7, 1), (70, 2), (40_001, 3)] {
        propose::<f64>(n, step);
        propose::<f32>(n, step);
    }
}

#[test]
#[should_panic(expected = "g has 2 elements where the shape says 3")]
fn slices_of_other_lengths_are_refused() {
    let (mut w, mut m, mut v) = ([0.0; 3], [0.0; 3], [0.0; 3]);
    let parameter = Parameter { w: &mut w, g: &[0.0; 2], m: &mut m, v: &mut v, decay: 0.0 };
    update(&cpu(), &numbers(1), &mut [parameter]);
}
