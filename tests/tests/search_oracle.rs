//! The search against brute force: every combination and every placement of small models on small
//! clusters whose memory is tight.

use meshwright_tests::brute;
use meshwright_tests::random::Random;
use meshwright_tests::small::Instance;
use meshwright_tests::{close, examined, instances};
use planner::request::Task;
use planner::search::{Outcome, search};
use planner::until::Until;
use std::time::{Duration, Instant};

/// Maximum number of placements of one instance.
const MOST_PLACEMENTS: u64 = 30_000;

#[derive(Default)]
struct Tally {
    compared: u64,
    feasible: u64,
    placements: u64,
    /// Number of best plans with a pipeline, with recomputation, with sharded state, and with a
    /// split backward pass or stages on a V.
    kinds: [u64; 4],
    failures: Vec<String>,
}

impl Tally {
    fn with(mut self, other: Self) -> Self {
        self.compared += other.compared;
        self.feasible += other.feasible;
        self.placements += other.placements;
        self.kinds.iter_mut().zip(other.kinds).for_each(|(count, more)| *count += more);
        self.failures.extend(other.failures);
        self
    }
}

#[test]
fn the_search_equals_brute_force() {
    let tally = compare_all(instances(150, 2000), |_| ());
    assert!(tally.feasible * 4 > tally.compared, "memory binds too much to test anything");
    assert!(tally.kinds[3] > 0, "no schedule with a split backward ever wins");
}

/// Offloaded state must fit in host memory.
#[test]
fn the_search_equals_brute_force_where_host_memory_binds() {
    compare_all(instances(60, 300), |instance| {
        instance.cluster.host.memory_bytes = instance.cluster.device.hbm_bytes * 0.2;
    });
}

/// Over slow links, where recomputing everything may be the fastest: then least is moved.
#[test]
fn the_search_equals_brute_force_with_activations_on_the_host() {
    let tally = compare_all(instances(60, 300), |instance| {
        let fixed =
            |setting: &String| setting.starts_with("offload") || setting.contains("recompute");
        instance.settings.retain(|setting| !fixed(setting));
        instance.settings.push("offload=activations".to_owned());
        let fast = instance.cluster.host.link_bytes_per_s;
        instance.cluster.host.link_bytes_per_s = fast / if instance.gpus > 2 { 20.0 } else { 3.0 };
    });
    assert!(tally.kinds[1] * 10 > tally.compared, "recomputing never pays");
}

fn compare_all(wanted: u64, change: impl Fn(&mut Instance) + Sync) -> Tally {
    let changed = |seed| {
        let mut instance = Instance::random(&mut Random::new(seed));
        change(&mut instance);
        compare(seed, &instance)
    };
    let tallies = examined(0, wanted, changed);
    let tally = tallies.into_iter().fold(Tally::default(), Tally::with);
    let Tally { compared, feasible, placements, kinds, failures } = &tally;
    println!("{compared} instances, {feasible} feasible, {placements} placements");
    println!("best with pipeline, recomputation, sharded state, split or V: {kinds:?}");
    let shown: Vec<&String> = failures.iter().take(3).collect();
    assert!(failures.is_empty(), "{} of {compared} differ: {shown:#?}", failures.len());
    tally
}

/// Compares one instance; `None` if it has too many placements.
fn compare(seed: u64, instance: &Instance) -> Option<Tally> {
    let restrictions = instance.restrictions();
    let task = Task::new(&instance.model, &instance.cluster, instance.gpus, &restrictions);
    let answer = brute::best(&task, MOST_PLACEMENTS)?;
    let outcome = search(&task, &mut |_| {});
    let kinds = answer.best.as_ref().map_or([0; 4], |(d, placed, _)| {
        let mut splits = placed.iter().flat_map(|stage| &stage.recompute);
        let recomputes = splits.any(|recompute| recompute[1] + recompute[2] > 0);
        [d.pp > 1, recomputes, d.zero_stage > 0, !d.schedule.is_whole()].map(u64::from)
    });
    let found = describe(&outcome);
    let failure = difference(&answer, &outcome).map(|what| {
        let known = answer.best.as_ref().map(|(d, placed, priced)| (priced.iteration_s, d, placed));
        let (gpus, settings) = (instance.gpus, &instance.settings);
        format!("seed {seed}, {gpus} GPUs, {settings:?}: {what}\n brute {known:?}\n search {found}")
    });
    Some(Tally {
        compared: 1,
        feasible: u64::from(answer.best.is_some()),
        placements: answer.placements,
        kinds,
        failures: failure.into_iter().collect(),
    })
}

fn describe(outcome: &Outcome) -> String {
    let best = outcome.best.as_ref();
    format!("{:?}", best.map(|found| (found.priced.iteration_s, &found.decisions, &found.placed)))
}

