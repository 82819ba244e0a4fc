//! Products by cuBLASLt. For each shape the best few algorithms by its own estimate are timed once;
//! the choice is kept, in the process and in the user's cache.
#![allow(unsafe_code)] // a C library

use super::Storage;
use super::cache::Cache;
use super::driver::{GpuError, Streamed};
use super::product::{Matrix, Product};
use cudarc::cublaslt::{result, sys};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Bytes of workspace: NVIDIA's recommendation for Hopper.
pub(super) const WORKSPACE: usize = 32 << 20;

/// Number of algorithms timed to choose one.
const CANDIDATES: usize = 32;

/// Number of algorithms timed to rate the choice.
const SURVEYED: usize = 64;

/// Seconds of load before the first algorithm of a process is timed: an idle GPU raises its clock
/// over tens of milliseconds.
const WARM_UP_S: f64 = 0.2;

/// Seconds of one batch of launches, and its most launches. One launch alone is timed with the gap
/// before it.
const BATCH_S: f64 = 5e-4;
const BATCH_LAUNCHES: f64 = 32.0;

/// Rounds over all algorithms, so that a slow moment does not hit one of them alone; the median
/// counts.
const ROUNDS: usize = 3;

/// Rounds over the fastest few.
const LAST_ROUNDS: usize = 7;
const LAST: usize = 3;

/// cuBLASLt's own first choice is kept unless another algorithm takes less than this share of its
/// time. Smaller differences are mostly noise, and say little about a step, in which large products
/// run at the limit of power: on an H200 four layers of Llama 3 8B take 1.4 % longer with the
/// fastest of every shape than with the first, GPT-2 124M 1.6 % less (docs/gpu/results.md).
const CLEARLY_FASTER: f64 = 0.97;

/// Algorithms that take longer than this many times the fastest are not timed again.
const HOPELESS: f64 = 1.5;

/// Sizes of one product in a dimension beyond which that dimension is taken to vary, as the tokens
/// of an expert do: each new size then runs by cuBLASLt's own estimate, since timing every one
/// would take longer than it saves.
const SIZES: usize = 16;

/// Split-k reductions: in f32 and in a fixed order only, neither rounded in between nor by atomics.
const REDUCTIONS: u32 =
    sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;

/// The library handle, and the chosen algorithms.
#[derive(Debug, Default)]
pub(super) struct Products {
    handle: Option<Handle>,
    chosen: HashMap<String, Plan>,
    /// Sizes seen so far of a dimension, by the rest of the product.
    sizes: HashMap<String, HashSet<usize>>,
}

#[derive(Debug)]
struct Handle(sys::cublasLtHandle_t);

// SAFETY: cuBLASLt's handles and descriptors may be used by any thread, one at a time: a lock is
// held around all of it.
unsafe impl Send for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: created once and destroyed here. Nothing can be done where that fails.
        let _ = unsafe { result::destroy_handle(self.0) };
    }
}

/// Descriptors of a product, and its algorithm.
#[derive(Debug)]
struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    a: Layout,
    b: Layout,
    d: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

// SAFETY: as for `Handle`.
unsafe impl Send for Plan {}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: created by `Plan::new` and destroyed here.
        let _ = unsafe { result::destroy_matmul_desc(self.description) };
    }
}

#[derive(Debug)]
struct Layout(sys::cublasLtMatrixLayout_t);

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: created by `Layout::new` and destroyed here.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

fn failed(call: &'static str, error: result::CublasError) -> GpuError {
    GpuError::Call { call, what: format!("{error:?}") }
}

fn type_of(storage: Storage) -> sys::cudaDataType {
    match storage {
        Storage::F32 => sys::cudaDataType::CUDA_R_32F,
        Storage::Bf16 => sys::cudaDataType::CUDA_R_16BF,
    }
}

/// cuBLASLt's version, if it is installed.
pub(super) fn version() -> Option<usize> {
    // SAFETY: asks the loader whether the library can be opened; its version needs no GPU.
    unsafe { sys::is_culib_present().then(|| sys::cublasLtGetVersion()) }
}

