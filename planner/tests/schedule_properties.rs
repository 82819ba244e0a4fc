//! Critical paths, closed forms and bounds against the simulator, on random durations.

mod closed_form;

use closed_form::Stages;
use models::schedule::{PassTimes, Schedule, ScheduleName, VocabPasses, gpipe, one_f_one_b};
use planner::simulate::{Durations, InputDurations, Prepared, VocabDurations, Workspace, simulate};
use proptest::collection::vec;
use proptest::prelude::*;

/// Any small schedule.
fn schedules() -> impl Strategy<Value = Schedule> {
    let plain = (0..ScheduleName::ALL.len(), 1..6_usize, 1..4_usize, 1..4_usize).prop_map(
        |(name, p, rounds, v)| {
            let name = ScheduleName::ALL[name];
            // Some need an even number of ranks, some twice as many micro-batches.
            let p = p + usize::from(name.check(p, 2 * p, name.chunk_rule().nearest(v)).is_err());
            name.build(p, 2 * p * rounds, name.chunk_rule().nearest(v)).unwrap()
        },
    );
    let kinds = (0..3_usize, 1..6_usize, 1..12_usize, any::<bool>());
    let vocab = kinds.prop_map(|(vocab, p, m, input)| {
        let schedule = ScheduleName::OneFOneB
            .build_with_vocab(p, m, 1, VocabPasses::ALL[vocab], None)
            .unwrap();
        if !input {
            return schedule;
        }
        schedule.with_input_passes(PassTimes::default()).unwrap()
    });
    prop_oneof![plain, vocab]
}

/// Multiples of 1/64 s, so that sums are exact.
fn times(n: usize) -> impl Strategy<Value = Vec<f64>> {
    vec((1..256_u32).prop_map(|n| f64::from(n) / 64.0), n)
}

fn durations(schedule: &Schedule) -> impl Strategy<Value = Durations> + use<> {
    let (n, p) = (schedule.stages(), schedule.ranks);
    let by_stage = (times(n), times(n), times(n), times(n));
    let vocab = (times(p), times(p), times(p), times(6));
    let input = (times(p), times(p));
    let pairs = (times(n), times(n));
    (by_stage, vocab, input, pairs).prop_map(|(stages, (s, s2, t, barriers), input, pairs)| {
        let (forward, backward, weight, link_s) = stages;
        let paired = [pairs.0, pairs.1];
        let vocab = VocabDurations {
            first: s,
            middle: s2,
            last: t,
            broadcast_s: barriers[0],
            after_first_s: barriers[1],
            after_middle_s: barriers[2],
            after_last_s: barriers[3],
            input: InputDurations {
                forward: input.0,
                backward: input.1,
                after_forward_s: barriers[4],
                before_backward_s: barriers[5],
            },
        };
        Durations { forward, backward, weight, paired, link_s, vocab }
    })
}

fn with_durations() -> impl Strategy<Value = (Schedule, Durations, Durations, Vec<f64>)> {
    schedules().prop_flat_map(|schedule| {
        let (one, other) = (durations(&schedule), durations(&schedule));
        let tails = times(schedule.ranks);
        (Just(schedule), one, other, tails)
    })
}

/// `m` and the times of unequal stages.
fn pipelines() -> impl Strategy<Value = (usize, Durations)> {
    (1..9_usize, 1..25_usize).prop_flat_map(|(p, m)| {
        let links = prop_oneof![Just(vec![0.0; p]), times(p)];
        (times(p), times(p), links).prop_map(move |(forward, backward, link_s)| {
            (m, Durations { forward, backward, link_s, ..Durations::default() })
        })
    })
}

fn stages(durations: &Durations) -> Stages<'_> {
    let Durations { forward, backward, link_s, .. } = durations;
    Stages { forward, backward, link_s }
}

fn makespan_s(schedule: &Schedule, durations: &Durations) -> f64 {
    simulate(schedule, durations).unwrap().makespan_s
}

