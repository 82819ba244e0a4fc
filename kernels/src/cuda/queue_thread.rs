//! The threads behind asynchronous queues, and events in their order.

use super::capture::{Capture, lock};
use super::cpu_emulator::CpuEmulator;
use super::driver::{EventState, GpuError};
use std::fmt::{self, Debug};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The time at which something was reached.
type Reached = (Mutex<Option<Instant>>, Condvar);

/// An event in a queue's order.
#[derive(Clone)]
pub(super) enum EmulatedEvent {
    /// Of a queue that runs its work.
    Running(Arc<Reached>),
    /// After some captured calls.
    Captured(Arc<Capture>, Vec<usize>),
}

impl Default for EmulatedEvent {
    fn default() -> Self {
        Self::Running(Arc::default())
    }
}

impl Debug for EmulatedEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Running(_) => write!(f, "reached: {:?}", self.reached()),
            Self::Captured(_, calls) => write!(f, "behind the recorded calls {calls:?}"),
        }
    }
}

impl EmulatedEvent {
    pub fn set(&self) {
        if let Self::Running(reached) = self {
            *lock(&reached.0) = Some(Instant::now());
            reached.1.notify_all();
        }
    }
}

impl EventState for EmulatedEvent {
    fn reached(&self) -> Option<Instant> {
        match self {
            Self::Running(reached) => *lock(&reached.0),
            Self::Captured(capture, _) => {
                capture.refuse("Event::is_complete");
                None
            }
        }
    }

    fn wait(&self) -> Result<(), GpuError> {
        match self {
            Self::Running(reached) => {
                let waiting = reached.1.wait_while(lock(&reached.0), |reached| reached.is_none());
                drop(waiting.unwrap_or_else(PoisonError::into_inner));
                Ok(())
            }
            Self::Captured(capture, _) => Err(capture.refuse("Event::synchronize")),
        }
    }
}

type QueuedJob = Box<dyn FnOnce() + Send>;

/// State shared by the queues of an emulator.
pub(super) struct EmulatorState {
    pub emulator: CpuEmulator,
    /// Message of the first failure.
    failure: OnceLock<String>,
    pub pending: Arc<PendingJobs>,
    queues: AtomicU64,
    longest: Duration,
    /// The capture in progress.
    pub capture: Mutex<Option<Arc<Capture>>>,
}

/// The number of jobs that have not run, over all queues.
#[derive(Default)]
pub(super) struct PendingJobs {
    jobs: Mutex<usize>,
    closed: Condvar,
}

impl PendingJobs {
    fn add(&self) {
        *lock(&self.jobs) += 1;
    }

    fn close(&self) {
        *lock(&self.jobs) -= 1;
        self.closed.notify_all();
    }

    pub fn wait_for_none(&self) {
        let waiting = self.closed.wait_while(lock(&self.jobs), |jobs| *jobs > 0);
        drop(waiting.unwrap_or_else(PoisonError::into_inner));
    }
}

impl EmulatorState {
    pub fn record_failure(&self, done: Result<(), GpuError>) {
        if let Err(error) = done {
            self.failure.get_or_init(|| error.to_string());
        }
    }

    /// Fails during a capture, for calls that cannot be captured.
    pub fn not_while_recording(&self, call: &'static str) -> Result<(), GpuError> {
        lock(&self.capture).as_ref().map_or(Ok(()), |capture| Err(capture.refuse(call)))
    }
}

/// A thread that runs the jobs of a queue, with random delays.
#[derive(Clone)]
pub(super) struct QueueThread {
    pub shared: Arc<EmulatorState>,
    jobs: Sender<QueuedJob>,
}

impl QueueThread {
    /// The first queue of an emulator.
    pub fn first(emulator: CpuEmulator, longest: Duration) -> Self {
        Self::of(&Arc::new(EmulatorState {
            emulator,
            failure: OnceLock::new(),
            pending: Arc::default(),
            queues: AtomicU64::new(0),
            longest,
            capture: Mutex::default(),
        }))
    }

    fn of(shared: &Arc<EmulatorState>) -> Self {
        let (jobs, queued) = channel::<QueuedJob>();
        let number = shared.queues.fetch_add(1, Ordering::Relaxed);
        let longest = shared.longest;
        std::thread::spawn(move || {
            for (n, job) in queued.into_iter().enumerate() {
                let draw = (n as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ (number << 17));
                if (draw >> 40).is_multiple_of(64) {
                    std::thread::sleep(longest.mul_f64((draw >> 50) as f64 / f64::from(1 << 14)));
                }
                job();
            }
        });
        Self { shared: shared.clone(), jobs }
    }

    pub fn fork(&self) -> Self {
        Self::of(&self.shared)
    }

    pub fn submit(&self, job: impl FnOnce(&CpuEmulator) -> Result<(), GpuError> + Send + 'static) {
        self.shared.pending.add();
        let (shared, pending) = (self.shared.clone(), self.shared.pending.clone());
        let job = move || {
            let done = job(&shared.emulator);
            shared.record_failure(done);
            // Whoever waits for this job may drop the emulator next. That must not be left to this
            // thread, which nobody joins: unloading libraries while the process ends would crash
            // it.
            drop(shared);
            pending.close();
        };
        if self.jobs.send(Box::new(job)).is_err() {
            self.shared.pending.close();
            self.shared.failure.get_or_init(|| "a queue has ended".to_owned());
        }
    }

    pub fn record_event(&self) -> EmulatedEvent {
        let event = EmulatedEvent::default();
        let reached = event.clone();
        self.submit(move |_| {
            reached.set();
            Ok(())
        });
        event
    }

    pub fn health(&self) -> Result<(), GpuError> {
        match self.shared.failure.get() {
            None => Ok(()),
            Some(what) => Err(GpuError::Call { call: "an earlier call", what: what.clone() }),
        }
    }
}
