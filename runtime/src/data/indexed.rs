//! Megatron's indexed data: tokens in `.bin`, document boundaries in `.idx`.
//!
//! The documents are concatenated to one stream. Sample `i` of an epoch is a window of the stream
//! that overlaps the next window by one token. Only seed and epoch determine the order of windows.

use super::permutation::{Permutation, mix};
use super::{Sample, Samples};
use crate::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const MAGIC: &[u8] = b"MMIDIDX\0\0";
const HEADER: usize = 34;

/// Bytes of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    U8,
    I8,
    I16,
    I32,
    I64,
    U16,
}

impl Width {
    /// Megatron's type codes; 6 and 7 are floats, which cannot be tokens.
    fn of(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::U8),
            2 => Some(Self::I8),
            3 => Some(Self::I16),
            4 => Some(Self::I32),
            5 => Some(Self::I64),
            8 => Some(Self::U16),
            _ => None,
        }
    }

    fn bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    fn read(self, bytes: &[u8]) -> Vec<i64> {
        fn each<const N: usize>(bytes: &[u8], read: impl Fn([u8; N]) -> i64) -> Vec<i64> {
            bytes.as_chunks::<N>().0.iter().map(|chunk| read(*chunk)).collect()
        }
        match self {
            Self::U8 => each(bytes, |[b]: [u8; 1]| i64::from(b)),
            Self::I8 => each(bytes, |b| i64::from(i8::from_le_bytes(b))),
            Self::I16 => each(bytes, |b| i64::from(i16::from_le_bytes(b))),
            Self::U16 => each(bytes, |b| i64::from(u16::from_le_bytes(b))),
            Self::I32 => each(bytes, |b| i64::from(i32::from_le_bytes(b))),
            Self::I64 => each(bytes, i64::from_le_bytes),
        }
    }
}

/// Consecutive tokens in the file.
#[derive(Clone, Copy, Debug)]
struct Sequence {
    /// First token within the stream.
    begin: u64,
    /// Tokens.
    tokens: u64,
    /// Bytes before it in the file.
    offset: u64,
}

/// Indexed data. Tokens stay in the file and the operating system's page cache.
pub struct Indexed {
    path: PathBuf,
    bin: File,
    width: Width,
    sequences: Vec<Sequence>,
    seq_len: u64,
    samples: u64,
    seed: u64,
}

impl Indexed {
    /// Opens `.bin` and `.idx`, given either.
    ///
    /// # Errors
    /// Files that are missing or broken, or have less than one sample.
    pub fn open(path: &Path, seq_len: usize, seed: u64) -> Result<Self, Error> {
        let (bin_path, idx_path) = (path.with_extension("bin"), path.with_extension("idx"));
        let bin = File::open(&bin_path).map_err(Error::unopened(&bin_path))?;
        let idx = std::fs::read(&idx_path).map_err(|problem| {
            let wanted = "valid: Megatron's index, which says where the documents of .bin begin";
            Error::file(&idx_path, format!("{problem}; {wanted}"))
        })?;
        let (width, sequences) =
            read_index(&idx).map_err(|problem| Error::file(&idx_path, problem))?;
        let length = bin.metadata().map_err(Error::io(&bin_path))?.len();
        let bytes = |of: &Sequence| of.tokens * width.bytes() as u64;
        let ends = |of: &Sequence| of.offset.saturating_add(bytes(of));
        let needed = sequences.iter().map(ends).max().unwrap_or(0);
        if length < needed {
            let problem = format!(
                "truncated: {length} of {needed} bytes that the index names; copy .bin and .idx anew"
            );
            return Err(Error::file(&bin_path, problem));
        }
        let tokens = sequences.last().map_or(0, |last| last.begin + last.tokens);
        let samples = tokens.saturating_sub(1) / seq_len as u64;
        if samples == 0 {
            let problem = format!(
                "{tokens} tokens make no sample of {}; valid: more tokens, or a plan with a smaller \
                 --seq-len",
                seq_len + 1
            );
            return Err(Error::file(&bin_path, problem));
        }
        let seq_len = seq_len as u64;
        Ok(Self { path: bin_path, bin, width, sequences, seq_len, samples, seed })
    }

    /// The first token of a sample.
    fn begin(&self, index: u64) -> u64 {
        let epoch = index / self.samples;
        let order = Permutation::new(self.samples, mix(self.seed) ^ mix(!epoch));
        order.of(index % self.samples) * self.seq_len
    }

    /// Tokens `begin..begin + count` of the stream.
    fn stream(&self, begin: u64, count: u64) -> Result<Vec<i64>, Error> {
        let first = self.sequences.partition_point(|of| of.begin + of.tokens <= begin);
        let mut tokens = Vec::with_capacity(count as usize);
        for of in &self.sequences[first..] {
            let skip = (begin + tokens.len() as u64) - of.begin;
            let take = (of.tokens - skip).min(count - tokens.len() as u64);
            let mut bytes = vec![0; take as usize * self.width.bytes()];
            let at = of.offset + skip * self.width.bytes() as u64;
            self.bin.read_exact_at(&mut bytes, at).map_err(Error::io(&self.path))?;
            tokens.extend(self.width.read(&bytes));
            if tokens.len() as u64 == count {
                break;
            }
        }
        Ok(tokens)
    }
}

/// The token width and the sequences that have tokens.
fn read_index(idx: &[u8]) -> Result<(Width, Vec<Sequence>), String> {
    let number = |at: usize, bytes: usize| -> Result<u64, String> {
        let slice = idx.get(at..at + bytes).ok_or("truncated")?;
        Ok(slice.iter().rev().fold(0, |n, &byte| (n << 8) | u64::from(byte)))
    };
    if idx.get(..MAGIC.len()) != Some(MAGIC) {
        return Err("no Megatron index: it does not begin with MMIDIDX".to_owned());
    }
    let version = number(9, 8)?;
    if version != 1 {
        return Err(format!("version {version}; valid: 1"));
    }
    let code = number(17, 1)? as u8;
    let width = Width::of(code)
        .ok_or_else(|| format!("type code {code} is no integer; valid: 1, 2, 3, 4, 5, 8"))?;
    let count = number(18, 8)? as usize;
    let offsets = HEADER + count.checked_mul(4).ok_or("absurd number of sequences")?;
    let (mut begin, mut sequences) = (0, Vec::new());
    for n in 0..count {
        let tokens = number(HEADER + 4 * n, 4)?;
        let offset = number(offsets + 8 * n, 8)?;
        if tokens > 0 {
            sequences.push(Sequence { begin, tokens, offset });
        }
        begin += tokens;
    }
    Ok((width, sequences))
}

impl Samples for Indexed {
    fn len(&self) -> u64 {
        self.samples
    }

    fn repeats(&self) -> bool {
        true
    }

    fn read(&self, index: u64) -> Result<Sample, Error> {
        self.stream(self.begin(index), self.seq_len + 1).map(Sample::of_tokens)
    }

    fn place(&self, index: u64, at: usize) -> String {
        format!("{}: token {}", self.path.display(), self.begin(index) + at as u64)
    }
}
