//! Rotary position embedding (Su et al. 2021), in place on queries or keys.
//!
//! `x` is `[tokens, heads, head_dim]`, of which the dimensions `rotary_start..rotary_start + rotary_dim` are
//! rotated in pairs; pair `j` at position `p` by the angle `p inverse_frequency_j`:
//! `(a, b) -> (a cos - b sin, a sin + b cos)`. Positions are data: one for each token.
//!
//! The table of cosines and sines, `[tokens, 2, rotary_dim / 2]`, is made once for a batch of positions and
//! serves all layers. The backward pass is the inverse rotation, applied to the gradient in place.

pub mod cuda;
mod fast;
pub mod reference;

pub use fast::{backward, fill_table, forward};

/// Which dimensions make a pair.
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
    /// Heads of a token, all rotated alike.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// First rotated element of a head.
    pub rotary_start: usize,
    /// Rotated elements of a head, even.
    pub rotary_dim: usize,
    /// Which dimensions make a pair.
    pub pairing: Pairing,
}

impl Rope {
    /// Whole heads, half-rotation.
    #[must_use]
    pub const fn half(tokens: usize, heads: usize, head_dim: usize) -> Self {
        let pairing = Pairing::Half;
        Self { tokens, heads, head_dim, rotary_start: 0, rotary_dim: head_dim, pairing }
    }

    /// Elements of the table.
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

/// `theta^(-2 j / rotary_dim)` for `j < rotary_dim / 2`: the unscaled frequencies. Scaled variants give their
/// own to [`fill_table`].
#[must_use]
#[allow(clippy::cast_precision_loss)]
pub fn inverse_frequencies(theta: f64, rotary_dim: usize) -> Vec<f64> {
    (0..rotary_dim / 2).map(|j| theta.powf(-2.0 * j as f64 / rotary_dim as f64)).collect()
}
