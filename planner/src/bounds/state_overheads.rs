//! What choices of parameter state add to a rank's load, whatever the partition.

use super::pipeline_spec::PipelineSpec;
use super::states::{StateView, States};
use super::workload::{MAX_COPIES, MicroBatchCost};

/// Lower bounds on the cost of one choice of parameter state on a rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateOverhead {
    /// The choice, as an index into the undominated ones.
    pub at: usize,
    /// Seconds in passes, after them and after the barrier, for the mean of all ranks with one
    /// stage each, without vocabulary layers.
    pub added_s: f64,
    /// All seconds of a rank that holds of one kind only as many layers as some rank must hold; the
    /// largest over kinds.
    pub fullest_s: f64,
}

impl States {
    /// Lower bounds on what the undominated choices add to the mean load of a rank, with `work` as
    /// one micro-batch; the fastest comes first.
    pub fn overheads(&self, work: &MicroBatchCost, spec: &PipelineSpec) -> Vec<StateOverhead> {
        let mean = work.params() * (1.0 / spec.ranks as f64);
        // By layer kind, what its forward and its backward do not hide.
        let mut exposed_s: Vec<(f64, f64)> = vec![];
        let of = |(at, view): (usize, &StateView)| {
            let all = || work.kinds.iter().zip(&work.counts).enumerate();
            exposed_s.clear();
            exposed_s.extend(all().map(|(index, (kind, _))| match view.in_passes() {
                true => view.exposed_s(index, kind, spec),
                false => (0.0, 0.0),
            }));
            let behind_s = |params, n, [forward_s, backward_s]: [f64; 2]| {
                view.tail_of_s(params, n, backward_s) + view.step_of_s(params, n, forward_s)
            };
            let (mut passes_s, mut own_s) = (0.0, [0.0; 2]);
            for (index, (kind, &count)) in all() {
                let share = count as f64 / spec.ranks as f64;
                let (forward_s, backward_s) = exposed_s[index];
                passes_s += spec.m() * share * (forward_s + backward_s);
                own_s[0] += share * (kind.forward_s + forward_s);
                own_s[1] += share * (kind.backward_s + backward_s);
            }
            let fullest_s = work.fullest(spec.ranks, MAX_COPIES, |index, kind| {
                let (forward_s, backward_s) = exposed_s[index];
                let unpaired_s = spec.least_unpaired() * kind.both_unpaired_s();
                let passes_s = spec.m() * (kind.load_s() + forward_s + backward_s) + unpaired_s;
                let own_s = [kind.forward_s + forward_s, kind.backward_s + backward_s];
                passes_s + behind_s(kind.params, 0, own_s)
            });
            let added_s = passes_s + behind_s(mean, 1, own_s);
            StateOverhead { at, added_s, fullest_s }
        };
        let mut all: Vec<StateOverhead> = self.undominated.iter().enumerate().map(of).collect();
        all.sort_by(|a, b| a.added_s.total_cmp(&b.added_s));
        all
    }
}
