//! The machine with queues that run later, as a GPU's do: each has a thread of its own, which lags behind the host at
//! random. Who reads what nobody waited for reads what was there before; so events between queues, and when memory may be
//! used again, are tested with no GPU. What is recorded is kept in a [`super::tape`].

use super::Launch;
use super::driver::{Driver, Event, GpuError, Inner, Job, Properties, Recording};
use super::machine::Machine;
use super::tape::{Place, Tape};
use crate::gemm::cuda::Product;
use std::fmt::{self, Debug};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

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

    fn reached(&self) -> Option<Instant> {
        match self {
            Self::Live(reached) => *lock(&reached.0),
            Self::Taped(tape, _) => {
                tape.refuse("Event::is_complete");
                None
            }
        }
    }

    pub fn is_reached(&self) -> bool {
        self.reached().is_some()
    }

    pub fn wait(&self) -> Result<(), GpuError> {
        match self {
            Self::Live(reached) => {
                let waiting = reached.1.wait_while(lock(&reached.0), |reached| reached.is_none());
                drop(waiting.unwrap_or_else(PoisonError::into_inner));
                Ok(())
            }
            Self::Taped(tape, _) => Err(tape.refuse("Event::synchronize")),
        }
    }

    pub fn seconds_until(&self, end: &Self) -> f64 {
        let (start, end) = (self.reached(), end.reached());
        start
            .zip(end)
            .map_or(0.0, |(start, end)| end.saturating_duration_since(start).as_secs_f64())
    }
}

type Given = Box<dyn FnOnce() + Send>;

/// What queues share.
struct Shared {
    machine: Machine,
    /// The first failure, in words.
    failure: OnceLock<String>,
    open: Arc<Open>,
    queues: AtomicU64,
    longest: Duration,
    /// What is being recorded.
    tape: Mutex<Option<Arc<Tape>>>,
}

/// Jobs that have not run, of all queues.
#[derive(Default)]
struct Open {
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

    fn wait_for_none(&self) {
        let waiting = self.closed.wait_while(lock(&self.jobs), |jobs| *jobs > 0);
        drop(waiting.unwrap_or_else(PoisonError::into_inner));
    }
}

impl Shared {
    fn note(&self, done: Result<(), GpuError>) {
        if let Err(error) = done {
            self.failure.get_or_init(|| error.to_string());
        }
    }

    /// Refuses what cannot be recorded while something is.
    fn not_while_recording(&self, call: &'static str) -> Result<(), GpuError> {
        lock(&self.tape).as_ref().map_or(Ok(()), |tape| Err(tape.refuse(call)))
    }
}

/// A thread that does what it is given, and lags.
#[derive(Clone)]
pub(super) struct Lane {
    shared: Arc<Shared>,
    jobs: Sender<Given>,
}

impl Lane {
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

/// One of its queues.
pub struct Lagging {
    lane: Lane,
    /// Where it records.
    place: Mutex<Option<Place>>,
}

impl Debug for Lagging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a queue of {:?} that lags", self.lane.shared.machine)
    }
}

impl Lagging {
    /// A queue of the machine that lags up to so much, now and then.
    #[must_use]
    pub fn new(machine: Machine, longest: Duration) -> Self {
        Self::on(Lane::of(&Arc::new(Shared {
            machine,
            failure: OnceLock::new(),
            open: Arc::default(),
            queues: AtomicU64::new(0),
            longest,
            tape: Mutex::default(),
        })))
    }

    fn on(lane: Lane) -> Self {
        Self { lane, place: Mutex::default() }
    }

    fn shared(&self) -> &Shared {
        &self.lane.shared
    }

    /// Where it records; nothing where it does what it is asked.
    fn place(&self) -> MutexGuard<'_, Option<Place>> {
        let mut place = lock(&self.place);
        if place.as_ref().is_some_and(|place| place.tape().has_ended()) {
            *place = None;
        }
        place
    }

    /// Does it later, or records it.
    fn ask(
        &self,
        work: impl Fn(&Machine) -> Result<(), GpuError> + Send + Sync + 'static,
    ) -> Result<(), GpuError> {
        match self.place().as_mut() {
            Some(place) => place.add(Arc::new(work)),
            None => self.lane.later(work),
        }
        self.lane.health()
    }
}

