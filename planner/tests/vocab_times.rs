//! Vocabulary passes placed by known times, compared with the closed form of the reference, the
//! schedule without them, and the order for unknown times.

use models::schedule::{PassRatios, PassTimes, Release, Schedule, ScheduleName, VocabPasses};
use planner::simulate::{Durations, VocabDurations, simulate};
use proptest::prelude::*;

fn makespan_s(schedule: &Schedule, times: PassTimes) -> f64 {
    let PassTimes { forward, backward, weight, link, .. } = times;
    let mut durations = Durations::uniform(schedule, forward, backward, weight, link);
    let [first, middle, last] = times.vocab.map(|each| vec![each; schedule.ranks]);
    let [after_first_s, after_middle_s, after_last_s] = times.barriers;
    let broadcast_s = times.broadcast;
    durations.vocab = VocabDurations {
        first,
        middle,
        last,
        broadcast_s,
        after_first_s,
        after_middle_s,
        after_last_s,
        ..VocabDurations::default()
    };
    simulate(schedule, &durations).unwrap().makespan_s
}

/// All passes of a micro-batch on one pipeline rank, s.
fn work_s(times: PassTimes, vocab: VocabPasses) -> f64 {
    let [first, middle, last] = times.vocab;
    let vocab_s = if vocab == VocabPasses::Naive { first + middle + last } else { first + last };
    times.forward + times.backward + times.weight + vocab_s
}

