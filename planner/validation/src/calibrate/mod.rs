//! Calibration: turns measurements of a machine into a cluster. Each figure is chosen so that the
//! cost model predicts the measured time.
//!
//! Kernels and links give the device. Whole training steps give the constants of the software
//! (`gemm_slowdown`, `step_overhead_s`, `thread_slowdown`, `dp_slowdown`, `slowdown_per_doubling`,
//! `tp_exposed`), one step per constant that it adds.

pub mod gpu;

use models::cluster::{ClusterSpec, Core, Dtype, Exchange, Measured, Product, Step};
use models::input::{InputError, Source};
use models::model;
use models::plan::Objective;
use models::text::double_quoted;
use planner::cost::attention::{self, AttentionShape};
use planner::cost::{gemm, memory_bound};
use planner::request::Request;
use planner::request::flags::restrictions;
use planner::search::search;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Starting value of rates, which are then scaled by predicted over measured time.
const UNIT: f64 = 1e9;

/// Alternations that settle two constants when one step computes a few times as much as the other.
const TURNS: usize = 12;

/// The cluster of a machine, from `base`, whose other figures are kept.
///
/// # Errors
/// No figure explains the measurements.
pub fn calibrated(base: &ClusterSpec, measured: &Measured) -> Result<ClusterSpec, InputError> {
    let mut cluster = base.clone();
    cluster.measured_ranks = Some(measured.ranks);
    cluster.any_gpu_count = true;
    let software = &mut cluster.software;
    [software.gemm_slowdown, software.attention_slowdown, software.stream_slowdown] = [1.0; 3];
    software.p2p_slowdown = 1.0;
    software.pass_gap_s = 0.0;
    software.step_overhead_s = 0.0;
    software.slowdown_per_doubling = 0.0;
    cluster.thread_slowdown = 1.0;
    cluster.device.kernel_launch_s = 0.0;
    if let Some(bytes) = measured.memory_bytes {
        cluster.device.hbm_bytes = bytes / measured.ranks as f64;
    }
    fit_memory(&mut cluster, measured);
    fit_products(&mut cluster, measured)?;
    fit_attention(&mut cluster, &measured.attention);
    fit_links(&mut cluster, measured);
    fit_steps(&mut cluster, &measured.steps)?;
    Ok(cluster)
}

/// Memory bandwidth from a copy; elementwise kernels and the optimizer relative to it.
fn fit_memory(cluster: &mut ClusterSpec, measured: &Measured) {
    let copy = &measured.copy;
    cluster.device.hbm_bytes_per_s = UNIT;
    cluster.device.hbm_bytes_per_s = UNIT * memory_bound::streaming_s(cluster, copy.bytes) / copy.s;
    let elementwise = &measured.elementwise;
    let alone_s = memory_bound::elementwise_s(cluster, elementwise.bytes);
    cluster.software.stream_slowdown = elementwise.s / alone_s;
    cluster.software.optimizer_bytes_per_parameter = 1.0;
    let byte_s = memory_bound::optimizer_s(cluster, measured.adamw.parameters);
    cluster.software.optimizer_bytes_per_parameter = measured.adamw.s / byte_s;
}

/// Peak of each number format, as the geometric mean over the measured products.
fn fit_products(cluster: &mut ClusterSpec, measured: &Measured) -> Result<(), InputError> {
    let mut by_format: BTreeMap<Dtype, Vec<&Product>> = BTreeMap::new();
    for product in &measured.products {
        by_format.entry(product.dtype).or_default().push(product);
    }
    if !by_format.contains_key(&Dtype::F32) {
        return Err(InputError::new("no product in f32 was measured"));
    }
    // Without memory time, which is measured separately.
    let mut endless = cluster.clone();
    endless.device.hbm_bytes_per_s = f64::MAX;
    cluster.device.peak_flops.clear();
    for (dtype, products) in by_format {
        endless.device.peak_flops = BTreeMap::from([(dtype, UNIT)]);
        let faster = |p: &&Product| (gemm::gemm_s(&endless, dtype, p.m, p.n, p.k) / p.s).ln();
        let mean = products.iter().map(faster).sum::<f64>() / products.len() as f64;
        cluster.device.peak_flops.insert(dtype, UNIT * mean.exp());
    }
    Ok(())
}

fn fit_attention(cluster: &mut ClusterSpec, core: &Core) {
    let shape = AttentionShape {
        batch: core.batch,
        heads: core.heads,
        kv_heads: core.kv_heads,
        query_len: core.seq_len,
        key_len: core.seq_len,
        head_dim_qk: core.head_dim,
        head_dim_v: core.head_dim,
        causal: true,
        last_queries: false,
        window: None,
        sinks: false,
    };
    let [forward_s, backward_s] =
        [attention::forward_s, attention::backward_s].map(|pass| pass(cluster, &shape, Dtype::F32));
    let slowdown = (core.forward_s + core.backward_s) / (forward_s + backward_s);
    cluster.software.attention_slowdown = slowdown;
}

