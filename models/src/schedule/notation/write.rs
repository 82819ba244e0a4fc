//! From passes to text.

use super::repeats::folded;
use super::{Counters, Direction, Word};
use crate::schedule::{Pass, PassOrder};
use std::collections::HashMap;

/// The passes of a pipeline rank in order, as one line: `3xF 125x(F BW) 3xBW`.
///
/// | written | meaning |
/// |---|---|
/// | `F`, `B`, `W`, `BW`, `S`, `S2`, `T`, `IF`, `IB` | a pass on chunk 0 |
/// | `F.1` | on chunk 1 |
/// | `F.1:8` | on chunk 1, of micro-batch 8 |
/// | `F.1:8-` | the same; the next `F.1` are of micro-batches 7, 6, ... |
/// | `4xF` | four times this word |
/// | `F+ BW.1` | a forward, which runs together with the backward behind it |
/// | `3x(F BW)` | three times these words; groups nest |
///
/// Blanks separate words. Most words leave out the micro-batch: passes of the same kind and chunk
/// take micro-batches in turn, from 0. A word that names one begins to count anew. A group is only
/// short for its words written out, so the count goes on from one repeat to the next.
///
/// Where a pipeline rank has one chunk, words leave it out. Where it has several, forwards and
/// backwards name theirs, chunk 0 too: `2x(F.0 BW.1)`.
///
/// [`super::parse_passes`] reads up to [`super::MOST_PASSES`] passes back. The same passes always
/// give the same line; a shorter one may exist. Time and memory grow linearly with the passes.
pub fn write_passes(order: &PassOrder) -> String {
    let zero = order.passes.iter().any(|pass| pass.chunk > 0);
    folded(words(order).into_iter().map(|word| word.text(zero))).join(" ")
}

/// Each pass as a word, which names its micro-batch where the counter is at another one.
fn words(order: &PassOrder) -> Vec<Word> {
    let mut counters = Counters::default();
    let mut pairs = order.pairs.iter().copied().peekable();
    let word = |(place, (pass, after)): (usize, (&Pass, Option<u32>))| {
        let &Pass { kind, micro_batch, chunk } = pass;
        let implied = counters.of(kind, chunk).next == Some(micro_batch);
        let from = (!implied).then(|| (micro_batch, direction(micro_batch, after)));
        let paired = pairs.next_if_eq(&(place as u32)).is_some();
        let word = Word { kind, chunk, from, paired };
        counters.pass(word);
        word
    };
    order.passes.iter().zip(following(&order.passes)).enumerate().map(word).collect()
}

/// Down where the next micro-batch is the one before.
fn direction(micro_batch: u32, after: Option<u32>) -> Direction {
    let down = after.is_some() && after == micro_batch.checked_sub(1);
    if down { Direction::Down } else { Direction::Up }
}

/// For each pass, the micro-batch of the next pass of its kind and chunk.
fn following(passes: &[Pass]) -> Vec<Option<u32>> {
    let mut seen = HashMap::new();
    let behind = |pass: &Pass| seen.insert((pass.kind, pass.chunk), pass.micro_batch);
    let mut following: Vec<Option<u32>> = passes.iter().rev().map(behind).collect();
    following.reverse();
    following
}
