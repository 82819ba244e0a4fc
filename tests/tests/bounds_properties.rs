//! Admissibility of the search's bounds: none exceeds the time of any placement it covers. Every
//! bound is compared with every placement of random small configurations.

use meshwright_tests::random::Random;
use meshwright_tests::small::Instance;
use meshwright_tests::{brute, instances};
use models::decisions::{Decisions, MoeOverlap};
use planner::bounds::candidates::{ListedBound, ListedCuts, Shapes};
use planner::bounds::closed;
use planner::bounds::cuts::PartitionBound;
use planner::bounds::pipeline_spec::PipelineSpec;
use planner::bounds::recompute_knapsack::RecomputeKnapsack;
use planner::bounds::state_overheads::StateOverhead;
use planner::bounds::states::{StateView, States};
use planner::bounds::workload::MicroBatchCost;
use planner::partition::Scratch;
use planner::partition::dynamic_program::{self, Bounded};
use planner::pricing::Configuration;
use planner::pricing::cost_cache::CostCache;
use planner::request::Task;
use planner::request::space::ParallelLayout;
use std::rc::Rc;
use std::sync::Arc;

/// Maximum number of placements of one configuration.
const MOST_PLACEMENTS: usize = 3000;

/// A configuration, with the inputs of its bounds.
struct Subject<'a> {
    case: &'a Configuration<'a>,
    spec: PipelineSpec,
    /// Costs of passes without and with those of states.
    plain: MicroBatchCost,
    work: MicroBatchCost,
    state: StateView,
    states: States,
    budget_bytes: f64,
}

impl<'a> Subject<'a> {
    fn new(task: &Task<'_>, case: &'a Configuration<'a>) -> Self {
        let (cache, d) = (case.cache, &case.decisions);
        let layer_costs = cache.layer_costs(d);
        let spec = PipelineSpec::new(cache, d, &layer_costs);
        let plain = MicroBatchCost::of(cache, d, &layer_costs);
        let state = StateView::new(cache, d, &layer_costs.params);
        let choices = task.space().choices(&ParallelLayout { decisions: d.clone() });
        let usable = cache.cluster.usable_bytes() - plain.workspace_bytes;
        Self {
            case,
            work: state.added_to(&plain, &spec).into_owned(),
            states: States::new(cache, d, &choices, &layer_costs.params),
            budget_bytes: usable - state.motion_bytes(&spec, cache.layers.len()),
            spec,
            state,
            plain,
        }
    }

    /// All bounds by name, in s, before stragglers and fixed work.
    fn bounds(&self) -> Vec<(&'static str, f64)> {
        let spec = &self.spec;
        let step_s = closed::own_step_s(spec, &self.work, &self.state);
        let knapsack = RecomputeKnapsack::new(&self.plain.kinds, spec.options());
        let first_s = knapsack.at_first(&self.plain.counts).0;
        let overheads = self.states.overheads(&self.plain, spec);
        let least = |value: &dyn Fn(&StateOverhead) -> f64| {
            overheads.iter().map(value).fold(f64::INFINITY, f64::min)
        };
        let mean_s = |added_s: f64| {
            spec.m() * ((self.plain.load_s() + first_s) / spec.ranks as f64 + spec.passes_s())
                + added_s
        };
        let own = overheads.iter().find(|o| self.states.undominated[o.at] == self.state);
        let mut bounds = vec![
            ("mean with own states", own.map_or(0.0, |own| mean_s(own.added_s))),
            ("closed", closed::passes_s(spec, &self.plain, first_s)),
            ("states", closed::with_state_s(spec, &self.work, &self.state, first_s)),
            (
                "any states",
                least(&|overhead| {
                    let view = &self.states.undominated[overhead.at];
                    let work = view.added_to(&self.plain, spec);
                    closed::with_state_s(spec, &work, view, first_s)
                }),
            ),
            ("fullest rank", spec.m() * spec.passes_s() + least(&|overhead| overhead.fullest_s)),
        ];
        match self.case.listed_ranges() {
            Some(list) => self.listed(list, step_s, &knapsack, &mut bounds),
            None => {
                self.dynamic_programs(&mut bounds);
                for (name, work, state) in self.choices() {
                    let budget = self.budget_of(name);
                    let partition_bound =
                        PartitionBound::new(spec, work, state, &self.case.cache.layers, budget);
                    let bound_s =
                        partition_bound.solve(f64::INFINITY).map_or(f64::INFINITY, |c| c.bound_s);
                    let near_s = partition_bound.least_s(f64::INFINITY);
                    let is_near = near_s <= bound_s && near_s >= 0.998 * bound_s;
                    assert!(is_near || near_s == bound_s, "{near_s} near, {bound_s} far");
                    // With a limit, nothing is lost but what lies beyond it.
                    let limits_s = [0.9, 0.9999, 1.0001, 1.1].map(|factor| factor * bound_s);
                    for limit_s in limits_s {
                        let found_s = partition_bound.least_s(limit_s);
                        let wanted_s = limit_s.min(0.998 * bound_s);
                        assert!(found_s <= bound_s && found_s >= wanted_s, "{found_s}, {bound_s}");
                    }
                    let step_s = if name == "own states" { step_s } else { 0.0 };
                    bounds.push((name, bound_s + step_s));
                    let partition_bound = partition_bound.with_order_of(self.case.pipeline());
                    let made_s =
                        partition_bound.solve(f64::INFINITY).map_or(f64::INFINITY, |c| c.bound_s);
                    bounds.push(("made order", made_s + step_s));
                }
            }
        }
        bounds
    }

