//! Chain bounds of candidate partitions on bidirectional pipelines.

use super::listed_cuts::{ListedCuts, Shape};
use super::path_seconds::PathSeconds;
use super::{ListedBound, params_of};
use crate::partition::bidirectional::Bidirectional;

impl ListedBound<'_> {
    /// The longest chain of a candidate, s, where each pipeline rank recomputes for `recompute_s`
    /// per micro-batch. Stops at the first chain that reaches `limit_s`.
    pub(super) fn bidirectional_rows_s(
        &self,
        candidates: &ListedCuts,
        candidate: &Shape,
        limit_s: f64,
        recompute_s: impl Fn(usize) -> f64,
    ) -> f64 {
        let spec = self.spec;
        let path = PathSeconds::new(spec, self.work, &candidate.stages);
        let bidirectional =
            Bidirectional { stages: &path.seconds, down_s: &path.down_s, runs: spec.runs() };
        let tail_s = |rank: usize| {
            let params = params_of(self.work, &candidate.ranks[rank].layers);
            self.state.tail_of_copies_s(params, spec.least_stages())
        };
        let (mut longest_s, mut recomputing_s) = (0.0_f64, 0.0);
        for rank in bidirectional.pairs() {
            let own_s = recompute_s(rank);
            let unpaired_s = candidates.unpaired_s(spec, self.work, (candidate, rank));
            let end_s = bidirectional.end_s(rank, own_s) + unpaired_s + tail_s(rank);
            longest_s = longest_s.max(end_s);
            if longest_s >= limit_s {
                return longest_s;
            }
            recomputing_s += own_s;
        }
        longest_s.max(path.round_trip_s(0, 0) + path.first_backward_s() + recomputing_s)
    }
}
