//! Cost in time of an input layer that is split over all pipeline ranks, and of its collectives.

use models::decisions::Decisions;
use models::schedule::{PassKind, PassTimes, Schedule, ScheduleName, VocabPasses};
use planner::partition::Scratch;
use planner::pricing::Configuration;
use planner::pricing::cost_cache::CostCache;
use planner::request::Task;
use planner::request::restrictions::Restrictions;
use planner::search::search;
use planner::simulate::{Durations, InputDurations, VocabDurations, simulate};
use proptest::prelude::*;

/// Times of `IF`, `IB`, the all-reduce after `IF` and the broadcast before `IB`.
#[derive(Clone, Copy, Debug)]
struct Input {
    forward: f64,
    backward: f64,
    sum: f64,
    broadcast: f64,
}

fn makespan_s(schedule: &Schedule, times: PassTimes, input: Input) -> f64 {
    let PassTimes { forward, backward, weight, link, .. } = times;
    let mut durations = Durations::uniform(schedule, forward, backward, weight, link);
    let each = |time: f64| vec![time; schedule.ranks];
    durations.vocab = VocabDurations {
        first: each(times.vocab[0]),
        middle: each(times.vocab[1]),
        last: each(times.vocab[2]),
        broadcast_s: times.broadcast,
        after_first_s: times.barriers[0],
        after_middle_s: times.barriers[1],
        after_last_s: times.barriers[2],
        input: InputDurations {
            forward: each(input.forward),
            backward: each(input.backward),
            after_forward_s: input.sum,
            before_backward_s: input.broadcast,
        },
    };
    simulate(schedule, &durations).unwrap().makespan_s
}

/// One micro-batch on two ranks: all passes follow one another. The first rank's own `IB` waits for
/// no broadcast.
#[test]
fn one_micro_batch_goes_through_all_passes() {
    let schedule =
        ScheduleName::OneFOneB.build_with_vocab(2, 1, 1, VocabPasses::One, None).unwrap();
    let schedule = schedule.with_input_passes(PassTimes::default()).unwrap();
    let input = Input { forward: 0.1, backward: 0.2, sum: 0.05, broadcast: 0.3 };
    let found_s = makespan_s(&schedule, PassTimes::default(), input);
    let expected_s = (0.1 + 0.05) + 2.0 + 0.1 + 4.0 + (0.3 + 0.2);
    assert!((found_s - expected_s).abs() < 1e-12, "{found_s} {expected_s}");
}

fn times() -> impl Strategy<Value = PassTimes> {
    let vocab = prop::array::uniform3(0.05..1.2_f64);
    (0.6..2.0_f64, 0.3..1.5_f64, vocab).prop_map(|(backward, weight, vocab)| PassTimes {
        backward,
        weight,
        vocab,
        ..PassTimes::default()
    })
}