impl Layout {
    fn new(matrix: &Matrix, count: usize) -> Result<Self, GpuError> {
        let (rows, columns) = (matrix.rows as u64, matrix.columns as u64);
        let leading = i64::try_from(matrix.leading).unwrap_or(i64::MAX);
        let layout = result::create_matrix_layout(type_of(matrix.storage), rows, columns, leading);
        let layout = Self(layout.map_err(|error| failed("cublasLtMatrixLayoutCreate", error))?);
        if count > 1 {
            use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
            let (count, stride) = (
                i32::try_from(count).unwrap_or(i32::MAX),
                i64::try_from(matrix.stride).unwrap_or(i64::MAX),
            );
            layout.set(Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count)?;
            layout.set(Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride)?;
        }
        Ok(layout)
    }

    fn set<T>(
        &self,
        attribute: sys::cublasLtMatrixLayoutAttribute_t,
        value: &T,
    ) -> Result<(), GpuError> {
        let value: *const T = value;
        // SAFETY: the layout is live; the value has the attribute's type, and is read at once.
        unsafe {
            result::set_matrix_layout_attribute(self.0, attribute, value.cast(), size_of::<T>())
        }
        .map_err(|error| failed("cublasLtMatrixLayoutSetAttribute", error))
    }
}

/// Sets an attribute of a product's description.
fn set<T>(
    description: sys::cublasLtMatmulDesc_t,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> Result<(), GpuError> {
    let value: *const T = value;
    // SAFETY: the description is live; the value has the attribute's type, and is read at once.
    unsafe {
        result::set_matmul_desc_attribute(description, attribute, value.cast(), size_of::<T>())
    }
    .map_err(|error| failed("cublasLtMatmulDescSetAttribute", error))
}

impl Plan {
    /// Descriptors without an algorithm. f32 is multiplied as f32: TF32 would have to be requested.
    fn new(product: &Product) -> Result<Self, GpuError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let description = result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F)
            .map_err(|error| failed("cublasLtMatmulDescCreate", error))?;
        let count = product.count;
        let layouts = (|| {
            Ok((
                Layout::new(&product.a, count)?,
                Layout::new(&product.b, count)?,
                Layout::new(&product.d, count)?,
            ))
        })();
        let (a, b, d) = match layouts {
            Ok(layouts) => layouts,
            Err(error) => {
                // SAFETY: created above, and used no more.
                let _ = unsafe { result::destroy_matmul_desc(description) };
                return Err(error);
            }
        };
        let plan =
            Self { description, a, b, d, algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] } };
        // CUBLAS_OP_N and CUBLAS_OP_T.
        let [op_a, op_b] = [&product.a, &product.b].map(|matrix| i32::from(matrix.transposed));
        set(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &op_a)?;
        set(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &op_b)?;
        if let Some(bias) = product.bias {
            // The search for algorithms needs to know that there is a bias.
            set(description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            set(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            let stored = type_of(product.d.storage);
            set(description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &stored)?;
        }
        Ok(plan)
    }

    /// Queues the product with its result at `d`.
    fn launch(
        &self,
        handle: &Handle,
        device: &dyn Streamed,
        workspace: u64,
        product: &Product,
        d: u64,
    ) -> Result<(), GpuError> {
        if let Some(bias) = product.bias {
            let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            set(self.description, attribute, &bias)?;
        }
        let (alpha, beta): (*const f32, *const f32) =
            (&raw const product.alpha, &raw const product.beta);
        // SAFETY: the descriptors are live and describe the matrices, whose views were checked
        // against the shape; factors are read at once.
        unsafe {
            result::matmul(
                handle.0,
                self.description,
                alpha.cast(),
                beta.cast(),
                product.a.address as *const c_void,
                self.a.0,
                product.b.address as *const c_void,
                self.b.0,
                d as *const c_void,
                self.d.0,
                d as *mut c_void,
                self.d.0,
                &raw const self.algorithm,
                workspace as *mut c_void,
                WORKSPACE,
                device.stream_handle().cast(),
            )
        }
        .map_err(|error| failed("cublasLtMatmul", error))
    }

    /// Whether cuBLASLt accepts an algorithm that was chosen earlier.
    fn takes(&self, handle: &Handle, algorithm: &sys::cublasLtMatmulAlgo_t) -> bool {
        let mut result = MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        // SAFETY: the descriptors are live; it writes one result.
        let status = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                handle.0,
                self.description,
                self.a.0,
                self.b.0,
                self.d.0,
                self.d.0,
                std::ptr::from_ref(algorithm),
                result.as_mut_ptr(),
            )
        };
        // SAFETY: written, where it succeeded; zeros otherwise, which are a result too.
        let workspace = unsafe { result.assume_init() }.workspaceSize;
        status.result().is_ok() && workspace <= WORKSPACE
    }

    /// Algorithms, the fastest by cuBLASLt's estimate first.
    fn candidates(
        &self,
        handle: &Handle,
        alignments: [u32; 3],
        most: usize,
    ) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, GpuError> {
        let preference = Preference::new(alignments)?;
        let mut found =
            [const { MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed() }; SURVEYED];
        let (mut count, asked) = (0, i32::try_from(most.min(SURVEYED)).unwrap_or(1));
        // SAFETY: descriptors are live, and there is room for as many results as are asked for.
        unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle.0,
                self.description,
                self.a.0,
                self.b.0,
                self.d.0,
                self.d.0,
                preference.0,
                asked,
                found.as_mut_ptr().cast(),
                &raw mut count,
            )
        }
        .result()
        .map_err(|error| failed("cublasLtMatmulAlgoGetHeuristic", error))?;
        let count = usize::try_from(count).unwrap_or(0).min(SURVEYED);
        // SAFETY: so many were written.
        let found = found[..count].iter().map(|result| unsafe { result.assume_init() });
        Ok(found.filter(|result| result.state.result().is_ok()).map(|result| result.algo).collect())
    }
}

