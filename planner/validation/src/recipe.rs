//! Settings of NVIDIA's published recipes that its tables of results do not print.
//!
//! The tables print parallel degrees and batches. Recomputation, expert dispatch, overlap and the
//! layers of each stage are in the recipes behind the tables. For most rows of Megatron-Bridge they
//! are data (`bridge_flags.csv`, [`super::run_flags::Preset`]). For the others they are here:
//! `scripts/performance/configs` at v0.1.0 (container 25.09), v0.2.0 (25.11) and v0.3.1 (26.02.01),
//! and dgxc-benchmarking's `launch.sh` at v25.05.05, looked up by software, model, GPU and number
//! format.

use super::row::Row;
use super::run_flags::{Preset, RunFlags};
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
/// Recomputes the up-projections of latent attention (`mla_up_proj`).
const UP: (RecomputePolicy, Selective) = (RecomputePolicy::Selective, Selective::UpProjections);
const NOTHING: (RecomputePolicy, Selective) = (RecomputePolicy::None, Selective::Products);

/// The recipe of a row. What the row's notes say of the dispatch takes precedence.
pub fn recipe(row: &Row) -> Recipe {
    let found = match &row.preset {
        Some(preset) => by_preset(preset),
        None => by_release(row),
    };
    let mut found = by_model(row, found);
    let flags = RunFlags::of(&row.notes);
    found.flexible = flags.flexible_dispatch.or(found.flexible);
    found.under_passes |= flags.under_passes;
    found
}

fn by_preset(preset: &Preset) -> Recipe {
    Recipe {
        recompute: Some(preset.recompute()),
        flexible: Some(preset.flexible_dispatch()),
        under_passes: preset.under_passes(),
        graphed: preset.graphed_routing(),
        fused: preset.whole_graph(),
        ..Recipe::default()
    }
}

/// What all releases of Megatron-Bridge do with a model.
fn by_model(row: &Row, found: Recipe) -> Recipe {
    let name = row.model_name.to_lowercase();
    if release(&row.software).is_none() {
        return found;
    }
    if name.contains("deepseek") {
        let predicted_ahead = usize::from(!name.contains("w/o mtp"));
        Recipe { predicted_ahead, deepseek_layout: true, ..found }
    } else if name.contains("llama3_70b") && row.pp.is_some_and(|pp| pp > 1) {
        Recipe { chunks: Some(5), ..found }
    } else {
        found
    }
}

fn by_release(row: &Row) -> Recipe {
    let name = row.model_name.to_lowercase();
    if row.software.starts_with("dgxc-v25.05") && name.contains("deepseek") {
        return Recipe { recompute: Some(UP), ..Recipe::default() };
    }
    let Some(release) = release(&row.software) else { return Recipe::default() };
    if name.contains("deepseek") {
        deepseek(row, release)
    } else if name.contains("gpt oss") {
        Recipe { recompute: Some(NORMS), flexible: Some(false), ..Recipe::default() }
    } else if name.contains("qwen3") {
        qwen3(row, &name, release)
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

fn deepseek(row: &Row, release: Release) -> Recipe {
    let (rack, hopper) = (row.gpu.starts_with("GB"), row.gpu.starts_with('H'));
    Recipe {
        recompute: Some(if row.gpu == "GB300" { NORMS } else { UP }),
        flexible: Some(release == (25, 11, 0) && (rack || hopper)),
        under_passes: hopper,
        graphed: rack,
        ..Recipe::default()
    }
}

fn qwen3(row: &Row, name: &str, release: Release) -> Recipe {
    let hopper = row.gpu.starts_with('H');
    let small = name.contains("30b");
    Recipe {
        recompute: Some(NOTHING),
        flexible: Some(if hopper {
            small && release >= (26, 2, 0)
        } else {
            release >= (25, 11, 0)
        }),
        under_passes: hopper && small,
        graphed: (small && !hopper) || row.gpu.starts_with("GB"),
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
