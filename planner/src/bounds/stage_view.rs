//! What one stage of a partition costs besides its layers, as [`super::cuts`] sees it.

use super::pipeline_spec::PipelineSpec;
use super::states::StateView;
use super::workload::{MicroBatchCost, VocabEnd};
use crate::cost::state::LocalParams;
use crate::partition::OrderMilestones;
use crate::partition::milestones::OneChunk;

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
    pub fn new(
        spec: &PipelineSpec,
        work: &MicroBatchCost,
        state: &StateView,
        stage: usize,
        budget_bytes: f64,
    ) -> Self {
        let p = spec.ranks;
        let (mut counts, holds_vocab) = (vec![], spec.passes.is_none());
        spec.in_flight(stage, &mut counts);
        let held = counts[0] as f64;
        let ([forward_gap_s, backward_gap_s, mut weight_s], crossings_s) =
            (spec.gaps_s(), spec.crossings_s(stage));
        let mut forward_s = crossings_s.0 + forward_gap_s;
        let mut backward_s = crossings_s.1 + backward_gap_s;
        let splits = spec.splits_backward();
        // Another order of summation must not rule out what just fits.
        let mut free_bytes = budget_bytes * (1.0 + 1e-9);
        let mut ends_params = 0.0;
        let mut hold = |end: &VocabEnd, works: bool| {
            ends_params += end.params;
            let params = LocalParams { dense: end.params, expert: 0.0 };
            free_bytes -= state.bytes_of(params);
            if works {
                forward_s += end.forward_s;
                let apart_s = if splits { end.weight_s } else { 0.0 };
                backward_s += end.backward_s - apart_s;
                weight_s += apart_s;
                free_bytes -= end.workspace_bytes + held * end.in_flight_bytes;
            }
        };
        if stage == 0 || !holds_vocab {
            hold(&work.embedding, holds_vocab);
        }
        if stage + 1 == p || !holds_vocab {
            hold(&work.head_of(spec), holds_vocab);
        }
        let end_s = |there: bool, end: &VocabEnd| {
            let apart_s = if splits { end.weight_s } else { 0.0 };
            if there && holds_vocab { end.load_s() - apart_s } else { 0.0 }
        };
        let before = stage > 0 && holds_vocab;
        let embedding_s = if before { work.embedding.backward_s } else { 0.0 };
        // The backward of each earlier stage includes a transfer, or one comes before it.
        let gaps_s = stage as f64 * backward_gap_s;
        let back_s = embedding_s + spec.transfers_to_s(stage) + gaps_s;
        Self {
            forward_s,
            backward_s,
            weight_s,
            to_s: end_s(stage > 0, &work.embedding) + way_s(spec, 0, stage),
            back_s,
            chains: spec
                .counted_milestones(stage)
                .or_else(|| splits.then(|| OrderMilestones::of_any(spec.micro_batches, 1)))
                .map(|milestones| milestones.of_one_chunk()),
            from_s: end_s(stage + 1 < p, &work.head) + way_s(spec, stage + 1, p),
            held,
            free_bytes,
            params: ends_params,
            fewest: usize::from(!(holds_vocab && (stage == 0 || stage + 1 == p) && p > 1)),
        }
    }
}

/// Transfers and gaps of one micro-batch on stages `from..to`, forward and backward, s, with the
/// link between these stages and the one stage at their side where transfers are latencies.
fn way_s(spec: &PipelineSpec, from: usize, to: usize) -> f64 {
    if from >= to {
        return 0.0;
    }
    let transfers_s: f64 = match spec.transfer_blocks {
        true => (from..to).map(|stage| spec.crossings_s(stage)).map(|(a, b)| a + b).sum(),
        false if from == 0 => 2.0 * spec.transfers_to_s(to),
        false => 2.0 * (from - 1..to - 1).map(|stage| spec.transfer_s(stage)).sum::<f64>(),
    };
    transfers_s + (to - from) as f64 * 2.0 * spec.gap_s
}
