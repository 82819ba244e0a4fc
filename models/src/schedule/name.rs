//! The schedules by name, and the counts for which each exists.

use super::generate::Counts;
use super::overlapped_1f1b;
use super::{AutoCosts, PassTimes, Schedule, ScheduleError, StageLayout, VocabPasses, vocab};
use super::{chimera, dualpipe, dualpipe_v, v_1f1b, v_half, v_min, zb_auto, zb_h1, zb_h2, zb_v};
use super::{gpipe, interleaved_1f1b, interleaved_zb, looped_bfs, naive, one_f_one_b};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A schedule, by the name it has in plans and on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ScheduleName {
    /// [`naive`]: one pipeline rank at a time.
    #[serde(rename = "naive")]
    Naive,
    /// [`gpipe`]: all forwards, then all backwards.
    #[serde(rename = "gpipe")]
    GPipe,
    /// [`one_f_one_b`]: one forward, one backward.
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// [`interleaved_1f1b`]: 1F1B over several chunks per pipeline rank.
    #[serde(rename = "interleaved_1f1b")]
    Interleaved1F1B,
    /// [`overlapped_1f1b`]: the same with forwards and backwards in pairs.
    #[serde(rename = "overlapped_1f1b")]
    Overlapped1F1B,
    /// [`looped_bfs`]: chunk after chunk, breadth first.
    #[serde(rename = "looped_bfs")]
    LoopedBfs,
    /// [`zb_h1`]: 1F1B with weight gradients in its bubble.
    #[serde(rename = "zb_h1")]
    ZbH1,
    /// [`zb_h2`]: the same without bubble, for twice the memory.
    #[serde(rename = "zb_h2")]
    ZbH2,
    /// [`zb_auto`]: the best order found for given times and memory.
    #[serde(rename = "zb_auto")]
    ZbAuto,
    /// [`interleaved_zb`]: interleaved 1F1B with weight gradients in its bubble.
    #[serde(rename = "interleaved_zb")]
    InterleavedZb,
    /// [`zb_v`]: zero bubble on a V of stages.
    #[serde(rename = "zb_v")]
    ZbV,
    /// [`v_half`]: half the activations of 1F1B on a V of stages.
    #[serde(rename = "v_half")]
    VHalf,
    /// [`v_min`]: a third of them.
    #[serde(rename = "v_min")]
    VMin,
    /// [`v_1f1b`]: 1F1B on a V of stages.
    #[serde(rename = "v_1f1b")]
    V1F1B,
    /// [`dualpipe`]: micro-batches from both ends, forwards behind backwards.
    #[serde(rename = "dualpipe")]
    DualPipe,
    /// [`dualpipe_v`]: the same on a V of stages.
    #[serde(rename = "dualpipe_v")]
    DualPipeV,
    /// [`chimera`]: 1F1B from both ends.
    #[serde(rename = "chimera")]
    Chimera,
}

/// Numbers of chunks per pipeline rank that a schedule allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkRule {
    /// This many.
    Exactly(usize),
    /// This many or more.
    AtLeast(usize),
    /// One, or two on a V of stages.
    OneOrTwo,
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
            Self::OneOrTwo => chunks.clamp(1, 2),
        }
    }
}

impl fmt::Display for ChunkRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exactly(1) => f.write_str("exactly 1 chunk"),
            Self::Exactly(only) => write!(f, "exactly {only} chunks"),
            Self::AtLeast(1) => f.write_str("at least 1 chunk"),
            Self::AtLeast(least) => write!(f, "at least {least} chunks"),
            Self::OneOrTwo => f.write_str("1 or 2 chunks"),
        }
    }
}

