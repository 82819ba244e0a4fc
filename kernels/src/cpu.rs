//! The compute context: who works, and with whose memory.

use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::{Mutex, PoisonError};
use thiserror::Error;

/// Why there is no context.
#[derive(Debug, Error)]
pub enum CpuError {
    /// A context needs at least one thread.
    #[error("threads is 0: a rank needs at least 1 thread")]
    NoThreads,
    /// The operating system gave no threads.
    #[error("cannot start {threads} threads: {source}")]
    Start {
        /// How many were asked for, the caller's own not counted.
        threads: usize,
        /// What the system says.
        source: rayon::ThreadPoolBuildError,
    },
}

/// Threads of one caller, its own among them. Each rank of a process has one, with its share of the cores.
#[derive(Debug)]
pub struct Cpu {
    threads: usize,
    /// `threads - 1` helpers; none where the caller works alone.
    helpers: Option<ThreadPool>,
}

impl Cpu {
    /// A context of `threads` threads, the calling one included.
    ///
    /// # Errors
    /// Where `threads` is 0, or the system gives no more threads.
    pub fn new(threads: usize) -> Result<Self, CpuError> {
        let helpers = match threads {
            0 => return Err(CpuError::NoThreads),
            1 => None,
            _ => Some(helpers(threads - 1)?),
        };
        Ok(Self { threads, helpers })
    }

    /// A context without helpers. Starts nothing, so it cannot fail.
    #[must_use]
    pub const fn serial() -> Self {
        Self { threads: 1, helpers: None }
    }

    /// How many threads work, the caller's own included.
    #[must_use]
    pub const fn threads(&self) -> usize {
        self.threads
    }

    /// Does `work` once for every item, on whichever thread is free. Which thread that is must not matter to the result.
    pub(crate) fn each<I, F>(&self, items: I, work: F)
    where
        I: ExactSizeIterator + Send,
        I::Item: Send,
        F: Fn(I::Item) + Sync,
    {
        match &self.helpers {
            Some(helpers) if items.len() > 1 => {
                let helping = items.len().min(self.threads) - 1;
                let queue = Mutex::new(items);
                let drain = || {
                    while let Some(item) = next(&queue) {
                        work(item);
                    }
                };
                helpers.in_place_scope(|scope| {
                    for _ in 0..helping {
                        scope.spawn(|_| drain());
                    }
                    drain();
                });
            }
            _ => items.for_each(work),
        }
    }
}

fn helpers(threads: usize) -> Result<ThreadPool, CpuError> {
    ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|i| format!("kernels-{}", i + 1))
        .build()
        .map_err(|source| CpuError::Start { threads, source })
}

/// A panic of another worker reaches the caller through the scope, so a poisoned queue is only drained.
fn next<I: Iterator>(queue: &Mutex<I>) -> Option<I::Item> {
    queue.lock().unwrap_or_else(PoisonError::into_inner).next()
}
