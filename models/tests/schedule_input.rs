//! Places of the passes of an input layer split over the pipeline (Vocabulary Parallelism, arXiv
//! 2411.05288, appendix C).

use models::schedule::{
    Pass, PassKind, PassTimes, Schedule, ScheduleError, ScheduleName, VocabPasses,
};
use proptest::prelude::*;

fn is_input(pass: &Pass) -> bool {
    matches!(pass.kind, PassKind::IF | PassKind::IB)
}

fn usual(name: ScheduleName, p: usize, m: usize, vocab: VocabPasses) -> Schedule {
    let chunks = name.chunk_rule().nearest(1);
    let schedule = name.build_with_vocab(p, m, chunks, vocab, None).unwrap();
    schedule.with_input_passes(PassTimes::default()).unwrap()
}

/// The order of the pipeline rank that has the first stage.
fn first_stage(schedule: &Schedule) -> &[Pass] {
    &schedule.passes[schedule.rank_of(0)]
}

fn is_forward(pass: &Pass) -> bool {
    pass.kind == PassKind::F && pass.chunk == 0
}

fn is_backward(pass: &Pass) -> bool {
    matches!(pass.kind, PassKind::B | PassKind::BW) && pass.chunk == 0
}

/// Most micro-batches between look-up and the first stage's forward, and between its backward and
/// `IB`.
fn waiting(schedule: &Schedule) -> [i64; 2] {
    let (mut rows, mut gradients, mut most) = (0_i64, 0_i64, [0_i64; 2]);
    for pass in first_stage(schedule) {
        match pass.kind {
            PassKind::IF => rows += 1,
            _ if is_forward(pass) => rows -= 1,
            _ if is_backward(pass) => gradients += 1,
            PassKind::IB => gradients -= 1,
            _ => {}
        }
        most = [most[0].max(rows), most[1].max(gradients)];
    }
    most
}

/// Passes of the first stage `like` each that come between it and the pass `of` of its micro-batch
/// before it (or `behind` it), in order.
fn between(schedule: &Schedule, like: fn(&Pass) -> bool, of: PassKind, behind: bool) -> Vec<usize> {
    let order = first_stage(schedule);
    let all = order.iter().enumerate().filter(|(_, pass)| like(pass));
    let count = |(own, pass): (usize, &Pass)| {
        let same = |other: &Pass| (other.kind, other.micro_batch) == (of, pass.micro_batch);
        let other = order.iter().position(same).unwrap();
        let (from, to) = if behind { (own, other) } else { (other, own) };
        assert!(from < to, "{of} {} lies on the wrong side", pass.micro_batch);
        order[from + 1..to].iter().filter(|pass| like(pass)).count()
    };
    all.map(count).collect()
}

fn times() -> impl Strategy<Value = PassTimes> {
    let vocab = prop::array::uniform3(0.0..1.2_f64);
    let barriers = prop::array::uniform3(0.0..0.5_f64);
    let between = (0.0..0.3_f64, 0.0..0.5_f64, barriers);
    (0.0..2.0_f64, 0.0..1.5_f64, vocab, between).prop_map(
        |(backward, weight, vocab, (link, broadcast, barriers))| PassTimes {
            backward,
            weight,
            vocab,
            link,
            broadcast,
            barriers,
            ..PassTimes::default()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// One interval of the first stage early and late, at most two micro-batches waiting, nothing
    /// else moved, and an order that runs to its end.
    #[test]
    fn look_ups_come_an_interval_early_and_their_backwards_one_late(
        name in prop::sample::select(&ScheduleName::VOCAB[..]),
        p in 1..7_usize,
        rounds in 1..5_usize,
        vocab in prop::sample::select(&VocabPasses::ALL[..]),
        known in prop::option::of(times()),
    ) {
        let (m, v) = (rounds * p, name.chunk_rule().nearest(1));
        let Ok(plain) = name.build_with_vocab(p, m, v, vocab, known) else { return Ok(()) };
        let with = plain.clone().with_input_passes(known.unwrap_or_default()).unwrap();
        with.validate().unwrap();
        let rest = |order: &Vec<Pass>| -> Vec<Pass> {
            order.iter().filter(|pass| !is_input(pass)).copied().collect()
        };
        prop_assert_eq!(with.passes.iter().map(rest).collect::<Vec<_>>(), plain.passes.clone());
        let pairs = |of: &Schedule| -> Vec<Vec<Pass>> {
            let here = |(order, pairs): (&Vec<Pass>, &Vec<u32>)| {
                pairs.iter().map(|&place| order[place as usize]).collect()
            };
            of.passes.iter().zip(&of.pairs).map(here).collect()
        };
        prop_assert_eq!(pairs(&with), pairs(&plain));
        prop_assert!(waiting(&with).into_iter().all(|most| most <= 2), "{:?}", waiting(&with));
        let early = between(&with, is_forward, PassKind::IF, false);
        prop_assert!(early[2.min(m)..].iter().all(|&count| count == 1), "{early:?}");
        let late = between(&with, is_backward, PassKind::IB, true);
        prop_assert!(late[..m - 1].iter().all(|&count| count == 1), "{late:?}");
    }
}

/// Passes that the reference's pipeline ranks have run by their fourth forward, for four of them
/// and eight micro-batches with algorithm 2.
#[test]
fn look_ups_lie_where_the_reference_has_them_in_warm_up() {
    let schedule = usual(ScheduleName::OneFOneB, 4, 8, VocabPasses::Two);
    let words = |rank: usize| schedule.order_words(rank).join(" ");
    let first = "IF:0 IF:1 F0@0 IF:2 F1@0 IF:3 F2@0 IF:4 F3@0";
    assert!(words(0).starts_with(first), "{}", words(0));
    let last = "IF:0 IF:1 IF:2 IF:3 IF:4 F0@3";
    assert!(words(3).starts_with(last), "{}", words(3));
}

#[test]
fn an_order_that_waits_for_itself_is_refused() {
    let schedule = usual(ScheduleName::OneFOneB, 2, 1, VocabPasses::One);
    let last = schedule.passes[1].len() - 1;
    let mut late = schedule.clone();
    late.passes[1][..last].rotate_left(1);
    assert_eq!(late.passes[1][last - 1].kind, PassKind::IF);
    assert!(
        matches!(late.validate(), Err(ScheduleError::Deadlock { .. })),
        "{:?}",
        late.validate()
    );

    let mut early = schedule.clone();
    early.passes[1].rotate_right(1);
    assert_eq!(early.passes[1][0].kind, PassKind::IB);
    assert!(early.validate().is_err(), "a gradient is added before there is one");

    let mut other = usual(ScheduleName::OneFOneB, 2, 4, VocabPasses::One);
    let first: Vec<usize> =
        (0..other.passes[1].len()).filter(|&n| other.passes[1][n].kind == PassKind::IF).collect();
    other.passes[1].swap(first[0], first[1]);
    let kind = PassKind::IF;
    assert_eq!(other.validate(), Err(ScheduleError::VocabOrder { rank: 1, kind }));

    let mut without = schedule;
    without.passes[1].retain(|pass| pass.kind != PassKind::IB);
    assert!(matches!(without.validate(), Err(ScheduleError::Missing { .. })));
}

#[test]
fn input_passes_go_with_those_of_the_output_layer() {
    let plain = ScheduleName::OneFOneB.build(2, 4, 1).unwrap();
    let refused = plain.with_input_passes(PassTimes::default());
    assert_eq!(refused, Err(ScheduleError::NoInputPasses));
}
