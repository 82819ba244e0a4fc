//! CUDA twins of the kernels: their sources, `<operation>.cu` beside each contract, and what is constants into them.
//!
//! A source is compiled for one shape: its constants are defined in front of it ([`program`]). An operation's
//! `cuda.rs` says with which constants, over which grid and with which arguments its kernels run, under the names and in
//! the order of the CPU's functions: one description, a [`Launch`], which a [`Driver`] carries out. There are two:
//!
//! - the GPU ([`Gpu::open`], feature `cuda`): compiled by NVRTC, products by cuBLASLt. The libraries are looked for when
//!   it is opened, so a program starts where there are none;
//! - [`cpu_emulator::CpuEmulator`] (feature `cpu_emulator`): the sources compiled as C++ and run by fibers on the CPU, to test all of
//!   this with no GPU. [`AsyncEmulator`] is the same with queues that run later, as a GPU's do.
//!
//! What goes from one GPU to another is [`nccl`]'s, with [`FakeNccl`] in its place for tests.
//!
//! # How the functions differ from the CPU's
//!
//! They take [`View`]s and [`ViewMut`]s of device memory for slices, and work is queued: it is done in order, and the
//! host waits in [`Gpu::copy_out`] and [`Gpu::synchronize`] alone. Tensors are f32 or bf16 ([`Stored`]); statistics
//! (`inverse_rms`, `lse`, `max` ...), gradients of weights and the optimizer's state are f32 either way. They fail where
//! the device does; a wrong length is a panic at the door, as on the CPU.

#[cfg(feature = "cpu_emulator")]
mod async_emulator;
#[cfg(feature = "cuda")]
mod cache;
#[cfg(feature = "cpu_emulator")]
mod capture;
#[cfg(feature = "cpu_emulator")]
mod captured_graph;
#[cfg(feature = "cpu_emulator")]
pub mod cpu_emulator;
#[cfg(feature = "cuda")]
mod cublaslt;
#[cfg(feature = "cuda")]
pub mod cudnn;
#[cfg(feature = "cuda")]
mod device;
mod driver;
mod element;
#[cfg(feature = "cpu_emulator")]
mod fake_nccl;
mod floor;
#[cfg(feature = "cuda")]
mod foreign;
pub mod fused;
pub(crate) mod launch;
#[cfg(feature = "cuda")]
mod libnccl;
mod memory;
pub mod nccl;
mod nccl_open;
#[cfg(feature = "cuda")]
pub mod nvrtc;
pub(crate) mod product;
mod queue;
#[cfg(feature = "cpu_emulator")]
mod queue_thread;
mod recording;
mod step;
mod views;

#[cfg(feature = "cpu_emulator")]
pub use async_emulator::AsyncEmulator;
pub use driver::{Driver, Event, GpuError, Job, Properties, Recording};
pub use element::{Element, Stored};
#[cfg(feature = "cpu_emulator")]
pub use fake_nccl::FakeNccl;
pub use floor::Floor;
pub use half::bf16;
pub use launch::{Argument, Launch, Module};
pub use memory::{Gpu, Memory};
pub use nccl_open::open_nccl;
pub use product::{Matrix, Product};
pub use recording::Graph;
pub use step::{OF_STEP, StepNumbers};
pub use views::{Span, View, ViewMut};

use std::fmt::Write;

const PRELUDE: &str = include_str!("prelude.cu");

/// An operation's CUDA source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// The operation; where a folder has several sources, this one's name.
    pub operation: &'static str,
    text: &'static str,
}

macro_rules! sources {
    ($($operation:literal: $($path:literal)+;)+) => {
        /// Every operation that has a twin.
        pub const SOURCES: &[Source] = &[$(Source {
            operation: $operation,
            text: concat!($(include_str!(concat!("../", $path))),+),
        }),+];
    };
}

sources!(
    "activation": "activation/activation.cu";
    "adamw": "adamw/adamw.cu";
    "attention": "attention/attention_common.cu" "attention/attention.cu";
    "attention_f32": "attention/attention_common.cu" "attention/attention_f32.cu";
    "attention_rows": "attention/attention_rows.cu";
    "cross_entropy": "cross_entropy/cross_entropy.cu";
    "dropout": "dropout/dropout.cu";
    "elementwise": "elementwise/elementwise.cu";
    "embedding": "embedding/embedding.cu";
    "layer_norm": "layer_norm/layer_norm.cu";
    "random": "random/random.cu";
    "rms_norm": "rms_norm/rms_norm.cu";
    "rope": "rope/rope.cu";
    "transpose": "transpose/transpose.cu";
);

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
pub struct CompileConstants {
    /// How tensors are stored.
    pub storage: Storage,
    /// Elements that a thread moves at once; see [`Storage::pack`].
    pub pack: usize,
    /// Threads of a block, a multiple of 32.
    pub threads: usize,
    /// The operation's own constants, as its source lists them.
    pub defines: Vec<(&'static str, f64)>,
}

/// The whole program of an operation: constants, prelude, kernels. Nothing is included.
#[must_use]
pub fn program(source: Source, constants: &CompileConstants) -> String {
    let bf16 = f64::from(u8::from(constants.storage == Storage::Bf16));
    #[allow(clippy::cast_precision_loss)] // a few hundred
    let common = [
        ("STORED_BF16", bf16),
        ("PACK", constants.pack as f64),
        ("THREADS", constants.threads as f64),
    ];
    let mut text = String::new();
    for (name, value) in common.iter().chain(&constants.defines) {
        // Writing to a string cannot fail. Whole numbers print without a point: they size arrays.
        let _ = writeln!(text, "#define {name} {value}");
    }
    text + PRELUDE + source.text
}
