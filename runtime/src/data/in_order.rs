//! Samples from a safetensors file, in the file's order, once.

use super::{Sample, Samples};
use crate::error::Error;
use crate::state::checkpoint::TensorFile;
use std::path::Path;

const NAME: &str = "tokens";

/// `tokens`, I64 `[steps, batch, seq_len + 1]`: sample `i` is row `i` of the first two dimensions.
pub struct InOrder {
    file: TensorFile,
    samples: u64,
    width: usize,
}

impl InOrder {
    /// Opens the file.
    ///
    /// # Errors
    /// A file that is missing or broken, or of another sequence length.
    pub fn open(path: &Path, seq_len: usize) -> Result<Self, Error> {
        let file = TensorFile::open(path)?;
        let shape = file.info(NAME)?.shape.clone();
        let Some((&width, rows)) = shape.split_last() else {
            return Err(Error::file(path, "`tokens` has no dimensions"));
        };
        if width != seq_len + 1 {
            let problem = format!(
                "`tokens` has {width} tokens a sample; the plan's sequence length asks for {}",
                seq_len + 1
            );
            return Err(Error::file(path, problem));
        }
        Ok(Self { file, samples: rows.iter().product::<usize>() as u64, width })
    }
}

impl Samples for InOrder {
    fn len(&self) -> u64 {
        self.samples
    }

    fn repeats(&self) -> bool {
        false
    }

    fn read(&self, index: u64) -> Result<Sample, Error> {
        let begin = index * self.width as u64;
        self.file.read_integers(NAME, begin, self.width).map(Sample::of_tokens)
    }
}
