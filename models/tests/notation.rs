//! Passes written as one line are read back, lines are short, and no text does harm.

use models::schedule::{
    MOST_PASSES, Pass, PassKind, PassOrder, PassTimes, Schedule, ScheduleName, VocabPasses,
    parse_passes, write_passes,
};
use proptest::prelude::*;

const KINDS: [PassKind; 9] = [
    PassKind::F,
    PassKind::B,
    PassKind::W,
    PassKind::BW,
    PassKind::S,
    PassKind::S2,
    PassKind::T,
    PassKind::IF,
    PassKind::IB,
];

/// The schedule of these counts, and those with vocabulary passes and input passes.
fn variants(name: ScheduleName, p: usize, m: usize, v: usize) -> Vec<Schedule> {
    let algorithms = VocabPasses::ALL.into_iter().chain([VocabPasses::Interlaced]);
    let with = algorithms.filter_map(|vocab| name.build_with_vocab(p, m, v, vocab, None).ok());
    let with_input = with.flat_map(|schedule| {
        let input = schedule.clone().with_input_passes(PassTimes::default()).unwrap();
        [schedule, input]
    });
    name.build(p, m, v).into_iter().chain(with_input).collect()
}

fn lines(schedule: &Schedule) -> Vec<String> {
    schedule.by_rank().iter().map(write_passes).collect()
}

fn longest(schedule: &Schedule) -> usize {
    lines(schedule).iter().map(String::len).max().unwrap()
}

#[test]
fn every_schedule_is_read_back() {
    let counts = [(1, 1), (1, 5), (2, 4), (3, 9), (4, 8), (4, 16), (6, 12), (8, 32)];
    let mut written = [0; ScheduleName::ALL.len()];
    for (n, name) in ScheduleName::ALL.into_iter().enumerate() {
        for (p, m) in counts {
            for schedule in (1..=4).flat_map(|v| variants(name, p, m, v)) {
                for order in schedule.by_rank() {
                    let line = write_passes(&order);
                    assert_eq!(parse_passes(&line).as_ref(), Ok(&order), "{name}: {line}");
                }
                written[n] += 1;
            }
        }
    }
    assert!(written.iter().all(|&count| count >= 4), "{written:?}");
}

/// The notation, as a reader of a generated program sees it: schedule, pipeline ranks,
/// micro-batches, chunks, a pipeline rank, its line.
#[test]
fn schedules_are_written_like_this() {
    use ScheduleName::{
        Chimera, DualPipe, DualPipeV, GPipe, Interleaved1F1B, LoopedBfs, OneFOneB, ZbH1, ZbV,
    };
    let examples = [
        (GPipe, 4, 8, 1, 0, "8xF 8xBW"),
        (OneFOneB, 8, 512, 1, 0, "7xF 505x(F BW) 7xBW"),
        (OneFOneB, 8, 512, 1, 7, "512x(F BW)"),
        (Interleaved1F1B, 4, 64, 2, 1, "4xF.0 4xF.1 15x(4x(F.0 BW.1) 4x(F.1 BW.0)) 4xBW.1 4xBW.0"),
        (LoopedBfs, 4, 8, 2, 0, "8xF.0 8xF.1 BW.1:7- 7xBW.1 BW.0:7- 7xBW.0"),
        (ZbH1, 4, 64, 1, 2, "F 2x(F B) 61x(F B W) B 3xW"),
        (
            ZbV,
            4,
            64,
            2,
            3,
            "4x(F.0 F.1) B.1 W.1 60x(F.0 B.0 W.0 F.1 B.1 W.1) B.0 3x(B.1 B.0) W.0 3xW.1 3xW.0",
        ),
        (
            DualPipe,
            4,
            64,
            2,
            1,
            "F.0 F.1:32 F.0 F.1 F.0 BW.1:32 F.1+ BW.0 29x(F.0+ BW.1 F.1+ BW.0) BW.1 BW.0 B.1:63 B.0:31 W.1:63 W.0:31",
        ),
        (
            DualPipeV,
            4,
            64,
            2,
            1,
            "4xF.0 2x(F.0 F.1) 2x(B.1 W.1 F.1) F.0+ BW.1:2 57x(F.1+ BW.0 F.0+ BW.1) 3x(F.1+ BW.0 BW.1) \
             BW.0 B.1:63 B.0:61 W.1:63 B.0 W.0:61 B.0 2xW.0",
        ),
        (
            Chimera,
            4,
            64,
            2,
            0,
            "2xF.0 F.1:32 BW.1:32 F.1 BW.1 2xBW.0 15x(2xF.0 2x(F.1 BW.1) 2xBW.0)",
        ),
    ];
    for (name, p, m, v, rank, line) in examples {
        let schedule = name.build(p, m, v).unwrap();
        assert_eq!(lines(&schedule)[rank], line, "{name}");
    }
    let vocab = OneFOneB.build_with_vocab(4, 64, 1, VocabPasses::One, None).unwrap();
    assert_eq!(lines(&vocab)[1], "3xF S 2x(F T S) T 59x(S BW F T) 2x(S BW T) 3xBW");
    let input = vocab.with_input_passes(PassTimes::default()).unwrap();
    let line =
        "5xIF F IF S 2x(F IF T S) BW 2x(F T S BW) 56x(IF F T S BW IB) 3x(F T S BW IB) T 2xBW 5xIB";
    assert_eq!(lines(&input)[3], line);
}

