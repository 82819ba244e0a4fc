//! Softmax cross-entropy in the steps that a split vocabulary needs. The gradient replaces the
//! logits in place, so there are never two tensors of their size.
//!
//! The steps are the same for a whole and a split vocabulary. Between them a split one reduces
//! `[rows]` values over its shards:
//!
//! | step | then reduce |
//! |---|---|
//! | [`local_max`] | `max` by maximum |
//! | [`local_sum_exp`] | `sum_exp` and `target_logit` by sum |
//! | [`loss`] | |
//! | [`gradient_in_place`] | |
//!
//! If [`local_sum_exp`] uses the *local* maximum, [`rescale_sum_exp`] gives the same sums
//! afterwards, with one barrier less (Vocabulary Parallelism, Yeung et al. 2024, section 4).
//!
//! If [`gradient_in_place`] uses the local maximum and sum as well (scale 1, no targets on the
//! shard), only elementwise work besides the products remains once the global sums are known
//! (section 4.3). `factor` is the ratio of the global softmax to the shard's;
//! [`softmax_to_gradient`] and [`join_gradient`] apply it to the gradients of logits and inputs.
//! With a soft cap, [`scale_by_slope`] applies the cap's slope to the targets' rows of the output
//! matrix.
//!
//! `loss = ln sum_j exp(z_j) - z_target`, `dz_j = scale (softmax_j - [j = target])`. With a soft
//! cap, `z = cap tanh(logit / cap)` and the gradient is with respect to `logit`. Rows with target
//! [`IGNORED`] have loss and gradient 0.

pub mod cuda;
mod fast;
pub mod reference;

pub use fast::{
    gradient_in_place, join_gradient, local_max, local_sum_exp, loss, rescale_sum_exp,
    scale_by_slope, softmax_to_gradient,
};

/// The target of rows that do not count.
pub const IGNORED: i64 = -1;

/// A shard of the logits: `[rows, columns]`. The first `real_columns` columns are the vocabulary's
/// `first_column..first_column + real_columns`; the rest are padding, which enters no maximum and
/// no sum and has gradient 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Logits {
    /// Tokens.
    pub rows: usize,
    /// Stored columns.
    pub columns: usize,
    /// Columns that are not padding; may be 0.
    pub real_columns: usize,
    /// Index of the first column in the vocabulary.
    pub first_column: usize,
    /// Logits become `cap tanh(logit / cap)`.
    pub soft_cap: Option<f64>,
}

impl Logits {
    /// A whole vocabulary without padding or cap.
    #[must_use]
    pub const fn whole(rows: usize, columns: usize) -> Self {
        Self { rows, columns, real_columns: columns, first_column: 0, soft_cap: None }
    }

    /// The local column of a target, if it is on this shard.
    pub(crate) fn column(&self, target: i64) -> Option<usize> {
        let target = usize::try_from(target).ok()?;
        let local = target.checked_sub(self.first_column)?;
        (local < self.real_columns).then_some(local)
    }

    #[track_caller]
    fn check(&self, logits: usize, per_row: &[(&str, usize)]) {
        assert!(
            self.real_columns <= self.columns,
            "real_columns {} of {} columns",
            self.real_columns,
            self.columns
        );
        crate::check::length("logits", logits, self.rows * self.columns);
        for (name, got) in per_row {
            crate::check::length(name, *got, self.rows);
        }
    }
}

/// Number of columns of a tensor with `rows` rows.
///
/// # Panics
/// If its length is not a multiple of a row's.
#[track_caller]
fn columns_of(name: &str, len: usize, rows: usize) -> usize {
    let whole = if rows == 0 { len == 0 } else { len.is_multiple_of(rows) };
    assert!(whole, "{name} has {len} elements: no {rows} whole rows");
    len / rows.max(1)
}
