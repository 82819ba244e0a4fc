//! Prices the choices of parameter state of one pipeline, or prunes them by a bound.

use super::layout::LayoutView;
use super::{Allowance, Candidate, Expansion, Paths, SearchNode, Stage, Worker};
use crate::bounds::candidates::ListedBound;
use crate::bounds::closed;
use crate::bounds::pipeline_spec::PipelineSpec;
use crate::bounds::states::StateView;
use crate::bounds::workload::MicroBatchCost;
use crate::partition::dynamic_program::Bounded;
use crate::partition::{Problem, dynamic_program, ilp};
use crate::pricing::Configuration;
use crate::pricing::listed_cuts::{CutList, Ranges};
use crate::pricing::pipelines::PipelineKey;
use crate::pricing::priced::Placed;
use crate::pricing::vocab_times::placed_by_times;
use crate::search::partition_candidates::{BestListed, Limits};
use crate::simulate::CriticalPath;
use models::decisions::{Decisions, RankOrder};
use std::sync::Arc;

impl Expansion {
    /// Records the effort of integer programs of one configuration, and the chains they found.
    pub(super) fn take_program(
        &mut self,
        key: PipelineKey,
        report: &ilp::Report,
        paths: Vec<CriticalPath>,
    ) {
        self.effort += report.effort;
        self.paths.extend(paths.into_iter().map(|path| (key, path)));
    }
}

/// Pipelines kept by [`Worker::stated`]: those of one layout that differ in rank order.
const LAST_SPECS: usize = 4;

/// Multiples of a bound up to which placements are sought in turn.
const AHEAD: [f64; 3] = [1.02, 1.1, 1.5];

