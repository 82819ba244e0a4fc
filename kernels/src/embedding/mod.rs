//! Embedding: rows of a table by token id, and the scatter-add of their gradients.
//!
//! The table holds rows `first_row..first_row + rows` of the whole one, `[rows, columns]`. Ids
//! outside the range give rows of 0 forward and are skipped backward, so the results of all ranges
//! add up to the whole.

pub mod cuda;
mod fast;
pub mod reference;

pub use fast::{backward, forward};

/// The lookups in the order in which [`backward`] sums them: by id, those of an id in the order of
/// tokens. For each its id and its token, `[tokens, 2]`.
#[must_use]
pub fn by_row(ids: &[i64]) -> Vec<i64> {
    let (Some(&least), Some(&most)) = (ids.iter().min(), ids.iter().max()) else {
        return Vec::new();
    };
    // A counting sort: ids are rows of a table, so their range is small.
    let mut next = vec![0; (most - least) as usize + 2];
    ids.iter().for_each(|id| next[(id - least) as usize + 1] += 1);
    (1..next.len()).for_each(|at| next[at] += next[at - 1]);
    let mut lookups = vec![[0; 2]; ids.len()];
    for (token, &id) in ids.iter().enumerate() {
        let next: &mut usize = &mut next[(id - least) as usize];
        lookups[*next] = [id, token as i64];
        *next += 1;
    }
    lookups.into_flattened()
}

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
    fn check_backward(&self, by_row: usize, dout: usize, dtable: usize) {
        crate::check::length("by_row", by_row, 2 * self.tokens);
        self.check(self.tokens, dtable, dout);
    }

    #[track_caller]
    fn check(&self, ids: usize, table: usize, out: usize) {
        crate::check::length("ids", ids, self.tokens);
        crate::check::length("table", table, self.rows * self.columns);
        crate::check::length("out", out, self.tokens * self.columns);
    }
}
