//! A kernel launch: a kernel of a compiled source, a grid and arguments.

use super::{CompileConstants, Source, Storage};
use crate::Output;
use std::sync::Arc;

/// An argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Argument {
    /// Address of device memory; 0 is null.
    Address(u64),
    /// `int`.
    I32(i32),
    /// `unsigned`.
    U32(u32),
    /// `long long`.
    I64(i64),
    /// `unsigned long long`.
    U64(u64),
    /// `float`.
    F32(f32),
    /// `double`.
    F64(f64),
}

impl Argument {
    /// Its bits, in the low bytes of the type's size.
    #[must_use]
    #[allow(clippy::cast_sign_loss)] // bits
    pub fn bits(self) -> u64 {
        match self {
            Self::Address(bits) | Self::U64(bits) => bits,
            Self::I32(x) => u64::from(x as u32),
            Self::U32(x) => u64::from(x),
            Self::I64(x) => x as u64,
            Self::F32(x) => u64::from(x.to_bits()),
            Self::F64(x) => x.to_bits(),
        }
    }

    /// A letter for its type: `p` is a pointer, `i` and `u` have 32 bits, `l` and `U` 64, `f` is a
    /// float, `d` a double.
    #[must_use]
    pub const fn letter(self) -> char {
        match self {
            Self::Address(_) => 'p',
            Self::I32(_) => 'i',
            Self::U32(_) => 'u',
            Self::I64(_) => 'l',
            Self::U64(_) => 'U',
            Self::F32(_) => 'f',
            Self::F64(_) => 'd',
        }
    }
}

impl From<i32> for Argument {
    fn from(x: i32) -> Self {
        Self::I32(x)
    }
}

impl From<u32> for Argument {
    fn from(x: u32) -> Self {
        Self::U32(x)
    }
}

impl From<i64> for Argument {
    fn from(x: i64) -> Self {
        Self::I64(x)
    }
}

impl From<u64> for Argument {
    fn from(x: u64) -> Self {
        Self::U64(x)
    }
}

impl From<f32> for Argument {
    fn from(x: f32) -> Self {
        Self::F32(x)
    }
}

/// A source with its constants: the unit of compilation, which also fixes the threads of a block.
#[derive(Clone, Debug)]
pub struct Module {
    source: Source,
    constants: Arc<CompileConstants>,
}

impl Module {
    /// `operation`, for threads that move `pack` elements with one instruction.
    #[track_caller]
    pub(crate) fn new(
        operation: &str,
        storage: Storage,
        pack: usize,
        threads: usize,
        defines: Vec<(&'static str, f64)>,
    ) -> Self {
        let Some(source) = Source::of(operation) else { panic!("{operation} has no CUDA source") };
        Self { source, constants: Arc::new(CompileConstants { storage, pack, threads, defines }) }
    }

    /// The source.
    #[must_use]
    pub fn source(&self) -> Source {
        self.source
    }

    /// The constants it is compiled with.
    #[must_use]
    pub fn constants(&self) -> &CompileConstants {
        &self.constants
    }

    pub(crate) fn threads(&self) -> usize {
        self.constants.threads
    }

    /// A launch in which each thread handles one pack of a tensor.
    pub(crate) fn over(
        &self,
        elements: usize,
        kernel: &'static str,
        arguments: Vec<Argument>,
    ) -> Launch {
        let each = self.constants.threads * self.constants.pack;
        self.launch(kernel, [blocks(elements, each), 1], arguments)
    }

    /// A launch of a kernel over a grid.
    pub(crate) fn launch(
        &self,
        kernel: &'static str,
        grid: [usize; 2],
        arguments: Vec<Argument>,
    ) -> Launch {
        debug_assert!(self.source.kernels().any(|name| name == kernel), "no kernel {kernel}");
        Launch { module: self.clone(), kernel, grid, arguments, follows: false }
    }
}

/// One kernel launch. Only operations construct it, with arguments that are views of live memory.
#[derive(Clone, Debug)]
pub struct Launch {
    module: Module,
    kernel: &'static str,
    grid: [usize; 2],
    arguments: Vec<Argument>,
    follows: bool,
}

impl Launch {
    /// The same launch, whose blocks may begin before the kernel launched before it has ended. The
    /// kernel must wait for that one itself (`await_kernel_before` in `prelude.cu`).
    #[must_use]
    pub(crate) fn following(self) -> Self {
        debug_assert!(self.source().waits(self.kernel), "{} does not wait", self.kernel);
        Self { follows: true, ..self }
    }

