//! Every split gives one rank's numbers, in f64: losses to 1e-12, gradients to 1e-11.
//!
//! `covering` runs a set of combinations in which every two values of two decisions that can go
//! together do so once; `every_combination` (ignored: `make equivalence`) runs them all.

mod common;

use common::{Run, Split, distance, train};
use models::decisions::RankOrder;
use models::schedule::ScheduleName;
use runtime::Reduction;
use runtime::program::Recompute;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

const CASES: [&str; 5] = ["llama_gqa", "llama_tied", "gpt2", "qwen2", "gemma2"];

/// Steps of a run: the second loss shows the first update.
const STEPS: usize = 2;

/// A combination, as the index of each decision's value.
type Indices = [usize; DECISIONS];

const DECISIONS: usize = 11;
const TP: [usize; 4] = [1, 2, 4, 8];
const PP: [usize; 3] = [1, 2, 4];
const VPP: [usize; 3] = [1, 2, 4];
const DP: [usize; 3] = [1, 2, 4];
const MICRO_BATCH: [usize; 4] = [1, 2, 4, 8];
const RECOMPUTE: [Recompute; 3] = [Recompute::None, Recompute::Selective, Recompute::Full];
const REDUCTION: [Reduction; 3] =
    [Reduction::Buckets { bytes: 1 << 14 }, Reduction::AtEnd, Reduction::PerParameter];
const ORDER: [RankOrder; 2] = [RankOrder::DpInner, RankOrder::PpInner];
const VALUES: Indices = [
    CASES.len(),
    TP.len(),
    PP.len(),
    VPP.len(),
    DP.len(),
    MICRO_BATCH.len(),
    2,
    RECOMPUTE.len(),
    ScheduleName::ALL.len(),
    ORDER.len(),
    REDUCTION.len(),
];

fn split(of: &Indices) -> (&'static str, Split) {
    let split = Split {
        tp: TP[of[1]],
        pp: PP[of[2]],
        vpp: VPP[of[3]],
        dp: DP[of[4]],
        micro_batch: MICRO_BATCH[of[5]],
        sequence_parallel: of[6] == 1,
        recompute: RECOMPUTE[of[7]],
        schedule: ScheduleName::ALL[of[8]],
        order: ORDER[of[9]],
        reduction: REDUCTION[of[10]],
        delays: None,
    };
    (CASES[of[0]], split)
}

/// Whether the combination can be run, and is not another one by another name.
fn exists(of: &Indices) -> bool {
    let (case, split) = split(of);
    let heads = if matches!(case, "gpt2" | "gemma2") { 4 } else { 8 };
    let named_once = (split.tp > 1 || !split.sequence_parallel)
        && (split.dp > 1 || of[10] == 0)
        && (split.dp > 1 && split.pp > 1 || of[9] == 0)
        && (split.schedule != ScheduleName::Naive || split.micro_batch * split.dp == 8);
    split.exists() && split.ranks() <= 16 && heads % split.tp == 0 && named_once
}

fn all() -> Vec<Indices> {
    let mut all = vec![[0; DECISIONS]];
    for (decision, &count) in VALUES.iter().enumerate() {
        let widen = |of: Indices| {
            (0..count).map(move |value| {
                let mut next = of;
                next[decision] = value;
                next
            })
        };
        all = all.into_iter().flat_map(widen).collect();
    }
    all.retain(exists);
    all
}

type Pair = ((usize, usize), (usize, usize));

fn pairs(of: &Indices) -> impl Iterator<Item = Pair> + '_ {
    (0..DECISIONS).flat_map(move |a| (a + 1..DECISIONS).map(move |b| ((a, of[a]), (b, of[b]))))
}

/// Greedily: each time the combination with most pairs that none before has.
fn covering() -> Vec<Indices> {
    let mut all = all();
    let mut open: BTreeSet<Pair> = all.iter().flat_map(pairs).collect();
    let mut chosen = Vec::new();
    while !open.is_empty() {
        let new = |of: &Indices| pairs(of).filter(|pair| open.contains(pair)).count();
        // A few hundred candidates, another few each time, are enough to choose from.
        let stride = (all.len() / 997).max(1);
        let offset = chosen.len() % stride;
        let sampled = all.iter().skip(offset).step_by(stride).max_by_key(|of| new(of)).copied();
        let best = match sampled.filter(|of| new(of) > 0) {
            Some(best) => best,
            None => *all.iter().max_by_key(|of| new(of)).unwrap(),
        };
        pairs(&best).for_each(|pair| {
            open.remove(&pair);
        });
        all.retain(|of| *of != best);
        chosen.push(best);
    }
    chosen
}

/// One rank's runs, by case.
fn references() -> BTreeMap<&'static str, Run> {
    CASES.iter().map(|&case| (case, train::<f64>(case, &Split::default(), STEPS))).collect()
}

fn compare(case: &str, split: &Split, run: &Run, reference: &Run) {
    for (step, (found, expected)) in run.losses.iter().zip(&reference.losses).enumerate() {
        let off = (found - expected).abs();
        assert!(off <= 1e-12, "{case} {split:?}: loss of step {step} is off by {off:e}");
    }
    for (step, (found, expected)) in run.norms.iter().zip(&reference.norms).enumerate() {
        let off = (found / expected - 1.0).abs();
        assert!(off <= 1e-11, "{case} {split:?}: norm of step {step} is off by {off:e}");
    }
    assert!(run.gradients.keys().eq(reference.gradients.keys()));
    for (name, (shape, values)) in &run.gradients {
        assert_eq!(shape, &reference.gradients[name].0);
        let off = distance(values, &reference.gradients[name].1);
        assert!(off <= 1e-11, "{case} {split:?}: gradient of {name} is off by {off:e}");
    }
    for (name, (_, values)) in &run.weights {
        let off = distance(values, &reference.weights[name].1);
        // Key biases of GPT-2 have a gradient of 0, of which Adam makes steps of either sign.
        let noise = case == "gpt2" && name.ends_with("c_attn.bias");
        assert!(off <= 1e-8 || noise, "{case} {split:?}: {name} is off by {off:e}");
    }
}

fn run(combinations: &[Indices]) {
    let references = references();
    for of in combinations {
        let (case, split) = split(of);
        compare(case, &split, &train::<f64>(case, &split, STEPS), &references[case]);
    }
}

#[test]
fn a_covering_set_of_splits() {
    let chosen = covering();
    println!("{} of {} combinations", chosen.len(), all().len());
    run(&chosen);
}

#[test]
#[ignore = "an hour: make equivalence"]
fn every_combination() {
    let all = all();
    run(&all);
    let docs = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs");
    std::fs::create_dir_all(&docs).unwrap();
    let text = format!(
        "# Equivalence\n\nWritten by `make equivalence`: {} combinations of case, tensor, pipeline and data \
         parallelism, chunks,\nmicro-batch, sequence parallelism, recomputation, schedule, rank order and \
         reduction on up to 16 ranks gave\none rank's numbers in f64: losses within 1e-12, gradients within \
         1e-11.\n",
        all.len()
    );
    std::fs::write(docs.join("equivalence.md"), text).unwrap();
}
