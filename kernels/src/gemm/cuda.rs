//! Matrix products on a GPU: cuBLASLt's, in f32 accumulation. Inputs are bf16 or f32 and outputs either: gradients of
//! weights go from bf16 inputs to f32 sums. f32 inputs are multiplied as f32, not as TF32.
//!
//! cuBLASLt's matrices lie by columns: to it each of ours is its transpose, so it is asked for
//! `C^T = op(B)^T op(A)^T`.

use super::{Batch, Op, Shape};
use crate::cuda::{Floor, Gpu, GpuError, Storage, Stored, View, ViewMut};
use crate::matrix::span;

/// A product of matrices in device memory, as an operation asks for it. Made here alone, from views.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Product {
    shape: Shape,
    batch: Batch,
    inputs: Storage,
    outputs: Storage,
    alpha: f32,
    beta: f32,
    /// `a`, `b` and `c`.
    addresses: [u64; 3],
    bias: Option<u64>,
}

/// A matrix by columns, or as many as the batch has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// Of the first one.
    pub address: u64,
    /// How it is stored.
    pub storage: Storage,
    /// Elements of a stored column.
    pub rows: usize,
    /// Stored columns.
    pub columns: usize,
    /// Elements from one column to the next.
    pub leading: usize,
    /// Elements from one matrix of the batch to the next.
    pub stride: usize,
    /// Whether its rows are multiplied as columns.
    pub transposed: bool,
}

/// A product in cuBLASLt's terms: `D = alpha op(A) op(B) + beta D`, and a bias added to every column.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Problem {
    /// The left factor.
    pub a: Matrix,
    /// The right factor.
    pub b: Matrix,
    /// The result.
    pub d: Matrix,
    /// What is summed over.
    pub k: usize,
    /// How many products.
    pub count: usize,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of what was there; not read where 0.
    pub beta: f32,
    /// A vector of `d`'s storage and rows.
    pub bias: Option<u64>,
}

impl Product {
    /// In cuBLASLt's terms.
    #[must_use]
    pub fn problem(&self) -> Problem {
        let Self { shape, batch, .. } = self;
        let matrix =
            |address, storage, (rows, columns): (usize, usize), leading, stride, op| Matrix {
                address,
                storage,
                // Ours lie by rows: to cuBLASLt a row is a column.
                rows: columns,
                columns: rows,
                leading,
                stride,
                transposed: op == Op::Transpose,
            };
        let [a, b, c] = self.addresses;
        Problem {
            a: matrix(b, self.inputs, shape.stored_b(), shape.ldb, batch.stride_b, shape.op_b),
            b: matrix(a, self.inputs, shape.stored_a(), shape.lda, batch.stride_a, shape.op_a),
            d: matrix(c, self.outputs, (shape.m, shape.n), shape.ldc, batch.stride_c, Op::None),
            k: shape.k,
            count: batch.count,
            alpha: self.alpha,
            beta: self.beta,
            bias: self.bias,
        }
    }
}

/// `C = alpha op(A) op(B) + beta C`. Shapes: [`super`].
///
/// # Errors
/// Where the device fails, or has no cuBLASLt.
///
/// # Panics
/// Where memory is shorter than its matrix, or a row longer than its leading dimension.
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

/// [`gemm`] of every member of a batch.
///
/// # Errors
/// As [`gemm`].
///
/// # Panics
/// As [`gemm`], and where results would overlap.
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

/// [`gemm`] with `bias[n]` added to every row of the result: a linear layer's, in the product's last step.
///
/// # Errors
/// As [`gemm`].
///
/// # Panics
/// As [`gemm`], and where the bias has not `n` elements.
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
        assert!(bias.is_none(), "k is 0 where there is a bias: add it with elementwise::cuda");
        return empty_sum(gpu, shape, batch, beta, c);
    }
    gpu.product(&Product {
        shape: *shape,
        batch: *batch,
        inputs: S::STORAGE,
        outputs: O::STORAGE,
        alpha,
        beta,
        addresses: [a.address(), b.address(), c.into_address()],
        bias,
    })
}

/// Seconds that each of cuBLASLt's algorithms takes for [`gemm`] of this shape with `beta` 0, the chosen one first: how far
/// the choice is from the best. Empty on the machine of the tests.
///
/// # Errors
/// As [`gemm`].
///
/// # Panics
/// As [`gemm`].
pub fn survey<S: Stored, O: Stored>(
    gpu: &Gpu,
    shape: &Shape,
    a: View<'_, S>,
    b: View<'_, S>,
    c: ViewMut<'_, O>,
) -> Result<Vec<f64>, GpuError> {
    shape.check_leading();
    ONE.check(shape, a.len(), b.len(), c.len());
    gpu.survey(&Product {
        shape: *shape,
        batch: ONE,
        inputs: S::STORAGE,
        outputs: O::STORAGE,
        alpha: 1.0,
        beta: 0.0,
        addresses: [a.address(), b.address(), c.into_address()],
        bias: None,
    })
}

/// A sum of nothing: what was there, zero or as it was.
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

/// The least that a product has to do.
#[must_use]
pub fn floor(shape: &Shape, inputs: Storage, outputs: Storage, beta: f32) -> Floor {
    let read = (shape.m * shape.k + shape.k * shape.n) * inputs.bytes();
    let written = shape.m * shape.n * outputs.bytes();
    let old = if beta == 0.0 { 0 } else { written };
    Floor { bytes: read + written + old, flops: shape.flops() }
}
