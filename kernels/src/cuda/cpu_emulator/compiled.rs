//! CUDA sources as libraries of the host: compiled as C++ with `cpu_emulator.h` in front, loaded,
//! and called.
#![allow(unsafe_code)] // freshly compiled code
#![allow(clippy::cast_possible_truncation)] // grids and lists of tests

use super::failed;
use crate::cuda::{CompileConstants, GpuError, Launch, Source, program};
use libloading::Library;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_uint};
use std::fmt::Write as _;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The complete program, with an entry point for each kernel. `planted` is what is replaced in the
/// source, and by what. `checks` makes the emulator look at every access to memory.
pub(super) fn text(
    source: Source,
    constants: &CompileConstants,
    planted: Option<&(String, String)>,
    checks: bool,
) -> String {
    let mut program = program(source, constants);
    if let Some(planted) = planted {
        program = program.replace(&planted.0, &planted.1);
    }
    if checks {
        program = program.lines().map(with_seen_arrays).collect();
    }
    // In a namespace of its own shared arrays, also of templates, belong to this file alone, and
    // so can lie in one section.
    let checked = if checks { "#define CHECKED\n" } else { "" };
    let header = include_str!("../cpu_emulator.h");
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
pub(super) struct Compiled {
    library: Library,
    /// Its shared arrays in memory, sorted. Empty unless it checks.
    arrays: Vec<Span>,
}

/// A range of addresses, as the emulator's header has it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Span {
    /// The first.
    pub(super) begin: u64,
    /// One behind the last.
    pub(super) end: u64,
}

type Call = unsafe extern "C" fn(*const c_char, *const u64, c_uint, c_uint, c_uint) -> c_int;
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

impl Compiled {
    /// Compiles into the folder, or takes the library that is there, and loads a copy of it:
    /// libraries loaded from one file share their globals, and emulators must not.
    pub(super) fn load(folder: &Path, text: &str, checks: bool) -> Result<Self, GpuError> {
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
        // SAFETY: compiled from sources of this crate, which do nothing when loaded but set up
        // empty vectors.
        let library = unsafe { Library::new(&copy) }.map_err(|error| failed("dlopen", &error));
        let _ = fs::remove_file(copy);
        let library = library?;
        let arrays = if checks { shared_arrays(&library, &built, text)? } else { Vec::new() };
        Ok(Self { library, arrays })
    }

    /// Runs a kernel. `allocations`, with their guards, are known to one that checks.
    pub(super) fn call(
        &self,
        launch: &Launch,
        allocations: Option<&[Span]>,
        guard: u64,
    ) -> Result<(), GpuError> {
        let Self { library, arrays } = self;
        if let Some(allocations) = allocations {
            // SAFETY: the header declares it with this type; both lists live until the launch has
            // ended.
            unsafe {
                let tell = library.get::<Tell>(b"emulator_memory\0");
                let tell = tell.map_err(|error| failed("dlsym", &error))?;
                let [shared, lent] = [arrays.len(), allocations.len()].map(|len| len as c_uint);
                tell(arrays.as_ptr(), shared, allocations.as_ptr(), lent, guard);
            }
        }
        let name = CString::new(format!("call_{}", launch.kernel())).unwrap_or_default();
        // SAFETY: `text` declares it with this type.
        let call = unsafe { library.get::<Call>(name.as_bytes_with_nul()) };
        let call = call.map_err(|error| failed("dlsym", &error))?;
        let bits: Vec<u64> = launch.arguments().iter().map(|argument| argument.bits()).collect();
        let letters: Vec<u8> =
            launch.arguments().iter().map(|argument| argument.letter() as u8).collect();
        let letters = CString::new(letters).unwrap_or_default();
        let [x, y] = launch.grid().map(|blocks| blocks as c_uint);
        let threads = launch.constants().threads as c_uint;
        // SAFETY: the function checks the types of arguments; addresses are of live memory, and the
        // kernel accesses what it would access on a GPU. The emulator's lock keeps others out of
        // the library's globals.
        match unsafe { call(letters.as_ptr(), bits.as_ptr(), x, y, threads) } {
            0 => Ok(()),
            1 => Err(failed("launch", &format!("arguments of the wrong types: {launch:?}"))),
            3 => Err(failed("launch", &format!("{}: {}", launch.kernel(), self.said()?))),
            _ => Err(failed("launch", &format!("threads wait for ever: {launch:?}"))),
        }
    }

    /// What the emulator noticed in the last launch.
    fn said(&self) -> Result<String, GpuError> {
        // SAFETY: the header declares it with this type, and its text ends with 0.
        unsafe {
            let said = self.library.get::<Said>(b"emulator_said\0");
            let said = said.map_err(|error| failed("dlsym", &error))?;
            Ok(CStr::from_ptr(said()).to_string_lossy().into_owned())
        }
    }
}
