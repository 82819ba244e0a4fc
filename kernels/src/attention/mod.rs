//! Scaled dot-product attention with grouped queries, and its backward pass from the log-sum-exp.
//!
//! For query head `a`, key-value head `a / (q_heads / kv_heads)`, query `i` and key `j`:
//!
//! ```text
//! s_ij = scale q_i . k_j               with a soft cap: s <- cap tanh(s / cap), before the mask
//! p_ij = exp(s_ij - lse_i)             over visible j only, lse_i = ln sum_j exp s_ij
//! o_i  = sum_j p_ij v_j                with dropout: p_ij mask_ij / (1 - p); lse has no dropout
//! ```
//!
//! | tensor | shape |
//! |---|---|
//! | `q`, `dq` | `[batch, q_len, q_heads, qk_dim]` |
//! | `k`, `dk` | `[batch, kv_len, kv_heads, qk_dim]` |
//! | `v`, `dv` | `[batch, kv_len, kv_heads, v_dim]` |
//! | `out`, `dout` | `[batch, q_len, q_heads, v_dim]` |
//! | `lse` | `[batch, q_heads, q_len]` |
//!
//! Query `i` stands at position `q_offset + i` and key `j` at `kv_offset + j`. A query that sees no
//! key has `out = 0` and `lse = -inf`. The parts of `out` and `lse` over disjoint ranges of keys
//! are put together by [`merge`]; the backward pass of a range takes the merged `out` and `lse`, so
//! gradients of ranges just add up.
//!
//! Blocks and online softmax are those of FlashAttention-2 (Dao 2023, algorithms 1 and 2): nothing
//! of size `q_len x kv_len` is kept.

mod blocks;
pub mod cuda;
mod fast;
pub mod fused;
pub mod reference;
mod tile;

pub use fast::{backward, forward, merge};

use crate::dropout::Dropout;

/// Dimensions, mask and numerics of an attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Sequences.
    pub batch: usize,
    /// Queries of a sequence.
    pub q_len: usize,
    /// Keys of a sequence.
    pub kv_len: usize,
    /// Query heads, a multiple of `kv_heads`.
    pub q_heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Dimension of queries and keys.
    pub qk_dim: usize,
    /// Dimension of values and outputs.
    pub v_dim: usize,
    /// Factor of the scores, usually `qk_dim^-1/2`.
    pub scale: f64,
    /// Whether a query sees only keys at its own position and before.
    pub causal: bool,
    /// Key `j` is visible to query `i` iff `i - window < j <= i` (positions). Implies `causal`.
    pub window: Option<usize>,
    /// Scores become `cap tanh(s / cap)`.
    pub soft_cap: Option<f64>,
    /// Position of query 0.
    pub q_offset: usize,
    /// Position of key 0.
    pub kv_offset: usize,
    /// Dropout on the probabilities.
    pub dropout: Option<ProbabilityDropout>,
}

/// Dropout on probabilities: element (sequence, head, query position, key position) of the global
/// tensor `[.., total_heads, total_len, total_len]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProbabilityDropout {
    /// Probability and random stream.
    pub dropout: Dropout,
    /// Global index of the first local sequence.
    pub batch_offset: u64,
    /// Global index of the first local query head.
    pub head_offset: u64,
    /// Query heads of the whole layer.
    pub total_heads: u64,
    /// Length of a whole sequence.
    pub total_len: u64,
}

impl ProbabilityDropout {
    /// Global index of a query's probability for the key at position 0.
    pub(crate) const fn row_index(&self, batch: usize, head: usize, position: usize) -> u64 {
        let row =
            (self.batch_offset + batch as u64) * self.total_heads + self.head_offset + head as u64;
        (row * self.total_len + position as u64) * self.total_len
    }
}

