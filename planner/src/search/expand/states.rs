//! Expands a pipeline into its choices of parameter state: ZeRO stage, shard group, offloading and
//! rank order, least bound first.

use super::layout::LayoutView;
use super::place::is_usual;
use super::{Allowance, Expansion, SearchNode, Stage, Worker};
use crate::bounds::closed;
use crate::bounds::states::{ShardGroup, StateView};
use crate::pricing::listed_cuts::CutList;
use models::decisions::Decisions;
use std::sync::Arc;

/// The choices of parameter state of a pipeline that are open; `None` before they are bounded.
#[derive(Clone, Debug, Default)]
pub(in crate::search) struct StateBounds(Option<Arc<[StateBound]>>);

/// A choice with its bound.
#[derive(Clone, Copy, Debug)]
struct StateBound {
    /// Admissible, with overheads, s.
    bound_s: f64,
    source: Source,
    /// Index of its group, and its own in the group.
    at: (u16, u16),
}

/// What the bound of a choice comes from, the cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// Degrees, load, and seconds and bytes per parameter.
    Rates,
    /// The placements with the least of its group in every respect.
    Group,
    /// Its placements.
    Placement,
}

/// How far beyond its bound a pipeline is looked into at a time, as a factor. What is put back may
/// be pruned in the meantime.
const PIPELINE_LOOK_AHEAD: f64 = 1.02;
/// From this many choices on, a group is first bounded as a whole.
const WORTH_A_LOOK: usize = 3;

impl Worker<'_> {
    /// Settles the choices of parameter state of a pipeline that may take hardly longer than its
    /// bound. The others are put back.
    pub(super) fn expand_states(
        &mut self,
        node: &SearchNode,
        StateBounds(known): &StateBounds,
        parallel: &mut LayoutView,
        (best_s, allowed): (f64, Allowance),
    ) -> Expansion {
        let states = Arc::clone(&parallel.states);
        let mut expansion = Expansion::default();
        let mut open = match known {
            Some(known) => known.to_vec(),
            None => self.bound_states(node, &states.groups, parallel, best_s),
        };
        expansion.cut_by_time += node.count.saturating_sub(open.len() as u64);
        let limit_s = PIPELINE_LOOK_AHEAD * node.bound_s;
        loop {
            let bar_s = expansion.bar_s(best_s);
            let before = open.len();
            open.retain(|state| state.bound_s < bar_s);
            expansion.cut_by_time += (before - open.len()) as u64;
            let all = open.iter().copied().enumerate();
            let least = all.min_by(|a, b| a.1.bound_s.total_cmp(&b.1.bound_s));
            let Some((index, state)) = least else { break };
            if state.bound_s >= limit_s || self.task.is_stopped() {
                let count = open.len() as u64;
                let bound_s = state.bound_s.max(node.bound_s);
                let stage = Stage::States(StateBounds(Some(Arc::from(open))));
                expansion.parts.push(SearchNode { bound_s, count, stage, ..node.clone() });
                break;
            }
            let group = &states.groups[usize::from(state.at.0)];
            let view = &group.views[usize::from(state.at.1)];
            let d = view.of(&node.decisions);
            match state.source {
                Source::Rates => self.tighten_group(&mut open, state, group, (&d, parallel), bar_s),
                Source::Group => match self.placed_state_s(&d, view, parallel, bar_s) {
                    Some(placed_s) => {
                        let bound_s = placed_s.max(state.bound_s);
                        open[index] = StateBound { bound_s, source: Source::Placement, ..state };
                    }
                    None => {
                        expansion.cut_by_memory += 1;
                        open.remove(index);
                    }
                },
                Source::Placement => {
                    open.remove(index);
                    let within = (state.bound_s, best_s);
                    self.price_state(d, view, parallel, (within, allowed), &mut expansion);
                }
            }
        }
        expansion
    }

    /// The choices whose bound from rates lies below `best_s`.
    fn bound_states(
        &mut self,
        node: &SearchNode,
        groups: &[ShardGroup],
        parallel: &mut LayoutView,
        best_s: f64,
    ) -> Vec<StateBound> {
        let (spec, usual) = self.spec(parallel, &node.decisions);
        let mut other = |view: &StateView| {
            let d = view.of(&node.decisions);
            (!is_usual(&d)).then(|| self.own_work(&d, parallel))
        };
        let others = groups.iter().map(|group| &group.least).find_map(&mut other);
        let bound_s = |view: &StateView| {
            let own = others.as_ref().filter(|_| !is_usual(&view.of(&node.decisions)));
            self.state_s(&spec, own.unwrap_or(&usual), view).max(node.bound_s)
        };
        let mut open = vec![];
        for (at, group) in (0..).zip(groups) {
            if bound_s(&group.least) < best_s {
                let of = |(own, view)| StateBound {
                    bound_s: bound_s(view),
                    source: Source::Rates,
                    at: (at, own),
                };
                open.extend((0..).zip(&group.views).map(of).filter(|state| state.bound_s < best_s));
            }
        }
        open
    }

    /// Bounds the placements of all choices in the group of `state` at once, where there are
    /// several.
    fn tighten_group(
        &mut self,
        open: &mut [StateBound],
        state: StateBound,
        group: &ShardGroup,
        (d, parallel): (&Decisions, &mut LayoutView),
        bar_s: f64,
    ) {
        let (rates, own) = (Source::Rates, state.at.0);
        let alike = |state: &&mut StateBound| state.at.0 == own && state.source == rates;
        let mut alike: Vec<_> = open.iter_mut().filter(alike).collect();
        let least_s = match alike.len() >= WORTH_A_LOOK {
            true => self.placed_state_s(d, &group.least, parallel, bar_s).unwrap_or(0.0),
            false => 0.0,
        };
        for state in &mut alike {
            state.bound_s = state.bound_s.max(least_s);
            state.source = Source::Group;
        }
    }

    /// Bound of the placements of a configuration, with overheads, s; `None` where its parameter
    /// state does not fit. A value of `limit_s` or more only proves that none is faster.
    pub(super) fn placed_state_s(
        &mut self,
        d: &Decisions,
        view: &StateView,
        parallel: &mut LayoutView,
        limit_s: f64,
    ) -> Option<f64> {
        let (spec, plain, work) = self.stated(d, view, parallel);
        let budget = self.task.cluster.usable_bytes() - plain.workspace_bytes;
        let least = closed::least_bytes(&spec, &plain, view);
        if !self.task.ignore_memory && least > budget * (1.0 + 1e-9) {
            return None;
        }
        // Local search may start from what is slower by this much, as in `price_state`.
        let slack = CutList::of(d.vocab, d.vpp).map_or(1.0, |list| self.slack(list, &spec));
        let step_s = closed::own_step_s(&spec, &work, view) / slack;
        let limit_s = self.with_overheads_s(self.pipeline_s(limit_s) - step_s);
        let placed_s = self.placed_s(&spec, &work, view, limit_s);
        Some(self.with_overheads_s(placed_s + step_s))
    }
}