/// A single link level: latency from the smallest all-reduce and bandwidth from the largest, by the
/// cost model's ring `2 (n - 1) (latency + bytes / n / bandwidth)`. With a single rank there is
/// nothing to fit.
fn fit_links(cluster: &mut ClusterSpec, measured: &Measured) {
    let ranks = measured.ranks as f64;
    let turns = 2.0 * (ranks - 1.0);
    let Some((latency_s, byte_s)) = line(&measured.collectives) else { return };
    let Some(level) = cluster.levels.first_mut() else { return };
    level.latency_s = latency_s / turns;
    level.bytes_per_s = turns / ranks / byte_s;
    level.efficiency = 1.0;
    cluster.levels.truncate(1);
}

/// Intercept and slope of a line through the smallest and the largest exchange.
fn line(exchanges: &[Exchange]) -> Option<(f64, f64)> {
    let by_size = |a: &&Exchange, b: &&Exchange| a.bytes.total_cmp(&b.bytes);
    let small = exchanges.iter().min_by(by_size)?;
    let large = exchanges.iter().max_by(by_size)?;
    let slope = ((large.s - small.s) / (large.bytes - small.bytes)).max(1e-13);
    Some(((small.s - slope * small.bytes).max(1e-9), slope))
}

/// Constants of the software, from whole steps.
fn fit_steps(cluster: &mut ClusterSpec, steps: &[Step]) -> Result<(), InputError> {
    let ranks = cluster.measured_ranks.unwrap_or(1);
    let by_time = |a: &&Step, b: &&Step| a.s.total_cmp(&b.s);
    let each = || steps.iter().filter(|step| step.ranks == ranks && step.tp * step.dp == 1);
    let (Some(longest), Some(shortest)) = (each().max_by(by_time), each().min_by(by_time)) else {
        return Err(InputError::new("no step of a single rank was measured"));
    };
    // The short step is mostly fixed work and the long one mostly computation: a few alternations
    // settle both.
    for _ in 0..4 {
        solve(cluster, longest, 0.1..=10.0, |cluster| &mut cluster.software.gemm_slowdown)?;
        solve(cluster, shortest, 0.0..=1.0, |cluster| &mut cluster.software.step_overhead_s)?;
    }
    if let Some(step) = steps.iter().find(|step| step.ranks < ranks) {
        solve(cluster, step, 0.5..=100.0, |cluster| &mut cluster.thread_slowdown)?;
    }
    let replicas = || steps.iter().filter(|step| step.dp > 1);
    if let (Some(most), Some(least)) = (replicas().max_by(by_time), replicas().min_by(by_time)) {
        // Both steps reduce the same number of bytes. The extra time of the one that computes more
        // is spent waiting for replicas that the operating system has preempted.
        for _ in 0..TURNS {
            solve(cluster, least, 0.1..=10.0, |cluster| &mut cluster.software.dp_slowdown)?;
            solve(cluster, most, 0.0..=1.0, |cluster| &mut cluster.software.slowdown_per_doubling)?;
        }
    }
    if let Some(step) = steps.iter().find(|step| step.tp > 1) {
        solve(cluster, step, 0.0..=10.0, |cluster| &mut cluster.software.tp_exposed)?;
    }
    Ok(())
}

/// Sets a constant, in which a step's time is linear, so that the predicted step takes the measured
/// time; clamped to `valid`.
fn solve(
    cluster: &mut ClusterSpec,
    step: &Step,
    valid: RangeInclusive<f64>,
    constant: fn(&mut ClusterSpec) -> &mut f64,
) -> Result<(), InputError> {
    let mut priced_with = |value: f64| {
        *constant(cluster) = value;
        priced_s(cluster, step)
    };
    let (one_s, two_s) = (priced_with(1.0)?, priced_with(2.0)?);
    let value = 1.0 + (step.s - one_s) / (two_s - one_s);
    let value = if value.is_finite() { value.clamp(*valid.start(), *valid.end()) } else { 1.0 };
    *constant(cluster) = value;
    Ok(())
}

/// The predicted time of a step, s.
///
/// # Errors
/// The step cannot be priced.
pub fn priced_s(cluster: &ClusterSpec, step: &Step) -> Result<f64, InputError> {
    let source = Source::from_bytes("step.yaml", step.model.as_bytes().to_vec())?;
    let model = model::read(&source)?.with_run(None, Some(step.global_batch))?;
    let settings: Vec<String> = [
        format!("tp={}", step.tp),
        "pp=1".to_owned(),
        format!("dp={}", step.dp),
        format!("micro_batch={}", (step.global_batch / step.dp).max(1)),
        "sequence_parallel=false".to_owned(),
        "recompute=none".to_owned(),
        // Trainers use 32 bits on threads and 16 bits on GPUs.
        format!("dtype={}", if cluster.any_gpu_count { "f32" } else { "bf16" }),
        "schedule=1f1b".to_owned(),
        "zero_stage=0".to_owned(),
        "offload=none".to_owned(),
        "cp=1".to_owned(),
    ]
    .into();
    let request = Request {
        stop: Arc::default(),
        deadline: None,
        every_cut_work: 0,
        processors: Arc::default(),
        objective: Objective::Time,
        restrictions: restrictions(&settings, false, cluster, &model)?,
        model,
        file: Some(source),
        runnable: false,
        cluster: cluster.clone().shared_by(step.ranks),
        gpus: step.tp * step.dp,
        headroom: 0.0,
        tokens: None,
        settings,
    };
    let best = search(&request.task(), &mut |_| {}).best;
    let best = best.ok_or_else(|| InputError::new("a measured step does not fit the machine"))?;
    Ok(best.priced.iteration_s)
}

