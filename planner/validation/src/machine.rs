//! The cluster a row ran on: a shipped one of its GPU, with the row's own network and software.

use super::recipe::Recipe;
use super::row::{Reason, Row};
use super::run_flags::RunFlags;
use models::cluster::{self, ClusterSpec, LinkLevel};

/// A GPU as rows name it, and the shipped cluster with that GPU.
const MACHINES: [(&str, &str); 12] = [
    ("A100-80G", "selene"),
    ("A100-40G", "a100_40g"),
    ("A800-80G", "a800"),
    ("H100-SXM", "dgx_h100"),
    ("H100-HBM2e-500W", "h100_hbm2e"),
    ("H200-SXM", "dgx_h200"),
    ("H800", "h800"),
    ("B200", "dgx_b200"),
    ("B300", "dgx_b300"),
    ("GB200", "gb200_nvl72"),
    ("GB300", "gb300_nvl72"),
    ("A10G", "a10g_pcie"),
];

/// Prefix of a software name, and the shipped generation it belongs to; the first match counts.
const GENERATIONS: [(&str, &str); 25] = [
    ("megatron-2021", "megatron_2021"),
    ("megatron-deepspeed-2022", "megatron_deepspeed_2022"),
    ("megatron-deepspeed-2023", "megatron_deepspeed_2023"),
    ("megatron-2022", "megatron_2022"),
    ("megatron-2023", "megatron_2023"),
    ("megatron-2024", "megatron_2024"),
    ("sail-megatron-2023", "zero_bubble_2023"),
    ("sail-megatron", "vocabulary_2024"),
    ("megascale", "megascale_2024"),
    ("megatron-core-moe", "megatron_2025"),
    ("megatron-bridge", "megatron_2025"),
    ("megatron-te", "megatron_te"),
    ("nemo-automodel", "automodel_2025"),
    ("nemo-24", "megatron_2024"),
    ("ampipe", "tutel_2023"),
    ("internevo", "internevo_2024"),
    ("llm-foundry", "fsdp_2023"),
    ("fms-fsdp", "fms_2024"),
    ("torchtitan-eager", "torchtitan_eager_2024"),
    ("torchtitan", "torchtitan_2024"),
    ("llama3", "megatron_2024"),
    ("deepseek", "megatron_2025"),
    ("dgxc-v24.11.1-maxtext", "maxtext_2024"),
    ("dgxc-v24.11.1-paxml", "maxtext_2024"),
    ("dgxc", "megatron_2024"),
];

/// The generation of recipes that run an iteration as one CUDA graph.
const FUSED: &str = "megatron_2026";

/// The generation of V-Half runs in Vocabulary Parallelism. Its authors used another fork for them
/// (README of sail-sg/VocabularyParallelism).
const V_HALF: &str = "zero_bubble_2024";

/// The cluster, and the name of its software generation.
///
/// # Errors
/// The GPU or the software is unknown.
pub fn cluster(row: &Row, recipe: &Recipe) -> Result<(ClusterSpec, String), Reason> {
    let known = MACHINES.iter().find(|(gpu, _)| *gpu == row.gpu);
    let (_, name) = known.ok_or_else(|| format!("GPU {} is not known", row.gpu))?;
    let shipped = cluster::shipped(name).ok_or_else(|| format!("no cluster of {}", row.gpu))?;
    let mut spec = shipped.map_err(|error| error.to_string())?;
    let generation = GENERATIONS.iter().find(|(start, _)| row.software.starts_with(start));
    let (_, generation) =
        generation.ok_or_else(|| format!("software {} is not known", row.software))?;
    let generation = if recipe.fused { FUSED } else { generation };
    let generation = if row.schedule == "V-Half" { V_HALF } else { generation };
    let generation = on_family(generation, &row.gpu);
    let own = cluster::software(&generation).map_err(|error| error.to_string())?;
    spec.software = own.ok_or_else(|| format!("software {generation} is not shipped"))?;
    if let Some((_, selective)) = recipe.recompute {
        spec.software.selective = selective;
    }
    spec.software.dispatch_once_a_node =
        recipe.flexible.unwrap_or(spec.software.dispatch_once_a_node);
    spec.software.graphed_routing |= recipe.graphed;
    if RunFlags::of(&row.notes).pure_16_bits {
        spec.software.reduced_gradient_bytes = 2.0;
    }
    let stated = stated_rate(&row.interconnect, spec.node_gpus());
    let rate = match stated {
        None if row.interconnect.contains("RoCE") => Some(unstated_roce()?),
        stated => stated,
    };
    if let (Some(rate), Some(network)) = (rate, spec.levels.last_mut()) {
        (network.bytes_per_s, network.gpus_an_adapter) = (rate.bytes_per_s, rate.gpus_an_adapter);
    }
    Ok((spec, generation))
}

