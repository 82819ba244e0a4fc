//! Attention as tiles: runs of queries, each with a run of keys that it sees.
//!
//! Kernels know positions that follow one another. Where a rank's positions have gaps, or a
//! sequence is several documents, attention is one call for each tile.

use super::attention::Attention;
use super::chunks::Chunk;
use super::context::Context;
use crate::device::Device;
use kernels::attention::{Attention as Shape, ProbabilityDropout};
use std::ops::Range;

/// A run of queries and a run of keys, as this rank and the owner of the keys have them.
pub(super) struct Tile {
    pub shape: Shape,
    /// Rows of the queries.
    pub queries: Range<usize>,
    /// Rows of the keys among those of their owner.
    pub keys: Range<usize>,
}

/// One side of an attention: positions of each sequence, in the order in which they lie.
type Runs<'a> = &'a [Range<usize>];

impl Attention {
    /// The tiles in which a query at one of `own` positions sees a key at one of `others`, with
    /// `heads` query and key/value heads.
    ///
    /// A row's tiles have the same queries whatever the keys, so statistics of queries lie at the
    /// same place for all of them.
    pub(super) fn tiles<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        heads: [usize; 2],
        own: Runs<'_>,
        others: Runs<'_>,
    ) -> Vec<Tile> {
        let (batch, shape) = (ctx.batch, self.shape(ctx, heads));
        let whole = 0..batch.seq_len;
        let rows = |runs: Runs<'_>| runs.iter().map(Range::len).sum::<usize>();
        if batch.documents.is_empty() && *own == [whole.clone()] && own == others {
            let rows = 0..batch.sequences * batch.seq_len;
            return vec![Tile { shape, queries: rows.clone(), keys: rows }];
        }
        let one = [whole];
        let mut tiles = Vec::new();
        for sequence in 0..batch.sequences {
            let documents = batch.documents.get(sequence).map_or(&one[..], Vec::as_slice);
            for document in documents {
                for (q_row, queries) in within(own, document) {
                    for (k_row, keys) in within(others, document) {
                        let shape = of_runs(shape, sequence, &queries, &keys);
                        if sees(&shape) {
                            let q_row = sequence * rows(own) + q_row;
                            let k_row = sequence * rows(others) + k_row;
                            tiles.push(Tile {
                                shape,
                                queries: q_row..q_row + queries.len(),
                                keys: k_row..k_row + keys.len(),
                            });
                        }
                    }
                }
            }
        }
        tiles
    }
}

impl Attention {
    /// The tiles of a chunk's queries over whole sequences, each with its rows among the chunk's.
    pub(super) fn tiles_of<D: Device>(
        &self,
        ctx: &Context<'_, D>,
        heads: [usize; 2],
        chunk: Chunk,
    ) -> Vec<(Tile, Range<usize>)> {
        let (batch, whole) = (ctx.batch, self.shape(ctx, heads));
        let sequence = 0..batch.seq_len;
        let one = [sequence];
        let (mut tiles, mut first) = (Vec::new(), 0);
        for run in ctx.runs_of(chunk) {
            for sequence in 0..batch.sequences {
                let begin = sequence * batch.seq_len;
                let documents = batch.documents.get(sequence).map_or(&one[..], Vec::as_slice);
                for document in documents {
                    let start = run.start.max(begin + document.start);
                    let end = run.end.min(begin + document.end);
                    if start >= end {
                        continue;
                    }
                    let (queries, keys) = (start - begin..end - begin, document.start..end - begin);
                    let shape = of_runs(whole, sequence, &queries, &keys);
                    let keys = begin + keys.start..begin + keys.end;
                    let own = first + start - run.start..first + end - run.start;
                    tiles.push((Tile { shape, queries: start..end, keys }, own));
                }
            }
            first += run.len();
        }
        tiles
    }
}

/// The parts of `runs` within `document`, and the row at which each begins.
fn within<'a>(
    runs: Runs<'a>,
    document: &'a Range<usize>,
) -> impl Iterator<Item = (usize, Range<usize>)> + 'a {
    let mut row = 0;
    runs.iter().filter_map(move |run| {
        let first = row;
        row += run.len();
        let part = run.start.max(document.start)..run.end.min(document.end);
        (!part.is_empty()).then(|| (first + part.start - run.start, part))
    })
}

fn of_runs(whole: Shape, sequence: usize, queries: &Range<usize>, keys: &Range<usize>) -> Shape {
    let dropout = whole.dropout.map(|dropout| ProbabilityDropout {
        batch_offset: dropout.batch_offset + sequence as u64,
        ..dropout
    });
    Shape {
        batch: 1,
        q_len: queries.len(),
        kv_len: keys.len(),
        q_offset: queries.start,
        kv_offset: keys.start,
        dropout,
        ..whole
    }
}

/// Whether any query sees a key.
fn sees(shape: &Shape) -> bool {
    let (first, last) = (shape.q_offset, shape.q_offset + shape.q_len - 1);
    let before = shape.kv_offset <= last;
    let newest = shape.kv_offset + shape.kv_len - 1;
    before && shape.window.is_none_or(|window| newest + window > first)
}

/// Elements of rows of `width`.
pub(super) fn scaled(rows: &Range<usize>, width: usize) -> Range<usize> {
    rows.start * width..rows.end * width
}
