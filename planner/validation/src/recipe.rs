//! What NVIDIA's published recipes set beside what its tables of results print.
//!
//! The tables have parallel degrees and batches. What is recomputed, how tokens reach their experts, what runs under
//! what and the layers of each stage stand in the recipes that the tables ran: Megatron-Bridge's
//! `scripts/performance/configs` at v0.1.0 (container 25.09), v0.2.0 (25.11), v0.3.1 (26.02), v0.4.0 (26.04), v0.4.2 (26.04.01),
//! v0.5.1 (26.06), its `perf_recipes` at v0.6.0 (26.08), and dgxc-benchmarking's `launch.sh` at v25.05.05. Like a model's
//! card they are looked up by software, model, GPU and number format.

use super::row::Row;
use super::run_flags::RunFlags;
use models::cluster::Selective;
use models::decisions::Recompute;

/// What a recipe says beyond a row's columns.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Recipe {
    /// What is done again in the backward pass.
    pub recompute: Option<(Recompute, Selective)>,
    /// Whether tokens travel by DeepEP or HybridEP; else by a plain all-to-all.
    pub flexible: Option<bool>,
    /// Experts' all-to-alls run under another micro-batch's passes (`moe_a2a_overlap`).
    pub under_passes: bool,
    /// The router, and what makes tokens ready to be sent, are CUDA graphs (`cuda_graph_scope` has `moe_router`).
    pub graphed: bool,
    /// One CUDA graph of the iteration, experts' kernels fused (`cutedsl_fused_grouped_mlp`), attention in 8 bits.
    pub fused: bool,
    /// Chunks a device, where the row does not say.
    pub chunks: Option<u64>,
    /// Layers that predict the token after the next. The output layer's second use is left out: DeepSeek-V3's layout
    /// has room for it on the last stage.
    pub predicted_ahead: usize,
    /// Stages are as DeepSeek-V3's layout has them.
    pub deepseek_layout: bool,
}

/// Norms and the activation function (`layernorm`, `moe_act`).
const NORMS: (Recompute, Selective) = (Recompute::Selective, Selective::Products);
/// Latent attention's up-projections (`mla_up_proj`); `mlp` beside it or alone concerns DeepSeek-V3's three dense
/// layers only and is left out.
const UP: (Recompute, Selective) = (Recompute::Selective, Selective::UpProjections);
const NOTHING: (Recompute, Selective) = (Recompute::None, Selective::Products);

/// The recipe of a row; where its notes say how tokens were dispatched, that counts.
pub fn recipe(row: &Row) -> Recipe {
    let mut found = by_release(row);
    let flags = RunFlags::of(row);
    found.flexible = flags.flexible_dispatch.or(found.flexible);
    found.under_passes |= flags.under_passes;
    found
}

fn by_release(row: &Row) -> Recipe {
    let name = row.model_name.to_lowercase();
    if row.software.starts_with("dgxc-v25.05") && name.contains("deepseek") {
        return Recipe { recompute: Some(UP), ..Recipe::default() };
    }
    let Some(release) = release(&row.software) else { return Recipe::default() };
    if name.contains("deepseek") {
        deepseek(row, &name, release)
    } else if name.contains("gpt oss") {
        gpt_oss(row, release)
    } else if name.contains("qwen3") {
        qwen3(row, &name, release)
    } else if name.contains("llama3_70b") && row.pp.is_some_and(|pp| pp > 1) {
        Recipe { chunks: Some(5), ..Recipe::default() }
    } else {
        Recipe::default()
    }
}

/// Year, month and patch of a container of Megatron-Bridge.
type Release = (u32, u32, u32);

/// The container that ran, `(26, 4, 1)` of 26.04.01 and `(26, 4, 0)` of 26.04.
fn release(software: &str) -> Option<Release> {
    let mut parts = software.strip_prefix("megatron-bridge-")?.split('.').map(str::parse::<u32>);
    let (year, month) = (parts.next()?.ok()?, parts.next()?.ok()?);
    Some((year, month, parts.next().map_or(Some(0), Result::ok)?))
}

fn deepseek(row: &Row, name: &str, release: Release) -> Recipe {
    let narrow = row.precision == "mxfp8";
    let (rack, hopper) = (row.gpu.starts_with("GB"), row.gpu.starts_with('H'));
    let fused = narrow && rack && release >= (26, 6, 0);
    let recompute = match row.gpu.as_str() {
        "GB300" if fused => NOTHING,
        "GB300" if !narrow || release < (26, 2, 0) => NORMS,
        "GB200" if narrow && release >= (26, 4, 0) && !fused => NOTHING,
        _ => UP,
    };
    // The recipes of v0.4.2: on B200 with experts on four nodes, which hides what it sends between them.
    let since_patch = narrow && release >= (26, 4, 1);
    let over_nodes = row.gpu == "B200" && since_patch;
    Recipe {
        recompute: Some(recompute),
        flexible: Some(release >= (26, 2, 0) || (release == (25, 11, 0) && (rack || hopper))),
        under_passes: fused || over_nodes || (hopper && release < (26, 2, 0)),
        graphed: over_nodes
            || row.gpu == "GB200"
            || (row.gpu == "B300" && since_patch)
            || (row.gpu == "GB300" && (!narrow || release < (26, 2, 0))),
        fused,
        predicted_ahead: usize::from(!name.contains("w/o mtp")),
        deepseek_layout: true,
        ..Recipe::default()
    }
}

fn gpt_oss(row: &Row, release: Release) -> Recipe {
    let rack = row.gpu.starts_with("GB");
    let fused = row.precision == "mxfp8" && rack && release >= (26, 6, 0);
    let roomy = row.gpu.ends_with("B300") || fused;
    Recipe {
        recompute: Some(if roomy { NOTHING } else { NORMS }),
        flexible: Some(release >= (26, 4, 0) && !row.gpu.starts_with('H')),
        under_passes: fused || (row.gpu == "GB200" && release >= (26, 4, 0)),
        graphed: row.gpu.ends_with("B300"),
        fused,
        ..Recipe::default()
    }
}

fn qwen3(row: &Row, name: &str, release: Release) -> Recipe {
    let hopper = row.gpu.starts_with('H');
    let small = name.contains("30b");
    let fused = row.precision == "mxfp8" && !hopper && release >= (26, 6, 0);
    Recipe {
        recompute: Some(NOTHING),
        flexible: Some(if hopper {
            small && release >= (26, 2, 0)
        } else {
            release >= (25, 11, 0)
        }),
        under_passes: fused || (hopper && small && release < (26, 4, 0)),
        graphed: (small && !hopper) || row.gpu.starts_with("GB"),
        fused,
        ..Recipe::default()
    }
}

#[cfg(test)]
mod tests {
    use super::release;

    #[test]
    fn releases_are_read_from_software() {
        assert_eq!(release("megatron-bridge-26.04.01"), Some((26, 4, 1)));
        assert_eq!(release("megatron-bridge-25.11"), Some((25, 11, 0)));
        assert_eq!(release("dgxc-v25.05.05-nemo"), None);
    }
}
