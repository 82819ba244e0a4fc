//! Random inputs, and comparisons.

use kernels::{Cpu, Real};

/// The reference implementations under the names of the operations.
pub mod spec {
    pub use kernels::activation::reference as activation;
    pub use kernels::attention::reference as attention;
    pub use kernels::cross_entropy::reference as cross_entropy;
    pub use kernels::embedding::reference as embedding;
    pub use kernels::gemm::reference as gemm;
    pub use kernels::latent_heads::reference as latent_heads;
    pub use kernels::layer_norm::reference as layer_norm;
    pub use kernels::rms_norm::reference as rms_norm;
    pub use kernels::rope::reference as rope;
}

/// Numbers around 0 with variance 1, from a seed (splitmix64, twelve uniforms each).
pub fn normal<T: Real>(seed: u64, len: usize) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x1234_5678;
    let mut unit = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    };
    (0..len).map(|_| T::from_f64((0..12).map(|_| unit()).sum::<f64>() - 6.0)).collect()
}

/// Integers in `range` from a seed.
pub fn integers(seed: u64, len: usize, range: std::ops::Range<i64>) -> Vec<i64> {
    let width = (range.end - range.start) as f64;
    let of = |x: f64| range.start + ((x + 6.0) / 12.0 * 997.0).fract().mul_add(width, 0.0) as i64;
    normal::<f64>(seed, len).into_iter().map(of).collect()
}

/// A context with three threads, which may exceed this machine's cores.
pub fn cpu() -> Cpu {
    Cpu::new(3).expect("threads start")
}

/// NaN, which would spread from any output that a kernel reads.
pub fn poison<T: Real>(len: usize) -> Vec<T> {
    vec![T::from_f64(f64::NAN); len]
}

/// Panics if a value differs from the expected one by more than `tolerance` times the largest value
/// (at least 1).
#[track_caller]
pub fn close<T: Real>(what: &str, got: &[T], want: &[T], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    let finite = |x: f64| if x.is_finite() { x.abs() } else { 0.0 };
    let scale = want.iter().map(|x| finite(x.to_f64())).fold(1.0, f64::max);
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let (got, want) = (got.to_f64(), want.to_f64());
        let near = got == want || (got - want).abs() <= tolerance * scale;
        assert!(near, "{what}[{i}] is {got}, not {want} (scale {scale}, tolerance {tolerance})");
    }
}

/// Tolerance for rounding: some ulp of the type.
pub fn tolerance<T: Real>() -> f64 {
    if T::from_f64(1.0 + 1e-9) == T::ONE { 1e-5 } else { 1e-12 }
}

/// The dot product: a loss whose gradient with respect to `a` is `b`.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Compares a gradient with central differences of `loss` at `x`, element by element.
#[track_caller]
pub fn differences(what: &str, x: &[f64], gradient: &[f64], mut loss: impl FnMut(&[f64]) -> f64) {
    let h = 1e-5;
    let mut at = x.to_vec();
    let wanted: Vec<f64> = (0..x.len())
        .map(|i| {
            at[i] = x[i] + h;
            let up = loss(&at);
            at[i] = x[i] - h;
            let down = loss(&at);
            at[i] = x[i];
            (up - down) / (2.0 * h)
        })
        .collect();
    close(what, gradient, &wanted, 2e-8);
}
