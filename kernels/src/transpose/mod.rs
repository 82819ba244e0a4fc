//! Swaps the two leading dimensions: `x[a, b, inner] -> y[b, a, inner]`.
//!
//! `inner = h` turns `[b, s, h]` into `[s, b, h]`; `inner = 1` is the transpose of a matrix.

pub mod cuda;
mod fast;
pub mod reference;

pub use fast::swap_leading;
