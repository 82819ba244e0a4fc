//! Random numbers that depend only on a tensor's *global* element index, so that every sharding
//! draws the same ones.
//!
//! The generator is Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
//! SC'11, section 3.3). The key is the seed. The counter is `[index / 4 (low, high), tensor,
//! step]`, and word `index % 4` of the result belongs to the element. Normal numbers are made from
//! pairs of words (Box and Muller 1958) in f64 and then rounded, so f32 and f64 get the same draws.

pub mod cuda;
mod fast;
pub mod philox;
pub mod reference;

pub use fast::{fill_normal, fill_uniform};

/// Identifies a sequence of random numbers: every tensor and every step has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream {
    /// The run's seed.
    pub seed: u64,
    /// Number of the tensor, or of the dropout in the model; the same on every rank.
    pub tensor: u32,
    /// The training step, for numbers that are redrawn in each.
    pub step: u32,
}

/// Maps a local block `[sizes]`, stored without gaps, to its elements' indices in a global tensor:
/// element `(i, j, l)` has the global index `offset + i strides[0] + j strides[1] + l strides[2]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalIndices {
    /// Global index of the first local element.
    pub offset: u64,
    /// Local extents.
    pub sizes: [usize; 3],
    /// Strides in the global tensor.
    pub strides: [u64; 3],
}

impl GlobalIndices {
    /// `len` elements that are adjacent in the global tensor too.
    #[must_use]
    pub const fn contiguous(offset: u64, len: usize) -> Self {
        Self { offset, sizes: [1, 1, len], strides: [0, 0, 1] }
    }

    /// Rows `row..row + rows` and columns `column..column + columns` of a matrix with
    /// `global_columns` columns.
    #[must_use]
    pub const fn matrix(
        row: u64,
        rows: usize,
        column: u64,
        columns: usize,
        global_columns: u64,
    ) -> Self {
        let offset = row * global_columns + column;
        Self { offset, sizes: [1, rows, columns], strides: [0, global_columns, 1] }
    }

    /// Number of local elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.sizes[0] * self.sizes[1] * self.sizes[2]
    }

    /// Whether there are no local elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Global index of the first element of local row `row`.
    const fn row_index(&self, row: usize) -> u64 {
        let (i, j) = (row / self.sizes[1], row % self.sizes[1]);
        self.offset + i as u64 * self.strides[0] + j as u64 * self.strides[1]
    }

    /// Global index of local element `at`.
    #[must_use]
    pub const fn index(&self, at: usize) -> u64 {
        self.row_index(at / self.sizes[2]) + (at % self.sizes[2]) as u64 * self.strides[2]
    }
}

impl GlobalIndices {
    /// The elements `first..first + count` as runs of consecutive global indices. Each run has its
    /// offset from `first`, its global index and its length.
    pub(crate) fn runs(
        &self,
        first: usize,
        count: usize,
    ) -> impl Iterator<Item = (usize, u64, usize)> {
        let (view, mut done) = (*self, 0);
        std::iter::from_fn(move || {
            let at = first + done;
            let left = count.checked_sub(done).filter(|&left| left > 0)?;
            let row_left = view.sizes[2] - at % view.sizes[2];
            let length = if view.strides[2] == 1 { row_left.min(left) } else { 1 };
            let run = (done, view.index(at), length);
            done += length;
            Some(run)
        })
    }
}

/// A uniform number in (0, 1) from one word: the middle of its interval, so never 0 or 1.
#[inline(always)]
fn unit(word: u32) -> f64 {
    (f64::from(word) + 0.5) * (1.0 / 4_294_967_296.0)
}
