//! Every split gives the numbers of one rank, in f64: losses to 1e-12, gradients to 1e-11.
//!
//! `a_covering_set_of_splits` runs combinations that together cover every possible pair of two
//! decisions' values; `every_combination` (ignored: `make equivalence`) runs them all.

mod common;

use common::covering::{Pair, covering, pairs};
use common::{Run, Split, check, distance, model, train};
use models::decisions::{CpStyle, Offload, RankOrder, Vocab};
use models::model::ModelSpec;
use models::program::Recompute;
use models::schedule::ScheduleName;
use runtime::Reduction;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

const CASES: [&str; 5] = ["llama_gqa", "llama_tied", "gpt2", "qwen2", "gemma2"];

/// Steps of a run: the second loss shows the first update.
const STEPS: usize = 2;

/// A combination, as the index of each decision's value.
type Indices = [usize; DECISIONS];

const DECISIONS: usize = 15;
const TP: [usize; 4] = [1, 2, 4, 8];
const PP: [usize; 3] = [1, 2, 4];
const VPP: [usize; 3] = [1, 2, 4];
const DP: [usize; 3] = [1, 2, 4];
const MICRO_BATCH: [usize; 4] = [1, 2, 4, 8];
/// Those over the pipeline are in tests/schedules.rs.
const VOCAB: [Vocab; 3] = [Vocab::FirstLast, Vocab::Redistribute, Vocab::Tensor];
const ORDER: [RankOrder; 2] = [RankOrder::DpInner, RankOrder::PpInner];
const REDUCTION: [Reduction; 3] =
    [Reduction::Buckets { bytes: 1 << 14 }, Reduction::AtEnd, Reduction::PerParameter];
/// ZeRO stage, replicas that share one copy (0 for all), and where the optimizer's state lies.
const ZERO: [(u8, usize, Offload); 8] = [
    (0, 0, Offload::None),
    (1, 0, Offload::None),
    (2, 0, Offload::None),
    (3, 0, Offload::None),
    (1, 2, Offload::None),
    (3, 2, Offload::None),
    (0, 0, Offload::Optimizer),
    (2, 0, Offload::Optimizer),
];
/// Context-parallel ranks, how they exchange, and the ranks of a Ulysses group.
const CP: [(usize, CpStyle, usize); 9] = [
    (1, CpStyle::Zigzag, 1),
    (2, CpStyle::Ring, 1),
    (4, CpStyle::Ring, 1),
    (2, CpStyle::Zigzag, 1),
    (4, CpStyle::Zigzag, 1),
    (2, CpStyle::AllGather, 1),
    (2, CpStyle::Ulysses, 2),
    (4, CpStyle::Ulysses, 4),
    (4, CpStyle::Hybrid, 2),
];
/// What is computed again, and the layers of a group.
const RECOMPUTE: [(Recompute, usize); 5] = [
    (Recompute::None, 1),
    (Recompute::Selective, 1),
    (Recompute::Full, 1),
    (Recompute::Full, 2),
    (Recompute::Full, 3),
];
/// Indices of some decisions in a combination.
const OF_VOCAB: usize = 8;
const OF_ORDER: usize = 9;
const OF_REDUCTION: usize = 10;
const OF_ZERO: usize = 11;
const OF_CP: usize = 12;
const OF_RECOMPUTE: usize = 13;
const OF_FUSED_LOSS: usize = 14;
/// Decisions that are taken in turn: all values of all of them together are too many.
const IN_TURN: [usize; 5] = [OF_ORDER, OF_REDUCTION, OF_ZERO, OF_CP, OF_FUSED_LOSS];
/// Combinations of those for each combination of the others.
const TURNS: usize = 1;
const VALUES: Indices = [
    CASES.len(),
    TP.len(),
    PP.len(),
    VPP.len(),
    DP.len(),
    MICRO_BATCH.len(),
    2,
    ScheduleName::WHOLE.len(),
    VOCAB.len(),
    ORDER.len(),
    REDUCTION.len(),
    ZERO.len(),
    CP.len(),
    RECOMPUTE.len(),
    2,
];

