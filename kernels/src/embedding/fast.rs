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

/// `dtable[ids - first_row] += scale dout`, in token order.
///
/// # Panics
/// If a slice has the wrong length.
pub fn backward<T: Real>(
    cpu: &Cpu,
    embedding: &Embedding,
    ids: &[i64],
    dout: &[T],
    dtable: &mut [T],
) {
    embedding.check(ids.len(), dtable.len(), dout.len());
    if dtable.is_empty() {
        return;
    }
    // Each block scans all ids and adds those in its range: so few blocks that the scans are cheap.
    let rows = embedding.rows.div_ceil(64);
    let blocks = dtable.chunks_mut(rows * embedding.columns).enumerate();
    cpu.each(blocks, |(block, dtable)| {
        let first_row = embedding.first_row + block * rows;
        let part = Embedding { first_row, rows: dtable.len() / embedding.columns, ..*embedding };
        scatter(cpu.arch(), part, ids, dout, dtable);
    });
}

vectorized! {
    fn scatter<T: Real>(embedding: Embedding, ids: &'a [i64], dout: &'a [T], dtable: &'a mut [T]) {
        let scale = T::from_f64(embedding.scale);
        let columns = embedding.columns;
        for (&id, dout) in ids.iter().zip(dout.chunks_exact(columns)) {
            if let Some(row) = embedding.row(id) {
                let row = &mut dtable[row * columns..(row + 1) * columns];
                row.iter_mut().zip(dout).for_each(|(row, &dout)| *row = scale.fma(dout, *row));
            }
        }
    }
}