/// An order for unknown times suits vocabulary passes from very short ones to those as long as a
/// forward: in the steady state no rank waits in every repetition.
#[test]
fn an_order_for_unknown_times_suits_short_and_long_passes() {
    let (p, m) = (32, 96);
    for vocab in [VocabPasses::One, VocabPasses::Two] {
        let schedule = ScheduleName::OneFOneB.build_with_vocab(p, m, 1, vocab, None).unwrap();
        for (backward, vocab_s) in [(1.0, 0.01), (1.1, 0.03), (1.0, 0.1), (1.1, 0.3), (1.0, 1.0)] {
            let times = PassTimes { backward, vocab: [vocab_s; 3], ..PassTimes::default() };
            let whole_s = times.forward + times.backward + times.weight;
            let closed_s = m as f64 * work_s(times, vocab) + (p - 1) as f64 * whole_s;
            let found_s = makespan_s(&schedule, times);
            assert!(found_s < 1.015 * closed_s, "{vocab_s}: {found_s} {closed_s}");
        }
    }
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

fn vocab() -> impl Strategy<Value = VocabPasses> {
    prop::sample::select(&VocabPasses::ALL[1..])
}

fn peaks(schedule: &Schedule) -> Vec<f64> {
    (0..schedule.ranks).map(|i| schedule.peak_activations(i, Release::AtW)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// The time is `m(F + B + W + S + T) + (p − 1)(F + B + W)` for any ratio of backward to
    /// forward. The reference's positions, which assume a backward of two forwards, cost the same.
    #[test]
    fn vocabulary_passes_of_1f1b_cost_only_their_own_time(
        p in 2..9_usize,
        rounds in 2..6_usize,
        vocab in vocab(),
        times in times(),
    ) {
        let m = rounds * p;
        let schedule = ScheduleName::OneFOneB.build_with_vocab(p, m, 1, vocab, Some(times)).unwrap();
        let whole_s = times.forward + times.backward + times.weight;
        let closed_s = m as f64 * work_s(times, vocab) + (p - 1) as f64 * whole_s;
        let found_s = makespan_s(&schedule, times);
        prop_assert!((found_s - closed_s).abs() < 1e-9 * closed_s, "{found_s} {closed_s}");
        for (i, peak) in peaks(&schedule).into_iter().enumerate() {
            prop_assert_eq!(peak, m.min(p - i + vocab.barriers()) as f64);
        }
    }

    /// A broadcast and barriers of up to half a forward are exposed only once. `S` comes later
    /// where the last stage's output does.
    #[test]
    fn barriers_of_1f1b_are_exposed_once(
        p in 2..9_usize,
        rounds in 2..6_usize,
        vocab in vocab(),
        vocab_s in 0.1..0.6_f64,
        (broadcast, after_first, after_last) in (0.0..0.5_f64, 0.0..0.2_f64, 0.0..0.5_f64),
    ) {
        let barriers = [after_first, 0.0, after_last];
        let without_barriers = PassTimes { vocab: [vocab_s; 3], ..PassTimes::default() };
        let times = PassTimes { broadcast, barriers, ..without_barriers };
        let m = rounds * p;
        let schedule = ScheduleName::OneFOneB.build_with_vocab(p, m, 1, vocab, Some(times)).unwrap();
        let closed_s = m as f64 * work_s(times, vocab) + (p - 1) as f64 * 3.0;
        let latencies = broadcast + after_first + after_last;
        let found_s = makespan_s(&schedule, times);
        prop_assert!(found_s <= closed_s + latencies + 1e-9, "{found_s} {closed_s} {latencies}");
    }

    /// Placing passes by known times never makes the order longer, nor that of V-Half hold more.
    #[test]
    fn known_times_make_no_order_longer(
        name in prop::sample::select(&ScheduleName::VOCAB[..]),
        p in 2..7_usize,
        rounds in 2..5_usize,
        vocab in vocab(),
        times in times(),
    ) {
        let (m, v) = (rounds * p, name.chunk_rule().nearest(1));
        let build = |times| name.build_with_vocab(p, m, v, vocab, times).unwrap();
        let (known, unknown) = (build(Some(times)), build(None));
        known.validate().unwrap();
        prop_assert!(
            makespan_s(&known, times) <= makespan_s(&unknown, times) * (1.0 + 1e-9),
            "{} {} {}", name, makespan_s(&known, times), makespan_s(&unknown, times)
        );
        if name == ScheduleName::VHalf {
            let most = |of: &Schedule| peaks(of).into_iter().fold(0.0, f64::max);
            prop_assert!(most(&known) <= most(&unknown), "{} {}", most(&known), most(&unknown));
        }
    }

    /// Ratios represent their times to within 1/128 of a forward.
    #[test]
    fn ratios_are_near_their_times(times in times(), scale in 1e-6..1e3_f64) {
        let PassTimes { backward, weight, vocab, .. } = times;
        let scaled = PassTimes {
            forward: scale,
            backward: backward * scale,
            weight: weight * scale,
            vocab: vocab.map(|each| each * scale),
            ..PassTimes::default()
        };
        let back = PassRatios::nearest(scaled).unwrap().times();
        let part = |time: f64| time / back.forward;
        for (ours, theirs) in [(back.backward, backward), (back.vocab[2], vocab[2])] {
            prop_assert!((part(ours) - theirs).abs() <= 1.0 / 128.0 + 1e-9);
        }
    }
}

/// V-Half's order with vocabulary passes for unknown times leaves no wait that repeats with every
/// micro-batch, even where passes are unequal and transfers and barriers take time: doubling the
/// micro-batches adds only their work. The slots that the reference keeps free for the broadcast
/// achieve this.
#[test]
fn v_half_for_unknown_times_has_no_wait_in_the_steady_state() {
    for (backward, weight) in [(1.0, 1.0), (1.2, 0.8), (1.1, 1.0), (1.3, 0.9)] {
        for (p, vocab_s) in [(8, 0.02), (16, 0.02), (24, 0.05), (32, 0.12)] {
            let times = PassTimes {
                backward,
                weight,
                vocab: [vocab_s; 3],
                link: 0.01,
                broadcast: 0.03,
                barriers: [0.02; 3],
                ..PassTimes::default()
            };
            let end_s = |m: usize| {
                let name = ScheduleName::VHalf;
                let order = name.build_with_vocab(p, m, 2, VocabPasses::One, None).unwrap();
                makespan_s(&order, times)
            };
            let m = 4 * p;
            let each_s = (end_s(2 * m) - end_s(m)) / m as f64;
            let work_s = work_s(times, VocabPasses::One);
            assert!(each_s <= 1.001 * work_s, "p {p}, B {backward}, W {weight}: {each_s} {work_s}");
        }
    }
}

/// With vocabulary passes, V-Half takes longer only by those passes: its warm-up and cooldown are
/// as fast, thanks to the micro-batches that the barriers keep in flight anyway.
#[test]
fn v_half_warms_up_and_cools_down_as_fast_with_vocabulary_passes() {
    // Profiled times: Zero Bubble, table 9, 6.2B and 14.6B.
    for (backward, weight) in [(1.0, 1.0), (29.444 / 29.718, 19.927 / 29.718), (0.991, 0.717)] {
        for (p, m) in [(4, 16), (8, 64), (16, 128)] {
            let times =
                PassTimes { backward, weight, vocab: [0.2, 0.0, 0.4], ..PassTimes::default() };
            let plain_s = makespan_s(&ScheduleName::VHalf.build(p, m, 2).unwrap(), times);
            for vocab in [VocabPasses::One, VocabPasses::Two] {
                let build = |times| ScheduleName::VHalf.build_with_vocab(p, m, 2, vocab, times);
                let (known, unknown) = (build(Some(times)).unwrap(), build(None).unwrap());
                let [known_s, unknown_s] = [&known, &unknown].map(|s| makespan_s(s, times));
                let passes_s = m as f64 * 0.6;
                assert!(known_s <= plain_s + passes_s + 1e-9, "{known_s} {plain_s} {p} {vocab:?}");
                assert!(known_s < unknown_s - 2.0, "{known_s} {unknown_s} {p} {vocab:?}");
                assert_eq!(peaks(&known), peaks(&unknown), "{p} {vocab:?}");
            }
        }
    }
}

/// Where `W + 2F < 2B`, V-Half's repeated block idles in every repetition. Orders for known times
/// are shorter (by 1.2 to 5.9 %).
#[test]
fn v_half_adapts_to_unequal_passes() {
    for (backward, weight) in [(1.4, 0.6), (1.5, 0.5), (1.3, 0.4)] {
        for (p, m) in [(4, 16), (8, 64), (16, 64)] {
            let times =
                PassTimes { backward, weight, vocab: [0.2, 0.0, 0.4], ..PassTimes::default() };
            let plain_s = makespan_s(&ScheduleName::VHalf.build(p, m, 2).unwrap(), times);
            for vocab in [VocabPasses::One, VocabPasses::Two] {
                let build = |times| ScheduleName::VHalf.build_with_vocab(p, m, 2, vocab, times);
                let known = build(Some(times)).unwrap();
                let (known_s, block_s) = (makespan_s(&known, times), plain_s + m as f64 * 0.6);
                assert!(known_s < 0.99 * block_s, "{known_s} {block_s} {p} {vocab:?} {backward}");
                let most = |of: &Schedule| peaks(of).into_iter().fold(0.0, f64::max);
                assert!(most(&known) <= most(&build(None).unwrap()));
            }
        }
    }
}

/// Where transfers take long, an order searched for known times is shorter than all that repeat a
/// block. Of each pair of times the second is the best of those.
#[test]
fn orders_are_searched_for_known_times() {
    use VocabPasses::{One, Two};
    let (half, least) = (ScheduleName::VHalf, ScheduleName::VMin);
    let cases = [
        (half, 4, 16, Two, (2.0, 1.0), (0.6, 0.6), (0.2, 0.1), [95.8, 100.2]),
        (half, 4, 32, One, (1.5, 0.5), (0.6, 0.6), (0.3, 0.5), [155.7, 161.7]),
        (half, 6, 6, One, (1.3, 0.9), (0.6, 0.6), (0.3, 0.5), [42.65, 46.3]),
        (half, 8, 8, One, (2.0, 1.0), (0.05, 0.05), (0.0, 0.0), [55.05, 56.85]),
        (least, 6, 6, One, (2.0, 0.3), (0.05, 0.05), (0.3, 0.5), [61.05, 63.3]),
    ];
    for (name, p, m, vocab, (backward, weight), (s, t), (link, between), [searched_s, others_s]) in
        cases
    {
        let times = PassTimes {
            backward,
            weight,
            vocab: [s, 0.0, t],
            link,
            broadcast: between,
            barriers: [between; 3],
            ..PassTimes::default()
        };
        let build = |times| name.build_with_vocab(p, m, 2, vocab, times).unwrap();
        let known = build(Some(times));
        let known_s = makespan_s(&known, times);
        assert!(known_s < searched_s + 1e-6, "{name} {p} {m}: {known_s}, others {others_s}");
        let most = |of: &Schedule| peaks(of).into_iter().fold(0.0, f64::max);
        assert!(most(&known) <= most(&build(None)), "{name} {p} {m}");
    }
}

/// The time is `(m + p − 1)(F + B + W) + m(S + T)`: ranks wait for one another exactly in the
/// bubble of 1F1B.
#[test]
fn interlaced_layers_cost_the_bubble_of_1f1b() {
    for (p, m) in [(2, 4), (4, 8), (4, 13), (8, 16), (8, 64), (12, 24)] {
        for (backward, weight) in [(1.0, 1.0), (0.8, 0.6), (1.4, 0.6)] {
            let times =
                PassTimes { backward, weight, vocab: [0.2, 0.0, 0.4], ..PassTimes::default() };
            let schedule = ScheduleName::OneFOneB
                .build_with_vocab(p, m, 1, VocabPasses::Interlaced, None)
                .unwrap();
            let whole_s = 1.0 + backward + weight;
            let expected_s = (m + p - 1) as f64 * whole_s + m as f64 * 0.6;
            let found_s = makespan_s(&schedule, times);
            assert!(
                (found_s - expected_s).abs() < 1e-9 * expected_s,
                "{p} {m} {found_s} {expected_s}"
            );
        }
    }
}
