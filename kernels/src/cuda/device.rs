//! A GPU, through CUDA's driver API and cudarc. Libraries are loaded when a GPU is opened.
#![allow(unsafe_code)] // a C library

use super::cache::Cache;
use super::cublaslt::Products;
use super::cudnn::CudnnState;
use super::driver::{
    Driver, Event, EventKind, GpuError, Properties, Recording, Streamed, not_while_recording,
};
use super::product::Product;
use super::{CompileConstants, Launch, Source, Storage, nvrtc, program};
use crate::cuda::fused::Fuser;
use cudarc::driver::{
    CudaContext, CudaEvent, CudaFunction, CudaGraph, CudaModule, CudaStream, DriverError,
    PinnedHostSlice, result, sys,
};
use cudarc::nvrtc::Ptx;
use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::fmt::Write as _;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of each of the two pinned buffers that copies go through.
const PINNED_BYTES: usize = 4 << 20;

/// Oldest driver, by the CUDA it is for: 12.8 is the first with `cuEventElapsedTime_v2`.
const OLDEST_DRIVER: c_int = 12_080;

/// Opens a GPU: a context of its own, and a stream in it.
pub(super) fn open(ordinal: usize) -> Result<Arc<dyn Driver>, GpuError> {
    // SAFETY: asks the loader whether the library can be opened.
    if !unsafe { sys::is_culib_present() } {
        return Err(GpuError::Library {
            library: "libcuda.so.1",
            needed_for: "every use of a GPU",
            advice: "install NVIDIA's driver",
        });
    }
    result::init().map_err(|error| failed("cuInit", error))?;
    let found = CudaContext::device_count().map_err(|error| failed("cuDeviceGetCount", error))?;
    let found = usize::try_from(found).unwrap_or(0);
    if ordinal >= found {
        return Err(GpuError::NoSuchGpu { ordinal, found });
    }
    let context = CudaContext::new(ordinal).map_err(|error| failed("cuCtx", error))?;
    // SAFETY: cudarc's slices allocate no memory here, so nothing depends on their events. With
    // tracking enabled every launch would wait for each argument.
    unsafe { context.disable_event_tracking() };
    let cudnn = CudnnState::open()?;
    let (mut properties, architecture) = properties(&context)?;
    let _ = write!(properties.versions, ", {}", cudnn.name());
    let kernels_follow = context.compute_capability().is_ok_and(|(major, _)| major >= 9);
    let shared = SharedDevice {
        context,
        properties,
        architecture,
        kernels_follow,
        cache: Cache::of_user(),
        modules: Mutex::default(),
        products: Mutex::default(),
        records: AtomicBool::new(false),
        cudnn,
    };
    Ok(Arc::new(StreamQueue::new(Arc::new(shared))?))
}

#[allow(clippy::cast_sign_loss)] // counts
fn properties(context: &CudaContext) -> Result<(Properties, String), GpuError> {
    let name = context.name().map_err(|error| failed("cuDeviceGetName", error))?;
    let (major, minor) =
        context.compute_capability().map_err(|error| failed("cuDeviceGetAttribute", error))?;
    if major < 8 {
        return Err(GpuError::TooOld { name, major, minor });
    }
    let count = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let multiprocessors =
        context.attribute(count).map_err(|error| failed("cuDeviceGetAttribute", error))? as usize;
    let memory_bytes = context.total_mem().map_err(|error| failed("cuDeviceTotalMem", error))?;
    let mut driver: c_int = 0;
    // SAFETY: writes one number.
    unsafe { sys::cuDriverGetVersion(&raw mut driver) }
        .result()
        .map_err(|error| failed("cuDriverGetVersion", error))?;
    if driver < OLDEST_DRIVER {
        let what = format!("the driver is for CUDA {driver}; valid: {OLDEST_DRIVER} or later");
        return Err(GpuError::Call { call: "cuDriverGetVersion", what });
    }
    let nvrtc =
        nvrtc::version().map_or("none".to_owned(), |(major, minor)| format!("{major}.{minor}"));
    let products =
        super::cublaslt::version().map_or("none".to_owned(), |version| version.to_string());
    // Hopper's architecture-specific instructions need the `a` variant.
    let architecture =
        if (major, minor) == (9, 0) { "sm_90a".to_owned() } else { format!("sm_{major}{minor}") };
    let versions = format!("driver for CUDA {driver}, NVRTC {nvrtc}, cuBLASLt {products}");
    let properties = Properties {
        name,
        architecture: architecture.clone(),
        multiprocessors,
        memory_bytes,
        versions,
    };
    Ok((properties, architecture))
}

