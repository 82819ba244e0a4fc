//! What the search leaves out of cuts and recompute splits, least bound first: bounds, linear
//! programs, and with `--prove` integer programs, until nothing is open or their work is spent.

use super::super::expand::every_cut::{EveryCutStage, node};
use super::super::expand::{Allowance, SearchNode, Stage};
use super::team::{Answer, Batch, Team};
use super::{Progress, Run, Waiting, What};
use crate::pricing::listed_cuts::is_complete;
use std::sync::Arc;

/// Fractions (1/n) of the work for all: what the first integer programs of a configuration take at
/// most, and what those of the plan's own configuration do.
const FIRST_SHARE: u64 = 1 << 10;
const OWN_SHARE: u64 = 4;
/// An integer program with less work would mostly end with its first relaxation.
const LEAST_WORK: u64 = 10_000;
/// Chains kept per pipeline: more than of listed cuts ([`super::LISTED_PATHS`]), since programs
/// over every cut begin from them.
const EVERY_CUT_PATHS: usize = 64;

impl Run<'_> {
    /// Settles what is open over every cut. Returns the least bound of what stays open, with
    /// overheads, s; infinite where nothing lies below the incumbent.
    pub(super) fn settle_every_cut(&mut self, threads: usize, progress: Progress<'_>) -> f64 {
        let task = self.task;
        let most_work = self.programs.work.saturating_add(task.every_cut_work);
        let first_work = task.every_cut_work / FIRST_SHARE;
        self.most_paths = EVERY_CUT_PATHS;
        let shared = Arc::clone(&self.shared);
        let contexts = Arc::clone(&self.contexts);
        for (context, bound_s) in contexts.iter().zip(self.contexts_s.clone()) {
            if bound_s < self.best_s {
                self.push(context.every_cut(bound_s));
            }
        }
        std::thread::scope(|scope| {
            let mut team = Team::new(scope, task, &shared, threads);
            let goes_on = |run: &Self| !task.is_stopped() && run.programs.work < most_work;
            let bounding = |run: &Self| (goes_on(run) && !run.needs_programs()).then_some(0);
            self.expand_while(&mut team, bounding, progress);
            let is_open = self.least_waiting_s() < self.best_s && self.needs_programs();
            if first_work >= LEAST_WORK && goes_on(self) && is_open {
                self.improve_own(&mut team, first_work);
                let all = |run: &Self| goes_on(run).then_some(first_work);
                self.expand_while(&mut team, all, progress);
            }
        });
        let least_s = self.least_waiting_s();
        self.waiting = Waiting::default();
        if least_s < self.best_s { least_s } else { f64::INFINITY }
    }

    /// Whether the least bound is that of linear programs.
    fn needs_programs(&self) -> bool {
        match self.waiting.0.values().next() {
            Some(What::SearchNode(node)) => {
                matches!(node.stage, Stage::EveryCut(EveryCutStage::Relaxed(_)))
            }
            _ => false,
        }
    }

    /// Integer programs over every cut of the plan's own configuration.
    fn improve_own(&mut self, team: &mut Team<'_>, first_work: u64) {
        let own = self.best.as_ref().map(|(own, _)| own.clone());
        let Some(own) = own.filter(|own| !is_complete(own, self.task.model.layers)) else { return };
        let stage = EveryCutStage::Relaxed(self.task.every_cut_work / OWN_SHARE);
        let nodes: Vec<SearchNode> = vec![node(0.0, own, stage)];
        let allowed = Allowance { work: first_work, share: 1.0, most_cuts: usize::MAX };
        team.send(Batch::Nodes(nodes, self.best_s, allowed, Arc::clone(&self.paths)));
        for answer in team.receive() {
            if let Answer::Expansion(mut expansion) = answer {
                // It is among the rest, too.
                expansion.parts.clear();
                self.take(*expansion);
            }
        }
    }
}
