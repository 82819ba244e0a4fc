//! Streams of the fake device: their work is done later, in order.

use runtime::device::DeviceError;
use runtime::{Host, Scalar};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

/// The device that all ranks share: its counters and its failure.
#[derive(Debug, Default)]
pub struct SharedDevice {
    /// Copies from the host.
    pub uploads: AtomicUsize,
    /// Copies to the host.
    pub downloads: AtomicUsize,
    /// Totals read.
    pub reads: AtomicUsize,
    /// Streams made.
    pub streams: AtomicUsize,
    /// Jobs that ran.
    pub jobs: AtomicUsize,
    failure: OnceLock<DeviceError>,
}

impl SharedDevice {
    /// Makes the device fail from now on.
    pub fn fail(&self, why: &str) {
        let _first = self.failure.set(DeviceError(why.to_owned()));
    }

    pub(super) fn health(&self) -> Result<(), DeviceError> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.clone()))
    }
}

type Job<W> = Box<dyn FnOnce(&Host<W>) + Send>;

/// One stream, whose work is done in order, later.
#[derive(Clone)]
pub(super) struct Stream<W> {
    jobs: Sender<Job<W>>,
    pub(super) shared: Arc<SharedDevice>,
}

impl<W: Scalar> Stream<W> {
    pub(super) fn new(shared: &Arc<SharedDevice>) -> Self {
        let (jobs, given) = channel::<Job<W>>();
        let number = shared.streams.fetch_add(1, Ordering::Relaxed) as u64;
        let counted = shared.clone();
        std::thread::spawn(move || {
            let host = Host::<W>::serial();
            for (n, job) in given.into_iter().enumerate() {
                // Some streams lag far behind at times.
                let draw =
                    (n as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ (number << 17)) >> 40;
                if draw.is_multiple_of(64) {
                    std::thread::sleep(Duration::from_micros(draw % 211));
                }
                job(&host);
                counted.jobs.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self { jobs, shared: shared.clone() }
    }

    pub(super) fn run(&self, job: impl FnOnce(&Host<W>) + Send + 'static) {
        self.jobs.send(Box::new(job)).expect("a stream outlives its handles");
    }

    pub(super) fn mark(&self) -> Mark {
        let mark = Mark::default();
        let reached = mark.clone();
        self.run(move |_| reached.set());
        mark
    }

    pub(super) fn wait_for(&self, mark: &Mark) {
        let mark = mark.clone();
        self.run(move |_| mark.wait());
    }
}

/// A point in a stream's order.
#[derive(Clone, Debug, Default)]
pub struct Mark(Arc<(Mutex<bool>, Condvar)>);

impl Mark {
    pub(super) fn set(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    pub(super) fn wait(&self) {
        let reached = self.0.0.lock().unwrap();
        drop(self.0.1.wait_while(reached, |reached| !*reached).unwrap());
    }
}
