//! Calibration of a GPU: the measured curves become the cluster's efficiency tables, and the
//! constants of this project's own kernels and trainers are fitted. Links, host and failures are
//! kept from the base cluster.

use super::{priced_s, solve};
use models::cluster::{
    ClusterSpec, Device, Dtype, EfficiencyTables, LinkLevel, MeasuredGpu, Product, Software, Step,
    software, table_text,
};
use models::input::InputError;
use models::text::{double_quoted, shown};
use planner::cost::{gemm, memory_bound};
use serde::Serialize;
use std::fmt::Write;
use std::sync::Arc;

/// The software generation whose behaviour (what overlaps, what is kept) holds for trainers on GPUs
/// too.
const OWN_SOFTWARE: &str = "meshwright_cpu";

/// Bytes per 16-bit logit that the loss moves: one read for the maximum, one for the sum.
const LOSS_BYTES: f64 = 4.0;
/// Bytes per 16-bit logit that the loss gradient moves: one read, one write in place.
const LOSS_GRADIENT_BYTES: f64 = 4.0;
/// Bytes of a stored logit.
const LOGIT_BYTES: f64 = 2.0;
/// Workspace of cuBLASLt.
const BUFFER_BYTES: f64 = 32.0 * 1024.0 * 1024.0;

/// A calibrated cluster, with its tables as text.
#[derive(Clone, Debug)]
pub struct Calibrated {
    /// The calibrated cluster, which [`yaml`] writes.
    pub cluster: ClusterSpec,
    /// The value of `efficiency:` in the cluster file.
    pub tables: String,
}

/// The cluster of a measured GPU, from `base`, a cluster with such GPUs.
///
/// # Errors
/// The measurements have gaps, or are impossible for the GPU of `base`.
pub fn calibrated(base: &ClusterSpec, measured: &MeasuredGpu) -> Result<Calibrated, InputError> {
    let mut cluster = base.clone();
    let device = &mut cluster.device;
    if measured.memory_bytes > 0.0 {
        device.hbm_bytes = measured.memory_bytes;
    }
    if measured.multiprocessors > 0 {
        device.sms = measured.multiprocessors;
    }
    device.kernel_launch_s = measured.launch_s.unwrap_or(device.kernel_launch_s);
    if let Some(slowdown) = measured.sustained_slowdown {
        device.sustained_slowdown = slowdown_at_peak(slowdown, &measured.products, device);
    }
    cluster.software = own_software(base)?;
    let link_bytes_per_s = cluster.levels.first().map_or(1.0, LinkLevel::achieved_bytes_per_s);
    let links = &base.tables.link_lines;
    let tables = table_text(measured, &cluster.device, links, link_bytes_per_s)?;
    cluster.tables = Arc::new(EfficiencyTables::read(&tables, &cluster.device)?);
    fit_memory(&mut cluster, measured);
    let by_time = |a: &&Step, b: &&Step| a.s.total_cmp(&b.s);
    if let Some(shortest) = measured.steps.iter().min_by(by_time) {
        // The other steps are kept to test predictions.
        solve(&mut cluster, shortest, 0.0..=1.0, |of| &mut of.software.step_overhead_s)?;
    }
    Ok(Calibrated { cluster, tables })
}

/// Slowdown of a product at the peak, at least 1, if the largest measured 16-bit product slows down
/// by `slowdown`.
fn slowdown_at_peak(slowdown: f64, products: &[Product], device: &Device) -> f64 {
    let flops = |product: &Product| 2.0 * (product.m * product.n * product.k) as f64;
    let wide = products.iter().filter(|product| product.dtype == Dtype::Bf16);
    let largest = wide.max_by(|one, other| flops(one).total_cmp(&flops(other)));
    let rate = |product: &Product| flops(product) / (product.s * device.peak_flops(Dtype::Bf16));
    (slowdown / gemm::throttle(largest.map_or(1.0, rate))).max(1.0)
}

/// The constants of trainers on GPUs before any measurement.
fn own_software(base: &ClusterSpec) -> Result<Software, InputError> {
    let own = software(OWN_SOFTWARE)?.ok_or_else(|| {
        InputError::new(format!("there is no software generation {OWN_SOFTWARE}"))
    })?;
    Ok(Software {
        attention_slowdown: 1.0,
        attention_backward_slowdown: 1.0,
        step_overhead_s: 0.0,
        loss_bytes: LOSS_BYTES,
        loss_gradient_bytes: LOSS_GRADIENT_BYTES,
        logit_bytes: LOGIT_BYTES,
        buffer_bytes: BUFFER_BYTES,
        // Not measured beyond one host.
        slowdown_per_doubling: base.software.slowdown_per_doubling,
        p2p_slowdown: base.software.p2p_slowdown,
        ..own
    })
}

/// Elementwise kernels and the optimizer, relative to the bandwidth of a copy.
fn fit_memory(cluster: &mut ClusterSpec, measured: &MeasuredGpu) {
    if !measured.elementwise.is_empty() {
        let s: f64 = measured.elementwise.iter().map(|moved| moved.s).sum();
        let moved = measured.elementwise.iter();
        let copy_s: f64 = moved.map(|moved| memory_bound::streaming_s(cluster, moved.bytes)).sum();
        cluster.software.stream_slowdown = s / copy_s;
    }
    if let Some(adamw) = &measured.adamw {
        cluster.software.optimizer_bytes_per_parameter = 1.0;
        let byte_s = memory_bound::optimizer_s(cluster, adamw.parameters);
        cluster.software.optimizer_bytes_per_parameter = adamw.s / byte_s;
    }
}

