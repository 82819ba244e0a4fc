//! What all ranks of a process share: groups, failures, who is still there.

use super::Options;
use super::collect::Slot;
use super::mail::Mailbox;
use crate::comm::{CommError, Tag};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How often a sleeping rank looks for failures elsewhere.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Locks; a rank that panicked meanwhile is reported as lost, not here.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One process's ranks.
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
        who: (&Group, &dyn std::fmt::Display),
    ) -> Result<R, CommError> {
        let (group, call) = who;
        let begun = Instant::now();
        loop {
            if let Some(result) = ready(&mut guard) {
                return Ok(result);
            }
            self.fail_if_failed()?;
            let waited_for = missing(&guard);
            let gone = |&&rank: &&usize| self.gone[group.members[rank]].load(Ordering::Acquire);
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

/// That a rank is there; dropped when its thread ends, however it ends.
pub(super) struct Presence {
    hub: Arc<Hub>,
    rank: usize,
}

impl Presence {
    pub fn new(hub: Arc<Hub>, rank: usize) -> Self {
        Self { hub, rank }
    }

    /// Rank of the world.
    pub fn rank(&self) -> usize {
        self.rank
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.hub.gone[self.rank].store(true, Ordering::Release);
    }
}

/// A group of ranks.
pub(super) struct Group {
    pub name: String,
    /// Ranks of the world, in the group's order.
    pub members: Vec<usize>,
    slots: Mutex<HashMap<u64, Arc<Slot>>>,
    mail: Mutex<HashMap<(usize, usize, Tag), Arc<Mailbox>>>,
    /// By number of the splitting call and colour.
    subgroups: Mutex<HashMap<(u64, usize), Arc<Group>>>,
}

impl Group {
    pub fn new(name: &str, members: Vec<usize>) -> Self {
        Self {
            name: name.to_owned(),
            members,
            slots: Mutex::default(),
            mail: Mutex::default(),
            subgroups: Mutex::default(),
        }
    }

    /// The slot of collective `number`.
    pub fn slot(&self, number: u64) -> Arc<Slot> {
        let mut slots = lock(&self.slots);
        slots.entry(number).or_insert_with(|| Arc::new(Slot::new(self.members.len()))).clone()
    }

    /// Forgets a collective that everybody has joined.
    pub fn retire(&self, number: u64) {
        lock(&self.slots).remove(&number);
    }

    pub fn mailbox(&self, from: usize, to: usize, tag: Tag) -> Arc<Mailbox> {
        lock(&self.mail).entry((from, to, tag)).or_default().clone()
    }

    /// The subgroup of one colour, made by whoever comes first.
    pub fn subgroup(&self, number: u64, color: usize, make: impl FnOnce() -> Self) -> Arc<Self> {
        lock(&self.subgroups).entry((number, color)).or_insert_with(|| Arc::new(make())).clone()
    }
}
