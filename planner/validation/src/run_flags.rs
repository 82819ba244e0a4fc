//! Settings of a run that its columns do not state: what its notes mention, and what the preset of
//! its release sets.
//!
//! How a run was set up is configuration, wherever it is written. Its outcome (rates, footnotes on
//! regressions) is a result and is not read here.

use models::cluster::Selective;
use models::decisions::RecomputePolicy;
use models::input::{InputError, Source};
use models::text::quotable;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// The file of presets, beside the measurements.
const PRESETS: &str = "bridge_flags.csv";

/// What a release's preset for a row's model, GPU and number format sets beyond the row's columns
/// (Megatron-Bridge, `scripts/performance/configs` and `perf_recipes`). An empty cell is not set.
/// Columns without a price are not read: offloaded activations, the pipeline's layout.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Preset {
    /// The row.
    id: String,
    /// What captures CUDA graphs: `full_iteration`, `transformer_engine`, `local`, `none`.
    cuda_graph_impl: String,
    /// Modules that are captured, as a list of names.
    cuda_graph_scope: String,
    /// Modules whose outputs are recomputed, as a list of names.
    recompute_modules: String,
    /// `deepep` or `hybridep`; a plain all-to-all where it is not set.
    moe_dispatcher_backend: String,
    /// `True` where the experts' all-to-alls run under another micro-batch's passes.
    moe_a2a_overlap: String,
    /// `True` for Megatron-FSDP.
    fsdp: String,
    /// Ranks that split an expert.
    pub etp: Option<u64>,
}

impl Preset {
    /// The presets of a file of measurements, by row; none where the file has none beside it.
    ///
    /// # Errors
    /// The presets cannot be read, or a number is beyond its limits.
    pub fn beside(measured: &Path) -> Result<BTreeMap<String, Self>, InputError> {
        let path = measured.with_file_name(PRESETS);
        if !path.is_file() {
            return Ok(BTreeMap::new());
        }
        let source = Source::open(&path)?;
        let refused = |error: csv::Error| {
            let message = format!("cannot read presets from {}: {error}", source.name());
            InputError::new(message).help(format!("give the columns of tests/papers/{PRESETS}"))
        };
        let mut found = BTreeMap::new();
        for preset in csv::Reader::from_reader(source.text().as_bytes()).deserialize() {
            let preset: Self = preset.map_err(refused)?;
            let within = |number: Option<u64>, most| number.is_none_or(|n| (1..=most).contains(&n));
            if !within(preset.etp, MAX_RANKS) {
                let message =
                    format!("the preset of row `{}` is beyond limits", quotable(&preset.id));
                return Err(InputError::new(message)
                    .help(format!("valid: up to {MAX_RANKS} ranks that split an expert")));
            }
            found.insert(preset.id.clone(), preset);
        }
        Ok(found)
    }

    /// Whether tokens are dispatched by DeepEP or HybridEP.
    pub fn flexible_dispatch(&self) -> bool {
        ["deepep", "hybridep"].contains(&self.moe_dispatcher_backend.as_str())
    }

    /// Whether the experts' all-to-alls run under another micro-batch's passes.
    pub fn under_passes(&self) -> bool {
        self.moe_a2a_overlap == "True"
    }

    /// Whether the iteration is one CUDA graph.
    pub fn whole_graph(&self) -> bool {
        self.cuda_graph_impl == "full_iteration"
    }

    /// Whether routing runs in a CUDA graph.
    pub fn graphed_routing(&self) -> bool {
        self.whole_graph() || self.cuda_graph_scope.contains("moe_router")
    }

    /// Whether weights are sharded over all replicas.
    pub fn fully_sharded(&self) -> bool {
        self.fsdp == "True"
    }

    /// What the backward pass recomputes. `mlp` concerns only DeepSeek-V3's three dense layers and
    /// is left out.
    pub fn recompute(&self) -> (RecomputePolicy, Selective) {
        let names = |module: &str| self.recompute_modules.contains(module);
        if names("mla_up_proj") {
            (RecomputePolicy::Selective, Selective::UpProjections)
        } else if names("layernorm") || names("moe_act") {
            (RecomputePolicy::Selective, Selective::Products)
        } else {
            (RecomputePolicy::None, Selective::Products)
        }
    }
}