fn split(of: &Indices) -> (&'static str, Split) {
    let split = Split {
        tp: TP[of[1]],
        pp: PP[of[2]],
        vpp: VPP[of[3]],
        dp: DP[of[4]],
        micro_batch: MICRO_BATCH[of[5]],
        sequence_parallel: of[6] == 1,
        schedule: ScheduleName::WHOLE[of[7]],
        vocab: VOCAB[of[OF_VOCAB]],
        order: ORDER[of[OF_ORDER]],
        reduction: REDUCTION[of[OF_REDUCTION]],
        zero: ZERO[of[OF_ZERO]].0,
        dp_shard: ZERO[of[OF_ZERO]].1,
        offload: ZERO[of[OF_ZERO]].2,
        cp: CP[of[OF_CP]].0,
        cp_style: CP[of[OF_CP]].1,
        cp_ulysses: CP[of[OF_CP]].2,
        recompute: RECOMPUTE[of[OF_RECOMPUTE]].0,
        recompute_group: RECOMPUTE[of[OF_RECOMPUTE]].1,
        fused_loss: of[OF_FUSED_LOSS] == 1,
        ..Split::default()
    };
    (CASES[of[0]], split)
}

/// Whether the combination can be run, and is not a duplicate under another name.
fn exists(of: &Indices, models: &[ModelSpec]) -> bool {
    let (_, split) = split(of);
    let model = &models[of[0]];
    let shared = split.zero == 0 || split.dp * split.cp > split.dp_shard.max(1);
    let heads = model.attention.heads as usize / split.tp;
    let tokens = split.micro_batch * model.seq_len as usize / split.cp;
    let cut = heads.is_multiple_of(split.ulysses())
        && (!split.sequence_parallel || tokens.is_multiple_of(split.tp));
    if !shared || !cut || !split.exists() || split.ranks() > 16 {
        return false;
    }
    let layers = |vocab| Split { vocab, ..split }.layers(model);
    let before = VOCAB[..of[OF_VOCAB]].iter();
    let named_once = (split.tp > 1 || !split.sequence_parallel)
        && (split.dp * split.cp > 1 || of[OF_REDUCTION] == 0)
        && (split.dp > 1 && split.pp > 1 || of[OF_ORDER] == 0)
        && (split.schedule != ScheduleName::Naive || split.micro_batch * split.dp == 8);
    model.attention.heads.is_multiple_of(split.tp as u64)
        && named_once
        && before.into_iter().all(|&vocab| layers(vocab) != layers(split.vocab))
}

/// Combinations; those that differ only in recomputation are adjacent. Of the decisions that are
/// taken in turn, each combination of the others has [`TURNS`] combinations.
fn all() -> Vec<Indices> {
    let models = CASES.map(model);
    let decode = |mut number: usize, decisions: &[usize]| {
        let mut of = [0; DECISIONS];
        for &decision in decisions.iter().rev() {
            of[decision] = number % VALUES[decision];
            number /= VALUES[decision];
        }
        of
    };
    let count = |decisions: &[usize]| decisions.iter().map(|&n| VALUES[n]).product::<usize>();
    let first = |of: &usize| !IN_TURN.contains(of) && *of != OF_RECOMPUTE;
    let others: Vec<usize> = (0..DECISIONS).filter(first).collect();
    let turns = count(&IN_TURN);
    let mut all = Vec::new();
    for number in 0..count(&others) {
        let base = decode(number, &others);
        if !exists(&base, &models) {
            continue;
        }
        let mut taken = BTreeSet::new();
        for n in 0..turns {
            // Spread by a hash, so that all pairs of values meet.
            let turn = (number * turns + n).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
            let mut of = decode(turn % turns, &IN_TURN);
            others.iter().for_each(|&decision| of[decision] = base[decision]);
            if exists(&of, &models) {
                taken.insert(of);
            }
            if taken.len() == TURNS {
                break;
            }
        }
        for of in taken {
            let with = |recompute: usize| {
                let mut of = of;
                of[OF_RECOMPUTE] = recompute;
                of
            };
            all.extend((0..RECOMPUTE.len()).map(with));
        }
    }
    all
}

