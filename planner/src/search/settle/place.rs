//! The states of one pipeline: each cut by a bound, or placed.

use super::node::NodeView;
use super::{Candidate, Item, Open, Paths, Settled, Worker};
use crate::bounds::closed;
use crate::bounds::cuts::Cutter;
use crate::bounds::listed::Lister;
use crate::bounds::states::StateView;
use crate::bounds::work::{Line, Work};
use crate::case::Case;
use crate::case::family::{Limits, List, Listed, Ranges};
use crate::case::ground::{Ground, Sheet};
use crate::case::pipelines::PipelineKey;
use crate::case::priced::Placed;
use crate::case::ways::fixed_durations;
use crate::cost::state::LocalParams;
use crate::placement::{dynamic, ilp};
use crate::simulate::CriticalPath;
use models::decisions::Decisions;
use std::rc::Rc;

impl Settled {
    /// What came of listed placements of a configuration, of which some may be `near` the best time.
    fn take_listed(
        &mut self,
        key: PipelineKey,
        found: Listed,
        best: Option<Candidate>,
        bar_s: f64,
    ) {
        self.ilps += found.ilps;
        self.ilp_s += found.ilp_s;
        self.work += found.work;
        self.open_s = self.open_s.min(found.open_s);
        self.paths.extend(found.paths.into_iter().map(|path| (key, path)));
        if best.as_ref().is_some_and(|best| best.iteration_s < bar_s) {
            self.best = best;
        }
    }
}

/// So many choices of states are first looked at as one.
const WORTH_A_LOOK: usize = 3;

