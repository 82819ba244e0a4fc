//! The bidirectional schedules `dualpipe` and `chimera`, which hold every stage twice: their memory
//! and time against 1F1B with the same settings, and their search against brute force.

use meshwright_tests::random::Random;
use meshwright_tests::small::{Instance, Sizes, cluster_of, plain_model};
use meshwright_tests::{brute, close, instances};
use models::cluster::ClusterSpec;
use models::decisions::Decisions;
use models::schedule::{PassKind, ScheduleName};
use planner::partition::Scratch;
use planner::pricing::Configuration;
use planner::pricing::cost_cache::CostCache;
use planner::pricing::priced::{Placed, PlacedStage, Priced};
use planner::request::Task;
use planner::request::restrictions::Restrictions;
use planner::search::search;
use planner::simulate::{Durations, simulate};

const COPIED: [ScheduleName; 2] = [ScheduleName::DualPipe, ScheduleName::Chimera];

/// Bytes/s of the links inside and outside nodes of two GPUs. A message takes a microsecond more
/// outside.
const LINKS: [f64; 2] = [1e9, 1e8];

fn sizes() -> Sizes {
    Sizes {
        hbm_bytes: 1e9,
        host_bytes: 1e10,
        inner_gpus: 2,
        inner_bytes_per_s: LINKS[0],
        outer_bytes_per_s: LINKS[1],
        base: "megatron_2024",
    }
}

/// Reductions over replicas take what the links take, whatever the last fit found.
fn cluster() -> ClusterSpec {
    let mut cluster = cluster_of(&sizes());
    cluster.software.dp_slowdown = 1.0;
    cluster
}

/// Eight layers over four pipeline ranks, eight micro-batches of one sequence, with `dp` replicas.
fn priced(schedule: ScheduleName, dp: u64, zero_stage: u64) -> (Decisions, Priced, Vec<f64>) {
    let (model, cluster) = (plain_model(8, 8 * dp, None), cluster());
    let settings =
        [format!("schedule={schedule}"), format!("dp={dp}"), format!("zero_stage={zero_stage}")];
    let settings = settings.into_iter().chain(
        [
            "tp=1",
            "pp=4",
            "cp=1",
            "micro_batch=1",
            "vocab=first_last",
            "recompute=none",
            "offload=none",
        ]
        .map(str::to_owned),
    );
    let mut settings: Vec<String> = settings.chain(["rank_order=tp-cp-dp-pp".to_owned()]).collect();
    if zero_stage > 0 {
        settings.push(format!("dp_shard={dp}"));
    }
    let restrictions = Restrictions::parse(&settings).unwrap();
    let found = search(&Task::new(&model, &cluster, 4 * dp, &restrictions), &mut |_| {});
    let found = found.best.expect("it fits");
    let cache = CostCache::new(&model, &cluster, 4 * dp);
    let case = Configuration::new(&cache, found.decisions.clone()).unwrap();
    let tails = found.placed.iter().enumerate();
    let tails = tails.map(|(n, stage)| case.stage(n, stage.start, stage.end).tail_s).collect();
    (found.decisions, found.priced, tails)
}

/// Each copy of a stage holds as much as 1F1B's stage, and pipeline ranks hold as many
/// micro-batches as their orders imply.
#[test]
fn devices_hold_two_copies() {
    for schedule in COPIED {
        for (dp, zero_stage) in [(1, 0), (2, 0), (2, 1), (4, 2), (2, 3)] {
            let (d, twice, _) = priced(schedule, dp, zero_stage);
            let (_, once, _) = priced(ScheduleName::OneFOneB, dp, zero_stage);
            let order = schedule.build(4, d.micro_batches as usize, 2).unwrap();
            assert_eq!((twice.stages.len(), twice.copies.len()), (4, 4));
            let each = |stage: usize| once.stages[stage].memory.activations / (4 - stage) as f64;
            for (stage, one) in once.stages.iter().enumerate() {
                let (first, second) = (&twice.stages[stage], &twice.copies[stage]);
                assert_eq!((first.rank, first.chunk), (stage, 0));
                assert_eq!((second.rank, second.chunk), (3 - stage, 1));
                for copy in [first, second] {
                    assert!(close(copy.memory.parameters, one.memory.parameters), "{schedule}");
                    assert!(close(copy.memory.gradients, one.memory.gradients), "{schedule}");
                    assert!(close(copy.memory.optimizer, one.memory.optimizer), "{schedule}");
                }
            }
            for rank in 0..4 {
                let (mut held, mut most) = ([0.0; 2], 0.0_f64);
                for pass in &order.passes[rank] {
                    let count = &mut held[usize::from(pass.chunk)];
                    match pass.kind {
                        PassKind::F => *count += 1.0,
                        PassKind::W | PassKind::BW => *count -= 1.0,
                        _ => {}
                    }
                    most = most.max(held[0] * each(rank) + held[1] * each(3 - rank));
                }
                let all = twice.stages.iter().chain(&twice.copies);
                let on_it: Vec<_> = all.filter(|stage| stage.rank == rank).collect();
                let activations: f64 = on_it.iter().map(|stage| stage.memory.activations).sum();
                assert!(close(activations, most), "{schedule}, rank {rank}: {activations} {most}");
                let total: f64 = on_it.iter().map(|stage| stage.memory.total).sum();
                assert!(close(total, twice.device_bytes[rank]), "{total}");
            }
        }
    }
}

