//! Compilation of kernels with NVRTC, which needs no GPU: from source text to machine code for one
//! architecture, with the assembler's report of registers.

use super::{CompileConstants, Source, program};
use cudarc::nvrtc::{result, sys};
use std::ffi::{CString, c_char};
use thiserror::Error;

/// Machine code, and the resources of each kernel.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// The module (a cubin).
    pub cubin: Vec<u8>,
    /// Resources of its kernels.
    pub kernels: Vec<Resources>,
}

/// Resources that a kernel uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resources {
    /// Name of the kernel.
    pub kernel: String,
    /// Registers of each thread.
    pub registers: u32,
    /// Bytes that each thread spills to memory for want of registers.
    pub spill_bytes: u32,
    /// Bytes of each thread's stack.
    pub stack_bytes: u32,
    /// Bytes of shared memory of a block.
    pub shared_bytes: u32,
}

/// Why compilation failed.
#[derive(Debug, Error)]
pub enum NvrtcError {
    /// NVRTC is not installed.
    #[error(
        "libnvrtc is not here: install CUDA's runtime compiler, or put its folder on LD_LIBRARY_PATH"
    )]
    Missing,
    /// The source does not compile.
    #[error("{operation}.cu does not compile for {architecture}:\n{log}")]
    Source {
        /// The operation.
        operation: &'static str,
        /// Target architecture.
        architecture: String,
        /// The compiler's log.
        log: String,
    },
    /// NVRTC itself failed.
    #[error("NVRTC: {0:?}")]
    Nvrtc(result::NvrtcError),
}

impl From<result::NvrtcError> for NvrtcError {
    fn from(error: result::NvrtcError) -> Self {
        Self::Nvrtc(error)
    }
}

/// NVRTC's version, where it is installed.
#[must_use]
#[allow(unsafe_code)]
pub fn version() -> Option<(i32, i32)> {
    // SAFETY: asks the loader whether the library can be opened.
    if !unsafe { sys::is_culib_present() } {
        return None;
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: it writes two numbers.
    unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) }.result().ok()?;
    Some((major, minor))
}

/// Compiles an operation for `architecture`, such as `sm_90a`. It must be a real architecture: for
/// a virtual one inline assembly is not checked.
///
/// # Errors
/// If NVRTC is missing, or the source does not compile.
#[allow(unsafe_code)]
pub fn compile(
    source: Source,
    constants: &CompileConstants,
    architecture: &str,
) -> Result<Compiled, NvrtcError> {
    // SAFETY: asks the loader whether the library can be opened.
    if !unsafe { sys::is_culib_present() } {
        return Err(NvrtcError::Missing);
    }
    let text = CString::new(program(source, constants)).unwrap_or_default();
    let handle = Program(result::create_program(&text, None)?);
    let options = [
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".to_owned(),
        "--ptxas-options=-v".to_owned(),
    ];
    // SAFETY: the program was created above and is destroyed once, by `Program`.
    let compiled = unsafe { result::compile_program(handle.0, &options) };
    // SAFETY: as above; a log exists after compiling, successful or not.
    let log = text_of(&unsafe { result::get_program_log(handle.0) }?);
    if compiled.is_err() {
        let (operation, architecture) = (source.operation, architecture.to_owned());
        return Err(NvrtcError::Source { operation, architecture, log });
    }
    Ok(Compiled { cubin: handle.cubin()?, kernels: resources(&log) })
}

/// An NVRTC program, destroyed when dropped.
struct Program(sys::nvrtcProgram);

impl Program {
    #[allow(unsafe_code)]
    fn cubin(&self) -> Result<Vec<u8>, NvrtcError> {
        let mut bytes = 0;
        // SAFETY: the program is compiled; NVRTC writes one size.
        unsafe { sys::nvrtcGetCUBINSize(self.0, &raw mut bytes) }.result()?;
        let mut cubin = vec![0_u8; bytes];
        // SAFETY: the buffer has the size that NVRTC just asked for.
        unsafe { sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast::<c_char>()) }.result()?;
        Ok(cubin)
    }
}

impl Drop for Program {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: created by `create_program` and destroyed only here. Nothing can be done where
        // that fails.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

#[allow(clippy::cast_sign_loss)] // characters of a log
fn text_of(log: &[c_char]) -> String {
    let bytes: Vec<u8> = log.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Parses the assembler's report: for each kernel a line with its name, one with stack and spills,
/// and one with registers.
fn resources(log: &str) -> Vec<Resources> {
    let mut found: Vec<Resources> = Vec::new();
    for line in log.lines() {
        if let Some((_, name)) = line.split_once("Function properties for ") {
            let kernel = name.trim().to_owned();
            let none =
                Resources { kernel, registers: 0, spill_bytes: 0, stack_bytes: 0, shared_bytes: 0 };
            found.push(none);
        }
        let Some(last) = found.last_mut() else { continue };
        let before = |words: &str| {
            let number =
                line.split_once(words)?.0.rsplit([' ', ',']).find(|word| !word.is_empty())?;
            number.parse::<u32>().ok()
        };
        if let (Some(stack), Some(stores), Some(loads)) = (
            before(" bytes stack frame"),
            before(" bytes spill stores"),
            before(" bytes spill loads"),
        ) {
            (last.stack_bytes, last.spill_bytes) = (stack, stores.max(loads));
        }
        if let Some(registers) = before(" registers") {
            (last.registers, last.shared_bytes) = (registers, before(" bytes smem").unwrap_or(0));
        }
    }
    found
}
