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
    /// The stages of a pipeline.
    pub fn all(
        spec: &PipelineSpec,
        work: &MicroBatchCost,
        state: &StateView,
        budget_bytes: f64,
    ) -> Vec<Self> {
        let transfers = Transfers::new(spec);
        (0..spec.ranks)
            .map(|stage| Self::new((spec, &transfers), work, state, stage, budget_bytes))
            .collect()
    }

    fn new(
        (spec, transfers): (&PipelineSpec, &Transfers),
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
            (spec.gaps_s(), transfers.crossings_s(spec, stage));
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
        let back_s = embedding_s + transfers.until_s[stage] + gaps_s;
        Self {
            forward_s,
            backward_s,
            weight_s,
            to_s: end_s(stage > 0, &work.embedding) + transfers.way_before_s(spec, stage),
            back_s,
            chains: spec
                .counted_milestones(stage)
                .or_else(|| splits.then(|| OrderMilestones::of_any(spec.micro_batches, 1)))
                .map(|milestones| milestones.of_one_chunk()),
            from_s: end_s(stage + 1 < p, &work.head) + transfers.path_after_s(spec, stage),
            held,
            free_bytes,
            params: ends_params,
            fewest: usize::from(!(holds_vocab && (stage == 0 || stage + 1 == p) && p > 1)),
        }
    }
}

/// The transfers of one micro-batch between the stages of a pipeline with one chunk a rank, s.
struct Transfers {
    /// By stage, from it to the next.
    behind_s: Vec<f64>,
    /// By stage, along all stages before it.
    until_s: Vec<f64>,
    /// By stage, along it and all stages after it.
    from_s: Vec<f64>,
}

impl Transfers {
    fn new(spec: &PipelineSpec) -> Self {
        let behind_s: Vec<f64> = (0..spec.ranks).map(|stage| spec.transfer_s(stage)).collect();
        let sum = |so_far: &mut f64, own_s: &f64| {
            let before_s = *so_far;
            *so_far += own_s;
            Some(before_s)
        };
        let until_s = behind_s.iter().scan(0.0, sum).collect();
        let after_s = behind_s.iter().rev().scan(0.0, sum);
        let mut from_s: Vec<f64> = after_s.zip(behind_s.iter().rev()).map(|(a, b)| a + b).collect();
        from_s.reverse();
        Self { behind_s, until_s, from_s }
    }

    /// Those that are part of a stage's forward and backward.
    fn crossings_s(&self, spec: &PipelineSpec, stage: usize) -> (f64, f64) {
        if !spec.transfer_blocks {
            return (0.0, 0.0);
        }
        (if stage > 0 { self.behind_s[stage - 1] } else { 0.0 }, self.behind_s[stage])
    }

    /// Transfers and gaps on all stages before one, forward and backward, with the link to it where
    /// transfers are latencies.
    fn way_before_s(&self, spec: &PipelineSpec, stage: usize) -> f64 {
        if stage == 0 {
            return 0.0;
        }
        let last = if spec.transfer_blocks { stage - 1 } else { stage };
        self.until_s[last] + self.until_s[stage] + stage as f64 * 2.0 * spec.gap_s
    }

    /// The same on all stages after one, with the link from it.
    fn path_after_s(&self, spec: &PipelineSpec, stage: usize) -> f64 {
        let after = spec.ranks - 1 - stage;
        if after == 0 {
            return 0.0;
        }
        let first = if spec.transfer_blocks { stage + 1 } else { stage };
        self.from_s[stage] + self.from_s[first] + after as f64 * 2.0 * spec.gap_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pricing::cost_cache::CostCache;
    use crate::request::Task;
    use crate::request::restrictions::Restrictions;
    use models::decisions::Decisions;
    use models::schedule::ScheduleName;

    /// Transfers inside a host of eight and beyond it differ.
    #[test]
    fn sums_along_a_pipeline_are_those_of_its_stages() {
        let model = models::model::shipped("gpt_1.7b").and_then(Result::ok).expect("it reads");
        let cluster = models::cluster::shipped("selene").and_then(Result::ok).expect("it reads");
        let restrictions = Restrictions::parse(&["tp=2", "dp=1", "cp=1"]).expect("they are valid");
        let mut blocking = [0; 2];
        for gpus in [2, 4, 12, 24] {
            let task = Task::new(&model, &cluster, gpus, &restrictions);
            let cache = CostCache::new(&model, &cluster, gpus);
            let contexts = task.space().contexts();
            let d = &contexts.first().expect("the space has combinations").decisions;
            for schedule in [ScheduleName::OneFOneB, ScheduleName::ZbH1] {
                let d = Decisions { schedule, ..d.clone() };
                let spec = PipelineSpec::new(&cache, &d, &cache.layer_costs(&d));
                blocking[usize::from(spec.transfer_blocks)] += 1;
                let transfers = Transfers::new(&spec);
                for stage in 0..spec.ranks {
                    compare(&spec, &transfers, stage);
                }
            }
        }
        assert!(blocking.iter().all(|&specs| specs > 1), "{blocking:?}");
    }

    fn compare(spec: &PipelineSpec, transfers: &Transfers, stage: usize) {
        let p = spec.ranks;
        assert_eq!(transfers.crossings_s(spec, stage), spec.crossings_s(stage));
        let both = |stage| {
            let (forward_s, backward_s) = spec.crossings_s(stage);
            forward_s + backward_s
        };
        let (before_s, behind_s): (f64, f64) = match spec.transfer_blocks {
            true => ((0..stage).map(both).sum(), (stage + 1..p).map(both).sum()),
            false => {
                let later_s: f64 = (stage..p).map(|stage| spec.transfer_s(stage)).sum();
                (2.0 * spec.transfers_to_s(stage), 2.0 * later_s)
            }
        };
        let gaps_s = |stages: usize| stages as f64 * 2.0 * spec.gap_s;
        let near = |one: f64, other: f64| (one - other).abs() <= 1e-12 * other.abs();
        assert!(near(transfers.until_s[stage], spec.transfers_to_s(stage)), "stage {stage}");
        let before_s = before_s + gaps_s(stage);
        assert!(near(transfers.way_before_s(spec, stage), before_s), "stage {stage}");
        let behind_s = behind_s + gaps_s(p - 1 - stage);
        assert!(near(transfers.path_after_s(spec, stage), behind_s), "stage {stage}");
    }
}
