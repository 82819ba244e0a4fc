//! What travels: vectors of a few element types, and memory of devices.

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

/// Memory of a device on its way between ranks whose process shares the device.
///
/// What is computed here is queued on the stream of the rank that gave this buffer, behind what others gave, and keeps
/// alive what it reads until it has run.
pub trait DeviceBuffer: Any + Debug + Send + Sync {
    /// Its element type.
    fn dtype(&self) -> Dtype;

    /// Elements.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// To look at what it is.
    fn as_any(&self) -> &dyn Any;

    /// As NCCL takes it, where it is memory of a GPU.
    fn nccl_buffer(&mut self) -> Option<&mut dyn NcclBuffer> {
        None
    }

    /// To take it as what it is.
    fn into_any(self: Box<Self>) -> Box<dyn Any>;

    /// A range of several, combined in their order, as wide as the device sums and rounded once.
    ///
    /// # Errors
    /// They are of another device or element type.
    fn reduced(
        &self,
        given: &[&dyn DeviceBuffer],
        range: Range<usize>,
        op: Op,
    ) -> Result<Box<dyn DeviceBuffer>, DeviceError>;

    /// Ranges of several, one behind the other.
    ///
    /// # Errors
    /// They are of another device or element type.
    fn joined(
        &self,
        parts: &[(&dyn DeviceBuffer, Range<usize>)],
    ) -> Result<Box<dyn DeviceBuffer>, DeviceError>;
}

/// A vector of one of the element types, or memory of a device.
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
    /// Memory of a device, where the communicator carries it.
    Device(Box<dyn DeviceBuffer>),
}

impl Payload {
    /// No elements of that type.
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

    /// Its elements, little-endian; none of a device's memory.
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

    /// Elements of that type from little-endian bytes.
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

    /// Elements.
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

/// A type that can travel.
pub trait Element: kernels::cuda::Element + Default + PartialOrd {
    /// Its name on the wire.
    const DTYPE: Dtype;

    /// A vector of it as payload.
    fn wrap(values: Vec<Self>) -> Payload;

    /// A payload of it as vector; `None` if it is of another type.
    fn unwrap(payload: Payload) -> Option<Vec<Self>>;

    /// A payload of it as slice; `None` if it is of another type.
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
