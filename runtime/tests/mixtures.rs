//! Every split of a mixture of experts gives the numbers of one rank, in f64: losses to 1e-12,
//! gradients to 1e-11. As `equivalence.rs` for dense models: a covering set, and all combinations
//! (ignored: `make equivalence`).

mod common;

use common::covering::{Pair, covering, pairs};
use common::{Run, Split, compare, model, open, train_program, write_section};
use models::decisions::{AuxScope, CpStyle, MoeOverlap, Offload};
use models::model::ModelSpec;
use models::program::Recompute;
use models::schedule::ScheduleName;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// Golden cases. The second's balance loss is of all layers, so of the global batch.
const CASES: [&str; 5] = ["mixtral", "mixtral_aux", "qwen3_moe", "deepseek_v3", "gpt_oss"];

/// Steps of a run: the second loss shows the first update.
const STEPS: usize = 2;

/// A combination, as the index of each decision's value.
type Indices = [usize; DECISIONS];

const DECISIONS: usize = 13;
const TP: [usize; 3] = [1, 2, 4];
const PP: [usize; 3] = [1, 2, 4];
const DP: [usize; 3] = [1, 2, 4];
const EP: [usize; 4] = [1, 2, 4, 8];
const ETP: [usize; 3] = [1, 2, 4];
const MICRO_BATCH: [usize; 4] = [1, 2, 4, 8];
/// Context-parallel ranks, and how they exchange.
const CP: [(usize, CpStyle); 5] = [
    (1, CpStyle::Zigzag),
    (2, CpStyle::Ring),
    (2, CpStyle::Zigzag),
    (2, CpStyle::AllGather),
    (2, CpStyle::Ulysses),
];
/// Schedules, with chunks of a rank.
const SCHEDULE: [(ScheduleName, usize); 8] = [
    (ScheduleName::OneFOneB, 1),
    (ScheduleName::GPipe, 1),
    (ScheduleName::Interleaved1F1B, 2),
    (ScheduleName::Overlapped1F1B, 2),
    (ScheduleName::ZbH1, 1),
    (ScheduleName::ZbV, 2),
    (ScheduleName::LoopedBfs, 2),
    (ScheduleName::DualPipeV, 2),
];
/// What hides the all-to-alls, and chunks of rows.
const OVERLAP: [(MoeOverlap, usize); 6] = [
    (MoeOverlap::None, 1),
    (MoeOverlap::Tutel, 2),
    (MoeOverlap::Tutel, 4),
    (MoeOverlap::Ampipe, 2),
    (MoeOverlap::Ampipe, 4),
    (MoeOverlap::Pair, 1),
];
/// ZeRO stage, replicas that share one copy (0 for all), and what host memory holds.
const ZERO: [(u8, usize, Offload); 9] = [
    (0, 0, Offload::None),
    (1, 0, Offload::None),
    (2, 0, Offload::None),
    (3, 0, Offload::None),
    (3, 2, Offload::None),
    (0, 0, Offload::Optimizer),
    (2, 0, Offload::Optimizer),
    (0, 0, Offload::Activations),
    (1, 0, Offload::Activations),
];
const RECOMPUTE: [Recompute; 3] = [Recompute::None, Recompute::Selective, Recompute::Full];
/// Decisions before this one make the mesh; each mesh has the others in turn.
const OF_MESH: usize = 7;
const OF_SCHEDULE: usize = 8;
/// Combinations of the others that are tried for a mesh until one can be run.
const TRIES: usize = 400;
const VALUES: Indices = [
    CASES.len(),
    TP.len(),
    PP.len(),
    DP.len(),
    CP.len(),
    EP.len(),
    ETP.len(),
    MICRO_BATCH.len(),
    SCHEDULE.len(),
    OVERLAP.len(),
    ZERO.len(),
    RECOMPUTE.len(),
    2,
];

