//! What a run of a schedule looked like.

use super::costs::Durations;
use super::prepared::{Prepared, Workspace};
use models::schedule::{Pass, Release, Schedule};

/// One pass, in time. Both of a pair have the pair's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// What was run.
    pub pass: Pass,
    /// When it started, s.
    pub start_s: f64,
    /// When it ended, s.
    pub end_s: f64,
}

/// A device's share of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceTime {
    /// Time spent in passes, s.
    pub busy_s: f64,
    /// Start of its first pass, s.
    pub first_start_s: f64,
    /// End of its last pass, s.
    pub last_end_s: f64,
}

/// A run of a schedule.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// End of the last pass, s.
    pub makespan_s: f64,
    /// Longest time from a device's own first start to its own last end, s: the iteration time where
    /// devices step their optimizers without waiting for one another (Zero Bubble, arXiv 2401.10241,
    /// section 2.3).
    pub longest_stage_s: f64,
    /// By device.
    pub devices: Vec<DeviceTime>,
    /// By device: most activations held if `B` frees them, in those of one micro-batch of one
    /// device's whole share.
    pub peak_activations: Vec<f64>,
    /// The same if they are held to `W`.
    pub peak_activations_until_w: Vec<f64>,
    /// By device, its passes in order.
    pub spans: Vec<Vec<Span>>,
}

impl Timeline {
    /// Share of the makespan in which a device idles, on average over the devices.
    pub fn bubble_fraction(&self) -> f64 {
        1.0 - self.mean_busy_s() / self.makespan_s
    }

    /// What lies between two moments, in time from the first; held and busy stay those of the whole.
    #[must_use]
    pub fn between(&self, from_s: f64, to_s: f64) -> Self {
        let within = |span: &&Span| span.end_s > from_s && span.start_s < to_s;
        let clipped = |span: &Span| Span {
            start_s: span.start_s.max(from_s) - from_s,
            end_s: span.end_s.min(to_s) - from_s,
            ..*span
        };
        let device = |spans: &Vec<Span>| spans.iter().filter(within).map(clipped).collect();
        let spans = self.spans.iter().map(device).collect();
        Self { makespan_s: to_s - from_s, spans, ..self.clone() }
    }

    /// The same with respect to the longest stage time.
    pub fn stage_bubble_fraction(&self) -> f64 {
        1.0 - self.mean_busy_s() / self.longest_stage_s
    }

    fn mean_busy_s(&self) -> f64 {
        let busy_s: f64 = self.devices.iter().map(|device| device.busy_s).sum();
        busy_s / self.devices.len() as f64
    }
}

impl Prepared {
    /// Runs the schedule it was made from and reports everything about it.
    pub fn timeline(
        &self,
        schedule: &Schedule,
        durations: &Durations,
        workspace: &mut Workspace,
    ) -> Timeline {
        self.run(durations, workspace);
        let spans: Vec<Vec<Span>> = self
            .spans(workspace)
            .into_iter()
            .zip(&schedule.passes)
            .map(|(times, passes)| times.into_iter().zip(passes).map(span).collect())
            .collect();
        let devices: Vec<_> = spans.iter().map(|spans| device_time(spans)).collect();
        let peaks = |release| {
            (0..schedule.devices).map(|i| schedule.peak_activations(i, release)).collect()
        };
        Timeline {
            makespan_s: longest(devices.iter().map(|device| device.last_end_s)),
            longest_stage_s: longest(devices.iter().map(|d| d.last_end_s - d.first_start_s)),
            devices,
            peak_activations: peaks(Release::AtB),
            peak_activations_until_w: peaks(Release::AtW),
            spans,
        }
    }
}

/// Spans without those that run beside the one before.
fn one_by_one(spans: &[Span]) -> impl Iterator<Item = &Span> {
    let beside = |n: usize| n > 0 && runs_beside(&spans[n - 1], &spans[n]);
    spans.iter().enumerate().filter(move |(n, _)| !beside(*n)).map(|(_, span)| span)
}

/// Whether two spans in a row are a pair's.
pub(super) fn runs_beside(one: &Span, other: &Span) -> bool {
    other.start_s < one.end_s
}

fn span(((start_s, end_s), pass): ((f64, f64), &Pass)) -> Span {
    Span { pass: *pass, start_s, end_s }
}

fn device_time(spans: &[Span]) -> DeviceTime {
    DeviceTime {
        busy_s: one_by_one(spans).map(|span| span.end_s - span.start_s).sum(),
        first_start_s: spans.first().map_or(0.0, |span| span.start_s),
        last_end_s: spans.last().map_or(0.0, |span| span.end_s),
    }
}

fn longest(times_s: impl Iterator<Item = f64>) -> f64 {
    times_s.fold(0.0, f64::max)
}