impl Worker<'_> {
    /// Settles every ZeRO stage, shard group, offloading and rank order on one pipeline.
    pub(super) fn settle_states(
        &mut self,
        item: &Item,
        node: &mut NodeView,
        best_s: f64,
        paths: &Paths,
    ) -> Settled {
        let (line, work) = self.line(node, &item.decisions);
        let states = Rc::clone(&node.states);
        let mut settled = Settled::default();
        let bound_s = |view: &StateView| self.state_s(&line, &work, view).max(item.bound_s);
        let mut groups: Vec<_> =
            states.groups.iter().map(|group| (bound_s(&group.least), group)).collect();
        groups.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (least_s, group) in groups {
            let bar_s = settled.bar_s(best_s);
            let mut views = vec![];
            if least_s < bar_s {
                let bound_s = |view| self.state_s(&line, &work, view).max(item.bound_s);
                views.extend(group.views.iter().map(|view| (bound_s(view), view)));
                views.retain(|(bound_s, _)| *bound_s < bar_s);
            }
            let d = group.least.of(&item.decisions);
            if views.len() >= WORTH_A_LOOK && self.is_beyond(&d, &group.least, node, bar_s) {
                views.clear();
            }
            settled.cut_by_time += (group.views.len() - views.len()) as u64;
            views.sort_by(|a, b| a.0.total_cmp(&b.0));
            for (bound_s, view) in views {
                if bound_s >= settled.bar_s(best_s) {
                    settled.cut_by_time += 1;
                } else {
                    let d = view.of(&item.decisions);
                    self.settle_state(d, view, node, (bound_s, best_s), paths, &mut settled);
                }
            }
        }
        settled
    }

    /// Whether a pipeline is cut under states that no choice of a group undercuts.
    fn is_beyond(&mut self, d: &Decisions, least: &StateView, node: &NodeView, bar_s: f64) -> bool {
        let (line, plain, work) = self.stated(d, least, node);
        let mean = mean_params(&line, &work);
        let limit_s = self.core_s(bar_s) - least.step_of_s(mean, line.chunks);
        let budget_bytes = self.budget_bytes(&line, &plain, least);
        match List::of(d.vocab, d.vpp) {
            Some(list) => {
                let lister = Lister { line: &line, work: &work, state: least, budget_bytes };
                let limit_s = limit_s * self.slack(list, &line);
                !lister.is_below(&self.members(list, &line), limit_s)
            }
            None => {
                let layers = &self.ground.layers;
                let cutter = Cutter::new(&line, &work, least, layers, budget_bytes);
                cutter.in_made_order(&self.ground).solve(limit_s).is_none()
            }
        }
    }

    /// A pipeline, its work, and the same with what states add to its passes.
    fn stated(&self, d: &Decisions, view: &StateView, node: &NodeView) -> (Line, Rc<Work>, Work) {
        let line = Line::new(&self.ground, d, &node.sheet);
        let plain = match d.vocab.over_pipeline() {
            true => Rc::new(Work::of(&self.ground, d, &node.sheet)),
            false => Rc::clone(&node.work),
        };
        let work = view.added_to(&plain, &line);
        (line, plain, work)
    }

    /// A pipeline under states, memory aside, finished, s.
    pub(super) fn state_s(&self, line: &Line, work: &Work, view: &StateView) -> f64 {
        let p = line.devices as f64;
        let mean = mean_params(line, work);
        let first = line.options()[0];
        let layers_s = work.layers_s(|kind| kind.load_s() + kind.recompute_s[first]);
        let passes_s = view.in_all_passes_s(work, line) + line.m() * layers_s;
        let mean_s = passes_s / p + line.m() * line.passes_s() + view.tail_of_s(mean, line.chunks);
        self.finish_s(mean_s + view.step_of_s(mean, line.chunks))
    }

    pub(super) fn settle_state(
        &mut self,
        d: Decisions,
        view: &StateView,
        node: &NodeView,
        (bound_s, best_s): (f64, f64),
        paths: &Paths,
        settled: &mut Settled,
    ) {
        let bar_s = settled.bar_s(best_s);
        let (line, plain, work) = self.stated(&d, view, node);
        let budget = self.task.cluster.usable_bytes() - plain.workspace_bytes;
        let least = closed::least_bytes(&line, &plain, view.bytes);
        if !self.task.ignore_memory && least > budget * (1.0 + 1e-9) {
            settled.cut_by_memory += 1;
            return;
        }
        let mean = mean_params(&line, &work);
        let step_s = view.step_of_s(mean, line.chunks);
        if let Some(list) = List::of(d.vocab, d.vpp) {
            let budget_bytes = self.budget_bytes(&line, &plain, view);
            let lister = Lister { line: &line, work: &work, state: view, budget_bytes };
            let members = self.members(list, &line);
            let slack = self.slack(list, &line);
            let limit_s = self.core_s(bar_s) * slack - step_s;
            let mut below = lister.below(&members, limit_s);
            let key = PipelineKey::new(&d);
            let known = known_paths(&key, paths, &settled.paths);
            below.retain(|(at, _)| lister.longest_s(&members, *at, &known) < limit_s);
            if below.is_empty() {
                settled.cut_by_time += 1;
                return;
            }
            settled.placed += 1;
            below.sort_by(|a, b| a.1.total_cmp(&b.1));
            let cuts: Vec<_> =
                below.into_iter().map(|(at, _)| members.shapes.list[at].clone()).collect();
            if let Some((found, best)) = self.place_listed(d, &cuts, bar_s, &known, slack) {
                self.work = self.work.saturating_sub(found.work);
                if slack > 1.0 {
                    settled.near.extend(best.clone());
                }
                settled.take_listed(key, found, best, bar_s);
            }
            return;
        }
        let mut core_s = self.placed_s(&line, &work, view, bar_s) + step_s;
        if line.chunks == 1 && self.finish_s(core_s) < bar_s {
            let known = known_paths(&PipelineKey::new(&d), paths, &settled.paths);
            core_s = core_s.max(self.chains_s(&d, &node.sheet, view, bar_s, &known) + step_s);
        }
        let bound_s = bound_s.max(self.finish_s(core_s));
        if bound_s >= bar_s {
            settled.cut_by_time += 1;
            return;
        }
        settled.placed += 1;
        self.place(d, bound_s, bar_s, settled);
    }

    /// The longest of known chains of a combination, s; infinite where no cut lies below `bar_s`.
    pub(super) fn chains_s(
        &self,
        d: &Decisions,
        sheet: &Sheet,
        view: &StateView,
        bar_s: f64,
        known: &[&CriticalPath],
    ) -> f64 {
        if known.is_empty() || List::of(d.vocab, d.vpp).is_some() {
            return 0.0;
        }
        let line = Line::new(&self.ground, d, sheet);
        let plain = Work::of(&self.ground, d, sheet);
        let budget = self.budget_bytes(&line, &plain, view);
        let work = view.added_to(&plain, &line);
        let fixed = fixed_durations(&self.ground, d, sheet);
        let cutter = Cutter::new(&line, &work, view, &self.ground.layers, budget);
        let cutter = cutter.in_made_order(&self.ground);
        let Some(cuts) = cutter.solve(self.core_s(bar_s)) else { return f64::INFINITY };
        let path_s = |path: &&CriticalPath| cutter.path_s(&cuts, path, path.length_s(&fixed));
        known.iter().map(path_s).fold(0.0, f64::max)
    }

    /// Whether known chains leave nothing of an open combination below the best time.
    pub fn is_cut_by(&self, d: &Decisions, best_s: f64, known: &[CriticalPath]) -> bool {
        let sheet = self.ground.sheet(d);
        let view = StateView::new(&self.ground, d, &sheet.params);
        let mean = sheet_params(&self.ground, &sheet) * (1.0 / d.pp as f64);
        let known: Vec<_> = known.iter().collect();
        let core_s = self.chains_s(d, &sheet, &view, best_s, &known);
        self.finish_s(core_s + view.step_of_s(mean, 1)) >= best_s
    }

    /// The best of listed placements that takes less than `bar_s`, times the slack.
    fn place_listed(
        &mut self,
        d: Decisions,
        cuts: &[Ranges],
        bar_s: f64,
        known: &[&CriticalPath],
        slack: f64,
    ) -> Option<(Listed, Option<Candidate>)> {
        let case = Case::new(&self.ground, d).ok()?;
        let limits = Limits {
            cutoff_s: case.core_s(bar_s) * slack,
            ignore_memory: self.task.ignore_memory,
            known,
            work: self.work,
        };
        let mut found = case.best_listed(cuts, limits, &mut self.scratch);
        found.open_s = case.finish_s(found.open_s);
        let best = found.best.take();
        let best = best.and_then(|(placed, core_s)| offer(&case, placed, core_s, f64::INFINITY));
        Some((found, best))
    }

    /// Where moves of layers lead from placements of one pipeline, the fastest first. The first starts from its own
    /// cut; another goes on only where its cut, or one that was led to before, is faster than all so far.
    pub fn climb(&mut self, mut near: Vec<Candidate>) -> Option<Candidate> {
        near.sort_by(|a, b| a.iteration_s.total_cmp(&b.iteration_s));
        let mut cuts: Vec<Ranges> = vec![];
        let mut best: Option<Candidate> = None;
        for start in near {
            let Ok(case) = Case::new(&self.ground, start.decisions) else { continue };
            let (ignore_memory, scratch) = (self.task.ignore_memory, &mut self.scratch);
            let own_s = case.core_s(start.iteration_s);
            let limits = Limits { ignore_memory, ..Limits::below(own_s) };
            let other = case.best_listed(&cuts, limits, scratch).best;
            let start = other.unwrap_or((start.placed, own_s));
            let bar_s = best.as_ref().map_or(f64::INFINITY, |best| best.iteration_s);
            if case.finish_s(start.1) >= bar_s {
                continue;
            }
            let (placed, core_s) = case.downhill(start, ignore_memory, scratch);
            cuts.push(placed.iter().map(|stage| (stage.start, stage.end)).collect());
            best = offer(&case, placed, core_s, bar_s).or(best);
        }
        best
    }

    /// Looks for a good placement of a combination, and leaves it open where a better one than the best so
    /// far may still be hidden in it.
    pub(super) fn place(&mut self, d: Decisions, bound_s: f64, bar_s: f64, settled: &mut Settled) {
        let Ok(case) = Case::new(&self.ground, d) else { return };
        let cutoff_s = case.core_s(bar_s);
        let ignore_memory = self.task.ignore_memory;
        let Some(problem) = case.problem(cutoff_s, ignore_memory) else { return };
        let Some(bounded) = dynamic::solve(&problem) else { return };
        let bound_s = bound_s.max(case.finish_s(bounded.bound_s));
        if bound_s >= bar_s {
            return;
        }
        let value_s = problem.iteration_s(&bounded.choice, &mut self.scratch);
        if let Some(placed) = case.placed(&problem, &bounded.choice) {
            settled.best = offer(&case, placed, value_s, bar_s).or(settled.best.take());
        }
        if value_s > bounded.bound_s * (1.0 + ilp::PROOF_TOLERANCE) {
            let path = problem.critical_path(&bounded.choice, &mut self.scratch);
            settled.paths.push((PipelineKey::new(&case.decisions), path));
            settled.open.push(Open { decisions: case.decisions, bound_s });
        }
    }
}

