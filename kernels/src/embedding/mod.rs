//! Embedding: rows of a table by token id, and the scatter-add of their gradients.
//!
//! The table holds rows `first_row..first_row + rows` of the whole one, `[rows, columns]`. Ids
//! outside the range give rows of 0 forward and are skipped backward, so the results of all ranges
//! add up to the whole.

pub mod cuda;
mod fast;
pub mod reference;

pub use fast::{backward, forward};

/// Dimensions and range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Embedding {
    /// Tokens.
    pub tokens: usize,
    /// Elements of a row.
    pub columns: usize,
    /// Local rows of the table, padding included.
    pub rows: usize,
    /// Id of the first local row.
    pub first_row: usize,
    /// Factor of the output: `sqrt(hidden)` for Gemma, 1 for most models.
    pub scale: f64,
}

impl Embedding {
    /// The local row of an id, if it is in the range.
    fn row(&self, id: i64) -> Option<usize> {
        let local = usize::try_from(id).ok()?.checked_sub(self.first_row)?;
        (local < self.rows).then_some(local)
    }

    #[track_caller]
    fn check(&self, ids: usize, table: usize, out: usize) {
        crate::check::length("ids", ids, self.tokens);
        crate::check::length("table", table, self.rows * self.columns);
        crate::check::length("out", out, self.tokens * self.columns);
    }
}