/// Most ranks of a group.
const MAX_RANKS: u64 = 1 << 20;

/// Settings read from the notes of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RunFlags {
    /// Fine-tuning, with or without adapters, which is not planned.
    pub fine_tuning: bool,
    /// Ranks that share one sharded copy of the optimizer state, where not all replicas do.
    pub sharded_ways: Option<u64>,
    /// Whether weights are sharded within a host and replicated between hosts (PyTorch's hybrid
    /// sharding).
    pub hybrid_shard: bool,
    /// Whether tokens are dispatched by DeepEP rather than by a plain all-to-all, if stated.
    pub flexible_dispatch: Option<bool>,
    /// Whether the experts' all-to-alls overlap another micro-batch's passes.
    pub under_passes: bool,
    /// Composer's mixed precision `PURE`: gradients are reduced in 16 bits, in 32 with `DEFAULT`.
    pub pure_16_bits: bool,
    /// Whether the optimizer step waits for all stages. The schedule's authors validate it
    /// afterwards by default.
    pub synchronous_step: bool,
}

impl RunFlags {
    /// Reads the notes of a row.
    pub fn of(notes: &str) -> Self {
        let says = |words: &str| notes.contains(words);
        Self {
            fine_tuning: says("LoRA") || says("Fine-Tuning"),
            sharded_ways: leading_number(notes, "zero1="),
            hybrid_shard: notes.starts_with("HSDP"),
            flexible_dispatch: match (says("DeepEP"), says("dispatcher A2A")) {
                (true, _) => Some(true),
                (false, true) => Some(false),
                (false, false) => None,
            },
            under_passes: says("1f1b overlap"),
            pure_16_bits: says("mp mode PURE"),
            synchronous_step: says("WITHOUT optimizer post-validation"),
        }
    }
}

/// The number after `key`; `None` for anything else (`zero1=-1` shards over all ranks).
fn leading_number(text: &str, key: &str) -> Option<u64> {
    let (_, after) = text.split_once(key)?;
    let digits: String = after.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{Preset, RecomputePolicy, Selective, leading_number};
    use std::path::Path;

    const MEASURED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/papers/measured.csv");

    /// Rows of `bridge_flags.csv`, read by hand.
    #[test]
    fn presets_say_what_rows_do_not() {
        let presets = Preset::beside(Path::new(MEASURED)).expect("it is shipped");
        assert_eq!(presets.len(), 117);
        let of = |id: &str| {
            let preset = &presets[id];
            let runs = [preset.flexible_dispatch(), preset.under_passes(), preset.whole_graph()];
            (runs, preset.graphed_routing(), preset.recompute())
        };
        let nothing = (RecomputePolicy::None, Selective::Products);
        let norms = (RecomputePolicy::Selective, Selective::Products);
        let up = (RecomputePolicy::Selective, Selective::UpProjections);
        assert_eq!(of("mb-002"), ([true; 3], true, up));
        assert_eq!(of("mb-089"), ([true, false, false], true, nothing));
        assert_eq!(of("mb-091"), ([true, true, false], true, up));
        assert_eq!(of("mb-096"), ([false; 3], false, norms));
        assert_eq!(of("mb-228"), ([true, true, false], false, nothing));
        assert!(presets["mb-077"].fully_sharded());
        assert!(Preset::beside(Path::new("/nowhere/measured.csv")).expect("no file").is_empty());
    }

    #[test]
    fn numbers_behind_a_key_are_read() {
        assert_eq!(leading_number("(tp=1, zero1=8): sharded", "zero1="), Some(8));
        assert_eq!(leading_number("(tp=1, zero1=-1): sharded", "zero1="), None);
        assert_eq!(leading_number("sharded", "zero1="), None);
    }
}