pub(super) fn failed(call: &'static str, error: DriverError) -> GpuError {
    match error.0 {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            GpuError::OutOfMemory { bytes: 0, what: format!("{call}: {error}") }
        }
        _ => GpuError::Call { call, what: error.to_string() },
    }
}

/// What the queues of one GPU share.
#[derive(Debug)]
struct SharedDevice {
    context: Arc<CudaContext>,
    properties: Properties,
    architecture: String,
    /// Whether a kernel can begin before the one before it has ended: from Hopper on.
    kernels_follow: bool,
    cache: Cache,
    modules: Mutex<HashMap<ModuleKey, LoadedModule>>,
    products: Mutex<Products>,
    /// Whether a step is being recorded.
    records: AtomicBool,
    cudnn: CudnnState,
}

/// A source and its constants: what a module is compiled from.
#[derive(Debug, PartialEq, Eq, Hash)]
struct ModuleKey {
    operation: &'static str,
    storage: Storage,
    pack: usize,
    threads: usize,
    /// Bits of the values; the operation determines the names.
    constants: Vec<u64>,
}

impl ModuleKey {
    fn new(source: Source, constants: &CompileConstants) -> Self {
        let values = constants.defines.iter().map(|(_, value)| value.to_bits()).collect();
        let CompileConstants { storage, pack, threads, .. } = *constants;
        Self { operation: source.operation, storage, pack, threads, constants: values }
    }
}

/// A module loaded on the GPU, and the functions looked up so far.
#[derive(Debug)]
struct LoadedModule {
    module: Arc<CudaModule>,
    functions: HashMap<&'static str, CudaFunction>,
}

impl SharedDevice {
    fn function(&self, launch: &Launch) -> Result<CudaFunction, GpuError> {
        let key = ModuleKey::new(launch.source(), launch.constants());
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if !modules.contains_key(&key) {
            let module = self.load(launch)?;
            modules.insert(
                ModuleKey::new(launch.source(), launch.constants()),
                LoadedModule { module, functions: HashMap::new() },
            );
        }
        let Some(loaded) = modules.get_mut(&key) else {
            return Err(GpuError::Compile(launch.kernel().to_owned()));
        };
        if let Some(function) = loaded.functions.get(launch.kernel()) {
            return Ok(function.clone());
        }
        let function = loaded
            .module
            .load_function(launch.kernel())
            .map_err(|error| failed("cuModuleGetFunction", error))?;
        loaded.functions.insert(launch.kernel(), function.clone());
        Ok(function)
    }

    /// Loads from the cache or compiles. An entry by another version of NVRTC is recompiled;
    /// without NVRTC any entry will do.
    fn load(&self, launch: &Launch) -> Result<Arc<CudaModule>, GpuError> {
        let text = program(launch.source(), launch.constants());
        let what = |version: &str| format!("{} {version}\n{text}", self.architecture);
        let version = nvrtc::version().map(|(major, minor)| format!("{major}.{minor}"));
        let kept = self.cache.get(&what(version.as_deref().unwrap_or("any")));
        let cubin = match kept {
            Some(cubin) => cubin,
            None => {
                let compiled =
                    nvrtc::compile(launch.source(), launch.constants(), &self.architecture)
                        .map_err(|error| GpuError::Compile(error.to_string()))?;
                for version in version.as_deref().into_iter().chain(["any"]) {
                    self.cache.put(&what(version), &compiled.cubin);
                }
                compiled.cubin
            }
        };
        self.context
            .load_module(Ptx::from_binary(cubin))
            .map_err(|error| failed("cuModuleLoadData", error))
    }
}

/// A queue of a GPU: a CUDA stream.
#[derive(Debug)]
pub(super) struct StreamQueue {
    shared: Arc<SharedDevice>,
    stream: Arc<CudaStream>,
    /// Made by the first copy; many queues never copy.
    staging: Mutex<Option<[PinnedBuffer; 2]>>,
    /// cuBLASLt's workspace, allocated for the first product.
    workspace: Mutex<Option<u64>>,
}

/// Pinned memory, and the event after its last use.
struct PinnedBuffer {
    memory: PinnedHostSlice<u8>,
    used: CudaEvent,
}

