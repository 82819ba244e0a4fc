//! Timelines: when each pass of a schedule ran.

use super::costs::Durations;
use super::prepared::{Prepared, Workspace};
use models::schedule::{Pass, Release, Schedule};

/// One pass in time. The two passes of a pair have the same span.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The pass.
    pub pass: Pass,
    /// Start, s.
    pub start_s: f64,
    /// End, s.
    pub end_s: f64,
}

/// Summary of one pipeline rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RankTime {
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
    /// Longest time from the start of a rank's first pass to the end of its last, s. It is the
    /// iteration time where ranks step their optimizers without waiting for one another (Zero
    /// Bubble, arXiv 2401.10241, section 2.3).
    pub longest_stage_s: f64,
    /// By rank.
    pub ranks: Vec<RankTime>,
    /// By rank: most activations held at once if `B` frees them, in units of one micro-batch's
    /// activations on one rank (all its chunks).
    pub peak_activations: Vec<f64>,
    /// The same if activations are held until `W`.
    pub peak_activations_until_w: Vec<f64>,
    /// By rank, its passes in order.
    pub spans: Vec<Vec<Span>>,
}

impl Timeline {
    /// Share of the makespan in which a rank is idle, averaged over the ranks.
    pub fn bubble_fraction(&self) -> f64 {
        1.0 - self.mean_busy_s() / self.makespan_s
    }

    /// The part between two moments, with times relative to the first. Busy times and peaks remain
    /// those of the whole run.
    #[must_use]
    pub fn between(&self, from_s: f64, to_s: f64) -> Self {
        let within = |span: &&Span| span.end_s > from_s && span.start_s < to_s;
        let clipped = |span: &Span| Span {
            start_s: span.start_s.max(from_s) - from_s,
            end_s: span.end_s.min(to_s) - from_s,
            ..*span
        };
        let rank = |spans: &Vec<Span>| spans.iter().filter(within).map(clipped).collect();
        let spans = self.spans.iter().map(rank).collect();
        Self { makespan_s: to_s - from_s, spans, ..self.clone() }
    }

    /// Idle share as in [`Self::bubble_fraction`], but of the longest stage time.
    pub fn stage_bubble_fraction(&self) -> f64 {
        1.0 - self.mean_busy_s() / self.longest_stage_s
    }

    fn mean_busy_s(&self) -> f64 {
        let busy_s: f64 = self.ranks.iter().map(|rank| rank.busy_s).sum();
        busy_s / self.ranks.len() as f64
    }
}

impl Prepared {
    /// Runs the schedule it was prepared from and returns its timeline.
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
        let ranks: Vec<_> = spans.iter().map(|spans| rank_time(spans)).collect();
        let peaks =
            |release| (0..schedule.ranks).map(|i| schedule.peak_activations(i, release)).collect();
        Timeline {
            makespan_s: longest(ranks.iter().map(|rank| rank.last_end_s)),
            longest_stage_s: longest(ranks.iter().map(|d| d.last_end_s - d.first_start_s)),
            ranks,
            peak_activations: peaks(Release::AtB),
            peak_activations_until_w: peaks(Release::AtW),
            spans,
        }
    }
}

/// Spans, with the second pass of each pair left out.
fn one_by_one(spans: &[Span]) -> impl Iterator<Item = &Span> {
    let beside = |n: usize| n > 0 && runs_beside(&spans[n - 1], &spans[n]);
    spans.iter().enumerate().filter(move |(n, _)| !beside(*n)).map(|(_, span)| span)
}

/// Whether two consecutive spans belong to one pair.
pub(super) fn runs_beside(one: &Span, other: &Span) -> bool {
    other.start_s < one.end_s
}

fn span(((start_s, end_s), pass): ((f64, f64), &Pass)) -> Span {
    Span { pass: *pass, start_s, end_s }
}

fn rank_time(spans: &[Span]) -> RankTime {
    RankTime {
        busy_s: one_by_one(spans).map(|span| span.end_s - span.start_s).sum(),
        first_start_s: spans.first().map_or(0.0, |span| span.start_s),
        last_end_s: spans.last().map_or(0.0, |span| span.end_s),
    }
}

fn longest(times_s: impl Iterator<Item = f64>) -> f64 {
    times_s.fold(0.0, f64::max)
}
