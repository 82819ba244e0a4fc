//! RMSNorm (Zhang and Sennrich 2019): `y = x r w`, `r = (mean(x^2) + eps)^-1/2`; with a unit offset
//! `y = x r (1 + w)`.
//!
//! `x`, `y`, `dx`, `dy` are `[rows, columns]`, `w` is `[columns]`, the saved `inverse_rms` (`r`) is
//! `[rows]`. A norm over head dimensions is the same with `rows = tokens heads`.
//!
//! With `g = dy w` (or `dy (1 + w)`): `dx = r (g - x r^2 mean(g x))`, `dw = sum over rows of dy x
//! r`.

pub mod cuda;
mod fast;
pub mod reference;

pub use fast::{backward_input, backward_weight, forward};

/// Dimensions and numerics.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNorm {
    /// Independent rows.
    pub rows: usize,
    /// Elements that are normalised together.
    pub columns: usize,
    /// Added to the mean square.
    pub eps: f64,
    /// Whether weights are stored minus 1.
    pub unit_offset: bool,
}

impl RmsNorm {
    #[track_caller]
    fn check(&self, tensors: &[(&str, usize)], w: usize, inverse_rms: usize) {
        for (name, got) in tensors {
            crate::check::length(name, *got, self.rows * self.columns);
        }
        crate::check::length("w", w, self.columns);
        crate::check::length("inverse_rms", inverse_rms, self.rows);
    }

    /// The number added to the stored weights.
    fn offset(&self) -> f64 {
        if self.unit_offset { 1.0 } else { 0.0 }
    }
}
