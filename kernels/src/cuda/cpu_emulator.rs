//! An emulated device for tests without a GPU: launches run as C++ on the CPU (`cpu_emulator.h`),
//! products as three loops, in host memory.
//!
//! It detects errors that a GPU would not report: arguments of the wrong type, addresses outside
//! any allocation, writes past an allocation's ends, and threads that wait for ever. A misaligned
//! pack ends the process, as it would end a GPU's context. One that checks ([`CpuEmulator::checking`])
//! looks at every access to memory: races in shared memory, reads of shared memory that nobody
//! wrote, and accesses beside shared arrays and allocations. It is many times slower.
#![allow(unsafe_code)] // freshly compiled code, and memory by address

use super::driver::{Driver, Event, EventKind, GpuError, Job, Properties};
use super::product::{Matrix, Product};
use super::{Argument, CompileConstants, Launch, Source, Storage, program};
use half::bf16;
use libloading::Library;
use std::alloc::{Layout, alloc, dealloc};
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_uint};
use std::fmt::Write as _;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Guard bytes before and after each allocation, checked after each launch.
const GUARD: usize = 1024;
const GUARDED: u8 = 0xa5;

/// Bytes that an allocation's address is a multiple of.
const ALIGNMENT: usize = 256;

/// The emulator. Clones are the same device; it does one thing at a time.
#[derive(Clone, Debug)]
pub struct CpuEmulator {
    properties: Arc<Properties>,
    state: Arc<Mutex<State>>,
    folder: Arc<PathBuf>,
    checks: bool,
    /// What is replaced in sources, and by what.
    planted: Option<Arc<(String, String)>>,
}

#[derive(Debug, Default)]
struct State {
    libraries: HashMap<String, Loaded>,
    allocations: BTreeMap<u64, usize>,
}

type Call = unsafe extern "C" fn(*const c_char, *const u64, c_uint, c_uint, c_uint) -> c_int;

impl CpuEmulator {
    /// An emulator that keeps compiled sources in `folder`, where later ones find them.
    ///
    /// # Errors
    /// If the folder cannot be created.
    pub fn new(folder: &Path) -> Result<Self, GpuError> {
        fs::create_dir_all(folder).map_err(|error| failed("create_dir_all", &error))?;
        let properties = Properties {
            name: "C++ on the CPU".to_owned(),
            architecture: "c++".to_owned(),
            multiprocessors: 2,
            memory_bytes: usize::MAX,
            versions: String::new(),
        };
        Ok(Self {
            properties: Arc::new(properties),
            state: Arc::default(),
            folder: Arc::new(folder.to_path_buf()),
            checks: false,
            planted: None,
        })
    }

    /// The same, looking at every access to memory.
    #[must_use]
    pub fn checking(self) -> Self {
        Self { checks: true, ..self }
    }

    /// The same with a deliberate bug: each `from` in a source is replaced by `to`, to see what the
    /// emulator notices.
    #[must_use]
    pub fn with_planted(self, from: &str, to: &str) -> Self {
        Self { planted: Some(Arc::new((from.to_owned(), to.to_owned()))), ..self }
    }

