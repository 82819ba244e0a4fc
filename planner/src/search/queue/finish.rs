//! What follows when no search node is left to expand, or the time is up: local search, and the
//! bound of what the search leaves out.

use super::super::Candidate;
use super::super::expand::{SLACK, Worker};
use super::{CLIMBING, Progress, Run};
use crate::request::Task;
use models::decisions::{Decisions, RankOrder};
use std::sync::atomic::{AtomicUsize, Ordering};

impl Run<'_> {
    /// Local search from all candidate partitions within [`SLACK`] of the incumbent. Which ones
    /// these are does not depend on the order in which they were found.
    pub(super) fn climb(&mut self, threads: usize) {
        if self.task.is_stopped() {
            return;
        }
        let limit_s = self.best_s * (1.0 + SLACK);
        let near = std::mem::take(&mut self.near);
        let near = near.into_iter().filter(|start| start.iteration_s < limit_s).collect();
        let groups = by_pipeline(near);
        let task = Task { until: self.task.until.share(CLIMBING), ..self.task.clone() };
        let (next, task) = (AtomicUsize::new(0), &task);
        let work = || {
            let (mut worker, mut found) = (Worker::new(task, &self.shared), vec![]);
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(group) = groups.get(index) else { break found };
                found.extend(worker.climb(group.clone()).map(|best| (index, best)));
            }
        };
        let found: Vec<(usize, Candidate)> = std::thread::scope(|scope| {
            let start = |_| scope.spawn(work);
            let threads: Vec<_> = (0..threads.min(groups.len())).map(start).collect();
            let joined = threads.into_iter().map(|thread| match thread.join() {
                Ok(found) => found,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            joined.flatten().collect()
        });
        let least = found.into_iter().min_by(|(at, a), (other, b)| {
            a.iteration_s.total_cmp(&b.iteration_s).then(at.cmp(other))
        });
        if let Some((_, best)) = least.filter(|(_, best)| best.iteration_s < self.best_s) {
            self.best_s = best.iteration_s;
            self.best = Some((best.decisions, best.placed));
        }
    }

    /// Bounds the cuts and recompute splits that the search leaves out. Where a program finds a
    /// faster placement, local search goes on from it.
    pub(super) fn bound_left_open(&mut self, threads: usize, progress: Progress<'_>) {
        if self.task.every_cut_work == 0 {
            self.left_open_s = 0.0;
        } else if self.best_s.is_finite() {
            let known_s = self.best_s;
            self.left_open_s = self.settle_every_cut(threads, progress);
            if self.best_s < known_s {
                self.near.extend(self.incumbent());
                self.climb(1);
            }
        }
    }

    fn incumbent(&self) -> Option<Candidate> {
        let (decisions, placed) = self.best.clone()?;
        Some(Candidate { decisions, placed, iteration_s: self.best_s })
    }
}

/// Groups configurations that differ only in parameter state, in the order in which they come.
fn by_pipeline(all: Vec<Candidate>) -> Vec<Vec<Candidate>> {
    let mut groups: Vec<(Decisions, Vec<Candidate>)> = vec![];
    for candidate in all {
        let pipeline = Decisions {
            zero_stage: 0,
            dp_shard: 1,
            offload: candidate.decisions.offload.of_layers(),
            rank_order: RankOrder::DpInner,
            pass_times: None,
            ..candidate.decisions.clone()
        };
        match groups.iter_mut().find(|(known, _)| *known == pipeline) {
            Some((_, group)) => group.push(candidate),
            None => groups.push((pipeline, vec![candidate])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}