fn split(of: &Indices) -> (&'static str, Split) {
    let case = CASES[of[0]];
    let split = Split {
        tp: TP[of[1]],
        pp: PP[of[2]],
        dp: DP[of[3]],
        cp: CP[of[4]].0,
        cp_style: CP[of[4]].1,
        ep: EP[of[5]],
        etp: ETP[of[6]],
        micro_batch: MICRO_BATCH[of[OF_MESH]],
        schedule: SCHEDULE[of[OF_SCHEDULE]].0,
        vpp: SCHEDULE[of[OF_SCHEDULE]].1,
        moe_overlap: OVERLAP[of[9]].0,
        moe_chunks: OVERLAP[of[9]].1,
        zero: ZERO[of[10]].0,
        dp_shard: ZERO[of[10]].1,
        offload: ZERO[of[10]].2,
        recompute: RECOMPUTE[of[11]],
        fused_loss: of[12] == 1,
        sequence_parallel: true,
        aux_scope: scope_of(case),
        ..Split::default()
    };
    (case, split)
}

fn scope_of(case: &str) -> AuxScope {
    if case == "mixtral_aux" { AuxScope::GlobalBatch } else { AuxScope::MicroBatch }
}

/// Whether the combination can be run.
fn exists(of: &Indices, models: &[ModelSpec]) -> bool {
    let (case, split) = split(of);
    let model = &models[of[0]];
    let moe = model.moe.as_ref().unwrap();
    let ranks = split.ranks() / split.pp;
    let of_experts = split.ep * split.etp;
    let heads = model.attention.heads as usize;
    let rows = split.micro_batch * model.seq_len as usize / split.cp;
    if split.ranks() > 16
        || !ranks.is_multiple_of(of_experts)
        || !split.tp.is_multiple_of(split.etp)
        || !heads.is_multiple_of(split.tp * split.ulysses())
        || !rows.is_multiple_of(split.tp * split.moe_chunks)
        || !(moe.ffn as usize).is_multiple_of(split.etp)
        || !(moe.shared_ffn as usize).is_multiple_of(split.tp)
        || !split.exists()
    {
        return false;
    }
    let replicas = ranks / of_experts;
    let shards = split.dp * split.cp;
    let shared = split.zero == 0
        || split.dp_shard == 0 && shards > 1
        || split.dp_shard > 1 && shards > split.dp_shard && replicas.is_multiple_of(split.dp_shard);
    let overlap = match split.moe_overlap {
        MoeOverlap::None | MoeOverlap::Tutel => true,
        MoeOverlap::Ampipe => split.cp == 1,
        MoeOverlap::Pair => split.schedule.has_pairs(),
    };
    // A balance loss of the global batch: every forward pass comes first.
    let forwards_first = split.micro_batches() == 1
        || matches!(split.schedule, ScheduleName::GPipe | ScheduleName::LoopedBfs);
    shared && overlap && (case != "mixtral_aux" || forwards_first)
}

/// Every mesh with `turns` combinations of the other decisions.
fn all(turns: usize) -> Vec<Indices> {
    let models = CASES.map(model);
    let decode = |mut number: usize, decisions: std::ops::Range<usize>, of: &mut Indices| {
        for decision in decisions.rev() {
            of[decision] = number % VALUES[decision];
            number /= VALUES[decision];
        }
    };
    let meshes: usize = VALUES[..OF_MESH].iter().product();
    let mut all = Vec::new();
    for mesh in 0..meshes {
        let mut taken = BTreeSet::new();
        for n in 0..TRIES {
            // Spread by a hash, so that all pairs of values meet.
            let turn = (mesh * TRIES + n).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
            let mut of = [0; DECISIONS];
            decode(mesh, 0..OF_MESH, &mut of);
            decode(turn, OF_MESH..DECISIONS, &mut of);
            if exists(&of, &models) {
                taken.insert(of);
            }
            if taken.len() == turns {
                break;
            }
        }
        all.extend(taken);
    }
    all
}