/// The rate of a network that sources call only RoCE: that of the testbed of two of them.
fn unstated_roce() -> Result<Rate, Reason> {
    let testbed = cluster::shipped("a100_roce").ok_or("no cluster with RoCE")?;
    let testbed = testbed.map_err(|error| error.to_string())?;
    let network = testbed.levels.last().ok_or("a100_roce has no network")?;
    let LinkLevel { bytes_per_s, gpus_an_adapter, .. } = *network;
    Ok(Rate { bytes_per_s, gpus_an_adapter })
}

/// The generation's own entry for a GPU family, if there is one: kernels differ by family.
fn on_family(generation: &str, gpu: &str) -> String {
    let family = if gpu.starts_with('H') {
        "hopper"
    } else if gpu.starts_with('B') || gpu.starts_with("GB") {
        "blackwell"
    } else {
        "ampere"
    };
    let own = format!("{generation}_{family}");
    let shipped = cluster::software(&own).is_ok_and(|own| own.is_some());
    if shipped { own } else { generation.to_owned() }
}

/// A network's line rate for one GPU and direction while all GPUs send.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Rate {
    bytes_per_s: f64,
    gpus_an_adapter: u64,
}

/// The rate stated in words: `4x200Gb … per node`, `800 Gbps per node`, `400Gb … per GPU`. How many
/// adapters share a rate stated per node is unknown; each GPU is assumed to have its own.
fn stated_rate(words: &str, node_gpus: u64) -> Option<Rate> {
    let at = words.find("Gb")?;
    let before = words[..at].trim_end();
    let (gbit, rest) = last_number(before)?;
    let bytes = gbit * 1e9 / 8.0;
    let own = |bytes_per_s| Rate { bytes_per_s, gpus_an_adapter: 1 };
    if words.contains("per GPU") {
        return Some(own(bytes));
    }
    let Some((adapters, _)) = rest.strip_suffix('x').and_then(last_number) else {
        return Some(own(bytes / node_gpus as f64));
    };
    let gpus_an_adapter = (node_gpus / (adapters as u64).max(1)).max(1);
    Some(Rate { bytes_per_s: adapters * bytes / node_gpus as f64, gpus_an_adapter })
}

/// The number at the end of a text, and the text before it.
fn last_number(text: &str) -> Option<(f64, &str)> {
    let start = text.rfind(|c: char| !c.is_ascii_digit()).map_or(0, |last| last + 1);
    Some((text[start..].parse().ok()?, &text[..start]))
}

#[cfg(test)]
mod tests {
    use super::{Rate, stated_rate};

    #[test]
    fn rates_are_read_from_words() {
        let rate = |words| {
            stated_rate(words, 8)
                .map(|Rate { bytes_per_s, gpus_an_adapter }| (bytes_per_s, gpus_an_adapter))
        };
        assert_eq!(rate("NVLink; 4x200Gb HDR IB per node"), Some((12.5e9, 2)));
        assert_eq!(rate("NVLink; 8x200Gb NIC multi-rail RoCE"), Some((25e9, 1)));
        assert_eq!(rate("800 Gbps per node"), Some((12.5e9, 1)));
        assert_eq!(rate("NVLink4 8-GPU node + 400Gb NDR IB per GPU"), Some((50e9, 1)));
        assert_eq!(rate("NVLink single node"), None);
    }
}
