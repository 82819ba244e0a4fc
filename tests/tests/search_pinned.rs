//! Random full pinnings of three large requests: none that fits is estimated faster than the plan.

use meshwright_tests::instances;
use meshwright_tests::random::Random;
use models::decisions::Decisions;
use planner::partition::{Scratch, dynamic_program};
use planner::pricing::Configuration;
use planner::pricing::cost_cache::CostCache;
use planner::pricing::listed_cuts::Ranges;
use planner::pricing::priced::{Placed, PlacedStage};
use planner::pricing::recompute_ladder::RecomputeLadder;
use planner::request::Task;
use planner::request::pipeline_choices::PipelineChoices;
use planner::request::restrictions::Restrictions;
use planner::request::space::{ParallelLayout, Space};
use planner::search::search;

#[test]
fn no_pinning_of_llama70b_beats_the_plan() {
    none_is_faster("llama70b", "dgx_h100", 16_384);
}

#[test]
fn no_pinning_of_deepseek_v3_beats_the_plan() {
    none_is_faster("deepseek_v3", "dgx_h100", 2_048);
}

#[test]
fn no_pinning_of_gpt_1t_beats_the_plan() {
    none_is_faster("gpt_1t", "selene", 3_072);
}

fn none_is_faster(model: &str, cluster: &str, gpus: u64) {
    let model = models::model::shipped(model).and_then(Result::ok).expect("shipped models read");
    let cluster =
        models::cluster::shipped(cluster).and_then(Result::ok).expect("shipped clusters read");
    let restrictions = Restrictions::default();
    let task = Task::new(&model, &cluster, gpus, &restrictions);
    let best_s = search(&task, &mut |_| {}).best.expect("something fits").priced.iteration_s;
    let cache = CostCache::new(&model, &cluster, gpus);
    let (space, layouts) = (task.space(), task.space().layouts());
    let (mut fitting, mut closest, random) = (0, f64::INFINITY, &mut Random::new(7));
    while fitting < instances(30, 300) {
        let decisions = pin(random, &space, &layouts);
        let Some(iteration_s) = estimate(random, &cache, decisions.clone()) else { continue };
        assert!(
            iteration_s >= best_s * (1.0 - 1e-9),
            "{iteration_s} below {best_s}: {decisions:?}"
        );
        closest = closest.min(iteration_s / best_s);
        fitting += 1;
    }
    println!("{}: {best_s:.3} s, closest of {fitting} pinnings {closest:.3} times", model.name);
}

/// A random combination; every search node is equally likely.
fn pin(random: &mut Random, space: &Space<'_>, layouts: &[ParallelLayout]) -> Decisions {
    loop {
        let parallel = &layouts[random.whole(0, layouts.len() - 1)];
        let choices = space.choices(parallel);
        if choices.count() > 0
            && parallel.decisions.micro_batches * parallel.decisions.pp <= 100_000
        {
            return inside(random, parallel, &choices);
        }
    }
}

fn inside(random: &mut Random, parallel: &ParallelLayout, choices: &PipelineChoices) -> Decisions {
    let (schedule, vpp, vocabs) = &choices.schedules[random.whole(0, choices.schedules.len() - 1)];
    let (zero_stage, dp_shard) = random.pick(&choices.shards);
    let (vocab, fused_loss) = random.pick(vocabs);
    Decisions {
        schedule: *schedule,
        vpp: *vpp,
        vocab,
        fused_loss,
        recompute: random.pick(&choices.recompute),
        zero_stage,
        dp_shard,
        offload: random.pick(&choices.offload),
        rank_order: random.pick(&choices.rank_order),
        ..parallel.decisions.clone()
    }
}

/// Time of a good placement, if it fits.
fn estimate(random: &mut Random, cache: &CostCache<'_>, decisions: Decisions) -> Option<f64> {
    let case = Configuration::new(cache, decisions).ok()?;
    let placed = match case.listed_ranges() {
        Some(list) => {
            let chosen = random.whole(0, list.len() - 1);
            listed(random, &case, &list[chosen])
        }
        None => {
            let problem = case.problem(f64::INFINITY, false)?;
            case.placed(&problem, &dynamic_program::solve(&problem, f64::INFINITY)?.choice)?
        }
    };
    let priced = case.price(&placed, &mut Scratch::default());
    priced.fits.then_some(priced.iteration_s)
}

fn listed(random: &mut Random, case: &Configuration<'_>, ranges: &Ranges) -> Placed {
    let chain = random.pick(RecomputeLadder::orders(case.decisions.recompute));
    let own: Vec<(RecomputeLadder, usize)> = (0..case.ranks())
        .map(|rank| {
            let ladder = case.ladder_of(rank, ranges, chain);
            (ladder, random.whole(0, ladder.count() - 1))
        })
        .collect();
    let stage = |(stage, &(start, end)): (usize, &(usize, usize))| {
        let (ladder, level) = own[stage % own.len()];
        PlacedStage {
            start,
            end,
            recompute: ladder.recompute(level, &case.cache.layers.counts(start, end)),
        }
    };
    ranges.iter().enumerate().map(stage).collect()
}