/// The simple lower bound with only the round trip to the last stage, for `m > p` and no latency.
fn simple_lower_bound_s(durations: &Durations, m: usize) -> f64 {
    let p = durations.forward.len();
    let work_s = |j: usize| durations.forward[j] + durations.backward[j];
    let bound_s = |q: usize| {
        let behind_s: f64 = (q + 1..p).map(work_s).sum();
        let idle_s = |time: f64| (behind_s - (p - 1 - q) as f64 * time).max(0.0);
        let idle_s = idle_s(durations.forward[q]) + idle_s(durations.backward[q]);
        (0..q).map(work_s).sum::<f64>() + m as f64 * work_s(q) + idle_s
    };
    (0..p).map(bound_s).fold(0.0, f64::max)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 5000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_critical_path_adds_up_to_the_makespan((schedule, one, other, tails) in with_durations()) {
        let prepared = Prepared::new(&schedule).unwrap();
        let workspace = &mut Workspace::default();
        let path = prepared.critical_path(&one, workspace);
        prop_assert_eq!(path.length_s(&one), prepared.makespan(&one, workspace));
        prop_assert!(path.length_s(&other) <= prepared.makespan(&other, workspace));

        let path = prepared.critical_path_with_tails(&one, &tails, workspace);
        let length_s = path.length_s(&one) + tails[path.end_rank];
        prop_assert_eq!(length_s, prepared.makespan_with_tails(&one, &tails, workspace));
    }

    #[test]
    fn one_f_one_b_lies_between_its_bounds((m, durations) in pipelines()) {
        let schedule = one_f_one_b(durations.forward.len(), m).unwrap();
        let makespan_s = makespan_s(&schedule, &durations);
        let lower_s = closed_form::one_f_one_b_lower_bound_s(stages(&durations), m);
        let upper_s = closed_form::one_f_one_b_upper_bound_s(stages(&durations), m);
        prop_assert!(lower_s <= makespan_s + 1e-9, "{} {}", lower_s, makespan_s);
        prop_assert!(upper_s >= makespan_s - 1e-9, "{} {}", upper_s, makespan_s);
    }

    #[test]
    fn the_lower_bound_is_tight_where_backward_is_two_forwards((m, mut durations) in pipelines()) {
        durations.link_s.fill(0.0);
        durations.backward = durations.forward.iter().map(|f| 2.0 * f).collect();
        let m = m + durations.forward.len();
        let schedule = one_f_one_b(durations.forward.len(), m).unwrap();
        let makespan_s = makespan_s(&schedule, &durations);
        let lower_s = closed_form::one_f_one_b_lower_bound_s(stages(&durations), m);
        prop_assert!(simple_lower_bound_s(&durations, m) <= lower_s);
        prop_assert!(lower_s >= 0.95 * makespan_s, "{} {}", lower_s, makespan_s);
    }

    #[test]
    fn equal_stages_cost_what_the_papers_say(
        p in 2..9_usize, rounds in 1..5_usize, v in 2..5_usize,
        forward in 0.5..2.0, backward in 0.5..4.0, link_s in 0.0..0.2,
    ) {
        let m = p * rounds;
        let work_s = m as f64 * (forward + backward);
        let uniform = |schedule: &Schedule, link_s| {
            let durations = Durations::uniform(schedule, forward, backward, 0.0, link_s);
            makespan_s(schedule, &durations) - work_s
        };
        let close = |ours: f64, theirs: f64| (ours - theirs).abs() < 1e-9 * work_s;
        let schedule = gpipe(p, m).unwrap();
        let bubble_s = closed_form::gpipe_bubble_s(p, forward, backward, link_s);
        prop_assert!(close(uniform(&schedule, link_s), bubble_s));

        let schedule = one_f_one_b(p, m).unwrap();
        let bubble_s = closed_form::one_f_one_b_bubble_s(p, forward, backward);
        prop_assert!(close(uniform(&schedule, 0.0), bubble_s));
        let bubble_s = bubble_s + closed_form::strict_1f1b_latency_s(p, m, link_s);
        prop_assert!(close(uniform(&schedule, link_s), bubble_s));

        let bubble_s = closed_form::interleaved_bubble_s(p, v, forward, backward);
        for name in [ScheduleName::Interleaved1F1B, ScheduleName::LoopedBfs] {
            let schedule = name.build(p, m, v).unwrap();
            prop_assert!(close(uniform(&schedule, 0.0), bubble_s), "{}", name);
        }
    }

    #[test]
    fn pairs_shorten_overlapped_1f1b_by_what_they_hide(
        p in 1..7_usize, v in 1..5_usize, rounds in 1..6_usize, times in times(3)
    ) {
        let v = if p > 1 { v + 1 } else { v };
        let (m, forward, backward) = (p * rounds, times[0], times[1]);
        let pair_s = forward.max(backward) + forward.min(backward) * times[2] / 4.0;
        let schedule = ScheduleName::Overlapped1F1B.build(p, m, v).unwrap();
        let mut durations = Durations::uniform(&schedule, forward, backward, 0.0, 0.0);
        let [of_forward, of_backward] = &mut durations.paired;
        of_forward.fill((pair_s - backward) / v as f64);
        of_backward.fill(backward / v as f64);
        let expected_s = closed_form::overlapped_1f1b_s(p, m, v, forward + backward, pair_s);
        let found_s = makespan_s(&schedule, &durations);
        prop_assert!((found_s - expected_s).abs() < 1e-9 * expected_s, "{} {}", found_s, expected_s);
    }
}

