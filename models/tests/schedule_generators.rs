//! Every generator makes complete orders that run to their end; broken orders are caught.

use models::schedule::{
    AutoCosts, ChunkRule, Graph, Latency, Pass, PassKind, PassTimes, Release, Schedule,
    ScheduleError, ScheduleName, StageLayout, VocabPasses, Work, forwards_come_first, one_f_one_b,
    zb_auto,
};
use proptest::prelude::*;

fn counts() -> impl Strategy<Value = (usize, usize, usize)> {
    (1..9_usize, 1..25_usize, 1..5_usize)
}

fn schedules() -> impl Strategy<Value = Schedule> {
    let plain = (0..ScheduleName::ALL.len(), counts())
        .prop_filter_map("no such schedule", |(name, (p, m, v))| {
            ScheduleName::ALL[name].build(p, m, v).ok()
        });
    let vocab = (0..3_usize, 0..ScheduleName::VOCAB.len(), counts()).prop_filter_map(
        "no such schedule",
        |(vocab, name, (p, m, v))| {
            let (name, vocab) = (ScheduleName::VOCAB[name], VocabPasses::ALL[vocab]);
            name.build_with_vocab(p, m, v, vocab, None).ok()
        },
    );
    prop_oneof![plain, vocab]
}

/// A schedule, a pipeline rank and two places in its order.
fn swaps() -> impl Strategy<Value = (Schedule, usize, usize, usize)> {
    schedules().prop_flat_map(|schedule| {
        let passes = schedule.passes.iter().map(Vec::len).min().unwrap_or(0);
        let ranks = schedule.ranks;
        (Just(schedule), 0..ranks, 0..passes, 0..passes)
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2000, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn every_schedule_is_valid(schedule in schedules()) {
        prop_assert_eq!(schedule.validate(), Ok(()));
    }

    /// Inserting vocabulary passes moves no other pass.
    #[test]
    fn orders_with_room_are_those_without_the_vocabulary_passes(
        (vocab, name, (p, m, v)) in (0..3_usize, 0..ScheduleName::VOCAB.len(), counts())
    ) {
        let (name, vocab) = (ScheduleName::VOCAB[name], VocabPasses::ALL[vocab]);
        let Ok(with) = name.build_with_vocab(p, m, v, vocab, None) else { return Ok(()) };
        let room = name.build_with_room(p, m, v, vocab).unwrap();
        let is_vocab = |pass: &&Pass| vocab.kinds().contains(&pass.kind);
        let others = |order: &Vec<Pass>| -> Vec<Pass> {
            order.iter().filter(|pass| !is_vocab(pass)).copied().collect()
        };
        prop_assert_eq!(with.passes.iter().map(others).collect::<Vec<_>>(), room.passes);
        let pairs = |pairs: &Vec<Vec<u32>>| pairs.iter().map(Vec::len).collect::<Vec<_>>();
        prop_assert_eq!(pairs(&with.pairs), pairs(&room.pairs));
    }

    /// The planner bounds memory by this.
    #[test]
    fn orders_for_known_times_hold_hardly_less(
        (vocab, least, (p, m, _)) in (0..3_usize, any::<bool>(), counts()),
        (forward, backward, weight) in (0.5..1.5_f64, 0.3..1.5_f64, 0.3..1.5_f64),
        (first, middle, last) in (0.0..0.3_f64, 0.0..0.3_f64, 0.0..0.3_f64),
        (link, broadcast, barrier) in (0.0..4.0_f64, 0.0..4.0_f64, 0.0..4.0_f64),
    ) {
        let name = if least { ScheduleName::VMin } else { ScheduleName::VHalf };
        let vocab = VocabPasses::ALL[vocab];
        let times = PassTimes {
            forward,
            backward,
            weight,
            vocab: [first, middle, last],
            link,
            broadcast,
            barriers: [barrier, broadcast, link],
        };
        let Ok(room) = name.build_with_room(p, m, 2, vocab) else { return Ok(()) };
        let own = name.build_with_vocab(p, m, 2, vocab, Some(times)).unwrap();
        for rank in 0..p {
            let (room, own) = [&room, &own].map(|order| order.max_in_flight(rank, Release::AtW)).into();
            let most = room.iter().max_by_key(|held| held.iter().sum::<u32>()).unwrap();
            let holds = |held: &Vec<u32>| held.iter().zip(most).all(|(own, room)| own + 1 >= *room);
            prop_assert!(own.iter().any(holds), "rank {rank}: {own:?}, with room {most:?}");
        }
    }

    #[test]
    fn nodes_come_behind_what_they_wait_for(schedule in schedules()) {
        let graph = Graph::new(&schedule).unwrap();
        let before = |n: usize, other: u32| other == models::schedule::NO_NODE || (other as usize) < n;
        let mut nodes = graph.nodes.iter().enumerate();
        prop_assert!(nodes.all(|(n, node)| before(n, node.before) && before(n, node.needs)));
        let passes: usize = schedule.passes.iter().map(Vec::len).sum();
        let run = |work: Work| match work {
            Work::Join => 0,
            Work::Pass(_) => 1,
            Work::Pair(..) => 2,
        };
        prop_assert_eq!(graph.nodes.iter().map(|node| run(node.work)).sum::<usize>(), passes);
    }

    /// A swap either leaves an order that runs or is refused; nothing hangs or panics.
    #[test]
    fn a_swap_of_two_passes_is_valid_or_caught((mut schedule, rank, one, other) in swaps()) {
        let original = schedule.clone();
        schedule.passes[rank].swap(one, other);
        let unchanged = schedule == original;
        match schedule.validate() {
            Ok(()) => {}
            Err(
                ScheduleError::TooEarly { .. }
                | ScheduleError::Deadlock { .. }
                | ScheduleError::Pair { .. }
                | ScheduleError::VocabOrder { .. },
            ) => {
                prop_assert!(!unchanged);
            }
            Err(error) => prop_assert!(false, "{}", error),
        }
    }

    /// A forward that changes places with its own backward is always caught.
    #[test]
    fn a_backward_before_its_forward_is_caught((mut schedule, rank, place, _) in swaps()) {
        let order = &mut schedule.passes[rank];
        let pass = order[place];
        let partner = order.iter().position(|other| {
            (other.micro_batch, other.chunk) == (pass.micro_batch, pass.chunk)
                && matches!((pass.kind, other.kind), (PassKind::F, PassKind::BW) | (PassKind::BW, PassKind::F))
        });
        if let Some(partner) = partner {
            order.swap(place, partner);
            let caught = matches!(schedule.validate(), Err(ScheduleError::TooEarly { .. }));
            prop_assert!(caught);
        }
    }

    #[test]
    fn a_lost_or_doubled_pass_is_caught((schedule, rank, place, other) in swaps()) {
        let mut schedule = schedule;
        schedule.pairs.iter_mut().for_each(Vec::clear);
        let mut lost = schedule.clone();
        lost.passes[rank].remove(place);
        let missing = matches!(lost.validate(), Err(ScheduleError::Missing { .. }));
        prop_assert!(missing);

        let mut doubled = schedule;
        let pass = doubled.passes[rank][place];
        doubled.passes[rank].insert(other, pass);
        let duplicate = matches!(doubled.validate(), Err(ScheduleError::Duplicate { .. }));
        prop_assert!(duplicate);
    }

    #[test]
    fn in_flight_vectors_are_maximal_and_reach_the_peak(schedule in schedules()) {
        for rank in 0..schedule.ranks {
            let peaks = schedule.max_in_flight(rank, Release::AtB);
            let most = peaks.iter().map(|peak| peak.iter().sum::<u32>()).max().unwrap();
            let most = f64::from(most) / schedule.share_chunks() as f64;
            prop_assert_eq!(most, schedule.peak_activations(rank, Release::AtB));
            for (n, peak) in peaks.iter().enumerate() {
                let others = peaks.iter().enumerate().filter(|(other, _)| *other != n);
                let covered = |other: &[u32]| other.iter().zip(peak).all(|(a, b)| a >= b);
                prop_assert!(!others.into_iter().any(|(_, other)| covered(other)));
            }
        }
    }
}

#[test]
fn interleaving_holds_several_mixtures_of_chunks() {
    let schedule = ScheduleName::Interleaved1F1B.build(4, 8, 2).unwrap();
    assert_eq!(schedule.max_in_flight(0, Release::AtB), [vec![7, 4], vec![8, 3]]);
    assert_eq!(schedule.max_in_flight(3, Release::AtB), [vec![4, 1], vec![5, 0]]);
}

#[test]
fn ranks_that_wait_for_one_another_are_named() {
    let mut schedule = one_f_one_b(2, 2).unwrap();
    // Pipeline rank 1 wants micro-batch 1 first, which pipeline rank 0 sends only when it has
    // micro-batch 0 back.
    schedule.passes[0].swap(1, 2);
    schedule.passes[1].rotate_left(2);
    let error = schedule.validate().unwrap_err();
    let expected = "the pipeline ranks wait for one another: \
                    rank 0 at BW of micro-batch 0 on chunk 0, rank 1 at F of micro-batch 1 on chunk 0";
    assert_eq!(error.to_string(), expected);
}

/// Each schedule that takes vocabulary passes, on counts it exists for.
fn vocabulary_hosts() -> impl Iterator<Item = (ScheduleName, usize, usize, usize)> {
    let counts = |name: ScheduleName| (name, 4, 8, name.chunk_rule().nearest(1));
    ScheduleName::VOCAB.into_iter().map(counts)
}

#[test]
fn vocabulary_passes_go_in_for_any_times() {
    for vocab in VocabPasses::ALL {
        for (forward, backward, each) in [(0.0, 0.0, 0.0), (3.0, 1.0, 2.0), (1.0, 0.0, 9.0)] {
            let halves = PassTimes { backward, weight: backward, ..PassTimes::default() };
            let times = PassTimes { forward, vocab: [each; 3], ..halves };
            for (name, p, m, v) in vocabulary_hosts() {
                let schedule = name.build_with_vocab(p, m, v, vocab, Some(times)).unwrap();
                assert_eq!(schedule.validate(), Ok(()), "{name} {times:?}");
            }
        }
        let times = PassTimes { vocab: [f64::INFINITY; 3], ..PassTimes::default() };
        let error = ScheduleName::OneFOneB
            .build_with_vocab(5, 7, 1, vocab, Some(times))
            .unwrap_err()
            .to_string();
        let expected = "vocabulary passes cannot take inf: a time is finite and not negative";
        assert_eq!(error, expected);
    }
}

#[test]
fn foreign_passes_and_missing_ranks_are_refused() {
    let mut schedule = one_f_one_b(2, 2).unwrap();
    schedule.passes[0][0].chunk = 1;
    assert!(matches!(schedule.validate(), Err(ScheduleError::Foreign { rank: 0, .. })));
    schedule.passes.pop();
    assert_eq!(schedule.validate(), Err(ScheduleError::RankLists { lists: 1, ranks: 2 }));
    schedule.layout = StageLayout::V;
    schedule.ranks = 1;
    assert_eq!(schedule.validate(), Err(ScheduleError::Layout { chunks: 1 }));
}

/// Split backwards on a V of stages are understood.
#[test]
fn split_backwards_and_a_v_of_stages_are_understood() {
    let pass = |kind, chunk| Pass { kind, micro_batch: 0, chunk };
    let order = [(PassKind::F, 0), (PassKind::F, 1), (PassKind::B, 1), (PassKind::W, 1)];
    let order = order.into_iter().chain([(PassKind::B, 0), (PassKind::W, 0)]);
    let passes: Vec<_> = order.map(|(kind, chunk)| pass(kind, chunk)).collect();
    let schedule = Schedule {
        ranks: 2,
        chunks: 2,
        micro_batches: 1,
        layout: StageLayout::V,
        vocab: None,
        passes: vec![passes.clone(), passes],
        pairs: vec![vec![]; 2],
    };
    assert_eq!(schedule.validate(), Ok(()));
    assert!(schedule.splits_backward());
    assert_eq!(schedule.max_in_flight(0, Release::AtW), [vec![1, 1]]);
    let links = Graph::new(&schedule).unwrap().nodes.into_iter().map(|node| node.latency);
    let links: Vec<_> = links.filter(|latency| *latency != Latency::None).collect();
    // Stages 1 and 2 are on one pipeline rank.
    let [first, last] = [Latency::Link(0), Latency::Link(2)];
    assert_eq!(links, [first, last, last, first]);
}

#[test]
fn stages_lie_where_the_layout_says() {
    for layout in [StageLayout::RoundRobin, StageLayout::V, StageLayout::Bidirectional] {
        for stage in 0..layout.stages(4, 2) {
            let rank = layout.rank_of(4, stage);
            assert_eq!(layout.stage_of(4, rank, stage / 4), stage);
            for from in 0..2 {
                let (rank, chunk) = layout.holder(4, stage, from);
                assert_eq!(layout.stage_of(4, rank, usize::from(chunk)), stage);
            }
        }
    }
    assert_eq!(StageLayout::Bidirectional.holder(4, 1, 1), (2, 1));
    assert_eq!(StageLayout::V.rank_of(4, 7), 0);
    assert_eq!(StageLayout::RoundRobin.rank_of(4, 7), 3);
}

#[test]
fn names_parse_and_rules_say_what_would_do() {
    for name in ScheduleName::ALL {
        assert_eq!(ScheduleName::parse(name.name()), Ok(name));
    }
    let error = ScheduleName::parse("2f2b").unwrap_err().to_string();
    let expected = "no schedule is called `2f2b`; there are naive, gpipe, 1f1b, interleaved_1f1b, \
                    overlapped_1f1b, looped_bfs, zb_h1, zb_h2, zb_auto, interleaved_zb, zb_v, v_half, v_min, v_1f1b, dualpipe, dualpipe_v, \
                    chimera";
    assert_eq!(error, expected);
    assert_eq!(ScheduleName::GPipe.chunk_rule(), ChunkRule::Exactly(1));
    let error = |name: ScheduleName, p, m, v| name.check(p, m, v).unwrap_err().to_string();
    assert_eq!(
        error(ScheduleName::GPipe, 4, 8, 2),
        "gpipe needs exactly 1 chunk per pipeline rank: 2; 1 would do"
    );
    assert_eq!(
        error(ScheduleName::Interleaved1F1B, 4, 3, 2),
        "interleaved_1f1b needs micro-batches divisible by stages: 3 with p = 4; 4 would do"
    );
    let refused = [
        (
            ScheduleName::DualPipe,
            5,
            20,
            "dualpipe needs an even number of stages: 5; 4 or 6 would do",
        ),
        (
            ScheduleName::DualPipe,
            4,
            9,
            "dualpipe needs micro-batches even in number, twice as many as stages or more: 9 with p = 4; \
             8 or 10 would do",
        ),
        (
            ScheduleName::DualPipe,
            4,
            6,
            "dualpipe needs micro-batches even in number, twice as many as stages or more: 6 with p = 4; \
             8 would do",
        ),
        (
            ScheduleName::DualPipeV,
            4,
            7,
            "dualpipe_v needs micro-batches twice as many as stages or more: 7 with p = 4; 8 would do",
        ),
        (ScheduleName::Chimera, 3, 6, "chimera needs an even number of stages: 3; 2 or 4 would do"),
        (
            ScheduleName::Chimera,
            4,
            6,
            "chimera needs micro-batches divisible by stages: 6 with p = 4; 4 or 8 would do",
        ),
        (
            ScheduleName::Overlapped1F1B,
            4,
            6,
            "overlapped_1f1b needs micro-batches divisible by stages: 6 with p = 4; 4 or 8 would do",
        ),
        (
            ScheduleName::InterleavedZb,
            4,
            6,
            "interleaved_zb needs micro-batches divisible by stages: 6 with p = 4; 4 or 8 would do",
        ),
    ];
    for (name, p, m, expected) in refused {
        assert_eq!(error(name, p, m, 2), expected);
    }
    assert_eq!(
        error(ScheduleName::VHalf, 4, 8, 1),
        "v_half needs exactly 2 chunks per pipeline rank: 1; 2 would do"
    );
    assert_eq!(
        error(ScheduleName::ZbAuto, 4, 8, 3),
        "zb_auto needs 1 or 2 chunks per pipeline rank: 3; 2 would do"
    );
    assert_eq!(
        error(ScheduleName::OneFOneB, 4, 0, 1),
        "a schedule needs 1 to 16777216 micro-batches: 0"
    );
}

/// The greedy run's tree has a power of two of leaves; most counts of pipeline ranks are none.
#[test]
fn vocabulary_passes_go_in_for_any_number_of_ranks() {
    for ranks in 1..=40 {
        for vocab in [VocabPasses::Naive, VocabPasses::One, VocabPasses::Two] {
            let schedule = ScheduleName::OneFOneB.build_with_vocab(ranks, 9, 1, vocab, None);
            let graph = Graph::new(&schedule.expect("counts are small"));
            assert!(graph.is_ok(), "{ranks} ranks");
        }
    }
}

/// Within 1F1B's memory no order is shorter than the hand-made one, given enough micro-batches.
#[test]
fn zb_auto_is_made_by_hand_where_nothing_is_shorter() {
    let mut same = 0;
    for (p, m, v) in (1..=10).flat_map(|p| (1..=24).flat_map(move |m| [(p, m, 1), (p, m, 2)])) {
        let auto = ScheduleName::ZbAuto;
        let order = auto.build(p, m, v).unwrap();
        let Some(other) = auto.made_by_hand(p, m, v) else { continue };
        assert_eq!(order, other.build(p, m, v).unwrap(), "{other} {p} {m} {v}");
        same += 1;
    }
    assert!(same > 250, "{same}");
}

/// One chunk per pipeline rank and one pass at a time still holds one micro-batch.
#[test]
fn a_memory_limit_that_no_order_keeps_is_named_with_one_that_would_do() {
    let costs = AutoCosts { limit: 0.5, ..AutoCosts::even(4) };
    let error = zb_auto(4, 8, 1, costs).unwrap_err().to_string();
    let expected = "no order of zb_auto was found within a memory limit of 0.5; the least that it has one for is 1";
    assert_eq!(error, expected);
    for (p, m, chunks) in [(1, 1, 1), (4, 8, 1), (4, 8, 2), (6, 12, 2), (3, 5, 1)] {
        let costs = AutoCosts { limit: 0.25, freed_by_b: 0.5, ..AutoCosts::even(p) };
        let error = zb_auto(p, m, chunks, costs).unwrap_err().to_string();
        let least: f64 = error.rsplit(' ').next().unwrap().parse().unwrap();
        let within = |limit| zb_auto(p, m, chunks, AutoCosts { limit, ..costs });
        assert_eq!(within(least).unwrap().validate(), Ok(()), "{p} {m} {chunks}: {least}");
        let less = least - 1.5 / chunks as f64;
        assert!(less < 0.0 || within(less).is_err(), "{p} {m} {chunks}: {less} would do");
    }
    // What is named is short, and accepted where it is typed back.
    for (freed_by_b, freed_by_w) in
        [(0.1, 0.2), (0.1234567, 1.0), (1e-7 / 3.0, 1e-7), (7e8 / 9.0, 0.0)]
    {
        let costs = AutoCosts { limit: 0.0, freed_by_b, freed_by_w, ..AutoCosts::even(4) };
        let error = zb_auto(4, 8, 1, costs).unwrap_err().to_string();
        let least = error.rsplit(' ').next().unwrap();
        let digits = least.trim_matches(['0', '.']).replace('.', "");
        assert!(digits.trim_matches('0').len() <= 6, "{least}");
        let limit = least.parse().unwrap();
        assert!(zb_auto(4, 8, 1, AutoCosts { limit, ..costs }).is_ok(), "{least}");
    }
    for chunks in [1, 2] {
        let costs = AutoCosts { limit: 4.0, ..AutoCosts::even(4) };
        assert_eq!(zb_auto(4, 8, chunks, costs).unwrap().validate(), Ok(()));
    }
    let costs = AutoCosts { weight: f64::NAN, ..AutoCosts::even(4) };
    let error = zb_auto(4, 8, 1, costs).unwrap_err().to_string();
    assert_eq!(error, "weight time cannot be NaN: it is finite and not negative");
}

/// Each barrier keeps one more micro-batch in flight (Vocabulary Parallelism, arXiv 2411.05288,
/// sections 5.2 and 5.3): p + 1 and p + 2 in 1F1B; in V-Half as many on every pipeline rank.
#[test]
fn vocabulary_passes_hold_a_micro_batch_more_for_each_barrier() {
    for vocab in VocabPasses::ALL {
        let more = vocab.barriers() as f64;
        for p in [2, 4, 6, 8] {
            let times = None;
            let with =
                |name: ScheduleName, v| name.build_with_vocab(p, 4 * p, v, vocab, times).unwrap();
            for (name, v) in [(ScheduleName::OneFOneB, 1), (ScheduleName::ZbH1, 1)] {
                assert_eq!(with(name, v).peak_activations(0, Release::AtB), p as f64 + more);
            }
            let held = |schedule: &Schedule, rank| schedule.peak_activations(rank, Release::AtW);
            for (name, v) in [
                (ScheduleName::ZbV, 2),
                (ScheduleName::V1F1B, 2),
                (ScheduleName::DualPipeV, 2),
                (ScheduleName::ZbAuto, 1),
            ] {
                let (with, without) = (with(name, v), name.build(p, 4 * p, v).unwrap());
                for rank in 0..p {
                    let (with, without) = (held(&with, rank), held(&without, rank));
                    // The fullest moment may come before so many backwards.
                    let held = with - without;
                    assert!(held <= more && held > more - 1.0, "{name} {p} {with} {without}");
                }
            }
            let half = with(ScheduleName::VHalf, 2);
            for rank in 0..p {
                let expected = (p / 2 + 1) as f64 + more;
                assert_eq!(half.peak_activations(rank, Release::AtW), expected, "{p} {vocab:?}");
            }
        }
    }
}

/// Where the order pairs forwards with backwards, so does the one with vocabulary passes.
#[test]
fn pairs_stay_together_beside_vocabulary_passes() {
    for vocab in VocabPasses::ALL {
        let (p, m, times) = (4, 16, None);
        let with = ScheduleName::DualPipeV.build_with_vocab(p, m, 2, vocab, times).unwrap();
        assert_eq!(with.validate(), Ok(()));
        let without = ScheduleName::DualPipeV.build(p, m, 2).unwrap();
        let pairs = |schedule: &Schedule| schedule.pairs.iter().map(Vec::len).sum::<usize>();
        let lost = pairs(&without) as f64 - pairs(&with) as f64;
        assert!(pairs(&with) > 0 && lost.abs() <= (2 * p * vocab.barriers()) as f64, "{lost}");
    }
}

/// Reductions of a kind of vocabulary pass follow one another in a queue of their own: a pipeline
/// rank with another order would add up different micro-batches.
#[test]
fn vocabulary_passes_in_another_order_than_other_ranks_are_refused() {
    for vocab in VocabPasses::ALL {
        let times = None;
        let schedule = ScheduleName::GPipe.build_with_vocab(4, 8, 1, vocab, times).unwrap();
        assert_eq!(schedule.validate(), Ok(()));
        let reversed = |passes: &mut Vec<Pass>| {
            let vocab = |pass: &&mut Pass| pass.kind != PassKind::F && pass.kind != PassKind::BW;
            passes
                .iter_mut()
                .filter(vocab)
                .for_each(|pass| pass.micro_batch = 7 - pass.micro_batch);
        };
        let mut one = schedule.clone();
        reversed(&mut one.passes[2]);
        let order = ScheduleError::VocabOrder { rank: 2, kind: PassKind::S };
        assert_eq!(one.validate(), Err(order), "{vocab:?}");
        // The same order on all pipeline ranks is valid, though this one deadlocks.
        let mut all = schedule;
        all.passes.iter_mut().for_each(reversed);
        let found = all.validate();
        assert!(matches!(found, Err(ScheduleError::Deadlock { .. })), "{vocab:?}: {found:?}");
    }
}

/// A pair is a forward and the whole backward of another chunk or micro-batch, side by side in the
/// order.
#[test]
fn pairs_that_cannot_run_together_are_refused() {
    let mut schedule = ScheduleName::DualPipeV.build(2, 4, 2).unwrap();
    assert_eq!(schedule.validate(), Ok(()));
    schedule.pairs[0][0] -= 1;
    assert!(matches!(schedule.validate(), Err(ScheduleError::Pair { rank: 0, .. })));
    let mut schedule = ScheduleName::OneFOneB.build(1, 2, 1).unwrap();
    schedule.pairs[0] = vec![0];
    assert_eq!(schedule.validate(), Err(ScheduleError::Pair { rank: 0, place: 0 }));
}

/// After its warm-up every forward of a pipeline rank runs together with a backward, and each pair
/// is of two micro-batches.
#[test]
fn overlapped_1f1b_pairs_every_forward_behind_its_warm_up() {
    let counts = (1..7).flat_map(|p| (1..5).map(move |v| (p, v)));
    for (p, v) in counts.filter(|&(p, v)| p == 1 || v > 1) {
        for m in [p, 2 * p, 5 * p] {
            let schedule = ScheduleName::Overlapped1F1B.build(p, m, v).unwrap();
            assert_eq!(schedule.validate(), Ok(()), "{p} {m} {v}");
            for rank in 0..p {
                let warm_up = (2 * (p - 1 - rank) + (v - 1) * p + 1).min(m * v);
                let (order, pairs) = (&schedule.passes[rank], &schedule.pairs[rank]);
                assert_eq!(pairs.len(), m * v - warm_up);
                assert!(pairs.iter().enumerate().all(|(n, &at)| at as usize == warm_up + 2 * n));
                let of = |at: u32| [order[at as usize], order[at as usize + 1]];
                assert!(
                    pairs.iter().map(|&at| of(at)).all(|[f, b]| f.micro_batch != b.micro_batch)
                );
                let held = schedule.peak_activations(rank, Release::AtW) * v as f64;
                assert_eq!(held, (warm_up + 1).min(m * v) as f64);
            }
        }
    }
}

/// Interlaced vocabulary layers: `S` and `T` side by side, half as many micro-batches again as 1F1B
/// (Vocabulary Parallelism, arXiv 2411.05288, section 6.2).
#[test]
fn interlaced_layers_run_together_and_hold_half_as_many_again() {
    for p in 1..9 {
        for m in [1, 2, p, 2 * p + 1, 4 * p] {
            let interlaced = VocabPasses::Interlaced;
            let schedule =
                ScheduleName::OneFOneB.build_with_vocab(p, m, 1, interlaced, None).unwrap();
            assert_eq!(schedule.validate(), Ok(()), "{p} {m}");
            for i in 0..p {
                let held = schedule.peak_activations(i, Release::AtB);
                assert_eq!(held, m.min(3 * (p - i) / 2) as f64, "{p} {m} {i}");
                assert_eq!(held, m.min(interlaced.in_flight(p - i)) as f64);
            }
            for order in &schedule.passes {
                let mut firsts =
                    order.iter().enumerate().filter(|(_, pass)| pass.kind == PassKind::S);
                let together =
                    |(n, pass): (usize, &Pass)| order[n + 1] == Pass { kind: PassKind::T, ..*pass };
                assert!(firsts.all(together), "{p} {m}");
            }
        }
    }
    let refused = ScheduleName::ZbH1.build_with_vocab(4, 8, 1, VocabPasses::Interlaced, None);
    assert_eq!(refused, Err(ScheduleError::NotInterlaced { schedule: ScheduleName::ZbH1 }));
}

/// With more micro-batches than ranks.
#[test]
fn names_say_whether_forwards_come_first() {
    for name in ScheduleName::ALL {
        let micro_batches = if name == ScheduleName::Naive { 1 } else { 8 };
        let schedule = name.build(4, micro_batches, name.chunk_rule().nearest(2)).unwrap();
        let found = schedule.passes.iter().all(|passes| forwards_come_first(passes));
        assert_eq!(found, name.runs_forwards_first(), "{name}");
    }
}
