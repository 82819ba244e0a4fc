//! The golden cases on one rank and on many: PyTorch's losses, gradients and weights, for every
//! split.

mod common;

use common::{Split, check, expected, golden, model, open, train};
use direct::Direct;
use models::program::Recompute;
use models::schedule::ScheduleName;
use models::shapes;
use runtime::comm::run_ranks;
use runtime::state::checkpoint::{Checkpoint, TensorFile};
use runtime::{Host, Rank, Scalar};

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

one_rank!(llama_gqa, llama_tied, gpt2, qwen2, gemma2, stablelm);

/// All 20 steps and the final weights, under splits of every kind.
#[test]
fn twenty_steps_on_many_ranks() {
    let splits = [
        Split { tp: 2, pp: 2, dp: 2, micro_batch: 1, sequence_parallel: true, ..Split::default() },
        Split {
            tp: 2,
            pp: 2,
            vpp: 2,
            micro_batch: 2,
            recompute: Recompute::Full,
            schedule: ScheduleName::Interleaved1F1B,
            ..Split::default()
        },
        Split { tp: 4, dp: 4, micro_batch: 2, recompute: Recompute::Selective, ..Split::default() },
        Split { pp: 4, micro_batch: 1, schedule: ScheduleName::GPipe, ..Split::default() },
    ];
    for case in ["llama_gqa", "llama_tied", "gpt2", "qwen2", "gemma2", "stablelm"] {
        for split in &splits {
            check(case, &train::<f32>(case, split, 20));
        }
    }
}

#[test]
fn llama_gqa_on_two_tensor_parallel_ranks() {
    check("llama_gqa", &train::<f32>("llama_gqa", &Split { tp: 2, ..Split::default() }, 2));
}

#[test]
fn llama_gqa_on_two_pipeline_ranks() {
    let split = Split { pp: 2, micro_batch: 2, ..Split::default() };
    check("llama_gqa", &train::<f32>("llama_gqa", &split, 2));
}

#[test]
fn llama_gqa_on_two_replicas() {
    let split = Split { dp: 2, micro_batch: 2, ..Split::default() };
    check("llama_gqa", &train::<f32>("llama_gqa", &split, 2));
}

/// Losses of all tokens, and logits of the first sequence, gathered over the vocabulary's shards.
fn outputs<T: Scalar>(case: &str, split: &Split) -> (Vec<f64>, Vec<f64>) {
    let (program, vocab) = (split.program(&model(case)), model(case).vocab as usize);
    let ranks = run_ranks(split.ranks(), runtime::comm::Options::default(), |world| {
        let stages = Direct::new(&program);
        let mut rank = Rank::new(&stages, world, Host::<T>::serial(), split.reduction, 0).unwrap();
        rank.load(&Checkpoint::open(&golden(case)).unwrap()).unwrap();
        let (mut nll, mut logits) = (Vec::new(), Vec::new());
        let mut watch = |micro_batch: usize, losses: &[T], columns: &[T]| {
            nll.extend(losses.iter().map(|loss| loss.to_f64()));
            if micro_batch == 0 {
                let width = columns.len() / losses.len();
                logits = columns[..32 * width].iter().map(|logit| logit.to_f64()).collect();
            }
        };
        rank.gradients(&*open(case), 0, Some(&mut watch)).unwrap();
        (nll, logits)
    });
    let width = shapes::vocabulary_rows(vocab as u64, split.tp as u64) as usize;
    let column = |at: usize| {
        let (row, column) = (at / vocab, at % vocab);
        ranks[column / width].1[row * width + column % width]
    };
    (ranks[0].0.clone(), (0..32 * vocab).map(column).collect())
}

#[test]
fn logits_and_losses_of_every_token() {
    for case in ["llama_gqa", "llama_tied", "gpt2", "qwen2", "gemma2", "stablelm"] {
        let file = TensorFile::open(&golden(case).join("outputs.safetensors")).unwrap();
        let cap = model(case).final_soft_cap;
        for tp in [1, 2, 4] {
            let (nll, logits) = outputs::<f32>(case, &Split { tp, ..Split::default() });
            let near = |name: &str, found: &[f64], tolerance: f64| {
                let (_, expected) = file.read::<f64>(name).unwrap();
                assert_eq!(found.len(), expected.len(), "{case} {name}");
                let off = found.iter().zip(&expected).map(|(a, b)| (a - b).abs());
                let off = off.fold(0.0, f64::max);
                assert!(off <= tolerance, "{case} tp {tp}: {name} is off by {off:e}");
            };
            near("nll", &nll, 3e-5);
            // The kernel applies the cap inside the loss.
            let capped = |z: &f64| cap.map_or(*z, |cap| cap * (z / cap).tanh());
            near("logits_seq0", &logits.iter().map(capped).collect::<Vec<_>>(), 5e-5);
        }
    }
}

#[test]
fn initial_weights_have_the_checksums() {
    for case in ["llama_gqa", "gpt2"] {
        let run = train::<f32>(case, &Split { tp: 2, pp: 2, ..Split::default() }, 0);
        for (name, (_, values)) in &run.weights {
            let init = &expected(case)["params"][name]["init"];
            let [sum, l2, dot] = common::checksums(values);
            for (key, found) in [("sum", sum), ("l2", l2), ("dot", dot)] {
                let off = (found - init[key].as_f64().unwrap()).abs();
                assert!(off <= 1e-9 * l2.max(1.0), "{case} {name} {key} is off by {off:e}");
            }
        }
    }
}
