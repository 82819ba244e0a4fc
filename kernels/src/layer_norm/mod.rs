//! LayerNorm (Ba et al. 2016): `y = n w + bias`, `n = (x - mean) r`, `r = (variance + eps)^-1/2`,
//! with the biased variance.
//!
//! `x`, `y`, `dx`, `dy` are `[rows, columns]`, `w` and `bias` `[columns]`, the saved `mean` and
//! `inverse_std` (`r`) `[rows]`.
//!
//! With `g = dy w`: `dx = r (g - mean(g) - n mean(g n))`, `dw = sum over rows of dy n`, `dbias =
//! sum over rows of dy`.

pub mod cuda;
mod fast;
pub mod reference;

pub use fast::{backward_input, backward_weight, forward};

/// Dimensions and numerics.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerNorm {
    /// Independent rows.
    pub rows: usize,
    /// Elements that are normalised together.
    pub columns: usize,
    /// Added to the variance.
    pub eps: f64,
}

impl LayerNorm {
    #[track_caller]
    fn check(&self, tensors: &[(&str, usize)], weights: &[(&str, usize)], statistics: [usize; 2]) {
        for (name, got) in tensors {
            crate::check::length(name, *got, self.rows * self.columns);
        }
        for (name, got) in weights {
            crate::check::length(name, *got, self.columns);
        }
        crate::check::length("mean", statistics[0], self.rows);
        crate::check::length("inverse_std", statistics[1], self.rows);
    }
}