/// Chains of a pipeline, those found just now among them.
fn known_paths<'p>(
    key: &PipelineKey,
    paths: &'p Paths,
    own: &'p [(PipelineKey, CriticalPath)],
) -> Vec<&'p CriticalPath> {
    let own = own.iter().filter(|(of, _)| of == key).map(|(_, path)| path);
    paths.get(key).into_iter().flatten().chain(own).collect()
}

/// A placement that is faster than `bar_s`.
fn offer(case: &Case<'_>, placed: Placed, core_s: f64, bar_s: f64) -> Option<Candidate> {
    let iteration_s = case.finish_s(core_s);
    let decisions = || case.decisions.clone();
    (iteration_s < bar_s).then(|| Candidate { decisions: decisions(), placed, iteration_s })
}

/// Parameters of the devices' layers, on average.
fn mean_params(line: &Line, work: &Work) -> LocalParams {
    work.params() * (line.copies() as f64 / line.devices as f64)
}

/// Parameters of all layers.
fn sheet_params(ground: &Ground<'_>, sheet: &Sheet) -> LocalParams {
    let counts = ground.layers.between(0, ground.layers.len());
    let all = sheet.params.iter().zip(counts);
    all.fold(LocalParams::default(), |sum, (&params, count)| sum + params * count as f64)
}
