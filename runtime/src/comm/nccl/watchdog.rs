//! Watches queued work: a thread of each rank, since nothing on the host waits while streams run.

use crate::comm::liveness::lock;
use crate::comm::{CommError, Communicator, Options};
use crate::device_error::DeviceError;
use kernels::cuda::nccl::Group;
use kernels::cuda::{Event, GpuError};
use std::fmt::Display;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often it checks.
const EVERY: Duration = Duration::from_millis(10);

/// How long after a rank has ended the work queued with it counts as lost. The rank may have ended
/// normally, with its part done.
const GRACE: Duration = Duration::from_secs(2);

/// How long to wait for the reason after NCCL reports an error: NCCL may notice that a member has
/// ended before its reason arrives.
const REASON: Duration = Duration::from_secs(1);

/// Queued work.
pub(super) struct Queued {
    event: Event,
    /// The group's control; `None` for a message, whose sender is not waited for here.
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

    /// Why the work will never complete, if so.
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

/// The error of a rank that has waited too long for the others of its group.
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

/// Repeated checks of a group that is not ready.
pub(super) struct Polling {
    since: Instant,
    count: u32,
}

impl Polling {
    pub fn new() -> Self {
        Self { since: Instant::now(), count: 0 }
    }

    /// Why to stop checking, if there is a reason.
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

    /// Pauses: at first briefly, the time that queuing takes; later longer, because other ranks are
    /// late.
    pub fn rest(&mut self) {
        self.count += 1;
        match self.count {
            0..100 => std::thread::yield_now(),
            100..1000 => std::thread::sleep(Duration::from_micros(20)),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// A group that ends with its rank's failure: dropped after one, it is aborted, so that no queue
/// waits for members that will not come.
pub(super) struct WatchedGroup {
    group: Box<dyn Group>,
    state: Arc<WatchdogState>,
}

impl Deref for WatchedGroup {
    type Target = dyn Group;

    fn deref(&self) -> &Self::Target {
        &*self.group
    }
}

impl Drop for WatchedGroup {
    fn drop(&mut self) {
        if self.state.failed() {
            self.group.abort();
        }
    }
}

struct WatchdogState {
    control: Arc<dyn Communicator>,
    options: Options,
    failure: OnceLock<CommError>,
    queued: Mutex<Vec<Queued>>,
    groups: Mutex<Vec<Weak<WatchedGroup>>>,
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

    /// Number of the next call.
    pub fn next(&self) -> u64 {
        self.shared.calls.fetch_add(1, Ordering::Relaxed)
    }

    /// Watches a group from now on. After a failure it is aborted at once.
    pub fn add(&self, group: Box<dyn Group>) -> Arc<WatchedGroup> {
        let group = Arc::new(WatchedGroup { group, state: self.shared.clone() });
        let mut groups = lock(&self.shared.groups);
        if self.shared.failure.get().is_some() {
            group.abort();
        }
        groups.push(Arc::downgrade(&group));
        group
    }

    /// Adds queued work to watch. Recorded work is watched as part of its recording instead.
    pub fn note(&self, queued: Queued) {
        if queued.event.is_recorded() {
            return;
        }
        lock(&self.shared.queued).push(queued);
    }

    /// The first failure, as an error.
    pub fn health(&self) -> Result<(), CommError> {
        self.shared.failure.get().map_or(Ok(()), |failure| Err(failure.clone()))
    }

    /// Ends everything in flight, here and, by telling them, on the other ranks; returns the first
    /// failure.
    pub fn fail(&self, error: CommError) -> CommError {
        self.shared.fail(error)
    }

    /// As [`Self::fail`] for an NCCL error in `call`, unless another rank has reported the cause.
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
        let groups: Vec<Arc<WatchedGroup>> =
            lock(&self.groups).iter().filter_map(Weak::upgrade).collect();
        for group in groups {
            if let Err(error) = group.is_ready() {
                self.broke("a transfer under way", &error);
                return;
            }
        }
        let mut queued = lock(&self.queued);
        let mut broken = None;
        queued.retain(|of| match of.event.try_is_complete() {
            Ok(complete) => !complete,
            Err(error) => {
                broken.get_or_insert(error);
                false
            }
        });
        if let Some(error) = broken {
            drop(queued);
            self.broke("work queued on the device", &error);
            return;
        }
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

    /// Whether this rank has failed, noticed or not.
    fn failed(&self) -> bool {
        self.failure.get().is_some() || self.control.health().is_err()
    }

    /// The failure can be seen only after everything is aborted: whoever sees it drops its groups.
    fn fail(&self, error: CommError) -> CommError {
        let groups = lock(&self.groups);
        if self.failure.get().is_none() {
            if !matches!(error, CommError::Aborted { .. }) {
                self.control.abort(&error.to_string());
            }
            groups.iter().filter_map(Weak::upgrade).for_each(|group| group.abort());
        }
        self.failure.get_or_init(|| error).clone()
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The thread holds only state that it shares with this watchdog.
            let _panicked = thread.join();
        }
    }
}
