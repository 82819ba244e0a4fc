//! More memory, faster links or more to choose from never make the best plan slower.

use meshwright_tests::instances;
use meshwright_tests::random::Random;
use meshwright_tests::small::Instance;
use models::cluster::ClusterSpec;
use planner::request::Task;
use planner::request::restrictions::Restrictions;
use planner::search::search;

fn best_s(instance: &Instance, cluster: &ClusterSpec) -> f64 {
    let restrictions = instance.restrictions();
    let task = Task::new(&instance.model, cluster, instance.gpus, &restrictions);
    search(&task, &mut |_| {}).best.map_or(f64::INFINITY, |found| found.priced.iteration_s)
}

fn never_slower(change: impl Fn(&mut ClusterSpec, f64)) {
    for seed in 0..instances(60, 400) {
        let random = &mut Random::new(seed + 1_000_000);
        let instance = Instance::random(random);
        let mut better = instance.cluster.clone();
        change(&mut better, random.between(1.0, 4.0));
        let (before_s, after_s) =
            (best_s(&instance, &instance.cluster), best_s(&instance, &better));
        assert!(
            after_s <= before_s * (1.0 + 1e-9),
            "seed {seed}, {} GPUs, {:?}: {before_s} s before, {after_s} s after",
            instance.gpus,
            instance.settings
        );
    }
}

#[test]
fn more_memory_is_never_slower() {
    never_slower(|cluster, factor| cluster.device.hbm_bytes *= factor);
}

#[test]
fn faster_links_inside_are_never_slower() {
    never_slower(|cluster, factor| cluster.levels[0].bytes_per_s *= factor);
}

#[test]
fn faster_links_outside_are_never_slower() {
    never_slower(|cluster, factor| cluster.levels[1].bytes_per_s *= factor);
}

#[test]
fn shorter_latencies_are_never_slower() {
    never_slower(|cluster, factor| {
        for level in &mut cluster.levels {
            level.latency_s /= factor;
        }
    });
}

#[test]
fn faster_memory_is_never_slower() {
    never_slower(|cluster, factor| cluster.device.hbm_bytes_per_s *= factor);
}

/// Activations on the host may move longer than they take to compute again, so that no
/// recomputation is the slowest.
#[test]
fn a_narrower_space_is_never_faster() {
    let cluster = models::cluster::shipped("dgx_h100").and_then(Result::ok).expect("it reads");
    let model = models::model::shipped("llama8b").and_then(Result::ok).expect("it reads");
    let best_s = |settings: &[&str]| {
        let restrictions = Restrictions::parse(settings).expect("they are valid");
        let task = Task::new(&model, &cluster, 64, &restrictions);
        search(&task, &mut |_| {}).best.map_or(f64::INFINITY, |found| found.priced.iteration_s)
    };
    let all_s = best_s(&["offload=activations", "tp=1", "pp=1"]);
    for recompute in ["recompute=none", "recompute=selective", "recompute=full"] {
        let own_s = best_s(&["offload=activations", "tp=1", "pp=1", recompute]);
        assert!(all_s <= own_s * (1.0 + 1e-9), "{recompute}: {own_s} s, but {all_s} s with all");
    }
}
