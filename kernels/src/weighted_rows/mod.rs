//! Rows with one weight each: what experts return, and its gradients.
//!
//! ```text
//! y_ij = w_i x_ij          w_i = sum over j of x_ij y_ij
//! ```
//!
//! `x` and `y` are `[rows, columns]`, `w` is `[rows]`.

pub mod cuda;
mod fast;
pub mod reference;

pub use fast::{dot, scale};

/// Columns of `elements` in rows as many as `weights`; 0 if there are none.
#[track_caller]
fn columns(elements: usize, weights: usize) -> usize {
    let columns = elements.checked_div(weights).unwrap_or(0);
    assert!(columns * weights == elements, "{elements} elements are no {weights} equal rows");
    columns
}
