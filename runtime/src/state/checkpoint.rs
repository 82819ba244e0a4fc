//! Hugging Face safetensors files: tensors are read whole and written whole, however the model is
//! split.

use crate::error::Error;
use crate::scalar::Scalar;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A whole tensor: shape and elements, row-major.
pub type Whole<T> = (Vec<usize>, Vec<T>);

/// Whole tensors by name.
pub type Tensors<T> = BTreeMap<String, Whole<T>>;

/// One safetensors file, its header read and checked against its length.
pub struct TensorFile {
    path: PathBuf,
    file: File,
    /// Bytes before the first tensor.
    begin: u64,
    metadata: Metadata,
}

/// What `--init-from` takes.
const CHECKPOINTS: &str = "valid: a .safetensors file, or a directory with model.safetensors or \
                           model.safetensors.index.json";

/// Tensors that an error names.
const NAMED: usize = 3;

impl TensorFile {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// A file that is missing, truncated, or not in safetensors format.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let mut file = File::open(path).map_err(Error::unopened(path))?;
        let length = file.metadata().map_err(Error::io(path))?.len();
        let truncated =
            || Error::file(path, format!("truncated: it has only {length} bytes; copy it anew"));
        let mut size = [0; 8];
        file.read_exact(&mut size).map_err(|_| truncated())?;
        let size = u64::from_le_bytes(size);
        if size > length.saturating_sub(8) {
            return Err(truncated());
        }
        let mut header = vec![0; size as usize];
        file.read_exact(&mut header).map_err(Error::io(path))?;
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|error| Error::file(path, format!("no safetensors file: {error}")))?;
        let begin = 8 + size;
        let needed = begin + metadata.data_len() as u64;
        if length < needed {
            let problem = format!("truncated: {length} of {needed} bytes; copy it anew");
            return Err(Error::file(path, problem));
        }
        Ok(Self { path: path.to_owned(), file, begin, metadata })
    }

    /// Names of its tensors.
    pub fn names(&self) -> Vec<String> {
        self.metadata.tensors().into_keys().collect()
    }

    /// The header's entry of a tensor.
    ///
    /// # Errors
    /// The file has no tensor of that name.
    pub fn info(&self, name: &str) -> Result<&TensorInfo, Error> {
        let names = || self.metadata.tensors().into_keys().collect();
        let missing = || missing(&self.path, name, names());
        self.metadata.info(name).ok_or_else(missing)
    }

    fn bytes(&self, info: &TensorInfo) -> Result<Vec<u8>, Error> {
        let (begin, end) = info.data_offsets;
        let mut bytes = vec![0; end - begin];
        let at = self.begin + begin as u64;
        self.file.read_exact_at(&mut bytes, at).map_err(Error::io(&self.path))?;
        Ok(bytes)
    }

    /// Reads a tensor of numbers.
    ///
    /// # Errors
    /// The tensor is missing, or of a type that cannot be read.
    pub fn read<T: Scalar>(&self, name: &str) -> Result<Whole<T>, Error> {
        let info = self.info(name)?;
        let bytes = self.bytes(info)?;
        let values = match info.dtype {
            Dtype::F32 => of_chunks(&bytes, |b| f64::from(f32::from_le_bytes(b))),
            Dtype::F64 => of_chunks(&bytes, f64::from_le_bytes),
            Dtype::BF16 => of_chunks(&bytes, |b: [u8; 2]| {
                f64::from(f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16))
            }),
            other => {
                let problem = format!("tensor `{name}` is {other:?}; valid: F32, F64, BF16");
                return Err(Error::file(&self.path, problem));
            }
        };
        Ok((info.shape.clone(), values.into_iter().map(T::from_f64).collect()))
    }

    /// Reads elements `begin..begin + count` of a tensor of integers.
    ///
    /// # Errors
    /// The tensor is missing, of another type, or shorter.
    pub fn read_integers(&self, name: &str, begin: u64, count: usize) -> Result<Vec<i64>, Error> {
        let info = self.info(name)?;
        if info.dtype != Dtype::I64 {
            let problem = format!("tensor `{name}` is {:?}; valid: I64", info.dtype);
            return Err(Error::file(&self.path, problem));
        }
        let mut bytes = vec![0; count * 8];
        let at = self.begin + info.data_offsets.0 as u64 + begin * 8;
        self.file.read_exact_at(&mut bytes, at).map_err(Error::io(&self.path))?;
        Ok(of_chunks(&bytes, i64::from_le_bytes))
    }
}

/// A file without a tensor that is asked for. `names` are those that it has.
fn missing(path: &Path, name: &str, names: Vec<String>) -> Error {
    let has = first_of(names);
    Error::file(
        path,
        format!("there is no tensor `{name}`; valid: a file with it (this has {has})"),
    )
}

