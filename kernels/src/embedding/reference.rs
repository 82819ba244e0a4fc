//! Token by token.

use super::Embedding;
use crate::{Cpu, Real};

/// `out[tokens, columns] = scale table[ids - first_row]`, 0 for ids outside the range.
///
/// # Panics
/// If a slice has the wrong length.
pub fn forward<T: Real>(
    _cpu: &Cpu,
    embedding: &Embedding,
    ids: &[i64],
    table: &[T],
    out: &mut [T],
) {
    embedding.check(ids.len(), table.len(), out.len());
    let columns = embedding.columns;
    for (token, &id) in ids.iter().enumerate() {
        for column in 0..columns {
            let value = embedding.row(id).map_or(0.0, |row| table[row * columns + column].to_f64());
            out[token * columns + column] = T::from_f64(embedding.scale * value);
        }
    }
}

/// `dtable[ids - first_row] += scale dout`, in the order of [`by_row`](super::by_row).
///
/// # Panics
/// If a slice has the wrong length.
pub fn backward<T: Real>(
    _cpu: &Cpu,
    embedding: &Embedding,
    by_row: &[i64],
    dout: &[T],
    dtable: &mut [T],
) {
    embedding.check_backward(by_row.len(), dout.len(), dtable.len());
    let columns = embedding.columns;
    for lookup in by_row.chunks_exact(2) {
        let (id, token) = (lookup[0], lookup[1] as usize);
        let Some(row) = embedding.row(id) else { continue };
        for column in 0..columns {
            let place = &mut dtable[row * columns + column];
            let term = embedding.scale * dout[token * columns + column].to_f64();
            *place = T::from_f64(place.to_f64() + term);
        }
    }
}
