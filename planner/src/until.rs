//! When a search has to answer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// When a search has to answer with the best it knows: at a moment, at the user's interrupt, or
/// never.
#[derive(Clone, Copy, Debug, Default)]
pub struct Until<'a> {
    /// Set to end the search.
    pub interrupt: Option<&'a AtomicBool>,
    /// The moment to answer at.
    pub deadline: Option<Instant>,
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
