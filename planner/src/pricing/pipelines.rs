//! Prepared pipelines by schedule and counts: built once, shared by every configuration that uses
//! them.

use crate::partition::{LazyPrepared, OrderMilestones, Pipeline};
use crate::simulate::Prepared;
use models::decisions::{Decisions, Vocab};
use models::schedule::{Pass, PassRatios, Release, Schedule, ScheduleError, ScheduleName};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

/// Everything that distinguishes one pipeline from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PipelineKey {
    /// Schedule.
    pub schedule: ScheduleName,
    /// Pipeline ranks, `p`.
    pub ranks: usize,
    /// Micro-batches, `m`.
    pub micro_batches: usize,
    /// Chunks a rank, `v`.
    pub chunks: usize,
    /// Where the vocabulary layers are.
    pub vocab: Vocab,
    /// Whether ranks update without waiting for one another.
    pub post_validation: bool,
    /// Pass times by which vocabulary passes are placed. Without them the input layer has no passes
    /// of its own.
    pub pass_times: Option<PassRatios>,
}

impl PipelineKey {
    /// The pipeline of the decisions.
    pub fn new(d: &Decisions) -> Self {
        let vocab = if d.vocab.over_pipeline() { d.vocab } else { Vocab::Tensor };
        Self {
            schedule: d.schedule,
            ranks: d.pp as usize,
            micro_batches: d.micro_batches as usize,
            chunks: d.vpp as usize,
            vocab,
            post_validation: d.post_validation,
            pass_times: d.pass_times,
        }
    }

    /// The passes of every rank in order, as they are priced.
    ///
    /// # Errors
    /// The schedule does not exist for these counts.
    pub fn schedule(&self) -> Result<Schedule, ScheduleError> {
        match self.vocab.passes() {
            Some(passes) => {
                let (p, m, v) = (self.ranks, self.micro_batches, self.chunks);
                let times = self.pass_times.map(PassRatios::times);
                let schedule = self.schedule.build_with_vocab(p, m, v, passes, times)?;
                match times {
                    Some(times) if self.vocab != Vocab::Interlaced => {
                        schedule.with_input_passes(times)
                    }
                    _ => Ok(schedule),
                }
            }
            None => self.schedule.build(self.ranks, self.micro_batches, self.chunks),
        }
    }

    /// The pipeline. Its order of passes is prepared on first use, because many pipelines are
    /// pruned without it.
    fn pipeline(self) -> Result<Pipeline, ScheduleError> {
        match self.schedule {
            ScheduleName::OneFOneB => Ok(self.one_f_one_b()),
            ScheduleName::ZbH1 | ScheduleName::ZbH2 if !self.vocab.over_pipeline() => {
                Ok(self.zero_bubble())
            }
            _ => self.other(),
        }
    }

    /// ZB-H1 and ZB-H2, whose orders are not built before they are priced.
    fn zero_bubble(self) -> Pipeline {
        let is_h2 = self.schedule == ScheduleName::ZbH2;
        let most = if is_h2 { 2 * self.ranks - 1 } else { self.ranks };
        let counts = (self.ranks, self.micro_batches, 1);
        let milestones = (0..self.ranks)
            .filter_map(|i| OrderMilestones::counted(self.schedule, counts, i, None));
        Pipeline {
            in_flight: vec![vec![vec![most.min(self.micro_batches) as u32]]; self.ranks],
            splits_backward: true,
            one_f_one_b: false,
            milestones: milestones.collect(),
            ..self.one_f_one_b()
        }
    }

    /// 1F1B, whose order is not built before it is priced.
    fn one_f_one_b(self) -> Pipeline {
        let held = |rank: usize| vec![vec![self.held_by_1f1b(rank) as u32]];
        Pipeline {
            prepared: LazyLock::new(Box::new(move || prepare(&self.approved()))),
            ranks: self.ranks,
            micro_batches: self.micro_batches,
            rank_of: (0..self.ranks).collect(),
            chunk_of: vec![0; self.ranks],
            bidirectional: false,
            in_flight: (0..self.ranks).map(held).collect(),
            splits_backward: false,
            paired: vec![],
            post_validation: self.post_validation,
            one_f_one_b: true,
            forwards_first: false,
            milestones: vec![],
        }
    }

    /// Vocabulary passes are inserted when the order is first priced: this takes far longer than
    /// the order of the other passes, which is all that bounds need.
    fn other(self) -> Result<Pipeline, ScheduleError> {
        let vocab = self.vocab.passes();
        let is_fixed = self.pass_times.is_none() || !self.schedule.room_depends_on_times();
        let room = vocab.filter(|_| is_fixed);
        let schedule = match room {
            Some(vocab) => {
                let (p, m, v) = (self.ranks, self.micro_batches, self.chunks);
                self.schedule.build_with_room(p, m, v, vocab)?
            }
            None => self.schedule()?,
        };
        // With two copies of a stage no rank runs all micro-batches of a chunk.
        let has_milestones = !self.schedule.is_whole() && schedule.layout.copies() == 1;
        let milestones = |rank| OrderMilestones::of(&schedule, rank);
        let ranks = if has_milestones { self.ranks } else { 0 };
        let milestones = (0..ranks).map(milestones).collect();
        let forwards_first = matches!(self.schedule, ScheduleName::GPipe | ScheduleName::Naive);
        let pipeline = of_schedule(schedule, self.post_validation);
        let prepared: LazyPrepared = match room {
            Some(_) => LazyLock::new(Box::new(move || prepare(&self.approved()))),
            None => pipeline.prepared,
        };
        Ok(Pipeline { prepared, milestones, forwards_first, ..pipeline })
    }

