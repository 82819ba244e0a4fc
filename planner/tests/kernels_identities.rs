//! Textbook identities on an ideal cluster, and properties of every cost on every shipped cluster.

use std::sync::OnceLock;

use models::cluster::{AttentionKernel, ClusterSpec, Dtype, read, shipped, shipped_names};
use models::input::Source;
use models::mesh::GroupShape;
use planner::cost::attention::{AttentionShape, backward_s, forward_s};
use planner::cost::collective::{Collective, by_level_s, p2p_s, time_of_some_s, time_s};
use planner::cost::gemm::{gemm_s, grouped_gemm_s, misalignment_factor, weight_gradient_s};
use planner::cost::memory_bound::{optimizer_s, streaming_s};
use proptest::prelude::*;

const NVLINK: f64 = 100e9;
const NETWORK: f64 = 10e9;
const ALPHA: [f64; 2] = [1e-6, 5e-6];

/// Eight GPUs a host, links at full line rate, no measured tables.
fn ideal() -> ClusterSpec {
    let mut cluster = shipped("selene").unwrap().unwrap();
    cluster.tables = std::sync::Arc::default();
    cluster.device.kernel_launch_s = 0.0;
    for (level, (rate, alpha)) in
        cluster.levels.iter_mut().zip([(NVLINK, ALPHA[0]), (NETWORK, ALPHA[1])])
    {
        (level.bytes_per_s, level.latency_s, level.efficiency) = (rate, alpha, 1.0);
        level.in_network = false;
    }
    cluster
}

fn group(within: &[u64]) -> GroupShape {
    GroupShape { within: within.to_vec() }
}

#[track_caller]
fn assert_near(a: f64, b: f64) {
    assert!((a / b - 1.0).abs() < 1e-9, "{a} is not {b}");
}

#[test]
fn ring_inside_a_host() {
    let (cluster, s) = (ideal(), 1e9);
    for n in [2.0, 3.0, 8.0] {
        let of = |op| time_s(&cluster, op, s, &group(&[n as u64, n as u64]));
        let turn = (n - 1.0) * ALPHA[0] + (n - 1.0) / n * s / NVLINK;
        assert_near(of(Collective::AllGather), turn);
        assert_near(of(Collective::ReduceScatter), turn);
        assert_near(of(Collective::AllReduce), 2.0 * turn);
    }
}

#[test]
fn levels_of_a_hierarchical_all_reduce() {
    let (cluster, s) = (ideal(), 64e9);
    let (g, nodes) = (8.0, 4.0);
    let levels = by_level_s(&cluster, Collective::AllReduce, s, &group(&[8, 32]));
    assert_near(levels[0], 2.0 * ((g - 1.0) * ALPHA[0] + (g - 1.0) / g * s / NVLINK));
    let inter = (nodes - 1.0) * ALPHA[1] + (nodes - 1.0) / nodes * (s / g) / NETWORK;
    assert_near(levels[1], 2.0 * inter);
    // With its levels pipelined, it lies between the slowest level and their sum, and never exceeds
    // one ring.
    let whole = time_s(&cluster, Collective::AllReduce, s, &group(&[8, 32]));
    let ring =
        2.0 * 31.0 / 32.0 * s / NVLINK.min(g * NETWORK) + 2.0 * (28.0 * ALPHA[0] + 4.0 * ALPHA[1]);
    assert!(levels[0].max(levels[1]) <= whole && whole <= levels[0] + levels[1]);
    assert!(whole <= ring);
}

#[test]
fn one_rank_a_host_uses_only_the_network() {
    let (cluster, s) = (ideal(), 1e9);
    let turn = 15.0 * ALPHA[1] + 15.0 / 16.0 * s / NETWORK;
    assert_near(time_s(&cluster, Collective::ReduceScatter, s, &group(&[1, 16])), turn);
    // A small all-reduce over many hosts uses the tree: latency grows with the logarithm.
    let small = time_s(&cluster, Collective::AllReduce, 8.0, &group(&[1, 1024]));
    assert!(small < 2.0 * 11.0 * ALPHA[1], "{small}");
}

