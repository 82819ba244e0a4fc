//! Brute force: the best plan over every combination of decisions and every placement.

use models::decisions::{Decisions, RecomputePolicy, Vocab};
use models::model::ModelSpec;
use planner::partition::Scratch;
use planner::pricing::Configuration;
use planner::pricing::cost_cache::CostCache;
use planner::pricing::listed_cuts::{Ranges, few_cuts};
use planner::pricing::priced::{Placed, PlacedStage, Priced};
use planner::pricing::recompute_ladder::{LadderOrder, RecomputeLadder};
use planner::pricing::recompute_split::RecomputeSplit;
use planner::request::Task;
use planner::request::pipeline_choices::PipelineChoices;
use planner::request::space::ParallelLayout;

/// The best plan, and the numbers of combinations and placements enumerated.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// Decisions, placement and price of the fastest plan that fits.
    pub best: Option<(Decisions, Placed, Priced)>,
    /// Number of combinations.
    pub combinations: u64,
    /// Number of placements priced.
    pub placements: u64,
}

/// Prices everything; `None` if that takes more than `most` placements.
pub fn best(task: &Task<'_>, most: u64) -> Option<Answer> {
    let cache = CostCache::new(task.model, task.cluster, task.gpus);
    let mut answer = Answer::default();
    let scratch = &mut Scratch::default();
    for decisions in combinations(task) {
        answer.combinations += 1;
        let Ok(case) = Configuration::new(&cache, decisions) else { continue };
        let case = case.in_own_times();
        for placed in placements(&case) {
            answer.placements += 1;
            if answer.placements > most {
                return None;
            }
            let priced = case.price(&placed, scratch);
            let best_s =
                answer.best.as_ref().map_or(f64::INFINITY, |(.., priced)| priced.iteration_s);
            if priced.fits && priced.iteration_s < best_s {
                answer.best = Some((case.decisions.clone(), placed, priced));
            }
        }
    }
    Some(answer)
}

/// Every combination of the task's space.
pub fn combinations(task: &Task<'_>) -> Vec<Decisions> {
    let space = task.space();
    let layouts = space.layouts();
    layouts.iter().flat_map(|parallel| inside(parallel, &space.choices(parallel))).collect()
}

fn inside(parallel: &ParallelLayout, choices: &PipelineChoices) -> Vec<Decisions> {
    let mut found = vec![];
    for (schedule, vpp, vocabs) in &choices.schedules {
        for &(vocab, fused_loss) in vocabs {
            for &recompute in &choices.recompute {
                for &(zero_stage, dp_shard) in &choices.shards {
                    for &offload in &choices.offload {
                        for &rank_order in &choices.rank_order {
                            found.push(Decisions {
                                schedule: *schedule,
                                vpp: *vpp,
                                vocab,
                                fused_loss,
                                recompute,
                                zero_stage,
                                dp_shard,
                                offload,
                                rank_order,
                                ..parallel.decisions.clone()
                            });
                        }
                    }
                }
            }
        }
    }
    found
}

/// Every placement that a configuration allows, lazily, because there may be many.
///
/// Cuts: all if the solver places layers and, with several chunks a pipeline rank, if they are few;
/// otherwise those of the candidate list. Recompute splits: all, except that with many cuts of
/// several chunks, or with bidirectional schedules, each pipeline rank has one level for all its
/// stages.
pub fn placements<'a>(case: &'a Configuration<'_>) -> Box<dyn Iterator<Item = Placed> + 'a> {
    let (layers, stages) = (case.cache.model.layers, case.stages());
    let vocab = case.decisions.vocab;
    let listed = matches!(vocab, Vocab::FirstLast | Vocab::Redistribute);
    let few = case.decisions.vpp == 1 || few_cuts(layers, stages);
    let open = few && case.decisions.layout().copies() == 1;
    let ranges = match case.listed_ranges() {
        Some(list) if listed || !few => list,
        _ => every_cut(case),
    };
    let all = ranges.into_iter();
    if open {
        Box::new(all.flat_map(|ranges| with_mixes(case, &ranges)))
    } else {
        Box::new(all.flat_map(|ranges| at_every_level(case, &ranges)))
    }
}

/// Every cut with every recompute mix, whatever the candidate list says; `None` if there are more
/// than `most`.
pub fn all_placements(case: &Configuration<'_>, most: usize) -> Option<Vec<Placed>> {
    let mut found = vec![];
    for ranges in every_cut(case) {
        found.extend(with_mixes(case, &ranges));
        if found.len() > most {
            return None;
        }
    }
    Some(found)
}

