//! Every shipped model on two clusters: a simple configuration can be priced, and the two placement
//! solvers agree.

use meshwright_tests::close;
use models::decisions::{Decisions, RecomputePolicy};
use models::model::ModelSpec;
use models::plan::Breakdown;
use planner::partition::{Problem, Scratch, dynamic_program, ilp};
use planner::pricing::Configuration;
use planner::pricing::cost_cache::CostCache;
use planner::pricing::priced::{Placed, PlacedStage, Priced};
use planner::request::Task;
use planner::request::restrictions::Restrictions;
use planner::request::task::SOLVER_WORK;
use planner::until::Until;

const CLUSTERS: [&str; 2] = ["dgx_h100", "selene"];

fn models() -> impl Iterator<Item = ModelSpec> {
    let read =
        |name| models::model::shipped(name).and_then(Result::ok).expect("shipped models read");
    models::model::shipped_names().map(read)
}

fn cluster(name: &str) -> models::cluster::ClusterSpec {
    models::cluster::shipped(name).and_then(Result::ok).expect("shipped clusters read")
}

/// A 1F1B configuration on 16 GPUs that every shipped model allows: a pipeline of two or four
/// ranks, one sequence a micro-batch.
fn simple(task: &Task<'_>, recompute: RecomputePolicy) -> Decisions {
    let nodes = task.space().layouts();
    let plain =
        |d: &Decisions| d.cp == 1 && d.ep == 1 && d.micro_batch == 1 && d.pp > 1 && d.pp <= 4;
    let node = nodes.iter().find(|node| plain(&node.decisions) && node.decisions.micro_batches > 1);
    let node = node.unwrap_or_else(|| panic!("{} has no simple configuration", task.model.name));
    Decisions { recompute, ..node.decisions.clone() }
}

/// An even cut without recomputation.
fn even(case: &Configuration<'_>) -> Placed {
    let (layers, stages) = (case.cache.model.layers, case.stages());
    let stage = |i: usize| {
        let (start, end) = (i * layers / stages, (i + 1) * layers / stages);
        let recompute =
            case.cache.layers.counts(start, end).into_iter().map(|n| [n, 0, 0]).collect();
        PlacedStage { start, end, recompute }
    };
    (0..stages).map(stage).collect()
}

fn sum(b: &Breakdown) -> f64 {
    b.compute_s
        + b.tp_s
        + b.cp_s
        + b.ep_s
        + b.pp_s
        + b.dp_s
        + b.bubble_s
        + b.recompute_s
        + b.optimizer_s
        + b.other_s
}

fn check(model: &ModelSpec, priced: &Priced) {
    let name = &model.name;
    assert!(priced.iteration_s.is_finite() && priced.iteration_s > 0.0, "{name}: {priced:?}");
    assert!(close(sum(&priced.breakdown), priced.iteration_s), "{name}: {:?}", priced.breakdown);
    assert!(priced.breakdown.compute_s > 0.0 && priced.breakdown.bubble_s >= -1e-9, "{name}");
    for bytes in &priced.device_bytes {
        assert!(bytes.is_finite() && *bytes > 0.0, "{name}: {bytes}");
    }
    for stage in &priced.stages {
        assert!(stage.memory.total.is_finite() && stage.memory.total > 0.0, "{name}: {stage:?}");
    }
}

#[test]
fn every_shipped_model_has_a_price() {
    let restrictions = Restrictions::default();
    for cluster in CLUSTERS.map(cluster) {
        for model in models() {
            let task = Task::new(&model, &cluster, 16, &restrictions);
            let cache = CostCache::new(&model, &cluster, 16);
            let case = Configuration::new(&cache, simple(&task, RecomputePolicy::None))
                .expect("1F1B exists");
            check(&model, &case.price(&even(&case), &mut Scratch::default()));
        }
    }
}

/// The problem of the closed form: without tails, which only the integer program models.
fn closed_form(case: &Configuration<'_>) -> Problem {
    let mut problem = case.problem(f64::INFINITY, true).expect("memory is endless");
    problem.budget_bytes.fill(1e15);
    for column in problem.columns.iter_mut().skip(1).flatten() {
        column.tail_s = 0.0;
    }
    problem
}

#[test]
fn integer_and_dynamic_program_agree_on_every_shipped_model() {
    let restrictions = Restrictions::default();
    for cluster in CLUSTERS.map(cluster) {
        for model in models() {
            let task = Task::new(&model, &cluster, 16, &restrictions);
            let cache = CostCache::new(&model, &cluster, 16);
            let case = Configuration::new(&cache, simple(&task, RecomputePolicy::None))
                .expect("1F1B exists");
            agree(&model.name, &closed_form(&case));
        }
    }
}

fn agree(name: &str, problem: &Problem) {
    let limits = ilp::Limits { paths: false, work: SOLVER_WORK, until: Until::default() };
    let dynamic_s =
        dynamic_program::solve(problem, f64::INFINITY).expect("memory is endless").bound_s;
    // A cutoff above the optimum: it excludes nothing that matters, but gives the integer program
    // its scale.
    let report = ilp::solve(problem, dynamic_s * 2.0, limits, &mut Scratch::default());
    let program_s = report.best.expect("something lies below").1;
    assert!(close(program_s, dynamic_s), "{name}: program {program_s}, dynamic {dynamic_s}");
}
