//! Schedules as text: one line per pipeline rank.

use super::{Pass, PassKind, Schedule, ScheduleError};
use crate::text::quotable;
use std::fmt;

impl fmt::Display for PassKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F => "F",
            Self::B => "B",
            Self::W => "W",
            Self::BW => "BW",
            Self::S => "S",
            Self::S2 => "S2",
            Self::T => "T",
            Self::IF => "IF",
            Self::IB => "IB",
        })
    }
}

impl Schedule {
    /// The order of every pipeline rank, one line each: `p0: F0@0 F1@0 BW0@0`, where a pass is its
    /// kind, its micro-batch and, after `@`, its stage. Vocabulary passes have no stage: `S:0`. In
    /// a bidirectional schedule a mark follows passes of the second direction, `F0@3'`, whose
    /// micro-batches also count from 0. Passes that run together are in brackets: `(F3@0&BW1@3)`.
    pub fn orders(&self) -> String {
        let line = |rank| format!("p{rank}: {}\n", self.order_words(rank).join(" "));
        (0..self.passes.len()).map(line).collect()
    }

    /// The passes of one pipeline rank in that notation; none for a pipeline rank that does not
    /// exist.
    pub fn order_words(&self, rank: usize) -> Vec<String> {
        let (Some(passes), Some(pairs)) = (self.passes.get(rank), self.pairs.get(rank)) else {
            return Vec::new();
        };
        let mut words: Vec<String> = Vec::with_capacity(passes.len());
        let mut pairs = pairs.iter().peekable();
        let mut passes = passes.iter().enumerate();
        while let Some((n, &pass)) = passes.next() {
            let word = self.word(rank, pass);
            let paired = pairs.next_if(|&&place| place as usize == n).and_then(|_| passes.next());
            words.push(match paired {
                Some((_, &other)) => format!("({word}&{})", self.word(rank, other)),
                None => word,
            });
        }
        words
    }

    /// The schedule with other orders, a line for each pipeline rank in the notation of
    /// [`Self::order_words`]: forwards and backwards of one direction, none together. The result
    /// may be unable to run: see [`Self::validate`].
    ///
    /// # Errors
    /// A word that is no pass of this schedule.
    pub fn with_orders(self, lines: &[String]) -> Result<Self, ScheduleError> {
        if lines.len() != self.ranks {
            return Err(ScheduleError::RankLists { lists: lines.len(), ranks: self.ranks });
        }
        let line = |(rank, line): (usize, &String)| {
            let word = |word: &str| {
                let refused = || ScheduleError::Word { rank, word: quotable(word) };
                self.pass(rank, word).ok_or_else(refused)
            };
            line.split_whitespace().map(word).collect::<Result<Vec<Pass>, _>>()
        };
        let passes = lines.iter().enumerate().map(line).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { pairs: vec![Vec::new(); self.ranks], passes, ..self })
    }

    /// The pass that a word names.
    fn pass(&self, rank: usize, word: &str) -> Option<Pass> {
        let (head, stage) = word.split_once('@')?;
        let digits = head.find(|letter: char| letter.is_ascii_digit())?;
        let (kind, micro_batch) = head.split_at(digits);
        let kinds = [PassKind::F, PassKind::B, PassKind::W, PassKind::BW];
        let kind = kinds.into_iter().find(|known| known.to_string() == kind)?;
        let (micro_batch, stage) = (micro_batch.parse().ok()?, stage.parse::<usize>().ok()?);
        let chunk = stage / self.ranks;
        let here = chunk < self.chunks && self.stage_of(rank, chunk) == stage;
        here.then_some(Pass { kind, micro_batch, chunk: chunk as u16 })
    }

    fn word(&self, rank: usize, pass: Pass) -> String {
        let Pass { kind, micro_batch, chunk } = pass;
        if !matches!(kind, PassKind::F | PassKind::B | PassKind::W | PassKind::BW) {
            return format!("{kind}:{micro_batch}");
        }
        let stage = self.stage_of(rank, usize::from(chunk));
        match self.direction(micro_batch) {
            0 => format!("{kind}{micro_batch}@{stage}"),
            _ => {
                let first = self.micro_batches.div_ceil(2) as u32;
                format!("{kind}{}@{stage}'", micro_batch - first)
            }
        }
    }
}