/// Every cut of a case's layers into its stages.
pub fn every_cut(case: &Configuration<'_>) -> Vec<Ranges> {
    let ends_hold_vocab = !case.decisions.vocab.over_pipeline();
    cuts(case.cache.model.layers, case.stages(), ends_hold_vocab)
}

/// Placements in which all pipeline ranks use the same recompute ladder, and each has one level of
/// it for all its stages.
pub fn at_every_level(case: &Configuration<'_>, ranges: &Ranges) -> Vec<Placed> {
    let chains = RecomputeLadder::orders(case.decisions.recompute).iter();
    chains.flat_map(|&chain| on_chain(case, ranges, chain)).collect()
}

fn on_chain(case: &Configuration<'_>, ranges: &Ranges, chain: LadderOrder) -> Vec<Placed> {
    let ranks = case.ranks();
    let ladder: Vec<RecomputeLadder> =
        (0..ranks).map(|rank| case.ladder_of(rank, ranges, chain)).collect();
    let mut chosen: Vec<Vec<usize>> = vec![vec![]];
    for own in &ladder {
        let more = |before: &Vec<usize>| {
            let before = before.clone();
            (0..own.count()).map(move |level| [before.as_slice(), &[level]].concat())
        };
        chosen = chosen.iter().flat_map(more).collect();
    }
    let stage = |(stage, &(start, end)): (usize, &(usize, usize)), chosen: &[usize]| {
        // Pipeline ranks that mirror each other hold the same stages.
        let rank = case.holders_of(stage).min().unwrap_or(0);
        let counts = case.cache.layers.counts(start, end);
        PlacedStage { start, end, recompute: ladder[rank].recompute(chosen[rank], &counts) }
    };
    let placed =
        |chosen: &Vec<usize>| ranges.iter().enumerate().map(|s| stage(s, chosen)).collect();
    chosen.iter().map(placed).collect()
}

/// Every cut of the layers into stages. Of several stages only the first and last may be empty, and
/// only if they hold a vocabulary layer.
fn cuts(layers: usize, stages: usize, ends_hold_vocab: bool) -> Vec<Vec<(usize, usize)>> {
    let mut found = vec![vec![]];
    for stage in 0..stages {
        let end_stage = stage == 0 || stage + 1 == stages;
        let fewest = usize::from(!(end_stage && ends_hold_vocab && stages > 1));
        found = found
            .into_iter()
            .flat_map(|cut: Vec<(usize, usize)>| {
                let start = cut.last().map_or(0, |range| range.1);
                (start + fewest..=layers).map(move |end| [cut.as_slice(), &[(start, end)]].concat())
            })
            .collect();
    }
    found.retain(|cut| cut.last().is_some_and(|range| range.1 == layers));
    found
}

fn with_mixes(case: &Configuration<'_>, ranges: &[(usize, usize)]) -> Vec<Placed> {
    let mut found: Vec<Placed> = vec![vec![]];
    for &(start, end) in ranges {
        let recompute_choices =
            recompute_choices(case.cache.model, start, end, case.decisions.recompute);
        found = found
            .iter()
            .flat_map(|placed| {
                recompute_choices.iter().map(move |recompute| {
                    let stage = PlacedStage { start, end, recompute: recompute.clone() };
                    [placed.as_slice(), &[stage]].concat()
                })
            })
            .collect();
    }
    found
}

/// Every recompute mix of layers `start..end`, by kind in order of first appearance in the model.
fn recompute_choices(
    model: &ModelSpec,
    start: usize,
    end: usize,
    recompute: RecomputePolicy,
) -> Vec<RecomputeSplit> {
    let mut kinds = vec![];
    for layer in 0..model.layers {
        let kind = model.layer_kind(layer);
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    let mut found: Vec<RecomputeSplit> = vec![vec![]];
    for kind in kinds {
        let count = (start..end).filter(|&layer| model.layer_kind(layer) == kind).count();
        let splits = splits(count, recompute);
        found = found
            .iter()
            .flat_map(|recompute| {
                splits.iter().map(move |split| [recompute.as_slice(), &[*split]].concat())
            })
            .collect();
    }
    found
}

fn splits(count: usize, recompute: RecomputePolicy) -> Vec<[usize; 3]> {
    match recompute {
        RecomputePolicy::None => vec![[count, 0, 0]],
        RecomputePolicy::Selective => vec![[0, count, 0]],
        RecomputePolicy::Full => vec![[0, 0, count]],
        RecomputePolicy::PerLayer => (0..=count)
            .flat_map(|full| (0..=count - full).map(move |some| [count - full - some, some, full]))
            .collect(),
    }
}
