//! `candidates` against nested loops over every value of every decision.

use meshwright_tests::brute;
use meshwright_tests::random::Random;
use meshwright_tests::small::{Instance, Sizes, cluster_of, plain_model};
use models::cluster::ClusterSpec;
use models::decisions::Decisions;
use models::model::ModelSpec;
use planner::request::Task;
use planner::request::restrictions::Restrictions;
use planner::request::rules::Waived;
use planner::request::space::Space;

const SCHEDULES: [&str; 17] = [
    "naive",
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "overlapped_1f1b",
    "looped_bfs",
    "zb_h1",
    "zb_h2",
    "zb_auto",
    "interleaved_zb",
    "zb_v",
    "v_half",
    "v_min",
    "v_1f1b",
    "dualpipe_v",
    "dualpipe",
    "chimera",
];
// first_last (with several chunks only if they are equal), redistribute, tensor
const VOCABS_AT_ENDS: u64 = 3;
const VOCABS_OVER_PIPELINE: u64 = 3; // parallel_naive, parallel_1, parallel_2
/// Schedules that run passes of a vocabulary over the pipeline. 1F1B alone can interlace them.
const HOSTS: [&str; 10] = [
    "1f1b",
    "zb_h1",
    "zb_h2",
    "zb_auto",
    "interleaved_zb",
    "zb_v",
    "v_half",
    "v_min",
    "v_1f1b",
    "dualpipe_v",
];
const RECOMPUTE: u64 = 4; // none, selective, full, per_layer
const OFFLOAD: u64 = 2; // none, optimizer

fn cluster() -> ClusterSpec {
    cluster_of(&Sizes {
        hbm_bytes: 1e9,
        host_bytes: 1e9,
        inner_gpus: 4,
        inner_bytes_per_s: 1e10,
        outer_bytes_per_s: 1e9,
        base: "megatron_2024",
    })
}

/// Whether `whole` splits evenly into `parts`.
fn splits(whole: u64, parts: u64) -> bool {
    whole.is_multiple_of(parts)
}

/// Number of combinations, by loops that know the rules and use nothing of the planner.
fn enumerate(model: &ModelSpec, gpus: u64) -> u64 {
    let mut count = 0;
    for tp in 1..=gpus {
        for pp in 1..=gpus {
            for cp in 1..=gpus {
                for dp in 1..=gpus {
                    if tp * pp * cp * dp == gpus
                        && tp_is_possible(model, tp)
                        && pp <= model.layers as u64
                        && splits(model.global_batch, dp)
                    {
                        for pairs in [false, true] {
                            count += ways_through_layers(model, [tp, cp, dp], pairs)
                                * pipelines_and_states(model, [tp, pp, cp, dp], pairs);
                        }
                    }
                }
            }
        }
    }
    count
}

fn tp_is_possible(model: &ModelSpec, tp: u64) -> bool {
    let dense = (0..model.layers).any(|layer| !model.layer_kind(layer).moe);
    let shared = model.moe.as_ref().map_or(0, |moe| moe.shared_ffn);
    splits(model.attention.heads, tp) && (!dense || splits(model.mlp.ffn, tp)) && splits(shared, tp)
}

/// Context styles times sequence parallelism times expert splits and overlaps: those by pairs of
/// passes, or all others.
fn ways_through_layers(model: &ModelSpec, [tp, cp, dp]: [u64; 3], pairs: bool) -> u64 {
    let mut count = 0;
    for sequence_parallel in [false, true] {
        if sequence_parallel && (tp == 1 || !splits(model.seq_len / cp, tp)) {
            continue;
        }
        let experts = expert_ways(model, [tp, cp, dp], [sequence_parallel, pairs]);
        count += context_styles(model, tp, cp) * experts;
    }
    count
}

