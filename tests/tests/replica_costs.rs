//! What replicas' decisions cost, padding, and a loss without stored logits: by hand from the
//! formulas that `docs/design/cost-model.md` and decision 030 state.

use meshwright_tests::close;
use meshwright_tests::golden::planned;
use meshwright_tests::small::{Sizes, cluster_of, plain_model};
use models::cluster::ClusterSpec;
use models::decisions::{Decisions, DpReduction};
use models::model::{ModelSpec, params};
use planner::cost::state::{LocalParams, StateCost, tensors_a_parameter};
use planner::pricing::cost_cache::CostCache;
use planner::pricing::{Configuration, StageCost};
use planner::request::Task;
use planner::request::restrictions::Restrictions;
use planner::search::search;

/// Slowdown of reductions around a step, and the part of them that runs under a backward pass.
const SLOWDOWN: f64 = 1.25;
const OVERLAP: f64 = 0.9;
const LATENCY_S: f64 = 1e-7;
const LAUNCH_S: f64 = 1e-7;

/// All devices in one domain.
fn machine() -> ClusterSpec {
    let mut cluster = cluster_of(&Sizes {
        hbm_bytes: 1e9,
        host_bytes: 1e10,
        inner_gpus: 8,
        inner_bytes_per_s: 1e9,
        outer_bytes_per_s: 1e8,
        base: "megatron_2024",
    });
    let software = &mut cluster.software;
    (software.dp_slowdown, software.dp_overlap) = (SLOWDOWN, OVERLAP);
    (software.zero3_slowdown, software.zero3_overlap) = (SLOWDOWN, OVERLAP);
    software.reduced_gradient_bytes = 4.0;
    (software.loss_bytes, software.placeholder_bytes) = (0.0, 0.0);
    cluster
}

/// Seconds of a ring all-reduce over four ranks: `2·(n − 1)` latencies, `2·(n − 1)/n` of the bytes
/// at 80 % of the link's rate, and the start of a collective.
fn ring_of_four_s(bytes: f64) -> f64 {
    3.0 * LAUNCH_S + 6.0 * LATENCY_S + 1.5 * bytes / 0.8e9
}

/// Exposed seconds of a step's reduction over four replicas without ZeRO.
fn exposed_s(dp_reduction: DpReduction, dp_bucket_mib: u64, count: f64, backward_s: f64) -> f64 {
    let plan = planned("llama_gqa", 4, &["tp=1", "pp=1", "dp=4", "zero_stage=0", "micro_batch=2"]);
    let d = Decisions { dp_reduction, dp_bucket_mib, ..plan.decisions };
    let cluster = machine();
    let cost = StateCost::new(&cluster, tensors_a_parameter(&plan.inputs.model), &d, &[u64::MAX]);
    cost.reduce_exposed_s(LocalParams { dense: count, expert: 0.0 }, backward_s)
}

/// 200 MiB of gradients are eight of the usual buckets. A call more costs a turn of the ring; a
/// larger bucket leaves what it has above the usual one exposed.
#[test]
fn reductions_cost_what_their_calls_and_buckets_leave_exposed() {
    let (count, bytes, long_s) = (50.0 * 1_048_576.0, 200.0 * 1_048_576.0, 1e9);
    let all_s = ring_of_four_s(bytes);
    let near = |dp_reduction, mib, backward_s, by_hand_s: f64| {
        let found_s = exposed_s(dp_reduction, mib, count, backward_s);
        assert!(close(found_s, by_hand_s), "{dp_reduction:?} {mib}: {found_s}, not {by_hand_s}");
    };
    for backward_s in [0.0, long_s] {
        near(DpReduction::Naive, 25, backward_s, SLOWDOWN * all_s);
    }
    near(DpReduction::Bucketed, 25, 0.0, SLOWDOWN * all_s);
    near(DpReduction::Bucketed, 25, 0.1 * all_s, (SLOWDOWN - 0.1) * all_s);
    near(DpReduction::Bucketed, 25, long_s, SLOWDOWN * (1.0 - OVERLAP) * all_s);
    // 100 buckets instead of eight.
    let turn_s = 3.0 * LATENCY_S;
    let slower_s = all_s + 92.0 * turn_s;
    near(DpReduction::Bucketed, 2, long_s, SLOWDOWN * (1.0 - OVERLAP) * slower_s);
    // Two buckets: of the last one's 100 MiB, 25 are in the fitted share.
    near(DpReduction::Bucketed, 100, long_s, SLOWDOWN * all_s - 0.625 * all_s);
    near(DpReduction::Bucketed, 400, long_s, SLOWDOWN * all_s);
}