    /// The complete program, with an entry point for each kernel.
    fn text(&self, source: Source, constants: &CompileConstants) -> String {
        let mut program = program(source, constants);
        if let Some(planted) = &self.planted {
            program = program.replace(&planted.0, &planted.1);
        }
        if self.checks {
            program = program.lines().map(with_seen_arrays).collect();
        }
        // In a namespace of its own shared arrays, also of templates, belong to this file alone, and
        // so can lie in one section.
        let checked = if self.checks { "#define CHECKED\n" } else { "" };
        let header = include_str!("cpu_emulator.h");
        let mut text = format!("{checked}{header}\nnamespace {{\n{program}\n}}\n");
        for kernel in source.kernels() {
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "extern \"C\" __attribute__((visibility(\"default\"))) int call_{kernel}(const char* letters, const std::uint64_t* bits, unsigned x, unsigned y, \
                 unsigned threads) {{ return emulator::call({kernel}, letters, bits, x, y, threads); }}"
            );
        }
        text
    }

    fn with<R>(&self, act: impl FnOnce(&mut State) -> R) -> R {
        act(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn failed(call: &'static str, what: &dyn std::fmt::Display) -> GpuError {
    GpuError::Call { call, what: what.to_string() }
}

/// The names of the shared arrays that a line of a source declares.
fn arrays_of(line: &str) -> Vec<&str> {
    let Some((_, declared)) = line.split_once("__shared__ ") else { return Vec::new() };
    let declared = declared.split(';').next().unwrap_or_default();
    let mut depth = 0;
    let declarators = declared.split(|c: char| {
        depth += i32::from("([".contains(c)) - i32::from(")]".contains(c));
        c == ',' && depth == 0
    });
    declarators.filter_map(|of| of.split('[').next()?.split_whitespace().last()).collect()
}

/// A line of a source. Where it declares shared arrays, their addresses are taken: the compiler
/// instruments no access to a variable whose address nobody takes.
fn with_seen_arrays(line: &str) -> String {
    let seen = arrays_of(line).into_iter().map(|name| format!(" emulator::seen(&{name});"));
    format!("{line}{}\n", seen.collect::<String>())
}

/// A compiled source.
#[derive(Debug)]
struct Loaded {
    library: Library,
    /// Its shared arrays in memory, sorted. Empty unless it checks.
    arrays: Vec<Span>,
}

/// A range of addresses, as the emulator's header has it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Span {
    begin: u64,
    end: u64,
}

type Tell = unsafe extern "C" fn(*const Span, c_uint, *const Span, c_uint, u64);
type Said = unsafe extern "C" fn() -> *const c_char;

/// Runs a compiler or a tool of its, and returns what it wrote.
fn tool(name: &str, arguments: &[&OsStr]) -> Result<String, GpuError> {
    let done = Command::new(name).args(arguments).output();
    let done = done.map_err(|error| failed("c++", &format!("{name}: {error}")))?;
    match done.status.success() {
        true => Ok(String::from_utf8_lossy(&done.stdout).into_owned()),
        false => Err(GpuError::Compile(String::from_utf8_lossy(&done.stderr).into_owned())),
    }
}

/// The shared arrays of a library that checks, from its symbols: those whose mangled names end with
/// the name of one.
fn shared_arrays(library: &Library, built: &Path, text: &str) -> Result<Vec<Span>, GpuError> {
    let symbols = tool("nm", &["-S".as_ref(), built.as_os_str()])?;
    let program = text.lines().filter(|line| !line.starts_with("#define"));
    let endings = program.flat_map(arrays_of).map(|name| format!("E{}{name}", name.len()));
    let endings: Vec<String> = endings.collect();
    let number = |word: &str| u64::from_str_radix(word, 16).ok();
    let (mut sized, mut base) = (Vec::new(), 0);
    for line in symbols.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [at, _, _, "emulator_base"] => base = number(at).unwrap_or(0),
            [at, bytes, _, name] if endings.iter().any(|ending| name.ends_with(ending)) => {
                sized.extend(number(at).zip(number(bytes)));
            }
            _ => {}
        }
    }
    // SAFETY: the header declares it.
    let here = unsafe { library.get::<*const u8>(b"emulator_base\0") };
    let here = *here.map_err(|error| failed("dlsym", &error))? as u64;
    let moved = |(at, bytes)| Span { begin: here - base + at, end: here - base + at + bytes };
    let mut arrays: Vec<Span> = sized.into_iter().map(moved).collect();
    arrays.sort_unstable();
    Ok(arrays)
}

