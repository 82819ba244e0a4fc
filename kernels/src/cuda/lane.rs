//! The threads behind queues that run later, and the points in their order.

use super::driver::{GpuError, Point};
use super::machine::Machine;
use super::tape::{Tape, lock};
use std::fmt::{self, Debug};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// When something was reached.
type Reached = (Mutex<Option<Instant>>, Condvar);

/// A point in a queue's order.
#[derive(Clone)]
pub(super) enum Mark {
    /// Of a queue that does what it is asked.
    Live(Arc<Reached>),
    /// Behind some calls that were recorded.
    Taped(Arc<Tape>, Vec<usize>),
}

impl Default for Mark {
    fn default() -> Self {
        Self::Live(Arc::default())
    }
}

impl Debug for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Live(_) => write!(f, "reached: {:?}", self.reached()),
            Self::Taped(_, calls) => write!(f, "behind the recorded calls {calls:?}"),
        }
    }
}

impl Mark {
    pub fn set(&self) {
        if let Self::Live(reached) = self {
            *lock(&reached.0) = Some(Instant::now());
            reached.1.notify_all();
        }
    }
}

impl Point for Mark {
    fn reached(&self) -> Option<Instant> {
        match self {
            Self::Live(reached) => *lock(&reached.0),
            Self::Taped(tape, _) => {
                tape.refuse("Event::is_complete");
                None
            }
        }
    }

    fn wait(&self) -> Result<(), GpuError> {
        match self {
            Self::Live(reached) => {
                let waiting = reached.1.wait_while(lock(&reached.0), |reached| reached.is_none());
                drop(waiting.unwrap_or_else(PoisonError::into_inner));
                Ok(())
            }
            Self::Taped(tape, _) => Err(tape.refuse("Event::synchronize")),
        }
    }
}

type Given = Box<dyn FnOnce() + Send>;

/// What queues share.
pub(super) struct Shared {
    pub machine: Machine,
    /// The first failure, in words.
    failure: OnceLock<String>,
    pub open: Arc<Open>,
    queues: AtomicU64,
    longest: Duration,
    /// What is being recorded.
    pub tape: Mutex<Option<Arc<Tape>>>,
}

/// Jobs that have not run, of all queues.
#[derive(Default)]
pub(super) struct Open {
    jobs: Mutex<usize>,
    closed: Condvar,
}

impl Open {
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

impl Shared {
    pub fn note(&self, done: Result<(), GpuError>) {
        if let Err(error) = done {
            self.failure.get_or_init(|| error.to_string());
        }
    }

    /// Refuses what cannot be recorded while something is.
    pub fn not_while_recording(&self, call: &'static str) -> Result<(), GpuError> {
        lock(&self.tape).as_ref().map_or(Ok(()), |tape| Err(tape.refuse(call)))
    }
}

/// A thread that does what it is given, and lags.
#[derive(Clone)]
pub(super) struct Lane {
    pub shared: Arc<Shared>,
    jobs: Sender<Given>,
}

impl Lane {
    /// The first queue of a machine.
    pub fn first(machine: Machine, longest: Duration) -> Self {
        Self::of(&Arc::new(Shared {
            machine,
            failure: OnceLock::new(),
            open: Arc::default(),
            queues: AtomicU64::new(0),
            longest,
            tape: Mutex::default(),
        }))
    }

    fn of(shared: &Arc<Shared>) -> Self {
        let (jobs, given) = channel::<Given>();
        let number = shared.queues.fetch_add(1, Ordering::Relaxed);
        let longest = shared.longest;
        std::thread::spawn(move || {
            for (n, job) in given.into_iter().enumerate() {
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

    pub fn later(&self, job: impl FnOnce(&Machine) -> Result<(), GpuError> + Send + 'static) {
        self.shared.open.add();
        let (shared, open) = (self.shared.clone(), self.shared.open.clone());
        let job = move || {
            let done = job(&shared.machine);
            shared.note(done);
            // Who waits for this job may drop the machine next. It must not be left to this thread, which nobody waits
            // for: libraries unloaded while the process ends bring it down.
            drop(shared);
            open.close();
        };
        if self.jobs.send(Box::new(job)).is_err() {
            self.shared.open.close();
            self.shared.failure.get_or_init(|| "a queue has ended".to_owned());
        }
    }

    pub fn mark(&self) -> Mark {
        let mark = Mark::default();
        let reached = mark.clone();
        self.later(move |_| {
            reached.set();
            Ok(())
        });
        mark
    }

    pub fn health(&self) -> Result<(), GpuError> {
        match self.shared.failure.get() {
            None => Ok(()),
            Some(what) => Err(GpuError::Call { call: "an earlier call", what: what.clone() }),
        }
    }
}
