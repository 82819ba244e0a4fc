//! The compute context of a caller: its threads and scratch memory.

use crate::Real;
use crate::real::Pools;
use pulp::Arch;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::{Mutex, PoisonError};
use thiserror::Error;

/// Why a context cannot be made.
#[derive(Debug, Error)]
pub enum CpuError {
    /// A context needs at least one thread.
    #[error("threads is 0: a rank needs at least 1 thread")]
    NoThreads,
    /// The operating system refused to start threads.
    #[error("cannot start {threads} threads: {source}")]
    Start {
        /// Threads requested, without the caller's own.
        threads: usize,
        /// The system's error.
        source: rayon::ThreadPoolBuildError,
    },
}

/// Threads of one caller including its own, their scratch memory, and the instruction set of the
/// processor. Each rank of a process has one, with its share of the cores.
#[derive(Debug)]
pub struct Cpu {
    threads: usize,
    /// `threads - 1` helpers; `None` if the caller works alone.
    helpers: Option<ThreadPool>,
    scratch: Pools,
    arch: Arch,
}

impl Cpu {
    /// A context of `threads` threads, the calling one included.
    ///
    /// # Errors
    /// If `threads` is 0, or the system refuses to start more threads.
    pub fn new(threads: usize) -> Result<Self, CpuError> {
        let helpers = match threads {
            0 => return Err(CpuError::NoThreads),
            1 => None,
            _ => Some(start(threads - 1)?),
        };
        Ok(Self { threads, helpers, ..Self::serial() })
    }

    /// A context without helpers. It starts no threads, so it cannot fail.
    #[must_use]
    pub fn serial() -> Self {
        Self { threads: 1, helpers: None, scratch: Pools::new(), arch: Arch::new() }
    }

    /// Number of threads, the caller's own included.
    #[must_use]
    pub const fn threads(&self) -> usize {
        self.threads
    }

    /// The widest vector instructions that this processor has.
    pub(crate) const fn arch(&self) -> Arch {
        self.arch
    }

    /// Runs `work` once for every item, on whichever thread is free. The result must not depend on
    /// which thread that is.
    pub(crate) fn each<I, F>(&self, items: I, work: F)
    where
        I: Iterator + Send,
        I::Item: Send,
        F: Fn(I::Item) + Sync,
    {
        let most = items.size_hint().1.unwrap_or(usize::MAX);
        match &self.helpers {
            Some(helpers) if most > 1 => {
                let queue = Mutex::new(items);
                let drain = || {
                    while let Some(item) = next(&queue) {
                        work(item);
                    }
                };
                helpers.in_place_scope(|scope| {
                    for _ in 1..self.threads.min(most) {
                        scope.spawn(|_| drain());
                    }
                    drain();
                });
            }
            _ => items.for_each(work),
        }
    }

    /// Lends `elements` elements of uninitialised scratch memory, and keeps it for the next loan.
    pub(crate) fn scratch<T: Real, R>(
        &self,
        elements: usize,
        work: impl FnOnce(&mut [T]) -> R,
    ) -> R {
        let pool = T::pool(&self.scratch);
        let mut buffer = pool.take();
        if buffer.len() < elements {
            buffer.resize(elements, T::ZERO);
        }
        let result = work(&mut buffer[..elements]);
        pool.give_back(buffer);
        result
    }
}

fn start(threads: usize) -> Result<ThreadPool, CpuError> {
    ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|i| format!("kernels-{}", i + 1))
        .build()
        .map_err(|source| CpuError::Start { threads, source })
}

/// A panic of another worker reaches the caller through the scope, so a poisoned queue only has to
/// be drained.
fn next<I: Iterator>(queue: &Mutex<I>) -> Option<I::Item> {
    queue.lock().unwrap_or_else(PoisonError::into_inner).next()
}
