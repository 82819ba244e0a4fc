//! Critical paths as counts of durations.

use super::costs::{BARRIERS, Durations, Table, VocabDurations};

/// How often each duration occurs on a critical path through a schedule.
///
/// The sum of counts times durations is the makespan. With other durations the sum is a lower bound
/// on the makespan of the same order, because the makespan is the maximum of such sums over all
/// paths. It serves as a linear cut.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CriticalPath {
    /// Forwards, by stage.
    pub forward_count: Vec<u32>,
    /// Backwards (whole or to inputs), by stage.
    pub backward_count: Vec<u32>,
    /// Weight gradients (split off or in a whole backward), by stage.
    pub weight_count: Vec<u32>,
    /// Forwards and whole backwards as parts of pairs, by stage.
    pub paired_count: [Vec<u32>; 2],
    /// Transfers between stages `j` and `j + 1`, both directions together. The last entry is
    /// unused.
    pub link_count: Vec<u32>,
    /// `S`, by rank.
    pub vocab_first_count: Vec<u32>,
    /// `S2`, by rank.
    pub vocab_middle_count: Vec<u32>,
    /// `T`, by rank.
    pub vocab_last_count: Vec<u32>,
    /// `IF` and `IB`, by rank.
    pub input_count: [Vec<u32>; 2],
    /// Broadcasts, then barriers after `S`, `S2`, `T` and `IF`, then broadcasts before `IB`.
    pub barrier_count: [u32; BARRIERS],
    /// The rank whose last pass (with its tail) ends the iteration.
    pub end_rank: usize,
}

impl CriticalPath {
    pub(super) fn new(table: &Table, counts: &[u32], end_rank: usize) -> Self {
        let by_stage = |row| counts[table.stage_row(row)..][..table.stages].to_vec();
        let by_rank = |row| counts[table.rank_row(row)..][..table.ranks].to_vec();
        let with_whole = |row| -> Vec<u32> {
            let (apart, whole): (Vec<u32>, Vec<u32>) = (by_stage(row), by_stage(4));
            apart.iter().zip(whole).map(|(apart, whole)| apart + whole).collect()
        };
        let mut barrier_count = [0; BARRIERS];
        barrier_count.copy_from_slice(&counts[table.barriers()..][..BARRIERS]);
        Self {
            forward_count: by_stage(0),
            backward_count: with_whole(1),
            weight_count: with_whole(2),
            paired_count: paired_counts(table, counts),
            link_count: by_stage(3),
            vocab_first_count: by_rank(0),
            vocab_middle_count: by_rank(1),
            vocab_last_count: by_rank(2),
            input_count: [by_rank(3), by_rank(4)],
            barrier_count,
            end_rank,
        }
    }

    /// Length of the path with these durations, s, without any tail.
    pub fn length_s(&self, durations: &Durations) -> f64 {
        dot(&self.paired_count[0], &durations.paired[0])
            + dot(&self.paired_count[1], &durations.paired[1])
            + dot(&self.forward_count, &durations.forward)
            + dot(&self.backward_count, &durations.backward)
            + dot(&self.weight_count, &durations.weight)
            + dot(&self.link_count, &durations.link_s)
            + self.vocab_s(&durations.vocab)
    }

    /// The vocabulary passes on the path, with their barriers and broadcasts, s.
    fn vocab_s(&self, vocab: &VocabDurations) -> f64 {
        dot(&self.vocab_first_count, &vocab.first)
            + dot(&self.vocab_middle_count, &vocab.middle)
            + dot(&self.vocab_last_count, &vocab.last)
            + dot(&self.input_count[0], &vocab.input.forward)
            + dot(&self.input_count[1], &vocab.input.backward)
            + dot(&self.barrier_count, &vocab.barriers())
    }
}

fn paired_counts(table: &Table, counts: &[u32]) -> [Vec<u32>; 2] {
    let mut paired = [vec![0; table.stages], vec![0; table.stages]];
    for (stages, &count) in table.pairs.iter().zip(&counts[table.pair_row()..]) {
        paired.iter_mut().zip(stages).for_each(|(of, &stage)| of[stage] += count);
    }
    paired
}

fn dot(counts: &[u32], durations_s: &[f64]) -> f64 {
    counts.iter().zip(durations_s).map(|(&count, duration_s)| f64::from(count) * duration_s).sum()
}
