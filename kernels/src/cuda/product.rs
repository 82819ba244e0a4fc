//! A matrix product in cuBLASLt's terms: what an operation asks of a [`super::Driver`].

use super::Storage;

/// A column-major matrix, or one for each product of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// Address of the first matrix.
    pub address: u64,
    /// How it is stored.
    pub storage: Storage,
    /// Elements of a stored column.
    pub rows: usize,
    /// Stored columns.
    pub columns: usize,
    /// Leading dimension: elements from one column to the next.
    pub leading: usize,
    /// Elements from one matrix of the batch to the next.
    pub stride: usize,
    /// Whether the product takes its transpose.
    pub transposed: bool,
}

/// Column-major products `D = alpha op(A) op(B) + beta D`, with an optional bias added to every
/// column.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive] // constructed only by operations, from views of live memory
pub struct Product {
    /// The left factor.
    pub a: Matrix,
    /// The right factor.
    pub b: Matrix,
    /// The result, which is also the summand.
    pub d: Matrix,
    /// Columns of `op(A)`, rows of `op(B)`.
    pub k: usize,
    /// Number of products.
    pub count: usize,
    /// Factor of `op(A) op(B)`.
    pub alpha: f32,
    /// Factor of the old `D`, which is not read if this is 0.
    pub beta: f32,
    /// Address of a vector with `d`'s storage and rows.
    pub bias: Option<u64>,
}
