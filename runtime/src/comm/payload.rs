//! Data that ranks exchange: vectors of a few element types, or device memory.

use super::{NcclBuffer, Op};
use crate::device_error::DeviceError;
use half::bf16;
use std::any::Any;
use std::fmt::Debug;
use std::ops::Range;

/// Element type of a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// 32-bit float.
    F32,
    /// 64-bit float.
    F64,
    /// 64-bit signed integer.
    I64,
    /// Byte.
    U8,
    /// 16-bit float: the upper half of an `F32`.
    Bf16,
}

impl Dtype {
    pub(in crate::comm) const ALL: [Self; 5] =
        [Self::F32, Self::F64, Self::I64, Self::U8, Self::Bf16];

    /// Name in errors.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::I64 => "i64",
            Self::U8 => "u8",
            Self::Bf16 => "bf16",
        }
    }

    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F64 | Self::I64 => 8,
            Self::U8 => 1,
            Self::Bf16 => 2,
        }
    }
}

/// Device memory that travels between ranks.
///
/// [`Self::reduced`] and [`Self::joined`] work between ranks whose process shares the device. They
/// are queued on the stream of the rank that gave this buffer, after the work on the other buffers,
/// and keep what they read alive until they have run.
pub trait DeviceBuffer: Any + Debug + Send + Sync {
    /// Its element type.
    fn dtype(&self) -> Dtype;

    /// Number of elements.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// For a downcast by reference.
    fn as_any(&self) -> &dyn Any;

    /// The buffer as NCCL takes it, if it is memory of a GPU.
    fn nccl_buffer(&mut self) -> Option<&mut dyn NcclBuffer> {
        None
    }

    /// For a downcast by value.
    fn into_any(self: Box<Self>) -> Box<dyn Any>;

    /// Reduces a range of several buffers in their order, in the precision in which the device
    /// sums, rounded once.
    ///
    /// # Errors
    /// Buffers of another device or element type.
    fn reduced(
        &self,
        given: &[&dyn DeviceBuffer],
        range: Range<usize>,
        op: Op,
    ) -> Result<Box<dyn DeviceBuffer>, DeviceError>;

    /// Concatenates ranges of several buffers.
    ///
    /// # Errors
    /// Buffers of another device or element type.
    fn joined(
        &self,
        parts: &[(&dyn DeviceBuffer, Range<usize>)],
    ) -> Result<Box<dyn DeviceBuffer>, DeviceError>;
}

/// A vector of one of the element types, or device memory.
#[derive(Debug)]
pub enum Payload {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 64-bit floats.
    F64(Vec<f64>),
    /// 64-bit signed integers.
    I64(Vec<i64>),
    /// Bytes.
    U8(Vec<u8>),
    /// 16-bit floats.
    Bf16(Vec<bf16>),
    /// Device memory, if the communicator transfers it.
    Device(Box<dyn DeviceBuffer>),
}

impl Payload {
    /// No elements of this type.
    pub fn empty(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32(Vec::new()),
            Dtype::F64 => Self::F64(Vec::new()),
            Dtype::I64 => Self::I64(Vec::new()),
            Dtype::U8 => Self::U8(Vec::new()),
            Dtype::Bf16 => Self::Bf16(Vec::new()),
        }
    }

    /// Its element type.
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::F32(_) => Dtype::F32,
            Self::F64(_) => Dtype::F64,
            Self::I64(_) => Dtype::I64,
            Self::U8(_) => Dtype::U8,
            Self::Bf16(_) => Dtype::Bf16,
            Self::Device(buffer) => buffer.dtype(),
        }
    }

    /// The elements, little-endian; empty for device memory.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::F32(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Self::F64(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Self::I64(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Self::U8(v) => v.clone(),
            Self::Bf16(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Self::Device(_) => Vec::new(),
        }
    }

    /// Elements of this type from little-endian bytes.
    pub(super) fn from_bytes(dtype: Dtype, bytes: &[u8]) -> Self {
        fn each<const N: usize, T>(bytes: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
            bytes.as_chunks::<N>().0.iter().map(|chunk| read(*chunk)).collect()
        }
        match dtype {
            Dtype::F32 => Self::F32(each(bytes, f32::from_le_bytes)),
            Dtype::F64 => Self::F64(each(bytes, f64::from_le_bytes)),
            Dtype::I64 => Self::I64(each(bytes, i64::from_le_bytes)),
            Dtype::U8 => Self::U8(bytes.to_vec()),
            Dtype::Bf16 => Self::Bf16(each(bytes, bf16::from_le_bytes)),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(v) => v.len(),
            Self::F64(v) => v.len(),
            Self::I64(v) => v.len(),
            Self::U8(v) => v.len(),
            Self::Bf16(v) => v.len(),
            Self::Device(buffer) => buffer.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// An element type that ranks can exchange.
pub trait Element: kernels::cuda::Element + Default + PartialOrd {
    /// The type's tag.
    const DTYPE: Dtype;

    /// A vector as payload.
    fn wrap(values: Vec<Self>) -> Payload;

    /// The vector of a payload; `None` if it has another type.
    fn unwrap(payload: Payload) -> Option<Vec<Self>>;

    /// The slice of a payload; `None` if it has another type.
    fn peek(payload: &Payload) -> Option<&[Self]>;

    /// Sum of two.
    #[must_use]
    fn plus(self, other: Self) -> Self;
}

macro_rules! element {
    ($type:ty, $variant:ident, $plus:expr) => {
        impl Element for $type {
            const DTYPE: Dtype = Dtype::$variant;

            fn wrap(values: Vec<Self>) -> Payload {
                Payload::$variant(values)
            }

            fn unwrap(payload: Payload) -> Option<Vec<Self>> {
                match payload {
                    Payload::$variant(values) => Some(values),
                    _ => None,
                }
            }

            fn peek(payload: &Payload) -> Option<&[Self]> {
                match payload {
                    Payload::$variant(values) => Some(values),
                    _ => None,
                }
            }

            fn plus(self, other: Self) -> Self {
                $plus(self, other)
            }
        }
    };
}

element!(f32, F32, |a, b| a + b);
element!(f64, F64, |a, b| a + b);
element!(i64, I64, i64::wrapping_add);
element!(u8, U8, u8::wrapping_add);
element!(bf16, Bf16, |a, b| a + b);
