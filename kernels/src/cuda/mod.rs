//! CUDA versions of the kernels: the sources (`<operation>.cu` beside each contract) and the
//! constants compiled into them.
//!
//! A source is compiled for one shape. Its constants are defined in front of it ([`program`]). An
//! operation's `cuda.rs` chooses the constants, the grid and the arguments of its kernels; its
//! functions have the names and the order of the CPU's. Each call becomes a [`Launch`], which a
//! [`Driver`] carries out. There are two kinds of driver:
//!
//! - the GPU ([`Gpu::open`], feature `cuda`): kernels compiled by NVRTC, products by cuBLASLt. The
//!   libraries are loaded when a GPU is opened, so a program starts without them;
//! - [`cpu_emulator::CpuEmulator`] (feature `cpu_emulator`): the same sources compiled as C++ and
//!   run on fibers of the CPU, for tests without a GPU. [`AsyncEmulator`] adds queues that run
//!   later, as a GPU's streams do.
//!
//! Transfers between GPUs go through [`nccl`]; [`FakeNccl`] replaces it in tests.
//!
//! # Differences from the CPU functions
//!
//! The functions take [`View`]s and [`ViewMut`]s of device memory instead of slices, and they queue
//! work. A queue runs in order; the host waits only in [`Gpu::copy_out`] and [`Gpu::synchronize`].
//! Tensors are f32 or bf16 ([`Stored`]); statistics (`inverse_rms`, `lse`, `max` ...), gradients of
//! weights and the optimizer state are always f32. The functions return an error if the device
//! fails and panic if a length is wrong, as the CPU's do.

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
    /// Name of the operation, or of this source if a folder has several.
    pub operation: &'static str,
    text: &'static str,
}

macro_rules! sources {
    ($($operation:literal: $($path:literal)+;)+) => {
        /// Every CUDA source.
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
    "latent_heads": "latent_heads/latent_heads.cu";
    "layer_norm": "layer_norm/layer_norm.cu";
    "random": "random/random.cu";
    "rms_norm": "rms_norm/rms_norm.cu";
    "rope": "rope/rope.cu";
    "sinks": "sinks/sinks.cu";
    "transpose": "transpose/transpose.cu";
    "weighted_rows": "weighted_rows/weighted_rows.cu";
);

impl Source {
    /// The source of an operation, if it has one.
    #[must_use]
    pub fn of(operation: &str) -> Option<Self> {
        SOURCES.iter().find(|source| source.operation == operation).copied()
    }

    /// Its text, with what is in front of every source.
    #[must_use]
    pub fn text(&self) -> String {
        PRELUDE.to_owned() + self.text
    }

    /// Names of its kernels, in source order.
    pub fn kernels(&self) -> impl Iterator<Item = &'static str> {
        let declared = self.text.split("extern \"C\" __global__").skip(1);
        let declared = declared.filter_map(|rest| rest.split_once("__launch_bounds__("));
        let declared = declared.filter_map(|(_, bounds)| bounds.split_once(')'));
        declared.filter_map(|(_, rest)| rest.split_once('(').map(|(name, _)| name.trim()))
    }

    /// Whether a kernel waits for the one launched before it (`prelude.cu`).
    pub(crate) fn waits(&self, kernel: &str) -> bool {
        let kernels = self.text.split("extern \"C\" __global__");
        let mut own = kernels.filter(|text| text.contains(&format!(" {kernel}(")));
        own.any(|text| text.contains("await_kernel_before();"))
    }
}

/// Storage type of tensors. Arithmetic is always in f32.
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

    /// Elements that a thread moves with one instruction: at most 16 bytes, and a divisor of `row`,
    /// the elements of a row.
    #[must_use]
    pub fn pack(self, row: usize) -> usize {
        let mut pack = 16 / self.bytes();
        while !row.is_multiple_of(pack) {
            pack /= 2;
        }
        pack
    }
}

/// Constants compiled into a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct CompileConstants {
    /// How tensors are stored.
    pub storage: Storage,
    /// Elements that a thread moves with one instruction; see [`Storage::pack`].
    pub pack: usize,
    /// Threads of a block; a multiple of 32.
    pub threads: usize,
    /// The operation's own constants, which its source lists in its header.
    pub defines: Vec<(&'static str, f64)>,
}

/// The complete program of an operation: constants, prelude, kernels. It has no `#include`.
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
