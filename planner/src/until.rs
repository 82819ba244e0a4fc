//! When a search has to answer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// When a search has to answer with the best it knows: at a moment, at the user's interrupt, or
/// never.
#[derive(Clone, Copy, Debug, Default)]
pub struct Until<'a> {
    /// Set to end the search.
    pub interrupt: Option<&'a AtomicBool>,
    /// The moment to answer at.
    pub deadline: Option<Instant>,
    /// Where searches count the time that their threads wanted a processor.
    pub demand: Option<&'a Demand>,
}

/// The time that threads wanted a processor, all of them together, whether or not they got one. On
/// a machine with nothing else to do it is the processor time that they used.
#[derive(Debug, Default)]
pub struct Demand(AtomicU64);

impl Demand {
    /// What was wanted so far.
    pub fn total(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }

    fn add(&self, wanted: Duration) {
        let nanoseconds = u64::try_from(wanted.as_nanos()).unwrap_or(u64::MAX);
        self.0.fetch_add(nanoseconds, Ordering::Relaxed);
    }
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

    /// Counts time that a thread wanted a processor.
    pub fn wanted(&self, time: Duration) {
        if let Some(demand) = self.demand {
            demand.add(time);
        }
    }

    /// The time left, if there is a deadline.
    pub fn left(&self) -> Option<Duration> {
        self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// The same with a share of the time left.
    #[must_use]
    pub fn share(&self, share: f64) -> Self {
        let deadline = self.left().map(|left| Instant::now() + left.mul_f64(share));
        Self { deadline, ..*self }
    }
}