/// Longest line of a pipeline rank, bytes, for `p = 8`, with 256 micro-batches and with 4096: the
/// steady state is one group, and with more micro-batches only its numbers grow.
#[test]
fn lines_are_short() {
    let most = [
        (ScheduleName::OneFOneB, 1, 19, 20),
        (ScheduleName::ZbH1, 1, 35, 36),
        (ScheduleName::ZbV, 2, 124, 125),
        (ScheduleName::DualPipe, 2, 168, 175),
        (ScheduleName::DualPipeV, 2, 179, 184),
        (ScheduleName::Chimera, 2, 117, 120),
        (ScheduleName::Interleaved1F1B, 2, 134, 135),
        (ScheduleName::Interleaved1F1B, 4, 264, 265),
        (ScheduleName::InterleavedZb, 4, 258, 259),
    ];
    for (name, v, few, many) in most {
        let bytes = |m| longest(&name.build(8, m, v).unwrap());
        assert_eq!((bytes(256), bytes(4096)), (few, many), "{name}");
    }
}

/// The same with vocabulary passes, and with input passes too. A greedy run places them, not always
/// alike from round to round: most of all among three chunks.
#[test]
fn lines_with_vocabulary_passes_are_longer() {
    let most = [
        (ScheduleName::OneFOneB, 1, 81, 275),
        (ScheduleName::ZbV, 2, 436, 642),
        (ScheduleName::VHalf, 2, 250, 396),
        (ScheduleName::DualPipeV, 2, 369, 553),
        (ScheduleName::Interleaved1F1B, 2, 374, 719),
        (ScheduleName::Interleaved1F1B, 3, 1155, 1726),
    ];
    for (name, v, output, both) in most {
        let bytes = |input| {
            let all = variants(name, 8, 256, v).into_iter();
            let has_input = |s: &Schedule| s.passes[0].iter().any(|p| p.kind == PassKind::IF);
            let all = all.filter(|s| s.vocab.is_some() && has_input(s) == input);
            all.map(|schedule| longest(&schedule)).max().unwrap()
        };
        assert_eq!((bytes(false), bytes(true)), (output, both), "{name}");
    }
}

fn passes() -> impl Strategy<Value = Vec<Pass>> {
    let micro_batch = prop_oneof![20 => 0..5_u32, 1 => u32::MAX - 3..=u32::MAX, 1 => any::<u32>()];
    let chunk = prop_oneof![20 => 0..3_u16, 1 => any::<u16>()];
    let pass = (prop::sample::select(&KINDS[..]), micro_batch, chunk);
    let pass = pass.prop_map(|(kind, micro_batch, chunk)| Pass { kind, micro_batch, chunk });
    prop::collection::vec(pass, 0..200)
}

