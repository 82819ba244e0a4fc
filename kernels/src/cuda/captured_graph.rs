//! Positions of queues in a capture, and the finished capture as a graph. In a replay every
//! captured queue has a thread of its own, which lags as others do.

use super::capture::{Capture, CapturedCall, CapturedWork, lock};
use super::driver::{EventState, GpuError, Recording};
use super::queue_thread::{EmulatedEvent, QueueThread};
use std::fmt::{self, Debug};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A queue's position in a capture: the calls after which its next call comes.
#[derive(Clone)]
pub(super) struct CapturePosition {
    capture: Arc<Capture>,
    queue: usize,
    last: Vec<usize>,
}

impl CapturePosition {
    /// The position of a queue that joins after some calls.
    pub fn new(capture: Arc<Capture>, last: Vec<usize>) -> Self {
        let queue = capture.queues.fetch_add(1, Ordering::AcqRel);
        Self { capture, queue, last }
    }

    pub fn capture(&self) -> &Arc<Capture> {
        &self.capture
    }

    pub fn add(&mut self, work: CapturedWork) {
        let mut calls = lock(&self.capture.calls);
        let number = calls.len();
        let after = std::mem::replace(&mut self.last, vec![number]);
        calls.push(CapturedCall { queue: self.queue, after, work });
    }

    pub fn event(&self) -> EmulatedEvent {
        EmulatedEvent::Captured(self.capture.clone(), self.last.clone())
    }

    /// Makes the next call come after these calls, too.
    pub fn wait(&mut self, after: &[usize]) {
        self.last.extend(after);
        self.last.sort_unstable();
        self.last.dedup();
    }

    /// Ends the capture. This queue must have waited for everything that was captured.
    pub fn end(self, origin: QueueThread) -> Result<CapturedGraph, GpuError> {
        self.capture.ended.store(true, Ordering::Release);
        let failed = |what: String| GpuError::Call { call: "record", what };
        if let Some(call) = self.capture.broken.get() {
            return Err(failed(format!("{call} was called while a step was recorded")));
        }
        let calls = std::mem::take(&mut *lock(&self.capture.calls));
        let mut joined = vec![false; calls.len()];
        let mut pending = self.last.clone();
        while let Some(call) = pending.pop() {
            if !std::mem::replace(&mut joined[call], true) {
                pending.extend(&calls[call].after);
            }
        }
        if let Some(call) = joined.iter().position(|joined| !joined) {
            let queue = calls[call].queue;
            let what = format!("queue {queue} recorded what the first never waited for");
            return Err(failed(what));
        }
        let queues = self.capture.queues.load(Ordering::Acquire);
        let threads = (0..queues).map(|_| origin.fork()).collect();
        Ok(CapturedGraph { origin, threads, calls, last: self.last })
    }
}

/// A finished capture.
pub(super) struct CapturedGraph {
    origin: QueueThread,
    threads: Vec<QueueThread>,
    calls: Vec<CapturedCall>,
    last: Vec<usize>,
}

impl Debug for CapturedGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} calls on {} queues", self.calls.len(), self.threads.len())
    }
}

impl Recording for CapturedGraph {
    fn replay(&self) -> Result<(), GpuError> {
        let begun = self.origin.record_event();
        for thread in &self.threads {
            let begun = begun.clone();
            thread.submit(move |_| begun.wait());
        }
        let events: Vec<EmulatedEvent> =
            self.calls.iter().map(|_| EmulatedEvent::default()).collect();
        for (call, event) in self.calls.iter().zip(&events) {
            let after: Vec<EmulatedEvent> =
                call.after.iter().map(|&before| events[before].clone()).collect();
            let (work, event) = (call.work.clone(), event.clone());
            self.threads[call.queue].submit(move |emulator| {
                after.iter().try_for_each(EmulatedEvent::wait)?;
                let done = work(emulator);
                event.set();
                done
            });
        }
        let last: Vec<EmulatedEvent> = self.last.iter().map(|&call| events[call].clone()).collect();
        self.origin.submit(move |_| last.iter().try_for_each(EmulatedEvent::wait));
        self.origin.health()
    }
}