/// Compiles into the folder, or takes the library that is there, and loads a copy of it: libraries
/// loaded from one file share their globals, and emulators must not.
fn load(folder: &Path, text: &str, checks: bool) -> Result<Loaded, GpuError> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    let built = folder.join(format!("{:016x}.so", hasher.finish()));
    let own =
        folder.join(format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    let main = own.with_extension("cpp");
    let source = built.with_extension("cpp");
    if fs::read_to_string(&source).ok().as_deref() != Some(text) || !built.exists() {
        fs::write(&main, text).map_err(|error| failed("write", &error))?;
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        // A GPU faults on packs that are not aligned to their size; the CPU would not.
        let alignment = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"];
        // Not when linking: the header has the functions of its run-time library.
        let accesses = checks.then_some("-fsanitize=thread");
        let (object, linked) = (own.with_extension("o"), own.with_extension("built"));
        let flags = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fPIC"];
        let hidden = "-fvisibility=hidden";
        let words = flags.into_iter().chain([hidden]).chain(alignment).chain(accesses);
        let words = words.chain(["-c", "-o"]).map(OsStr::new);
        tool(&compiler, &words.chain([object.as_ref(), main.as_ref()]).collect::<Vec<_>>())?;
        let words = ["-shared", "-o"].map(OsStr::new);
        let words = words.into_iter().chain([linked.as_ref(), object.as_ref()]);
        tool(&compiler, &words.collect::<Vec<_>>())?;
        let _ = fs::remove_file(object);
        fs::rename(&linked, &built).map_err(|error| failed("rename", &error))?;
        fs::rename(&main, &source).map_err(|error| failed("rename", &error))?;
    }
    let copy = own.with_extension("so");
    fs::copy(&built, &copy).map_err(|error| failed("copy", &error))?;
    // SAFETY: compiled from sources of this crate, which do nothing when loaded but set up empty
    // vectors.
    let library = unsafe { Library::new(&copy) }.map_err(|error| failed("dlopen", &error));
    let _ = fs::remove_file(copy);
    let library = library?;
    let arrays = if checks { shared_arrays(&library, &built, text)? } else { Vec::new() };
    Ok(Loaded { library, arrays })
}

impl State {
    /// The start and end of the allocation that contains an address.
    fn allocation(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, &bytes) = self.allocations.range(..=address).next_back()?;
        let end = start + bytes as u64;
        (address < end).then_some((start, end))
    }

    fn check_arguments(&self, launch: &Launch) -> Result<(), GpuError> {
        for (at, argument) in launch.arguments().iter().enumerate() {
            if let &Argument::Address(address) = argument
                && address != 0
                && self.allocation(address).is_none()
            {
                let what = format!("argument {at} is nobody's address: {launch:?}");
                return Err(failed("launch", &what));
            }
        }
        Ok(())
    }

    /// Fails if anything was written outside an allocation.
    fn check_guards(&self, after: &dyn std::fmt::Debug) -> Result<(), GpuError> {
        for (&start, &bytes) in &self.allocations {
            for guard in [start - GUARD as u64, start + bytes as u64] {
                // SAFETY: `allocate` made room for the guards, and the allocation is live.
                let guard = unsafe { std::slice::from_raw_parts(guard as *const u8, GUARD) };
                if guard.iter().any(|&byte| byte != GUARDED) {
                    return Err(failed("launch", &format!("wrote outside its memory: {after:?}")));
                }
            }
        }
        Ok(())
    }

    /// A pointer to bytes of live memory.
    fn bytes(&self, address: u64, len: usize) -> Result<*mut u8, GpuError> {
        match self.allocation(address) {
            Some((_, end)) if address + len as u64 <= end => Ok(address as *mut u8),
            _ => Err(failed("memory", &format!("{len} bytes at {address:#x} are nobody's"))),
        }
    }
}

fn layout(bytes: usize) -> Result<Layout, GpuError> {
    Layout::from_size_align(bytes + 2 * GUARD, ALIGNMENT).map_err(|error| failed("layout", &error))
}

#[allow(clippy::cast_possible_truncation)]
impl Driver for CpuEmulator {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn allocate(&self, bytes: usize) -> Result<u64, GpuError> {
        let layout = layout(bytes)?;
        // SAFETY: the layout is not empty, and all of it is written before it is read.
        let start = unsafe {
            let start = alloc(layout);
            if start.is_null() {
                return Err(GpuError::OutOfMemory { bytes, what: "the host's".to_owned() });
            }
            start.write_bytes(GUARDED, layout.size());
            start.add(GUARD)
        };
        self.with(|state| state.allocations.insert(start as u64, bytes));
        Ok(start as u64)
    }

