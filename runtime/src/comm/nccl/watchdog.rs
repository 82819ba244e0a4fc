//! Who polling after what is queued: a thread of the rank, since nobody else does while queues run.

use crate::comm::liveness::lock;
use crate::comm::{CommError, Communicator, Options};
use crate::device_error::DeviceError;
use kernels::cuda::nccl::Group;
use kernels::cuda::{Event, GpuError};
use std::fmt::Display;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often it polling.
const EVERY: Duration = Duration::from_millis(10);

/// How long a rank may be gone until what was queued with it counts as lost: it may have ended as it should, its part done.
const GRACE: Duration = Duration::from_secs(2);

/// How long one waits to hear why a library's group broke: it notices that a member ended before its reason arrives.
const REASON: Duration = Duration::from_secs(1);

/// A transfer that was queued.
pub(super) struct Queued {
    event: Event,
    /// Of its group; nothing for a message, whose sender is not waited for here.
    control: Option<Arc<dyn Communicator>>,
    call: String,
    since: Instant,
    lonely: Option<Instant>,
}

impl Queued {
    pub fn new(event: Event, control: Arc<dyn Communicator>, call: String) -> Self {
        Self { event, control: Some(control), call, since: Instant::now(), lonely: None }
    }

    pub fn of_link(event: Event, call: String) -> Self {
        Self { event, control: None, call, since: Instant::now(), lonely: None }
    }

    /// Why it will not be done any more.
    fn hopeless(&mut self, options: Options) -> Option<CommError> {
        let control = self.control.as_deref()?;
        if let Some(lost) = control.lost(&self.call) {
            let since = *self.lonely.get_or_insert_with(Instant::now);
            if since.elapsed() > GRACE {
                return Some(lost);
            }
        }
        late(self.since, control, options, &self.call)
    }
}

/// The error of who has waited too long for the others of a group.
fn late(
    since: Instant,
    control: &dyn Communicator,
    options: Options,
    call: &dyn Display,
) -> Option<CommError> {
    let (limit, rank) = (options.time_limit, control.rank());
    (since.elapsed() > limit).then(|| CommError::TimedOut {
        peers: (0..control.size())
            .filter(|&other| other != rank)
            .map(|other| control.peer(other))
            .collect(),
        by: control.peer(rank).rank,
        group: control.group().to_owned(),
        limit_s: limit.as_secs(),
        call: call.to_string(),
    })
}

/// How long somebody has looked at a group that is not ready.
pub(super) struct Polling {
    since: Instant,
    count: u32,
}

impl Polling {
    pub fn new() -> Self {
        Self { since: Instant::now(), count: 0 }
    }

    /// Why one need look no longer.
    pub fn given_up(
        &self,
        control: &dyn Communicator,
        options: Options,
        call: &dyn Display,
    ) -> Option<CommError> {
        if let Err(error) = control.health() {
            return Some(error);
        }
        if self.since.elapsed() > GRACE
            && let Some(lost) = control.lost(&call.to_string())
        {
            return Some(lost);
        }
        late(self.since, control, options, call)
    }

    /// At first a moment, which is what queuing takes; then longer, since others are late.
    pub fn rest(&mut self) {
        self.count += 1;
        match self.count {
            0..100 => std::thread::yield_now(),
            100..1000 => std::thread::sleep(Duration::from_micros(20)),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

struct WatchdogState {
    control: Arc<dyn Communicator>,
    options: Options,
    failure: OnceLock<CommError>,
    queued: Mutex<Vec<Queued>>,
    groups: Mutex<Vec<Weak<dyn Group>>>,
    closing: AtomicBool,
    calls: AtomicU64,
}

/// A rank's watchdog.
pub(super) struct Watchdog {
    shared: Arc<WatchdogState>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    pub fn new(control: Arc<dyn Communicator>, options: Options) -> Self {
        let shared = Arc::new(WatchdogState {
            control,
            options,
            failure: OnceLock::new(),
            queued: Mutex::default(),
            groups: Mutex::default(),
            closing: AtomicBool::new(false),
            calls: AtomicU64::new(0),
        });
        let watched = shared.clone();
        let thread = std::thread::spawn(move || {
            while !watched.closing.load(Ordering::Acquire) {
                watched.look();
                std::thread::park_timeout(EVERY);
            }
        });
        Self { shared, thread: Some(thread) }
    }

    /// The number of the next call.
    pub fn next(&self) -> u64 {
        self.shared.calls.fetch_add(1, Ordering::Relaxed)
    }

    /// A group to look after.
    pub fn add(&self, group: &Arc<dyn Group>) {
        lock(&self.shared.groups).push(Arc::downgrade(group));
    }

    /// A transfer to look after; not one that is recorded, which is looked after as part of the whole.
    pub fn note(&self, queued: Queued) {
        if queued.event.is_recorded() {
            return;
        }
        lock(&self.shared.queued).push(queued);
    }

    /// Whether nothing has gone wrong.
    pub fn health(&self) -> Result<(), CommError> {
        self.shared.failure.get().map_or(Ok(()), |failure| Err(failure.clone()))
    }

    /// Ends all that is under way, here and, since they are told, on the others; gives back what went wrong first.
    pub fn fail(&self, error: CommError) -> CommError {
        self.shared.fail(error)
    }

    /// The same for what a library says of `call`, where nobody has told a reason that lies deeper.
    pub fn broke(&self, call: &str, said: &GpuError) -> CommError {
        self.shared.broke(call, said)
    }
}

impl WatchdogState {
    fn look(&self) {
        if self.failure.get().is_some() {
            return;
        }
        if let Err(error) = self.control.health() {
            self.fail(error);
            return;
        }
        let groups: Vec<Arc<dyn Group>> =
            lock(&self.groups).iter().filter_map(Weak::upgrade).collect();
        for group in groups {
            if let Err(error) = group.is_ready() {
                self.broke("a transfer under way", &error);
                return;
            }
        }
        let mut queued = lock(&self.queued);
        queued.retain(|of| !of.event.is_complete());
        let hopeless = queued.iter_mut().find_map(|of| of.hopeless(self.options));
        drop(queued);
        if let Some(error) = hopeless {
            self.fail(error);
        }
    }

    fn broke(&self, call: &str, said: &GpuError) -> CommError {
        let since = Instant::now();
        while since.elapsed() < REASON {
            if let Some(failure) = self.failure.get() {
                return failure.clone();
            }
            if let Err(reason) = self.control.health() {
                return self.fail(reason);
            }
            if let Some(lost) = self.control.lost(call) {
                return self.fail(lost);
            }
            std::thread::sleep(EVERY);
        }
        self.fail(DeviceError(format!("{call}: {said}")).into())
    }

    fn fail(&self, error: CommError) -> CommError {
        let mut first = false;
        let failure = self.failure.get_or_init(|| {
            first = true;
            error
        });
        if first {
            if !matches!(failure, CommError::Aborted { .. }) {
                self.control.abort(&failure.to_string());
            }
            let groups = std::mem::take(&mut *lock(&self.groups));
            groups.iter().filter_map(Weak::upgrade).for_each(|group| group.abort());
        }
        failure.clone()
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It holds nothing but what it shares with this.
            let _panicked = thread.join();
        }
    }
}