/// Every combination of the other decisions once, with all recomputations.
fn in_turn(all: &[Indices]) -> Vec<Indices> {
    let mut groups: BTreeMap<Indices, Vec<Indices>> = BTreeMap::new();
    for of in all {
        groups.entry(base(of)).or_default().push(*of);
    }
    let first = |members: &Vec<Indices>| members[..RECOMPUTE.len()].to_vec();
    groups.values().flat_map(first).collect()
}

/// What a combination has apart from decisions that are taken in turn, and recomputation.
fn base(of: &Indices) -> Indices {
    let mut base = *of;
    IN_TURN.iter().chain([&OF_RECOMPUTE]).for_each(|&decision| base[decision] = 0);
    base
}

/// Runs on one rank, by case.
fn references() -> BTreeMap<&'static str, Run> {
    CASES.iter().map(|&case| (case, train::<f64>(case, &Split::default(), STEPS))).collect()
}

/// Largest deviations so far.
#[derive(Clone, Copy, Debug, Default)]
struct Worst {
    loss: f64,
    gradient: f64,
}

fn compare(case: &str, split: &Split, run: &Run, reference: &Run, worst: &mut Worst) {
    for (step, (found, expected)) in run.losses.iter().zip(&reference.losses).enumerate() {
        let off = (found - expected).abs();
        assert!(off <= 1e-12, "{case} {split:?}: loss of step {step} is off by {off:e}");
        worst.loss = worst.loss.max(off);
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
        worst.gradient = worst.gradient.max(off);
    }
    for (name, (_, values)) in &run.weights {
        let off = distance(values, &reference.weights[name].1);
        // Key biases of GPT-2 have a gradient of 0, up to rounding, from which Adam makes steps of
        // either sign.
        let noise = case == "gpt2" && name.ends_with("c_attn.bias");
        assert!(off <= 1e-8 || noise, "{case} {split:?}: {name} is off by {off:e}");
    }
}

/// Runs combinations and compares each with one rank. Combinations that differ only in
/// recomputation must agree to the bit.
fn run(combinations: &[Indices]) -> Worst {
    let (references, mut worst) = (references(), Worst::default());
    let mut before: Option<(Indices, Run)> = None;
    for (n, of) in combinations.iter().enumerate() {
        let (case, split) = split(of);
        let run = train::<f64>(case, &split, STEPS);
        compare(case, &split, &run, &references[case], &mut worst);
        let group = |of: &Indices| {
            let mut group = *of;
            group[OF_RECOMPUTE] = 0;
            group
        };
        if let Some((_, other)) = before.filter(|(other, _)| group(other) == group(of)) {
            assert!(run == other, "{case} {split:?}: recomputation changes bits");
        }
        before = Some((*of, run));
        if n % 500 == 499 {
            println!("{} of {}", n + 1, combinations.len());
        }
    }
    worst
}

#[test]
fn a_covering_set_of_splits() {
    let all = all();
    let chosen = covering(all.clone());
    println!("{} of {} combinations", chosen.len(), all.len());
    run(&chosen);
}

/// PyTorch's own losses, norms and gradients, in f32; every fourth over all 20 steps, with final
/// weights.
#[test]
fn a_covering_set_trains_to_pytorchs_numbers() {
    for (n, of) in covering(all()).iter().enumerate() {
        let (case, split) = split(of);
        println!("{case} {split:?}");
        check(case, &train::<f32>(case, &split, if n % 4 == 0 { 20 } else { 5 }));
    }
}