/// Lists that count and repeat: groups of a few passes, each repeated, in groups that are repeated.
fn repeating() -> impl Strategy<Value = Vec<Pass>> {
    let word = (prop::sample::select(&KINDS[..3]), 0..2_u16);
    let group = (prop::collection::vec(word, 1..4), 1..6_usize);
    let groups = (prop::collection::vec(group, 1..4), 1..5_usize);
    prop::collection::vec(groups, 1..4).prop_map(|all| {
        let words = all.into_iter().flat_map(|(groups, times)| {
            groups
                .into_iter()
                .flat_map(|(words, times)| words.repeat(times))
                .collect::<Vec<_>>()
                .repeat(times)
        });
        let mut counts = std::collections::BTreeMap::new();
        let pass = |(kind, chunk)| {
            let count = counts.entry((kind, chunk)).or_insert(0);
            *count += 1;
            Pass { kind, micro_batch: *count - 1, chunk }
        };
        words.map(pass).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2000, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn any_list_is_read_back(list in prop_oneof![passes(), repeating()]) {
        let order = PassOrder::from(list);
        let line = write_passes(&order);
        prop_assert_eq!(parse_passes(&line), Ok(order));
    }

    /// A list that counts up names no micro-batch, and no repeat makes it longer.
    #[test]
    fn counted_lists_name_no_micro_batch(list in repeating()) {
        let line = write_passes(&list.clone().into());
        prop_assert!(!line.contains(':'), "{}", line);
        let plain = list.iter().map(|pass| format!("{}.{} ", pass.kind, pass.chunk).len());
        prop_assert!(line.len() < plain.sum(), "{}", line);
    }

    #[test]
    fn any_text_is_read_or_refused(
        text in prop_oneof![any::<String>(), "([0-9]{1,2}x|[ ()+]|F|BW|S2|[.:][0-9]|-){0,40}"],
    ) {
        match parse_passes(&text) {
            Ok(order) if order.passes.len() < 10_000 => {
                prop_assert_eq!(parse_passes(&write_passes(&order)), Ok(order));
            }
            Ok(_) => {}
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}

#[test]
fn lines_written_by_hand_are_read() {
    let pass = |kind, micro_batch, chunk| Pass { kind, micro_batch, chunk };
    let read = |text: &str| parse_passes(text).unwrap().passes;
    assert_eq!(read(" \t\n"), []);
    let twice = [pass(PassKind::F, 0, 0), pass(PassKind::F, 1, 0)];
    for text in ["F F", "F.0 F:1", "2xF", "2x(F)", "1x(2x(1xF))", "2x( F\n)", "F:0 F:1-"] {
        assert_eq!(read(text), twice, "{text}");
    }
    // A group is its words written out: each repeat begins anew where a word says so.
    let group = read("2x(W.2:6- W.2 S2)");
    let of = |word: usize| (group[word].micro_batch, group[word].chunk);
    assert_eq!([0, 1, 2, 3, 4, 5].map(of), [(6, 2), (5, 2), (0, 0), (6, 2), (5, 2), (1, 0)]);
    assert_eq!(read("4194304xF").len(), MOST_PASSES);
    assert_eq!(read("1024x(4096xF)").len(), MOST_PASSES);
    assert_eq!(read("F:4294967295")[0].micro_batch, u32::MAX);
    assert_eq!(read("F.65535")[0].chunk, u16::MAX);
    assert_eq!(parse_passes("F 2x(F.1:3-+ BW)").unwrap().pairs, [1, 3]);
}

#[test]
fn errors_name_the_word_and_what_would_do() {
    let error = |text: &str| parse_passes(text).unwrap_err().to_string();
    let no_pass = "is no pass; passes are F, B, W, BW, S, S2, T, IF, IB, on chunk 1 F.1, of \
                   micro-batch 8 F.1:8 (and down from there F.1:8-), together with the next F+";
    let words = "G f F0 F. F.-1 F.+1 F.65536 F: F:- F:8-- F:+8 F:4294967296 F.1.1 F:1:1 F:1.1 F@0 \
                 F\u{301} 4xG 4x 4x4xF S3 IFB";
    for word in words.split(' ') {
        assert_eq!(error(&format!("F {word} F")), format!("`{word}` {no_pass}"));
    }
    let no_times = "does not say 1 to 4194304 repeats; 4xF and 3x(F BW) would";
    for word in ["0xF", "xF", "-1xF", "+1xF", "1.5xF", "4194305xF", "99999999999999999999xF", "0x("]
    {
        assert_eq!(error(word), format!("`{word}` {no_times}"));
    }
    let no_group = "has a bracket that begins or ends no group; 3x(F BW) would be one";
    for word in ["(F", "F)", ")", "2(F)", "2x((F))", "2x(F)BW)", "F)(F"] {
        assert_eq!(error(word), format!("`{word}` {no_group}"));
    }
    let unclosed = "the group that begins with `2x(BW` lacks its `)`; 3x(F BW) has it";
    assert_eq!(error("3x(F) 2x(BW 2xB"), unclosed);
    assert_eq!(
        error("2x( 3x())"),
        "the group that ends with `3x())` has no passes; 3x(F BW) has some"
    );
    let too_many =
        |word| format!("with `{word}` there are more than 4194304 passes; that many would do");
    assert_eq!(error("4194304xF BW"), too_many("BW"));
    assert_eq!(error("4194304x(F BW) B"), too_many("BW)"));
    assert_eq!(
        error("4194304x(4194304x(4194304x(F)))"),
        too_many("4194304x(4194304x(4194304x(F)))")
    );
    let beyond = |word| {
        format!("`{word}` is counted beyond micro-batches 0 to 4294967295; one of them would do")
    };
    assert_eq!(error("F.1:4294967295 F.1"), beyond("F.1"));
    assert_eq!(error("W:1- 2xW"), beyond("W"));
    let long = format!("{}...", "é".repeat(60));
    assert_eq!(error(&"é".repeat(100)), format!("`{long}` {no_pass}"));
}

#[test]
fn huge_texts_are_refused_or_read_in_time() {
    let deep = 100_000;
    let nested = |times: &str| format!("{}F{}", times.repeat(deep), ")".repeat(deep));
    assert_eq!(parse_passes(&nested("1x(")).map(|order| order.passes.len()), Ok(1));
    assert!(parse_passes(&nested("2x(")).is_err());
    assert!(parse_passes(&"4194304x(".repeat(deep)).is_err());
    assert!(parse_passes(&")".repeat(deep)).is_err());
}