#[test]
fn all_to_all_splits_by_destination() {
    let (cluster, s) = (ideal(), 1e9);
    let levels = by_level_s(&cluster, Collective::AllToAll, s, &group(&[8, 32]));
    assert_near(levels[0], ALPHA[0] + 7.0 / 32.0 * s / NVLINK);
    assert_near(levels[1], ALPHA[1] + 24.0 / 32.0 * s / (0.8 * NETWORK));
}

#[test]
fn in_network_reduction_speeds_up_a_large_all_reduce() {
    let mut cluster = ideal();
    let all = |cluster: &ClusterSpec| time_s(cluster, Collective::AllReduce, 1e9, &group(&[8, 8]));
    let ring = all(&cluster);
    cluster.levels[0].in_network = true;
    assert!((0.55..0.75).contains(&(all(&cluster) / ring)));
}

#[test]
fn nothing_to_send_costs_nothing() {
    let cluster = ideal();
    assert_eq!(time_s(&cluster, Collective::AllReduce, 1e9, &group(&[1, 1])), 0.0);
    assert_eq!(time_s(&cluster, Collective::AllReduce, 0.0, &group(&[8, 8])), 0.0);
    assert_eq!(p2p_s(&cluster, 0.0, 0, 1), 0.0);
    assert_eq!(gemm_s(&cluster, Dtype::Bf16, 0, 8, 8), 0.0);
    assert_eq!(grouped_gemm_s(&cluster, Dtype::Bf16, 0, 8, 8, 8), 0.0);
    assert_eq!((streaming_s(&cluster, 0.0), optimizer_s(&cluster, 0.0)), (0.0, 0.0));
}

#[test]
fn shapes_beyond_the_cluster_are_clamped() {
    let cluster = ideal();
    let of = |within: &[u64]| time_s(&cluster, Collective::AllGather, 1e9, &group(within));
    assert_near(of(&[8]), of(&[8, 8]));
    assert!(of(&[8, 16, 32]) > of(&[8, 16]));
    assert_near(p2p_s(&cluster, 1e9, 7, 1), p2p_s(&cluster, 1e9, 1, 1));
}

/// Eight GPUs with two adapters. A GPU that sends alone has a whole adapter, not a quarter of one.
#[test]
fn a_lone_sender_has_an_adapter_to_itself() {
    let mut cluster = ideal();
    let s = 1e9;
    let own_s = p2p_s(&cluster, s, 1, 8);
    assert_near(p2p_s(&cluster, s, 1, 1), own_s);
    cluster.levels[1].gpus_an_adapter = 4;
    let wire_s = |senders| p2p_s(&cluster, s, 1, senders) - ALPHA[1];
    assert_near(p2p_s(&cluster, s, 1, 8), own_s);
    // Four neighbouring GPUs share an adapter.
    assert_near(wire_s(4), wire_s(8));
    assert_near(wire_s(2), wire_s(8) / 2.0);
    assert_near(wire_s(1), wire_s(8) / 4.0);
    // Inside the host there is nothing to share.
    assert_near(p2p_s(&cluster, s, 0, 1), p2p_s(&cluster, s, 0, 8));
    let pair = group(&[1, 2]);
    let sum_s = |senders| time_of_some_s(&cluster, Collective::AllReduce, s, &pair, senders);
    assert_near(sum_s(8), time_s(&cluster, Collective::AllReduce, s, &pair));
    assert_near(sum_s(8) - 2.0 * ALPHA[1], 4.0 * (sum_s(1) - 2.0 * ALPHA[1]));
}

#[test]
fn a_broadcast_goes_along_the_rings_once() {
    let (cluster, s) = (ideal(), 1e9);
    let of = |within: &[u64]| time_s(&cluster, Collective::Broadcast, s, &group(within));
    assert_near(of(&[8, 8]), 7.0 * ALPHA[0] + s / NVLINK);
    // Eight rings, one through each GPU's adapter. The links inside the host are the slowest part.
    assert_near(of(&[8, 32]), 28.0 * ALPHA[0] + 3.0 * ALPHA[1] + s / (8.0 * NETWORK).min(NVLINK));
    assert_near(of(&[1, 4]), 3.0 * ALPHA[1] + s / NETWORK);
}

