//! NCCL through its C functions, as cudarc declares them. cudarc's safe layer has no split, no
//! abort and no asynchronous errors, and looks only for `libnccl.so`, which is installed only with
//! NCCL's development package.
#![allow(unsafe_code)] // a C library

use super::foreign::functions;
use super::nccl::{Collective, DataType, Group, ID_BYTES, Id, Library, ReduceOp, Transfer};
use super::{Gpu, GpuError};
use cudarc::nccl::sys::{
    cudaStream_t, ncclComm, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclResult_t,
    ncclUniqueId,
};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt::{self, Debug};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// File names: in the packages of the driver or PyTorch, and in the development package.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// NCCL 2.18, the first with non-blocking groups that can be split.
const OLDEST: c_int = 21_800;

/// From nccl.h: `NCCL_CONFIG_UNDEF_INT`, `NCCL_API_MAGIC` and the version whose configuration is
/// declared here.
const UNDEFINED: c_int = c_int::MIN;
const MAGIC: u32 = 0xcafe_beef;
const CONFIGURED: u32 = 22_400;

functions! {
    pub(super),
    ncclGetVersion(version: *mut c_int) -> ncclResult_t;
    ncclGetUniqueId(id: *mut ncclUniqueId) -> ncclResult_t;
    ncclCommInitRankConfig(made: *mut ncclComm_t, size: c_int, id: ncclUniqueId, rank: c_int, config: *mut ncclConfig_t) -> ncclResult_t;
    ncclCommSplit(comm: ncclComm_t, color: c_int, key: c_int, made: *mut ncclComm_t, config: *mut ncclConfig_t) -> ncclResult_t;
    ncclCommGetAsyncError(comm: ncclComm_t, state: *mut ncclResult_t) -> ncclResult_t;
    ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t;
    ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t;
    ncclCommAbort(comm: ncclComm_t) -> ncclResult_t;
    ncclGetErrorString(result: ncclResult_t) -> *const c_char;
    ncclGetLastError(comm: ncclComm_t) -> *const c_char;
    ncclGroupStart() -> ncclResult_t;
    ncclGroupEnd() -> ncclResult_t;
    ncclAllReduce(from: *const c_void, to: *mut c_void, count: usize, of: ncclDataType_t, op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
    ncclReduce(from: *const c_void, to: *mut c_void, count: usize, of: ncclDataType_t, op: ncclRedOp_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
    ncclBroadcast(from: *const c_void, to: *mut c_void, count: usize, of: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
    ncclReduceScatter(from: *const c_void, to: *mut c_void, count: usize, of: ncclDataType_t, op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
    ncclAllGather(from: *const c_void, to: *mut c_void, count: usize, of: ncclDataType_t, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
    ncclSend(from: *const c_void, count: usize, of: ncclDataType_t, to: c_int, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
    ncclRecv(to: *mut c_void, count: usize, of: ncclDataType_t, from: c_int, comm: ncclComm_t, stream: cudaStream_t) -> ncclResult_t;
}

/// The loaded library. It stays until the process ends: its threads may outlive its groups.
struct Nccl {
    functions: Functions,
    name: &'static str,
    version: c_int,
}

impl Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&named(self.version, self.name))
    }
}

/// A version as text: 22703 is `2.27.3`.
fn named(version: c_int, name: &str) -> String {
    let [major, minor, patch] = [version / 10_000, version / 100 % 100, version % 100];
    format!("NCCL {major}.{minor}.{patch} ({name})")
}

pub(super) fn open() -> Result<Arc<dyn Library>, GpuError> {
    let load = |name: &&'static str| {
        // SAFETY: loading NCCL runs its initialisers, as for every program that links with it.
        let library = unsafe { libloading::Library::new(*name) };
        library.ok().zip(Some(*name))
    };
    let Some((library, name)) = NAMES.iter().find_map(load) else {
        return Err(GpuError::Library {
            library: NAMES[0],
            needed_for: "transfers between GPUs",
            advice: "install NVIDIA's NCCL (Debian's libnccl2, pip's nvidia-nccl-cu12)",
        });
    };
    let library = Box::leak(Box::new(library));
    // SAFETY: it was opened under NCCL's name.
    let functions = unsafe { Functions::of(library) };
    let functions = functions.map_err(|error| failed("dlsym", &error))?;
    let mut version: c_int = 0;
    // SAFETY: writes one number.
    let result = unsafe { (functions.ncclGetVersion)(&raw mut version) };
    let nccl = Nccl { functions, name, version };
    nccl.check("ncclGetVersion", result)?;
    if version < OLDEST {
        let what = format!("{}; valid: {} or later", named(version, name), named(OLDEST, name));
        return Err(failed("ncclGetVersion", &what));
    }
    Ok(Arc::new(Shared(Arc::new(nccl))))
}

fn failed(call: &'static str, what: &dyn fmt::Display) -> GpuError {
    GpuError::Call { call, what: what.to_string() }
}

impl Nccl {
    /// Fails unless the call succeeded or is in progress.
    fn check(&self, call: &'static str, result: ncclResult_t) -> Result<(), GpuError> {
        if matches!(result, ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress) {
            return Ok(());
        }
        let text = |at: *const c_char| match at.is_null() {
            true => String::new(),
            // SAFETY: NCCL's texts are static and end with 0.
            false => unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned(),
        };
        // SAFETY: both take any value and return texts of NCCL's own.
        let (kind, last) = unsafe {
            let kind = text((self.functions.ncclGetErrorString)(result));
            (kind, text((self.functions.ncclGetLastError)(std::ptr::null_mut())))
        };
        let hint = match result {
            ncclResult_t::ncclInvalidUsage => {
                "; valid: one process for each GPU (LOCAL_RANK says which), or one process whose ranks share a GPU"
            }
            ncclResult_t::ncclRemoteError => "; another process has ended or cannot be reached",
            ncclResult_t::ncclSystemError => {
                "; NCCL_DEBUG=INFO says which interface (NCCL_SOCKET_IFNAME) or shared memory fails"
            }
            _ => "",
        };
        Err(failed(call, &format!("{kind} {last}{hint}")))
    }

    /// Configuration: non-blocking, otherwise the library's defaults.
    fn config(&self) -> ncclConfig_t {
        ncclConfig_t {
            size: size_of::<ncclConfig_t>(),
            magic: MAGIC,
            version: CONFIGURED,
            blocking: 0,
            cgaClusterSize: UNDEFINED,
            minCTAs: UNDEFINED,
            maxCTAs: UNDEFINED,
            netName: std::ptr::null(),
            splitShare: UNDEFINED,
        }
    }
}

#[derive(Debug)]
struct Shared(Arc<Nccl>);

impl Library for Shared {
    fn version(&self) -> String {
        format!("{:?}", self.0)
    }

    fn new_id(&self) -> Result<Id, GpuError> {
        let mut id = ncclUniqueId { internal: [0; ID_BYTES] };
        // SAFETY: writes the id.
        let result = unsafe { (self.0.functions.ncclGetUniqueId)(&raw mut id) };
        self.0.check("ncclGetUniqueId", result)?;
        Ok(id.internal.map(|byte| byte.to_ne_bytes()[0]))
    }

    fn join(
        &self,
        gpu: &Gpu,
        id: &Id,
        size: usize,
        rank: usize,
    ) -> Result<Box<dyn Group>, GpuError> {
        // Makes the group's device current on the calling thread.
        gpu.stream()?;
        let id = ncclUniqueId { internal: id.map(|byte| c_char::from_ne_bytes([byte])) };
        let comm = Comm::new(&self.0);
        let mut config = self.0.config();
        let (size, rank) = (number(size)?, number(rank)?);
        // SAFETY: the memory for the group's handle lives as long as `comm`; the configuration is
        // copied.
        let result = unsafe {
            let join = self.0.functions.ncclCommInitRankConfig;
            join(comm.place.as_ptr(), size, id, rank, &raw mut config)
        };
        self.0.check("ncclCommInitRankConfig", result)?;
        Ok(Box::new(comm))
    }
}

fn number(n: usize) -> Result<c_int, GpuError> {
    c_int::try_from(n).map_err(|error| failed("nccl", &error))
}

/// Memory for a group's handle.
type Place = AtomicPtr<ncclComm>;

/// A group.
struct Comm {
    nccl: Arc<Nccl>,
    /// Where NCCL writes the handle: at a stable address, since a thread of its own writes later.
    place: Box<Place>,
    /// Where NCCL writes null for splits without a colour, also later.
    #[allow(clippy::vec_box)] // the addresses must stay
    unjoined: Mutex<Vec<Box<Place>>>,
    /// Held around every call, because a group takes one at a time.
    calling: Mutex<()>,
    aborted: AtomicBool,
}

impl Debug for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a group of {:?}", self.nccl)
    }
}

