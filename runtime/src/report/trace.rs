//! Trace of a run's passes and calls for Perfetto: one process track for each rank, times in
//! microseconds.

use super::rank_report::pass_name;
use crate::comm::CallSpan;
use crate::step::executor::PassTiming;
use crate::step::reduce::ReductionSpan;
use serde::Serialize;
use std::collections::VecDeque;
use std::time::Instant;

/// One slice of a track (Chrome's trace event format, complete events).
#[derive(Clone, Debug, Serialize)]
pub struct Event {
    name: String,
    cat: &'static str,
    ph: &'static str,
    ts: f64,
    dur: f64,
    /// The rank.
    pid: usize,
    /// 0 computes, 1 waits for transfers, 2 reduces gradients; calls in flight from 3 on, on as
    /// many tracks as are in flight at once.
    tid: u32,
}

/// Steps that a trace keeps: the last ones, so that long runs do not fill the memory.
pub const TRACED_STEPS: usize = 100;

/// Collects a rank's events.
pub struct Trace {
    begin: Instant,
    rank: usize,
    /// By step, of the last [`TRACED_STEPS`].
    steps: VecDeque<Vec<Event>>,
}

impl Trace {
    /// An empty trace; times count from `begin`.
    pub fn new(begin: Instant, rank: usize) -> Self {
        Self { begin, rank, steps: VecDeque::from([vec![]]) }
    }

    fn add(&mut self, name: String, cat: &'static str, tid: u32, from: Instant, to: Instant) {
        let micros = |at: Instant| at.saturating_duration_since(self.begin).as_secs_f64() * 1e6;
        let (ts, dur) = (micros(from), micros(to) - micros(from));
        let event = Event { name, cat, ph: "X", ts, dur, pid: self.rank, tid };
        if let Some(step) = self.steps.back_mut() {
            step.push(event);
        }
    }

    /// A step's passes, gradient reductions and calls.
    pub fn step(&mut self, ran: &[PassTiming], spans: &[ReductionSpan], calls: Vec<CallSpan>) {
        if self.steps.len() >= TRACED_STEPS {
            self.steps.pop_front();
        }
        self.steps.push_back(vec![]);
        self.passes(ran);
        self.reductions(spans);
        self.calls(calls);
    }

    /// A step's passes.
    fn passes(&mut self, ran: &[PassTiming]) {
        for pass in ran {
            let name = pass_name(&pass.pass);
            self.add(format!("wait {name}"), "wait", 1, pass.begin, pass.computing);
            self.add(name, "pass", 0, pass.computing, pass.end);
        }
    }

    /// A step's gradient reductions.
    fn reductions(&mut self, spans: &[ReductionSpan]) {
        for span in spans {
            let name = format!("reduce {} bytes", span.bytes);
            self.add(name, "dp", 2, span.started, span.ended);
        }
    }

    /// A step's calls: how long each was in flight, and how long the rank waited for it. Whatever
    /// of a call is not waited for lies under other work.
    pub fn calls(&mut self, mut spans: Vec<CallSpan>) {
        spans.sort_by_key(|span| span.started);
        let mut busy_until: Vec<Instant> = Vec::new();
        for CallSpan { group, call, bytes, started, waited_from, ended } in spans {
            let free = busy_until.iter().position(|until| *until <= started);
            let track = free.unwrap_or(busy_until.len());
            match busy_until.get_mut(track) {
                Some(until) => *until = ended,
                None => busy_until.push(ended),
            }
            self.add(
                format!("{call} {group}, {bytes} bytes"),
                "call",
                3 + track as u32,
                started,
                ended,
            );
            self.add(format!("wait {call} {group}"), "wait", 1, waited_from, ended);
        }
    }

    /// Another named phase of a step.
    pub fn phase(&mut self, name: &str, from: Instant, to: Instant) {
        self.add(name.to_owned(), "step", 0, from, to);
    }

    /// The events, one JSON object each.
    pub fn lines(&self) -> Vec<String> {
        let text = |event: &Event| serde_json::to_string(event).unwrap_or_default();
        self.steps.iter().flatten().map(text).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_steps_are_kept() {
        let begin = Instant::now();
        let mut trace = Trace::new(begin, 0);
        for step in 0..3 * TRACED_STEPS {
            trace.step(&[], &[], vec![]);
            trace.phase(&format!("update {step}"), begin, begin);
        }
        let lines = trace.lines();
        assert_eq!(lines.len(), TRACED_STEPS);
        assert!(lines[0].contains(&format!("update {}", 2 * TRACED_STEPS)), "{}", lines[0]);
    }
}
