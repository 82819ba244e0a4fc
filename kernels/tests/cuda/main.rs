//! The CUDA sources and the functions that launch them, against the reference kernels without a
//! GPU: compiled as C++ and run by `kernels::cuda::cpu_emulator`, at small shapes of every kind, in
//! f32 and bf16. `cuda_compiles` checks that the sources compile for GPUs; `tools/gpu_all.sh test`
//! runs the same cases on a GPU.

mod cases;
mod fused;
mod graphs;
mod interpreter;
mod memory;
mod planted;
mod recording;

use kernels::cuda::Gpu;
use kernels::cuda::cpu_emulator::CpuEmulator;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Folder of compiled sources, kept for the next run.
fn folder() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-emulator")
}

fn emulator() -> Gpu {
    Gpu::on(Arc::new(CpuEmulator::new(&folder()).expect("a folder for compiled sources")))
}

macro_rules! on_the_machine {
    ($($case:ident)+) => {
        $(#[test]
        fn $case() {
            cases::$case(&emulator());
        })+

        #[test]
        fn no_case_is_left_out() {
            let here = [$(stringify!($case)),+];
            let all: Vec<&str> = cases::ALL.iter().map(|(name, _)| *name).collect();
            assert_eq!(here[..], all[..]);
        }
    };
}

on_the_machine!(
    rms_norm layer_norm activations rope packed_rope adamw elementwise embedding cross_entropy vocabulary_split dropout random
    transpose products biased_products attention wide_attention attention_with_dropout attention_in_f32 merged_attention
    fused_attention weighted_rows latent_heads sinks
);
