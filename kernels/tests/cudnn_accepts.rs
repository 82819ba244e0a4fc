//! cuDNN accepts our graphs of attention and makes plans of them for GPUs that are not present:
//! since 9.8 a description of the device is enough. `make cudnn` downloads cuDNN and runs this; if
//! cuDNN is not installed, the tests say so and check nothing.
//!
//! cuDNN does not load without a driver and cuBLASLt, though it uses neither here. If they are
//! missing, stubs with the functions that it looks up are compiled and loaded instead.
#![allow(unsafe_code)] // loads libraries

use kernels::attention::Attention;
use kernels::cuda::cudnn;
use kernels::cuda::fused::{Graph, Operation, Pass, Pointwise};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The driver functions that cuDNN calls while it makes plans. Handles are arbitrary addresses;
/// functions that would run something fail.
const DRIVER: &str = "
typedef void *P;
#define HANDLE(name) int name(P *made) { if (made) *made = (P)16; return 0; }
#define NOTHING(name) int name(void) { return 0; }
#define NO_DEVICE(name) int name(void) { return 100; }
static int text(const char **to) { *to = \"no GPU is here\"; return 0; }
int cuGetErrorString(int error, const char **to) { return text(to); }
int cuGetErrorName(int error, const char **to) { return text(to); }
int cuDriverGetVersion(int *to) { *to = 13000; return 0; }
int cuDeviceGetCount(int *to) { *to = 1; return 0; }
int cuDeviceGet(int *to, int number) { *to = number; return 0; }
int cuKernelGetAttribute(int *to) { *to = 0; return 0; }
int cuCtxGetLimit(unsigned long *to) { *to = 1024; return 0; }
int cuOccupancyMaxPotentialClusterSize(int *to) { *to = 8; return 0; }
HANDLE(cuCtxGetCurrent) HANDLE(cuCtxPopCurrent) HANDLE(cuLibraryLoadData) HANDLE(cuLibraryLoadFromFile)
HANDLE(cuLibraryGetKernel) HANDLE(cuKernelGetFunction) HANDLE(cuModuleGetFunction) HANDLE(cuModuleLoadData)
NOTHING(cuCtxPushCurrent) NOTHING(cuLibraryUnload) NOTHING(cuKernelSetAttribute) NOTHING(cuModuleUnload)
NO_DEVICE(cuStreamGetCtx) NO_DEVICE(cuTensorMapEncodeIm2col) NO_DEVICE(cuTensorMapEncodeTiled)
NO_DEVICE(cuLinkCreate) NO_DEVICE(cuLinkAddData) NO_DEVICE(cuLinkComplete) NO_DEVICE(cuLinkDestroy)
NO_DEVICE(cuLaunchKernel) NO_DEVICE(cuLaunchCooperativeKernel) NO_DEVICE(cuLaunchKernelEx)
";

const CUBLASLT: &str = "unsigned long cublasLtGetVersion(void) { return 120900; }";

/// Properties of a GPU in cuDNN's JSON. The names are those that cuDNN reads and writes;
/// `xla/stream_executor/cuda/cudnn_frontend_helpers` in openxla/xla uses them too.
fn described(
    [version, multiprocessors, shared_most]: [usize; 3],
    [memory, l2]: [usize; 2],
    [clock_khz, memory_khz, bus]: [usize; 3],
    [blocks, threads]: [usize; 2],
) -> String {
    format!(
        r#"{{"deviceVer":{version},"multiProcessorCount":{multiprocessors},"warpSize":32,
        "maxSharedMemoryPerBlock":49152,"maxSharedMemoryPerBlockOptin":{shared_most},
        "reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,"maxCtasPerSM":{blocks},
        "maxThreadsPerBlock":1024,"maxThreadsPerSM":{threads},"regsPerBlock":65536,"totalGlobalMem":{memory},
        "smClockRateKHz":{clock_khz},"l2CacheSize":{l2},"maxBlockSize":[1024,1024,64],"memClockRateKHz":{memory_khz},
        "memoryBusWidth":{bus},"maxGridSize":[2147483647,65535,65535],"supportCoopLaunch":1,"pciDeviceId":0,
        "isTccDriver":0,"cudaDeviceId":0,"driverVer":13000,"deviceName":"described"}}"#
    )
}

fn h200() -> String {
    let memory = [150_110_011_392, 62_914_560];
    described([900, 132, 232_448], memory, [1_980_000, 3_201_000, 6144], [32, 2048])
}

fn a100() -> String {
    let memory = [85_031_714_816, 41_943_040];
    described([800, 108, 166_912], memory, [1_410_000, 1_593_000, 5120], [32, 2048])
}