#[test]
fn the_lower_bound_gives_the_worked_examples() {
    let example = |forward: &[f64], m| {
        let backward: Vec<f64> = forward.iter().map(|f| 2.0 * f).collect();
        let stages = Stages { forward, backward: &backward, link_s: &[] };
        let bound = closed_form::one_f_one_b_lower_bound_s(stages, m);
        (bound, closed_form::one_f_one_b_upper_bound_s(stages, m))
    };
    assert_eq!(example(&[3.0, 1.0], 4), (36.0, 39.0));
    assert_eq!(example(&[1.0, 2.0, 1.0], 6).0, 40.0);
    assert_eq!(example(&[3.0, 1.0, 2.0, 1.0], 4).1, 48.0);
    assert_eq!(example(&[2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 32), (204.0, 216.0));
}

/// Run by hand in release:
/// `cargo test --release --test schedule_properties -- --ignored --nocapture`.
#[test]
#[ignore = "prints timings"]
fn timing_of_16384_passes() {
    let schedule = ScheduleName::Interleaved1F1B.build(32, 128, 2).unwrap();
    let (durations, mut workspace) =
        (Durations::uniform(&schedule, 1.0, 1.0, 1.0, 0.1), Workspace::default());
    let timed = |what: &str, n: u32, run: &mut dyn FnMut()| {
        let started = std::time::Instant::now();
        (0..n).for_each(|_| run());
        println!("{what}: {:?}", started.elapsed() / n);
    };
    timed("generate", 20, &mut || drop(ScheduleName::Interleaved1F1B.build(32, 128, 2)));
    timed("prepare", 20, &mut || drop(Prepared::new(&schedule)));
    let prepared = Prepared::new(&schedule).unwrap();
    timed("makespan", 1000, &mut || {
        prepared.makespan(&durations, &mut workspace);
    });
    timed("critical path", 1000, &mut || {
        prepared.critical_path(&durations, &mut workspace);
    });
    timed("vocabulary order, p 32, m 128", 3, &mut || {
        drop(ScheduleName::OneFOneB.build_with_vocab(32, 128, 1, VocabPasses::One, None));
    });
}