/// Copies exchange their gradients after the passes: whole ones, or the shards of ZeRO.
#[test]
fn copies_exchange_their_gradients() {
    let (_, once, _) = priced(ScheduleName::OneFOneB, 1, 0);
    let cluster = cluster();
    // Gradients are stored in f32, and may be narrower on links.
    let narrowed = cluster.software.reduced_gradient_bytes.min(4.0) / 4.0;
    for schedule in COPIED {
        let (_, _, tails) = priced(schedule, 1, 0);
        for (stage, tail_s) in tails.iter().enumerate() {
            // Ranks 0 and 3 are in different nodes, and so are 1 and 2.
            let link = &cluster.levels[1];
            let bytes = once.stages[stage].memory.gradients * narrowed;
            // A ring of two: each sends half of its gradients, then half of the sums.
            let ring_s = bytes / (link.bytes_per_s * link.efficiency);
            let least_s = ring_s * 0.999;
            assert!((least_s..least_s + 2e-5).contains(tail_s), "{stage}: {tail_s}, not {ring_s}");
        }
        let exchanged_s = |zero_stage: u64, dp: u64| {
            let (_, _, tails) = priced(schedule, dp, zero_stage);
            let (_, _, alone) = priced(ScheduleName::GPipe, dp, zero_stage);
            tails.iter().zip(&alone).map(|(both, one)| both - one).sum::<f64>()
        };
        // The reduction over replicas is hidden less, because nothing overlaps with it.
        assert!(exchanged_s(0, 2) > exchanged_s(1, 2), "{schedule}");
        assert!(exchanged_s(1, 2) > exchanged_s(1, 4), "{schedule}");
    }
}

/// An iteration is the simulated passes, the exchange, and one update of both copies.
#[test]
fn an_iteration_is_its_passes_with_what_comes_behind() {
    let (model, cluster) = (plain_model(8, 8, None), cluster());
    let cache = CostCache::new(&model, &cluster, 4);
    for schedule in COPIED {
        let (d, _, _) = priced(schedule, 1, 0);
        let case = Configuration::new(&cache, d.clone()).unwrap();
        // An uneven cut, so that no two stages take equally long.
        let bounds = [0, 1, 4, 6, 8];
        let stage = |n: usize| PlacedStage {
            start: bounds[n],
            end: bounds[n + 1],
            recompute: vec![[bounds[n + 1] - bounds[n], 0, 0]],
        };
        let placed: Placed = (0..4).map(stage).collect();
        let price = case.price(&placed, &mut Scratch::default());
        let cost = |n: usize| case.stage(n, bounds[n], bounds[n + 1]);
        let [forward, whole, weight] = [0, 1, 2].map(|part| -> Vec<f64> {
            let of = |n| match part {
                0 => cost(n).forward.total_s(),
                1 => cost(n).backward.total_s(),
                _ => cost(n).weight_s,
            };
            (0..4).map(of).collect()
        });
        let order = schedule.build(4, 8, 2).unwrap();
        let split = schedule == ScheduleName::DualPipe;
        let link_s = if split {
            case.problem_of(vec![vec![]; 4]).fixed.link_s.clone()
        } else {
            vec![0.0; 3]
        };
        let durations = Durations {
            backward: whole.iter().zip(&weight).map(|(whole, weight)| whole - weight).collect(),
            paired: [forward.clone(), whole.clone()],
            forward,
            weight: if split { weight } else { vec![] },
            link_s,
            ..Durations::default()
        };
        let timeline = simulate(&order, &durations).unwrap();
        let both = |i: usize, of: &dyn Fn(usize) -> f64| of(i) + of(3 - i);
        let ends = timeline.ranks.iter().enumerate();
        let barrier = ends.map(|(i, rank)| rank.last_end_s + both(i, &|n| cost(n).tail_s));
        let step = |n: usize| cost(n).optimizer_s + cost(n).gather_s;
        let steps = (0..4).map(|i| both(i, &step));
        let pipeline_s = barrier.fold(0.0, f64::max) + steps.fold(0.0, f64::max);
        assert!(close(price.iteration_s, case.with_overheads_s(pipeline_s)), "{schedule}");
        let parts = &price.breakdown;
        assert!(parts.bubble_s > 0.0 && parts.dp_s > 0.0, "{schedule}: {parts:?}");
    }
}

#[test]
fn the_search_for_them_equals_brute_force() {
    let (mut compared, mut feasible, mut seed) = (0, 0, 0);
    while compared < instances(40, 400) {
        let random = &mut Random::new(seed);
        seed += 1;
        let schedule = random.pick(&COPIED);
        let mut instance = Instance::random(random);
        instance.gpus = random.pick(&[2, 2, 4, 8]);
        instance
            .settings
            .retain(|setting| !["schedule", "vocab"].iter().any(|name| setting.starts_with(name)));
        instance.settings.push(format!("schedule={schedule}"));
        let restrictions = instance.restrictions();
        let task = Task::new(&instance.model, &instance.cluster, instance.gpus, &restrictions);
        let Some(answer) = brute::best(&task, 20_000) else { continue };
        if answer.combinations == 0 {
            continue;
        }
        compared += 1;
        let outcome = search(&task, &mut |_| {});
        let what = format!("seed {}, {:?}", seed - 1, instance.settings);
        assert_eq!(outcome.proof.candidates, answer.combinations, "{what}");
        assert_eq!(outcome.proof.searched_gap, 0.0, "{what}");
        match (&answer.best, &outcome.best) {
            (None, None) => {}
            (Some((.., known)), Some(found)) => {
                feasible += 1;
                let (known_s, found_s) = (known.iteration_s, found.priced.iteration_s);
                assert!(
                    close(known_s, found_s) && found.priced.fits,
                    "{what}: {known_s} {found_s}"
                );
            }
            (known, found) => panic!("{what}: brute {known:?}, search {found:?}"),
        }
    }
    println!("{compared} of {seed} instances, {feasible} feasible");
    assert!(feasible * 4 > compared, "memory binds too much to test anything");
}
