use super::*;
use models::schedule::{Pass, PassTimes};

/// Durations that differ with the seed.
fn seconds(seed: usize, count: usize) -> Vec<PassCounts> {
    let value = |n: usize| 0.2 + ((seed * 7919 + n * 104_729) % 997) as f64 / 500.0;
    (0..count).map(|n| [value(3 * n), value(3 * n + 1), value(3 * n + 2)]).collect()
}

#[test]
fn ends_of_any_order_are_no_later_than_those_of_one_order() {
    let mut compared = 0;
    let split = |name: &ScheduleName| !name.is_whole() && name.layout(2).copies() == 1;
    for schedule in ScheduleName::ALL.into_iter().filter(split) {
        for (p, m, v) in [(2, 1, 2), (2, 4, 2), (3, 7, 2), (4, 12, 2), (4, 12, 1), (3, 2, 1)] {
            let Ok(order) = schedule.build(p, m, v) else { continue };
            for rank in 0..p {
                let (any, own) = (OrderMilestones::of_any(m, v), OrderMilestones::of(&order, rank));
                let chunks = seconds(compared, v);
                // Shared weight gradients would count less in one order, which is counted
                // from milestone to milestone.
                let shared = [0.2, 0.3, 0.0];
                let own_s = OwnSeconds { chunks: &chunks, shared, vocab_s: 0.0 };
                let path_s = [2.0, 20.0][compared % 2];
                let arrivals = ArrivalTimes { arrive_s: 1.0, ready_s: 4.0 + path_s, path_s };
                let (any, one) = (any.ends(&own_s, &arrivals), own.ends(&own_s, &arrivals));
                let none_later = any.own_s <= one.own_s + 1e-9
                    && any.last_backward_s <= one.last_backward_s + 1e-9;
                assert!(none_later, "{schedule} {p} {m} {v} rank {rank}: {any:?} {one:?}");
                compared += 1;
            }
        }
    }
    assert!(compared > 60, "{compared}");
}

#[test]
fn counted_milestones_are_those_of_the_order() {
    let mut compared = 0;
    for schedule in [ScheduleName::ZbH1, ScheduleName::ZbH2, ScheduleName::InterleavedZb] {
        for (p, m, v) in (1..=5)
            .flat_map(|p| (1..=12).map(move |m| (p, m)))
            .flat_map(|(p, m)| (1..=3).map(move |v| (p, m, v)))
        {
            let vocabs = VocabPasses::ALL.map(Some).into_iter().chain([None]);
            for vocab in vocabs {
                let order = match vocab {
                    Some(vocab) => schedule.build_with_room(p, m, v, vocab),
                    None => schedule.build(p, m, v),
                };
                let Ok(order) = order else { continue };
                for rank in 0..p {
                    let counted = OrderMilestones::counted(schedule, (p, m, v), rank, vocab);
                    let of = OrderMilestones::of(&order, rank);
                    let what = format!("{schedule} {vocab:?} p {p} m {m} v {v} rank {rank}");
                    assert_eq!(counted, Some(of), "{what}");
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 1000);
}

/// Passes of a rank's order up to a milestone, by position.
fn position(order: &[Pass], at: At) -> usize {
    let is_backward = |kind: PassKind| matches!(kind, PassKind::B | PassKind::BW);
    let last = |wanted: &dyn Fn(PassKind) -> bool| {
        order.iter().rposition(|pass| pass.chunk == 0 && wanted(pass.kind)).unwrap() + 1
    };
    match at {
        At::Start => 0,
        At::FirstBackward => order.iter().position(|pass| is_backward(pass.kind)).unwrap(),
        At::LastForward => last(&|kind| kind == PassKind::F),
        At::LastBackward => last(&is_backward),
        At::End => order.len(),
    }
}

#[test]
fn vocabulary_passes_between_milestones_are_as_many_as_counted_whatever_their_times() {
    let mut compared = 0;
    let pairs = [
        (At::Start, At::LastForward),
        (At::FirstBackward, At::LastForward),
        (At::Start, At::LastBackward),
        (At::FirstBackward, At::LastBackward),
        (At::LastBackward, At::End),
    ];
    let split = |name: &ScheduleName| !name.is_whole();
    for schedule in ScheduleName::VOCAB.into_iter().filter(split) {
        let counts = [(2, 1, 1), (2, 6, 1), (3, 8, 1), (4, 9, 1), (5, 3, 1), (2, 6, 2), (4, 8, 2)];
        for ((p, m, v), vocab) in
            counts.into_iter().flat_map(|counts| VocabPasses::ALL.map(|vocab| (counts, vocab)))
        {
            let [forward, backward, weight] = seconds(compared, 1)[0];
            let [first, middle, last] = seconds(compared + 1, 1)[0];
            let long = [0.5, 5.0][compared / 16 % 2];
            let barriers = seconds(compared + 2, 1)[0].map(|latency| long * latency);
            let times = PassTimes {
                forward,
                backward,
                weight,
                vocab: [0.3 * first, 0.3 * middle, last],
                link: barriers[0],
                broadcast: barriers[1],
                barriers,
            };
            // After a long broadcast `T` lags behind.
            let slow = PassTimes {
                backward: 1.5,
                vocab: [0.02, 0.02, 0.3],
                broadcast: 8.0,
                barriers: [0.5; 3],
                ..PassTimes::default()
            };
            for times in [None, Some(times), Some(slow)] {
                let Ok(order) = schedule.build_with_vocab(p, m, v, vocab, times) else {
                    continue;
                };
                for (rank, passes) in order.passes.iter().enumerate() {
                    let milestones = OrderMilestones::of(&order, rank);
                    for &(from, to) in &pairs {
                        let (start, end) = (position(passes, from), position(passes, to));
                        let between = passes.get(start..end).unwrap_or(&[]);
                        let sets = milestones.between(from, to).1;
                        for &kind in vocab.kinds() {
                            let own = between.iter().filter(|pass| pass.kind == kind).count();
                            let what = format!("{schedule} {vocab:?} {p} {m} {v} rank {rank}");
                            assert!(sets <= own as f64, "{what} {kind:?}: {sets} of {own}");
                        }
                        compared += 1;
                    }
                }
            }
        }
    }
    assert!(compared > 2000, "{compared}");
}