impl Attention {
    /// Causal self-attention over whole sequences, scaled by `dim^-1/2`.
    #[must_use]
    #[allow(clippy::cast_precision_loss)] // dimensions are small
    pub fn causal(batch: usize, len: usize, q_heads: usize, kv_heads: usize, dim: usize) -> Self {
        Self {
            batch,
            q_len: len,
            kv_len: len,
            q_heads,
            kv_heads,
            qk_dim: dim,
            v_dim: dim,
            scale: 1.0 / (dim as f64).sqrt(),
            causal: true,
            window: None,
            soft_cap: None,
            q_offset: 0,
            kv_offset: 0,
            dropout: None,
        }
    }

    /// Query heads that share a key-value head.
    #[must_use]
    pub const fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }

    /// Elements of `q`.
    #[must_use]
    pub const fn q_elements(&self) -> usize {
        self.batch * self.q_len * self.q_heads * self.qk_dim
    }

    /// Elements of `k`.
    #[must_use]
    pub const fn k_elements(&self) -> usize {
        self.batch * self.kv_len * self.kv_heads * self.qk_dim
    }

    /// Elements of `v`.
    #[must_use]
    pub const fn v_elements(&self) -> usize {
        self.batch * self.kv_len * self.kv_heads * self.v_dim
    }

    /// Elements of `out`.
    #[must_use]
    pub const fn out_elements(&self) -> usize {
        self.batch * self.q_len * self.q_heads * self.v_dim
    }

    /// Elements of `lse`.
    #[must_use]
    pub const fn lse_elements(&self) -> usize {
        self.batch * self.q_heads * self.q_len
    }

    /// The range of keys (local indices) that query `i` sees; may be empty.
    #[must_use]
    pub fn visible(&self, i: usize) -> std::ops::Range<usize> {
        let position = self.q_offset + i;
        let end = if self.causal || self.window.is_some() { position + 1 } else { usize::MAX };
        let start = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        let local = |at: usize| at.saturating_sub(self.kv_offset).min(self.kv_len);
        local(start)..local(end).max(local(start))
    }

    /// The range of queries (local indices) that see key `j`; may be empty.
    #[must_use]
    pub fn viewers(&self, j: usize) -> std::ops::Range<usize> {
        let position = self.kv_offset + j;
        let start = if self.causal || self.window.is_some() { position } else { 0 };
        let end = self.window.map_or(usize::MAX, |window| position.saturating_add(window));
        let local = |at: usize| at.saturating_sub(self.q_offset).min(self.q_len);
        local(start)..local(end).max(local(start))
    }

    /// Panics if `kv_heads` does not divide `q_heads` or an argument has the wrong length.
    #[track_caller]
    pub(crate) fn check(&self, q: usize, k: usize, v: usize, out: usize, lse: usize) {
        let divides = self.kv_heads > 0 && self.q_heads.is_multiple_of(self.kv_heads);
        assert!(self.qk_dim > 0 && self.v_dim > 0, "heads of dimension 0");
        assert!(divides, "q_heads {} is no multiple of kv_heads {}", self.q_heads, self.kv_heads);
        crate::check::length("q", q, self.q_elements());
        crate::check::length("k", k, self.k_elements());
        crate::check::length("v", v, self.v_elements());
        crate::check::length("out", out, self.out_elements());
        crate::check::length("lse", lse, self.lse_elements());
    }
}

/// Inputs of the backward pass.
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a, T> {
    /// Queries.
    pub q: &'a [T],
    /// Keys.
    pub k: &'a [T],
    /// Values.
    pub v: &'a [T],
    /// Output over all keys, including those of other ranges.
    pub out: &'a [T],
    /// Log-sum-exp over all keys.
    pub lse: &'a [T],
}

/// Outputs of the backward pass.
#[derive(Debug)]
pub struct Gradients<'a, T> {
    /// Gradient with respect to the queries.
    pub dq: &'a mut [T],
    /// Gradient with respect to the keys, summed over the query heads that share them.
    pub dk: &'a mut [T],
    /// Gradient with respect to the values, summed likewise.
    pub dv: &'a mut [T],
}
