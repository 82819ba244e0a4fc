//! Attention sinks: a learned logit of each head that every softmax counts beside its keys', with a
//! value of 0 (gpt-oss; model card, arXiv 2508.10925, section 2.2).
//!
//! Attention without sinks comes first, so that any kernel serves. Its output and the log-sum-exp
//! of its scores are then corrected. What is left is a softmax like any other, so attention's
//! backward pass reads the corrected ones and needs no change.
//!
//! ```text
//! apply:     out_ra *= 1 / (1 + e^(sink_a - lse_ar))      new_ar = ln(e^lse_ar + e^sink_a)
//! gradient:  by_row_ra *= -e^(sink_a - new_ar)            before: sum over j of dout_raj out_raj
//! ```
//!
//! For query `r` and head `a`. The sum of `by_row` over queries is the gradient of the sinks.
//!
//! | tensor | shape |
//! |---|---|
//! | `sinks` | `[heads]` |
//! | `lse`, `new` | `[batch, heads, queries]` |
//! | `by_row` | `[batch, queries, heads]` |
//! | `out` | `[batch, queries, heads, width]` |

pub mod cuda;
mod fast;
pub mod reference;

pub use fast::{apply, gradient};

/// Dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sinks {
    /// Sequences.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Queries of a sequence.
    pub queries: usize,
    /// Elements of an output head.
    pub width: usize,
}

impl Sinks {
    /// Rows of an output head.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.batch * self.queries * self.heads
    }

    /// Where the log-sum-exp of row `row` of an output head lies.
    const fn statistic(&self, row: usize) -> usize {
        let (query, head) = (row / self.heads, row % self.heads);
        (query / self.queries * self.heads + head) * self.queries + query % self.queries
    }

    /// Panics if there are no heads, or a tensor has the wrong length.
    #[track_caller]
    fn check(&self, sinks: usize, lse: usize, new: usize, out: usize) {
        assert!(self.heads > 0 && self.width > 0, "heads without a width: {self:?}");
        crate::check::length("sinks", sinks, self.heads);
        crate::check::length("lse", lse, self.rows());
        crate::check::length("new", new, self.rows());
        crate::check::length("out", out, self.rows() * self.width);
    }

    #[track_caller]
    fn check_gradient(&self, sinks: usize, new: usize, by_row: usize) {
        self.check(sinks, new, by_row, self.rows() * self.width);
    }
}