fn square(sequence: u64) -> AttentionShape {
    AttentionShape {
        batch: 1,
        heads: 32,
        kv_heads: 8,
        query_len: sequence,
        key_len: sequence,
        head_dim_qk: 128,
        head_dim_v: 128,
        causal: true,
        last_queries: false,
        window: None,
        sinks: false,
    }
}

/// Half the queries over the same keys are half the work, while their rows fill the device: few
/// heads of long sequences too, as context parallelism leaves them.
#[test]
fn half_the_queries_take_half_as_long() {
    for name in shipped_names() {
        let cluster = shipped(name).and_then(Result::ok).expect("it reads");
        let measured = cluster.tables.attention.is_some();
        if !measured || cluster.software.attention != AttentionKernel::Flash {
            continue;
        }
        for pass in [forward_s, backward_s] {
            let of = |query_len: u64| {
                let shape =
                    AttentionShape { query_len, causal: false, key_len: 65_536, ..square(65_536) };
                pass(&cluster, &shape, Dtype::Bf16)
            };
            for query_len in [65_536, 32_768, 16_384, 8192, 4096] {
                let ratio = of(query_len) / of(query_len / 2);
                assert!((1.6..=2.3).contains(&ratio), "{name} {query_len}: {ratio}");
            }
            // In the end a few rows leave multiprocessors idle.
            assert!(of(128) > of(65_536) / 512.0 * 1.5, "{name}");
        }
    }
}

#[test]
fn masks_keep_the_expected_pairs() {
    let full = square(1024);
    assert_near(full.kept_pairs(), 1024.0 * 1024.0 / 2.0);
    assert_near(AttentionShape { causal: false, ..full }.kept_pairs(), 1024.0 * 1024.0);
    assert_near(AttentionShape { window: Some(4096), ..full }.kept_pairs(), full.kept_pairs());
    // A window of w: a triangle of side w, then w for each further row.
    let windowed = AttentionShape { window: Some(256), ..full };
    assert_near(windowed.kept_pairs(), 256.0 * 128.0 + 768.0 * 256.0);
    // Half of the queries, spread evenly over all keys, keep half of the pairs.
    let half = AttentionShape { query_len: 512, ..full };
    assert_near(2.0 * half.kept_pairs(), full.kept_pairs());
    // Chunks of a sequence, each with the keys up to its end: 1, 3, 5 and 7 sixteenths.
    let chunk = |i: u64| AttentionShape {
        query_len: 256,
        key_len: 256 * (i + 1),
        last_queries: true,
        ..full
    };
    for i in 0..4 {
        assert_near(16.0 * chunk(i).kept_pairs(), (2 * i + 1) as f64 * full.kept_pairs());
    }
    // With a window the first chunk is a triangle, the others are whole.
    let windowed = |i| AttentionShape { window: Some(256), ..chunk(i) }.kept_pairs();
    assert_near(windowed(0), 256.0 * 128.0);
    assert_near(windowed(3), 256.0 * 256.0);
}

#[test]
fn unfused_attention_pays_for_the_whole_square_and_its_scores() {
    let mut cluster = shipped("selene").unwrap().unwrap();
    let unfused = forward_s(&cluster, &square(2048), Dtype::Bf16);
    let uncut = AttentionShape { causal: false, ..square(2048) };
    assert_near(unfused, forward_s(&cluster, &uncut, Dtype::Bf16));
    cluster.software.attention = AttentionKernel::Flash;
    assert!(unfused > 3.0 * forward_s(&cluster, &square(2048), Dtype::Bf16));
}

#[test]
fn widths_that_are_no_multiple_of_eight_cost() {
    assert_eq!((misalignment_factor(128), misalignment_factor(112)), (1.0, 1.0));
    assert!(misalignment_factor(150) > 1.4 && misalignment_factor(108) > 1.4);
}

#[test]
fn a_link_can_be_slowed_in_the_file() {
    let text = models::cluster::shipped_source("dgx_h100").unwrap().unwrap();
    let slow = text.text().replacen("efficiency: 0.80", "efficiency: 0.40", 1);
    let slow = read(&Source::from_bytes("slow.yaml", slow.into_bytes()).unwrap()).unwrap();
    let fast = shipped("dgx_h100").unwrap().unwrap();
    let of = |cluster: &ClusterSpec| time_s(cluster, Collective::AllGather, 1e9, &group(&[8, 8]));
    assert!((1.9..2.01).contains(&(of(&slow) / of(&fast))), "{}", of(&slow) / of(&fast));
}

