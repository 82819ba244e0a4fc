//! A plan's gap is valid: no pinned estimate lies further below the plan's time than the gap, and
//! more memory never makes a plan slower by more than it. On shipped models and clusters.

use meshwright_tests::instances;
use meshwright_tests::random::Random;
use models::cluster::ClusterSpec;
use models::decisions::RecomputePolicy;
use models::model::ModelSpec;
use models::schedule::ScheduleName;
use planner::request::Task;
use planner::request::restrictions::{Choice, Numbers, Restrictions};
use planner::search::{Outcome, search};

/// Tolerance for rounding.
const CLOSE: f64 = 1e-9;

/// Models, clusters and numbers of GPUs whose search is fast.
const REQUESTS: [(&str, &str, u64); 10] = [
    ("vocab_10b", "a100_roce", 32),
    ("gpt_39b", "selene", 32),
    ("gpt_39b", "selene", 64),
    ("gpt_18b", "selene", 32),
    ("gemma2_9b", "a100_40g", 48),
    ("llama8b", "dgx_h100", 16),
    ("qwen3_30b_a3b", "dgx_h100", 16),
    ("vocab_4b", "a100_40g", 16),
    ("gpt_7.5b", "selene", 24),
    ("tiny", "laptop", 4),
];

/// Pinned settings that were once faster than a plan reported as optimal.
const ONCE_FASTER: [(&str, &[&str]); 4] = [
    ("vocab_10b", &["tp=1", "pp=4", "schedule=zb_v"]),
    ("gpt_39b", &["tp=2", "pp=4", "schedule=v_half"]),
    ("gpt_18b", &["tp=2", "pp=2", "schedule=zb_v"]),
    ("gemma2_9b", &["tp=1", "pp=6", "schedule=v_half", "cp=4", "micro_batch=2", "vpp=2"]),
];

fn shipped(model: &str, cluster: &str) -> (ModelSpec, ClusterSpec) {
    let model = models::model::shipped(model).and_then(Result::ok).expect("shipped models read");
    let cluster =
        models::cluster::shipped(cluster).and_then(Result::ok).expect("shipped clusters read");
    (model, cluster)
}

fn answer(model: &ModelSpec, cluster: &ClusterSpec, gpus: u64, r: &Restrictions) -> Outcome {
    search(&Task::new(model, cluster, gpus, r), &mut |_| {})
}

/// Pins degrees and a schedule, sometimes more.
fn pinned(random: &mut Random, gpus: u64) -> Restrictions {
    let degree = |random: &mut Random| {
        let divisors: Vec<u64> = (1..=gpus.min(16)).filter(|n| gpus.is_multiple_of(*n)).collect();
        Numbers::only(random.pick(&divisors))
    };
    let mut r = Restrictions { tp: degree(random), pp: degree(random), ..Restrictions::default() };
    let splits = |schedule: &&ScheduleName| schedule.splits_backward();
    let split: Vec<ScheduleName> = ScheduleName::ALL.iter().filter(splits).copied().collect();
    match random.whole(0, 3) {
        0 => {
            r.schedule = Choice::of(&[random.pick(&split)]);
            r.recompute =
                Choice::of(&[random.pick(&[RecomputePolicy::None, RecomputePolicy::PerLayer])]);
            (r.cp, r.micro_batch) = (Numbers::only(1), Numbers::only(random.pick(&[1, 2])));
            r.zero_stage = Numbers::only(random.pick(&[0, 1]));
            r.vpp = Numbers::only(random.pick(&[1, 2]));
        }
        1 => r.schedule = Choice::of(&[random.pick(&ScheduleName::ALL)]),
        2 => {
            r.schedule = Choice::of(&[random.pick(&ScheduleName::ALL)]);
            r.zero_stage = Numbers::only(random.pick(&[0, 1, 2, 3]));
        }
        _ => {}
    }
    r
}

#[test]
fn no_pinned_estimate_beats_a_plan_by_more_than_its_gap() {
    let (mut compared, mut faster) = (0, 0);
    for (model, cluster, gpus) in REQUESTS {
        let (model, cluster) = shipped(model, cluster);
        let plan = answer(&model, &cluster, gpus, &Restrictions::default());
        let plan_s = plan.best.as_ref().expect("something fits").priced.iteration_s;
        let least_s = plan_s * (1.0 - plan.proof.gap) * (1.0 - CLOSE);
        assert_eq!(plan.proof.proven_optimal, plan.proof.gap == 0.0);
        let random = &mut Random::new(gpus);
        let known = ONCE_FASTER.iter().filter(|(of, _)| *of == model.name);
        let known = known.map(|(_, pins)| Restrictions::parse(pins).expect("it reads"));
        let drawn = (0..instances(12, 60)).map(|_| pinned(random, gpus));
        for r in known.chain(drawn) {
            let Some(found) = answer(&model, &cluster, gpus, &r).best else { continue };
            let time_s = found.priced.iteration_s;
            assert!(
                !found.priced.fits || time_s >= least_s,
                "{} on {gpus} {}: {time_s} of {:?} lies below {plan_s} by more than {}",
                model.name,
                cluster.name,
                found.decisions,
                plan.proof.gap
            );
            compared += 1;
            faster += u64::from(time_s < plan_s * (1.0 - CLOSE));
        }
    }
    println!("{compared} estimates, {faster} faster than the plan");
    assert!(faster > 0, "nothing shows that the gap matters");
    assert!(compared > instances(30, 150), "only {compared} estimates fit");
}

#[test]
fn more_memory_never_makes_a_plan_slower_by_more_than_the_gap() {
    for (model, cluster, gpus, pp) in [("gpt_18b", "selene", 32, 2), ("gpt_39b", "selene", 64, 4)] {
        let (model, cluster) = shipped(model, cluster);
        let at_least = Restrictions::parse(&[format!("pp>={pp}")]).expect("it reads");
        let mut fastest_s = f64::INFINITY;
        for factor in [0.90, 0.93, 0.96, 1.0, 1.02, 1.05, 1.08] {
            let mut cluster = cluster.clone();
            cluster.device.hbm_bytes *= factor;
            let outcome = answer(&model, &cluster, gpus, &at_least);
            let time_s = outcome.best.expect("something fits").priced.iteration_s;
            let least_s = time_s * (1.0 - outcome.proof.gap) * (1.0 - CLOSE);
            assert!(
                fastest_s >= least_s,
                "{}: {fastest_s} with less memory, {time_s} with {factor} and a gap of {}",
                model.name,
                outcome.proof.gap
            );
            fastest_s = fastest_s.min(time_s);
        }
    }
}

/// Planning twice gives the same plan and the same proof.
#[test]
fn the_same_request_has_the_same_plan_and_proof() {
    let (model, cluster) = shipped("gpt_39b", "selene");
    let of = || {
        let outcome = answer(&model, &cluster, 64, &Restrictions::default());
        let found = outcome.best.expect("something fits");
        (found.decisions, found.placed, outcome.proof.gap, outcome.proof.placed)
    };
    assert_eq!(of(), of());
}