/// Compiles and loads a stub, unless the library is installed.
fn stand_in(name: &str, text: &str) {
    // SAFETY: loading NVIDIA's libraries has no other effect.
    if let Ok(library) = unsafe { libloading::Library::new(name) } {
        std::mem::forget(library);
        return;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stand-ins");
    std::fs::create_dir_all(&folder).expect("a folder");
    let (source, library): (PathBuf, PathBuf) =
        (folder.join(format!("{name}.c")), folder.join(name));
    std::fs::write(&source, text).expect("a file");
    let mut compile = Command::new("cc");
    compile.args(["-shared", "-fPIC", "-w", &format!("-Wl,-soname,{name}"), "-o"]);
    let compiled = compile.arg(&library).arg(&source).status().expect("a C compiler");
    assert!(compiled.success(), "{name} does not compile");
    // SAFETY: it was compiled just now, and has no initialisers.
    let library = unsafe { libloading::Library::new(&library) }.expect("it loads");
    // Keep it loaded: cuDNN finds it by its name.
    std::mem::forget(library);
}

/// Whether cuDNN is installed. If not, says so, or fails if it is required (`make cudnn`).
fn is_here() -> bool {
    static HERE: OnceLock<bool> = OnceLock::new();
    *HERE.get_or_init(|| {
        // SAFETY: loading NVIDIA's libraries has no other effect.
        if unsafe { libloading::Library::new("libcudnn.so.9") }.is_err() {
            assert!(std::env::var_os("MESHWRIGHT_NEEDS_CUDNN").is_none(), "no libcudnn.so.9");
            eprintln!(
                "SKIPPED, nothing is checked: no libcudnn.so.9 is here; `make cudnn` fetches it"
            );
            return false;
        }
        stand_in("libcuda.so.1", DRIVER);
        stand_in("libcublasLt.so.12", CUBLASLT);
        stand_in("libcublasLt.so.13", CUBLASLT);
        eprintln!("{}", cudnn::version().expect("9.16 or later"));
        true
    })
}

const PASSES: [Pass; 3] =
    [Pass::Forward, Pass::Backward { repeatable: true }, Pass::Backward { repeatable: false }];

const BACKWARD: Pass = Pass::Backward { repeatable: false };

fn shapes() -> Vec<Attention> {
    let whole = Attention::causal;
    vec![
        whole(8, 1024, 12, 12, 64),
        whole(2, 8192, 32, 8, 128),
        whole(1, 4096, 64, 8, 128),
        // Lengths that are not multiples of a tile; no mask.
        Attention { kv_len: 1001, causal: false, ..whole(2, 777, 8, 1, 64) },
        // A chunk of queries that starts at an offset.
        Attention { q_len: 1024, q_offset: 3072, ..whole(2, 4096, 32, 8, 128) },
        Attention { q_len: 1000, q_offset: 1001, kv_offset: 500, ..whole(1, 1501, 16, 4, 96) },
    ]
}

/// Bytes of a matrix of scores in bf16.
fn scores_bytes(a: &Attention) -> usize {
    2 * a.batch * a.q_heads * a.q_len * a.kv_len
}

/// Every pass of every shape has a plan. Except in the repeatable backward pass, no plan's
/// workspace holds a matrix of scores: the kernels are fused.
fn check(device: &str, name: &str) {
    if !is_here() {
        return;
    }
    for a in shapes() {
        let sdpa = a.sdpa().expect("a graph");
        for pass in PASSES {
            let plans = cudnn::plans_without_gpu(device, &sdpa.graph(pass));
            let plans = plans.unwrap_or_else(|error| panic!("{name} {pass:?} of {a:?}: {error}"));
            let first =
                plans.first().unwrap_or_else(|| panic!("{name} {pass:?} of {a:?}: no plan"));
            let said: Vec<String> = plans
                .iter()
                .map(|plan| {
                    format!(
                        "{} ({:.1} MiB)",
                        plan.name,
                        plan.workspace_bytes as f64 / f64::from(1 << 20)
                    )
                })
                .collect();
            let [q, kv] = [a.q_len, a.kv_len];
            let heads = format!("{}/{} heads of {}", a.q_heads, a.kv_heads, a.qk_dim);
            eprintln!("{name} {pass:?} of {} x {q} by {kv}, {heads}: {}", a.batch, said.join(", "));
            let scratch: usize = sdpa.graph(pass).scratch().map(|(_, bytes)| bytes).sum();
            assert!(plans.iter().all(|plan| plan.workspace_bytes >= scratch));
            let is_long = q >= 4096;
            let keeps_scores = pass == Pass::Backward { repeatable: true };
            assert!(!is_long || keeps_scores || first.workspace_bytes < scores_bytes(&a) / 2);
        }
    }
}

#[test]
fn on_hopper() {
    check(&h200(), "sm_90");
}

#[test]
fn on_ampere() {
    check(&a100(), "sm_80");
}

/// cuDNN refuses graphs that are almost right, so accepting ours is evidence of the right
/// operations in the right order. It is not evidence that a plan performs each: an exponential in
/// place of the last copy of gradients is accepted, too.
#[test]
fn what_is_no_attention_is_refused() {
    if !is_here() {
        return;
    }
    let a = Attention::causal(2, 1024, 8, 8, 64);
    let sdpa = a.sdpa().expect("a graph");
    let replaced = |pass, old: Pointwise, new: Pointwise| -> Graph {
        let mut graph = sdpa.graph(pass);
        let mut found = false;
        for operation in &mut graph.operations {
            if let Operation::Pointwise { how, .. } = operation
                && *how == old
            {
                (*how, found) = (new, true);
            }
        }
        assert!(found, "no {old:?} in {pass:?}");
        graph
    };
    let mut without_last = sdpa.graph(Pass::Forward);
    without_last.operations.remove(2);
    for (what, graph) in [
        ("no quotient", replaced(Pass::Forward, Pointwise::Divide, Pointwise::Multiply)),
        ("a logarithm for an exponential", replaced(Pass::Forward, Pointwise::Exp, Pointwise::Log)),
        ("the same in the backward pass", replaced(BACKWARD, Pointwise::Exp, Pointwise::Log)),
        ("an index from nowhere", without_last),
    ] {
        let plans = cudnn::plans_without_gpu(&h200(), &graph);
        let refused = plans.as_ref().map_or(true, Vec::is_empty);
        assert!(refused, "{what}: {plans:?}");
        eprintln!(
            "{what}: refused ({})",
            plans.err().map_or("no plan".to_owned(), |error| error.to_string())
        );
    }
}