fn input() -> impl Strategy<Value = Input> {
    let passes = (0.0..0.1_f64, 0.0..0.1_f64);
    let collectives = (0.0..0.25_f64, 0.0..0.25_f64);
    (passes, collectives).prop_map(|((forward, backward), (sum, broadcast))| Input {
        forward,
        backward,
        sum,
        broadcast,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Passes cost their own time. Collectives overlap with other passes of the first stage, so
    /// each is exposed only once: before the first forward and after the last backward. Interleaved
    /// orders, whose first stage has more forwards in a row, seldom expose one a second time (one
    /// in 1,000 instances).
    #[test]
    fn collectives_of_the_input_layer_are_exposed_once(
        name in prop::sample::select(&ScheduleName::VOCAB[..]),
        p in 2..9_usize,
        rounds in 2..5_usize,
        vocab in prop::sample::select(&VocabPasses::ALL[..]),
        times in times(),
        input in input(),
    ) {
        let (m, v) = (rounds * p, name.chunk_rule().nearest(1));
        let plain = name.build_with_vocab(p, m, v, vocab, Some(times)).unwrap();
        let with = plain.clone().with_input_passes(times).unwrap();
        let none = Input { forward: 0.0, backward: 0.0, sum: 0.0, broadcast: 0.0 };
        let plain_s = makespan_s(&plain, times, none);
        let still_s = makespan_s(&with, times, none);
        prop_assert!((still_s - plain_s).abs() < 1e-9 * plain_s, "{still_s} {plain_s}");
        let passes_s = m as f64 * (input.forward + input.backward);
        let times_exposed = if name == ScheduleName::Interleaved1F1B { 2.0 } else { 1.0 };
        let most_s = plain_s + passes_s + times_exposed * (input.sum + input.broadcast);
        let found_s = makespan_s(&with, times, input);
        prop_assert!(found_s <= most_s + 1e-9, "{name} {found_s} {most_s} {plain_s}");
    }
}

/// What is a part of `T` in an order for unknown times takes the same time in passes of its own in
/// the order that runs. The iteration time changes only by what is exposed at its ends.
#[test]
fn the_order_that_runs_prices_look_ups_separately() {
    let model = models::model::shipped("vocab_21b").and_then(Result::ok).unwrap();
    let cluster = models::cluster::shipped("a100_40g").and_then(Result::ok).unwrap();
    let settings = ["vocab=parallel_2", "schedule=1f1b", "pp=32", "tp=1", "micro_batch=1"];
    let restrictions = Restrictions::parse(&settings).unwrap();
    let task = Task::new(&model, &cluster, 32, &restrictions);
    let found = search(&task, &mut |_| {}).best.unwrap();
    assert!(found.decisions.pass_times.is_some(), "a search knows the times");
    let unknown = Decisions { pass_times: None, ..found.decisions.clone() };
    let cache = CostCache::new(&model, &cluster, 32);
    let configured = |decisions: &Decisions| Configuration::new(&cache, decisions.clone()).unwrap();
    let without = configured(&unknown).price(&found.placed, &mut Scratch::default());

    let spent = |decisions: &Decisions| {
        let timeline = configured(decisions).timeline(&found.placed, None).unwrap();
        let spans = timeline.spans[5].clone();
        let of = move |kind: PassKind| {
            let own = spans.iter().filter(|span| span.pass.kind == kind);
            own.map(|span| span.end_s - span.start_s).sum::<f64>()
        };
        [PassKind::T, PassKind::IF, PassKind::IB].map(of)
    };
    let [within_s, none_s, _] = spent(&unknown);
    let [last_s, forward_s, backward_s] = spent(&found.decisions);
    assert_eq!(none_s, 0.0);
    assert!(forward_s > 0.0 && backward_s > forward_s, "{forward_s} {backward_s}");
    let apart_s = last_s + forward_s + backward_s;
    assert!((apart_s - within_s).abs() < 1e-9 * within_s, "{apart_s} {within_s}");
    let change = found.priced.iteration_s / without.iteration_s;
    println!("{change:.5} of the price with unknown times");
    assert!((0.93..1.005).contains(&change), "{change}");
}

/// Layers that run alongside vocabulary passes are slowed by one factor. Those of an interlaced
/// pipeline, which stops for its collectives, are slowed by another. Other layers are not slowed.
#[test]
fn layers_are_slowed_by_passes_that_run_alongside() {
    let model = models::model::shipped("vocab_4b").and_then(Result::ok).unwrap();
    let shipped = models::cluster::shipped("a100_roce").and_then(Result::ok).unwrap();
    let priced_s = |vocab: &str, alongside: f64, interlaced: f64| {
        let mut cluster = shipped.clone();
        cluster.software.vocab_slowdown = alongside;
        cluster.software.interlaced_slowdown = interlaced;
        let settings = [vocab, "schedule=1f1b", "pp=8", "tp=1", "micro_batch=1", "recompute=none"];
        let restrictions = Restrictions::parse(&settings).unwrap();
        let task = Task::new(&model, &cluster, 8, &restrictions);
        search(&task, &mut |_| {}).best.unwrap().priced.iteration_s
    };
    for (vocab, alongside_slows, interlaced_slows) in [
        ("vocab=first_last", false, false),
        ("vocab=parallel_1", true, false),
        ("vocab=interlaced", false, true),
    ] {
        let plain_s = priced_s(vocab, 1.0, 1.0);
        for (alongside, interlaced, slows) in
            [(1.5, 1.0, alongside_slows), (1.0, 1.5, interlaced_slows)]
        {
            let slowed_s = priced_s(vocab, alongside, interlaced);
            let by = slowed_s / plain_s;
            assert!(if slows { (1.3..1.5).contains(&by) } else { by == 1.0 }, "{vocab} {by}");
        }
    }
}