    /// Whether it is launched so.
    #[must_use]
    pub fn follows(&self) -> bool {
        self.follows
    }

    /// The source.
    #[must_use]
    pub fn source(&self) -> Source {
        self.module.source
    }

    /// The constants it is compiled with.
    #[must_use]
    pub fn constants(&self) -> &CompileConstants {
        &self.module.constants
    }

    /// Name of the kernel.
    #[must_use]
    pub fn kernel(&self) -> &'static str {
        self.kernel
    }

    /// Blocks along x and y.
    #[must_use]
    pub fn grid(&self) -> [usize; 2] {
        self.grid
    }

    /// Arguments in the kernel's order.
    #[must_use]
    pub fn arguments(&self) -> &[Argument] {
        &self.arguments
    }

    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.grid.contains(&0)
    }
}

/// Number of blocks of `each` elements that cover `count`.
pub(crate) const fn blocks(count: usize, each: usize) -> usize {
    count.div_ceil(each)
}

/// Elements that a thread moves with one instruction: limited by rows of `row` elements and by the
/// alignment of every tensor, given as its address and the bytes of an element.
pub(crate) fn pack(storage: Storage, row: usize, tensors: &[(u64, usize)]) -> usize {
    let mut pack = storage.pack(row.max(1));
    while tensors.iter().any(|&(address, bytes)| address % (pack * bytes) as u64 != 0) {
        pack /= 2;
    }
    pack
}

/// Threads of a block that handles one row and keeps it in registers.
pub(crate) fn row_threads(columns: usize, pack: usize) -> usize {
    let most = if columns > 8192 { 512 } else { 256 };
    columns.div_ceil(pack).next_multiple_of(32).clamp(32, most)
}

/// The grids of a sum over rows: of strips of columns and parts of the rows, and of what adds up
/// the parts (`prelude.cu`). They depend on the shape alone, so the bits do too.
pub(crate) struct ColumnSum {
    /// Blocks of the first kernel.
    pub(crate) grid: [usize; 2],
    /// Parts of the rows.
    pub(crate) parts: usize,
    /// Blocks of the second kernel.
    pub(crate) total: [usize; 2],
}

impl ColumnSum {
    /// Of a module whose blocks have [`THREADS`] threads.
    pub(crate) fn new(rows: usize, columns: usize, pack: usize) -> Self {
        // Enough blocks for every multiprocessor of a large GPU to have four.
        const BLOCKS: usize = 528;
        let strips = blocks(columns, 32 * pack);
        let most = blocks(rows, THREADS / 32).max(1);
        let parts = blocks(BLOCKS, strips).clamp(1, most);
        Self { grid: [strips, parts], parts, total: [blocks(columns, 32), 1] }
    }
}

/// Default number of threads of a block.
pub(crate) const THREADS: usize = 256;

/// A count as a compile-time constant.
#[allow(clippy::cast_precision_loss)]
pub(crate) fn constant(count: usize) -> f64 {
    count as f64
}

/// A count as an `int` argument.
///
/// # Panics
/// If it exceeds an `int`: no single tensor with so many rows fits a GPU.
#[track_caller]
pub(crate) fn int(count: usize) -> Argument {
    match i32::try_from(count) {
        Ok(count) => Argument::I32(count),
        Err(_) => panic!("{count} does not fit 31 bits"),
    }
}

/// A count as an `unsigned long long` argument.
pub(crate) fn long(count: usize) -> Argument {
    Argument::U64(count as u64)
}

impl From<Output> for Argument {
    fn from(output: Output) -> Self {
        Self::I32(i32::from(output == Output::Accumulate))
    }
}

/// A null pointer.
pub(crate) const NULL: Argument = Argument::Address(0);
