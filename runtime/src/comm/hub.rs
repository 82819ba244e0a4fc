//! What waiting ranks look at: failures, who is still there, and the clock.

use super::{CommError, Options};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How often a sleeping rank looks for failures elsewhere.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Locks; a rank that panicked meanwhile is reported as lost, not here.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A group's name and its ranks of the world, in the group's order.
#[derive(Clone, Debug)]
pub(super) struct Members {
    pub name: String,
    pub ranks: Vec<usize>,
}

/// The ranks of a world, as a process sees them.
pub(super) struct Hub {
    options: Options,
    gone: Vec<AtomicBool>,
    failure: OnceLock<CommError>,
}

impl Hub {
    pub fn new(size: usize, options: Options) -> Self {
        let gone = (0..size).map(|_| AtomicBool::new(false)).collect();
        Self { options, gone, failure: OnceLock::new() }
    }

    /// Sleeps as long as the tests want.
    pub fn delay(&self, rank: usize, call: u64) {
        if let Some(delays) = self.options.delays {
            std::thread::sleep(delays.before(rank, call));
        }
    }

    /// Notes the first failure and gives it back: everybody fails with the same.
    pub fn fail(&self, error: CommError) -> CommError {
        self.failure.get_or_init(|| error).clone()
    }

    /// Notes that a rank of the world has ended.
    pub fn set_gone(&self, rank: usize) {
        self.gone[rank].store(true, Ordering::Release);
    }

    /// The first rank of a group that has ended.
    pub fn gone_of(&self, members: &Members) -> Option<usize> {
        members.ranks.iter().position(|&rank| self.gone[rank].load(Ordering::Acquire))
    }

    /// Whether all ranks but `me` have ended.
    pub fn alone(&self, me: usize) -> bool {
        let mut gone = self.gone.iter().enumerate();
        gone.all(|(rank, gone)| rank == me || gone.load(Ordering::Acquire))
    }

    pub fn fail_if_failed(&self) -> Result<(), CommError> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.clone()))
    }

    /// Sleeps until `ready` says something of the guarded value, or there is reason to give up.
    /// `missing` names the ranks (of `group`) that are still waited for.
    pub fn wait<'a, T, R>(
        &self,
        mut guard: MutexGuard<'a, T>,
        changed: &Condvar,
        mut ready: impl FnMut(&mut T) -> Option<R>,
        missing: impl Fn(&T) -> Vec<usize>,
        who: (&Members, &dyn std::fmt::Display),
    ) -> Result<R, CommError> {
        let (group, call) = who;
        let begun = Instant::now();
        loop {
            if let Some(result) = ready(&mut guard) {
                return Ok(result);
            }
            self.fail_if_failed()?;
            let waited_for = missing(&guard);
            let gone = |&&rank: &&usize| self.gone[group.ranks[rank]].load(Ordering::Acquire);
            let (name, call) = (&group.name, || call.to_string());
            if let Some(&rank) = waited_for.iter().find(gone) {
                // What it did before it went has arrived: look once more.
                if let Some(result) = ready(&mut guard) {
                    return Ok(result);
                }
                let group = name.clone();
                return Err(self.fail(CommError::Lost { group, rank, call: call() }));
            }
            let limit = self.options.time_limit;
            if begun.elapsed() >= limit {
                let (group, limit_s) = (name.clone(), limit.as_secs());
                let error = CommError::TimedOut { group, ranks: waited_for, limit_s, call: call() };
                return Err(self.fail(error));
            }
            guard = changed
                .wait_timeout(guard, LOOK_EVERY.min(limit))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}