fn context_styles(model: &ModelSpec, tp: u64, cp: u64) -> u64 {
    if cp == 1 {
        return 1;
    }
    let (s, heads) = (model.seq_len, model.attention.heads);
    let contiguous = u64::from(splits(s, cp));
    let even_causal = u64::from(splits(s, 2 * cp));
    let ulysses = u64::from(splits(s, cp) && splits(heads, tp * cp));
    let hybrid = (2..cp).filter(|&u| splits(cp, u) && splits(heads, tp * u)).count() as u64;
    // ring, zigzag and all_gather, ulysses, hybrid
    contiguous + 2 * even_causal + ulysses + hybrid * even_causal
}

fn expert_ways(
    model: &ModelSpec,
    [tp, cp, dp]: [u64; 3],
    [sequence_parallel, pairs]: [bool; 2],
) -> u64 {
    let Some(moe) = &model.moe else { return u64::from(!pairs) };
    let mut count = 0;
    for etp in 1..=tp {
        for ep in 1..=moe.experts {
            let folds = splits(tp, etp) && splits(moe.ffn, etp) && splits(moe.experts, ep);
            let tokens_differ = ep == 1 || tp == 1 || sequence_parallel;
            if folds && splits(tp * cp * dp, etp * ep) && tokens_differ {
                let degrees = [2, 4, 8].iter().filter(|&&n| splits(model.seq_len / cp, n)).count();
                // Whatever overlaps needs something to overlap with.
                count += match (pairs, ep > 1) {
                    (true, sends) => u64::from(sends),
                    (false, true) => 1 + 2 * degrees as u64,
                    (false, false) => 1,
                };
            }
        }
    }
    count
}

fn pipelines_and_states(model: &ModelSpec, [_, pp, cp, dp]: [u64; 4], pairs: bool) -> u64 {
    let mut pipelines = 0;
    for micro_batch in 1..=model.global_batch {
        if !splits(model.global_batch / dp, micro_batch) {
            continue;
        }
        let micro_batches = model.global_batch / dp / micro_batch;
        let allowed = |name: &&str| match *name {
            "overlapped_1f1b" => pairs,
            name => !pairs || name.starts_with("dualpipe"),
        };
        for schedule in SCHEDULES.into_iter().filter(allowed) {
            for chunks in 1..=model.layers as u64 {
                if has_schedule(schedule, [pp, micro_batches, chunks, model.layers as u64]) {
                    let over = HOSTS.contains(&schedule) && pp > 1;
                    let interlaced = u64::from(schedule == "1f1b");
                    let twice = matches!(schedule, "dualpipe" | "chimera");
                    let stages = if twice { pp } else { pp * chunks };
                    let unequal = chunks > 1 && !splits(model.layers as u64, stages);
                    // At the ends the loss can be fused.
                    pipelines += 2 * (VOCABS_AT_ENDS - u64::from(unequal))
                        + if over { VOCABS_OVER_PIPELINE + interlaced } else { 0 };
                }
            }
        }
    }
    let rank_orders = if pp > 1 && dp > 1 { 2 } else { 1 };
    pipelines * RECOMPUTE * OFFLOAD * rank_orders * shards(cp * dp)
}

fn has_schedule(schedule: &str, [pp, micro_batches, chunks, layers]: [u64; 4]) -> bool {
    let looped = pp > 1 && chunks > 1 && pp * chunks <= layers;
    match schedule {
        "naive" => chunks == 1 && micro_batches == 1,
        "gpipe" | "1f1b" => chunks == 1,
        "interleaved_1f1b" | "interleaved_zb" => looped && splits(micro_batches, pp),
        "overlapped_1f1b" if pp == 1 => chunks == 1,
        "overlapped_1f1b" => looped && splits(micro_batches, pp),
        "looped_bfs" => looped,
        "zb_h1" | "zb_h2" => pp > 1 && chunks == 1,
        "zb_auto" => pp > 1 && chunks == 1 || looped && chunks == 2,
        // Two copies of each of p stages; each direction takes half of the micro-batches.
        "dualpipe" => {
            pp > 1
                && chunks == 2
                && splits(pp, 2)
                && splits(micro_batches, 2)
                && micro_batches >= 2 * pp
        }
        "chimera" => pp > 1 && chunks == 2 && splits(pp, 2) && splits(micro_batches, pp),
        "dualpipe_v" => looped && chunks == 2 && micro_batches >= 2 * pp,
        _ => looped && chunks == 2,
    }
}

