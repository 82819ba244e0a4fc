//! A cluster as written in its file, and the checks that turn it into finished input.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;
use serde_yaml::Spanned;

use super::limits::{MOST_LEVELS, limits, plausible, unit};
use super::{
    AttentionKernel, ClusterSpec, Device, Dtype, EfficiencyTables, Host, LinkLevel, Seen, Software,
};
use crate::input::{InputError, Source};
use crate::text::{VALID_LINE, VALID_NAME, figure, line_fault, name_fault, quotable};

type Number = Spanned<f64>;

/// The file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawCluster {
    name: Spanned<String>,
    description: Option<Spanned<String>>,
    device: RawDevice,
    levels: Spanned<Vec<RawLevel>>,
    host: RawHost,
    storage_bytes_per_s: Number,
    failures_per_node_day: Number,
    software: Spanned<RawSoftware>,
    efficiency: Spanned<String>,
    #[serde(default)]
    any_gpu_count: bool,
    measured_ranks: Option<Spanned<u64>>,
    thread_slowdown: Option<Number>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawDevice {
    name: Spanned<String>,
    peak_flops: Spanned<BTreeMap<Dtype, Number>>,
    hbm_bytes: Number,
    hbm_bytes_per_s: Number,
    sms: Spanned<u64>,
    kernel_launch_s: Number,
    sustained_slowdown: Option<Number>,
    reserved_bytes: Number,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawLevel {
    name: Spanned<String>,
    gpus: Option<Spanned<u64>>,
    bytes_per_s: Number,
    gpus_an_adapter: Option<Spanned<u64>>,
    latency_s: Number,
    efficiency: Number,
    #[serde(default)]
    in_network: bool,
    oversubscription: Option<Number>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawHost {
    memory_bytes: Number,
    memory_bytes_per_s: Option<Number>,
    link_bytes_per_s: Number,
}

/// Every key of [`Software`], over those of a shipped generation.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSoftware {
    base: Option<Spanned<String>>,
    attention: Option<AttentionKernel>,
    sequence_parallel: Option<bool>,
    p2p_overlap: Option<bool>,
    tied_under_weights: Option<bool>,
    zero1_by_tensor: Option<bool>,
    scatter_gather: Option<bool>,
    gemm_slowdown: Option<Number>,
    attention_slowdown: Option<Number>,
    narrow_attention_slowdown: Option<Number>,
    sink_attention_slowdown: Option<Number>,
    attention_backward_slowdown: Option<Number>,
    stream_slowdown: Option<Number>,
    tp_exposed: Option<Number>,
    reduced_gradient_bytes: Option<Number>,
    dp_overlap: Option<Number>,
    dp_slowdown: Option<Number>,
    zero3_slowdown: Option<Number>,
    zero3_overlap: Option<Number>,
    zero3_by_matrix: Option<bool>,
    expert_slowdown: Option<Number>,
    dispatch_once_a_node: Option<bool>,
    dispatch_sms: Option<Number>,
    ep_exposed: Option<Number>,
    host_s_per_layer: Option<Number>,
    routing_s: Option<Number>,
    graphed_routing: Option<bool>,
    separate_projections: Option<bool>,
    p2p_slowdown: Option<Number>,
    pass_gap_s: Option<Number>,
    step_overhead_s: Option<Number>,
    slowdown_per_doubling: Option<Number>,
    fp8_cast_bytes: Option<Number>,
    permute_bytes: Option<Number>,
    fused_experts: Option<bool>,
    optimizer_bytes_per_parameter: Option<Number>,
    fp16_gradient_bytes: Option<Number>,
    bf16_gradient_bytes: Option<Number>,
    optimizer_state_bytes: Option<Number>,
    loss_bytes: Option<Number>,
    loss_gradient_bytes: Option<Number>,
    logit_bytes: Option<Number>,
    placeholder_bytes: Option<Number>,
    vocab_hidden_states: Option<Number>,
    vocab_slowdown: Option<Number>,
    interlaced_slowdown: Option<Number>,
    fp8_slowdown: Option<Number>,
    gradient_add_bytes: Option<Number>,
    full_recompute: Option<super::FullRecompute>,
    selective: Option<super::Selective>,
    buffer_bytes: Option<Number>,
    error_band: Option<Number>,
}

/// Checks every value.
pub(super) fn finish(source: &Source, raw: &RawCluster) -> Result<ClusterSpec, InputError> {
    let check = Checker { source };
    let device = device(&check, &raw.device)?;
    let tables = check.tables(&raw.efficiency, &device)?;
    Ok(ClusterSpec {
        name: check.named(&raw.name)?,
        description: match &raw.description {
            Some(line) => check.line("description", line)?,
            None => String::new(),
        },
        device,
        levels: levels(&check, &raw.levels)?,
        host: Host {
            memory_bytes: check.number("memory_bytes", &raw.host.memory_bytes)?,
            // At least what the link takes out of it.
            memory_bytes_per_s: check.number(
                "memory_bytes_per_s",
                raw.host.memory_bytes_per_s.as_ref().unwrap_or(&raw.host.link_bytes_per_s),
            )?,
            link_bytes_per_s: check.number("link_bytes_per_s", &raw.host.link_bytes_per_s)?,
        },
        storage_bytes_per_s: check.number("storage_bytes_per_s", &raw.storage_bytes_per_s)?,
        failures_per_node_day: check.number("failures_per_node_day", &raw.failures_per_node_day)?,
        software: software(&check, &raw.software)?,
        tables: Arc::new(tables),
        any_gpu_count: raw.any_gpu_count,
        measured_ranks: raw
            .measured_ranks
            .as_ref()
            .map(|ranks| check.count("measured_ranks", ranks))
            .transpose()?,
        thread_slowdown: match &raw.thread_slowdown {
            Some(number) => check.number("thread_slowdown", number)?,
            None => 1.0,
        },
        seen: match &raw.software.value {
            RawSoftware { base: Some(base), error_band: None, .. } => Seen::of(&base.value)?,
            _ => None,
        },
        headroom: 0.0,
    })
}

fn device(check: &Checker<'_>, raw: &RawDevice) -> Result<Device, InputError> {
    let peaks = raw.peak_flops.value.iter();
    let peak = |(dtype, flops): (&Dtype, &Number)| {
        Ok((*dtype, check.within("peak_flops", dtype.name(), flops)?))
    };
    let peak_flops = peaks.map(peak).collect::<Result<BTreeMap<_, _>, InputError>>()?;
    if peak_flops.is_empty() {
        let error = check.source.error_at(raw.peak_flops.referenced, "`peak_flops` is empty");
        return Err(error.help("give at least one format, for example `bf16: 989.4e12`"));
    }
    Ok(Device {
        name: check.named(&raw.name)?,
        peak_flops,
        hbm_bytes: check.number("hbm_bytes", &raw.hbm_bytes)?,
        hbm_bytes_per_s: check.number("hbm_bytes_per_s", &raw.hbm_bytes_per_s)?,
        sms: check.count("sms", &raw.sms)?,
        kernel_launch_s: check.number("kernel_launch_s", &raw.kernel_launch_s)?,
        sustained_slowdown: raw
            .sustained_slowdown
            .as_ref()
            .map_or(Ok(1.0), |slowdown| check.number("sustained_slowdown", slowdown))?,
        reserved_bytes: check.reserved(&raw.reserved_bytes, raw.hbm_bytes.value)?,
    })
}

fn levels(check: &Checker<'_>, raw: &Spanned<Vec<RawLevel>>) -> Result<Vec<LinkLevel>, InputError> {
    let Some(outermost) = raw.value.len().checked_sub(1) else {
        let error = check.source.error_at(raw.referenced, "`levels` is empty");
        return Err(error.help("give at least one level of links, the innermost first"));
    };
    if raw.value.len() > MOST_LEVELS {
        let message = format!("`levels` has {} levels", raw.value.len());
        let error = check.source.error_at(raw.referenced, message);
        return Err(error.help(format!("valid: 1 to {MOST_LEVELS}")));
    }
    let mut inner = 1;
    let mut finished = Vec::with_capacity(raw.value.len());
    for (i, level) in raw.value.iter().enumerate() {
        let gpus = domain(check, level, inner, i == outermost)?;
        inner = gpus.unwrap_or(inner);
        finished.push(link(check, level, gpus)?);
    }
    Ok(finished)
}

/// Size of one domain of a level: a multiple of the one inside it; the outermost has none.
fn domain(
    check: &Checker<'_>,
    level: &RawLevel,
    inner: u64,
    outermost: bool,
) -> Result<Option<u64>, InputError> {
    match &level.gpus {
        // A bound on the last level would leave GPUs beyond it unconnected.
        Some(gpus) if outermost => {
            let message =
                format!("level `{}` is the outermost and cannot be bounded", level.name.value);
            let error = check.source.error_at(gpus.referenced, message);
            Err(error.help("leave `gpus` out, or add a level that connects these domains"))
        }
        None if !outermost => {
            let message =
                format!("level `{}` needs `gpus`: it is not the outermost", level.name.value);
            Err(check.source.error_at(level.bytes_per_s.referenced, message))
        }
        None => Ok(None),
        Some(gpus) => {
            let size = check.count("gpus", gpus)?;
            let valid = size > inner || (size == inner && inner == 1);
            if valid && size.is_multiple_of(inner) {
                return Ok(Some(size));
            }
            let message =
                format!("gpus ({size}) is no multiple of the {inner} of the level inside");
            let error = check.source.error_at(gpus.referenced, message);
            Err(error.help(format!("valid: {}, {}, {}, ...", 2 * inner, 3 * inner, 4 * inner)))
        }
    }
}

fn link(check: &Checker<'_>, raw: &RawLevel, gpus: Option<u64>) -> Result<LinkLevel, InputError> {
    let oversubscription = raw.oversubscription.as_ref();
    let oversubscription =
        oversubscription.map(|over| check.number("oversubscription", over)).transpose()?;
    let sharing = raw.gpus_an_adapter.as_ref();
    let sharing = sharing.map(|gpus| check.count("gpus_an_adapter", gpus)).transpose()?;
    Ok(LinkLevel {
        name: check.named(&raw.name)?,
        gpus,
        bytes_per_s: check.number("bytes_per_s", &raw.bytes_per_s)?,
        gpus_an_adapter: sharing.unwrap_or(1),
        latency_s: check.number("latency_s", &raw.latency_s)?,
        efficiency: check.number("efficiency", &raw.efficiency)?,
        in_network: raw.in_network,
        oversubscription: oversubscription.unwrap_or(1.0),
    })
}

/// The values given, over those of `base`; without a base all must be given.
fn software(check: &Checker<'_>, raw: &Spanned<RawSoftware>) -> Result<Software, InputError> {
    let given = &raw.value;
    let base = given.base.as_ref().map(|name| check.base(name)).transpose()?;
    let base = base.as_ref();
    let missing = |key: &str| {
        let error = check.source.error_at(raw.referenced, format!("missing required key `{key}`"));
        error.help(format!("add `{key}: ...`, or `base: ` with a shipped generation"))
    };

    let number = |key, value: &Option<Number>, base: Option<f64>| match value {
        Some(value) => check.number(key, value),
        None => base.ok_or_else(|| missing(key)),
    };
    macro_rules! pick {
        ($key:ident) => {
            given.$key.or(base.map(|base| base.$key)).ok_or_else(|| missing(stringify!($key)))?
        };
        (number $key:ident) => {
            number(stringify!($key), &given.$key, base.map(|base| base.$key))?
        };
    }
    Ok(Software {
        attention: pick!(attention),
        gemm_slowdown: pick!(number gemm_slowdown),
        attention_slowdown: pick!(number attention_slowdown),
        narrow_attention_slowdown: pick!(number narrow_attention_slowdown),
        sink_attention_slowdown: pick!(number sink_attention_slowdown),
        attention_backward_slowdown: pick!(number attention_backward_slowdown),
        stream_slowdown: pick!(number stream_slowdown),
        sequence_parallel: pick!(sequence_parallel),
        tp_exposed: pick!(number tp_exposed),
        reduced_gradient_bytes: pick!(number reduced_gradient_bytes),
        dp_overlap: pick!(number dp_overlap),
        dp_slowdown: pick!(number dp_slowdown),
        zero3_slowdown: pick!(number zero3_slowdown),
        zero3_overlap: pick!(number zero3_overlap),
        zero3_by_matrix: pick!(zero3_by_matrix),
        p2p_overlap: pick!(p2p_overlap),
        tied_under_weights: pick!(tied_under_weights),
        zero1_by_tensor: pick!(zero1_by_tensor),
        scatter_gather: pick!(scatter_gather),
        expert_slowdown: pick!(number expert_slowdown),
        dispatch_once_a_node: pick!(dispatch_once_a_node),
        dispatch_sms: pick!(number dispatch_sms),
        ep_exposed: pick!(number ep_exposed),
        host_s_per_layer: pick!(number host_s_per_layer),
        routing_s: pick!(number routing_s),
        graphed_routing: pick!(graphed_routing),
        separate_projections: pick!(separate_projections),
        p2p_slowdown: pick!(number p2p_slowdown),
        pass_gap_s: pick!(number pass_gap_s),
        step_overhead_s: pick!(number step_overhead_s),
        slowdown_per_doubling: pick!(number slowdown_per_doubling),
        fp8_cast_bytes: pick!(number fp8_cast_bytes),
        permute_bytes: pick!(number permute_bytes),
        fused_experts: pick!(fused_experts),
        optimizer_bytes_per_parameter: pick!(number optimizer_bytes_per_parameter),
        fp16_gradient_bytes: pick!(number fp16_gradient_bytes),
        bf16_gradient_bytes: pick!(number bf16_gradient_bytes),
        optimizer_state_bytes: pick!(number optimizer_state_bytes),
        loss_bytes: pick!(number loss_bytes),
        loss_gradient_bytes: pick!(number loss_gradient_bytes),
        logit_bytes: pick!(number logit_bytes),
        placeholder_bytes: pick!(number placeholder_bytes),
        vocab_hidden_states: pick!(number vocab_hidden_states),
        vocab_slowdown: pick!(number vocab_slowdown),
        interlaced_slowdown: pick!(number interlaced_slowdown),
        fp8_slowdown: pick!(number fp8_slowdown),
        gradient_add_bytes: pick!(number gradient_add_bytes),
        full_recompute: pick!(full_recompute),
        selective: pick!(selective),
        buffer_bytes: pick!(number buffer_bytes),
        error_band: match &given.error_band {
            Some(band) => Some(check.number("error_band", band)?),
            None => base.and_then(|base| base.error_band),
        },
    })
}

/// Checks values and reports invalid ones at their place.
struct Checker<'a> {
    source: &'a Source,
}

