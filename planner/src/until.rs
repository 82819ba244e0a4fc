//! When a search has to answer, and what it got of the processors until then.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// A deadline that is near enough to wait for it.
const NEAR: Duration = Duration::from_secs(2);

/// How often a thread that waits for a solver asks whether the user interrupts.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// When a search has to answer with the best it knows: at a moment, at the user's interrupt, or
/// never.
#[derive(Clone, Copy, Debug, Default)]
pub struct Until<'a> {
    /// Set to end the search.
    pub interrupt: Option<&'a AtomicBool>,
    /// The moment to answer at.
    pub deadline: Option<Instant>,
    /// Where searches count what their threads get of the processors.
    pub processors: Option<&'a Processors>,
}

impl Until<'_> {
    /// Whether to answer now.
    pub fn is_over(&self) -> bool {
        self.is_interrupted() || self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Whether the user asked to end.
    pub fn is_interrupted(&self) -> bool {
        self.interrupt.is_some_and(|interrupt| interrupt.load(Ordering::Relaxed))
    }

    /// Counts what this thread got of the processors since `begun`, its time then.
    pub fn count(&self, begun: Option<ThreadTime>) {
        if let (Some(processors), Some(begun), Some(now)) =
            (self.processors, begun, ThreadTime::now())
        {
            processors.add(now.since(begun));
        }
    }

    /// The time left, if there is a deadline.
    pub fn left(&self) -> Option<Duration> {
        self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// Runs a solver, which cannot be interrupted. Without a near deadline it runs on a thread of
    /// its own, which is left alone at the user's interrupt: `None` then.
    pub fn unless_interrupted<T: Send + 'static>(
        self,
        solver: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        if self.left().is_some_and(|left| left < NEAR) || self.interrupt.is_none() {
            return Some(solver());
        }
        let (send, receive) = mpsc::channel();
        let solving = thread::spawn(move || send.send(solver()).is_ok());
        loop {
            match receive.recv_timeout(LOOK_EVERY) {
                Ok(found) => return Some(found),
                Err(RecvTimeoutError::Timeout) if self.is_interrupted() => return None,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return solving.join().map_or_else(|panic| resume_unwind(panic), |_| None);
                }
            }
        }
    }

    /// The same with a share of the time left.
    #[must_use]
    pub fn share(&self, share: f64) -> Self {
        let deadline = self.left().map(|left| Instant::now() + left.mul_f64(share));
        Self { deadline, ..*self }
    }
}

/// How long threads ran, and how long they could have run and waited for a processor.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ThreadTime {
    /// On a processor.
    pub ran: Duration,
    /// Ready, while other threads had the processors.
    pub waited: Duration,
}

impl ThreadTime {
    /// That of this thread since it began; `None` where the system does not say. Linux does.
    pub fn now() -> Option<Self> {
        Self::parse(&std::fs::read_to_string("/proc/thread-self/schedstat").ok()?)
    }

    /// Reads nanoseconds on a processor, nanoseconds of waiting, and a count.
    fn parse(text: &str) -> Option<Self> {
        let mut nanoseconds = text.split_whitespace().map_while(|word| word.parse().ok());
        let mut next = || nanoseconds.next().map(Duration::from_nanos);
        Some(Self { ran: next()?, waited: next()? })
    }

    /// What was added since `begun`.
    #[must_use]
    pub fn since(self, begun: Self) -> Self {
        let ran = self.ran.saturating_sub(begun.ran);
        Self { ran, waited: self.waited.saturating_sub(begun.waited) }
    }

    /// The share of the time in which it could have run that it did; all of it where it could not.
    pub fn share(self) -> f64 {
        let ready = self.ran + self.waited;
        if ready.is_zero() { 1.0 } else { self.ran.div_duration_f64(ready) }
    }
}

/// Times of threads that have ended, or go on with something else, added up.
#[derive(Debug, Default)]
pub struct Processors {
    ran_ns: AtomicU64,
    waited_ns: AtomicU64,
}

impl Processors {
    /// Adds a thread's time.
    pub fn add(&self, time: ThreadTime) {
        for (sum, time) in [(&self.ran_ns, time.ran), (&self.waited_ns, time.waited)] {
            let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
            sum.fetch_add(nanoseconds, Ordering::Relaxed);
        }
    }

    /// All of it.
    pub fn total(&self) -> ThreadTime {
        let sum = |of: &AtomicU64| Duration::from_nanos(of.load(Ordering::Relaxed));
        ThreadTime { ran: sum(&self.ran_ns), waited: sum(&self.waited_ns) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_threads_got_is_read_and_added_up() {
        let ns = Duration::from_nanos;
        let time = ThreadTime::parse("300 100 7\n").expect("three numbers");
        assert_eq!(time, ThreadTime { ran: ns(300), waited: ns(100) });
        assert_eq!(time.share(), 0.75);
        assert_eq!(ThreadTime::default().share(), 1.0);
        assert_eq!(ThreadTime::parse("300\n"), None);
        let all = Processors::default();
        let until = Until { processors: Some(&all), ..Until::default() };
        all.add(time);
        all.add(ThreadTime { ran: ns(1), waited: ns(2) });
        assert_eq!(all.total(), ThreadTime { ran: ns(301), waited: ns(102) });
        until.count(None);
        assert_eq!(all.total().ran, ns(301));
    }
}
