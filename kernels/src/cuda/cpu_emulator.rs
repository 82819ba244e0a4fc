//! An emulated device for tests without a GPU: launches run as C++ on the CPU (`cpu_emulator.h`),
//! products as three loops, in host memory.
//!
//! It detects errors that a GPU would not report: arguments of the wrong type, addresses outside
//! any allocation, writes past an allocation's ends, and threads that wait for ever. A misaligned
//! pack ends the process, as it would end a GPU's context. One that checks
//! ([`CpuEmulator::checking`]) looks at every access to memory: races in shared memory, reads of
//! shared memory that nobody wrote, and accesses beside shared arrays and allocations. It is many
//! times slower.
#![allow(unsafe_code)] // memory by address

mod compiled;
mod products;

use super::driver::{Driver, Event, EventKind, GpuError, Job, Properties};
use super::product::Product;
use super::{Argument, Launch};
use compiled::{Compiled, Span};
use products::multiply;
use std::alloc::{Layout, alloc, dealloc};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
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
    libraries: HashMap<String, Compiled>,
    allocations: BTreeMap<u64, usize>,
}

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

    fn with<R>(&self, act: impl FnOnce(&mut State) -> R) -> R {
        act(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn failed(call: &'static str, what: &dyn std::fmt::Display) -> GpuError {
    GpuError::Call { call, what: what.to_string() }
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

    fn fill_words(&self, to: u64, word: u32, words: usize) -> Result<(), GpuError> {
        self.copy_in(&word.to_ne_bytes().repeat(words), to)
    }

    fn launch(&self, launch: &Launch) -> Result<(), GpuError> {
        let planted = self.planted.as_deref();
        let text = compiled::text(launch.source(), launch.constants(), planted, self.checks);
        self.with(|state| {
            state.check_arguments(launch)?;
            if !state.libraries.contains_key(&text) {
                let compiled = Compiled::load(&self.folder, &text, self.checks)?;
                state.libraries.insert(text.clone(), compiled);
            }
            let Some(compiled) = state.libraries.get(&text) else { return Ok(()) };
            let guard = GUARD as u64;
            let around = |(&start, &bytes): (&u64, &usize)| Span {
                begin: start - guard,
                end: start + bytes as u64 + guard,
            };
            let allocations: Option<Vec<Span>> =
                self.checks.then(|| state.allocations.iter().map(around).collect());
            compiled.call(launch, allocations.as_deref(), guard)?;
            state.check_guards(launch)
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
