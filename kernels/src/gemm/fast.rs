//! The `gemm` crate's packed kernels, on tiles of `C`, as many as there are threads.
//!
//! The bits are the same for any number of threads: every tile sums over all of `k`, and the
//! crate's order within `k` depends on `k` alone unless tiles are tiny, which [`tile`] avoids. So
//! the bits of a row of `C` do not depend on how many rows `A` has beside it: where it has too few,
//! [`gemm()`] adds rows of zeros. The bits do depend on the processor (its vector width and
//! caches).

use super::{Batch, Op, Shape};
use crate::matrix::{Grid, MatrixView, multiply};
use crate::{Cpu, Real};

/// Minimum rows or columns of a tile in a dimension that is cut: below it packing costs more than
/// threads gain.
const LEAST: usize = 128;

/// Products with fewer operations are not cut: they take some ten microseconds, about the time to
/// wake a helper.
const LEAST_FLOPS: usize = 2_000_000;

/// Elements of `C` up to which the crate sums in another order.
const TINY: usize = 256;

/// See [`super`].
///
/// # Panics
/// If a slice is shorter than its matrix, or a row longer than its leading dimension.
pub fn gemm<T: Real>(cpu: &Cpu, shape: &Shape, alpha: T, a: &[T], b: &[T], beta: T, c: &mut [T]) {
    let batch = Batch { count: 1, stride_a: 0, stride_b: 0, stride_c: 0 };
    let least = (TINY / shape.n.max(1) + 1).max(2);
    if shape.op_a == Op::Transpose || shape.m == 0 || shape.m >= least {
        return gemm_batched(cpu, shape, &batch, alpha, a, b, beta, c);
    }
    shape.check_leading();
    let Shape { m, n, k, lda, ldc, .. } = *shape;
    let (mut rows, mut sums) = (vec![T::ZERO; least * k], vec![T::ZERO; least * n]);
    for row in 0..m {
        rows[row * k..][..k].copy_from_slice(&a[row * lda..][..k]);
        sums[row * n..][..n].copy_from_slice(&c[row * ldc..][..n]);
    }
    let padded = Shape { m: least, lda: k, ldc: n, ..*shape };
    gemm_batched(cpu, &padded, &batch, alpha, &rows, b, beta, &mut sums);
    for row in 0..m {
        c[row * ldc..][..n].copy_from_slice(&sums[row * n..][..n]);
    }
}

/// [`gemm()`] of every member of a batch.
///
/// # Panics
/// As [`gemm()`], and if results would overlap.
#[allow(clippy::too_many_arguments)] // BLAS's own list
pub fn gemm_batched<T: Real>(
    cpu: &Cpu,
    shape: &Shape,
    batch: &Batch,
    alpha: T,
    a: &[T],
    b: &[T],
    beta: T,
    c: &mut [T],
) {
    shape.check_leading();
    batch.check(shape, a.len(), b.len(), c.len());
    let grid = grid(shape, batch, cpu.threads());
    cpu.each(grid.cut(c), |(number, mut c)| {
        let (matrix, rows, columns) = grid.place(number);
        let a = stored(&a[matrix * batch.stride_a..], shape.stored_a(), shape.lda, shape.op_a);
        let b = stored(&b[matrix * batch.stride_b..], shape.stored_b(), shape.ldb, shape.op_b);
        multiply(alpha, a.block(rows, 0..shape.k), b.block(0..shape.k, columns), beta, &mut c);
    });
}

fn stored<T>(
    data: &[T],
    (rows, columns): (usize, usize),
    leading: usize,
    op: Op,
) -> MatrixView<'_, T> {
    let view = MatrixView::new(data, rows, columns, leading);
    match op {
        Op::None => view,
        Op::Transpose => view.transposed(),
    }
}

fn grid(shape: &Shape, batch: &Batch, threads: usize) -> Grid {
    let (tile_rows, tile_columns) = tile(shape, threads.div_ceil(batch.count.max(1)));
    Grid {
        matrices: batch.count,
        stride: batch.stride_c,
        rows: shape.m,
        columns: shape.n,
        leading: shape.ldc,
        tile_rows,
        tile_columns,
    }
}

/// Rows and columns of a tile, for about `threads` tiles. Columns are cut first: each tile packs
/// its part of `B` and reads all of `A`, which is cheaper than the other way round.
fn tile(shape: &Shape, threads: usize) -> (usize, usize) {
    let (m, n) = (shape.m.max(1), shape.n.max(1));
    if threads == 1 || m < 8 || n < 8 || shape.flops() < LEAST_FLOPS {
        return (m, n);
    }
    let across = (n / LEAST).clamp(1, threads);
    let down = (m / LEAST).clamp(1, threads.div_ceil(across));
    (m.div_ceil(down), n.div_ceil(across).next_multiple_of(16))
}
