//! Training data: numbered samples.
//!
//! Only a sample's number determines in which step it is used and where, never the split.

mod in_order;
mod indexed;
mod packed;
mod permutation;

pub use in_order::InOrder;
pub use indexed::Indexed;
pub use packed::Packed;

use crate::error::Error;
use std::ops::Range;
use std::path::Path;

/// One sequence to train on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// `[s]` token ids.
    pub tokens: Vec<i64>,
    /// `[s]` ids to predict, -1 for none.
    pub labels: Vec<i64>,
    /// Where its documents begin after the first. Attention stays within a document, and positions
    /// count from its beginning.
    pub starts: Vec<usize>,
}

impl Sample {
    /// A sample of `s + 1` tokens: each predicts the next. All are one document.
    pub fn of_tokens(mut tokens: Vec<i64>) -> Self {
        let labels = tokens.get(1..).unwrap_or_default().to_vec();
        tokens.truncate(labels.len());
        Self { tokens, labels, starts: Vec::new() }
    }

    /// The positions of each document.
    pub fn documents(&self) -> Vec<Range<usize>> {
        let begins = std::iter::once(0).chain(self.starts.iter().copied());
        let ends = self.starts.iter().copied().chain([self.tokens.len()]);
        begins.zip(ends).map(|(begin, end)| begin..end).collect()
    }
}

/// A numbered set of samples.
pub trait Samples: Send + Sync {
    /// Number of samples before they repeat or end.
    fn len(&self) -> u64;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether samples repeat from the beginning after the last.
    fn repeats(&self) -> bool;

    /// Sample `index`.
    ///
    /// # Errors
    /// Files that cannot be read.
    fn read(&self, index: u64) -> Result<Sample, Error>;

    /// Where token `at` of sample `index` is, in words.
    fn place(&self, index: u64, at: usize) -> String {
        format!("token {at} of sample {index}")
    }
}

/// Opens data: a safetensors file with `tokens [steps, batch, seq_len + 1]`, or Megatron's `.bin`
/// with its `.idx` beside it.
///
/// # Errors
/// Files that are missing, broken, or of another sequence length.
pub fn open(path: &Path, seq_len: usize, seed: u64) -> Result<Box<dyn Samples>, Error> {
    if path.is_dir() {
        return Err(Error::file(path, format!("it is a directory; {FORMATS}")));
    }
    if path.metadata().is_ok_and(|found| !found.is_file()) {
        return Err(Error::file(path, format!("it is a pipe or a device; {FORMATS}")));
    }
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("safetensors") => Ok(Box::new(InOrder::open(path, seq_len)?)),
        Some("bin" | "idx") => Ok(Box::new(Indexed::open(path, seq_len, seed)?)),
        _ => Err(Error::file(path, FORMATS)),
    }
}

const FORMATS: &str =
    "valid: a file NAME.bin with NAME.idx beside it (Megatron's), or NAME.safetensors";
