//! From text to passes.

use super::{Counters, Direction, KINDS, MOST_PASSES, Word};
use crate::schedule::PassOrder;
use crate::text::quotable;
use std::str::FromStr;
use thiserror::Error;

/// Why a text is no list of passes.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum NotationError {
    /// A word is no pass.
    #[error(
        "`{word}` is no pass; passes are {}, on chunk 1 F.1, of micro-batch 8 F.1:8 (and down from \
         there F.1:8-), together with the next F+",
        known_kinds()
    )]
    Pass {
        /// The word.
        word: String,
    },
    /// A number of repeats is none.
    #[error("`{word}` does not say 1 to {MOST_PASSES} repeats; 4xF and 3x(F BW) would")]
    Times {
        /// The word.
        word: String,
    },
    /// A bracket begins or ends no group.
    #[error("`{word}` has a bracket that begins or ends no group; 3x(F BW) would be one")]
    Bracket {
        /// The word.
        word: String,
    },
    /// A bracket is never closed.
    #[error("the group that begins with `{word}` lacks its `)`; 3x(F BW) has it")]
    Unclosed {
        /// The word.
        word: String,
    },
    /// A group has no words.
    #[error("the group that ends with `{word}` has no passes; 3x(F BW) has some")]
    Empty {
        /// The word.
        word: String,
    },
    /// There are too many passes.
    #[error("with `{word}` there are more than {MOST_PASSES} passes; that many would do")]
    TooMany {
        /// The word.
        word: String,
    },
    /// Micro-batches are counted past the last or below the first.
    #[error("`{word}` is counted beyond micro-batches 0 to {}; one of them would do", u32::MAX)]
    MicroBatch {
        /// The word.
        word: String,
    },
}

fn known_kinds() -> String {
    KINDS.map(|kind| kind.to_string()).join(", ")
}

/// The passes that a line stands for ([`super::write_passes`] has the notation). Blanks may be any
/// white space.
/// The passes may be unable to run: see [`crate::schedule::Schedule::validate`].
///
/// # Errors
/// A word that is no pass, a bracket without its partner, more than [`MOST_PASSES`] passes, or a
/// micro-batch that no number holds.
pub fn parse_passes(text: &str) -> Result<PassOrder, NotationError> {
    let mut parser = Parser::default();
    text.split_whitespace().try_for_each(|word| parser.read(word))?;
    if let Some(open) = parser.open.pop() {
        return Err(NotationError::Unclosed { word: quotable(open.word) });
    }
    let mut counters = Counters::default();
    let pass = |word: Word| {
        let beyond = || NotationError::MicroBatch { word: word.text(false) };
        counters.pass(word).ok_or_else(beyond)
    };
    let paired = parser.words.iter().enumerate().filter(|(_, word)| word.paired);
    let pairs = paired.map(|(place, _)| place as u32).collect();
    let passes = parser.words.into_iter().map(pass).collect::<Result<_, _>>()?;
    Ok(PassOrder { passes, pairs })
}

#[derive(Default)]
struct Parser<'a> {
    words: Vec<Word>,
    /// Groups that are not closed yet, outermost first.
    open: Vec<Open<'a>>,
}

/// A group that is not closed yet.
struct Open<'a> {
    /// The text that opens it.
    word: &'a str,
    times: usize,
    /// Place of its first word.
    first: usize,
}

impl<'a> Parser<'a> {
    /// Reads a text without blanks, such as `2x(4xF` or `BW))`.
    fn read(&mut self, text: &'a str) -> Result<(), NotationError> {
        let opened = text.rfind('(').map_or(0, |place| place + 1);
        let (opening, rest) = text.split_at(opened);
        let inner = rest.trim_end_matches(')');
        if inner.contains(')') {
            return Err(bracket(text));
        }
        for head in opening.split_terminator('(') {
            let times = head.strip_suffix('x').ok_or_else(|| bracket(text))?;
            self.open.push(Open {
                word: text,
                times: times_of(times, text)?,
                first: self.words.len(),
            });
        }
        if !inner.is_empty() {
            self.push(inner, text)?;
        }
        (inner.len()..rest.len()).try_for_each(|_| self.close(text))
    }

    /// Adds a word, which may be repeated.
    fn push(&mut self, inner: &str, text: &str) -> Result<(), NotationError> {
        let (times, word) = match inner.split_once('x') {
            Some((times, word)) => (times_of(times, text)?, word),
            None => (1, inner),
        };
        let word = parsed(word).ok_or_else(|| NotationError::Pass { word: quotable(text) })?;
        self.room(times, text)?;
        self.words.extend(std::iter::repeat_n(word, times));
        Ok(())
    }

    /// Closes the innermost group and repeats its words.
    fn close(&mut self, text: &str) -> Result<(), NotationError> {
        let Open { times, first, .. } = self.open.pop().ok_or_else(|| bracket(text))?;
        let last = self.words.len();
        if first == last {
            return Err(NotationError::Empty { word: quotable(text) });
        }
        self.room((times - 1).saturating_mul(last - first), text)?;
        (1..times).for_each(|_| self.words.extend_from_within(first..last));
        Ok(())
    }

    /// Whether so many more words may come.
    fn room(&self, more: usize, text: &str) -> Result<(), NotationError> {
        if more > MOST_PASSES - self.words.len() {
            return Err(NotationError::TooMany { word: quotable(text) });
        }
        Ok(())
    }
}

fn bracket(text: &str) -> NotationError {
    NotationError::Bracket { word: quotable(text) }
}

/// How often `text` says to repeat.
fn times_of(times: &str, text: &str) -> Result<usize, NotationError> {
    let valid = number(times).filter(|times| (1..=MOST_PASSES).contains(times));
    valid.ok_or_else(|| NotationError::Times { word: quotable(text) })
}

/// The word for a pass, such as `F.1:8-` or `F+`.
fn parsed(word: &str) -> Option<Word> {
    let (word, paired) = word.strip_suffix('+').map_or((word, false), |word| (word, true));
    let (head, from) = match word.split_once(':') {
        Some((head, from)) => (head, Some(start(from)?)),
        None => (word, None),
    };
    let (kind, chunk) = match head.split_once('.') {
        Some((kind, chunk)) => (kind, number(chunk)?),
        None => (head, 0),
    };
    let kind = KINDS.into_iter().find(|known| known.to_string() == kind)?;
    Some(Word { kind, chunk, from, paired })
}

/// A micro-batch and the direction in which those after it are counted.
fn start(text: &str) -> Option<(u32, Direction)> {
    match text.strip_suffix('-') {
        Some(text) => Some((number(text)?, Direction::Down)),
        None => Some((number(text)?, Direction::Up)),
    }
}

/// A number in digits alone: no sign.
fn number<T: FromStr>(digits: &str) -> Option<T> {
    let plain = digits.bytes().all(|byte| byte.is_ascii_digit());
    plain.then(|| digits.parse().ok()).flatten()
}
