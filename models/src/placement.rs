//! The stage map of a plan: where layers, vocabulary and memory lie.

use crate::decisions::{Decisions, Vocab};
use crate::model::{LayerKind, ModelSpec};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What one (virtual) pipeline stage holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// Stage, 0-based, in model order.
    pub stage: usize,
    /// Pipeline rank that runs it, 0-based.
    pub device: usize,
    /// Chunk of that pipeline rank, 0-based.
    pub chunk: usize,
    /// First layer, 0-based.
    pub first_layer: usize,
    /// Layers, from `first_layer` on.
    pub layers: usize,
    /// Its part of the vocabulary layers.
    pub vocab_share: VocabShare,
    /// Numbers of layers by what they recompute, for each layer kind ([`kind_name`]).
    pub recompute: BTreeMap<String, RecomputeCounts>,
    /// Memory of this stage on one rank, at the fullest moment of its pipeline rank.
    pub memory: StageMemory,
    /// Its second copy in a bidirectional schedule, which runs the other direction's micro-batches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<StageCopy>,
}

/// The second copy of a stage: the same layers with the same recomputation, on another pipeline
/// rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageCopy {
    /// Pipeline rank that runs it, 0-based.
    pub device: usize,
    /// Chunk of that pipeline rank, 0-based.
    pub chunk: usize,
    /// Its memory on one rank, at the fullest moment of its pipeline rank.
    pub memory: StageMemory,
}

impl Stage {
    /// Pipeline ranks that hold it, with its memory there.
    pub fn held(&self) -> impl Iterator<Item = (usize, StageMemory)> + use<> {
        let copy = self.copy.as_ref().map(|copy| (copy.device, copy.memory));
        std::iter::once((self.device, self.memory)).chain(copy)
    }
}

/// Part of the vocabulary a stage holds; its tensor-parallel ranks split that part further.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VocabShare {
    /// Part of the input embedding, 0 to 1.
    pub input: f64,
    /// Part of the output layer, 0 to 1.
    pub output: f64,
}

impl VocabShare {
    /// What decisions give a stage.
    pub fn new(d: &Decisions, stage: usize) -> Self {
        if d.vocab.over_pipeline() {
            let holds = (stage as u64) < d.pp;
            let share = if holds { 1.0 / d.pp as f64 } else { 0.0 };
            return Self { input: share, output: share };
        }
        let whole = |at: bool| if at { 1.0 } else { 0.0 };
        Self { input: whole(stage == 0), output: whole(stage + 1 == d.stages()) }
    }
}

/// Layers of one kind by what they recompute in the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecomputeCounts {
    /// Layers that keep all activations.
    pub none: usize,
    /// Layers that recompute cheap, large activations.
    pub selective: usize,
    /// Layers that keep only their input.
    pub full: usize,
}

impl RecomputeCounts {
    /// All of them.
    pub fn total(self) -> usize {
        self.none.saturating_add(self.selective).saturating_add(self.full)
    }
}

/// Bytes of one stage on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageMemory {
    /// Weights.
    pub parameters: u64,
    /// Gradients.
    pub gradients: u64,
    /// Optimizer state.
    pub optimizer: u64,
    /// Activations in flight.
    pub activations: u64,
    /// Temporaries, logits, communication buffers and what the device reserves.
    pub workspace: u64,
    /// All of it.
    pub total: u64,
}

impl StageMemory {
    /// Fills in the total.
    #[must_use]
    pub fn summed(mut self) -> Self {
        self.total = self.sum();
        self
    }

    /// Sum of the parts.
    pub fn sum(&self) -> u64 {
        let parts = [self.gradients, self.optimizer, self.activations, self.workspace];
        parts.into_iter().fold(self.parameters, u64::saturating_add)
    }

    /// The parts by name.
    pub fn parts(&self) -> [(&'static str, u64); 5] {
        [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("activations", self.activations),
            ("workspace", self.workspace),
        ]
    }

    /// Sum of two stages on the same pipeline rank.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            parameters: self.parameters.saturating_add(other.parameters),
            gradients: self.gradients.saturating_add(other.gradients),
            optimizer: self.optimizer.saturating_add(other.optimizer),
            activations: self.activations.saturating_add(other.activations),
            workspace: self.workspace.saturating_add(other.workspace),
            total: self.total.saturating_add(other.total),
        }
    }
}

/// Name of a layer kind in plans.
pub fn kind_name(kind: LayerKind) -> &'static str {
    match (kind.moe, kind.windowed) {
        (false, false) => "dense",
        (false, true) => "dense_windowed",
        (true, false) => "moe",
        (true, true) => "moe_windowed",
    }
}

/// Layers of each kind among `first..first + count`, by name.
pub fn kinds_in(model: &ModelSpec, first: usize, count: usize) -> BTreeMap<&'static str, usize> {
    let mut kinds = BTreeMap::new();
    for layer in (first..first.saturating_add(count)).take(model.layers) {
        *kinds.entry(kind_name(model.layer_kind(layer))).or_default() += 1;
    }
    kinds
}

/// Memory of each pipeline rank, its stages together.
pub fn device_memory(stages: &[Stage], ranks: usize) -> Vec<StageMemory> {
    let mut memory = vec![StageMemory::default(); ranks];
    for (rank, held) in stages.iter().flat_map(Stage::held) {
        if let Some(rank) = memory.get_mut(rank) {
            *rank = rank.and(held);
        }
    }
    memory
}

/// Whether a stage may hold no layer: it holds a whole vocabulary layer instead.
pub fn may_be_empty(vocab: Vocab, stage: usize, stages: usize) -> bool {
    !vocab.over_pipeline() && stages > 1 && (stage == 0 || stage + 1 == stages)
}