    /// Micro-batches that a rank of 1F1B holds: `p − i`, more with vocabulary passes.
    fn held_by_1f1b(self, rank: usize) -> usize {
        let plain = self.ranks - rank;
        let held = self.vocab.passes().map_or(plain, |passes| passes.in_flight(plain));
        held.min(self.micro_batches)
    }

    /// The schedule of a key with valid counts.
    ///
    /// # Panics
    /// The generator breaks its own rules, which is a bug.
    fn approved(&self) -> Schedule {
        self.schedule().unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }
}

/// The pipeline of any valid order, without milestones.
pub(super) fn of_schedule(schedule: Schedule, post_validation: bool) -> Pipeline {
    let stages = schedule.stages();
    let held = |rank| schedule.max_in_flight(rank, Release::AtW);
    Pipeline {
        ranks: schedule.ranks,
        micro_batches: schedule.micro_batches,
        rank_of: (0..stages).map(|stage| schedule.rank_of(stage)).collect(),
        chunk_of: (0..stages).map(|stage| schedule.chunk_of(stage)).collect(),
        bidirectional: schedule.layout.copies() > 1,
        in_flight: (0..schedule.ranks).map(held).collect(),
        splits_backward: schedule.splits_backward(),
        paired: paired(&schedule),
        post_validation,
        one_f_one_b: false,
        forwards_first: false,
        milestones: vec![],
        prepared: LazyLock::new(Box::new(move || prepare(&schedule))),
    }
}

/// By rank and chunk, forwards and backwards in pairs; empty without pairs.
fn paired(schedule: &Schedule) -> Vec<Vec<[u32; 2]>> {
    let of_rank = |(order, pairs): (&Vec<Pass>, &Vec<u32>)| {
        let mut paired = vec![[0; 2]; schedule.chunks];
        for &place in pairs {
            for part in 0..2 {
                paired[usize::from(order[place as usize + part].chunk)][part] += 1;
            }
        }
        paired
    };
    match schedule.pairs.iter().all(Vec::is_empty) {
        true => vec![],
        false => schedule.passes.iter().zip(&schedule.pairs).map(of_rank).collect(),
    }
}

/// # Panics
/// The order cannot run, which is a bug in its generator.
fn prepare(schedule: &Schedule) -> Prepared {
    Prepared::new(schedule).unwrap_or_else(|error| panic!("{schedule:?}: {error}"))
}

/// Cache of pipelines shared between threads. It keeps the most recently made, up to [`MOST_KEPT`]
/// passes in total.
#[derive(Debug, Default)]
pub struct Pipelines(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    made: HashMap<PipelineKey, Arc<OnceLock<Arc<Pipeline>>>>,
    /// Oldest first.
    order: VecDeque<PipelineKey>,
    passes: usize,
}

impl Pipelines {
    /// The pipeline of a key whose counts the schedule accepts, built on first use.
    ///
    /// # Panics
    /// The generator breaks its own rules, which is a bug.
    pub fn get(&self, key: PipelineKey) -> Arc<Pipeline> {
        let make = || {
            let made = key.pipeline();
            Arc::new(made.unwrap_or_else(|error| panic!("{key:?}: {error}")))
        };
        // Built outside the lock, so that other threads are not held up.
        Arc::clone(self.place(key).get_or_init(make))
    }

    /// The slot of a key's pipeline, built or not.
    fn place(&self, key: PipelineKey) -> Arc<OnceLock<Arc<Pipeline>>> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = kept.made.get(&key) {
            return Arc::clone(place);
        }
        kept.passes += key.passes();
        while kept.passes > MOST_KEPT {
            let Some(oldest) = kept.order.pop_front() else { break };
            kept.made.remove(&oldest);
            kept.passes -= oldest.passes();
        }
        kept.order.push_back(key);
        Arc::clone(kept.made.entry(key).or_default())
    }
}

impl PipelineKey {
    /// Approximate number of passes.
    fn passes(&self) -> usize {
        let of_vocab = self.vocab.passes().map_or(0, |passes| passes.kinds().len());
        let of_input = if self.pass_times.is_some() { 2 } else { 0 };
        self.ranks * self.micro_batches * (2 * self.chunks + of_vocab + of_input)
    }
}

/// Most passes kept over all pipelines, at some twenty bytes each.
const MOST_KEPT: usize = 1 << 21;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_flight_counts_agree_with_the_schedule() {
        let vocabs = [Vocab::Tensor, Vocab::ParallelNaive, Vocab::Parallel1, Vocab::Parallel2];
        let one_f_one_b = vocabs.map(|vocab| (ScheduleName::OneFOneB, vocab));
        let split = [ScheduleName::ZbH1, ScheduleName::ZbH2].map(|name| (name, Vocab::Tensor));
        for (ranks, micro_batches) in [(2, 1), (2, 3), (3, 4), (4, 4), (4, 9), (5, 20)] {
            for (schedule, vocab) in one_f_one_b.into_iter().chain(split) {
                let key = PipelineKey {
                    schedule,
                    ranks,
                    micro_batches,
                    chunks: 1,
                    vocab,
                    post_validation: false,
                    pass_times: None,
                };
                let pipeline = key.pipeline().unwrap();
                let schedule = key.schedule().unwrap();
                for rank in 0..ranks {
                    let held = schedule.max_in_flight(rank, Release::AtW);
                    assert_eq!(pipeline.in_flight[rank], held, "{key:?} rank {rank}");
                    assert_eq!(pipeline.rank_of[rank], schedule.rank_of(rank));
                }
            }
        }
    }
}
