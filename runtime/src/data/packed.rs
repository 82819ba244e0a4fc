//! Sequences that are several documents one after the other.

use super::{Sample, Samples};
use crate::error::Error;

/// Samples in which a token ends each document. It belongs to the document that it ends, and
/// predicts nothing: what comes next is another document's.
pub struct Packed {
    samples: Box<dyn Samples>,
    end: i64,
}

impl Packed {
    /// `samples`, divided behind each token `end`.
    pub fn new(samples: Box<dyn Samples>, end: i64) -> Self {
        Self { samples, end }
    }
}

impl Samples for Packed {
    fn len(&self) -> u64 {
        self.samples.len()
    }

    fn repeats(&self) -> bool {
        self.samples.repeats()
    }

    fn read(&self, index: u64) -> Result<Sample, Error> {
        let mut sample = self.samples.read(index)?;
        let count = sample.tokens.len();
        let ends = (0..count).filter(|&at| sample.tokens[at] == self.end);
        for at in ends {
            sample.labels[at] = -1;
            if at + 1 < count {
                sample.starts.push(at + 1);
            }
        }
        Ok(sample)
    }

    fn place(&self, index: u64, at: usize) -> String {
        self.samples.place(index, at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct One(Vec<i64>);

    impl Samples for One {
        fn len(&self) -> u64 {
            1
        }

        fn repeats(&self) -> bool {
            true
        }

        fn read(&self, _: u64) -> Result<Sample, Error> {
            Ok(Sample::of_tokens(self.0.clone()))
        }
    }

    #[test]
    fn a_token_ends_its_document_and_predicts_nothing() -> Result<(), Error> {
        let packed = Packed::new(Box::new(One(vec![5, 6, 0, 0, 7, 8, 0, 9])), 0);
        let sample = packed.read(0)?;
        assert_eq!(sample.documents(), [0..3, 3..4, 4..7]);
        assert_eq!(sample.labels, [6, 0, -1, -1, 8, 0, -1]);
        Ok(())
    }
}