    fn free(&self, address: u64) {
        let bytes = self.with(|state| state.allocations.remove(&address));
        if let Some(Ok(layout)) = bytes.map(layout) {
            // SAFETY: `allocate` used this layout, and the allocation was live until now.
            unsafe { dealloc((address as *mut u8).sub(GUARD), layout) };
        }
    }

    fn copy_in(&self, from: &[u8], to: u64) -> Result<(), GpuError> {
        self.with(|state| {
            let to = state.bytes(to, from.len())?;
            // SAFETY: live memory of this emulator, which the host's slice is not part of.
            unsafe { to.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
            Ok(())
        })
    }

    fn copy_out(&self, from: u64, to: &mut [u8]) -> Result<(), GpuError> {
        self.with(|state| {
            let from = state.bytes(from, to.len())?;
            // SAFETY: as above.
            unsafe { to.as_mut_ptr().copy_from_nonoverlapping(from, to.len()) };
            Ok(())
        })
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), GpuError> {
        self.with(|state| {
            let (from, to) = (state.bytes(from, bytes)?, state.bytes(to, bytes)?);
            // SAFETY: both are live.
            unsafe { to.copy_from(from, bytes) };
            Ok(())
        })
    }

    fn fill(&self, to: u64, byte: u8, bytes: usize) -> Result<(), GpuError> {
        self.with(|state| {
            let to = state.bytes(to, bytes)?;
            // SAFETY: it is live.
            unsafe { to.write_bytes(byte, bytes) };
            Ok(())
        })
    }

    fn launch(&self, launch: &Launch) -> Result<(), GpuError> {
        let text = self.text(launch.source(), launch.constants());
        self.with(|state| {
            state.check_arguments(launch)?;
            if !state.libraries.contains_key(&text) {
                let loaded = load(&self.folder, &text, self.checks)?;
                state.libraries.insert(text.clone(), loaded);
            }
            let Some(Loaded { library, arrays }) = state.libraries.get(&text) else {
                return Ok(());
            };
            let guard = GUARD as u64;
            let around = |(&start, &bytes): (&u64, &usize)| Span {
                begin: start - guard,
                end: start + bytes as u64 + guard,
            };
            let allocations: Vec<Span> = match self.checks {
                true => state.allocations.iter().map(around).collect(),
                false => Vec::new(),
            };
            if self.checks {
                // SAFETY: the header declares it with this type; both lists live until the launch
                // has ended.
                unsafe {
                    let tell = library.get::<Tell>(b"emulator_memory\0");
                    let tell = tell.map_err(|error| failed("dlsym", &error))?;
                    let (arrays_len, len) = (arrays.len() as c_uint, allocations.len() as c_uint);
                    tell(arrays.as_ptr(), arrays_len, allocations.as_ptr(), len, guard);
                }
            }
            let name = CString::new(format!("call_{}", launch.kernel())).unwrap_or_default();
            // SAFETY: `text` declares it with this type.
            let call = unsafe { library.get::<Call>(name.as_bytes_with_nul()) };
            let call = call.map_err(|error| failed("dlsym", &error))?;
            let bits: Vec<u64> =
                launch.arguments().iter().map(|argument| argument.bits()).collect();
            let letters: Vec<u8> =
                launch.arguments().iter().map(|argument| argument.letter() as u8).collect();
            let letters = CString::new(letters).unwrap_or_default();
            let [x, y] = launch.grid().map(|blocks| blocks as c_uint);
            let threads = launch.constants().threads as c_uint;
            // SAFETY: the function checks the types of arguments; addresses are of live memory, and
            // the kernel accesses what it would access on a GPU. The lock keeps others out of the
            // library's globals.
            match unsafe { call(letters.as_ptr(), bits.as_ptr(), x, y, threads) } {
                0 => state.check_guards(launch),
                1 => Err(failed("launch", &format!("arguments of the wrong types: {launch:?}"))),
                3 => {
                    // SAFETY: the header declares it with this type, and its text ends with 0.
                    let said = unsafe {
                        let said = library.get::<Said>(b"emulator_said\0");
                        let said = said.map_err(|error| failed("dlsym", &error))?;
                        CStr::from_ptr(said()).to_string_lossy().into_owned()
                    };
                    Err(failed("launch", &format!("{}: {said}", launch.kernel())))
                }
                _ => Err(failed("launch", &format!("threads wait for ever: {launch:?}"))),
            }
        })
    }

    fn product(&self, product: &Product) -> Result<(), GpuError> {
        self.with(|state| multiply(state, product))
    }

    fn run(&self, job: Job) -> Result<(), GpuError> {
        job();
        Ok(())
    }

    fn synchronize(&self) -> Result<(), GpuError> {
        Ok(())
    }

    fn quiesce(&self) -> Result<(), GpuError> {
        Ok(())
    }

    fn record(&self) -> Result<Event, GpuError> {
        Ok(Event::new(EventKind::Host(Instant::now())))
    }

    fn wait(&self, _event: &Event) -> Result<(), GpuError> {
        Ok(())
    }

    fn fork(&self) -> Result<Arc<dyn Driver>, GpuError> {
        Ok(Arc::new(self.clone()))
    }
}

/// A column-major matrix in memory.
struct Elements {
    start: *mut u8,
    storage: Storage,
    leading: usize,
}

impl Elements {
    fn new(state: &State, matrix: &Matrix, address: u64) -> Result<Self, GpuError> {
        let storage = matrix.storage;
        let count = match (matrix.rows, matrix.columns) {
            (0, _) | (_, 0) => 0,
            (rows, columns) => (columns - 1) * matrix.leading + rows,
        };
        let start = match count {
            0 => std::ptr::null_mut(),
            _ => state.bytes(address, count * storage.bytes())?,
        };
        Ok(Self { start, storage, leading: matrix.leading })
    }

