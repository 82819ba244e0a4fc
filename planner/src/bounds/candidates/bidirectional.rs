//! Chain bounds of candidate partitions on bidirectional pipelines.

use super::listed_cuts::Shape;
use super::ways::Ways;
use super::{ListedBound, params_of};
use crate::partition::bidirectional::Bidirectional;

impl ListedBound<'_> {
    /// The longest chain of a candidate, s, where each pipeline rank recomputes for `recompute_s`
    /// per micro-batch. Stops at the first chain that reaches `limit_s`.
    pub(super) fn bidirectional_rows_s(
        &self,
        member: &Shape,
        limit_s: f64,
        recompute_s: impl Fn(usize) -> f64,
    ) -> f64 {
        let spec = self.spec;
        let ways = Ways::new(spec, self.work, &member.stages);
        let whole = spec.schedule.is_whole();
        let bidirectional = Bidirectional {
            stages: &ways.seconds,
            down_s: &ways.down_s,
            back_s: &ways.back_s,
            runs: spec.runs(),
            whole,
        };
        let tail_s = |device: usize| {
            let params = params_of(self.work, &member.devices[device].layers);
            self.state.tail_of_s(params, spec.chunks)
        };
        let (mut longest_s, mut recomputing_s) = (0.0_f64, 0.0);
        for device in bidirectional.pairs() {
            let own_s = recompute_s(device);
            // Where backwards are whole, the passes of other ranks follow, and the chain ends with
            // the reductions of stage 0.
            let behind_s = tail_s(if whole { 0 } else { device });
            longest_s = longest_s.max(bidirectional.end_s(device, own_s) + behind_s);
            if longest_s >= limit_s {
                return longest_s;
            }
            recomputing_s += own_s;
        }
        longest_s.max(ways.there_and_back_s(0, 0) + ways.first_backward_s() + recomputing_s)
    }
}