/// ZeRO 0 without groups; 1, 2 and 3 over any group of more than one replica.
fn shards(replicas: u64) -> u64 {
    let groups = (2..=replicas).filter(|&size| splits(replicas, size)).count() as u64;
    1 + 3 * groups
}

fn check(model: &ModelSpec, gpus: u64) {
    let (cluster, restrictions) = (cluster(), Restrictions::default());
    let waived = Waived::default();
    let space = Space { model, cluster: &cluster, gpus, restrictions: &restrictions, waived };
    let (counted, looped) = (space.count(), enumerate(model, gpus));
    assert_eq!(counted, looped, "{} layers, {gpus} GPUs, {:?}", model.layers, model.moe);
}

#[test]
fn candidates_equal_nested_loops_on_dense_models() {
    for (layers, batch) in [(2, 4), (5, 12), (6, 8)] {
        let model = plain_model(layers, batch, None);
        for gpus in [1, 2, 3, 4, 6, 7, 8, 12, 16, 24] {
            check(&model, gpus);
        }
    }
}

#[test]
fn candidates_equal_nested_loops_on_mixtures_of_experts() {
    for experts in [3, 4, 8] {
        let model = plain_model(4, 12, Some(experts));
        for gpus in [1, 2, 3, 4, 6, 7, 8, 12, 16] {
            check(&model, gpus);
        }
    }
}

#[test]
fn candidates_equal_nested_loops_on_random_models() {
    for seed in 0..100 {
        let random = &mut Random::new(seed);
        let model = meshwright_tests::small::model(random);
        check(&model, random.pick(&[2, 3, 4, 5, 6, 8, 9, 12]));
    }
}

/// The count of combinations equals the number of inner choices enumerated.
#[test]
fn combinations_listed_one_by_one_are_as_many() {
    for seed in 0..30 {
        let instance = Instance::random(&mut Random::new(seed));
        let restrictions = instance.restrictions();
        let task = Task::new(&instance.model, &instance.cluster, instance.gpus, &restrictions);
        let listed = brute::combinations(&task).len() as u64;
        assert_eq!(task.space().count(), listed, "seed {seed}: {:?}", instance.settings);
    }
}

#[test]
fn a_space_contains_its_combinations_and_no_others() {
    let mut checked = 0;
    for seed in 0..60 {
        let instance = Instance::random(&mut Random::new(seed));
        let restrictions = instance.restrictions();
        let task = Task::new(&instance.model, &instance.cluster, instance.gpus, &restrictions);
        let space = task.space();
        for d in brute::combinations(&task).iter().step_by(37) {
            assert!(space.contains(d), "seed {seed}: {d:?}");
            for other in [
                Decisions { dp: 2 * d.dp, ..d.clone() },
                Decisions { micro_batches: d.micro_batches + 1, ..d.clone() },
                Decisions { dp_shard: 2 * d.dp * d.cp, ..d.clone() },
                Decisions { vpp: d.vpp + 97, ..d.clone() },
                Decisions { ep: 7, ..d.clone() },
                Decisions { sequence_parallel: !d.sequence_parallel, ..d.clone() },
            ] {
                // Only this one may be in the space, too.
                let may = other.sequence_parallel != d.sequence_parallel && d.tp > 1;
                assert!(may || !space.contains(&other), "seed {seed}: {other:?}");
            }
            checked += 1;
        }
    }
    assert!(checked > 100, "{checked}");
}
