//! What follows when no search node is left to expand, or the time is up: integer programs, local
//! search, and the bound of what the search leaves out.

use super::super::expand::{Candidate, Open, SLACK, Worker};
use super::super::left_open::{self, LeftOut};
use super::{CLIMBING, PROVING, Progress, Run, WORK_SHARE, remember};
use crate::partition::ilp;
use crate::pricing::Configuration;
use crate::pricing::pipelines::PipelineKey;
use crate::request::Task;
use crate::until::Until;
use models::decisions::{Decisions, RankOrder};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

impl Run<'_> {
    /// Settles the combinations left open by bounds and incumbents, most promising first.
    pub(super) fn prove_open(&mut self) {
        let task = Task { until: self.task.until.share(PROVING), ..self.task.clone() };
        let mut worker = Worker::new(&task, Arc::clone(&self.pipelines));
        let mut open = std::mem::take(&mut self.open);
        open.sort_by(|a, b| a.bound_s.total_cmp(&b.bound_s));
        for node in open {
            let known =
                self.paths.get(&PipelineKey::new(&node.decisions)).map_or(&[][..], Vec::as_slice);
            if node.bound_s >= self.best_s || worker.is_cut_by(&node.decisions, self.best_s, known)
            {
                continue;
            }
            if self.work_left() == 0 || task.is_stopped() {
                self.open_bound_s = self.open_bound_s.min(node.bound_s);
            } else {
                self.prove(&mut worker, node, task.until);
            }
        }
    }

    /// Settles a combination by the integer program.
    fn prove(&mut self, worker: &mut Worker<'_>, node: Open, until: Until<'_>) {
        let Ok(configuration) = Configuration::new(&worker.cache, node.decisions) else { return };
        let cutoff_s = configuration.pipeline_s(self.best_s);
        let Some(problem) = configuration.problem(cutoff_s, self.task.ignore_memory) else {
            return;
        };
        // No combination takes all the work left: others may need less.
        let work = (self.task.solver_work / WORK_SHARE).min(self.work_left());
        let limits = ilp::Limits { work, paths: true, until };
        let key = PipelineKey::new(&configuration.decisions);
        let known = self.paths.get(&key).cloned().unwrap_or_default();
        let (report, more) =
            ilp::solve_with(&problem, known, cutoff_s, limits, &mut worker.scratch);
        let kept = Arc::make_mut(&mut self.paths).entry(key).or_default();
        more.into_iter().for_each(|path| remember(kept, path, self.most_paths));
        self.proof.ilps += report.solves as u64;
        self.ilp_s += report.elapsed_s;
        self.work += report.work;
        if let Some((choice, value_s)) = &report.best {
            let iteration_s = configuration.with_overheads_s(*value_s);
            if let Some(placed) =
                configuration.placed(&problem, choice).filter(|_| iteration_s < self.best_s)
            {
                self.best_s = iteration_s;
                self.best = Some((configuration.decisions.clone(), placed));
            }
        }
        if !report.proven {
            let bound_s = node.bound_s.max(configuration.with_overheads_s(report.bound_s));
            self.open_bound_s = self.open_bound_s.min(bound_s);
        }
    }

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
        let work = |pipelines| {
            let (mut worker, mut found) = (Worker::new(task, pipelines), vec![]);
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(group) = groups.get(index) else { break found };
                found.extend(worker.climb(group.clone()).map(|best| (index, best)));
            }
        };
        let found: Vec<(usize, Candidate)> = std::thread::scope(|scope| {
            let start = |_| scope.spawn(|| work(Arc::clone(&self.pipelines)));
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

    /// Bounds the configurations that the search leaves out, after those over other cuts are
    /// settled as far as was asked for.
    pub(super) fn bound_left_open(&mut self, threads: usize, progress: Progress<'_>) {
        if self.task.every_cut_work > 0 && self.best_s.is_finite() {
            self.every_cut_s = Some(self.prove_every_cut(threads, progress));
        }
        // Who verifies a proof asks whether anything lies below a time, with no plan to find.
        let verifies = self.task.any && self.task.cutoff_s.is_finite();
        if self.best.is_none() && !verifies {
            return;
        }
        let what = self.every_cut_s.map_or(LeftOut::All, |_| LeftOut::WithoutBarrier);
        let contexts: Vec<_> = self.contexts_s.iter().copied().zip(self.contexts.iter()).collect();
        let least_s = left_open::least_s(self.task, &contexts, self.best_s, what);
        self.left_open_s = self.every_cut_s.unwrap_or(f64::INFINITY).min(least_s);
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
            ..candidate.decisions.clone()
        };
        match groups.iter_mut().find(|(known, _)| *known == pipeline) {
            Some((_, group)) => group.push(candidate),
            None => groups.push((pipeline, vec![candidate])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}