impl ScheduleName {
    /// All schedules, simplest first.
    pub const ALL: [Self; 17] = [
        Self::Naive,
        Self::GPipe,
        Self::OneFOneB,
        Self::Interleaved1F1B,
        Self::Overlapped1F1B,
        Self::LoopedBfs,
        Self::ZbH1,
        Self::ZbH2,
        Self::ZbAuto,
        Self::InterleavedZb,
        Self::ZbV,
        Self::VHalf,
        Self::VMin,
        Self::V1F1B,
        Self::DualPipe,
        Self::DualPipeV,
        Self::Chimera,
    ];

    /// Those that keep backward whole and have one copy of each stage, in stages laid out
    /// round-robin, without pairs.
    pub const WHOLE: [Self; 5] =
        [Self::Naive, Self::GPipe, Self::OneFOneB, Self::Interleaved1F1B, Self::LoopedBfs];

    /// Whether it is one of [`Self::WHOLE`].
    pub fn is_whole(self) -> bool {
        Self::WHOLE.contains(&self)
    }

    /// The name users type.
    pub fn name(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::GPipe => "gpipe",
            Self::OneFOneB => "1f1b",
            Self::Interleaved1F1B => "interleaved_1f1b",
            Self::Overlapped1F1B => "overlapped_1f1b",
            Self::LoopedBfs => "looped_bfs",
            Self::ZbH1 => "zb_h1",
            Self::ZbH2 => "zb_h2",
            Self::ZbAuto => "zb_auto",
            Self::InterleavedZb => "interleaved_zb",
            Self::ZbV => "zb_v",
            Self::VHalf => "v_half",
            Self::VMin => "v_min",
            Self::V1F1B => "v_1f1b",
            Self::DualPipe => "dualpipe",
            Self::DualPipeV => "dualpipe_v",
            Self::Chimera => "chimera",
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

    /// How many chunks per pipeline rank the schedule has. One chunk of `interleaved_1f1b` would be
    /// `1f1b`, one of `interleaved_zb` `zb_h1`.
    pub fn chunk_rule(self) -> ChunkRule {
        match self {
            Self::Naive | Self::GPipe | Self::OneFOneB | Self::ZbH1 | Self::ZbH2 => {
                ChunkRule::Exactly(1)
            }
            Self::Interleaved1F1B | Self::Overlapped1F1B | Self::InterleavedZb => {
                ChunkRule::AtLeast(2)
            }
            Self::LoopedBfs => ChunkRule::AtLeast(1),
            Self::ZbAuto => ChunkRule::OneOrTwo,
            Self::ZbV | Self::VHalf | Self::VMin | Self::V1F1B => ChunkRule::Exactly(2),
            Self::DualPipe | Self::DualPipeV | Self::Chimera => ChunkRule::Exactly(2),
        }
    }

    /// Micro-batches that the schedule runs when `micro_batches` are asked for: `naive` runs the
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
        ranks: usize,
        micro_batches: usize,
        chunks: usize,
    ) -> Result<(), ScheduleError> {
        Counts::new(ranks, micro_batches, chunks)?;
        self.check_chunks(ranks, chunks)?;
        match self {
            Self::Interleaved1F1B | Self::Overlapped1F1B | Self::InterleavedZb => {
                self.check_divisible(ranks, micro_batches)
            }
            Self::Chimera => {
                self.check_even(ranks)?;
                self.check_divisible(ranks, micro_batches)
            }
            Self::DualPipe => {
                self.check_even(ranks)?;
                self.check_filled(ranks, micro_batches, 2)
            }
            Self::DualPipeV => self.check_filled(ranks, micro_batches, 1),
            _ => Ok(()),
        }
    }

    fn check_chunks(self, ranks: usize, chunks: usize) -> Result<(), ScheduleError> {
        let rule = self.chunk_rule();
        // A single pipeline rank has pairs with one chunk, too.
        if rule.allows(chunks) || self == Self::Overlapped1F1B && ranks == 1 {
            return Ok(());
        }
        let nearest = rule.nearest(chunks);
        Err(ScheduleError::Chunks { schedule: self, rule: rule.to_string(), chunks, nearest })
    }

