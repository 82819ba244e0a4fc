//! The integer program over every cut and recompute split against brute force, on small random
//! configurations with several chunks per pipeline rank.

use meshwright_tests::random::Random;
use meshwright_tests::{brute, close, instances, small};
use planner::partition::{Scratch, ilp};
use planner::pricing::Configuration;
use planner::pricing::cost_cache::CostCache;
use planner::request::Task;
use planner::request::restrictions::Restrictions;
use planner::request::task::SOLVER_WORK;
use planner::search::every_cut::EveryCut;
use planner::until::Until;
use std::collections::BTreeMap;

/// Maximum number of placements of one configuration.
const MOST_PLACEMENTS: usize = 20_000;

/// A random configuration with several chunks.
fn with_random_case<T>(
    seed: u64,
    then: impl FnOnce(&Configuration<'_>) -> Option<T>,
) -> Option<T> {
    let random = &mut Random::new(seed);
    let layers = random.whole(3, 8);
    let model = small::model_of(random, layers);
    let (cluster, gpus) = (small::cluster(random, &model), random.pick(&[2, 3, 4, 6]));
    let restrictions = Restrictions::default();
    let task = Task::new(&model, &cluster, gpus, &restrictions);
    let mut several = brute::combinations(&task);
    several.retain(|d| d.vpp > 1 && !d.post_validation);
    if several.is_empty() {
        return None;
    }
    let decisions = several[random.whole(0, several.len() - 1)].clone();
    let cache = CostCache::new(&model, &cluster, gpus);
    then(&Configuration::new(&cache, decisions).ok()?)
}

fn solved(case: &Configuration<'_>, cutoff_s: f64) -> EveryCut {
    let limits = ilp::Limits { work: SOLVER_WORK, paths: true, until: Until::default() };
    case.best_of_every_cut(vec![], (cutoff_s, false), limits, &mut Scratch::default())
}

/// The least time before overheads of a placement that fits, s, by brute force; `None` if there are
/// too many.
fn brute_s(case: &Configuration<'_>) -> Option<f64> {
    let scratch = &mut Scratch::default();
    let priced = brute::all_placements(case, MOST_PLACEMENTS)?.into_iter().map(|placed| {
        let priced = case.price(&placed, scratch);
        if priced.fits { case.pipeline_s(priced.iteration_s) } else { f64::INFINITY }
    });
    Some(priced.fold(f64::INFINITY, f64::min))
}

#[test]
fn the_program_over_every_cut_equals_brute_force() {
    let (mut compared, mut feasible, mut beyond) = (0, 0, 0);
    let mut by_schedule: BTreeMap<String, u64> = BTreeMap::new();
    let mut seed = 7_000_000;
    while compared < instances(500, 3000) {
        seed += 1;
        let _ = with_random_case(seed, |case| {
            let best_s = brute_s(case)?;
            compared += 1;
            let d = &case.decisions;
            let what = format!("seed {seed}: {d:?}");
            let found = solved(case, f64::INFINITY);
            assert!(found.report.proven, "{what}: not proven");
            let Some((placed, found_s)) = found.best else {
                assert!(best_s.is_infinite(), "{what}: {best_s} by brute force, nothing found");
                return Some(());
            };
            assert!(close(found_s, best_s), "{what}: {found_s} beside {best_s} by brute force");
            let priced = case.price(&placed, &mut Scratch::default());
            assert!(priced.fits, "{what}: {placed:?} does not fit");
            assert!(close(case.pipeline_s(priced.iteration_s), best_s), "{what}: {placed:?}");
            // A cut-off hides nothing below it, and nothing lies below the best.
            let above = solved(case, best_s * 1.001).best;
            assert!(above.is_some_and(|(_, s)| close(s, best_s)), "{what}: hidden by a cut-off");
            let below = solved(case, best_s * 0.999);
            assert!(below.report.proven && below.best.is_none(), "{what}: {below:?}");
            feasible += 1;
            let recomputes = placed.iter().any(|s| s.recompute.iter().any(|n| n[1] + n[2] > 0));
            beyond += u64::from(recomputes);
            *by_schedule.entry(d.schedule.to_string()).or_default() += 1;
            Some(())
        });
    }
    println!("{compared} compared, {feasible} feasible, {beyond} recompute, {by_schedule:?}");
    assert!(feasible * 2 > compared, "only {feasible} of {compared} fit");
    assert!(by_schedule.len() >= 8 && beyond * 10 > feasible, "{by_schedule:?}, {beyond}");
}