impl Checker<'_> {
    /// `value` if it is within the limits of `key`, else an error that says them.
    fn number(&self, key: &str, value: &Number) -> Result<f64, InputError> {
        self.within(key, key, value)
    }

    /// The same of a value that stands under the key `named` and has the limits of `key`.
    fn within(&self, key: &str, named: &str, value: &Number) -> Result<f64, InputError> {
        let (least, most) = limits(key);
        if (least..=most).contains(&value.value) {
            return Ok(value.value);
        }
        let message = format!("`{named}` cannot be {}", figure(value.value));
        let error = self.source.error_at(value.referenced, message);
        Err(error.help(format!("valid: {} to {}", figure(least), figure(most))))
    }

    /// What tensors cannot use of `hbm_bytes`.
    fn reserved(&self, value: &Number, hbm_bytes: f64) -> Result<f64, InputError> {
        let bytes = self.number("reserved_bytes", value)?;
        if bytes < hbm_bytes {
            return Ok(bytes);
        }
        let message = format!("`reserved_bytes` cannot be {}", figure(bytes));
        let error = self.source.error_at(value.referenced, message);
        Err(error.help(format!("valid: 0 to less than hbm_bytes, {}", figure(hbm_bytes))))
    }

    fn count(&self, key: &str, value: &Spanned<u64>) -> Result<u64, InputError> {
        let (least, most) = limits(key);
        if (least..=most).contains(&(value.value as f64)) {
            return Ok(value.value);
        }
        let message = format!("`{key}` cannot be {}", value.value);
        let error = self.source.error_at(value.referenced, message);
        Err(error.help(format!("valid: {} to {}", figure(least), figure(most))))
    }

    fn named(&self, name: &Spanned<String>) -> Result<String, InputError> {
        let Some(fault) = name_fault(&name.value) else { return Ok(name.value.clone()) };
        let error = self.source.error_at(name.referenced, format!("`name` {fault}"));
        Err(error.help(format!("valid: {VALID_NAME}")))
    }

    fn line(&self, key: &str, line: &Spanned<String>) -> Result<String, InputError> {
        let Some(fault) = line_fault(&line.value) else { return Ok(line.value.clone()) };
        let error = self.source.error_at(line.referenced, format!("`{key}` {fault}"));
        Err(error.help(format!("valid: {VALID_LINE}")))
    }

    fn base(&self, name: &Spanned<String>) -> Result<Software, InputError> {
        if let Some(software) = super::software(&name.value)? {
            return Ok(software);
        }
        let message = format!("there is no software generation `{}`", quotable(&name.value));
        let names = super::software_names()?.join(", ");
        Err(self.source.error_at(name.referenced, message).help(format!("valid: {names}")))
    }

    fn tables(
        &self,
        name: &Spanned<String>,
        device: &Device,
    ) -> Result<EfficiencyTables, InputError> {
        if name.value.contains('\n') {
            return EfficiencyTables::read(&name.value, device).map_err(|error| {
                let help = error.help.unwrap_or_default();
                self.source.error_at(name.referenced, error.message).help(help)
            });
        }
        EfficiencyTables::shipped(&name.value, device)?.ok_or_else(|| {
            let message = format!("there are no efficiency tables `{}`", quotable(&name.value));
            let names: Vec<&str> = super::table_names().collect();
            let error = self.source.error_at(name.referenced, message);
            error.help(format!("valid: {}, or tables written out", names.join(", ")))
        })
    }
}

