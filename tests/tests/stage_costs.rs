//! Costs of passes and stages besides kernels: gaps before passes, transfers between stages, and
//! the reduction of a tied embedding's gradients.

use meshwright_tests::small::{Sizes, cluster_of, plain_model};
use models::cluster::ClusterSpec;
use models::model::ModelSpec;
use planner::pricing::cost_cache::CostCache;
use planner::pricing::{Configuration, StageCost};
use planner::request::Task;
use planner::request::restrictions::Restrictions;
use planner::search::search;

/// Longer than any pass of these models.
const GAP_S: f64 = 0.5;

fn machine() -> ClusterSpec {
    cluster_of(&Sizes {
        hbm_bytes: 1e9,
        host_bytes: 1e10,
        inner_gpus: 2,
        inner_bytes_per_s: 1e9,
        outer_bytes_per_s: 1e8,
        base: "megatron_2024",
    })
}

/// A stage of four devices: two layers of a pipeline that is pinned except for `words`.
fn stage_of(model: &ModelSpec, cluster: &ClusterSpec, words: &str, stage: usize) -> StageCost {
    let pinned = "tp=1 pp=4 dp=1 cp=1 micro_batch=1 zero_stage=0 recompute=none offload=none vocab=first_last";
    let words: Vec<String> = pinned.split(' ').chain(words.split(' ')).map(str::to_owned).collect();
    let restrictions = Restrictions::parse(&words).unwrap();
    let found = search(&Task::new(model, cluster, 4, &restrictions), &mut |_| {});
    let decisions = found.best.expect("it fits").decisions;
    let cache = CostCache::new(model, cluster, 4);
    Configuration::new(&cache, decisions).unwrap().stage(stage, 2 * stage, 2 * stage + 2)
}

/// Gaps added to the forward pass, the backward pass, and separate weight gradients, in units of
/// gaps.
fn gaps(words: &str, overlap: bool) -> [f64; 3] {
    let model = plain_model(8, 8, None);
    let of = |pass_gap_s: f64| {
        let mut cluster = machine();
        cluster.software.pass_gap_s = pass_gap_s;
        cluster.software.p2p_overlap = overlap;
        let cost = stage_of(&model, &cluster, words, 0);
        [cost.forward.total_s(), cost.backward.total_s(), cost.weight_s]
    };
    let (with, without) = (of(GAP_S), of(0.0));
    [0, 1, 2].map(|i| ((with[i] - without[i]) / GAP_S * 1e6).round() / 1e6)
}

#[test]
fn every_pass_begins_with_a_gap() {
    assert_eq!(gaps("schedule=1f1b", true), [1.0, 1.0, 0.0]);
    // A backward pass in two parts begins twice.
    assert_eq!(gaps("schedule=zb_h1", true), [1.0, 2.0, 1.0]);
}

#[test]
fn no_pass_waits_where_transfers_run_under_others() {
    assert_eq!(gaps("schedule=interleaved_1f1b vpp=2", true), [0.0; 3]);
    assert_eq!(gaps("schedule=interleaved_1f1b vpp=2", false), [1.0, 1.0, 0.0]);
}

/// Between devices 0 and 1, in one node, a transfer has the link's rate; from 1 to 2 it goes over
/// the network.
#[test]
fn a_transfer_over_the_network_is_slower_than_its_links_rate() {
    let model = plain_model(8, 8, None);
    let backward_s = |stage: usize, p2p_slowdown: f64| {
        let mut cluster = machine();
        cluster.software.p2p_slowdown = p2p_slowdown;
        stage_of(&model, &cluster, "schedule=1f1b", stage).backward.total_s()
    };
    let [within, beyond] = [0, 1].map(|stage| backward_s(stage, 3.0) - backward_s(stage, 1.0));
    let sent_bytes = (model.seq_len * model.hidden) as f64 * 2.0;
    let expected_s = 2.0 * sent_bytes / machine().levels[1].achieved_by(1);
    assert_eq!(within, 0.0);
    assert!((beyond / expected_s - 1.0).abs() < 1e-6, "{beyond} {expected_s}");
}

/// If the software overlaps the reduction of a tied embedding's gradients with the last weight
/// gradients, it costs less by their time.
#[test]
fn tied_gradients_hide_under_weight_gradients() {
    let model = ModelSpec { tied_embeddings: true, ..plain_model(8, 8, None) };
    let cost = |words: &str, tied_under_weights: bool| {
        let mut cluster = machine();
        cluster.software.tied_under_weights = tied_under_weights;
        stage_of(&model, &cluster, words, 0)
    };
    let [seen, hidden] = [false, true].map(|under| cost("schedule=zb_h1", under));
    let expected_s = (seen.tail_s - seen.weight_s).max(0.0);
    // The gap before weight gradients hides nothing, and is negligible here.
    assert!((hidden.tail_s - expected_s).abs() < 2e-7, "{} {expected_s}", hidden.tail_s);
    assert!(hidden.tail_s < seen.tail_s, "{} {}", hidden.tail_s, seen.tail_s);
    let [seen, hidden] = [false, true].map(|under| cost("schedule=1f1b", under));
    assert_eq!(seen.tail_s, hidden.tail_s);
}

/// With `all_gather` a rank holds the keys and values of whole sequences, and their gradients.
#[test]
fn gathered_keys_and_values_take_memory() {
    let (model, cluster) = (plain_model(8, 8, None), machine());
    let of = |style: &str| {
        let words = ["tp=1", "pp=1", "cp=2", "dp=1", "micro_batch=1", "dtype=bf16", style];
        let restrictions = Restrictions::parse(&words).unwrap();
        let found = search(&Task::new(&model, &cluster, 2, &restrictions), &mut |_| {});
        let decisions = found.best.expect("it fits").decisions;
        CostCache::new(&model, &cluster, 2).layer_costs(&decisions).transient_bytes
    };
    let width = 2 * model.attention.kv_heads * model.attention.head_dim;
    let both = 2.0 * (model.seq_len * width) as f64;
    assert_eq!(of("cp_style=all_gather") - of("cp_style=zigzag"), 2.0 * both);
}
