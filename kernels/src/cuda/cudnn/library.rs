//! cuDNN's C functions, loaded at run time. Statuses and attributes are plain integers here,
//! because a newer library may return values that no enumeration of ours has.

use crate::cuda::GpuError;
use crate::cuda::foreign::functions;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt::{self, Debug};
use std::sync::Arc;

const NAMES: [&str; 2] = ["libcudnn.so.9", "libcudnn.so"];

/// Oldest supported version. Older ones need a mask for gradients unless the number of keys is a
/// multiple of 128, and 9.10's gradients are sometimes wrong (cudnn-frontend 1.23,
/// `CompositeSDPABackwardNode::pre_validate_node`).
const OLDEST: usize = 91_600;

functions! {
    pub(super),
    cudnnGetVersion() -> usize;
    cudnnGetCudartVersion() -> usize;
    cudnnGetErrorString(status: c_int) -> *const c_char;
    cudnnGetLastErrorString(text: *mut c_char, most: usize) -> ();
    cudnnCreate(handle: *mut *mut c_void) -> c_int;
    cudnnDestroy(handle: *mut c_void) -> c_int;
    cudnnSetStream(handle: *mut c_void, stream: *mut c_void) -> c_int;
    cudnnBackendCreateDescriptor(kind: c_int, made: *mut *mut c_void) -> c_int;
    cudnnBackendDestroyDescriptor(descriptor: *mut c_void) -> c_int;
    cudnnBackendFinalize(descriptor: *mut c_void) -> c_int;
    cudnnBackendSetAttribute(descriptor: *mut c_void, name: c_int, of: c_int, count: i64, from: *const c_void) -> c_int;
    cudnnBackendGetAttribute(descriptor: *mut c_void, name: c_int, of: c_int, room: i64, count: *mut i64, to: *mut c_void) -> c_int;
    cudnnBackendExecute(handle: *mut c_void, plan: *mut c_void, pack: *mut c_void) -> c_int;
}

/// The loaded library, kept while anything of it lives.
pub(in crate::cuda) struct Library {
    pub(super) functions: Functions,
    version: usize,
    // Field order: the second is used by the first.
    _library: libloading::Library,
    _products: libloading::Library,
}

impl Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&named(self.version))
    }
}

/// A version as text: 91900 is `9.19.0`.
fn named(version: usize) -> String {
    let [major, minor, patch] = [version / 10_000, version / 100 % 100, version % 100];
    format!("cuDNN {major}.{minor}.{patch}")
}

impl Library {
    /// Loads cuDNN, if it is installed and recent enough.
    pub(in crate::cuda) fn open() -> Result<Arc<Self>, GpuError> {
        // SAFETY: loading cuDNN runs its initialisers, as for every program that links with it.
        let load = |name: &&str| unsafe { libloading::Library::new(*name) }.ok();
        let Some(library) = NAMES.iter().find_map(load) else {
            return Err(GpuError::Library {
                library: NAMES[0],
                needed_for: "attention by cuDNN",
                advice: "install NVIDIA's cuDNN 9 (Debian's libcudnn9-cuda-13, pip's nvidia-cudnn-cu13)",
            });
        };
        // SAFETY: it was opened under cuDNN's name.
        let functions = unsafe { Functions::of(&library) };
        let functions = functions.map_err(|error| failed("dlsym", error.to_string()))?;
        // SAFETY: gives a number.
        let version = unsafe { (functions.cudnnGetVersion)() };
        if version < OLDEST {
            let what = format!("{}; valid: {} or later", named(version), named(OLDEST));
            return Err(failed("cudnnGetVersion", what));
        }
        // SAFETY: as above.
        let products = cublaslt(unsafe { (functions.cudnnGetCudartVersion)() })?;
        Ok(Arc::new(Self { functions, version, _library: library, _products: products }))
    }

    /// Fails with cuDNN's own message unless the call succeeded.
    pub(super) fn check(&self, call: &'static str, status: c_int) -> Result<(), GpuError> {
        if status == 0 {
            return Ok(());
        }
        const ROOM: usize = 2048;
        let mut last = vec![0; ROOM];
        // SAFETY: the first takes any status and returns a static text; the second writes within
        // the given size.
        let kind = unsafe {
            let kind = (self.functions.cudnnGetErrorString)(status);
            (self.functions.cudnnGetLastErrorString)(last.as_mut_ptr(), ROOM);
            if kind.is_null() { c"" } else { CStr::from_ptr(kind) }
        };
        last[ROOM - 1] = 0;
        // SAFETY: it ends with 0 within the buffer.
        let last = unsafe { CStr::from_ptr(last.as_ptr()) };
        let [kind, last] = [kind, last].map(CStr::to_string_lossy);
        Err(failed(call, format!("{kind} {last}")))
    }
}

pub(super) fn failed(call: &'static str, what: String) -> GpuError {
    GpuError::Call { call, what }
}

/// Loads the cuBLASLt of the CUDA that cuDNN was built with. cuDNN ends the process if it finds
/// none, so look for it first.
fn cublaslt(cuda: usize) -> Result<libloading::Library, GpuError> {
    let name = format!("libcublasLt.so.{}", cuda / 1000);
    // SAFETY: as cuDNN itself.
    unsafe { libloading::Library::new(name) }.map_err(|_| GpuError::Library {
        library: "the libcublasLt.so that this cuDNN is for",
        needed_for: "attention by cuDNN",
        advice: "install cuDNN and cuBLAS for the same CUDA",
    })
}

/// A cuDNN handle, with which plans are made and run.
#[derive(Debug)]
pub(super) struct Handle {
    library: Arc<Library>,
    pub(super) raw: *mut c_void,
}

// SAFETY: any thread may use a handle, one at a time: a lock is held around all of it.
unsafe impl Send for Handle {}

impl Handle {
    /// A handle for the GPU whose context is current.
    pub(super) fn new(library: &Arc<Library>) -> Result<Self, GpuError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        let status = unsafe { (library.functions.cudnnCreate)(&raw mut raw) };
        library.check("cudnnCreate", status)?;
        Ok(Self { library: library.clone(), raw })
    }

    /// Makes it queue its work on `stream`.
    pub(super) fn queue_on(&self, stream: *mut c_void) -> Result<(), GpuError> {
        // SAFETY: both live.
        let status = unsafe { (self.library.functions.cudnnSetStream)(self.raw, stream) };
        self.library.check("cudnnSetStream", status)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: created once and destroyed here. An error cannot be handled.
        let _ = unsafe { (self.library.functions.cudnnDestroy)(self.raw) };
    }
}
