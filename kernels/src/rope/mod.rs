//! Rotary position embedding (Su et al. 2021), in place on queries or keys.
//!
//! `x` is `[tokens, heads, head_dim]`. The dimensions `rotary_start..rotary_start + rotary_dim` are
//! rotated in pairs; pair `j` at position `p` is rotated by the angle `p inverse_frequency_j`: `(a,
//! b) -> (a cos - b sin, a sin + b cos)`. Each token has its own position, passed as data.
//!
//! The table of cosines and sines, `[tokens, 2, rotary_dim / 2]`, is computed once for a batch of
//! positions and serves all layers. The backward pass is the inverse rotation, applied to the
//! gradient in place.

pub mod cuda;
mod fast;
pub mod reference;

pub use fast::{backward, fill_table, forward};

/// Which dimensions form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// `j` and `j + rotary_dim / 2` (GPT-NeoX, Hugging Face's Llama).
    Half,
    /// `2 j` and `2 j + 1` (the paper; DeepSeek).
    Interleaved,
}

/// Dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rope {
    /// Tokens, each with its position.
    pub tokens: usize,
    /// Heads of a token; all get the same rotation.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// First rotated element of a head.
    pub rotary_start: usize,
    /// Rotated elements of a head, even.
    pub rotary_dim: usize,
    /// Which dimensions form a pair.
    pub pairing: Pairing,
}

impl Rope {
    /// Whole heads, with pairs of the two halves.
    #[must_use]
    pub const fn half(tokens: usize, heads: usize, head_dim: usize) -> Self {
        let pairing = Pairing::Half;
        Self { tokens, heads, head_dim, rotary_start: 0, rotary_dim: head_dim, pairing }
    }

    /// Number of elements of the table.
    #[must_use]
    pub const fn table_elements(&self) -> usize {
        self.tokens * self.rotary_dim
    }

    #[track_caller]
    fn check(&self, x: usize, table: usize) {
        let fits = self.rotary_start + self.rotary_dim <= self.head_dim;
        assert!(
            fits && self.rotary_dim.is_multiple_of(2),
            "rotary dimensions do not fit: {self:?}"
        );
        crate::check::length("x", x, self.tokens * self.heads * self.head_dim);
        crate::check::length("table", table, self.table_elements());
    }
}

/// YaRN's stretching of frequencies (arXiv 2309.00071, section 3.2).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// What slow frequencies are divided by.
    pub factor: f64,
    /// Positions before stretching.
    pub original_positions: f64,
    /// Rotations over those from which on a frequency is kept.
    pub beta_fast: f64,
    /// Rotations up to which it is divided.
    pub beta_slow: f64,
    /// Whether the mixed range is widened to whole pairs of elements.
    pub truncate: bool,
}

impl Yarn {
    /// The stretched frequencies. Between the limits the share of the divided frequency grows
    /// linearly with a frequency's number.
    #[must_use]
    #[allow(clippy::cast_precision_loss)]
    pub fn inverse_frequencies(&self, theta: f64, rotary_dim: usize) -> Vec<f64> {
        let dim = rotary_dim as f64;
        // The number of the frequency that rotates this often: solved from theta^(-2 j / dim).
        let number = |rotations: f64| {
            let per_position = self.original_positions / (rotations * std::f64::consts::TAU);
            dim * per_position.ln() / (2.0 * theta.ln())
        };
        let (mut first, mut last) = (number(self.beta_fast), number(self.beta_slow));
        if self.truncate {
            (first, last) = (first.floor(), last.ceil());
        }
        (first, last) = (first.max(0.0), last.min(dim - 1.0));
        // As the authors' code has it, so that a range of one frequency has no slope of infinity.
        let width = if first == last { 1e-3 } else { last - first };
        let mixed = |(j, kept): (usize, f64)| {
            let divided = ((j as f64 - first) / width).clamp(0.0, 1.0);
            kept / self.factor * divided + kept * (1.0 - divided)
        };
        inverse_frequencies(theta, rotary_dim).into_iter().enumerate().map(mixed).collect()
    }
}

/// The unscaled frequencies, `theta^(-2 j / rotary_dim)` for `j < rotary_dim / 2`. Scaled variants
/// pass their own to [`fill_table`].
#[must_use]
#[allow(clippy::cast_precision_loss)]
pub fn inverse_frequencies(theta: f64, rotary_dim: usize) -> Vec<f64> {
    (0..rotary_dim / 2).map(|j| theta.powf(-2.0 * j as f64 / rotary_dim as f64)).collect()
}
