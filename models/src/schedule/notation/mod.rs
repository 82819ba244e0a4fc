//! The passes of one pipeline rank on one short line, such as `3xF 125x(F BW) 3xBW`.
//! [`write_passes`] defines the notation.

mod parse;
mod repeats;
mod write;

pub use parse::{NotationError, parse_passes};
pub use write::write_passes;

use super::{Pass, PassKind};
use std::collections::HashMap;

/// The most passes that [`parse_passes`] makes of a text.
pub const MOST_PASSES: usize = 1 << 22;

const KINDS: [PassKind; 9] = [
    PassKind::F,
    PassKind::B,
    PassKind::W,
    PassKind::BW,
    PassKind::S,
    PassKind::S2,
    PassKind::T,
    PassKind::IF,
    PassKind::IB,
];

/// A pass as it is written.
#[derive(Clone, Copy)]
struct Word {
    kind: PassKind,
    chunk: u16,
    /// Micro-batch and direction, where the word names them.
    from: Option<(u32, Direction)>,
    /// Whether it runs together with the next.
    paired: bool,
}

/// Whether micro-batches are counted up or down.
#[derive(Clone, Copy)]
enum Direction {
    Up,
    Down,
}

impl Direction {
    /// The micro-batch that comes after this one, if there is one.
    fn after(self, micro_batch: u32) -> Option<u32> {
        match self {
            Self::Up => micro_batch.checked_add(1),
            Self::Down => micro_batch.checked_sub(1),
        }
    }
}

impl Word {
    /// The word in letters; `zero` writes chunk 0 where a stage runs the pass.
    fn text(self, zero: bool) -> String {
        let Self { kind, chunk, from, paired } = self;
        let of_stage = matches!(kind, PassKind::F | PassKind::B | PassKind::W | PassKind::BW);
        let with_chunk = chunk > 0 || (zero && of_stage);
        let chunk = if with_chunk { format!(".{chunk}") } else { String::new() };
        let from = from.map_or(String::new(), |(micro_batch, direction)| match direction {
            Direction::Up => format!(":{micro_batch}"),
            Direction::Down => format!(":{micro_batch}-"),
        });
        let paired = if paired { "+" } else { "" };
        format!("{kind}{chunk}{from}{paired}")
    }
}

/// The micro-batches that words without one stand for.
#[derive(Default)]
struct Counters(HashMap<(PassKind, u16), Counter>);

/// Counts the micro-batches of one kind and chunk.
#[derive(Clone, Copy)]
struct Counter {
    /// `None` where no number is left: below 0, or too large for a [`Pass`].
    next: Option<u32>,
    direction: Direction,
}

impl Counters {
    fn of(&mut self, kind: PassKind, chunk: u16) -> &mut Counter {
        let first = Counter { next: Some(0), direction: Direction::Up };
        self.0.entry((kind, chunk)).or_insert(first)
    }

    /// The pass that a word stands for; `None` if no micro-batch is left for it.
    fn pass(&mut self, word: Word) -> Option<Pass> {
        let Word { kind, chunk, from, .. } = word;
        let counter = self.of(kind, chunk);
        if let Some((micro_batch, direction)) = from {
            *counter = Counter { next: Some(micro_batch), direction };
        }
        let micro_batch = counter.next?;
        counter.next = counter.direction.after(micro_batch);
        Some(Pass { kind, micro_batch, chunk })
    }
}