/// The difference between an outcome and brute force, if any.
fn difference(answer: &brute::Answer, outcome: &Outcome) -> Option<String> {
    if outcome.proof.candidates != answer.combinations {
        return Some(format!(
            "{} candidates, {} combinations",
            outcome.proof.candidates, answer.combinations
        ));
    }
    if outcome.proof.searched_gap > 0.0 {
        return Some("not proven".to_owned());
    }
    if let (Some((.., known)), Some(found)) = (&answer.best, &outcome.best) {
        let least_s = found.priced.iteration_s * (1.0 - outcome.proof.gap);
        if known.iteration_s < least_s * (1.0 - 1e-9) {
            return Some(format!("{} lies below the gap's {least_s}", known.iteration_s));
        }
    }
    match (&answer.best, &outcome.best) {
        (None, None) => None,
        (Some((.., known)), Some(found)) if close(known.iteration_s, found.priced.iteration_s) => {
            (!found.priced.fits).then(|| "does not fit".to_owned())
        }
        (Some((.., known)), Some(found)) => {
            let ratio = found.priced.iteration_s / known.iteration_s;
            // With several chunks a pipeline rank, brute force tries only the listed cuts, while
            // the search also moves layers.
            if outcome.proof.family && ratio < 1.0 && found.priced.fits {
                return None;
            }
            Some(format!("{ratio} of the brute-force optimum, fits {}", found.priced.fits))
        }
        (Some(_), None) => Some("nothing found".to_owned()),
        (None, Some(found)) => Some(format!("nothing fits, says {}", found.priced.fits)),
    }
}

/// With too few micro-batches for a hand-made order, `zb_auto` finds an order of its own. Otherwise
/// it equals another schedule, and is searched only under that schedule's name if both are allowed.
#[test]
fn the_search_equals_brute_force_with_zb_auto() {
    let (mut own, mut compared) = (0, 0);
    for names in ["schedule=zb_auto", "schedule=zb_auto,zb_h1,zb_v"] {
        let tally = compare_all(instances(60, 400), |instance| {
            let settled = |setting: &String| setting.starts_with("schedule");
            instance.settings.retain(|setting| !settled(setting) && !setting.starts_with("vocab"));
            instance.settings.extend([names, "vocab=tensor"].map(str::to_owned));
        });
        own += tally.kinds[3];
        compared += tally.feasible;
    }
    println!("{own} of {compared} split");
    assert!(own > 20, "{own} of {compared}");
}

/// Of a search that was stopped in several ways, asserts that the optimum lies within each gap, and
/// returns the number of gaps; `None` if the instance has too many placements.
fn unfinished(seed: u64) -> Option<u64> {
    let mut random = Random::new(seed);
    let instance = Instance::random(&mut random);
    let restrictions = instance.restrictions();
    let task = Task::new(&instance.model, &instance.cluster, instance.gpus, &restrictions);
    let answer = brute::best(&task, MOST_PLACEMENTS)?;
    let optimum_s = answer.best.map_or(f64::INFINITY, |(.., priced)| priced.iteration_s);
    let most_expansions = random.scaled(1.0, 300.0) as u64;
    let counted = Task { most_expansions, ..task.clone() };
    let outcome = search(&counted, &mut |_| {});
    let again = search(&counted, &mut |_| {});
    assert_eq!((describe(&outcome), outcome.proof), (describe(&again), again.proof));
    let soon = Instant::now() + Duration::from_secs_f64(random.scaled(1e-5, 2e-2));
    let until = Until { deadline: Some(soon), ..Until::default() };
    let timed = search(&Task { until, ..task.clone() }, &mut |_| {});
    let first = search(&Task { any: true, ..task.clone() }, &mut |_| {});
    let mut unfinished = 0;
    for stopped in [&outcome, &timed, &first] {
        let gap = stopped.proof.searched_gap;
        unfinished += u64::from(gap > 0.0);
        let found_s = stopped.best.as_ref().map(|found| found.priced.iteration_s);
        let holds = match found_s {
            Some(found_s) => optimum_s >= found_s * (1.0 - gap) * (1.0 - 1e-9),
            None => gap > 0.0 || optimum_s == f64::INFINITY,
        };
        assert!(holds, "seed {seed}: {optimum_s} is not within {gap} of {found_s:?}");
        let proof = &stopped.proof;
        let cut = proof.cut_by_time + proof.cut_by_memory + proof.cut_by_dominance;
        assert_eq!(proof.placed + cut, proof.candidates, "seed {seed}: counted twice");
    }
    Some(unfinished)
}

/// Wherever a search is stopped, by a number of expansions or by the clock, the optimum lies within
/// its gap. Stopped by a number, it gives the same plan and proof again.
#[test]
fn the_gap_of_a_search_that_was_stopped_holds() {
    let all = examined(0, instances(150, 2000), unfinished);
    let unfinished: u64 = all.iter().sum();
    let compared = all.len() as u64;
    assert!(unfinished * 4 > compared, "of {compared} searches only {unfinished} were cut short");
}
