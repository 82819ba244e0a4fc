//! Listed placements whose stages are there twice.

use super::members::Shape;
use super::ways::Ways;
use super::{Lister, params_of};
use crate::placement::mirrored::Mirrored;

impl Lister<'_> {
    /// The longest chain of a placement, with `recompute_s` of each device's recomputation of one micro-batch; the
    /// first that reaches the limit, where one does.
    pub(super) fn mirrored_rows_s(
        &self,
        member: &Shape,
        limit_s: f64,
        recompute_s: impl Fn(usize) -> f64,
    ) -> f64 {
        let line = self.line;
        let ways = Ways::new(line, self.work, &member.stages);
        let whole = line.schedule.is_whole();
        let mirrored = Mirrored {
            stages: &ways.seconds,
            down_s: &ways.down_s,
            back_s: &ways.back_s,
            runs: line.runs(),
            whole,
        };
        let tail_s = |device: usize| {
            let params = params_of(self.work, &member.devices[device].layers);
            self.state.tail_of_s(params, line.chunks)
        };
        let (mut longest_s, mut recomputing_s) = (0.0_f64, 0.0);
        for device in mirrored.pairs() {
            let own_s = recompute_s(device);
            // Where others' passes follow, what is behind them are the first stages' reductions.
            let behind_s = tail_s(if whole { 0 } else { device });
            longest_s = longest_s.max(mirrored.end_s(device, own_s) + behind_s);
            if longest_s >= limit_s {
                return longest_s;
            }
            recomputing_s += own_s;
        }
        longest_s.max(ways.there_and_back_s(0, 0) + ways.first_backward_s() + recomputing_s)
    }
}
