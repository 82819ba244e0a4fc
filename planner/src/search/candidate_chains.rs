//! Lower bounds on a candidate partition by chains of passes, from its columns.

use crate::partition::Column;
use crate::partition::bidirectional::Bidirectional;
use crate::partition::milestones::{ArrivalTimes, OwnSeconds};
use crate::pricing::Configuration;
use models::schedule::ScheduleName;

impl Configuration<'_> {
    /// The longest chain of passes for these columns, s: see [`crate::bounds::candidates`]. A chain
    /// may also end with the reductions of its own rank.
    pub(super) fn chain_s(&self, columns: &[Column]) -> f64 {
        if self.decisions.layout().copies() > 1 {
            return self.bidirectional_chain_s(columns);
        }
        if !self.decisions.schedule.is_whole() {
            return self.milestone_chain_s(columns);
        }
        let ranks = self.ranks();
        let m = self.micro_batches();
        let (mut down_s, mut back_s, mut longest_s, mut step_s) = (0.0, 0.0, 0.0_f64, 0.0_f64);
        let first_tail_s: f64 = columns.iter().step_by(ranks).map(|column| column.tail_s).sum();
        for rank in 0..ranks {
            // Stage j·p + i is chunk j of rank i.
            let own = || columns.iter().skip(rank).step_by(ranks);
            let vocab_s = self.vocab_path().output_s;
            let own_s = down_s + m * (own().map(Column::load_s).sum::<f64>() + vocab_s);
            let tail_s = own().map(|column| column.tail_s).sum::<f64>();
            longest_s = longest_s.max(own_s + tail_s.max(back_s + first_tail_s));
            step_s = step_s.max(own().map(|column| column.step_s).sum());
            let link_s = self.link_after_s(rank);
            down_s += columns[rank].forward_s + link_s;
            back_s += columns[rank].backward_s + link_s;
        }
        longest_s.max(self.looped_path_s(columns) + first_tail_s) + step_s
    }

    /// Breadth-first loops: the forward and backward path of one micro-batch, with the passes of
    /// the others on the stages where they take longest, s.
    pub(super) fn looped_path_s(&self, columns: &[Column]) -> f64 {
        if self.decisions.schedule != ScheduleName::LoopedBfs {
            return 0.0;
        }
        let longest_s = |value: fn(&Column) -> f64| columns.iter().map(value).fold(0.0, f64::max);
        let others_s = longest_s(|column| column.forward_s) + longest_s(|column| column.backward_s);
        let path_s: f64 = columns.iter().map(Column::load_s).sum();
        let links_s: f64 = (0..columns.len()).map(|stage| self.link_after_s(stage)).sum();
        path_s + 2.0 * links_s + (self.micro_batches() - 1.0) * others_s
    }

    /// The longest chain of a bidirectional pipeline; see [`crate::partition::bidirectional`].
    pub(super) fn bidirectional_chain_s(&self, columns: &[Column]) -> f64 {
        let (down_s, _) = self.paths_s(columns);
        let seconds: Vec<_> =
            columns.iter().map(|c| [c.forward_s, c.backward_s, c.weight_s]).collect();
        let runs = self.micro_batches() / self.decisions.layout().copies() as f64;
        let bidirectional = Bidirectional { stages: &seconds, down_s: &down_s, runs };
        let both_s = |rank: usize, value: fn(&Column) -> f64| -> f64 {
            self.stages_of(rank).map(|stage| value(&columns[stage])).sum()
        };
        let (mut longest_s, mut step_s) = (0.0_f64, 0.0_f64);
        for rank in bidirectional.pairs() {
            let tail_s = both_s(rank, |column| column.tail_s);
            let end_s = bidirectional.end_s(rank, 0.0) + self.unpaired_s(rank, columns);
            longest_s = longest_s.max(end_s + tail_s);
            step_s = step_s.max(both_s(rank, |column| column.step_s));
        }
        longest_s + step_s
    }

    /// What the passes of a rank that are no part of a pair take longer than in pairs, s.
    pub(super) fn unpaired_s(&self, rank: usize, columns: &[Column]) -> f64 {
        let pipeline = self.pipeline();
        if !pipeline.has_pairs() {
            return 0.0;
        }
        let of = |(stage, chunk): (usize, usize)| {
            let counts = pipeline.alone(rank, chunk).into_iter().zip(columns[stage].unpaired_s);
            counts.map(|(count, unpaired_s)| count * unpaired_s).sum::<f64>()
        };
        pipeline.stages_on(rank).map(of).sum()
    }

    /// By stage, the forwards and the backwards of the stages before it with the links between, s.
    pub(super) fn paths_s(&self, columns: &[Column]) -> (Vec<f64>, Vec<f64>) {
        let (mut down_s, mut back_s) = (vec![0.0], vec![0.0]);
        for (stage, column) in columns.iter().enumerate() {
            let link_s = self.link_after_s(stage);
            down_s.push(down_s[stage] + column.forward_s + link_s);
            back_s.push(back_s[stage] + column.backward_s + link_s);
        }
        (down_s, back_s)
    }

    /// The longest chain between milestones; see [`crate::partition::milestones`].
    pub(super) fn milestone_chain_s(&self, columns: &[Column]) -> f64 {
        let (ranks, stages) = (self.ranks(), columns.len());
        let link_s = |stage: usize| self.link_after_s(stage);
        let (down_s, back_s) = self.paths_s(columns);
        let layout = self.decisions.schedule.layout(self.decisions.vpp as usize);
        let (mut longest_s, mut step_s) = (0.0_f64, 0.0_f64);
        for (rank, milestones) in self.pipeline().milestones.iter().enumerate() {
            let stage_of = |chunk: usize| layout.stage_of(ranks, rank, chunk);
            let own: Vec<&Column> =
                (0..milestones.chunks.len()).map(|chunk| &columns[stage_of(chunk)]).collect();
            let chunks: Vec<_> =
                own.iter().map(|c| [c.forward_s, c.backward_s, c.weight_s]).collect();
            let seconds = OwnSeconds {
                chunks: &chunks,
                shared: [0.0; 3],
                vocab_s: self.vocab_path().output_s,
            };
            let behind_s = |stage: usize| back_s[stages] - back_s[stage + 1] + link_s(stage);
            let around = ArrivalTimes {
                arrive_s: down_s[rank],
                ready_s: down_s[stages] + behind_s(stage_of(milestones.first_chunk)),
                path_s: link_s(rank) + down_s[stages] - down_s[rank + 1] + behind_s(rank),
            };
            let ends = milestones.ends(&seconds, &around);
            let tail_s: f64 = own.iter().map(|column| column.tail_s).sum();
            let last_s = ends.last_backward_s + back_s[rank];
            longest_s = longest_s.max(ends.own_s + tail_s).max(last_s);
            let unpaired_s = self.unpaired_s(rank, columns);
            if unpaired_s > 0.0 {
                let passes_s = chunks.iter().flatten().sum::<f64>();
                let own_s = around.arrive_s + self.micro_batches() * passes_s + unpaired_s;
                longest_s = longest_s.max(own_s + tail_s);
            }
            step_s = step_s.max(own.iter().map(|column| column.step_s).sum());
        }
        longest_s + step_s
    }
}