/// `overlapped` has a call for each of a layer's nine tensors.
#[test]
fn a_call_for_each_tensor_costs_latencies() {
    let model = planned("llama_gqa", 4, &["tp=1", "pp=1", "dp=4"]).inputs.model;
    let count = params::total(&model) as f64;
    let calls = 9.0 * model.layers as f64;
    let usual = 4.0 * count / (25.0 * 1_048_576.0);
    let all_s = ring_of_four_s(4.0 * count) + (calls - usual) * 3.0 * LATENCY_S;
    let found_s = exposed_s(DpReduction::Overlapped, 25, count, 1e9);
    let by_hand_s = SLOWDOWN * (1.0 - OVERLAP) * all_s;
    assert!(close(found_s, by_hand_s), "{found_s}, not {by_hand_s}");
}

/// Decisions of the fastest plan with what `words` pin.
fn decided(model: &ModelSpec, cluster: &ClusterSpec, gpus: u64, words: &str) -> Decisions {
    let pinned = "tp=1 cp=1 micro_batch=1 schedule=1f1b recompute=none offload=none";
    let words: Vec<String> = pinned.split(' ').chain(words.split(' ')).map(str::to_owned).collect();
    let restrictions = Restrictions::parse(&words).expect("valid");
    let mut task = Task::new(model, cluster, gpus, &restrictions);
    task.ignore_memory = true;
    search(&task, &mut |_| {}).best.expect("it exists").decisions
}

/// A stage of two layers in a pipeline of four stages.
fn stage_of(model: &ModelSpec, gpus: u64, words: &str, stage: usize) -> StageCost {
    let cluster = machine();
    let decisions = decided(model, &cluster, gpus, &format!("pp=4 {words}"));
    let cache = CostCache::new(model, &cluster, gpus);
    Configuration::new(&cache, decisions).expect("valid").stage(stage, 2 * stage, 2 * stage + 2)
}

/// What a stage's own backward pass hides of its reduction.
#[test]
fn stages_hide_reductions_under_their_backward_pass() {
    let model = plain_model(8, 16, None);
    let cost = |words: &str| {
        stage_of(&model, 8, &format!("dp=2 zero_stage=0 vocab=first_last {words}"), 1)
    };
    let [naive, overlapped, bucketed] =
        ["naive", "overlapped", "bucketed"].map(|how| cost(&format!("dp_reduction={how}")));
    let hidden_s = (OVERLAP * naive.tail_s).min(bucketed.backward.total_s());
    assert!(close(bucketed.tail_s, naive.tail_s - hidden_s), "{bucketed:?} {naive:?}");
    assert!(naive.tail_s > overlapped.tail_s && overlapped.tail_s > bucketed.tail_s);
    // Nothing but the reduction depends on it.
    assert_eq!(naive.backward, bucketed.backward);
}

/// Gathers and reductions of stages 2 and 3 run under passes, unless the mode is `naive`.
#[test]
fn naive_replicas_hide_no_gathers() {
    let model = plain_model(8, 16, None);
    for zero_stage in [2, 3] {
        let cost = |how: &str| {
            let words = format!("dp=2 zero_stage={zero_stage} vocab=first_last dp_reduction={how}");
            stage_of(&model, 8, &words, 1)
        };
        let [naive, bucketed] = ["naive", "bucketed"].map(cost);
        for (naive, bucketed) in
            [(naive.forward, bucketed.forward), (naive.backward, bucketed.backward)]
        {
            let pass_s = naive.total_s() - naive.dp_s;
            assert!(close(pass_s, bucketed.total_s() - bucketed.dp_s), "{naive:?} {bucketed:?}");
            let hidden_s = (OVERLAP * naive.dp_s).min(pass_s);
            let expected_s = naive.dp_s - hidden_s;
            assert!((bucketed.dp_s - expected_s).abs() < 1e-12, "{bucketed:?} {expected_s}");
        }
        assert_eq!(naive.forward.dp_s > 0.0, zero_stage == 3);
        assert!(naive.backward.dp_s > bucketed.backward.dp_s);
    }
}