impl Plan {
    /// The fastest algorithm by cuBLASLt's estimate.
    fn first_candidate(
        &self,
        handle: &Handle,
        product: &Product,
        alignments: [u32; 3],
    ) -> Result<sys::cublasLtMatmulAlgo_t, GpuError> {
        let none = || {
            let what = format!("no algorithm for {}", key(product, alignments));
            GpuError::Call { call: "cublasLtMatmulAlgoGetHeuristic", what }
        };
        self.candidates(handle, alignments, 1)?.first().copied().ok_or_else(none)
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created by `new` and destroyed here.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

impl Preference {
    fn new(alignments: [u32; 3]) -> Result<Self, GpuError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = result::create_matmul_pref()
            .map_err(|error| failed("cublasLtMatmulPreferenceCreate", error))?;
        let preference = Self(preference);
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE)?;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &REDUCTIONS)?;
        let [a, b, d] = alignments;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &a)?;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &b)?;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &d)?;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &d)?;
        Ok(preference)
    }

    fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> Result<(), GpuError> {
        let value: *const T = value;
        // SAFETY: the preference is live; the value has the attribute's type, and is read at once.
        unsafe {
            result::set_matmul_pref_attribute(self.0, attribute, value.cast(), size_of::<T>())
        }
        .map_err(|error| failed("cublasLtMatmulPreferenceSetAttribute", error))
    }
}

/// The largest power of two up to 256 that divides an address.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

fn alignments(product: &Product) -> [u32; 3] {
    [product.a.address, product.b.address, product.d.address].map(alignment)
}

/// A textual key of everything an algorithm depends on.
fn key(product: &Product, alignments: [u32; 3]) -> String {
    let of = |matrix: &Matrix| {
        let Matrix { storage, rows, columns, leading, stride, transposed, .. } = matrix;
        format!("{storage:?} {rows} {columns} {leading} {stride} {transposed}")
    };
    let (a, b, d) = (of(&product.a), of(&product.b), of(&product.d));
    let (adds, bias) = (product.beta != 0.0, product.bias.is_some());
    format!("{a}, {b}, {d}, {} {} {adds} {bias} {alignments:?}", product.k, product.count)
}

