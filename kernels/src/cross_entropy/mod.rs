//! Softmax cross-entropy in the steps that a split vocabulary needs; the gradient replaces the logits in
//! place, so there are never two tensors of their size.
//!
//! Whole or split, a caller runs the same steps; between them a split one reduces `[rows]` values over its
//! shards:
//!
//! | step | then reduce |
//! |---|---|
//! | [`local_max`] | `max` by maximum |
//! | [`local_sum_exp`] | `sum_exp` and `target_logit` by sum |
//! | [`loss`] | |
//! | [`gradient_in_place`] | |
//!
//! With the *local* maximum in [`local_sum_exp`], [`rescale_sum_exp`] gives the same sums afterwards, with
//! one barrier less (Vocabulary Parallelism, Yeung et al. 2024, section 4).
//!
//! With [`gradient_in_place`] around the local maximum and sum as well (scale 1, all targets elsewhere), what is left
//! beside the products is done when the common sums are known: `factor` takes a shard's softmax to the common one, and
//! [`softmax_to_gradient`] and [`join_gradient`] make the gradients of logits and inputs (section 4.3); with a soft cap
//! [`scale_by_slope`] brings the targets' rows of the output matrix to it.
//!
//! `loss = ln sum_j exp(z_j) - z_target`, `dz_j = scale (softmax_j - [j = target])`. With a soft cap,
//! `z = cap tanh(logit / cap)` and the gradient is with respect to `logit`. Rows with target [`IGNORED`] have loss
//! and gradient 0.

pub mod cuda;
mod fast;
pub mod reference;

pub use fast::{
    gradient_in_place, join_gradient, local_max, local_sum_exp, loss, rescale_sum_exp,
    scale_by_slope, softmax_to_gradient,
};

/// The target of rows that do not count.
pub const IGNORED: i64 = -1;

/// A shard of the logits: `[rows, columns]`, of which the first `real_columns` are columns of the vocabulary
/// `first_column..first_column + real_columns` and the rest are padding. Padding is in no maximum and no sum;
/// its gradient is 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Logits {
    /// Tokens.
    pub rows: usize,
    /// Columns as stored.
    pub columns: usize,
    /// Columns that are no padding; may be 0.
    pub real_columns: usize,
    /// Place of the first column in the vocabulary.
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

    /// The local column of a target, where this shard has it.
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

/// Columns of a tensor with so many rows.
///
/// # Panics
/// Where it has no whole rows.
#[track_caller]
fn columns_of(name: &str, len: usize, rows: usize) -> usize {
    let whole = if rows == 0 { len == 0 } else { len.is_multiple_of(rows) };
    assert!(whole, "{name} has {len} elements: no {rows} whole rows");
    len / rows.max(1)
}
