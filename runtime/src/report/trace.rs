//! Trace of a run's passes for Perfetto: one process track for each rank, times in microseconds.

use super::rank_report::pass_name;
use crate::step::executor::PassTiming;
use crate::step::reduce::ReductionSpan;
use serde::Serialize;
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
    /// 0 computes, 1 waits for transfers, 2 reduces gradients.
    tid: u32,
}

/// Collects a rank's events.
pub struct Trace {
    begin: Instant,
    rank: usize,
    events: Vec<Event>,
}

impl Trace {
    /// An empty trace; times count from `begin`.
    pub fn new(begin: Instant, rank: usize) -> Self {
        Self { begin, rank, events: Vec::new() }
    }

    fn add(&mut self, name: String, cat: &'static str, tid: u32, from: Instant, to: Instant) {
        let micros = |at: Instant| at.saturating_duration_since(self.begin).as_secs_f64() * 1e6;
        let (ts, dur) = (micros(from), micros(to) - micros(from));
        self.events.push(Event { name, cat, ph: "X", ts, dur, pid: self.rank, tid });
    }

    /// A step's passes.
    pub fn passes(&mut self, ran: &[PassTiming]) {
        for pass in ran {
            let name = pass_name(&pass.pass);
            self.add(format!("wait {name}"), "wait", 1, pass.begin, pass.computing);
            self.add(name, "pass", 0, pass.computing, pass.end);
        }
    }

    /// A step's gradient reductions.
    pub fn reductions(&mut self, spans: &[ReductionSpan]) {
        for span in spans {
            let name = format!("reduce {} bytes", span.bytes);
            self.add(name, "dp", 2, span.started, span.ended);
        }
    }

    /// Another named phase of a step.
    pub fn phase(&mut self, name: &str, from: Instant, to: Instant) {
        self.add(name.to_owned(), "step", 0, from, to);
    }

    /// The events, one JSON object each.
    pub fn lines(&self) -> Vec<String> {
        let text = |event: &Event| serde_json::to_string(event).unwrap_or_default();
        self.events.iter().map(text).collect()
    }
}