/// Tables of the vocabulary travel as layers do: the first stage gathers its own once and reduces
/// its gradient, the last gathers its own twice.
#[test]
fn tables_of_the_vocabulary_travel_with_every_micro_batch() {
    let model = ModelSpec { vocab: 50_000, ..plain_model(8, 16, None) };
    let stage = |words: &str, stage| {
        let words = format!("dp=2 vocab=first_last dp_reduction=naive {words}");
        stage_of(&model, 8, &words, stage)
    };
    let dp_s = |zero_stage: u8, at| {
        let cost = stage(&format!("zero_stage={zero_stage}"), at);
        (cost.forward.dp_s, cost.backward.dp_s)
    };
    let table = 50_000.0 * model.hidden as f64;
    // Of two ranks each sends half; weights have two bytes, gradients four.
    let sent_s = |bytes: f64| SLOWDOWN * (0.5 * table * bytes / 0.8e9);
    let near = |found_s: f64, by_hand_s: f64| {
        assert!((found_s / by_hand_s - 1.0).abs() < 0.01, "{found_s}, not {by_hand_s}");
    };
    let (forward_s, backward_s) = dp_s(3, 1);
    let (first_forward_s, first_backward_s) = dp_s(3, 0);
    near(first_forward_s - forward_s, sent_s(2.0));
    near(first_backward_s - backward_s, sent_s(4.0));
    let (last_forward_s, last_backward_s) = dp_s(3, 3);
    near(last_forward_s - forward_s, sent_s(2.0));
    near(last_backward_s - backward_s, sent_s(2.0 + 4.0));
    let (_, backward_s) = dp_s(2, 1);
    near(dp_s(2, 0).1 - backward_s, sent_s(4.0));
    // A tied table on one rank is read by both layers, and reduced once.
    let [tied, untied] = [true, false].map(|tied_embeddings| {
        let model = ModelSpec { tied_embeddings, ..model.clone() };
        let decisions = decided(&model, &machine(), 2, "dp=2 zero_stage=3 dp_reduction=naive");
        let (cluster, gpus) = (machine(), 2);
        let cache = CostCache::new(&model, &cluster, gpus);
        Configuration::new(&cache, decisions).expect("valid").stage(0, 0, 8)
    });
    near(untied.backward.dp_s - tied.backward.dp_s, sent_s(4.0));
    assert!(close(untied.forward.dp_s, tied.forward.dp_s));
}

/// A vocabulary of 500 over four pipeline ranks is padded to eight shards of 63 rows; two of them
/// are 126 rows, and fast products need a multiple of eight.
#[test]
fn shards_of_a_vocabulary_are_priced_with_their_padding() {
    let of = |vocab: u64| {
        let model = ModelSpec { vocab, ..plain_model(8, 8, None) };
        let cluster = machine();
        let decisions = decided(&model, &cluster, 4, "pp=4 dp=1 vocab=parallel_1");
        let cache = CostCache::new(&model, &cluster, 4);
        let configuration = Configuration::new(&cache, decisions).expect("valid");
        (configuration.vocab_pass_s(), configuration.stage(1, 2, 4).params.dense)
    };
    let model = plain_model(8, 8, None);
    let without = stage_of(&model, 4, "dp=1 vocab=first_last", 1).params.dense;
    for (vocab, rows) in [(500, 128), (512, 128), (513, 136), (544, 136)] {
        let (_, held) = of(vocab);
        assert_eq!(held - without, (2 * rows * model.hidden) as f64, "{vocab}");
    }
    // A shard of as many rows takes as long, whatever part of it is padding.
    let [a, b, c] = [500, 512, 513].map(|vocab| of(vocab).0);
    assert!(a == b && b < c, "{a} {b} {c}");
}

/// Without stored logits the last stage holds those of a block of tokens, and multiplies by the
/// output matrix once more.
#[test]
fn a_fused_loss_holds_a_block_of_logits_and_multiplies_again() {
    let model = ModelSpec { vocab: 1000, ..plain_model(8, 8, None) };
    let model = model.with_run(Some(256), Some(8)).expect("valid");
    let cost =
        |fused: bool| stage_of(&model, 4, &format!("dp=1 vocab=first_last fused_loss={fused}"), 3);
    let [stored, fused] = [false, true].map(cost);
    // 256 tokens, 96 columns of the input: 24.6 tokens' logits are as large as that, in steps of
    // 64 tokens. 1000 is a multiple of eight.
    let logit_bytes = machine().software.logit_bytes;
    assert_eq!(stored.workspace_bytes, 256.0 * 1000.0 * logit_bytes);
    assert_eq!(fused.workspace_bytes, 64.0 * 1000.0 * logit_bytes);
    assert_eq!(stored.extra_in_flight_bytes, fused.extra_in_flight_bytes);
    assert_eq!(stored.forward, fused.forward);
    // The loss itself moves nothing here, so the output layer's forward pass is its product.
    let before = stage_of(&model, 4, "dp=1 vocab=first_last fused_loss=false", 2);
    let again_s = fused.backward.compute_s - stored.backward.compute_s;
    let product_s = stored.forward.compute_s - before.forward.compute_s;
    assert!(product_s > 0.0 && close(again_s, product_s), "{again_s} {product_s}");
}

/// The output layer's gradients of weights are part of `B` then, so `W` is shorter by them.
#[test]
fn a_fused_loss_takes_weight_gradients_into_the_input_pass() {
    let model = plain_model(8, 8, None);
    let weight_s = |fused: bool, stage: usize| {
        let words = format!("dp=1 vocab=first_last fused_loss={fused} schedule=zb_h1");
        stage_of(&model, 4, &words, stage).weight_s
    };
    assert_eq!(weight_s(true, 3), weight_s(true, 2));
    assert!(weight_s(false, 3) > weight_s(false, 2));
    assert_eq!(weight_s(true, 2), weight_s(false, 2));
}
