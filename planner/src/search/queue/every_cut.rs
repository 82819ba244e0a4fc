//! With `--prove`: what the search leaves out of cuts and recompute splits, settled by integer
//! programs over every cut, least bound first, until none is open or their work is spent.

use super::super::expand::every_cut::{EveryCutStage, node};
use super::team::{Answer, Batch, Team};
use super::{Progress, Run};
use crate::pricing::listed_cuts::is_complete;
use std::sync::Arc;

/// Fractions (1/n) of the work for all: what the first programs of a configuration take at most,
/// and what those of the plan's own configuration do.
const FIRST_SHARE: u64 = 1 << 10;
const OWN_SHARE: u64 = 4;
/// Chains kept per pipeline.
const MAX_PATHS: usize = 64;

impl Run<'_> {
    /// Settles what is open over every cut, the plan's own configuration first. Returns the least
    /// bound of what stays open, with overheads, s; infinite where nothing does.
    pub(super) fn prove_every_cut(&mut self, threads: usize, progress: Progress<'_>) -> f64 {
        let own = self.best.as_ref().map(|(own, _)| own.clone());
        let task = self.task;
        let most_work = self.work.saturating_add(task.every_cut_work);
        let first_work = (task.every_cut_work / FIRST_SHARE).max(1);
        self.most_paths = MAX_PATHS;
        let pipelines = Arc::clone(&self.pipelines);
        std::thread::scope(|scope| {
            let mut team = Team::new(scope, task, &pipelines, threads);
            let own = own.filter(|own| !is_complete(own, task.model.layers));
            if let Some(own) = own {
                let stage = EveryCutStage::Configuration(task.every_cut_work / OWN_SHARE);
                let nodes = vec![node(0.0, own, stage)];
                team.send(Batch::Nodes(nodes, self.best_s, first_work, Arc::clone(&self.paths)));
                for answer in team.receive() {
                    if let Answer::Expansion(mut expansion) = answer {
                        // It is among the rest, too.
                        expansion.parts.clear();
                        self.take(*expansion);
                    }
                }
            }
            let contexts = Arc::clone(&self.contexts);
            for (context, bound_s) in contexts.iter().zip(self.contexts_s.clone()) {
                if bound_s < self.best_s {
                    self.push(context.every_cut(bound_s));
                }
            }
            let work = |run: &Self| {
                let is_over = task.is_stopped() || run.work >= most_work;
                (!is_over).then_some(first_work)
            };
            self.expand_while(&mut team, work, progress);
            let least_s = self.least_waiting_s();
            self.waiting.clear();
            if least_s < self.best_s { least_s } else { f64::INFINITY }
        })
    }
}
