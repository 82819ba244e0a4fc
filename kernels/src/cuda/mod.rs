//! CUDA twins of the kernels: their sources, `<operation>.cu` beside each contract, and what is baked into them.
//!
//! A source is compiled for one shape: its constants are defined in front of it ([`program`]). This module is text
//! only and needs no CUDA; compiling is in [`nvrtc`], behind the feature `cuda`.

#[cfg(feature = "cuda")]
pub mod nvrtc;

use std::fmt::Write;

const PRELUDE: &str = include_str!("prelude.cu");

/// An operation's CUDA source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// The operation's folder.
    pub operation: &'static str,
    text: &'static str,
}

macro_rules! sources {
    ($($operation:ident)+) => {
        /// Every operation that has a twin.
        pub const SOURCES: &[Source] = &[$(Source {
            operation: stringify!($operation),
            text: include_str!(concat!("../", stringify!($operation), "/", stringify!($operation), ".cu")),
        }),+];
    };
}

sources!(activation adamw attention cross_entropy dropout elementwise embedding layer_norm rms_norm rope);

impl Source {
    /// The source of an operation, where it has one.
    #[must_use]
    pub fn of(operation: &str) -> Option<Self> {
        SOURCES.iter().find(|source| source.operation == operation).copied()
    }

    /// Names of its kernels, in order.
    pub fn kernels(&self) -> impl Iterator<Item = &'static str> {
        let declared = self.text.split("extern \"C\" __global__").skip(1);
        let declared = declared.filter_map(|rest| rest.split_once("__launch_bounds__("));
        let declared = declared.filter_map(|(_, bounds)| bounds.split_once(')'));
        declared.filter_map(|(_, rest)| rest.split_once('(').map(|(name, _)| name.trim()))
    }
}

/// How tensors are stored. Arithmetic is in f32 either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Storage {
    /// Four bytes an element.
    F32,
    /// Two bytes an element: the upper half of an f32.
    Bf16,
}

impl Storage {
    /// Bytes of an element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    /// Elements that a thread moves at once where rows have `row` elements: at most 16 bytes, and a divisor of
    /// the row.
    #[must_use]
    pub fn pack(self, row: usize) -> usize {
        let mut pack = 16 / self.bytes();
        while !row.is_multiple_of(pack) {
            pack /= 2;
        }
        pack
    }
}

/// What is compiled into a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Baked {
    /// How tensors are stored.
    pub storage: Storage,
    /// Elements that a thread moves at once; see [`Storage::pack`].
    pub pack: usize,
    /// Threads of a block, a multiple of 32.
    pub threads: usize,
    /// The operation's own constants, as its source lists them.
    pub constants: Vec<(&'static str, f64)>,
}

/// The whole program of an operation: constants, prelude, kernels. Nothing is included.
#[must_use]
pub fn program(source: Source, baked: &Baked) -> String {
    let bf16 = f64::from(u8::from(baked.storage == Storage::Bf16));
    #[allow(clippy::cast_precision_loss)] // a few hundred
    let common =
        [("STORED_BF16", bf16), ("PACK", baked.pack as f64), ("THREADS", baked.threads as f64)];
    let mut text = String::new();
    for (name, value) in common.iter().chain(&baked.constants) {
        // Writing to a string cannot fail. Whole numbers print without a point: they size arrays.
        let _ = writeln!(text, "#define {name} {value}");
    }
    text + PRELUDE + source.text
}