impl std::fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PinnedBuffer").finish_non_exhaustive()
    }
}

impl StreamQueue {
    fn new(shared: Arc<SharedDevice>) -> Result<Self, GpuError> {
        let stream =
            shared.context.new_stream().map_err(|error| failed("cuStreamCreate", error))?;
        Ok(Self { shared, stream, staging: Mutex::default(), workspace: Mutex::default() })
    }

    /// The pinned buffers, allocated at first use.
    fn staging<'a>(
        &self,
        kept: &'a mut Option<[PinnedBuffer; 2]>,
    ) -> Result<&'a mut [PinnedBuffer; 2], GpuError> {
        match kept {
            Some(staging) => Ok(staging),
            None => Ok(kept.insert([self.buffer()?, self.buffer()?])),
        }
    }

    fn buffer(&self) -> Result<PinnedBuffer, GpuError> {
        let context = &self.shared.context;
        // SAFETY: written before it is read: in `copy_in` by the host, in `copy_out` by the GPU.
        // Portable but not write-combined, because the host reads it too.
        let memory = unsafe {
            context.alloc_pinned_with_flags::<u8>(PINNED_BYTES, sys::CU_MEMHOSTALLOC_PORTABLE)
        };
        let memory = memory.map_err(|error| failed("cuMemHostAlloc", error))?;
        let used = context.new_event(None);
        Ok(PinnedBuffer { memory, used: used.map_err(|error| failed("cuEventCreate", error))? })
    }

    /// Makes the context current on the calling thread, as driver calls require.
    pub(super) fn bind(&self) -> Result<(), GpuError> {
        self.shared.context.bind_to_thread().map_err(|error| failed("cuCtxSetCurrent", error))
    }

    /// The address of `bytes` of workspace for cuBLASLt, used in this queue's order.
    fn workspace(&self, bytes: usize) -> Result<u64, GpuError> {
        let mut workspace = self.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        match *workspace {
            Some(address) => Ok(address),
            None => Ok(*workspace.insert(self.allocate(bytes)?)),
        }
    }
}

impl Drop for StreamQueue {
    fn drop(&mut self) {
        let workspace = self.workspace.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        workspace.into_iter().for_each(|address| self.free(address));
        if self.bind().is_ok() {
            self.shared.cudnn.forget(self.stream_handle());
        }
    }
}

impl Streamed for StreamQueue {
    fn stream_handle(&self) -> *mut c_void {
        self.stream.cu_stream().cast()
    }

    fn not_while_recording(&self, call: &'static str) -> Result<(), GpuError> {
        match self.shared.records.load(Ordering::Acquire) {
            true => Err(not_while_recording(call)),
            false => Ok(()),
        }
    }
}

impl Driver for StreamQueue {
    fn properties(&self) -> &Properties {
        &self.shared.properties
    }

    fn allocate(&self, bytes: usize) -> Result<u64, GpuError> {
        self.bind()?;
        // SAFETY: whoever takes it writes it before reading; it is freed once, by `free`.
        unsafe { result::malloc_sync(bytes) }
            .map_err(|error| GpuError::OutOfMemory { bytes, what: error.to_string() })
    }

    fn free(&self, address: u64) {
        // An error cannot be handled here: the context is going away too.
        let _ = self.synchronize();
        // SAFETY: `allocate` gave it, and nothing is queued that uses it.
        let _ = unsafe { result::free_sync(address) };
    }

    fn copy_in(&self, from: &[u8], to: u64) -> Result<(), GpuError> {
        self.not_while_recording("cuMemcpyHtoDAsync")?;
        self.bind()?;
        let mut kept = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let staging = self.staging(&mut kept)?;
        for (number, piece) in from.chunks(PINNED_BYTES).enumerate() {
            let buffer = &mut staging[number % 2];
            buffer.used.synchronize().map_err(|error| failed("cuEventSynchronize", error))?;
            let memory =
                buffer.memory.as_mut_slice().map_err(|error| failed("cuMemHostAlloc", error))?;
            let memory = &mut memory[..piece.len()];
            memory.copy_from_slice(piece);
            let at = to + (number * PINNED_BYTES) as u64;
            // SAFETY: live memory of at least this length; the pinned piece does not change before
            // `used`.
            unsafe { result::memcpy_htod_async(at, memory, self.stream.cu_stream()) }
                .map_err(|error| failed("cuMemcpyHtoDAsync", error))?;
            buffer.used.record(&self.stream).map_err(|error| failed("cuEventRecord", error))?;
        }
        Ok(())
    }

