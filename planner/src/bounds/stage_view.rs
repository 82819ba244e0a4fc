//! What one stage of a partition costs besides its layers, as [`super::cuts`] sees it.

use super::candidates::path_seconds::PathSeconds;
use super::pipeline_spec::PipelineSpec;
use super::states::StateView;
use super::workload::{MicroBatchCost, VocabEnd};
use crate::cost::state::LocalParams;
use crate::partition::OrderMilestones;
use crate::partition::milestones::OneChunk;
use crate::pricing::layers::Counts;
use models::placement::may_be_empty;

/// A stage without its layers.
pub(super) struct StageView {
    /// Vocabulary layers, blocking transfers and gaps in its own passes, s.
    pub forward_s: f64,
    pub backward_s: f64,
    pub weight_s: f64,
    /// Vocabulary layers, transfers and gaps of the stages before it, forward and backward, s.
    pub to_s: f64,
    /// The backward part of `to_s`, s.
    pub back_s: f64,
    /// Chains between milestones, where the backward is split: those of any order if its own
    /// cannot be counted.
    pub chains: Option<OneChunk>,
    /// Vocabulary layers, transfers and gaps of the stages after it, forward and backward, s.
    pub from_s: f64,
    /// Micro-batches in flight.
    pub held: f64,
    /// Bytes for the parameter state and the activations of its layers.
    pub free_bytes: f64,
    /// Parameters of its vocabulary layers.
    pub params: f64,
    /// Fewest layers: zero where it holds a vocabulary layer.
    pub fewest: usize,
}

impl StageView {
    /// The stages of a pipeline.
    pub fn all(
        spec: &PipelineSpec,
        work: &MicroBatchCost,
        state: &StateView,
        budget_bytes: f64,
    ) -> Vec<Self> {
        let path = PathSeconds::new(spec, work, &vec![Counts::default(); spec.ranks]);
        (0..spec.ranks)
            .map(|stage| Self::new((spec, &path), work, state, stage, budget_bytes))
            .collect()
    }

    fn new(
        (spec, path): (&PipelineSpec, &PathSeconds),
        work: &MicroBatchCost,
        state: &StateView,
        stage: usize,
        budget_bytes: f64,
    ) -> Self {
        let p = spec.ranks;
        let (mut counts, holds_vocab) = (vec![], spec.passes.is_none());
        spec.in_flight(stage, &mut counts);
        let held = counts[0] as f64;
        let [forward_s, backward_s, weight_s] = path.seconds[stage];
        // Another order of summation must not rule out what just fits.
        let mut free_bytes = budget_bytes * (1.0 + 1e-9);
        let mut ends_params = 0.0;
        let mut hold = |end: &VocabEnd| {
            ends_params += end.params;
            let params = LocalParams { dense: end.params, expert: 0.0 };
            free_bytes -= state.bytes_of(params);
            if holds_vocab {
                free_bytes -= end.workspace_bytes + held * end.in_flight_bytes;
            }
        };
        if stage == 0 || !holds_vocab {
            hold(&work.embedding);
        }
        if stage + 1 == p || !holds_vocab {
            hold(&work.head_of(spec));
        }
        Self {
            forward_s,
            backward_s,
            weight_s,
            to_s: path.down_s[stage] + path.back_s[stage],
            back_s: path.back_s[stage],
            chains: spec
                .counted_milestones(stage)
                .or_else(|| {
                    spec.splits_backward().then(|| OrderMilestones::of_any(spec.micro_batches, 1))
                })
                .map(|milestones| milestones.of_one_chunk()),
            from_s: path.round_trip_s(stage + 1, stage) + path.link_s(stage),
            held,
            free_bytes,
            params: ends_params,
            fewest: usize::from(!may_be_empty(spec.vocab, stage, p)),
        }
    }
}
