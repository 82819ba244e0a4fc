//! Matrix product `C = alpha op(A) op(B) + beta C`.
//!
//! `op(A)` is `[m, k]`, `op(B)` is `[k, n]`, `C` is `[m, n]`, all row-major with leading dimensions
//! (elements from one row to the next, as stored). With `beta = 0` the old `C` is never read, so it
//! may be anything.
//!
//! A linear layer `y[t,out] = x[t,in] W^T`, `W[out,in]`:
//!
//! | | call |
//! |---|---|
//! | forward | `gemm(Shape::nt(t, out, in), 1, x, W, 0, y)` |
//! | backward to inputs | `gemm(Shape::nn(t, in, out), 1, dy, W, 0, dx)` |
//! | backward to weights | `gemm(Shape::tn(out, in, t), 1, dy, x, 1, dW)` |

pub mod cuda;
mod fast;
pub mod reference;

pub use fast::{gemm, gemm_batched};

use crate::matrix::span;

/// How a matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// As it is used.
    None,
    /// Transposed: `op(X)[i, j] = X[j, i]`.
    Transpose,
}

/// Dimensions of a product, and the leading dimensions of its stored matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows of `op(A)` and `C`.
    pub m: usize,
    /// Columns of `op(B)` and `C`.
    pub n: usize,
    /// Columns of `op(A)`, rows of `op(B)`.
    pub k: usize,
    /// How `A` is stored: `[m, k]`, or `[k, m]` where transposed.
    pub op_a: Op,
    /// How `B` is stored: `[k, n]`, or `[n, k]` where transposed.
    pub op_b: Op,
    /// Elements from one stored row of `A` to the next.
    pub lda: usize,
    /// Elements from one stored row of `B` to the next.
    pub ldb: usize,
    /// Elements from one row of `C` to the next.
    pub ldc: usize,
}

impl Shape {
    /// `A[m,k] B[k,n]`, without gaps between rows.
    #[must_use]
    pub const fn nn(m: usize, n: usize, k: usize) -> Self {
        Self { m, n, k, op_a: Op::None, op_b: Op::None, lda: k, ldb: n, ldc: n }
    }

    /// `A[m,k] B^T`, `B` stored `[n,k]`, without gaps between rows.
    #[must_use]
    pub const fn nt(m: usize, n: usize, k: usize) -> Self {
        Self { m, n, k, op_a: Op::None, op_b: Op::Transpose, lda: k, ldb: k, ldc: n }
    }

    /// `A^T B[k,n]`, `A` stored `[k,m]`, without gaps between rows.
    #[must_use]
    pub const fn tn(m: usize, n: usize, k: usize) -> Self {
        Self { m, n, k, op_a: Op::Transpose, op_b: Op::None, lda: m, ldb: n, ldc: n }
    }

    /// The same product of matrices whose rows lie further apart.
    #[must_use]
    pub const fn with_leading(self, lda: usize, ldb: usize, ldc: usize) -> Self {
        Self { lda, ldb, ldc, ..self }
    }

    /// Floating-point operations, a multiplication and an addition counted as two.
    #[must_use]
    pub const fn flops(&self) -> usize {
        2 * self.m * self.n * self.k
    }

    /// Rows and columns of `A` as stored.
    const fn stored_a(&self) -> (usize, usize) {
        match self.op_a {
            Op::None => (self.m, self.k),
            Op::Transpose => (self.k, self.m),
        }
    }

    /// Rows and columns of `B` as stored.
    const fn stored_b(&self) -> (usize, usize) {
        match self.op_b {
            Op::None => (self.k, self.n),
            Op::Transpose => (self.n, self.k),
        }
    }

    /// Panics where a row does not fit its leading dimension.
    #[track_caller]
    fn check_leading(&self) {
        let of = [
            ("a", self.stored_a().1, self.lda),
            ("b", self.stored_b().1, self.ldb),
            ("c", self.n, self.ldc),
        ];
        for (name, columns, leading) in of {
            assert!(leading >= columns, "ld{name} is {leading} where rows have {columns} elements");
        }
    }
}

/// Several products of one shape, each matrix a fixed distance behind the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// How many products.
    pub count: usize,
    /// Elements from one `A` to the next; 0 shares one.
    pub stride_a: usize,
    /// Elements from one `B` to the next; 0 shares one.
    pub stride_b: usize,
    /// Elements from one `C` to the next; at least the elements of one `C`.
    pub stride_c: usize,
}

impl Batch {
    /// Panics where results would overlap or a slice is too short.
    #[track_caller]
    fn check(&self, shape: &Shape, a: usize, b: usize, c: usize) {
        let Some(last) = self.count.checked_sub(1) else { return };
        let c_span = span(shape.m, shape.n, shape.ldc);
        assert!(
            last == 0 || self.stride_c >= c_span,
            "stride_c is {}: results overlap",
            self.stride_c
        );
        let ((ra, ca), (rb, cb)) = (shape.stored_a(), shape.stored_b());
        crate::check::at_least("a", a, last * self.stride_a + span(ra, ca, shape.lda));
        crate::check::at_least("b", b, last * self.stride_b + span(rb, cb, shape.ldb));
        crate::check::at_least("c", c, last * self.stride_c + c_span);
    }
}
