//! The integer program over every cut and recompute split against brute force, on small random
//! configurations with several chunks per pipeline rank.

use meshwright_tests::random::Random;
use meshwright_tests::{brute, close, examined, instances, small};
use models::schedule::ScheduleName;
use planner::bounds::pipeline_spec::PipelineSpec;
use planner::bounds::recompute_knapsack::RecomputeKnapsack;
use planner::bounds::states::StateView;
use planner::bounds::whole_layers::WholeLayers;
use planner::bounds::workload::MicroBatchCost;
use planner::partition::{Scratch, ilp, relaxation};
use planner::pricing::Configuration;
use planner::pricing::cost_cache::CostCache;
use planner::pricing::priced::PlacedStage;
use planner::pricing::vocab_times::placed_by_times;
use planner::request::Task;
use planner::request::restrictions::Restrictions;
use planner::request::task::SOLVER_WORK;
use planner::search::every_cut::{EveryCut, Layering};
use planner::search::search;
use planner::until::Until;
use std::collections::BTreeSet;

/// Maximum number of placements of one configuration.
const MOST_PLACEMENTS: usize = 5_000;

/// A random configuration with several chunks.
fn with_random_case<T>(seed: u64, then: impl FnOnce(&Configuration<'_>) -> Option<T>) -> Option<T> {
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

/// The time of an even cut with the least recomputation, whether or not it fits, s.
fn even_s(case: &Configuration<'_>) -> f64 {
    let (stages, layers) = (case.stages(), case.cache.layers.len());
    let stage = |stage: usize| {
        let [start, end] = [stage, stage + 1].map(|at| at * layers / stages);
        PlacedStage { start, end, recompute: case.least_recompute(start, end).recompute }
    };
    case.price(&(0..stages).map(stage).collect(), &mut Scratch::default()).iteration_s
}

/// Asserts that neither whole layers nor the relaxation rule out the best placement, and returns
/// whether whole layers rule out what takes a tenth less.
fn bounds_hold(case: &Configuration<'_>, best_s: f64, what: &str) -> bool {
    if best_s.is_infinite() {
        return false;
    }
    let (cache, d) = (case.cache, &case.decisions);
    let layer_costs = cache.layer_costs(d);
    let spec = PipelineSpec::new(cache, d, &layer_costs);
    let plain = MicroBatchCost::of(cache, d, &layer_costs);
    let state = StateView::new(cache, d, &layer_costs.params);
    let work = state.added_to(&plain, &spec);
    let knapsack = RecomputeKnapsack::new(&work.kinds, spec.options());
    let moving = state.motion_bytes(&spec, cache.layers.len());
    let budget = cache.cluster.usable_bytes() - plain.workspace_bytes - moving;
    let whole = WholeLayers::new(&spec, (&work, &knapsack), &state, case.pipeline(), budget);
    assert!(whole.is_below(best_s * (1.0 + 1e-9)), "{what}: {best_s} is ruled out");
    let within = whole.between_s([0.0, best_s * 1.1]);
    assert!(within.is_some_and(|bound_s| bound_s <= best_s), "{what}: {within:?} above {best_s}");
    // With a cut-off just above, columns are left out that might have replaced others.
    for cutoff_s in [best_s * 1.5, best_s * (1.0 + 1e-6)] {
        let problem = case.every_cut(cutoff_s, false, Layering::AnyOrder);
        let problem = problem.expect("the best is among them");
        let limits = ilp::Limits { work: SOLVER_WORK, paths: true, until: Until::default() };
        let scratch = &mut Scratch::default();
        let relaxed = relaxation::solve(&problem, vec![], cutoff_s, limits, scratch);
        let holds = !relaxed.nothing_below && relaxed.bound_s <= best_s * (1.0 + 1e-6);
        assert!(holds, "{what}: {} above {best_s}", relaxed.bound_s);
    }
    !whole.is_below(0.9 * best_s)
}

/// A configuration whose best placement is known.
struct Compared {
    schedule: ScheduleName,
    /// Whether anything fits, and whether the best placement recomputes.
    feasible: bool,
    recomputes: bool,
    /// Whether the bound by whole layers comes within a tenth of the best time.
    tight: bool,
}

/// Compares the program over every cut with brute force; `None` where there are too many cuts.
fn compared(seed: u64) -> Option<Compared> {
    with_random_case(seed, |case| {
        let best_s = brute_s(case)?;
        let d = &case.decisions;
        let what = format!("seed {seed}: {d:?}");
        let tight = bounds_hold(case, best_s, &what);
        let result = |feasible, recomputes| {
            Some(Compared { schedule: d.schedule, feasible, recomputes, tight })
        };
        let found = solved(case, f64::INFINITY);
        assert!(found.report.proven, "{what}: not proven");
        let Some((placed, found_s)) = found.best else {
            assert!(best_s.is_infinite(), "{what}: {best_s} by brute force, nothing found");
            return result(false, false);
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
        result(true, placed.iter().any(|s| s.recompute.iter().any(|n| n[1] + n[2] > 0)))
    })
}

#[test]
fn the_program_over_every_cut_equals_brute_force() {
    let all = examined(7_000_001, instances(500, 1500), compared);
    let count = |is: fn(&Compared) -> bool| all.iter().filter(|one| is(one)).count();
    let [feasible, recompute, tight] =
        [count(|one| one.feasible), count(|one| one.recomputes), count(|one| one.tight)];
    let schedules: BTreeSet<String> =
        all.iter().filter(|one| one.feasible).map(|one| one.schedule.to_string()).collect();
    println!("{} compared, {feasible} feasible, {recompute} recompute, {schedules:?}", all.len());
    assert!(feasible * 2 > all.len(), "only {feasible} of {} fit", all.len());
    println!("the whole layers' bound comes within 10 % of {tight}");
    assert!(tight * 8 > feasible, "{tight}");
    assert!(schedules.len() >= 8 && recompute * 10 > feasible, "{schedules:?}, {recompute}");
}

/// Whether a plan is proven over every cut by bounds alone, and with integer programs, after a
/// comparison with brute force; `None` where the search finds nothing.
fn is_closed(seed: u64) -> Option<[bool; 2]> {
    let random = &mut Random::new(seed);
    let layers = random.whole(5, 9);
    let model = small::model_of(random, layers);
    let (cluster, gpus) = (small::cluster(random, &model), random.pick(&[2, 3, 4]));
    // Few cuts would all be listed.
    let settings = ["pp>=2", "vpp>=2", "cp=1", "micro_batch=1", "offload=none"];
    let restrictions = Restrictions::parse(&settings).expect("they are valid");
    let all = Task::new(&model, &cluster, gpus, &restrictions);
    let bounded = search(&all, &mut |_| {});
    let (by_bounds, listed) = (bounded.proof.gap == 0.0, bounded.best?);
    let outcome = search(&Task { every_cut_work: SOLVER_WORK, ..all.clone() }, &mut |_| {});
    let found = outcome.best?;
    let gap = outcome.proof.gap;
    let plan_s = found.priced.iteration_s;
    let what = format!("seed {seed}: {plan_s} of {:?}, gap {gap}", found.decisions);
    assert!(plan_s <= listed.priced.iteration_s * (1.0 + 1e-9), "{what}: listed is faster");
    assert!(found.priced.fits, "{what}");
    let cache = CostCache::new(&model, &cluster, gpus);
    let mut combinations = brute::combinations(&all);
    // No gap counts how passes lie that are placed by a configuration's own times.
    combinations.retain(|d| d.vpp > 1 && !d.post_validation && !placed_by_times(d));
    let case = |d| Configuration::new(&cache, d).ok();
    let mut promising: Vec<_> = combinations.into_iter().filter_map(case).collect();
    promising.sort_by(|a, b| even_s(a).total_cmp(&even_s(b)));
    for case in promising.into_iter().take(40) {
        let Some(best_s) = brute_s(&case) else { continue };
        let best_s = case.with_overheads_s(best_s);
        let least_s = plan_s * (1.0 - gap) * (1.0 - 1e-6);
        assert!(best_s >= least_s, "{what}: {best_s} of {:?}", case.decisions);
    }
    Some([by_bounds, gap == 0.0])
}

/// What `--prove` says holds: no placement of a random configuration lies further below the plan
/// than its gap, and a gap of 0 means that none is faster.
#[test]
fn no_placement_beats_a_plan_by_more_than_its_gap() {
    let all = examined(8_000_001, instances(60, 600), is_closed);
    let [by_bounds, closed] = [0, 1].map(|way| all.iter().filter(|closed| closed[way]).count());
    // Models this small have few cuts, and the search mostly finds the best itself.
    println!("{closed} of {} closed, {by_bounds} by bounds alone", all.len());
    assert!(closed * 2 > all.len() && closed > by_bounds, "{closed}, {by_bounds}");
}
