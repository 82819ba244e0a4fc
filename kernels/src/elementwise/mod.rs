//! Sums, scales and biases: `x` and `y` of one length; `bias[columns]` added to each row of `x[rows, columns]`.

pub mod reference;

pub use reference::{add, add_bias, axpy, bias_gradient, scale, sum, sum_of_squares};
