//! What rank 0 says on standard error: how the run goes, and in the end how it went, measured
//! beside planned.

use super::Run;
use super::metrics::PeakMemory;
use crate::launch::interrupt::say;
use crate::spec::TrainerSpec;
use crate::step_time::StepTime;
use indicatif::{HumanBytes, HumanCount, ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Least time between two lines, apart from those of the first and the last step.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Most lines, apart from those of the first and the last step.
const MOST_LINES: u64 = 100;

/// Reports a run while it goes on.
pub(super) struct Progress {
    /// Shown if standard error is a terminal; otherwise there are lines.
    bar: Option<ProgressBar>,
    steps: u64,
    tokens_per_step: f64,
    predicted: Option<StepTime>,
    done: u64,
    since_line: Steps,
    line_at: Instant,
    /// All steps, without the first if there are others: it allocates memory.
    all: Steps,
}

impl Progress {
    pub fn new(spec: &TrainerSpec, steps: u64) -> Self {
        Self {
            bar: std::io::stderr().is_terminal().then(|| progress_bar(steps)),
            steps,
            tokens_per_step: spec.tokens() as f64,
            predicted: spec.prediction.and_then(|prediction| prediction.step),
            done: 0,
            since_line: Steps::default(),
            line_at: Instant::now(),
            all: Steps::default(),
        }
    }

    /// Reports a step.
    pub fn step(&mut self, loss: f64, time: &StepTime) {
        self.done += 1;
        if self.done == 2 {
            self.all = Steps::default();
        }
        self.all.add(time);
        self.since_line.add(time);
        if let Some(bar) = &self.bar {
            bar.set_message(self.speed(loss, time));
            bar.inc(1);
        } else if is_due([self.done, self.steps], self.since_line.count, self.line_at.elapsed()) {
            let speed = self.speed(loss, &self.since_line.mean());
            say(&format!("step {} of {}  {speed}", self.done, self.steps));
            (self.since_line, self.line_at) = (Steps::default(), Instant::now());
        }
    }

    /// `loss 3.1234  12,345 tokens/s  1.31 s a step (planned 1.18 s)`
    fn speed(&self, loss: f64, time: &StepTime) -> String {
        let planned = self.predicted.map_or_else(String::new, |predicted| {
            format!(" (planned {})", seconds(predicted.total_s()))
        });
        let (rate, step) = (self.tokens_per_s(time), seconds(time.total_s()));
        format!("loss {loss:.4}  {rate}  {step} a step{planned}")
    }

    fn tokens_per_s(&self, time: &StepTime) -> String {
        let tokens_per_s = self.tokens_per_step / time.total_s();
        format!("{} tokens/s", HumanCount(tokens_per_s.round() as u64))
    }

    /// Reports the whole run.
    pub fn finish(&self, run: &Run<'_>, memory: PeakMemory) {
        if let Some(bar) = &self.bar {
            bar.finish();
        }
        let mean = self.all.mean();
        let mut lines = vec![format!("{} steps, {}", self.done, self.tokens_per_s(&mean))];
        lines.push(row(
            "a step",
            StepTime::default().parts().map(|(name, _)| name.into()),
            "total",
        ));
        lines.push(time_row("  measured", &mean, run.measures_parts()));
        lines.extend(self.predicted.map(|predicted| time_row("  planned", &predicted, true)));
        lines.push(memory_line(run, memory));
        say(&lines.join("\n"));
    }
}

/// Steps and their time.
#[derive(Clone, Copy, Debug, Default)]
struct Steps {
    count: u64,
    time: StepTime,
}

impl Steps {
    fn add(&mut self, time: &StepTime) {
        self.count += 1;
        self.time = self.time.combined(time, |sum_s, step_s| sum_s + step_s);
    }

    fn mean(&self) -> StepTime {
        let count = self.count.max(1) as f64;
        StepTime::from_parts(self.time.parts().map(|(_, sum_s)| sum_s / count))
    }
}

/// Whether a line is due after step `done` of all `steps`; `count` steps have been done in the time
/// since the last line.
fn is_due([done, steps]: [u64; 2], count: u64, since: Duration) -> bool {
    let rare = since >= LINE_EVERY && count >= steps.div_ceil(MOST_LINES);
    done == 1 || done == steps || rare
}

fn progress_bar(steps: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:20} {pos}/{len} steps  {msg}  {eta} left");
    ProgressBar::new(steps).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// A row of the table of times: its name, its parts and their sum.
fn row(name: &str, parts: [String; 8], total: &str) -> String {
    let cells = parts.map(|part| format!("{part:>10}"));
    format!("{name:<10}{}{total:>10}", cells.concat())
}

fn time_row(name: &str, time: &StepTime, has_parts: bool) -> String {
    let cell = |(_, part_s)| if has_parts { seconds(part_s) } else { "-".to_owned() };
    row(name, time.parts().map(cell), &seconds(time.total_s()))
}

/// Three digits, in seconds or milliseconds.
fn seconds(seconds: f64) -> String {
    match seconds {
        s if s >= 100.0 => format!("{s:.0} s"),
        s if s >= 10.0 => format!("{s:.1} s"),
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 0.1 => format!("{:.0} ms", s * 1e3),
        s if s >= 0.01 => format!("{:.1} ms", s * 1e3),
        s => format!("{:.2} ms", s * 1e3),
    }
}

/// Peak memory beside the planned figure.
fn memory_line(run: &Run<'_>, memory: PeakMemory) -> String {
    let PeakMemory { peak_tensor_bytes, peak_resident_bytes } = memory;
    let planned = match run.spec.planned_memory_bytes() {
        0 => String::new(),
        bytes => format!(" of {} planned", HumanBytes(bytes)),
    };
    let ranks = match run.ranks_in_process {
        1 => "1 rank".to_owned(),
        ranks => format!("{ranks} ranks"),
    };
    let host = match peak_resident_bytes {
        0 => String::new(),
        bytes => format!("; at most {} on the host in a process of {ranks}", HumanBytes(bytes)),
    };
    let tensors = HumanBytes(peak_tensor_bytes);
    format!("memory    at most {tensors}{planned} in tensors of a rank{host}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_few_and_far_between() {
        let due = |step, steps, count, since_s| {
            is_due([step, steps], count, Duration::from_secs_f64(since_s))
        };
        assert!(due(1, 1000, 1, 0.0) && due(1000, 1000, 3, 0.0));
        assert!(!due(20, 1000, 10, 9.9) && due(20, 1000, 10, 10.0));
        assert!(!due(20, 1000, 9, 3600.0) && due(2, 100, 1, 10.0));
    }

    #[test]
    fn times_have_three_digits() {
        let said = [0.001_234, 0.012_34, 0.1234, 1.234, 12.34, 123.4, 1234.0].map(seconds);
        assert_eq!(said, ["1.23 ms", "12.3 ms", "123 ms", "1.23 s", "12.3 s", "123 s", "1234 s"]);
    }
}