impl Comm {
    fn new(nccl: &Arc<Nccl>) -> Self {
        Self {
            nccl: nccl.clone(),
            place: Box::default(),
            unjoined: Mutex::default(),
            calling: Mutex::default(),
            aborted: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.calling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The handle of the group, which lives until it is aborted.
    fn handle(&self) -> Result<ncclComm_t, GpuError> {
        if self.aborted.load(Ordering::Acquire) {
            return Err(failed("nccl", &"the group was given up"));
        }
        Ok(self.place.load(Ordering::Acquire))
    }

    fn state(&self, comm: ncclComm_t) -> Result<bool, GpuError> {
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: writes the state of a live group.
        let result = unsafe { (self.nccl.functions.ncclCommGetAsyncError)(comm, &raw mut state) };
        self.nccl.check("ncclCommGetAsyncError", result)?;
        self.nccl.check("ncclCommGetAsyncError", state)?;
        Ok(state == ncclResult_t::ncclSuccess)
    }

    fn call(
        &self,
        transfer: &Transfer,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Result<(), GpuError> {
        let Transfer { moves, of, from, to } = *transfer;
        let of = match of {
            DataType::F32 => ncclDataType_t::ncclFloat32,
            DataType::F64 => ncclDataType_t::ncclFloat64,
            DataType::Bf16 => ncclDataType_t::ncclBfloat16,
            DataType::I64 => ncclDataType_t::ncclInt64,
            DataType::U8 => ncclDataType_t::ncclUint8,
        };
        let op = |combine| match combine {
            ReduceOp::Sum => ncclRedOp_t::ncclSum,
            ReduceOp::Max => ncclRedOp_t::ncclMax,
        };
        let (read, write) = (from.address as *const c_void, to.address as *mut c_void);
        let f = &self.nccl.functions;
        // SAFETY: spans are of live memory, which the caller keeps until the queued work has run.
        // The group and the stream are live.
        let (call, result) = unsafe {
            match moves {
                Collective::AllReduce(how) => (
                    "ncclAllReduce",
                    (f.ncclAllReduce)(read, write, from.len, of, op(how), comm, stream),
                ),
                Collective::Reduce(how, root) => (
                    "ncclReduce",
                    (f.ncclReduce)(read, write, from.len, of, op(how), number(root)?, comm, stream),
                ),
                Collective::Broadcast(root) => (
                    "ncclBroadcast",
                    (f.ncclBroadcast)(read, write, to.len, of, number(root)?, comm, stream),
                ),
                Collective::ReduceScatter(how) => (
                    "ncclReduceScatter",
                    (f.ncclReduceScatter)(read, write, to.len, of, op(how), comm, stream),
                ),
                Collective::AllGather => {
                    ("ncclAllGather", (f.ncclAllGather)(read, write, from.len, of, comm, stream))
                }
                Collective::Send(peer) => {
                    ("ncclSend", (f.ncclSend)(read, from.len, of, number(peer)?, comm, stream))
                }
                Collective::Receive(peer) => {
                    ("ncclRecv", (f.ncclRecv)(write, to.len, of, number(peer)?, comm, stream))
                }
            }
        };
        self.nccl.check(call, result)
    }
}

impl Group for Comm {
    fn split(&self, color: Option<usize>, key: usize) -> Result<Option<Box<dyn Group>>, GpuError> {
        // `NCCL_SPLIT_NOCOLOR`
        let (color_number, key) = (color.map_or(Ok(-1), number)?, number(key)?);
        let (mut made, mut config) = (Self::new(&self.nccl), self.nccl.config());
        let _one = self.lock();
        let comm = self.handle()?;
        // SAFETY: the memory for the handle lives as long as `made`, which the caller keeps until
        // this group is ready again, or as long as this group.
        let result = unsafe {
            let split = self.nccl.functions.ncclCommSplit;
            split(comm, color_number, key, made.place.as_ptr(), &raw mut config)
        };
        match color {
            Some(_) => {
                self.nccl.check("ncclCommSplit", result)?;
                Ok(Some(Box::new(made)))
            }
            None => {
                let place = std::mem::take(&mut made.place);
                self.unjoined.lock().unwrap_or_else(PoisonError::into_inner).push(place);
                self.nccl.check("ncclCommSplit", result)?;
                Ok(None)
            }
        }
    }

    fn is_ready(&self) -> Result<bool, GpuError> {
        let _one = self.lock();
        let comm = self.handle()?;
        // A split group is made once its parent is ready again.
        if comm.is_null() { Ok(false) } else { self.state(comm) }
    }

    fn queue(&self, gpu: &Gpu, transfers: &[Transfer]) -> Result<(), GpuError> {
        let _one = self.lock();
        let comm = self.handle()?;
        let stream = gpu.stream()? as cudaStream_t;
        // SAFETY: each thread has its own NCCL group of calls, and every start has its end.
        let begun = unsafe { (self.nccl.functions.ncclGroupStart)() };
        self.nccl.check("ncclGroupStart", begun)?;
        let called = transfers.iter().try_for_each(|transfer| self.call(transfer, comm, stream));
        // SAFETY: as above.
        let ended = unsafe { (self.nccl.functions.ncclGroupEnd)() };
        called?;
        self.nccl.check("ncclGroupEnd", ended)
    }

    fn abort(&self) {
        let _one = self.lock();
        if self.aborted.swap(true, Ordering::AcqRel) {
            return;
        }
        // SAFETY: nobody else is in a call, and none comes after it. An error cannot be handled.
        unsafe {
            let comm = self.place.load(Ordering::Acquire);
            if !comm.is_null() {
                let _ = (self.nccl.functions.ncclCommAbort)(comm);
            }
        }
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        let comm = self.place.load(Ordering::Acquire);
        if comm.is_null() || self.aborted.load(Ordering::Acquire) {
            // A group that never got ready, and NCCL may still write.
            let mut unjoined = self.unjoined.lock().unwrap_or_else(PoisonError::into_inner);
            Box::leak(std::mem::take(&mut self.place));
            unjoined.drain(..).for_each(|place| _ = Box::leak(place));
            return;
        }
        // SAFETY: nobody has it any more. A group ends by itself once all members have asked for
        // it.
        unsafe {
            let _ = (self.nccl.functions.ncclCommFinalize)(comm);
            let begun = std::time::Instant::now();
            while let Ok(false) = self.state(comm) {
                if begun.elapsed().as_secs() >= 5 {
                    let _ = (self.nccl.functions.ncclCommAbort)(comm);
                    return;
                }
                std::thread::sleep(std::time::Duration::from_micros(100));
            }
            let _ = (self.nccl.functions.ncclCommDestroy)(comm);
        }
    }
}
