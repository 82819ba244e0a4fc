//! Samples from a safetensors file, in the file's order, once.

use super::{Sample, Samples};
use crate::error::Error;
use crate::state::checkpoint::TensorFile;
use safetensors::tensor::Dtype;
use std::path::{Path, PathBuf};

const NAME: &str = "tokens";

/// `tokens`, I64 `[steps, batch, seq_len + 1]`: sample `i` is row `i` of the first two dimensions.
pub struct InOrder {
    file: TensorFile,
    path: PathBuf,
    /// Dimensions but the last.
    rows: Vec<usize>,
    width: usize,
}

impl InOrder {
    /// Opens the file.
    ///
    /// # Errors
    /// A file that is missing or broken, or of another sequence length.
    pub fn open(path: &Path, seq_len: usize) -> Result<Self, Error> {
        let file = TensorFile::open(path)?;
        let info = file.info(NAME)?;
        if info.dtype != Dtype::I64 {
            return Err(Error::file(path, format!("`tokens` is {:?}; valid: I64", info.dtype)));
        }
        let Some((&width, rows)) = info.shape.split_last() else {
            return Err(Error::file(path, "`tokens` is a single number; valid: samples x tokens"));
        };
        if width != seq_len + 1 {
            let problem = format!(
                "`tokens` has {width} tokens a sample; valid: {}, the plan's seq_len and one more \
                 (or plan with another --seq-len)",
                seq_len + 1
            );
            return Err(Error::file(path, problem));
        }
        let (path, rows) = (path.to_owned(), rows.to_vec());
        Ok(Self { file, path, rows, width })
    }
}

impl Samples for InOrder {
    fn len(&self) -> u64 {
        self.rows.iter().product::<usize>() as u64
    }

    fn repeats(&self) -> bool {
        false
    }

    fn read(&self, index: u64) -> Result<Sample, Error> {
        let begin = index * self.width as u64;
        self.file.read_integers(NAME, begin, self.width).map(Sample::of_tokens)
    }

    fn place(&self, index: u64, at: usize) -> String {
        let mut left = index as usize;
        let mut place = vec![at];
        for &rows in self.rows.iter().rev() {
            place.insert(0, left % rows);
            left /= rows;
        }
        format!("{}: tokens{place:?}", self.path.display())
    }
}
