//! Keys and values of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1, equations 12 to
//! 17): from what a latent vector is projected up to, and back.
//!
//! ```text
//! join:   k_ta = [up_ta[..content], rotary_t]      v_ta = up_ta[content..]
//! split:  dup_ta = [dk_ta[..content], dv_ta]       drotary_t = sum over a of dk_ta[content..]
//! ```
//!
//! For token `t` and head `a`; all heads of a token share its rotated part.
//!
//! | tensor | shape |
//! |---|---|
//! | `up`, `dup` | `[tokens, heads, content + value]` |
//! | `rotary`, `drotary` | `[tokens, rotary]` |
//! | `k`, `dk` | `[tokens, heads, content + rotary]` |
//! | `v`, `dv` | `[tokens, heads, value]` |
//!
//! `join` copies, so it is exact. `split` is its backward pass; the sum is taken in the order of
//! heads, in f32 or wider.

pub mod cuda;
mod fast;
pub mod reference;

pub use fast::{join, split};

/// Dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentHeads {
    /// Tokens.
    pub tokens: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of a key head that are projected up.
    pub content: usize,
    /// Elements of a key head that carry the position.
    pub rotary: usize,
    /// Elements of a value head.
    pub value: usize,
}

impl LatentHeads {
    /// Elements of a key head.
    #[must_use]
    pub const fn key(&self) -> usize {
        self.content + self.rotary
    }

    /// Elements of a head that are projected up.
    #[must_use]
    pub const fn up(&self) -> usize {
        self.content + self.value
    }

    /// Panics if there are no heads, they have no rotated part or no values, or a tensor has the
    /// wrong length.
    #[track_caller]
    fn check(&self, up: usize, rotary: usize, k: usize, v: usize) {
        let whole = self.heads > 0 && self.rotary > 0 && self.value > 0;
        assert!(whole, "heads without a part: {self:?}");
        let heads = self.tokens * self.heads;
        crate::check::length("up", up, heads * self.up());
        crate::check::length("rotary", rotary, self.tokens * self.rotary);
        crate::check::length("k", k, heads * self.key());
        crate::check::length("v", v, heads * self.value);
    }
}
