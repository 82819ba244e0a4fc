//! Seconds along the stages of a candidate partition.

use super::super::pipeline_spec::PipelineSpec;
use super::super::workload::MicroBatchCost;
use crate::partition::milestones::PassCounts;
use crate::pricing::layers::Counts;

/// Seconds of one micro-batch by stage, with the vocabulary layers, blocking transfers and gaps of
/// the stage, and their sums along the pipeline.
pub(in crate::bounds) struct PathSeconds {
    /// Forward, backward (to inputs alone where it is split), and separate weight gradients.
    pub seconds: Vec<PassCounts>,
    /// By stage, the forwards of the stages before it with the links between, s.
    pub down_s: Vec<f64>,
    /// By stage, the backwards of the stages before it with the links between, s.
    pub back_s: Vec<f64>,
    /// By stage, the links before it, s.
    links_s: Vec<f64>,
}

impl PathSeconds {
    pub fn new(spec: &PipelineSpec, work: &MicroBatchCost, stages: &[Counts]) -> Self {
        let (splits, blocks) = (spec.splits_backward(), spec.transfer_blocks && spec.ranks > 1);
        let more = stages.len() + 1;
        let mut seconds = Vec::with_capacity(more);
        let [mut down_s, mut back_s, mut links_s] = [0, 1, 2].map(|_| Vec::with_capacity(more));
        [&mut down_s, &mut back_s, &mut links_s].into_iter().for_each(|sums| sums.push(0.0));
        let mut before_s = 0.0;
        for (stage, counts) in stages.iter().enumerate() {
            let behind_s = spec.transfer_s(stage);
            let gaps_s = spec.gaps_s();
            let (mut forward_s, mut backward_s) =
                if blocks { (before_s, behind_s) } else { (0.0, 0.0) };
            before_s = behind_s;
            forward_s += gaps_s[0];
            backward_s += gaps_s[1];
            let mut weight_s = gaps_s[2];
            for (kind, &n) in work.kinds.iter().zip(counts) {
                forward_s += n as f64 * kind.forward_s;
                backward_s += n as f64 * if splits { kind.input_s } else { kind.backward_s };
                weight_s += if splits { n as f64 * kind.weight_s } else { 0.0 };
            }
            let ends = [(stage == 0, &work.embedding), (stage + 1 == stages.len(), &work.head)];
            for (_, end) in ends.into_iter().filter(|(here, _)| *here && spec.passes.is_none()) {
                let apart_s = if splits { end.weight_s } else { 0.0 };
                forward_s += end.forward_s;
                backward_s += end.backward_s - apart_s;
                weight_s += apart_s;
            }
            let link_s = if blocks { 0.0 } else { behind_s };
            down_s.push(down_s[stage] + forward_s + link_s);
            back_s.push(back_s[stage] + backward_s + link_s);
            links_s.push(links_s[stage] + link_s);
            seconds.push([forward_s, backward_s, weight_s]);
        }
        Self { seconds, down_s, back_s, links_s }
    }

    /// The forwards of stage `from` and those after it, and the backwards of the stages after `to`.
    pub fn round_trip_s(&self, from: usize, to: usize) -> f64 {
        let last = self.seconds.len();
        let down_s = self.down_s[last] - self.down_s[from];
        let back_s = self.back_s[last] - self.back_s[to + 1];
        // The link after `to` is crossed on the way back to it.
        down_s + back_s + self.link_s(to)
    }

    /// The link after a stage, s.
    pub fn link_s(&self, stage: usize) -> f64 {
        self.links_s[stage + 1] - self.links_s[stage]
    }

    pub fn first_backward_s(&self) -> f64 {
        self.seconds[0][1]
    }
}