    fn copy_out(&self, from: u64, to: &mut [u8]) -> Result<(), GpuError> {
        self.not_while_recording("cuMemcpyDtoHAsync")?;
        self.bind()?;
        let mut kept = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let staging = self.staging(&mut kept)?;
        let pieces = to.len().div_ceil(PINNED_BYTES);
        // One buffer is copied out by the host while the GPU fills the other.
        for number in 0..=pieces {
            if number < pieces {
                let buffer = &mut staging[number % 2];
                buffer.used.synchronize().map_err(|error| failed("cuEventSynchronize", error))?;
                let memory = buffer
                    .memory
                    .as_mut_slice()
                    .map_err(|error| failed("cuMemHostAlloc", error))?;
                let bytes = PINNED_BYTES.min(to.len() - number * PINNED_BYTES);
                let at = from + (number * PINNED_BYTES) as u64;
                // SAFETY: live memory of at least this length; nobody reads the piece before
                // `used`.
                unsafe {
                    result::memcpy_dtoh_async(&mut memory[..bytes], at, self.stream.cu_stream())
                }
                .map_err(|error| failed("cuMemcpyDtoHAsync", error))?;
                buffer.used.record(&self.stream).map_err(|error| failed("cuEventRecord", error))?;
            }
            let Some(last) = number.checked_sub(1) else { continue };
            let buffer = &mut staging[last % 2];
            buffer.used.synchronize().map_err(|error| failed("cuEventSynchronize", error))?;
            let memory =
                buffer.memory.as_slice().map_err(|error| failed("cuMemHostAlloc", error))?;
            let piece = &mut to[last * PINNED_BYTES..];
            let bytes = piece.len().min(PINNED_BYTES);
            piece[..bytes].copy_from_slice(&memory[..bytes]);
        }
        Ok(())
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), GpuError> {
        self.bind()?;
        // SAFETY: both are live and of at least this length.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream.cu_stream()) }
            .map_err(|error| failed("cuMemcpyDtoDAsync", error))
    }

    fn fill(&self, to: u64, byte: u8, bytes: usize) -> Result<(), GpuError> {
        self.bind()?;
        // SAFETY: it is live and of at least this length.
        unsafe { result::memset_d8_async(to, byte, bytes, self.stream.cu_stream()) }
            .map_err(|error| failed("cuMemsetD8Async", error))
    }

    fn fill_words(&self, to: u64, word: u32, words: usize) -> Result<(), GpuError> {
        self.bind()?;
        // SAFETY: it is live and of at least this length.
        unsafe { sys::cuMemsetD32Async(to, word, words, self.stream.cu_stream()) }
            .result()
            .map_err(|error| failed("cuMemsetD32Async", error))
    }

