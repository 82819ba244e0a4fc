//! Settings of NVIDIA's published recipes that its tables of results do not print.
//!
//! The tables print parallel degrees and batches. Recomputation, expert dispatch, overlap and the
//! layers of each stage are in the recipes behind the tables: Megatron-Bridge's
//! `scripts/performance/configs` at v0.1.0 (container 25.09), v0.2.0 (25.11), v0.3.1 (26.02),
//! v0.4.0 (26.04), v0.4.2 (26.04.01), v0.5.1 (26.06), its `perf_recipes` at v0.6.0 (26.08), and
//! dgxc-benchmarking's `launch.sh` at v25.05.05. Like model cards, they are looked up by software,
//! model, GPU and number format.

use super::row::Row;
use super::run_flags::RunFlags;
use models::cluster::Selective;
use models::decisions::RecomputePolicy;

/// Settings of a recipe beyond a row's columns.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Recipe {
    /// What the backward pass recomputes.
    pub recompute: Option<(RecomputePolicy, Selective)>,
    /// Whether tokens are dispatched by DeepEP or HybridEP, rather than by a plain all-to-all.
    pub flexible: Option<bool>,
    /// Whether the experts' all-to-alls overlap another micro-batch's passes (`moe_a2a_overlap`).
    pub under_passes: bool,
    /// Whether the router and the preparation of dispatch are CUDA graphs (`cuda_graph_scope` has
    /// `moe_router`).
    pub graphed: bool,
    /// Whether the iteration is one CUDA graph, with fused expert kernels
    /// (`cutedsl_fused_grouped_mlp`) and 8-bit attention.
    pub fused: bool,
    /// Chunks per pipeline rank, where the row does not state them.
    pub chunks: Option<u64>,
    /// Multi-token prediction layers. The second use of the output layer is left out: DeepSeek-V3's
    /// layout has room for it on the last stage.
    pub predicted_ahead: usize,
    /// Whether the layers of stages follow DeepSeek-V3's layout.
    pub deepseek_layout: bool,
}

/// Recomputes norms and the activation function (`layernorm`, `moe_act`).
const NORMS: (RecomputePolicy, Selective) = (RecomputePolicy::Selective, Selective::Products);
/// Recomputes the up-projections of latent attention (`mla_up_proj`). `mlp`, beside it or alone,
/// concerns only DeepSeek-V3's three dense layers and is left out.
const UP: (RecomputePolicy, Selective) = (RecomputePolicy::Selective, Selective::UpProjections);
const NOTHING: (RecomputePolicy, Selective) = (RecomputePolicy::None, Selective::Products);

/// The recipe of a row. What the row's notes say of the dispatch takes precedence.
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

/// Year, month and patch of a Megatron-Bridge container.
type Release = (u32, u32, u32);

/// The container of a run: `(26, 4, 1)` for 26.04.01, `(26, 4, 0)` for 26.04.
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
    // The recipes of v0.4.2: on B200, with experts across four hosts, the all-to-alls between hosts
    // are overlapped.
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
