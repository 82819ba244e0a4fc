//! What queues that lag record instead of doing, and how it is done later: what CUDA's stream capture is on a GPU. Calls
//! are kept with the bytes of their arguments; the order between them is that of their queues and of the events that
//! queues waited for, nothing else.

use super::cpu_emulator::CpuEmulator;
use super::driver::{GpuError, not_while_recording};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a call does.
pub(super) type CapturedWork = Arc<dyn Fn(&CpuEmulator) -> Result<(), GpuError> + Send + Sync>;

/// A recorded call.
pub(super) struct CapturedCall {
    /// On which of the recorded queues.
    pub queue: usize,
    /// Calls that it comes behind.
    pub after: Vec<usize>,
    pub work: CapturedWork,
}

/// Calls that are being recorded, by all queues that have joined.
#[derive(Default)]
pub(super) struct Capture {
    pub calls: Mutex<Vec<CapturedCall>>,
    pub queues: AtomicUsize,
    pub ended: AtomicBool,
    /// The first call that cannot be recorded.
    pub broken: OnceLock<&'static str>,
}

impl Capture {
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Somebody made a call that ends the recording.
    pub fn refuse(&self, call: &'static str) -> GpuError {
        self.broken.get_or_init(|| call);
        not_while_recording(call)
    }
}