fn clusters() -> &'static [ClusterSpec] {
    static CLUSTERS: OnceLock<Vec<ClusterSpec>> = OnceLock::new();
    CLUSTERS.get_or_init(|| shipped_names().map(|name| shipped(name).unwrap().unwrap()).collect())
}

/// A size near a power of two, so that all scales are tried.
fn size(bits: std::ops::Range<u32>) -> impl Strategy<Value = u64> {
    (bits, 0.5_f64..1.0).prop_map(|(bits, part)| ((1_u64 << bits) as f64 * part).ceil() as u64)
}

const DTYPES: [Dtype; 5] = [Dtype::Bf16, Dtype::Fp8, Dtype::Nvfp4, Dtype::F32, Dtype::Fp16];
const OPS: [Collective; 5] = [
    Collective::AllReduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::AllToAll,
    Collective::Broadcast,
];

/// Allows for rounding in the last bits.
#[track_caller]
fn assert_not_cheaper(more: f64, less: f64) {
    assert!(less > 0.0 && more.is_finite() && more >= less * (1.0 - 1e-9), "{more} < {less}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1000) })]

    #[test]
    fn larger_products_are_not_cheaper(
        m in size(1..18), n in size(1..18), k in size(1..18), grow in 1_u64..5000, dtype in 0..5_usize,
        groups in 1_u64..64,
    ) {
        for cluster in clusters() {
            let dtype = DTYPES[dtype];
            let less = gemm_s(cluster, dtype, m, n, k);
            for (m, n, k) in [(m + grow, n, k), (m, n + grow, k), (m, n, k + grow)] {
                assert_not_cheaper(gemm_s(cluster, dtype, m, n, k), less);
            }
            let grouped = |groups, m, n, k| grouped_gemm_s(cluster, dtype, groups, m, n, k);
            let gradient = |tokens| weight_gradient_s(cluster, dtype, groups, tokens, n, k);
            assert_not_cheaper(gradient(m + grow), gradient(m));
            let less = grouped(groups, m, n, k);
            assert_not_cheaper(grouped(groups + 1, m, n, k), less);
            assert_not_cheaper(grouped(groups, m + grow, n, k), less);
            assert_not_cheaper(grouped(groups, m, n, k + grow), less);
        }
    }

    #[test]
    fn more_attention_is_not_cheaper(
        sequence in size(4..19), heads in size(0..8), batch in size(0..6), width in size(5..9),
        grow in 1_u64..4000, causal: bool,
    ) {
        let less = AttentionShape { heads, batch, head_dim_qk: width, head_dim_v: width, causal, ..square(sequence) };
        let longer = sequence + grow;
        let more = [
            AttentionShape { query_len: longer, key_len: longer, ..less },
            AttentionShape { heads: heads + grow, ..less },
            AttentionShape { batch: batch + grow, ..less },
            AttentionShape { head_dim_qk: width + grow, head_dim_v: width + grow, ..less },
        ];
        for cluster in clusters() {
            for more in &more {
                let of = |shape| forward_s(cluster, shape, Dtype::Bf16);
                assert_not_cheaper(of(more), of(&less));
                let of = |shape| backward_s(cluster, shape, Dtype::Bf16);
                assert_not_cheaper(of(more), of(&less));
            }
        }
    }

    #[test]
    fn more_bytes_are_not_cheaper(bytes in size(1..40), grow in 1_u64..1_000_000, inner in 1_u64..9, nodes in 1_u64..300) {
        let (less, more) = (bytes as f64, (bytes + grow) as f64);
        for cluster in clusters() {
            assert_not_cheaper(streaming_s(cluster, more), streaming_s(cluster, less));
            assert_not_cheaper(optimizer_s(cluster, more), optimizer_s(cluster, less));
            assert_not_cheaper(p2p_s(cluster, more, 0, 1), p2p_s(cluster, less, 0, 1));
            let group = group(&[inner, inner * nodes]);
            for op in OPS.into_iter().filter(|_| group.size() > 1) {
                let of = |bytes| time_s(cluster, op, bytes, &group);
                assert_not_cheaper(of(more), of(less));
            }
        }
    }
}
