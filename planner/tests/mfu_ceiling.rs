//! MFU never exceeds what the device's kernels reach: a check of which FLOPs are counted.

use models::cluster::{ClusterSpec, Dtype};
use models::layer::{core_flops, forward_flops};
use models::model::{ModelSpec, Window};
use planner::answer::report::Answer;
use planner::cost::attention::{AttentionShape, backward_s, forward_s};
use planner::cost::gemm::gemm_s;
use planner::request::Request;
use planner::request::Task;
use planner::request::flags::Flags;
use planner::search::search;

/// The highest rate of a matrix product, FLOP/s.
fn best_product_rate(cluster: &ClusterSpec, dtype: Dtype) -> f64 {
    let sizes = || (9..=15).map(|power| 1u64 << power);
    let rate = |m: u64, n: u64| 2.0 * (m * n * n) as f64 / gemm_s(cluster, dtype, m, n, n);
    let rates = sizes().flat_map(|m| sizes().map(move |n| rate(m, n)));
    let software = &cluster.software;
    let slowdown = software.gemm_slowdown * software.fp8_slowdown.min(1.0);
    rates.fold(0.0, f64::max) / slowdown
}

/// The highest rate of attention over whole causal sequences, counted as in MFU with `s` keys a
/// query, FLOP/s.
fn best_attention_rate(cluster: &ClusterSpec, dtype: Dtype) -> f64 {
    let shapes = (9..=20).flat_map(|power| {
        [64, 128, 256].map(|width| AttentionShape {
            batch: 1,
            heads: 64,
            kv_heads: 64,
            query_len: 1 << power,
            key_len: 1 << power,
            head_dim_qk: width,
            head_dim_v: width,
            causal: true,
            last_queries: false,
            window: None,
            sinks: false,
        })
    });
    let rate = |shape: AttentionShape| {
        let seconds = forward_s(cluster, &shape, dtype) + backward_s(cluster, &shape, dtype);
        // Causal kernels do half of the counted FLOPs. The backward pass counts twice the forward
        // pass.
        3.0 * 2.0 * shape.forward_flops() / seconds
    };
    shapes.map(rate).fold(0.0, f64::max)
}

/// MFU of a model whose counted FLOPs run at these rates.
fn ceiling(model: &ModelSpec, cluster: &ClusterSpec, dtype: Dtype) -> f64 {
    let all = forward_flops(model, model.seq_len as f64);
    let kinds = (0..model.layers).map(|layer| model.layer_kind(layer));
    let core: f64 = kinds.map(|kind| core_flops(model, kind)).sum();
    let least_s = (all - core) / best_product_rate(cluster, dtype)
        + core / best_attention_rate(cluster, dtype);
    all / least_s / cluster.device.peak_flops(dtype)
}

/// MFU of a plan for one GPU with unlimited memory, and its ceiling.
fn mfu(request: &Request) -> (f64, f64) {
    let mut shown = |_| {};
    let outcome = search(&Task { ignore_memory: true, ..request.task() }, &mut shown);
    let plan = Answer::new(request, outcome).expect("one GPU has a plan").plan;
    (plan.predicted.mfu, ceiling(&request.model, &request.cluster, plan.decisions.dtype))
}

fn request(model: &str, cluster: &str) -> Request {
    let settings = ["micro_batch<=4", "recompute=none", "offload=none"].map(str::to_owned).to_vec();
    Request::new(&Flags {
        model: model.to_owned(),
        cluster: Some(cluster.to_owned()),
        gpus: 1,
        global_batch: Some(4),
        settings,
        ..Flags::default()
    })
    .unwrap_or_else(|error| panic!("{model} on {cluster}: {error}"))
}

#[test]
fn no_shipped_model_exceeds_what_kernels_reach_on_any_shipped_cluster() {
    for cluster in models::cluster::shipped_names() {
        for model in models::model::shipped_names() {
            let (mfu, most) = mfu(&request(model, cluster));
            assert!(mfu > 0.0 && mfu <= most, "{model} on {cluster}: {mfu} of at most {most}");
        }
    }
}

/// A windowed model's attention is priced by the pairs inside the window. If more were counted, MFU
/// would exceed the ceiling, and for long sequences the peak.
#[test]
fn no_window_exceeds_what_kernels_reach() {
    for cluster in ["dgx_h100", "selene", "dgx_b200"] {
        let base = request("llama8b", cluster);
        for seq_len in [4096, 32_768, 131_072] {
            for tokens in [128, 1024, 4096] {
                for full_every in [None, Some(2)] {
                    let mut windowed = base.clone();
                    windowed.model.seq_len = seq_len;
                    windowed.model.attention.window = Some(Window { tokens, full_every });
                    let (mfu, most) = mfu(&windowed);
                    let what = format!("{cluster}: window {tokens} of {seq_len}, {full_every:?}");
                    assert!(mfu <= most, "{what}: {mfu} of at most {most}");
                    assert!(full_every.is_some() || mfu < 0.9, "{what}: {mfu}");
                }
            }
        }
    }
}