impl Worker<'_> {
    /// A pipeline, its micro-batch cost, and the latter with what the parameter state adds to
    /// passes. Configurations that differ in ZeRO stage, shard group and offloading alone follow
    /// one another, mixed with those of another rank order, and share the first two.
    pub(super) fn stated(
        &mut self,
        d: &Decisions,
        view: &StateView,
        parallel: &mut LayoutView,
    ) -> (PipelineSpec, Arc<MicroBatchCost>, MicroBatchCost) {
        let pipeline =
            Decisions { zero_stage: 0, dp_shard: 1, offload: d.offload.of_layers(), ..d.clone() };
        let known = self.last_specs.iter().find(|(of, ..)| *of == pipeline);
        let (spec, plain) = match known {
            Some((_, spec, plain)) => (spec.clone(), Arc::clone(plain)),
            None => {
                let spec = PipelineSpec::new(&self.cache, d, &parallel.layer_costs);
                let plain = match d.vocab.over_pipeline() || !is_usual(d) {
                    true => Arc::new(self.own_work(d, parallel)),
                    false => parallel.work_of(&self.cache, d),
                };
                if self.last_specs.len() == LAST_SPECS {
                    self.last_specs.clear();
                }
                self.last_specs.push((pipeline, spec.clone(), Arc::clone(&plain)));
                (spec, plain)
            }
        };
        let work = view.added_to(&plain, &spec).into_owned();
        (spec, plain, work)
    }

    /// One micro-batch under `d` with its own rank order, on which the all-to-all depends.
    pub(super) fn own_work(&self, d: &Decisions, parallel: &mut LayoutView) -> MicroBatchCost {
        match is_usual(d) {
            true => {
                let work = parallel.work_of(&self.cache, d);
                work.with_passes(&self.cache, d, &parallel.layer_costs)
            }
            false => MicroBatchCost::of(&self.cache, d, &self.cache.layer_costs(d)),
        }
    }

    /// Bound of a pipeline with parameter state `view` whatever the partition, without memory, with
    /// overheads, s.
    pub(super) fn state_s(
        &self,
        spec: &PipelineSpec,
        work: &MicroBatchCost,
        view: &StateView,
    ) -> f64 {
        let first = spec.options()[0];
        let spent_s = work.layers_s(|kind| kind.recompute_s[first]);
        let with_state = view.added_to(work, spec);
        let mean_s = closed::with_state_s(spec, &with_state, view, spent_s);
        self.with_overheads_s(mean_s.max(closed::fullest_rank_s(spec, &with_state, view)))
    }

    /// Prices a configuration whose placements take at least `bound_s`, with overheads.
    pub(super) fn price_state(
        &mut self,
        d: Decisions,
        view: &StateView,
        parallel: &mut LayoutView,
        ((bound_s, best_s), allowed): ((f64, f64), Allowance),
        expansion: &mut Expansion,
    ) {
        let bar_s = expansion.bar_s(best_s);
        let Some(list) = CutList::of(d.vocab, d.vpp) else {
            if bound_s >= bar_s {
                expansion.cut_by_time += 1;
                return;
            }
            expansion.placed += 1;
            return self.place(self.in_own_times(d), bound_s, bar_s, expansion);
        };
        let (spec, plain, work) = self.stated(&d, view, parallel);
        let budget_bytes = self.budget_bytes(&spec, &plain, view);
        let listed_bound = ListedBound { spec: &spec, work: &work, state: view, budget_bytes };
        let (candidates, slack) = (self.candidates(list, &spec), self.slack(list, &spec));
        let step_s = closed::own_step_s(&spec, &work, view);
        let limit_s = self.pipeline_s(bar_s) * slack - step_s;
        let mut below = listed_bound.below(&candidates, limit_s);
        if below.is_empty() {
            expansion.cut_by_time += 1;
            return;
        }
        expansion.placed += 1;
        below.sort_by(|a, b| a.1.total_cmp(&b.1));
        below.truncate(allowed.most_cuts);
        let cuts: Vec<_> =
            below.into_iter().map(|(at, _)| candidates.shapes.list[at].clone()).collect();
        let work = allowed.work.saturating_sub(expansion.effort.work);
        if let Some((mut found, best)) =
            self.place_listed(self.in_own_times(d), &cuts, (bar_s, slack), work)
        {
            found.open_s = found.open_s.max(bound_s);
            if slack > 1.0 {
                expansion.near.extend(best.clone());
            }
            expansion.effort += found.effort;
            expansion.open_s = expansion.open_s.min(found.open_s);
            if best.as_ref().is_some_and(|best| best.iteration_s < bar_s) {
                expansion.best = best;
            }
        }
    }

    /// A configuration with vocabulary passes placed by its own times, where they are.
    fn in_own_times(&self, d: Decisions) -> Decisions {
        if !placed_by_times(&d) {
            return d;
        }
        let own = Configuration::new(&self.cache, d.clone()).map(Configuration::in_own_times);
        own.map_or(d, |configuration| configuration.decisions)
    }

    /// The best of the candidate partitions that takes less than `bar_s` times `slack`.
    fn place_listed(
        &mut self,
        d: Decisions,
        cuts: &[Ranges],
        (bar_s, slack): (f64, f64),
        work: u64,
    ) -> Option<(BestListed, Option<Candidate>)> {
        let configuration = Configuration::new(&self.cache, d).ok()?;
        let limits = Limits {
            cutoff_s: configuration.pipeline_s(bar_s) * slack,
            ignore_memory: self.task.ignore_memory,
            work,
            until: self.task.until,
        };
        let mut found = configuration.best_listed(cuts, limits, &mut self.scratch);
        found.open_s = configuration.with_overheads_s(found.open_s);
        let best = found.best.take();
        let best = best.and_then(|(placed, pipeline_s)| {
            offer(&configuration, placed, pipeline_s, f64::INFINITY)
        });
        Some((found, best))
    }

    /// Local search from placements of one pipeline, fastest first. Each start also tries the
    /// partitions that earlier starts ended in, and is skipped unless it is then faster than the
    /// best so far.
    pub fn climb(&mut self, mut near: Vec<Candidate>) -> Option<Candidate> {
        near.sort_by(|a, b| a.iteration_s.total_cmp(&b.iteration_s));
        let mut cuts: Vec<Ranges> = vec![];
        let mut best: Option<Candidate> = None;
        for start in near {
            if self.task.is_stopped() {
                break;
            }
            let Ok(configuration) = Configuration::new(&self.cache, start.decisions) else {
                continue;
            };
            let (ignore_memory, scratch) = (self.task.ignore_memory, &mut self.scratch);
            let own_s = configuration.pipeline_s(start.iteration_s);
            let until = self.task.until;
            let limits = Limits { ignore_memory, until, ..Limits::below(own_s) };
            let other = configuration.best_listed(&cuts, limits, scratch).best;
            let start = other.unwrap_or((start.placed, own_s));
            let bar_s = best.as_ref().map_or(f64::INFINITY, |best| best.iteration_s);
            if configuration.with_overheads_s(start.1) >= bar_s {
                continue;
            }
            let (placed, pipeline_s) = configuration.hill_climb(start, limits, scratch);
            cuts.push(placed.iter().map(|stage| (stage.start, stage.end)).collect());
            best = offer(&configuration, placed, pipeline_s, bar_s).or(best);
        }
        best
    }

    /// Settles a configuration by the integer program, with no more than what is allowed.
    pub(super) fn solve_program(
        &mut self,
        node: &SearchNode,
        (best_s, allowed): (f64, Allowance),
        paths: &Paths,
    ) -> Expansion {
        let mut expansion = Expansion::default();
        let d = &node.decisions;
        let key = PipelineKey::new(d);
        let known = paths.get(&key).map_or_else(Vec::new, |known| Vec::clone(known));
        let Ok(configuration) = Configuration::new(&self.cache, d.clone()) else {
            return expansion;
        };
        let cutoff_s = configuration.pipeline_s(best_s);
        let Some(problem) = configuration.problem(cutoff_s, self.task.ignore_memory) else {
            return expansion;
        };
        let until = self.task.until.share(allowed.share);
        let limits = ilp::Limits { work: allowed.work, paths: true, until };
        let (report, found) = ilp::solve_with(&problem, known, cutoff_s, limits, &mut self.scratch);
        expansion.take_program(key, &report, found);
        if let Some((choice, value_s)) = &report.best {
            let placed = configuration.placed(&problem, choice);
            expansion.best =
                placed.and_then(|placed| offer(&configuration, placed, *value_s, best_s));
        }
        let bound_s = node.bound_s.max(configuration.with_overheads_s(report.bound_s));
        if !report.proven {
            expansion.open_s = bound_s;
        }
        expansion
    }

    /// Prices the placement that the dynamic program finds, and leaves the configuration to the
    /// integer program where a better placement than the incumbent may remain.
    pub(super) fn place(
        &mut self,
        d: Decisions,
        bound_s: f64,
        bar_s: f64,
        expansion: &mut Expansion,
    ) {
        let Ok(configuration) = Configuration::new(&self.cache, d) else { return };
        let ignore_memory = self.task.ignore_memory;
        // The fewer columns a cutoff leaves, the sooner the dynamic program is done. What it finds
        // below a cutoff is the best of all.
        let solved = |(bound_s, bar_s): (f64, f64), solve: fn(&Problem, f64) -> Option<Bounded>| {
            let ahead = AHEAD.iter().map(|ahead| bound_s * ahead);
            ahead.filter(|cutoff_s| *cutoff_s < bar_s).chain([bar_s]).find_map(|cutoff_s| {
                let cutoff_s = configuration.pipeline_s(cutoff_s);
                let problem = configuration.problem(cutoff_s, ignore_memory)?;
                solve(&problem, cutoff_s).map(|bounded| (problem, bounded))
            })
        };
        let mut programs: Vec<fn(&Problem, f64) -> Option<Bounded>> = vec![dynamic_program::solve];
        if configuration.decisions.vocab.over_pipeline() {
            programs.push(dynamic_program::solve_with_vocab);
        }
        let (mut bound_s, mut bar_s) = (bound_s, bar_s);
        for solve in programs {
            let Some((problem, bounded)) = solved((bound_s, bar_s), solve) else { return };
            bound_s = bound_s.max(configuration.with_overheads_s(bounded.bound_s));
            if bound_s >= bar_s {
                return;
            }
            let value_s = problem.iteration_s(&bounded.choice, &mut self.scratch);
            if let Some(placed) = configuration.placed(&problem, &bounded.choice) {
                let found = offer(&configuration, placed, value_s, bar_s);
                expansion.best = found.or(expansion.best.take());
            }
            bar_s = expansion.bar_s(bar_s);
            if value_s <= bounded.bound_s * (1.0 + ilp::PROOF_TOLERANCE) {
                return;
            }
            let path = problem.critical_path(&bounded.choice, &mut self.scratch);
            expansion.paths.push((PipelineKey::new(&configuration.decisions), path));
        }
        let decisions = configuration.decisions;
        expansion.parts.push(SearchNode { bound_s, decisions, count: 0, stage: Stage::Placed });
    }
}

/// Whether layers cost what they do with the default rank order, for which bounds of layouts are
/// computed. No other order places the ranks that share experts closer together.
pub(super) fn is_usual(d: &Decisions) -> bool {
    d.ep == 1 || d.rank_order == RankOrder::DpInner
}

/// A candidate, if it is faster than `bar_s`.
fn offer(
    configuration: &Configuration<'_>,
    placed: Placed,
    pipeline_s: f64,
    bar_s: f64,
) -> Option<Candidate> {
    let iteration_s = configuration.with_overheads_s(pipeline_s);
    let decisions = || configuration.decisions.clone();
    (iteration_s < bar_s).then(|| Candidate { decisions: decisions(), placed, iteration_s })
}