/// The first names in the order of the alphabet, and how many more there are.
pub fn first_of(mut names: Vec<String>) -> String {
    names.sort_unstable();
    let others = names.len().saturating_sub(NAMED);
    names.truncate(NAMED);
    match others {
        0 => names.join(", "),
        _ => format!("{}, and {others} more", names.join(", ")),
    }
}

fn of_chunks<const N: usize, R>(bytes: &[u8], read: impl Fn([u8; N]) -> R) -> Vec<R> {
    bytes.as_chunks::<N>().0.iter().map(|chunk| read(*chunk)).collect()
}

/// A checkpoint: one file, or several with an index.
pub struct Checkpoint {
    path: PathBuf,
    files: Vec<TensorFile>,
    file_of: HashMap<String, usize>,
}

/// The part of `model.safetensors.index.json` that maps tensors to files.
#[derive(serde::Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens a directory (`model.safetensors`, or shards with `model.safetensors.index.json`) or
    /// one file.
    ///
    /// # Errors
    /// Files that are missing or broken.
    pub fn open(path: &Path) -> Result<Self, Error> {
        std::fs::metadata(path)
            .map_err(|error| Error::file(path, format!("{error}; {CHECKPOINTS}")))?;
        let index = path.join("model.safetensors.index.json");
        let paths = if path.is_file() {
            vec![path.to_owned()]
        } else if index.is_file() {
            shards(path, &index)?
        } else {
            vec![path.join("model.safetensors")]
        };
        if let [only] = paths.as_slice()
            && !only.is_file()
        {
            let problem = format!("no {}; {CHECKPOINTS}", only.display());
            return Err(Error::file(path, problem));
        }
        let files: Vec<TensorFile> =
            paths.iter().map(|path| TensorFile::open(path)).collect::<Result<_, _>>()?;
        let named = files.iter().enumerate();
        let named = named.flat_map(|(n, file)| file.names().into_iter().map(move |name| (name, n)));
        Ok(Self { path: path.to_owned(), file_of: named.collect(), files })
    }

    /// Names of its tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.file_of.keys().map(String::as_str)
    }

    /// Reads a tensor.
    ///
    /// # Errors
    /// The tensor is missing, or has another shape.
    pub fn read<T: Scalar>(&self, name: &str, shape: &[usize]) -> Result<Vec<T>, Error> {
        let Some(&file) = self.file_of.get(name) else {
            return Err(missing(&self.path, name, self.file_of.keys().cloned().collect()));
        };
        let (found, values) = self.files[file].read(name)?;
        if found == shape {
            return Ok(values);
        }
        let problem = format!(
            "tensor `{name}` is {found:?}; valid: {shape:?}, as in the model this program was \
             generated for"
        );
        Err(Error::file(&self.path, problem))
    }
}

fn shards(directory: &Path, index: &Path) -> Result<Vec<PathBuf>, Error> {
    let text = std::fs::read_to_string(index).map_err(Error::unopened(index))?;
    let read: Index = serde_json::from_str(&text).map_err(|error| {
        let wanted = "valid: the index of Hugging Face, with `weight_map`";
        Error::file(index, format!("{error}; {wanted}"))
    })?;
    let mut names: Vec<String> = read.weight_map.into_values().collect();
    names.sort_unstable();
    names.dedup();
    Ok(names.into_iter().map(|name| directory.join(name)).collect())
}

/// Writes whole tensors, in the order and layout of the safetensors library, one at a time.
///
/// # Errors
/// Those of the operating system.
pub fn write<T: Scalar>(to: &mut dyn Write, tensors: &Tensors<T>) -> std::io::Result<()> {
    let wide = size_of::<T>() == 8;
    let dtype = if wide { Dtype::F64 } else { Dtype::F32 };
    let mut end = 0;
    let info = |(name, (shape, values)): (&String, &Whole<T>)| {
        let begin = end;
        end += values.len() * size_of::<T>();
        let data_offsets = (begin, end);
        (name.clone(), TensorInfo { dtype, shape: shape.clone(), data_offsets })
    };
    let infos = tensors.iter().map(info).collect();
    let metadata = Metadata::new(None, infos).map_err(std::io::Error::other)?;
    let mut header = serde_json::to_vec(&metadata)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    to.write_all(&(header.len() as u64).to_le_bytes())?;
    to.write_all(&header)?;
    tensors.values().try_for_each(|(_, values)| to.write_all(&to_bytes(values, wide)))
}

fn to_bytes<T: Scalar>(values: &[T], wide: bool) -> Vec<u8> {
    let numbers = values.iter().map(|value| value.to_f64());
    match wide {
        true => numbers.flat_map(f64::to_le_bytes).collect(),
        // Exact: the values are f32.
        false => numbers.flat_map(|value| (value as f32).to_le_bytes()).collect(),
    }
}
