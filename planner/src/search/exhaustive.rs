//! Search over iterations without a barrier at their end (post-validation), which the bounds do not
//! cover: every combination is priced over its candidate partitions.
//!
//! With several chunks per pipeline rank that settles a combination, as it has no other partitions.
//! With one chunk, or where ranks do not wait for one another at the end, other partitions are
//! possible. Their mean load bounds them, and the search starts from the best configuration that
//! the bounded search finds with a barrier.

use super::queue::{self, named_by_result};
use super::{Effort, Found, Outcome, Progress, Standing};
use crate::partition::Scratch;
use crate::pricing::Configuration;
use crate::pricing::cost_cache::CostCache;
use crate::pricing::listed_cuts::{CutList, is_family};
use crate::pricing::priced::Placed;
use crate::request::Task;
use crate::request::pipeline_choices::PipelineChoices;
use crate::request::restrictions::{Choice, Restrictions};
use crate::request::space::ParallelLayout;
use crate::search::partition_candidates::{BestListed, Limits};
use models::decisions::{Decisions, Vocab};
use models::plan::Proof;
use models::schedule::ScheduleName;
use std::time::Instant;

/// Prices the combinations of the task, of which there are at most
/// [`crate::request::task::MOST_ONE_BY_ONE`].
pub(super) fn run(task: &Task<'_>, progress: Progress<'_>) -> Outcome {
    let begun = Instant::now();
    let space = task.space();
    let cache = CostCache::new(task.model, task.cluster, task.gpus);
    let all: Vec<Decisions> = space
        .layouts()
        .iter()
        .flat_map(|parallel| combinations(parallel, &space.choices(parallel)))
        .collect();
    let family = all.iter().any(|d| is_family(d, task.model.layers));
    let mut proof = Proof { candidates: all.len() as u64, family, ..Proof::default() };
    let mut scratch = Scratch::default();
    let mut best: Option<(Decisions, Placed, f64)> = seed(task, &cache, &mut scratch);
    let mut first_s = best.as_ref().map(|_| begun.elapsed().as_secs_f64());
    let (mut open_s, mut ilp_s) = (f64::INFINITY, 0.0);
    for (n, decisions) in all.into_iter().enumerate() {
        let best_s = best.as_ref().map_or(f64::INFINITY, |(.., best_s)| *best_s);
        let standing = Standing { settled: n as u64, all: proof.candidates, best_s, bound_s: 0.0 };
        progress(standing);
        if task.is_stopped() {
            open_s = 0.0;
            break;
        }
        let bar_s = best.as_ref().map_or(task.cutoff_s, |(.., best_s)| *best_s);
        let Ok(configuration) = Configuration::new(&cache, decisions) else {
            proof.cut_by_time += 1;
            continue;
        };
        let bound_s = configuration.with_overheads_s(configuration.mean_load_s());
        if bound_s >= bar_s {
            proof.cut_by_time += 1;
            continue;
        }
        proof.placed += 1;
        let (listed, settles) = tried(&configuration, task, bar_s, &mut scratch);
        open_s = open_s.min(if settles {
            configuration.with_overheads_s(listed.open_s)
        } else {
            bound_s
        });
        proof.ilps += listed.ilps;
        ilp_s += listed.ilp_s;
        if let Some((placed, pipeline_s)) = listed.best {
            let time_s = configuration.with_overheads_s(pipeline_s);
            first_s = first_s.or(Some(begun.elapsed().as_secs_f64()));
            best = Some((configuration.decisions, placed, time_s));
        }
    }
    let ms_per_ilp = if proof.ilps > 0 { 1e3 * ilp_s / proof.ilps as f64 } else { 0.0 };
    let best_s = best.as_ref().map_or(task.cutoff_s, |(.., best_s)| *best_s);
    proof.proven_optimal = open_s >= best_s;
    proof.gap = if proof.proven_optimal { 0.0 } else { (1.0 - open_s / best_s).max(0.0) };
    proof.searched_gap = proof.gap;
    let limited = task.until.deadline.is_some();
    let effort = Effort { elapsed_s: begun.elapsed().as_secs_f64(), first_s, limited, ms_per_ilp };
    let best = best.and_then(|(decisions, placed, _)| {
        let decisions = named_by_result(decisions, &placed, task.restrictions);
        let configuration = Configuration::new(&cache, decisions).ok()?;
        let priced = configuration.price(&placed, &mut scratch);
        Some(Found { decisions: configuration.decisions, placed, priced })
    });
    Outcome { best, passed: vec![], proof, effort }
}

/// The best configuration of the same schedules with a barrier, priced without one.
fn seed(
    task: &Task<'_>,
    cache: &CostCache<'_>,
    scratch: &mut Scratch,
) -> Option<(Decisions, Placed, f64)> {
    let asked = task.restrictions;
    let alike: Vec<ScheduleName> = asked
        .schedule
        .among(&ScheduleName::ALL)
        .into_iter()
        .filter(|s| s.splits_backward())
        .collect();
    let vocabs: Vec<Vocab> =
        asked.vocab.among(Vocab::ALL).into_iter().filter(|v| !v.over_pipeline()).collect();
    let restrictions = Restrictions {
        schedule: Choice::of(&alike),
        vocab: Choice::of(&vocabs),
        fused_loss: Choice::of(&asked.fused_losses(true)),
        post_validation: Choice::default(),
        ..asked.clone()
    };
    let found = queue::run(&Task { restrictions: &restrictions, ..task.clone() }, &mut |_| {});
    let Found { decisions, placed, .. } = found.best?;
    let decisions = Decisions { post_validation: true, ..decisions };
    let configuration = Configuration::new(cache, decisions).ok()?;
    let priced = configuration.price(&placed, scratch);
    let counts = (priced.fits || task.ignore_memory) && priced.iteration_s < task.cutoff_s;
    counts.then(|| (configuration.decisions.clone(), placed, priced.iteration_s))
}

/// The best candidate partition below `bar_s`, and whether the candidates are all partitions there
/// are.
fn tried(
    configuration: &Configuration<'_>,
    task: &Task<'_>,
    bar_s: f64,
    scratch: &mut Scratch,
) -> (BestListed, bool) {
    let d = &configuration.decisions;
    let list = CutList::of(d.vocab, d.vpp);
    let ranges = configuration.cache.listed_ranges(
        list.unwrap_or(CutList::Family),
        configuration.stages(),
        d.vocab,
    );
    let pipeline_s = if bar_s.is_finite() { configuration.pipeline_s(bar_s) } else { bar_s };
    let ignore_memory = task.ignore_memory;
    let listed = configuration.best_listed(
        &ranges,
        Limits { ignore_memory, ..Limits::below(pipeline_s) },
        scratch,
    );
    (listed, list.is_some() && !d.post_validation)
}

/// All combinations that a parallel layout leaves open.
fn combinations(parallel: &ParallelLayout, choices: &PipelineChoices) -> Vec<Decisions> {
    let mut found = Vec::with_capacity(choices.count() as usize);
    for (schedule, vpp, vocabs) in &choices.schedules {
        for &vocab in vocabs {
            for &recompute in &choices.recompute {
                for &(zero_stage, dp_shard) in &choices.shards {
                    for &offload in &choices.offload {
                        found.extend(choices.rank_order.iter().map(|&rank_order| Decisions {
                            schedule: *schedule,
                            vpp: *vpp,
                            vocab,
                            recompute,
                            zero_stage,
                            dp_shard,
                            offload,
                            rank_order,
                            ..parallel.decisions.clone()
                        }));
                    }
                }
            }
        }
    }
    found
}
