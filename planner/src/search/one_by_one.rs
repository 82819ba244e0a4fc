//! Schedules that no bound speaks of: every combination is priced, over the listed placements.

use super::queue::named_by_result;
use super::{Found, Outcome, Progress, Proof, Task};
use crate::case::Case;
use crate::case::family::List;
use crate::case::ground::Ground;
use crate::case::priced::Placed;
use crate::placement::Scratch;
use crate::space::{Inner, Node};
use models::decisions::Decisions;
use std::time::Instant;

/// Prices the task's combinations; [`super::MOST_ONE_BY_ONE`] at most are asked for.
pub(super) fn run(task: &Task<'_>, progress: Progress<'_>) -> Outcome {
    let begun = Instant::now();
    let space = task.space();
    let ground = Ground::new(task.model, task.cluster, task.gpus);
    let all: Vec<Decisions> =
        space.nodes().iter().flat_map(|node| combinations(node, &space.inner(node))).collect();
    let mut proof = Proof { candidates: all.len() as u64, ..Proof::default() };
    let mut scratch = Scratch::default();
    let mut best: Option<(Decisions, Placed, f64)> = None;
    for (n, decisions) in all.into_iter().enumerate() {
        progress(n as u64, proof.candidates);
        let bar_s = best.as_ref().map_or(task.cutoff_s, |(.., best_s)| *best_s);
        let Ok(case) = Case::new(&ground, decisions) else { continue };
        proof.placed += 1;
        match fastest(&case, task, bar_s, &mut scratch) {
            Some((placed, time_s)) => best = Some((case.decisions, placed, time_s)),
            None => proof.cut_by_time += 1,
        }
    }
    proof.cut_by_time += proof.candidates - proof.placed;
    // Nothing bounds placements that are not listed.
    proof.gap = 1.0;
    proof.elapsed_s = begun.elapsed().as_secs_f64();
    let best = best.and_then(|(decisions, placed, _)| {
        let decisions = named_by_result(decisions, &placed, task.restrictions);
        let case = Case::new(&ground, decisions).ok()?;
        let priced = case.price(&placed, &mut scratch);
        Some(Found { decisions: case.decisions, placed, priced })
    });
    Outcome { best, proof }
}

/// The fastest listed placement below a time, finished, s.
fn fastest(
    case: &Case<'_>,
    task: &Task<'_>,
    bar_s: f64,
    scratch: &mut Scratch,
) -> Option<(Placed, f64)> {
    let d = &case.decisions;
    let list = List::of(d.vocab, d.vpp).unwrap_or(List::Family);
    let ranges = case.ground.listed_ranges(list, case.stages(), d.vocab);
    let core_s = if bar_s.is_finite() { case.core_s(bar_s) } else { bar_s };
    let (placed, core_s) = case.best_listed(&ranges, core_s, task.ignore_memory, scratch).best?;
    Some((placed, case.finish_s(core_s)))
}

/// All that a node leaves open.
fn combinations(node: &Node, inner: &Inner) -> Vec<Decisions> {
    let mut found = Vec::with_capacity(inner.count() as usize);
    for (schedule, vpp, vocabs) in &inner.schedules {
        for &vocab in vocabs {
            for &recompute in &inner.recompute {
                for &(zero_stage, dp_shard) in &inner.shards {
                    for &offload in &inner.offload {
                        found.extend(inner.rank_order.iter().map(|&rank_order| Decisions {
                            schedule: *schedule,
                            vpp: *vpp,
                            vocab,
                            recompute,
                            zero_stage,
                            dp_shard,
                            offload,
                            rank_order,
                            ..node.decisions.clone()
                        }));
                    }
                }
            }
        }
    }
    found
}