    fn at(&self, row: usize, column: usize) -> *mut u8 {
        // SAFETY: callers stay within the rows and columns that `new` checked.
        unsafe { self.start.add((column * self.leading + row) * self.storage.bytes()) }
    }

    fn read(&self, row: usize, column: usize) -> f32 {
        let at = self.at(row, column);
        // SAFETY: as above; the reads need no alignment.
        unsafe {
            match self.storage {
                Storage::F32 => at.cast::<f32>().read_unaligned(),
                Storage::Bf16 => at.cast::<bf16>().read_unaligned().to_f32(),
            }
        }
    }

    fn write(&self, row: usize, column: usize, value: f32) {
        let at = self.at(row, column);
        // SAFETY: as above.
        unsafe {
            match self.storage {
                Storage::F32 => at.cast::<f32>().write_unaligned(value),
                Storage::Bf16 => at.cast::<bf16>().write_unaligned(bf16::from_f32(value)),
            }
        }
    }
}

/// The column-major product `D = alpha op(A) op(B) + beta D`, with an optional bias.
fn multiply(state: &State, product: &Product) -> Result<(), GpuError> {
    let offset =
        |matrix: &Matrix, number: usize| (number * matrix.stride * matrix.storage.bytes()) as u64;
    for number in 0..product.count {
        let a = Elements::new(state, &product.a, product.a.address + offset(&product.a, number))?;
        let b = Elements::new(state, &product.b, product.b.address + offset(&product.b, number))?;
        let d = Elements::new(state, &product.d, product.d.address + offset(&product.d, number))?;
        let bias =
            Matrix { rows: product.d.rows, columns: 1, leading: product.d.rows, ..product.d };
        let bias = product.bias.map(|address| Elements::new(state, &bias, address)).transpose()?;
        for column in 0..product.d.columns {
            for row in 0..product.d.rows {
                let mut sum = 0.0_f64;
                for k in 0..product.k {
                    let left = if product.a.transposed { a.read(k, row) } else { a.read(row, k) };
                    let right =
                        if product.b.transposed { b.read(column, k) } else { b.read(k, column) };
                    sum += f64::from(left) * f64::from(right);
                }
                #[allow(clippy::cast_possible_truncation)]
                let mut value = product.alpha * sum as f32;
                if product.beta != 0.0 {
                    value += product.beta * d.read(row, column);
                }
                if let Some(bias) = &bias {
                    value += bias.read(row, 0);
                }
                d.write(row, column, value);
            }
        }
    }
    state.check_guards(product)
}