    #[allow(clippy::cast_possible_truncation)] // grids are checked
    fn launch(&self, launch: &Launch) -> Result<(), GpuError> {
        self.bind()?;
        let function = self.shared.function(launch)?;
        let [x, y] = launch.grid();
        if x > 0x7fff_ffff || y > 0xffff {
            let what = format!("{}: a grid of {x} by {y} blocks", launch.kernel());
            return Err(GpuError::Call { call: "cuLaunchKernelEx", what });
        }
        let mut bits: Vec<u64> =
            launch.arguments().iter().map(|argument| argument.bits()).collect();
        // The driver reads as many low bytes of each value as the parameter's type has.
        let mut parameters: Vec<*mut c_void> =
            bits.iter_mut().map(|bits| ptr::from_mut(bits).cast()).collect();
        let mut follows = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: x as c_uint,
            gridDimY: y as c_uint,
            gridDimZ: 1,
            blockDimX: launch.constants().threads as c_uint,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: self.stream.cu_stream(),
            attrs: &raw mut follows,
            numAttrs: c_uint::from(launch.follows() && self.shared.kernels_follow),
        };
        let (function, parameters) = (function.cu_function(), parameters.as_mut_ptr());
        // SAFETY: operations pass their own kernels arguments that are addresses of live memory of
        // the checked lengths; the tests on the emulator check the arguments' types.
        unsafe { sys::cuLaunchKernelEx(&raw const config, function, parameters, ptr::null_mut()) }
            .result()
            .map_err(|error| GpuError::Call {
                call: "cuLaunchKernelEx",
                what: format!("{}: {error}", launch.kernel()),
            })
    }

    fn product(&self, product: &Product) -> Result<(), GpuError> {
        self.bind()?;
        let workspace = self.workspace(super::cublaslt::WORKSPACE)?;
        let mut products = self.shared.products.lock().unwrap_or_else(PoisonError::into_inner);
        let device = &self.shared.properties.name;
        products.run(self, &self.shared.cache, device, workspace, product)
    }

    fn survey(&self, product: &Product) -> Result<Vec<f64>, GpuError> {
        self.bind()?;
        let workspace = self.workspace(super::cublaslt::WORKSPACE)?;
        let mut products = self.shared.products.lock().unwrap_or_else(PoisonError::into_inner);
        let device = &self.shared.properties.name;
        products.survey(self, &self.shared.cache, device, workspace, product)
    }

    fn synchronize(&self) -> Result<(), GpuError> {
        self.not_while_recording("cuStreamSynchronize")?;
        self.stream.synchronize().map_err(|error| failed("cuStreamSynchronize", error))
    }

    fn quiesce(&self) -> Result<(), GpuError> {
        self.not_while_recording("cuCtxSynchronize")?;
        self.bind()?;
        result::ctx::synchronize().map_err(|error| failed("cuCtxSynchronize", error))
    }

    fn records(&self) -> bool {
        true
    }

    fn start_recording(&self) -> Result<(), GpuError> {
        self.not_while_recording("cuStreamBeginCapture")?;
        // Relaxed mode: several threads of a rank queue work, NCCL's among them, and memory beyond
        // the arena may be allocated. Calls that conflict with a capture in any mode are refused
        // above.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        self.stream.begin_capture(mode).map_err(|error| failed("cuStreamBeginCapture", error))?;
        self.shared.records.store(true, Ordering::Release);
        Ok(())
    }

    fn finish_recording(&self) -> Result<Box<dyn Recording>, GpuError> {
        self.shared.records.store(false, Ordering::Release);
        let graph = self.stream.end_capture(sys::CUgraphInstantiate_flags(0));
        let graph = graph.map_err(|error| failed("cuStreamEndCapture", error))?;
        let none = || GpuError::Call {
            call: "cuStreamEndCapture",
            what: "nothing was recorded".to_owned(),
        };
        let graph = graph.ok_or_else(none)?;
        graph.upload().map_err(|error| failed("cuGraphUpload", error))?;
        Ok(Box::new(CapturedStream(Mutex::new(graph))))
    }

    fn record(&self) -> Result<Event, GpuError> {
        let event = self.stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
        let event = event.map_err(|error| failed("cuEventRecord", error))?;
        Ok(Event::new(EventKind::Device(Arc::new(event))))
    }

    fn wait(&self, event: &Event) -> Result<(), GpuError> {
        match &event.inner {
            EventKind::Device(event) => {
                self.stream.wait(event).map_err(|error| failed("cuStreamWaitEvent", error))
            }
            _ => event.synchronize(),
        }
    }

    fn stream(&self) -> Result<u64, GpuError> {
        self.bind()?;
        Ok(self.stream.cu_stream() as u64)
    }

    fn fuser(&self) -> Option<&dyn Fuser> {
        self.shared.cudnn.is_open().then_some(self)
    }

    fn fork(&self) -> Result<Arc<dyn Driver>, GpuError> {
        Ok(Arc::new(Self::new(self.shared.clone())?))
    }
}

/// A captured CUDA graph.
struct CapturedStream(Mutex<CudaGraph>);

// SAFETY: any thread may use a graph, one at a time: the lock ensures that. Its stream may be used
// by any thread.
unsafe impl Send for CapturedStream {}
// SAFETY: as above.
unsafe impl Sync for CapturedStream {}

impl std::fmt::Debug for CapturedStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CapturedStream").finish_non_exhaustive()
    }
}

impl Recording for CapturedStream {
    fn replay(&self) -> Result<(), GpuError> {
        let graph = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        graph.launch().map_err(|error| failed("cuGraphLaunch", error))
    }
}

impl StreamQueue {
    /// State of cuDNN, for attention.
    pub(super) fn cudnn(&self) -> &CudnnState {
        &self.shared.cudnn
    }

    /// The cache of compiled kernels and chosen algorithms.
    pub(super) fn cache(&self) -> &Cache {
        &self.shared.cache
    }
}
