//! More memory or faster links never make the best plan slower.

use meshwright_tests::instances;
use meshwright_tests::random::Random;
use meshwright_tests::small::Instance;
use models::cluster::ClusterSpec;
use planner::request::Task;
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
