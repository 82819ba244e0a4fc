//! What waiting ranks check: failures, ranks that have ended, and the time limit.

use super::{CommError, Options, Peer};
use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How often a sleeping rank checks for failures elsewhere.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Locks a mutex, also a poisoned one: a rank that panicked is reported as lost, not here.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A group's name, and its world ranks in the group's order.
#[derive(Clone, Debug)]
pub(super) struct Members {
    pub name: String,
    pub ranks: Vec<usize>,
}

/// The rank that waits, and its call.
pub(super) struct Waiter<'a> {
    pub members: &'a Members,
    /// Its rank within the group.
    pub rank: usize,
    pub call: &'a dyn Display,
}

impl Waiter<'_> {
    /// Its world rank.
    fn world_rank(&self) -> usize {
        self.members.ranks[self.rank]
    }
}

/// State of the ranks of a world, as one process knows it.
pub(super) struct Liveness {
    options: Options,
    gone: Vec<AtomicBool>,
    failure: OnceLock<CommError>,
    /// Where each rank runs, once the ranks have said so.
    processes: OnceLock<Vec<String>>,
}

impl Liveness {
    pub fn new(size: usize, options: Options) -> Self {
        let gone = (0..size).map(|_| AtomicBool::new(false)).collect();
        Self { options, gone, failure: OnceLock::new(), processes: OnceLock::new() }
    }

    /// Sleeps for the random delay that tests ask for.
    /// How long a call of a group is on its way, if its link is slow.
    pub fn transit(&self, group: &str) -> Option<Duration> {
        self.options.slow_link.filter(|link| link.group == group).map(|link| link.transit)
    }

    pub fn delay(&self, rank: usize, call: u64) {
        if let Some(delays) = self.options.delays {
            std::thread::sleep(delays.before(rank, call));
        }
    }

    /// Records the first failure and returns it: all ranks fail with the same error.
    pub fn fail(&self, error: CommError) -> CommError {
        self.failure.get_or_init(|| error).clone()
    }

    /// Records that a world rank has ended.
    pub fn set_gone(&self, rank: usize) {
        self.gone[rank].store(true, Ordering::Release);
    }

    /// Records where each world rank runs.
    pub fn introduce(&self, processes: Vec<String>) {
        // Set only once.
        let _known = self.processes.set(processes);
    }

    /// How errors name a world rank.
    pub fn peer(&self, rank: usize) -> Peer {
        let process = self.processes.get().and_then(|processes| processes.get(rank)).cloned();
        Peer { rank, process }
    }

    /// The error of a group's first rank that has ended, if any has: the failure that ended it, if
    /// it is known.
    pub fn lost(&self, waiter: &Waiter<'_>) -> Option<CommError> {
        let mut ranks = waiter.members.ranks.iter();
        let gone = ranks.find(|&&rank| self.gone[rank].load(Ordering::Acquire))?;
        let known = self.failure.get().cloned();
        Some(known.unwrap_or_else(|| self.lost_rank(*gone, waiter)))
    }

    fn lost_rank(&self, rank: usize, waiter: &Waiter<'_>) -> CommError {
        CommError::Lost {
            peer: self.peer(rank),
            by: waiter.world_rank(),
            group: waiter.members.name.clone(),
            call: format!("{:#}", waiter.call),
        }
    }

    /// The error of calls that do not match: `theirs` by rank `from` of the group, and the
    /// waiter's.
    pub fn mismatch(&self, waiter: &Waiter<'_>, from: usize, theirs: &dyn Display) -> CommError {
        let peer = |rank: usize| self.peer(waiter.members.ranks[rank]);
        CommError::Mismatch {
            group: waiter.members.name.clone(),
            first: format!("{} called {theirs}", peer(from)),
            second: format!("{} called {}", peer(waiter.rank), waiter.call),
        }
    }

    /// Whether all ranks but `me` have ended.
    pub fn alone(&self, me: usize) -> bool {
        let mut gone = self.gone.iter().enumerate();
        gone.all(|(rank, gone)| rank == me || gone.load(Ordering::Acquire))
    }

    pub fn fail_if_failed(&self) -> Result<(), CommError> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.clone()))
    }

    /// Sleeps until `ready` returns a result for the guarded value, or there is reason to give up.
    /// `missing` names the group's ranks that are still waited for.
    pub fn wait<'a, T, R>(
        &self,
        mut guard: MutexGuard<'a, T>,
        changed: &Condvar,
        mut ready: impl FnMut(&mut T) -> Option<R>,
        missing: impl Fn(&T) -> Vec<usize>,
        waiter: &Waiter<'_>,
    ) -> Result<R, CommError> {
        let begun = Instant::now();
        loop {
            if let Some(result) = ready(&mut guard) {
                return Ok(result);
            }
            self.fail_if_failed()?;
            let waited_for = missing(&guard);
            let world = |&rank: &usize| waiter.members.ranks[rank];
            let gone = |rank: &&usize| self.gone[world(rank)].load(Ordering::Acquire);
            if let Some(rank) = waited_for.iter().find(gone) {
                // What the rank did before it ended has arrived by now: check once more.
                if let Some(result) = ready(&mut guard) {
                    return Ok(result);
                }
                return Err(self.fail(self.lost_rank(world(rank), waiter)));
            }
            let limit = self.options.time_limit;
            if begun.elapsed() >= limit {
                return Err(self.fail(CommError::TimedOut {
                    peers: waited_for.iter().map(|rank| self.peer(world(rank))).collect(),
                    by: waiter.world_rank(),
                    group: waiter.members.name.clone(),
                    limit_s: limit.as_secs(),
                    call: waiter.call.to_string(),
                }));
            }
            guard = changed
                .wait_timeout(guard, LOOK_EVERY.min(limit))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}
