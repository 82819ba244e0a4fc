//! Captured calls of asynchronous queues: the counterpart of CUDA's stream capture. Calls keep the
//! bytes of their arguments. Their order is that of their queues and of the events that queues
//! waited for, nothing else.

use super::cpu_emulator::CpuEmulator;
use super::driver::{GpuError, not_while_recording};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The work of a call.
pub(super) type CapturedWork = Arc<dyn Fn(&CpuEmulator) -> Result<(), GpuError> + Send + Sync>;

/// A captured call.
pub(super) struct CapturedCall {
    /// Number of the captured queue it was made on.
    pub queue: usize,
    /// Calls that must finish before it.
    pub after: Vec<usize>,
    pub work: CapturedWork,
}

/// A capture in progress, shared by all queues that have joined.
#[derive(Default)]
pub(super) struct Capture {
    pub calls: Mutex<Vec<CapturedCall>>,
    pub queues: AtomicUsize,
    pub ended: AtomicBool,
    /// The first call that cannot be captured.
    pub broken: OnceLock<&'static str>,
}

impl Capture {
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Marks the capture as broken by a call that cannot be captured.
    pub fn refuse(&self, call: &'static str) -> GpuError {
        self.broken.get_or_init(|| call);
        not_while_recording(call)
    }
}