fn run(case: &str, split: &Split) -> Run {
    // The weights and tokens of `mixtral_aux` are mixtral's.
    let golden = if case == "mixtral_aux" { "mixtral" } else { case };
    let program = split.program(&model(case));
    train_program::<f64>(&program, split, STEPS, Some(golden), &*open(golden))
}

fn check_all(combinations: &[Indices]) {
    let alone = |case: &&'static str| {
        let one = Split { aux_scope: scope_of(case), ..Split::default() };
        (*case, run(case, &one))
    };
    let references: BTreeMap<&str, Run> = CASES.iter().map(alone).collect();
    for (n, of) in combinations.iter().enumerate() {
        let (case, split) = split(of);
        compare(&format!("{case} {split:?}"), &run(case, &split), &references[case]);
        if n % 500 == 499 {
            println!("{} of {}", n + 1, combinations.len());
        }
    }
}

#[test]
fn a_covering_set_of_splits() {
    let all = all(8);
    let chosen = covering(all.clone());
    println!("{} of {} combinations", chosen.len(), all.len());
    let had: BTreeSet<Pair> = chosen.iter().flat_map(pairs).collect();
    assert!(all.iter().flat_map(pairs).all(|pair| had.contains(&pair)));
    for (decision, &count) in VALUES.iter().enumerate() {
        let values: BTreeSet<usize> = chosen.iter().map(|of| of[decision]).collect();
        assert_eq!(values.len(), count, "decision {decision}");
    }
    check_all(&chosen);
}

#[test]
#[ignore = "long: make equivalence"]
fn every_combination() {
    let (begin, combinations) = (Instant::now(), all(3));
    check_all(&combinations);
    write_section("Mixtures of experts", &report(&combinations));
    println!("{} combinations in {:.0?}", combinations.len(), begin.elapsed());
}

fn report(combinations: &[Indices]) -> String {
    let mut table = String::new();
    let mut line = |name: String, holds: &dyn Fn(&str, &Split) -> bool| {
        let count = combinations.iter().map(split).filter(|(case, split)| holds(case, split));
        table += &format!("| {name} | {} |\n", count.count());
    };
    for case in CASES {
        line(case.to_owned(), &|of, _| of == case);
    }
    for ep in EP {
        line(format!("ep {ep}"), &|_, split| split.ep == ep);
    }
    for etp in ETP {
        line(format!("etp {etp}"), &|_, split| split.etp == etp);
    }
    for (cp, style) in CP {
        let same = |_: &str, split: &Split| (split.cp, split.cp_style) == (cp, style);
        line(if cp == 1 { "cp 1".to_owned() } else { format!("cp {cp} {style}") }, &same);
    }
    for (schedule, _) in SCHEDULE {
        line(schedule.to_string(), &|_, split| split.schedule == schedule);
    }
    for (overlap, chunks) in OVERLAP {
        let same =
            |_: &str, split: &Split| (split.moe_overlap, split.moe_chunks) == (overlap, chunks);
        line(format!("overlap {overlap}, chunks {chunks}"), &same);
    }
    for (stage, ways, offload) in ZERO {
        let over = if ways == 0 { String::new() } else { format!(" over {ways}") };
        line(format!("zero {stage}{over}, offload {offload}"), &|_, split| {
            (split.zero, split.dp_shard, split.offload) == (stage, ways, offload)
        });
    }
    for ranks in [1, 2, 4, 8, 16] {
        line(format!("{ranks} ranks"), &|_, split| split.ranks() == ranks);
    }
    format!(
        "**{}** combinations on golden cases: every case, tp, pp, dp, cp, ep and etp that fit in 16 \
         ranks, each with up to three combinations of micro-batch, schedule, overlap, shared state, \
         recomputation and fused loss. They gave one rank's numbers in f64 over {STEPS} steps: losses and \
         auxiliary losses within 1e-12, every gradient within 1e-11 by norm. One rank is held to \
         PyTorch's numbers by `runtime/tests/experts.rs` and `router_losses.rs`.\n\n\
         | of these | combinations |\n|---|---|\n{table}",
        combinations.len(),
    )
}