    fn check_divisible(self, ranks: usize, micro_batches: usize) -> Result<(), ScheduleError> {
        if micro_batches.is_multiple_of(ranks) {
            return Ok(());
        }
        let below = micro_batches / ranks * ranks;
        let nearest = [below, below + ranks].into_iter().filter(|&m| m > 0).collect();
        let rule = "divisible by stages";
        Err(ScheduleError::MicroBatches { schedule: self, rule, micro_batches, ranks, nearest })
    }

    /// Whether there are at least twice as many micro-batches as pipeline ranks, in multiples of
    /// `step`.
    fn check_filled(
        self,
        ranks: usize,
        micro_batches: usize,
        step: usize,
    ) -> Result<(), ScheduleError> {
        let least = 2 * ranks;
        let nearest = match micro_batches {
            few if few < least => vec![least],
            odd if !odd.is_multiple_of(step) => vec![odd - 1, odd + 1],
            _ => return Ok(()),
        };
        let even = "even in number, twice as many as stages or more";
        let rule = if step == 2 { even } else { "twice as many as stages or more" };
        Err(ScheduleError::MicroBatches { schedule: self, rule, micro_batches, ranks, nearest })
    }

    fn check_even(self, ranks: usize) -> Result<(), ScheduleError> {
        if ranks.is_multiple_of(2) {
            return Ok(());
        }
        let nearest = [ranks - 1, ranks + 1].into_iter().filter(|&p| p > 0).collect();
        Err(ScheduleError::Ranks { schedule: self, ranks, nearest })
    }