/// A training step as measured, and as predicted for the calibrated cluster.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Predicted {
    /// Name of the model.
    pub model: String,
    /// Tokens per step.
    pub tokens: u64,
    /// Measured seconds.
    pub measured_s: f64,
    /// Predicted seconds.
    pub predicted_s: f64,
}

/// Predictions for the measured steps, without the step that a constant was fitted to.
///
/// # Errors
/// A step cannot be priced.
pub fn predictions(
    cluster: &ClusterSpec,
    measured: &MeasuredGpu,
) -> Result<Vec<Predicted>, InputError> {
    let shortest = measured.steps.iter().map(|step| step.s).fold(f64::INFINITY, f64::min);
    let held = measured.steps.iter().filter(|step| step.s > shortest);
    held.map(|step| {
        let field = |key: &str| {
            let mut lines = step.model.lines().filter_map(|line| line.split_once(": "));
            lines.find(|(name, _)| *name == key).map(|(_, value)| value).unwrap_or_default()
        };
        let length: u64 = field("seq_len").parse().unwrap_or_default();
        Ok(Predicted {
            model: field("name").to_owned(),
            tokens: step.global_batch * length,
            measured_s: step.s,
            predicted_s: priced_s(cluster, step)?,
        })
    })
    .collect()
}

/// The text of the cluster file.
pub fn yaml(calibrated: &Calibrated, measured: &MeasuredGpu) -> String {
    let Calibrated { cluster, tables } = calibrated;
    let (device, software) = (&cluster.device, &cluster.software);
    let peaks = device.peak_flops.iter();
    let peaks: Vec<String> = peaks.map(|(dtype, x)| format!("{}: {x:e}", dtype.name())).collect();
    let mut text = String::new();
    let mut line = |words: std::fmt::Arguments<'_>| {
        // Writing to a string cannot fail.
        let _ = text.write_fmt(format_args!("{words}\n"));
    };
    line(format_args!(
        "# Measured by `plan calibrate --gpu` on {} ({}).",
        shown(&measured.gpu),
        shown(&measured.versions)
    ));
    line(format_args!("name: {}", double_quoted(&cluster.name)));
    line(format_args!("description: {}", double_quoted(&cluster.description)));
    line(format_args!("device:"));
    line(format_args!("  name: {}", double_quoted(&device.name)));
    line(format_args!(
        "  peak_flops: {{{}}}  # not measured: what the tables are fractions of",
        peaks.join(", ")
    ));
    line(format_args!("  hbm_bytes: {:e}", device.hbm_bytes));
    line(format_args!("  hbm_bytes_per_s: {:e}  # likewise", device.hbm_bytes_per_s));
    line(format_args!("  sms: {}", device.sms));
    line(format_args!("  kernel_launch_s: {:.4e}", device.kernel_launch_s));
    line(format_args!(
        "  sustained_slowdown: {:.4}  # at the peak, from a large product after two seconds of it",
        device.sustained_slowdown
    ));
    line(format_args!("  reserved_bytes: {:e}", device.reserved_bytes));
    line(format_args!("levels:"));
    for level in &cluster.levels {
        let gpus = level.gpus.map_or_else(String::new, |gpus| format!("gpus: {gpus}, "));
        line(format_args!(
            "  - {{name: {}, {gpus}bytes_per_s: {:e}, gpus_an_adapter: {}, latency_s: {:e}, efficiency: {}, in_network: {}, oversubscription: {}}}",
            double_quoted(&level.name),
            level.bytes_per_s,
            level.gpus_an_adapter,
            level.latency_s,
            level.efficiency,
            level.in_network,
            level.oversubscription
        ));
    }
    line(format_args!(
        "host: {{memory_bytes: {:e}, memory_bytes_per_s: {:e}, link_bytes_per_s: {:e}}}",
        cluster.host.memory_bytes, cluster.host.memory_bytes_per_s, cluster.host.link_bytes_per_s
    ));
    line(format_args!("storage_bytes_per_s: {:e}", cluster.storage_bytes_per_s));
    line(format_args!("failures_per_node_day: {:e}", cluster.failures_per_node_day));
    line(format_args!("software:"));
    line(format_args!("  base: {OWN_SOFTWARE}"));
    line(format_args!("  attention_slowdown: {:.4}", software.attention_slowdown));
    line(format_args!(
        "  stream_slowdown: {:.6}  # norms, rotations, residuals and activation of a layer",
        software.stream_slowdown
    ));
    line(format_args!(
        "  optimizer_bytes_per_parameter: {:.4}  # AdamW and the norm",
        software.optimizer_bytes_per_parameter
    ));
    line(format_args!(
        "  step_overhead_s: {:.4e}  # a step of a model of next to nothing",
        software.step_overhead_s
    ));
    for (key, value) in [
        ("slowdown_per_doubling", software.slowdown_per_doubling),
        ("p2p_slowdown", software.p2p_slowdown),
        ("loss_bytes", software.loss_bytes),
        ("loss_gradient_bytes", software.loss_gradient_bytes),
        ("logit_bytes", software.logit_bytes),
        ("buffer_bytes", software.buffer_bytes),
    ] {
        line(format_args!("  {key}: {value:e}"));
    }
    if !measured.collectives.is_empty() {
        line(format_args!(
            "# Collectives are of ranks that share the GPU, each of which has less of it than said here."
        ));
    }
    line(format_args!("efficiency: |"));
    for row in tables.lines() {
        line(format_args!("  {row}"));
    }
    text
}