impl Products {
    /// Queues a product with the algorithm chosen for its shape, choosing one first if necessary.
    /// Choosing waits for the queue, so the first product of a shape must not be captured.
    pub(super) fn run(
        &mut self,
        device: &dyn Streamed,
        cache: &Cache,
        device_name: &str,
        workspace: u64,
        product: &Product,
    ) -> Result<(), GpuError> {
        let (handle, plan) = self.plan(device, cache, device_name, workspace, product)?;
        plan.launch(handle, device, workspace, product, product.d.address)
    }

    /// Seconds of the chosen algorithm, then of all others.
    pub(super) fn survey(
        &mut self,
        device: &dyn Streamed,
        cache: &Cache,
        device_name: &str,
        workspace: u64,
        product: &Product,
    ) -> Result<Vec<f64>, GpuError> {
        let (handle, plan) = self.plan(device, cache, device_name, workspace, product)?;
        let chosen = plan.algorithm;
        let all = plan.candidates(handle, alignments(product), SURVEYED)?;
        let algorithms = [&[chosen], &all[..]].concat();
        let seconds = time(handle, plan, device, workspace, product, &algorithms);
        plan.algorithm = chosen;
        seconds
    }

    /// The library handle and the plan of a product.
    fn plan(
        &mut self,
        device: &dyn Streamed,
        cache: &Cache,
        device_name: &str,
        workspace: u64,
        product: &Product,
    ) -> Result<(&Handle, &mut Plan), GpuError> {
        let missing = || GpuError::Library {
            library: "libcublasLt",
            needed_for: "matrix products",
            advice: "install CUDA's libraries",
        };
        if self.handle.is_none() {
            version().ok_or_else(missing)?;
            let handle = result::create_handle();
            self.handle = Some(Handle(handle.map_err(|error| failed("cublasLtCreate", error))?));
        }
        let handle = self.handle.as_ref().ok_or_else(missing)?;
        let alignments = alignments(product);
        let plan = match self.chosen.entry(key(product, alignments)) {
            Entry::Occupied(plan) => plan.into_mut(),
            Entry::Vacant(place) => {
                let version = version().ok_or_else(missing)?;
                let what = format!("cuBLASLt {version} on {device_name}: {}", place.key());
                let mut plan = Plan::new(product)?;
                let varies = varies(&mut self.sizes, product);
                let kept = cache.get(&what).and_then(|bytes| <[u8; 64]>::try_from(bytes).ok());
                let kept =
                    kept.map(|bytes| sys::cublasLtMatmulAlgo_t { data: bytemuck::cast(bytes) });
                plan.algorithm = match kept.filter(|algorithm| plan.takes(handle, algorithm)) {
                    Some(algorithm) => algorithm,
                    None if varies => plan.first_candidate(handle, product, alignments)?,
                    None => {
                        let algorithm =
                            choose(handle, &mut plan, device, workspace, product, alignments)?;
                        cache.put(&what, bytemuck::cast_slice(&algorithm.data));
                        algorithm
                    }
                };
                place.insert(plan)
            }
        };
        Ok((handle, plan))
    }
}

/// Whether a product is one of many that differ in their rows or in their depth only. Notes its
/// sizes.
fn varies(sizes: &mut HashMap<String, HashSet<usize>>, product: &Product) -> bool {
    let Product { a, b, d, k, count, .. } = product;
    let kind = format!("{:?} {} {} {count}", d.storage, a.transposed, b.transposed);
    let families = [
        (format!("{kind} rows of {} by {k}", d.rows), d.columns),
        (format!("{kind} depth of {} by {}", d.rows, d.columns), *k),
    ];
    let many = families.map(|(family, size)| {
        let seen = sizes.entry(family).or_default();
        seen.insert(size);
        seen.len() > SIZES
    });
    many.contains(&true)
}