/// The text of the cluster file.
pub fn yaml(cluster: &ClusterSpec, measured: &Measured) -> String {
    let (device, software) = (&cluster.device, &cluster.software);
    let peaks = device.peak_flops.iter();
    let peaks: Vec<String> = peaks.map(|(dtype, x)| format!("{}: {x:.4e}", dtype.name())).collect();
    let mut text = String::new();
    let mut line = |words: std::fmt::Arguments<'_>| {
        // Writing to a string cannot fail.
        let _ = text.write_fmt(format_args!("{words}\n"));
    };
    line(format_args!(
        "# Measured by `plan calibrate` with {} ranks at a time on {} cores.",
        measured.ranks, measured.cores
    ));
    line(format_args!("name: {}", double_quoted(&cluster.name)));
    line(format_args!("description: {}", double_quoted(&cluster.description)));
    line(format_args!("device:"));
    line(format_args!("  name: {}", double_quoted(&device.name)));
    line(format_args!(
        "  peak_flops: {{{}}}  # with which the cost model's formula gives the measured products",
        peaks.join(", ")
    ));
    line(format_args!(
        "  hbm_bytes: {:.4e}  # a rank's part of the machine's memory",
        device.hbm_bytes
    ));
    line(format_args!("  hbm_bytes_per_s: {:.4e}  # a copy of 64 MiB", device.hbm_bytes_per_s));
    line(format_args!("  sms: {}", device.sms));
    line(format_args!(
        "  kernel_launch_s: {:.4e}  # in the steps' fixed work",
        device.kernel_launch_s
    ));
    line(format_args!("  reserved_bytes: {:.4e}", device.reserved_bytes));
    line(format_args!("levels:"));
    for level in &cluster.levels {
        line(format_args!(
            "  - {{name: {}, bytes_per_s: {:.4e}, latency_s: {:.4e}, efficiency: {}, in_network: {}}}  # all-reduces of 4 KiB and 4 MiB",
            double_quoted(&level.name),
            level.bytes_per_s,
            level.latency_s,
            level.efficiency,
            level.in_network
        ));
    }
    line(format_args!(
        "host: {{memory_bytes: {:e}, memory_bytes_per_s: {:e}, link_bytes_per_s: {:e}}}",
        cluster.host.memory_bytes, cluster.host.memory_bytes_per_s, cluster.host.link_bytes_per_s
    ));
    line(format_args!("storage_bytes_per_s: {:e}  # not measured", cluster.storage_bytes_per_s));
    line(format_args!("failures_per_node_day: {:e}", cluster.failures_per_node_day));
    line(format_args!("software:"));
    line(format_args!("  base: meshwright_cpu"));
    line(format_args!(
        "  gemm_slowdown: {:.4}  # a training step of a single rank",
        software.gemm_slowdown
    ));
    line(format_args!(
        "  attention_slowdown: {:.4}  # forward and backward of 8 heads of 64, 256 tokens",
        software.attention_slowdown
    ));
    line(format_args!(
        "  stream_slowdown: {:.4}  # norms, rotations, residuals and activation of a layer",
        software.stream_slowdown
    ));
    line(format_args!(
        "  tp_exposed: {:.4}  # a step on 2 tensor-parallel ranks",
        software.tp_exposed
    ));
    line(format_args!("  dp_slowdown: {:.4}  # a step on as many replicas", software.dp_slowdown));
    line(format_args!(
        "  slowdown_per_doubling: {:.4}  # such a step with more computation",
        software.slowdown_per_doubling
    ));
    line(format_args!(
        "  step_overhead_s: {:.4e}  # a step of a model of next to nothing",
        software.step_overhead_s
    ));
    line(format_args!(
        "  optimizer_bytes_per_parameter: {:.4}  # AdamW and the norm",
        software.optimizer_bytes_per_parameter
    ));
    line(format_args!("efficiency: none"));
    line(format_args!("any_gpu_count: true"));
    line(format_args!("measured_ranks: {}", measured.ranks));
    line(format_args!(
        "thread_slowdown: {:.4}  # a step of one rank with all cores, the others idle",
        cluster.thread_slowdown
    ));
    text
}
