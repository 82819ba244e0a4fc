//! Three nested loops, summed in f64.

use super::{Batch, Op, Shape};
use crate::{Cpu, Real};

/// See [`super`].
///
/// # Panics
/// If a slice is shorter than its matrix, or a row longer than its leading dimension.
pub fn gemm<T: Real>(_cpu: &Cpu, shape: &Shape, alpha: T, a: &[T], b: &[T], beta: T, c: &mut [T]) {
    shape.check_leading();
    let batch = Batch { count: 1, stride_a: 0, stride_b: 0, stride_c: 0 };
    batch.check(shape, a.len(), b.len(), c.len());
    for i in 0..shape.m {
        for j in 0..shape.n {
            let product: f64 =
                (0..shape.k).map(|l| at_a(shape, a, i, l) * at_b(shape, b, l, j)).sum();
            let place = &mut c[i * shape.ldc + j];
            let old = if beta == T::ZERO { 0.0 } else { beta.to_f64() * place.to_f64() };
            *place = T::from_f64(alpha.to_f64() * product + old);
        }
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
    batch.check(shape, a.len(), b.len(), c.len());
    for i in 0..batch.count {
        let (a, b) = (&a[i * batch.stride_a..], &b[i * batch.stride_b..]);
        gemm(cpu, shape, alpha, a, b, beta, &mut c[i * batch.stride_c..]);
    }
}

fn at_a<T: Real>(shape: &Shape, a: &[T], i: usize, l: usize) -> f64 {
    match shape.op_a {
        Op::None => a[i * shape.lda + l],
        Op::Transpose => a[l * shape.lda + i],
    }
    .to_f64()
}

fn at_b<T: Real>(shape: &Shape, b: &[T], l: usize, j: usize) -> f64 {
    match shape.op_b {
        Op::None => b[l * shape.ldb + j],
        Op::Transpose => b[j * shape.ldb + l],
    }
    .to_f64()
}
