//! Sums over rows, for gradients of weights that all rows share.

use crate::{Cpu, Real};
use std::ops::Range;

/// Maximum number of partial sums.
const PARTS: usize = 64;
/// Minimum number of rows in each.
const LEAST_ROWS: usize = 32;

/// Adds column sums to `totals`: `add_rows(rows, sums)` adds the rows of a range to `sums`. Ranges
/// depend on `rows` alone and are added in order, so the bits do not depend on threads.
pub(crate) fn add_sums<T: Real>(
    cpu: &Cpu,
    rows: usize,
    totals: &mut [T],
    add_rows: impl Fn(Range<usize>, &mut [T]) + Sync,
) {
    let columns = totals.len();
    if rows == 0 || columns == 0 {
        return;
    }
    let part = rows.div_ceil(PARTS).max(LEAST_ROWS);
    cpu.scratch(rows.div_ceil(part) * columns, |sums| {
        cpu.each(sums.chunks_mut(columns).enumerate(), |(i, sums)| {
            sums.fill(T::ZERO);
            add_rows(i * part..rows.min((i + 1) * part), sums);
        });
        for sums in sums.chunks(columns) {
            totals.iter_mut().zip(sums).for_each(|(total, &sum)| *total += sum);
        }
    });
}