    /// The schedule for these counts; see [`Self::micro_batches_run`] for `naive`. The order of
    /// `zb_auto` is that for equal times and the memory of 1F1B; [`zb_auto`] has others.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn build(
        self,
        ranks: usize,
        micro_batches: usize,
        chunks: usize,
    ) -> Result<Schedule, ScheduleError> {
        self.check(ranks, micro_batches, chunks)?;
        match self {
            Self::Naive => naive(ranks),
            Self::GPipe => gpipe(ranks, micro_batches),
            Self::OneFOneB => one_f_one_b(ranks, micro_batches),
            Self::Interleaved1F1B => interleaved_1f1b(ranks, micro_batches, chunks),
            Self::Overlapped1F1B => overlapped_1f1b(ranks, micro_batches, chunks),
            Self::LoopedBfs => looped_bfs(ranks, micro_batches, chunks),
            Self::ZbH1 => zb_h1(ranks, micro_batches),
            Self::ZbH2 => zb_h2(ranks, micro_batches),
            Self::ZbAuto => zb_auto(ranks, micro_batches, chunks, AutoCosts::even(ranks)),
            Self::InterleavedZb => interleaved_zb(ranks, micro_batches, chunks),
            Self::ZbV => zb_v(ranks, micro_batches),
            Self::VHalf => v_half(ranks, micro_batches),
            Self::VMin => v_min(ranks, micro_batches),
            Self::V1F1B => v_1f1b(ranks, micro_batches),
            Self::DualPipe => dualpipe(ranks, micro_batches),
            Self::DualPipeV => dualpipe_v(ranks, micro_batches),
            Self::Chimera => chimera(ranks, micro_batches),
        }
    }

    /// The hand-made schedule with the same order as this one: `zb_auto` for equal times and the
    /// memory of 1F1B is ZB-H1, on a V ZB-V, given enough micro-batches. The first pipeline rank
    /// idles until the first micro-batch returns, except for the forwards that memory allows: at
    /// least `(2p − 1)F − pF`, which is all that ZB-H1 idles. On a V that is nothing, as in ZB-V.
    pub fn made_by_hand(self, ranks: usize, micro_batches: usize, chunks: usize) -> Option<Self> {
        match (self, chunks) {
            (Self::ZbAuto, 1) if micro_batches >= ranks => Some(Self::ZbH1),
            (Self::ZbAuto, 2) if micro_batches + 1 >= 2 * ranks => Some(Self::ZbV),
            _ => None,
        }
    }

    /// Which pipeline rank holds which stage.
    pub fn layout(self, chunks: usize) -> StageLayout {
        match self {
            Self::ZbV | Self::VHalf | Self::VMin | Self::V1F1B | Self::DualPipeV => StageLayout::V,
            Self::ZbAuto if chunks == 2 => StageLayout::V,
            Self::DualPipe | Self::Chimera => StageLayout::Bidirectional,
            _ => StageLayout::RoundRobin,
        }
    }

    /// Whether every forward pass of a pipeline rank comes before its first backward pass.
    pub fn runs_forwards_first(self) -> bool {
        matches!(self, Self::Naive | Self::GPipe | Self::LoopedBfs)
    }

    /// Whether forwards run together with backwards of other micro-batches, as pairs.
    pub fn has_pairs(self) -> bool {
        matches!(self, Self::DualPipe | Self::DualPipeV | Self::Overlapped1F1B)
    }

    /// Whether backward to weights has passes of its own.
    pub fn splits_backward(self) -> bool {
        !self.is_whole() && !matches!(self, Self::V1F1B | Self::Chimera | Self::Overlapped1F1B)
    }

    /// Whether the schedule can also run the passes of a vocabulary split over its pipeline ranks.
    pub fn takes_vocab(self) -> bool {
        Self::VOCAB.contains(&self)
    }

    /// Whether known times may also change the order of passes that leaves room for vocabulary
    /// passes ([`Self::build_with_room`]), and not only the places of these.
    pub fn room_depends_on_times(self) -> bool {
        matches!(self, Self::VHalf | Self::VMin)
    }

    /// Schedules that can run the passes of a vocabulary split over their pipeline ranks.
    pub const VOCAB: [Self; 13] = [
        Self::GPipe,
        Self::OneFOneB,
        Self::Interleaved1F1B,
        Self::LoopedBfs,
        Self::ZbH1,
        Self::ZbH2,
        Self::InterleavedZb,
        Self::VHalf,
        Self::VMin,
        Self::ZbAuto,
        Self::ZbV,
        Self::V1F1B,
        Self::DualPipeV,
    ];

    /// The schedule for these counts with vocabulary passes, placed where `times` makes them ready;
    /// without times, in an order that suits any. It holds one micro-batch more for each barrier,
    /// except breadth-first schedules, which hold all.
    ///
    /// # Errors
    /// As [`Self::check`], or the schedule takes no vocabulary passes.
    pub fn build_with_vocab(
        self,
        ranks: usize,
        micro_batches: usize,
        chunks: usize,
        vocab: VocabPasses,
        times: Option<PassTimes>,
    ) -> Result<Schedule, ScheduleError> {
        let room = self.build_with_room(ranks, micro_batches, chunks, vocab)?;
        if vocab == VocabPasses::Interlaced {
            return Ok(room);
        }
        let counts = Counts::new(ranks, micro_batches, chunks)?;
        let others = match times {
            Some(times) => vocab::other_orders(self, counts, (&room, vocab), times)?,
            None => vec![],
        };
        let all: Vec<Schedule> = std::iter::once(room).chain(others).collect();
        vocab::insert(&all, vocab, times)
    }

    /// The forwards and backwards of [`Self::build_with_vocab`] without known times, in order.
    /// Inserting vocabulary passes takes ten times as long. Interlaced ones are in it already.
    ///
    /// # Errors
    /// As [`Self::check`], or the schedule takes no vocabulary passes.
    pub fn build_with_room(
        self,
        ranks: usize,
        micro_batches: usize,
        chunks: usize,
        vocab: VocabPasses,
    ) -> Result<Schedule, ScheduleError> {
        self.check(ranks, micro_batches, chunks)?;
        vocab::with_room(self, Counts::new(ranks, micro_batches, chunks)?, vocab)
    }
}

impl fmt::Display for ScheduleName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