/// The first of the candidates, or one that is [`CLEARLY_FASTER`]. The first if there is no memory
/// to time them in.
fn choose(
    handle: &Handle,
    plan: &mut Plan,
    device: &dyn Streamed,
    workspace: u64,
    product: &Product,
    alignments: [u32; 3],
) -> Result<sys::cublasLtMatmulAlgo_t, GpuError> {
    let first = plan.first_candidate(handle, product, alignments)?;
    let candidates = plan.candidates(handle, alignments, CANDIDATES)?;
    if candidates.len() < 2 {
        return Ok(first);
    }
    device.not_while_recording("choosing a product's algorithm")?;
    let seconds = match time(handle, plan, device, workspace, product, &candidates) {
        Err(GpuError::OutOfMemory { .. }) => return Ok(first),
        seconds => seconds?,
    };
    let fastest = seconds.iter().zip(&candidates).min_by(|a, b| a.0.total_cmp(b.0));
    let clearly = fastest.filter(|(least_s, _)| **least_s < CLEARLY_FASTER * seconds[0]);
    Ok(clearly.map_or(candidates[0], |(_, &algorithm)| algorithm))
}

/// Seconds of each algorithm, infinite if it does not run. The first is always timed as often as
/// the fastest. Results go to scratch memory, because a
/// product may accumulate into its destination only once.
fn time(
    handle: &Handle,
    plan: &mut Plan,
    device: &dyn Streamed,
    workspace: u64,
    product: &Product,
    algorithms: &[sys::cublasLtMatmulAlgo_t],
) -> Result<Vec<f64>, GpuError> {
    let d = &product.d;
    let elements = (product.count - 1) * d.stride + (d.columns - 1) * d.leading + d.rows;
    let bytes = elements * d.storage.bytes();
    let scratch = device.allocate(bytes)?;
    let mut each = || {
        device.fill(scratch, 0, bytes)?;
        let mut batch = |algorithm: &sys::cublasLtMatmulAlgo_t, launches: usize| {
            plan.algorithm = *algorithm;
            let start = device.record()?;
            for _ in 0..launches {
                plan.launch(handle, device, workspace, product, scratch)?;
            }
            let end = device.record()?;
            end.synchronize()?;
            Ok::<f64, GpuError>(start.seconds_until(&end)? / launches as f64)
        };
        static WARM: AtomicBool = AtomicBool::new(false);
        let begin = Instant::now();
        while !WARM.load(Ordering::Relaxed) && begin.elapsed().as_secs_f64() < WARM_UP_S {
            let runs = algorithms.iter().any(|algorithm| batch(algorithm, 8).is_ok());
            if !runs {
                break;
            }
        }
        WARM.store(true, Ordering::Relaxed);
        // The first launch of an algorithm loads its kernel; one that fails does not run here.
        let mut once = |algorithm| batch(algorithm, 1).and_then(|_| batch(algorithm, 1));
        let mut seconds: Vec<f64> =
            algorithms.iter().map(|algorithm| once(algorithm).unwrap_or(f64::INFINITY)).collect();
        let mut again = |seconds: &mut [f64], chosen: &[usize], rounds: usize| {
            let mut found = vec![Vec::with_capacity(rounds); seconds.len()];
            for _ in 0..rounds {
                for &at in chosen {
                    let launches = (BATCH_S / seconds[at]).ceil().clamp(1.0, BATCH_LAUNCHES);
                    found[at].push(batch(&algorithms[at], launches as usize)?);
                }
            }
            for &at in chosen {
                found[at].sort_by(f64::total_cmp);
                seconds[at] = found[at][rounds / 2];
            }
            Ok::<(), GpuError>(())
        };
        let least = seconds.iter().copied().fold(f64::INFINITY, f64::min);
        let mut order: Vec<usize> =
            (0..seconds.len()).filter(|&at| seconds[at] < HOPELESS * least).collect();
        again(&mut seconds, &order, ROUNDS)?;
        order.sort_by(|&a, &b| seconds[a].total_cmp(&seconds[b]));
        order.truncate(LAST);
        if !order.contains(&0) && seconds[0].is_finite() {
            order.push(0);
        }
        again(&mut seconds, &order, LAST_ROUNDS)?;
        Ok(seconds)
    };
    let seconds = each();
    device.free(scratch);
    seconds
}
