//! The golden cases on one rank and on many: PyTorch's losses, gradients and weights, however the
//! model is split.

mod common;

use common::{Split, check, train};

/// Each case on one rank, in one micro-batch, all 20 steps.
macro_rules! one_rank {
    ($($case:ident),+) => {$(
        #[test]
        fn $case() {
            let case = stringify!($case);
            check(case, &train::<f32>(case, &Split::default(), 20));
        }
    )+};
}

one_rank!(llama_gqa, llama_tied, gpt2, qwen2, gemma2);

#[test]
fn llama_gqa_on_two_tensor_parallel_ranks() {
    check("llama_gqa", &train::<f32>("llama_gqa", &Split { tp: 2, ..Split::default() }, 2));
}

#[test]
fn llama_gqa_on_two_pipeline_devices() {
    let split = Split { pp: 2, micro_batch: 2, ..Split::default() };
    check("llama_gqa", &train::<f32>("llama_gqa", &split, 2));
}

#[test]
fn llama_gqa_on_two_replicas() {
    let split = Split { dp: 2, micro_batch: 2, ..Split::default() };
    check("llama_gqa", &train::<f32>("llama_gqa", &split, 2));
}
