//! Blocks of tokens (forward) or of table rows (backward) on threads.

use super::Embedding;
use crate::simd::{block_rows, vectorized};
use crate::{Cpu, Real};

/// `out[tokens, columns] = scale table[ids - first_row]`, 0 for ids outside the range.
///
/// # Panics
/// If a slice has the wrong length.
pub fn forward<T: Real>(cpu: &Cpu, embedding: &Embedding, ids: &[i64], table: &[T], out: &mut [T]) {
    embedding.check(ids.len(), table.len(), out.len());
    if out.is_empty() {
        return;
    }
    let tokens = block_rows(embedding.columns);
    let blocks = ids.chunks(tokens).zip(out.chunks_mut(tokens * embedding.columns));
    cpu.each(blocks, |(ids, out)| gather(cpu.arch(), *embedding, ids, table, out));
}

vectorized! {
    fn gather<T: Real>(embedding: Embedding, ids: &'a [i64], table: &'a [T], out: &'a mut [T]) {
        let scale = T::from_f64(embedding.scale);
        for (&id, out) in ids.iter().zip(out.chunks_exact_mut(embedding.columns)) {
            match embedding.row(id) {
                None => out.fill(T::ZERO),
                Some(row) => {
                    let row = &table[row * embedding.columns..(row + 1) * embedding.columns];
                    out.iter_mut().zip(row).for_each(|(out, &value)| *out = scale * value);
                }
            }
        }
    }
}

/// `dtable[ids - first_row] += scale dout`, in the order of [`by_row`](super::by_row).
///
/// # Panics
/// If a slice has the wrong length.
pub fn backward<T: Real>(
    cpu: &Cpu,
    embedding: &Embedding,
    by_row: &[i64],
    dout: &[T],
    dtable: &mut [T],
) {
    embedding.check_backward(by_row.len(), dout.len(), dtable.len());
    if dtable.is_empty() {
        return;
    }
    let rows = embedding.rows.div_ceil(64);
    let (by_row, _) = by_row.as_chunks();
    let before = |row: usize| by_row.partition_point(|&[id, _]| id < row as i64);
    let blocks = dtable.chunks_mut(rows * embedding.columns).enumerate();
    cpu.each(blocks, |(block, dtable)| {
        let first_row = embedding.first_row + block * rows;
        let part = Embedding { first_row, rows: dtable.len() / embedding.columns, ..*embedding };
        let by_row = &by_row[before(first_row)..before(first_row + part.rows)];
        scatter(cpu.arch(), part, by_row, dout, dtable);
    });
}

vectorized! {
    fn scatter<T: Real>(
        embedding: Embedding, by_row: &'a [[i64; 2]], dout: &'a [T], dtable: &'a mut [T]
    ) {
        let scale = T::from_f64(embedding.scale);
        let columns = embedding.columns;
        for (id, token) in by_row.iter().map(|&[id, token]| (id, token as usize)) {
            if let Some(row) = embedding.row(id) {
                let row = &mut dtable[row * columns..(row + 1) * columns];
                let dout = &dout[token * columns..(token + 1) * columns];
                row.iter_mut().zip(dout).for_each(|(row, &dout)| *row = scale.fma(dout, *row));
            }
        }
    }
}
