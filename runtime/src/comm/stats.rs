//! What a rank sends, by group and call, and how long its calls take, by group.

use super::call::Call;
use super::call::Kind;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Number of calls and bytes of one kind of call in one group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Calls.
    pub calls: u64,
    /// Bytes that this rank handed in; for `recv`, that it received.
    pub bytes: u64,
}

/// By group and name of the call.
pub type Traffic = BTreeMap<(String, &'static str), Counted>;

/// A call in time, as the host sees it.
#[derive(Clone, Debug)]
pub struct CallSpan {
    /// The group.
    pub group: String,
    /// Name of the call.
    pub call: &'static str,
    /// Bytes that this rank handed in; for `recv`, that it received.
    pub bytes: u64,
    /// When it was started.
    pub started: Instant,
    /// When this rank began to wait for it.
    pub waited_from: Instant,
    /// When it was there.
    pub ended: Instant,
}

/// Counters of one rank, shared by all its groups.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    traffic: Arc<Mutex<Traffic>>,
    /// Time in calls, by group.
    waited: Arc<Mutex<BTreeMap<String, Duration>>>,
    /// Calls since they were last taken; `None` if nobody asked for them.
    spans: Arc<Mutex<Option<Vec<CallSpan>>>>,
}

impl Stats {
    /// Counts a call with `elements` handed in.
    pub(super) fn count(&self, group: &str, call: &Call, elements: usize) {
        let bytes = bytes_of(call, elements);
        let mut traffic = self.traffic.lock().unwrap_or_else(PoisonError::into_inner);
        let counted = traffic.entry((group.to_owned(), call.kind.name())).or_default();
        counted.calls += 1;
        counted.bytes += bytes;
    }

    /// Keeps calls in time from now on.
    pub fn keep_spans(&self) {
        *self.spans.lock().unwrap_or_else(PoisonError::into_inner) = Some(Vec::new());
    }

    pub(super) fn span(&self, span: impl FnOnce() -> CallSpan) {
        if let Some(spans) = &mut *self.spans.lock().unwrap_or_else(PoisonError::into_inner) {
            spans.push(span());
        }
    }

    /// The calls that ended since the last time, if they are kept, in the order of their ends.
    pub fn take_spans(&self) -> Vec<CallSpan> {
        let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        spans.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Adds traffic that was counted elsewhere.
    pub fn add(&self, more: &Traffic) {
        let mut traffic = self.traffic.lock().unwrap_or_else(PoisonError::into_inner);
        for (key, more) in more {
            let counted = traffic.entry(key.clone()).or_default();
            counted.calls += more.calls;
            counted.bytes += more.bytes;
        }
    }

    /// Runs part of a call of a group, and counts its time.
    pub(crate) fn timed<R>(&self, group: &str, part: impl FnOnce() -> R) -> R {
        let begin = Instant::now();
        let done = part();
        let took = begin.elapsed();
        let mut waited = self.waited.lock().unwrap_or_else(PoisonError::into_inner);
        match waited.get_mut(group) {
            Some(sum) => *sum += took,
            None => drop(waited.insert(group.to_owned(), took)),
        }
        done
    }

    /// Seconds so far in calls of these groups: starting them, waiting, and combining what came. On
    /// a GPU the host waits for hardly any call, so that this is not the time they take.
    pub fn waited_s(&self, groups: &[&str]) -> f64 {
        let waited = self.waited.lock().unwrap_or_else(PoisonError::into_inner);
        groups.iter().filter_map(|&group| waited.get(group)).map(Duration::as_secs_f64).sum()
    }

    /// The traffic so far.
    pub fn traffic(&self) -> Traffic {
        self.traffic.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Bytes of a call with `elements` handed in.
pub(super) fn bytes_of(call: &Call, elements: usize) -> u64 {
    let received = matches!(call.kind, Kind::Recv { .. });
    let elements = if received { call.count } else { elements };
    (elements * call.dtype.bytes()) as u64
}

/// The traffic between two readings.
pub fn since(before: &Traffic, after: &Traffic) -> Traffic {
    let mut between = after.clone();
    for (key, counted) in &mut between {
        let earlier = before.get(key).copied().unwrap_or_default();
        counted.calls -= earlier.calls;
        counted.bytes -= earlier.bytes;
    }
    between.retain(|_, counted| counted.calls > 0);
    between
}
