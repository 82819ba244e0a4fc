//! The schedules by name, and for which counts each exists.

use super::generate::Counts;
use super::{PassTimes, Schedule, ScheduleError, VocabPasses, gpipe, interleaved_1f1b, looped_bfs};
use super::{naive, one_f_one_b, one_f_one_b_with_vocab};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A schedule, by the name it has in plans and on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ScheduleName {
    /// [`naive`]: one device at a time.
    #[serde(rename = "naive")]
    Naive,
    /// [`gpipe`]: all forwards, then all backwards.
    #[serde(rename = "gpipe")]
    GPipe,
    /// [`one_f_one_b`]: one forward, one backward.
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// [`interleaved_1f1b`]: 1F1B over several chunks a device.
    #[serde(rename = "interleaved_1f1b")]
    Interleaved1F1B,
    /// [`looped_bfs`]: chunk after chunk, breadth first.
    #[serde(rename = "looped_bfs")]
    LoopedBfs,
}

/// How many chunks a device a schedule has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkRule {
    /// This many.
    Exactly(usize),
    /// This many or more.
    AtLeast(usize),
}

impl ChunkRule {
    /// Whether `chunks` obeys the rule.
    pub fn allows(self, chunks: usize) -> bool {
        self.nearest(chunks) == chunks
    }

    /// The allowed number of chunks nearest to `chunks`.
    pub fn nearest(self, chunks: usize) -> usize {
        match self {
            Self::Exactly(only) => only,
            Self::AtLeast(least) => chunks.max(least),
        }
    }
}

impl fmt::Display for ChunkRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exactly(only) => write!(f, "exactly {only}"),
            Self::AtLeast(least) => write!(f, "at least {least}"),
        }
    }
}

impl ScheduleName {
    /// All schedules, simplest first.
    pub const ALL: [Self; 5] =
        [Self::Naive, Self::GPipe, Self::OneFOneB, Self::Interleaved1F1B, Self::LoopedBfs];

    /// The name users type.
    pub fn name(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::GPipe => "gpipe",
            Self::OneFOneB => "1f1b",
            Self::Interleaved1F1B => "interleaved_1f1b",
            Self::LoopedBfs => "looped_bfs",
        }
    }

    /// The schedule with this name.
    ///
    /// # Errors
    /// There is none; the error lists those there are.
    pub fn parse(name: &str) -> Result<Self, ScheduleError> {
        let found = Self::ALL.into_iter().find(|schedule| schedule.name() == name);
        found.ok_or_else(|| ScheduleError::Unknown { name: name.to_owned() })
    }

    /// How many chunks a device the schedule has. One chunk of `interleaved_1f1b` would be `1f1b`.
    pub fn chunk_rule(self) -> ChunkRule {
        match self {
            Self::Naive | Self::GPipe | Self::OneFOneB => ChunkRule::Exactly(1),
            Self::Interleaved1F1B => ChunkRule::AtLeast(2),
            Self::LoopedBfs => ChunkRule::AtLeast(1),
        }
    }

    /// Micro-batches that a schedule asked for with `micro_batches` really has: `naive` runs the
    /// whole batch as one.
    pub fn micro_batches_run(self, micro_batches: usize) -> usize {
        if self == Self::Naive { 1 } else { micro_batches }
    }

    /// Whether the schedule exists for these counts.
    ///
    /// # Errors
    /// Says what it needs and the nearest numbers that would do.
    pub fn check(
        self,
        devices: usize,
        micro_batches: usize,
        chunks: usize,
    ) -> Result<(), ScheduleError> {
        Counts::new(devices, micro_batches, chunks)?;
        self.check_chunks(chunks)?;
        match self {
            Self::Interleaved1F1B => self.check_divisible(devices, micro_batches),
            _ => Ok(()),
        }
    }

    fn check_chunks(self, chunks: usize) -> Result<(), ScheduleError> {
        let rule = self.chunk_rule();
        if rule.allows(chunks) {
            return Ok(());
        }
        let nearest = rule.nearest(chunks);
        Err(ScheduleError::Chunks { schedule: self, rule: rule.to_string(), chunks, nearest })
    }

    fn check_divisible(self, devices: usize, micro_batches: usize) -> Result<(), ScheduleError> {
        if micro_batches.is_multiple_of(devices) {
            return Ok(());
        }
        let below = micro_batches / devices * devices;
        let nearest = [below, below + devices].into_iter().filter(|&m| m > 0).collect();
        Err(ScheduleError::MicroBatches { schedule: self, micro_batches, devices, nearest })
    }

    /// The schedule for these counts; see [`Self::micro_batches_run`] for `naive`.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn build(
        self,
        devices: usize,
        micro_batches: usize,
        chunks: usize,
    ) -> Result<Schedule, ScheduleError> {
        self.check(devices, micro_batches, chunks)?;
        match self {
            Self::Naive => naive(devices),
            Self::GPipe => gpipe(devices, micro_batches),
            Self::OneFOneB => one_f_one_b(devices, micro_batches),
            Self::Interleaved1F1B => interleaved_1f1b(devices, micro_batches, chunks),
            Self::LoopedBfs => looped_bfs(devices, micro_batches, chunks),
        }
    }

    /// Whether the schedule can also run the passes of a vocabulary split over its devices.
    pub fn takes_vocab(self) -> bool {
        self == Self::OneFOneB
    }

    /// The schedule for these counts with vocabulary passes, placed where `times` makes them ready.
    ///
    /// # Errors
    /// As [`Self::check`], or the schedule takes no vocabulary passes.
    pub fn build_with_vocab(
        self,
        devices: usize,
        micro_batches: usize,
        chunks: usize,
        vocab: VocabPasses,
        times: PassTimes,
    ) -> Result<Schedule, ScheduleError> {
        self.check(devices, micro_batches, chunks)?;
        if self.takes_vocab() {
            one_f_one_b_with_vocab(devices, micro_batches, vocab, times)
        } else {
            Err(ScheduleError::NoVocab { schedule: self, vocab: vocab.name() })
        }
    }
}

impl fmt::Display for ScheduleName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
