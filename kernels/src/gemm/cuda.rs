//! Matrix products on a GPU, by cuBLASLt with f32 accumulation. Inputs are bf16 or f32, and so are
//! outputs, independently: gradients of weights go from bf16 inputs to f32 sums. f32 inputs are
//! multiplied as f32, not as TF32.
//!
//! cuBLASLt's matrices are column-major, so each of ours is its own transpose there, and cuBLASLt
//! is asked for `C^T = op(B)^T op(A)^T`.

use super::{Batch, Op, Shape};
use crate::cuda::product::{Matrix, Product};
use crate::cuda::{Floor, Gpu, GpuError, Storage, Stored, View, ViewMut};
use crate::matrix::span;

/// `C = alpha op(A) op(B) + beta C`. Shapes: [`super`].
///
/// # Errors
/// If the device fails, or has no cuBLASLt.
///
/// # Panics
/// If memory is shorter than its matrix, or a row longer than its leading dimension.
pub fn gemm<S: Stored, O: Stored>(
    gpu: &Gpu,
    shape: &Shape,
    alpha: f32,
    a: View<'_, S>,
    b: View<'_, S>,
    beta: f32,
    c: ViewMut<'_, O>,
) -> Result<(), GpuError> {
    gemm_batched(gpu, shape, &ONE, alpha, a, b, beta, c)
}

const ONE: Batch = Batch { count: 1, stride_a: 0, stride_b: 0, stride_c: 0 };

/// [`gemm()`] of every member of a batch.
///
/// # Errors
/// As [`gemm()`].
///
/// # Panics
/// As [`gemm()`], and if results would overlap.
#[allow(clippy::too_many_arguments)] // BLAS's own list
pub fn gemm_batched<S: Stored, O: Stored>(
    gpu: &Gpu,
    shape: &Shape,
    batch: &Batch,
    alpha: f32,
    a: View<'_, S>,
    b: View<'_, S>,
    beta: f32,
    c: ViewMut<'_, O>,
) -> Result<(), GpuError> {
    run(gpu, shape, batch, alpha, a, b, beta, c, None)
}

/// [`gemm()`] with `bias[n]` added to every row of the result, within the product's kernel: a
/// linear layer with bias.
///
/// # Errors
/// As [`gemm()`].
///
/// # Panics
/// As [`gemm()`], and if the bias does not have `n` elements.
#[allow(clippy::too_many_arguments)] // BLAS's own list
pub fn gemm_bias<S: Stored, O: Stored>(
    gpu: &Gpu,
    shape: &Shape,
    alpha: f32,
    a: View<'_, S>,
    b: View<'_, S>,
    bias: View<'_, O>,
    c: ViewMut<'_, O>,
) -> Result<(), GpuError> {
    crate::check::length("bias", bias.len(), shape.n);
    // cuBLASLt reads 16 bytes of a bias at a time.
    if shape.k == 0 || !bias.address().is_multiple_of(16) {
        let mut c = c;
        run(gpu, shape, &ONE, alpha, a, b, 0.0, c.view_mut(), None)?;
        return crate::elementwise::cuda::add_bias(gpu, bias, c);
    }
    run(gpu, shape, &ONE, alpha, a, b, 0.0, c, Some(bias.address()))
}

#[allow(clippy::too_many_arguments)] // BLAS's own list
fn run<S: Stored, O: Stored>(
    gpu: &Gpu,
    shape: &Shape,
    batch: &Batch,
    alpha: f32,
    a: View<'_, S>,
    b: View<'_, S>,
    beta: f32,
    c: ViewMut<'_, O>,
    bias: Option<u64>,
) -> Result<(), GpuError> {
    shape.check_leading();
    batch.check(shape, a.len(), b.len(), c.len());
    if batch.count == 0 || shape.m == 0 || shape.n == 0 {
        return Ok(());
    }
    if shape.k == 0 {
        return empty_sum(gpu, shape, batch, beta, c);
    }
    let addresses = [a.address(), b.address(), c.into_address()];
    let product = product::<S, O>(shape, batch, addresses);
    gpu.product(&Product { alpha, beta, bias, ..product })
}

/// `C = op(A) op(B)` in cuBLASLt's terms. `addresses` are those of `a`, `b` and `c`.
fn product<S: Stored, O: Stored>(shape: &Shape, batch: &Batch, addresses: [u64; 3]) -> Product {
    let matrix = |address, storage, (rows, columns): (usize, usize), leading, stride, op| Matrix {
        address,
        storage,
        // Ours are row-major: a row of ours is a column of cuBLASLt's.
        rows: columns,
        columns: rows,
        leading,
        stride,
        transposed: op == Op::Transpose,
    };
    let [a, b, c] = addresses;
    Product {
        a: matrix(b, S::STORAGE, shape.stored_b(), shape.ldb, batch.stride_b, shape.op_b),
        b: matrix(a, S::STORAGE, shape.stored_a(), shape.lda, batch.stride_a, shape.op_a),
        d: matrix(c, O::STORAGE, (shape.m, shape.n), shape.ldc, batch.stride_c, Op::None),
        k: shape.k,
        count: batch.count,
        alpha: 1.0,
        beta: 0.0,
        bias: None,
    }
}

/// Seconds that each of cuBLASLt's algorithms takes for [`gemm()`] of this shape with `beta` 0, the
/// chosen one first: to see how far the choice is from the best. Empty on the emulator.
///
/// # Errors
/// As [`gemm()`].
///
/// # Panics
/// As [`gemm()`].
pub fn survey<S: Stored, O: Stored>(
    gpu: &Gpu,
    shape: &Shape,
    a: View<'_, S>,
    b: View<'_, S>,
    c: ViewMut<'_, O>,
) -> Result<Vec<f64>, GpuError> {
    shape.check_leading();
    ONE.check(shape, a.len(), b.len(), c.len());
    let addresses = [a.address(), b.address(), c.into_address()];
    gpu.survey(&product::<S, O>(shape, &ONE, addresses))
}

/// The result if `k` is 0: `beta C`, for `beta` 0 or 1.
fn empty_sum<O: Stored>(
    gpu: &Gpu,
    shape: &Shape,
    batch: &Batch,
    beta: f32,
    mut c: ViewMut<'_, O>,
) -> Result<(), GpuError> {
    assert!(beta == 0.0 || beta.to_bits() == 1.0_f32.to_bits(), "k is 0 and beta {beta}: 0 or 1");
    assert!(span(shape.m, shape.n, shape.ldc) == shape.m * shape.n, "k is 0 and rows have gaps");
    for number in 0..batch.count {
        if beta == 0.0 {
            let start = number * batch.stride_c;
            gpu.zero(c.slice_mut(start..start + shape.m * shape.n))?;
        }
    }
    Ok(())
}

/// Lower bound on the work of a product.
#[must_use]
pub fn floor(shape: &Shape, inputs: Storage, outputs: Storage, beta: f32) -> Floor {
    let read = (shape.m * shape.k + shape.k * shape.n) * inputs.bytes();
    let written = shape.m * shape.n * outputs.bytes();
    let old = if beta == 0.0 { 0 } else { written };
    Floor { bytes: read + written + old, flops: shape.flops() }
}
