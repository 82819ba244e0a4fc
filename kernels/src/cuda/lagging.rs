//! The machine with queues that run later, as a GPU's do: each has a thread of its own, which lags behind the host at
//! random. Who reads what nobody waited for reads what was there before; so events between queues, and when memory may be
//! used again, are tested with no GPU.

use super::Launch;
use super::driver::{Driver, Event, GpuError, Inner, Properties};
use super::machine::Machine;
use crate::gemm::cuda::Product;
use std::fmt::{self, Debug};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A point in a queue's order, and when it was reached.
#[derive(Clone, Debug, Default)]
pub(super) struct Mark(Arc<(Mutex<Option<Instant>>, Condvar)>);

impl Mark {
    fn set(&self) {
        *lock(&self.0.0) = Some(Instant::now());
        self.0.1.notify_all();
    }

    pub fn is_reached(&self) -> bool {
        lock(&self.0.0).is_some()
    }

    pub fn wait(&self) {
        let waiting = self.0.1.wait_while(lock(&self.0.0), |reached| reached.is_none());
        drop(waiting.unwrap_or_else(PoisonError::into_inner));
    }

    pub fn seconds_until(&self, end: &Self) -> f64 {
        let (start, end) = (*lock(&self.0.0), *lock(&end.0.0));
        start
            .zip(end)
            .map_or(0.0, |(start, end)| end.saturating_duration_since(start).as_secs_f64())
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// What queues share.
struct Shared {
    machine: Machine,
    /// The first failure, in words.
    failure: OnceLock<String>,
    /// Jobs that have not run, of all queues.
    open: Mutex<usize>,
    closed: Condvar,
    queues: AtomicU64,
    longest: Duration,
}

impl Shared {
    fn note(&self, done: Result<(), GpuError>) {
        if let Err(error) = done {
            self.failure.get_or_init(|| error.to_string());
        }
    }

    fn health(&self) -> Result<(), GpuError> {
        match self.failure.get() {
            None => Ok(()),
            Some(what) => Err(GpuError::Call { call: "an earlier call", what: what.clone() }),
        }
    }
}

/// One of its queues.
pub struct Lagging {
    shared: Arc<Shared>,
    jobs: Sender<Job>,
}

impl Debug for Lagging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a queue of {:?} that lags", self.shared.machine)
    }
}

impl Lagging {
    /// A queue of the machine that lags up to so much, now and then.
    #[must_use]
    pub fn new(machine: Machine, longest: Duration) -> Self {
        Self::of(&Arc::new(Shared {
            machine,
            failure: OnceLock::new(),
            open: Mutex::default(),
            closed: Condvar::new(),
            queues: AtomicU64::new(0),
            longest,
        }))
    }

    fn of(shared: &Arc<Shared>) -> Self {
        let (jobs, given) = channel::<Job>();
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

    fn later(&self, job: impl FnOnce(&Machine) -> Result<(), GpuError> + Send + 'static) {
        *lock(&self.shared.open) += 1;
        let shared = self.shared.clone();
        let job = move || {
            let done = job(&shared.machine);
            shared.note(done);
            *lock(&shared.open) -= 1;
            shared.closed.notify_all();
        };
        if self.jobs.send(Box::new(job)).is_err() {
            *lock(&self.shared.open) -= 1;
            self.shared.failure.get_or_init(|| "a queue has ended".to_owned());
        }
    }

    fn mark(&self) -> Mark {
        let mark = Mark::default();
        let reached = mark.clone();
        self.later(move |_| {
            reached.set();
            Ok(())
        });
        mark
    }
}

impl Driver for Lagging {
    fn properties(&self) -> &Properties {
        self.shared.machine.properties()
    }

    fn allocate(&self, bytes: usize) -> Result<u64, GpuError> {
        self.shared.machine.allocate(bytes)
    }

    fn free(&self, address: u64) {
        // As `cuMemFree`, behind all queues.
        let waiting = self.shared.closed.wait_while(lock(&self.shared.open), |open| *open > 0);
        drop(waiting.unwrap_or_else(PoisonError::into_inner));
        self.shared.machine.free(address);
    }

    fn copy_in(&self, from: &[u8], to: u64) -> Result<(), GpuError> {
        let from = from.to_vec();
        self.later(move |machine| machine.copy_in(&from, to));
        self.shared.health()
    }

    fn copy_out(&self, from: u64, to: &mut [u8]) -> Result<(), GpuError> {
        self.synchronize()?;
        self.shared.machine.copy_out(from, to)
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), GpuError> {
        self.later(move |machine| machine.copy(from, to, bytes));
        self.shared.health()
    }

    fn fill(&self, to: u64, byte: u8, bytes: usize) -> Result<(), GpuError> {
        self.later(move |machine| machine.fill(to, byte, bytes));
        self.shared.health()
    }

    fn launch(&self, launch: &Launch) -> Result<(), GpuError> {
        let launch = launch.clone();
        self.later(move |machine| machine.launch(&launch));
        self.shared.health()
    }

    fn product(&self, product: &Product) -> Result<(), GpuError> {
        let product = *product;
        self.later(move |machine| machine.product(&product));
        self.shared.health()
    }

    fn run(&self, job: Box<dyn FnOnce() + Send>) -> Result<(), GpuError> {
        self.later(move |_| {
            job();
            Ok(())
        });
        self.shared.health()
    }

    fn synchronize(&self) -> Result<(), GpuError> {
        self.mark().wait();
        self.shared.health()
    }

    fn record(&self) -> Result<Event, GpuError> {
        Ok(Event(Inner::Later(self.mark())))
    }

    fn wait(&self, event: &Event) -> Result<(), GpuError> {
        if let Inner::Later(mark) = &event.0 {
            let mark = mark.clone();
            self.later(move |_| {
                mark.wait();
                Ok(())
            });
        }
        self.shared.health()
    }

    fn fork(&self) -> Result<Arc<dyn Driver>, GpuError> {
        Ok(Arc::new(Self::of(&self.shared)))
    }
}
