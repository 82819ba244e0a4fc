//! Where queues are on a [`super::tape`], and what becomes of it once it has ended: replayed, every recorded queue has a
//! thread of its own, which lags as others do.

use super::driver::{GpuError, Point, Recording};
use super::lane::{Lane, Mark};
use super::tape::{Call, Tape, Work, lock};
use std::fmt::{self, Debug};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Where a queue is on a tape: what it records next comes behind these calls.
#[derive(Clone)]
pub(super) struct Place {
    tape: Arc<Tape>,
    queue: usize,
    last: Vec<usize>,
}

impl Place {
    /// A queue that joins behind some calls.
    pub fn new(tape: Arc<Tape>, last: Vec<usize>) -> Self {
        let queue = tape.queues.fetch_add(1, Ordering::AcqRel);
        Self { tape, queue, last }
    }

    pub fn tape(&self) -> &Arc<Tape> {
        &self.tape
    }

    pub fn add(&mut self, work: Work) {
        let mut calls = lock(&self.tape.calls);
        let number = calls.len();
        let after = std::mem::replace(&mut self.last, vec![number]);
        calls.push(Call { queue: self.queue, after, work });
    }

    pub fn mark(&self) -> Mark {
        Mark::Taped(self.tape.clone(), self.last.clone())
    }

    /// What comes next comes behind these calls, too.
    pub fn wait(&mut self, after: &[usize]) {
        self.last.extend(after);
        self.last.sort_unstable();
        self.last.dedup();
    }

    /// Ends the tape. All that was recorded must come before where this queue is.
    pub fn end(self, origin: Lane) -> Result<Replayed, GpuError> {
        self.tape.ended.store(true, Ordering::Release);
        let failed = |what: String| GpuError::Call { call: "record", what };
        if let Some(call) = self.tape.broken.get() {
            return Err(failed(format!("{call} was called while a step was recorded")));
        }
        let calls = std::mem::take(&mut *lock(&self.tape.calls));
        let mut joined = vec![false; calls.len()];
        let mut open = self.last.clone();
        while let Some(call) = open.pop() {
            if !std::mem::replace(&mut joined[call], true) {
                open.extend(&calls[call].after);
            }
        }
        if let Some(call) = joined.iter().position(|joined| !joined) {
            let queue = calls[call].queue;
            let what = format!("queue {queue} recorded what the first never waited for");
            return Err(failed(what));
        }
        let queues = self.tape.queues.load(Ordering::Acquire);
        let lanes = (0..queues).map(|_| origin.fork()).collect();
        Ok(Replayed { origin, lanes, calls, last: self.last })
    }
}

/// A tape that has ended.
pub(super) struct Replayed {
    origin: Lane,
    lanes: Vec<Lane>,
    calls: Vec<Call>,
    last: Vec<usize>,
}

impl Debug for Replayed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} calls on {} queues", self.calls.len(), self.lanes.len())
    }
}

impl Recording for Replayed {
    fn replay(&self) -> Result<(), GpuError> {
        let begun = self.origin.mark();
        for lane in &self.lanes {
            let begun = begun.clone();
            lane.later(move |_| begun.wait());
        }
        let marks: Vec<Mark> = self.calls.iter().map(|_| Mark::default()).collect();
        for (call, mark) in self.calls.iter().zip(&marks) {
            let after: Vec<Mark> = call.after.iter().map(|&before| marks[before].clone()).collect();
            let (work, mark) = (call.work.clone(), mark.clone());
            self.lanes[call.queue].later(move |machine| {
                after.iter().try_for_each(Mark::wait)?;
                let done = work(machine);
                mark.set();
                done
            });
        }
        let last: Vec<Mark> = self.last.iter().map(|&call| marks[call].clone()).collect();
        self.origin.later(move |_| last.iter().try_for_each(Mark::wait));
        self.origin.health()
    }
}