impl Driver for Lagging {
    fn properties(&self) -> &Properties {
        self.shared().machine.properties()
    }

    fn allocate(&self, bytes: usize) -> Result<u64, GpuError> {
        self.shared().machine.allocate(bytes)
    }

    fn free(&self, address: u64) {
        self.shared().note(self.shared().not_while_recording("free"));
        // As `cuMemFree`, behind all queues.
        self.shared().open.wait_for_none();
        self.shared().machine.free(address);
    }

    fn copy_in(&self, from: &[u8], to: u64) -> Result<(), GpuError> {
        self.shared().not_while_recording("copy_in")?;
        let from = from.to_vec();
        self.ask(move |machine| machine.copy_in(&from, to))
    }

    fn copy_out(&self, from: u64, to: &mut [u8]) -> Result<(), GpuError> {
        self.shared().not_while_recording("copy_out")?;
        self.synchronize()?;
        self.shared().machine.copy_out(from, to)
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), GpuError> {
        self.ask(move |machine| machine.copy(from, to, bytes))
    }

    fn fill(&self, to: u64, byte: u8, bytes: usize) -> Result<(), GpuError> {
        self.ask(move |machine| machine.fill(to, byte, bytes))
    }

    fn launch(&self, launch: &Launch) -> Result<(), GpuError> {
        let launch = launch.clone();
        self.ask(move |machine| machine.launch(&launch))
    }

    fn product(&self, product: &Product) -> Result<(), GpuError> {
        let product = *product;
        self.ask(move |machine| machine.product(&product))
    }

    fn run(&self, job: Job) -> Result<(), GpuError> {
        self.ask(move |_| {
            job();
            Ok(())
        })
    }

    fn synchronize(&self) -> Result<(), GpuError> {
        self.shared().not_while_recording("synchronize")?;
        self.lane.mark().wait()?;
        self.lane.health()
    }

    fn quiesce(&self) -> Result<(), GpuError> {
        self.shared().not_while_recording("quiesce")?;
        self.shared().open.wait_for_none();
        self.lane.health()
    }

    fn record(&self) -> Result<Event, GpuError> {
        let mark = self.place().as_ref().map(Place::mark);
        Ok(Event::new(Inner::Later(mark.unwrap_or_else(|| self.lane.mark()))))
    }

    fn wait(&self, event: &Event) -> Result<(), GpuError> {
        let Inner::Later(mark) = &event.inner else { return Ok(()) };
        let mut place = self.place();
        match (mark, place.as_mut()) {
            (Mark::Live(_), None) => {
                let mark = mark.clone();
                self.lane.later(move |_| mark.wait());
            }
            (Mark::Taped(tape, after), None) if !tape.has_ended() => {
                *place = Some(Place::new(tape.clone(), after.clone()));
            }
            (Mark::Taped(tape, after), Some(place)) if Arc::ptr_eq(tape, place.tape()) => {
                place.wait(after);
            }
            (_, Some(place)) => {
                return Err(place.tape().refuse("wait for an event from before"));
            }
            (Mark::Taped(..), None) => {
                let what = "the event is of a recording that has ended".to_owned();
                return Err(GpuError::Call { call: "wait", what });
            }
        }
        self.lane.health()
    }

    fn records(&self) -> bool {
        true
    }

    fn start_recording(&self) -> Result<(), GpuError> {
        let mut tape = lock(&self.shared().tape);
        if let Some(tape) = &*tape {
            return Err(tape.refuse("start_recording"));
        }
        let new = tape.insert(Arc::default());
        *lock(&self.place) = Some(Place::new(new.clone(), Vec::new()));
        Ok(())
    }

    fn finish_recording(&self) -> Result<Box<dyn Recording>, GpuError> {
        *lock(&self.shared().tape) = None;
        let none =
            || GpuError::Call { call: "record", what: "nothing is recorded here".to_owned() };
        let place = self.place().take().ok_or_else(none)?;
        Ok(Box::new(place.end(self.lane.clone())?))
    }

    fn fork(&self) -> Result<Arc<dyn Driver>, GpuError> {
        Ok(Arc::new(Self::on(self.lane.fork())))
    }
}