/// Figures that are valid but that no machine has, one sentence each.
pub(super) fn implausible(source: &Source, raw: &RawCluster) -> Vec<String> {
    let device = &raw.device;
    let mut figures: Vec<(&str, &Number)> = vec![
        ("hbm_bytes", &device.hbm_bytes),
        ("hbm_bytes_per_s", &device.hbm_bytes_per_s),
        ("kernel_launch_s", &device.kernel_launch_s),
        ("link_bytes_per_s", &raw.host.link_bytes_per_s),
        ("storage_bytes_per_s", &raw.storage_bytes_per_s),
        ("failures_per_node_day", &raw.failures_per_node_day),
    ];
    figures.extend(device.peak_flops.value.values().map(|peak| ("peak_flops", peak)));
    for level in &raw.levels.value {
        figures.extend([("bytes_per_s", &level.bytes_per_s), ("latency_s", &level.latency_s)]);
    }
    figures.extend(raw.host.memory_bytes_per_s.iter().map(|rate| ("memory_bytes_per_s", rate)));
    let software = &raw.software.value;
    let times = [
        ("host_s_per_layer", &software.host_s_per_layer),
        ("routing_s", &software.routing_s),
        ("pass_gap_s", &software.pass_gap_s),
        ("step_overhead_s", &software.step_overhead_s),
    ];
    figures.extend(times.iter().filter_map(|(key, time)| Some((*key, time.as_ref()?))));
    let strange = figures.into_iter().filter_map(|(key, value)| strange(source, key, value));
    let host = host_memory(source, raw);
    let mut found: Vec<(u64, String)> = strange.chain(host).collect();
    found.sort_by_key(|(line, _)| *line);
    found.into_iter().map(|(_, text)| text).collect()
}

/// A figure outside its plausible range, with its line.
fn strange(source: &Source, key: &str, value: &Number) -> Option<(u64, String)> {
    let (least, most) = plausible(key)?;
    let is_none = value.value == 0.0;
    (!is_none && !(least..=most).contains(&value.value)).then(|| {
        let (line, file) = (value.referenced.line(), source.name());
        let (found, least, most) = (figure(value.value), figure(least), figure(most));
        let unit = unit(key);
        let text =
            format!("{file}:{line}: `{key}` is {found} {unit}; machines have {least} to {most}");
        (line, text)
    })
}

/// Host memory of 0 where devices have memory of their own, or of another unit.
fn host_memory(source: &Source, raw: &RawCluster) -> Option<(u64, String)> {
    let memory = &raw.host.memory_bytes;
    if memory.value != 0.0 {
        return strange(source, "memory_bytes", memory);
    }
    let (line, file) = (memory.referenced.line(), source.name());
    (!raw.any_gpu_count).then(|| {
        let text = format!(
            "{file}:{line}: `memory_bytes` of the host is 0: nothing can be offloaded; machines \
             have 1e9 to 1e14 bytes"
        );
        (line, text)
    })
}
