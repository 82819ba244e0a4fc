//! Sums, scalings and biases: `x` and `y` have the same length; `bias[columns]` is added to each
//! row of `x[rows, columns]`.

pub mod cuda;
mod fast;
pub mod reference;

pub use fast::{add, add_bias, axpy, bias_gradient, divide, scale, sum, sum_of_squares};

/// Panics unless the length is a multiple of a row's.
#[track_caller]
fn check_rows(name: &str, got: usize, columns: usize) {
    let whole = if columns == 0 { got == 0 } else { got.is_multiple_of(columns) };
    assert!(whole, "{name} has {got} elements: no whole rows of {columns}");
}
