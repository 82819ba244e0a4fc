//! Dives: a look for good plans before branch and bound, which prunes by what they find. They prune
//! nothing themselves.

use super::super::expand::Tight;
use super::team::{Answer, Batch, Team};
use super::{Run, WORK_SHARE};
use crate::until::Until;
use rustc_hash::FxHashMap as HashMap;
use std::collections::BTreeMap;

/// Contexts that are dived into at a time.
const DIVES: usize = 16;
/// Dives end after so many batches, and broader ones after so many groups of contexts with the same
/// degrees, that did not improve the incumbent.
const MAX_FAILED_DIVES: usize = 6;
const MAX_FAILED_GROUPS: usize = 2;
/// Pipelines of each parallel layout in a broader dive.
const BREADTH: usize = 4;
/// Micro-batch sizes that a dive considers.
const MICRO_BATCHES: usize = 6;
/// A group counts up to this multiple of the incumbent's time.
const SECOND_BEST: f64 = 1.1;

impl Run<'_> {
    /// Looks for a good first incumbent. Of all contexts with the same degrees the one with the
    /// least bound is followed to its most promising configuration, which is priced. Then the
    /// contexts of the degrees where that went best are looked into more broadly.
    pub(super) fn dive(&mut self, team: &mut Team<'_>, until: Until<'_>) {
        let mut groups: HashMap<[u64; 3], Vec<usize>> = HashMap::default();
        let all = self.contexts.iter().enumerate();
        for (at, context) in all.filter(|(at, _)| self.contexts_s[*at].is_finite()) {
            let d = &context.template;
            groups.entry([d.tp, d.pp, d.cp]).or_default().push(at);
        }
        let bound_s = |at: &usize| self.contexts_s[*at];
        let mut groups: Vec<Vec<usize>> = groups.into_values().collect();
        for group in &mut groups {
            group.sort_by(|a, b| bound_s(a).total_cmp(&bound_s(b)).then(a.cmp(b)));
        }
        groups.sort_by(|a, b| bound_s(&a[0]).total_cmp(&bound_s(&b[0])).then(a.cmp(b)));
        let mut found = self.dive_once(&groups, Tight::LeftOut, team, until);
        // Where memory is short, nothing else may fit.
        let without = found.iter().filter(|(time_s, _)| time_s.is_infinite());
        let left: Vec<_> = without.map(|(_, group)| group.clone()).collect();
        found.extend(self.dive_once(&left, Tight::Followed, team, until));
        found.retain(|(time_s, _)| time_s.is_finite());
        found.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut failed = 0;
        for (_, group) in found {
            if failed == MAX_FAILED_GROUPS {
                break;
            }
            let before_s = self.best_s;
            let nearest = group.iter().take(DIVES).map(|&at| vec![at]).collect();
            self.dive_into(nearest, (BREADTH, Tight::Followed), team, until);
            failed = if self.best_s < before_s { 0 } else { failed + 1 };
        }
    }

    /// Dives into groups of contexts in turn, until too many do not improve the incumbent. Returns
    /// the time found in each group, s.
    fn dive_once(
        &mut self,
        groups: &[Vec<usize>],
        tight: Tight,
        team: &mut Team<'_>,
        until: Until<'_>,
    ) -> Vec<(f64, Vec<usize>)> {
        let (mut found, mut failed) = (vec![], 0);
        for some in groups.chunks(DIVES) {
            if failed == MAX_FAILED_DIVES {
                break;
            }
            let before_s = self.best_s;
            let firsts = some.iter().map(|group| self.by_micro_batch(group)).collect();
            let times_s = self.dive_into(firsts, (1, tight), team, until);
            found.extend(times_s.into_iter().zip(some.iter().cloned()));
            let is_better = self.best_s < before_s || self.best.is_none();
            failed = if is_better { 0 } else { failed + 1 };
        }
        found
    }

    /// Of some contexts, the one with the least bound of each micro-batch size, for some sizes from
    /// the smallest to the largest.
    fn by_micro_batch(&self, group: &[usize]) -> Vec<usize> {
        let mut least: BTreeMap<u64, usize> = BTreeMap::new();
        for &at in group {
            least.entry(self.contexts[at].micro_batch).or_insert(at);
        }
        let least: Vec<_> = least.into_values().collect();
        let most = if self.task.model.moe.is_some() { 3 } else { MICRO_BATCHES };
        let mut spaced: Vec<usize> =
            (0..most).map(|n| n * (least.len() - 1) / (most - 1)).collect();
        spaced.dedup();
        spaced.into_iter().map(|index| least[index]).collect()
    }

    /// Dives into groups of contexts that may be faster than the incumbent; by group, the time
    /// found, s.
    fn dive_into(
        &mut self,
        groups: Vec<Vec<usize>>,
        (breadth, tight): (usize, Tight),
        team: &mut Team<'_>,
        until: Until<'_>,
    ) -> Vec<f64> {
        let mut times_s = vec![f64::INFINITY; groups.len()];
        let mut open = vec![];
        for (number, group) in groups.into_iter().enumerate() {
            let below = group.into_iter().filter(|&at| self.contexts_s[at] < self.best_s);
            let nodes: Vec<_> =
                below.map(|at| self.contexts[at].node(self.contexts_s[at])).collect();
            if !nodes.is_empty() {
                open.push((number, nodes));
            }
        }
        if open.is_empty() || until.is_over() || self.is_enough() {
            return times_s;
        }
        self.expansions += open.len() as u64;
        // Groups compare by what they find, whether or not it is an incumbent.
        let bar_s = if breadth == 1 { self.best_s * SECOND_BEST } else { self.best_s };
        let (numbers, dives): (Vec<_>, Vec<_>) = open.into_iter().unzip();
        let limits = (bar_s, self.work_left() / WORK_SHARE);
        team.send(Batch::Dives(dives, limits, (breadth, tight)));
        for (answer, number) in team.receive().into_iter().zip(numbers) {
            let Answer::Expansion(expansion) = answer else { continue };
            times_s[number] =
                expansion.best.as_ref().map_or(f64::INFINITY, |best| best.iteration_s);
            self.programs += expansion.effort;
            self.offer(expansion.best);
        }
        times_s
    }
}