    fn dynamic_programs(&self, bounds: &mut Vec<(&'static str, f64)>) {
        let problem = self.case.problem(f64::INFINITY, false).expect("a placement fits");
        let plain = dynamic_program::solve(&problem, f64::INFINITY);
        let with_vocab = dynamic_program::solve_with_vocab(&problem, f64::INFINITY);
        let bound_s = |bounded: Option<Bounded>| bounded.expect("a placement fits").bound_s;
        bounds.push(("dynamic program", bound_s(plain)));
        bounds.push(("dynamic program with vocabulary passes", bound_s(with_vocab)));
    }

    /// The inputs for this configuration's states and for the cheapest states.
    fn choices(&self) -> [(&'static str, &MicroBatchCost, &StateView); 2] {
        [("own states", &self.work, &self.state), ("least states", &self.plain, &self.states.least)]
    }

    fn budget_of(&self, name: &str) -> f64 {
        let usable = self.case.cache.cluster.usable_bytes() - self.plain.workspace_bytes;
        if name == "own states" { self.budget_bytes } else { usable }
    }

    fn listed(
        &self,
        list: Vec<planner::pricing::listed_cuts::Ranges>,
        step_s: f64,
        knapsack: &RecomputeKnapsack,
        bounds: &mut Vec<(&'static str, f64)>,
    ) {
        let (spec, layers) = (&self.spec, &self.case.cache.layers);
        let pipeline = || Arc::clone(self.case.pipeline());
        let shapes = Rc::new(Shapes::new(layers, spec, list));
        let members = ListedCuts::new(spec, Rc::clone(&shapes), pipeline);
        for (name, work, state) in self.choices() {
            let listed_bound =
                ListedBound { spec, work, state, budget_bytes: self.budget_of(name) };
            let bound_s = listed_bound.bound_s(&members, f64::INFINITY);
            let near_s = listed_bound.bound_s(&members, 0.9 * bound_s);
            assert!(
                near_s >= 0.9 * bound_s && near_s <= bound_s * (1.0 + 1e-9),
                "{near_s}, {bound_s}"
            );
            bounds.push((name, bound_s + if name == "own states" { step_s } else { 0.0 }));
        }
        if !spec.schedule.is_whole() && spec.copies() == 1 {
            let any = ListedCuts::of_any(spec, shapes);
            let listed_bound =
                ListedBound { spec, work: &self.work, state: &self.state, budget_bytes: 1e30 };
            bounds.push(("any order", listed_bound.bound_s(&any, f64::INFINITY) + step_s));
        }
        if spec.chunks > 1 {
            let (state, budget) = (&self.state, self.budget_bytes);
            let spent_s = members.recompute_s(spec, &self.plain, knapsack, state, budget);
            bounds.push(("recomputation", closed::passes_s(spec, &self.plain, spent_s)));
        }
    }

    /// A configuration with a placement that fits is not reported as too large.
    fn check_bytes(&self) {
        let bytes = closed::least_bytes(&self.spec, &self.plain, &self.state);
        let usable = self.case.cache.cluster.usable_bytes() - self.plain.workspace_bytes;
        assert!(bytes <= usable * (1.0 + 1e-9), "{bytes} of {usable}: {:?}", self.case.decisions);
    }

    /// The certain number of micro-batches in flight is never above the real one.
    fn check_in_flight(&self) {
        let mut counts = vec![];
        for (rank, vectors) in self.case.pipeline().in_flight.iter().enumerate() {
            self.spec.in_flight(rank, &mut counts);
            let within =
                |vector: &Vec<u32>| counts.iter().zip(vector).all(|(a, b)| *a <= *b as usize);
            assert!(
                vectors.iter().any(within),
                "{}: {counts:?} in flight on rank {rank}, none of {vectors:?}",
                self.case.decisions.schedule
            );
        }
    }
}

/// Minimum time in s of all placements that fit, before stragglers and fixed work.
fn least_s(case: &Configuration<'_>) -> Option<f64> {
    let placements: Vec<_> = brute::placements(case).take(MOST_PLACEMENTS + 1).collect();
    if placements.len() > MOST_PLACEMENTS {
        return None;
    }
    let scratch = &mut Scratch::default();
    let prices = placements.iter().map(|placed| case.price(placed, scratch));
    let fitting =
        prices.filter(|priced| priced.fits).map(|priced| case.pipeline_s(priced.iteration_s));
    fitting.reduce(f64::min)
}

/// One of an instance's configurations. The first ones have pairs, then vocabulary passes with one
/// chunk a rank, where there are such; of the others, those with pipelines are preferred.
fn pick(random: &mut Random, all: &[Decisions], n: usize) -> Decisions {
    let any = |random: &mut Random| all[random.whole(0, all.len() - 1)].clone();
    let (tries, preferred): (_, fn(&Decisions) -> bool) = match n {
        0 => (200, |d| d.moe_overlap == MoeOverlap::Pair),
        1 | 2 => (50, |d| d.vocab.over_pipeline() && d.vpp == 1),
        _ => (5, |d| d.pp > 1),
    };
    (0..tries).map(|_| any(random)).find(preferred).unwrap_or_else(|| any(random))
}

#[test]
fn no_bound_exceeds_any_placement() {
    let (mut compared, mut closest, mut kinds) = (0, 0.0_f64, [0_u64; 6]);
    for seed in 0..instances(500, 4000) {
        let random = &mut Random::new(seed + 3_000_000);
        let mut instance = Instance::random(random);
        // Gaps that matter, and reductions of which the software hides little or much.
        let software = &mut instance.cluster.software;
        software.pass_gap_s = random.scaled(1e-8, 1e-3);
        software.dp_overlap = random.pick(&[0.0, 0.5, 0.9]);
        // Networks so slow that passes wait for sums and broadcasts.
        let slower = random.pick(&[1.0, 1.0, 0.1, 0.01]);
        instance.cluster.levels.iter_mut().for_each(|level| level.bytes_per_s *= slower);
        let restrictions = instance.restrictions();
        let task = Task::new(&instance.model, &instance.cluster, instance.gpus, &restrictions);
        let cache = CostCache::new(&instance.model, &instance.cluster, instance.gpus);
        let all = brute::combinations(&task);
        for n in 0..if all.is_empty() { 0 } else { 6 } {
            let picked = pick(random, &all, n);
            let Ok(case) = Configuration::new(&cache, picked) else { continue };
            let case = case.in_own_times();
            let subject = Subject::new(&task, &case);
            subject.check_in_flight();
            let Some(least_s) = least_s(&case) else { continue };
            subject.check_bytes();
            for (name, bound_s) in subject.bounds() {
                assert!(
                    bound_s <= least_s * (1.0 + 1e-9),
                    "seed {seed}, {name}: bound {bound_s}, a placement takes {least_s}: {:?}",
                    case.decisions
                );
                closest = closest.max(bound_s / least_s);
            }
            compared += 1;
            let d = &case.decisions;
            let twice = d.layout().copies() > 1;
            let looks_up = subject.spec.passes.is_some_and(|path| path.input_s[0] > 0.0);
            let paired = d.moe_overlap == MoeOverlap::Pair;
            let is = [d.vpp > 1, d.pp > 1, d.vocab.over_pipeline(), twice, looks_up, paired];
            for (count, is) in kinds.iter_mut().zip(is) {
                *count += u64::from(is);
            }
        }
    }
    println!(
        "{compared} configurations; several chunks, pipeline, vocabulary passes, two copies, passes of \
         the input layer, pairs: {kinds:?}; closest {closest}"
    );
    assert!(kinds.iter().all(|&count| count > 20), "{kinds:?}");
    assert!(closest > 0.95, "a bound this far below tests nothing: {closest}");
}
