//! A matrix product as cuBLASLt takes it: what an operation asks of a [`super::Driver`].

use super::Storage;

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
#[non_exhaustive] // only operations make one, from views of live memory
pub struct Product {
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
