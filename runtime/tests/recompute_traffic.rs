//! Recomputing a layer repeats no reduction.

mod common;

use common::{Split, golden, model, open};
use direct::Direct;
use models::program::Recompute;
use runtime::comm::{Options, run_ranks};
use runtime::state::checkpoint::Checkpoint;
use runtime::{Host, Rank};

/// Tensor-parallel calls of a step by name, and the most elements kept.
fn traffic(case: &str, split: &Split) -> (Vec<(&'static str, u64)>, usize) {
    let program = split.program(&model(case));
    let ranks = run_ranks(split.ranks(), Options::default(), |world| {
        let stages = Direct::new(&program);
        let mut rank =
            Rank::new(&stages, world, Host::<f32>::serial(), split.reduction, 0).unwrap();
        rank.load(&Checkpoint::open(&golden(case)).unwrap()).unwrap();
        let result = rank.gradients(&*open(case), 0, None).unwrap();
        let all = rank.groups().world.stats().traffic();
        let tp = all.into_iter().filter(|((group, _), _)| group == "tp");
        let calls = tp.map(|((_, call), counted)| (call, counted.calls)).collect();
        (calls, result.outcome.peak_bytes)
    });
    ranks.into_iter().next().unwrap()
}

#[test]
fn recomputation_adds_no_reductions_and_keeps_less() {
    for case in ["llama_gqa", "gpt2", "gemma2"] {
        for sequence_parallel in [false, true] {
            let split = Split { tp: 2, sequence_parallel, ..Split::default() };
            let with = |recompute| traffic(case, &Split { recompute, ..split });
            let (none, all) = with(Recompute::None);
            let (selective, most) = with(Recompute::Selective);
            let (full, least) = with(Recompute::Full);
            let reductions = |calls: &[(&str, u64)]| -> Vec<u64> {
                let reduces = |call: &&(&str, u64)| call.0.contains("reduce");
                calls.iter().filter(reduces).map(|call| call.1).collect()
            };
            assert_eq!(none, selective, "{case}");
            assert_eq!(reductions(&none), reductions(&full), "{case} {sequence_parallel}");
            assert!(least < most && most < all, "{case}: {least} {most} {all}");
        }
    }
}
