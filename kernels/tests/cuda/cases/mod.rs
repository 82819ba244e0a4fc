//! Each operation's functions on a device, against the reference kernels in f64: on the emulator,
//! and on a GPU by `gpu-test`.

/// Runs a body with `S` as each storage type.
macro_rules! in_each_storage {
    ($function:ident($gpu:expr)) => {{
        $function::<f32>($gpu);
        $function::<bf16>($gpu);
    }};
}

mod adamw;
pub mod attention;
mod norms;
mod pointwise;
mod products;
mod rope;
mod vocabulary;

pub use adamw::adamw;
pub use attention::{
    attention, attention_in_f32, attention_with_dropout, fused_attention, merged_attention,
    wide_attention,
};
pub use norms::{layer_norm, rms_norm};
pub use pointwise::{
    activations, dropout, elementwise, latent_heads, random, sinks, transpose, weighted_rows,
};
pub use products::{biased_products, products};
pub use rope::{packed_rope, rope};
pub use vocabulary::{cross_entropy, embedding, vocabulary_split};

use kernels::cuda::{Element, Gpu, Memory, Storage, Stored};

/// A case, which panics if the device is wrong.
pub type Case = fn(&Gpu);

macro_rules! cases {
    ($($case:ident)+) => {
        /// All cases.
        pub const ALL: [(&str, Case); [$(stringify!($case)),+].len()] =
            [$((stringify!($case), $case)),+];
    };
}

cases!(
    rms_norm layer_norm activations rope packed_rope adamw elementwise embedding cross_entropy vocabulary_split dropout random
    transpose products biased_products attention wide_attention attention_with_dropout attention_in_f32 merged_attention
    fused_attention weighted_rows latent_heads sinks
);

/// Numbers between -1 and 1 that are exact in the storage type.
fn numbers<S: Stored>(len: usize, seed: usize) -> Vec<f64> {
    let number = |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0;
    (0..len).map(|i| f64::from(S::narrowed(number(i)).widened())).collect()
}

/// Uploads in the storage type.
fn up<S: Stored>(gpu: &Gpu, values: &[f64]) -> Memory<S> {
    let stored: Vec<S> = values.iter().map(|&x| S::narrowed(x as f32)).collect();
    gpu.upload(&stored).unwrap()
}

fn down<S: Stored>(gpu: &Gpu, memory: &Memory<S>) -> Vec<f64> {
    gpu.download(memory.view()).unwrap().into_iter().map(|x| f64::from(x.widened())).collect()
}

fn out<S: Element>(gpu: &Gpu, len: usize) -> Memory<S> {
    gpu.memory(len).unwrap()
}

/// Compares; bf16 values may differ by rounding.
fn close(what: &str, storage: Storage, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let relative = if storage == Storage::Bf16 { 1.0 / 256.0 } else { 2e-6 };
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = (found - expected).abs();
        let same = found == expected || off <= relative * expected.abs() + 3e-6;
        assert!(same, "{what} [{at}] {storage:?}: {found}, not {expected}");
    }
}

/// Compares f32 sums over `rows` values of at most about 1 each, in any order.
fn close_sums(what: &str, rows: usize, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = (found - expected).abs();
        let tolerance = 1e-6 * (rows as f64).sqrt() + 2e-6 * expected.abs();
        assert!(off <= tolerance, "{what} [{at}]: {found}, not {expected}");
    }
}