#[test]
fn the_covering_set_has_every_pair() {
    let all = all();
    let chosen = covering(all.clone());
    let had: BTreeSet<Pair> = chosen.iter().flat_map(pairs).collect();
    let missing = all.iter().flat_map(pairs).find(|pair| !had.contains(pair));
    assert_eq!(missing, None);
    // All values of every decision occur; layer redistribution cuts models this small as evenly as
    // `first_last`.
    for (decision, &count) in VALUES.iter().enumerate() {
        let values: BTreeSet<usize> = chosen.iter().map(|of| of[decision]).collect();
        let same = usize::from(decision == OF_VOCAB);
        assert_eq!(values.len(), count - same, "decision {decision}");
    }
    // The set is small: a few values of each decision share a run.
    assert!(chosen.len() * 100 < all.len(), "{} of {}", chosen.len(), all.len());
}

#[test]
fn every_combination_of_the_others_has_its_turn() {
    let all = all();
    let chosen = in_turn(&all);
    let bases = |of: &[Indices]| of.iter().map(base).collect::<BTreeSet<_>>();
    assert_eq!(bases(&chosen), bases(&all));
    assert_eq!(chosen.len(), bases(&all).len() * RECOMPUTE.len());
    for decision in IN_TURN {
        let values: BTreeSet<usize> = chosen.iter().map(|of| of[decision]).collect();
        assert_eq!(values.len(), VALUES[decision], "decision {decision}");
    }
}

#[test]
#[ignore = "long: make equivalence"]
fn every_combination() {
    let (begin, combinations) = (Instant::now(), in_turn(&all()));
    let worst = run(&combinations);
    common::write_section("Golden cases", &report(&combinations, worst));
    println!("{} combinations in {:.0?}", combinations.len(), begin.elapsed());
}

fn report(combinations: &[Indices], worst: Worst) -> String {
    let count = |holds: &dyn Fn(&Split) -> bool| {
        combinations.iter().filter(|of| holds(&split(of).1)).count()
    };
    let mut table = String::new();
    for (n, case) in CASES.iter().enumerate() {
        let of_case = combinations.iter().filter(|of| of[0] == n).count();
        table += &format!("| {case} | {of_case} |\n");
    }
    for schedule in ScheduleName::WHOLE {
        table += &format!("| {schedule} | {} |\n", count(&|split| split.schedule == schedule));
    }
    for vocab in VOCAB {
        let of_vocab = match count(&|split| split.vocab == vocab) {
            0 => "cut as `first_last` in every case".to_owned(),
            some => some.to_string(),
        };
        table += &format!("| vocabulary {vocab} | {of_vocab} |\n");
    }
    for (stage, ways, offload) in ZERO {
        let same =
            |split: &Split| (split.zero, split.dp_shard, split.offload) == (stage, ways, offload);
        let over = if ways == 0 { String::new() } else { format!(" over {ways}") };
        table += &format!("| zero {stage}{over}, offload {offload} | {} |\n", count(&same));
    }
    for (cp, style, ulysses) in CP {
        let same =
            |split: &Split| (split.cp, split.cp_style, split.cp_ulysses) == (cp, style, ulysses);
        let over = if cp == 1 { String::new() } else { format!(" {style}") };
        table += &format!("| cp {cp}{over} | {} |\n", count(&same));
    }
    for ranks in [1, 2, 4, 8, 16] {
        table += &format!("| {ranks} ranks | {} |\n", count(&|split| split.ranks() == ranks));
    }
    format!(
        "**{}** combinations of golden case, tp, pp, vpp, dp, \
         micro-batch, sequence parallelism, recomputation, schedule and\nvocabulary placement (all that fit in 16 \
         ranks, 4 layers and 8 sequences, those that are the same run by another name\ncounted once; rank orders, \
         reductions of gradients, what replicas share and context parallelism in turn) gave one rank's numbers in f64 over {STEPS} steps: losses\nwithin 1e-12 \
         (worst {:.1e}), every gradient within 1e-11 by norm (worst {:.1e}). Those that differ in recomputation\n\
         alone gave the same bits. One rank is held to PyTorch's numbers by `runtime/tests/golden.rs`.\n\n\
         | of these | combinations |\n|---|---|\n{table}",
        combinations.len(),
        worst.loss,
        worst.gradient
    )
}
