//! Every row of `data/papers/oracles_formulas.csv` against `models::formulas`.
//!
//! The file's rows are numbers computed outside this crate: from the papers' formulas, and for
//! AMPipe from an event simulation. A group without a check here fails the test.

use std::collections::BTreeMap;

use models::formulas::activation::{Layer, Recompute, core_units, layer_bytes};
use models::formulas::gpt::{Gpt, compute_s, iteration_flops_recompute, parameters, training_days};
use models::formulas::state::{StateBytes, Zero, zero_bytes};
use models::formulas::{ampipe, attention, pipeline, recompute, vocabulary};

const ORACLES: &str = include_str!("data/papers/oracles_formulas.csv");

struct Row {
    group: &'static str,
    name: &'static str,
    value: &'static str,
    note: &'static str,
}

impl Row {
    /// The value as one number.
    fn number(&self) -> f64 {
        self.value.parse().unwrap()
    }

    /// The value as numbers between semicolons.
    fn numbers(&self) -> Vec<f64> {
        self.value.split(';').map(|n| n.parse().unwrap()).collect()
    }

    /// The number that follows `key` in the name, or else in the note.
    fn field(&self, key: &str) -> f64 {
        number_after(self.name, key)
            .or_else(|| number_after(self.note, key))
            .unwrap_or_else(|| panic!("{}: no {key}", self.name))
    }

    /// `actual` must print like `expected`, a number given to four decimals or seven figures.
    fn expect(&self, actual: f64, expected: f64) {
        let tolerance = 6e-5_f64.max(expected.abs() * 6e-7);
        let Row { group, name, .. } = self;
        assert!((actual - expected).abs() <= tolerance, "{group} {name}: {actual} {expected}");
    }
}

/// The number right after `key` where `key` starts a word, spaces between the two allowed.
fn number_after(text: &str, key: &str) -> Option<f64> {
    let starts_word = |at: usize| !text[..at].ends_with(|c: char| c.is_alphanumeric());
    let at = text.match_indices(key).map(|(at, _)| at).find(|at| starts_word(*at))?;
    let rest = text[at + key.len()..].trim_start();
    let ends = |c: char| !(c.is_ascii_digit() || c == '.');
    rest[..rest.find(ends).unwrap_or(rest.len())].trim_end_matches('.').parse().ok()
}

fn rows() -> Vec<Row> {
    let row = |line: &'static str| {
        let mut cells = line.splitn(4, ',');
        let mut cell = || cells.next().unwrap();
        Row { group: cell(), name: cell(), value: cell(), note: cell().trim_matches('"') }
    };
    ORACLES.lines().skip(1).map(row).collect()
}

/// SC'21 Table 1: label, hidden size, layers.
const TABLE1: [(&str, f64, f64); 10] = [
    ("1.7B", 2304.0, 24.0),
    ("3.6B", 3072.0, 30.0),
    ("7.5B", 4096.0, 36.0),
    ("18.4B", 6144.0, 40.0),
    ("39.1B", 8192.0, 48.0),
    ("76.1B", 10240.0, 60.0),
    ("145.6B", 12288.0, 80.0),
    ("310.1B", 16384.0, 96.0),
    ("529.6B", 20480.0, 105.0),
    ("1008.0B", 25600.0, 128.0),
];

fn table1(row: &Row) {
    let label = row.name.rsplit('_').next().unwrap();
    let (_, hidden, layers) = *TABLE1.iter().find(|r| r.0 == label).unwrap();
    let gpt = Gpt { layers, hidden, sequence: 2048.0, vocab: 51_200.0 };
    if row.name.starts_with("P_eq2") {
        return row.expect(parameters(&gpt) / 1e9, row.number());
    }
    let flops = iteration_flops_recompute(&gpt, row.field("B="));
    row.expect(flops, row.number());
    let flops_per_s = row.field("at ") * 1e12;
    row.expect(compute_s(flops, row.field("n="), flops_per_s), row.field("iter_time_s="));
}

fn training_time(row: &Row) {
    let (tokens, parameters, gpus, tflops) = match row.name {
        "days_P175B" => (300e9, 175e9, 1024.0, 140.0),
        "days_P1008B" => (450e9, 1008e9, 3072.0, 163.0),
        "days_P1000B" => (450e9, 1000e9, 3072.0, 163.0),
        other => panic!("{other}"),
    };
    let days = training_days(tokens, parameters, gpus, tflops * 1e12);
    assert!((days - row.number()).abs() < 6e-4, "{}: {days}", row.name);
}

fn vocabulary_ratio(row: &Row) {
    let (h, v) = (row.field("h="), row.field("V="));
    let ratio = match row.name.rsplit(' ').next() {
        Some("compute") => vocabulary::output_compute_ratio(v, h, row.field("s=")),
        Some("param_mem") => vocabulary::memory_ratio(v, h),
        other => panic!("{other:?}"),
    };
    row.expect(ratio, row.number());
}

/// Korthikanti Table 3, with its micro-batch and tensor parallelism of 8.
fn korthikanti_layer(row: &Row) -> Layer {
    let (heads, hidden, micro_batch) = match row.name.split(' ').next().unwrap() {
        "22B" => (64.0, 6144.0, 4.0),
        "175B" => (96.0, 12288.0, 1.0),
        "530B" => (128.0, 20480.0, 1.0),
        "1T" => (160.0, 25600.0, 1.0),
        other => panic!("{other}"),
    };
    Layer { sequence: 2048.0, micro_batch, hidden, heads, tensor: 8.0 }
}

fn korthikanti_activation(row: &Row) {
    let layer = korthikanti_layer(row);
    let bytes = match row.name.split_once(' ').unwrap().1 {
        "none" => layer_bytes(&Layer { tensor: 1.0, ..layer }, false, Recompute::None),
        "tp" => layer_bytes(&layer, false, Recompute::None),
        "tp+sp" => layer_bytes(&layer, true, Recompute::None),
        "tp+selective" => layer_bytes(&layer, false, Recompute::Selective),
        "tp+sp+selective" => layer_bytes(&layer, true, Recompute::Selective),
        "full(tp replicated input)" => layer_bytes(&layer, false, Recompute::Full),
        other => panic!("{other}"),
    };
    assert_eq!(bytes, row.number(), "{}", row.name);
    let percent = 100.0 * bytes / layer_bytes(&layer, false, Recompute::None);
    let printed: f64 = row.note.split('%').next().unwrap().parse().unwrap();
    assert!((percent - printed).abs() <= 0.0051, "{}: {percent} {printed}", row.name);
}

fn korthikanti(row: &Row) {
    let layer = korthikanti_layer(row);
    let value = match row.name.split_once(' ').unwrap().1 {
        "5as/h" => core_units(&layer),
        // The paper prints three times this: see papers_memory.rs.
        "selective recompute flops overhead" => {
            recompute::selective_overhead(layer.sequence, layer.hidden)
        }
        other => panic!("{other}"),
    };
    row.expect(value, row.number());
}

fn checkpoints(row: &Row) {
    let (layers, ratio) = (row.field("l="), row.field("ratio="));
    row.expect(recompute::ideal_checkpoints(layers, 1.0, ratio), row.number());
    // Not every row's optimum lies inside the stage; the note says to clamp.
    let best = recompute::best_checkpoints(layers as u64, 1.0, ratio);
    let nearest = |c: f64| (c - row.number().min(layers)).abs() < 1.0;
    assert!(nearest(best as f64), "{}: {best}", row.name);
}

fn ampipe_block(row: &Row) -> (ampipe::Block, u64) {
    let other_s = number_after(row.name, "O=").unwrap_or(0.0);
    let block = ampipe::Block {
        attention_s: row.field("A="),
        all_to_all_s: row.field("C="),
        experts_s: row.field("M="),
        other_s,
    };
    (block, row.field("p=") as u64)
}

/// Appendix C's formula to the letter, so without an all-to-all at degree 1.
fn ampipe_printed(row: &Row) {
    let (block, degree) = ampipe_block(row);
    let printed_s = ampipe::printed_s(&block, degree);
    row.expect(printed_s, row.number());
    let baseline_s = ampipe::baseline_s(&block);
    row.expect(baseline_s, row.field("baseline"));
    row.expect(ampipe::speedup(baseline_s, printed_s), row.field("speedup"));
}

fn ampipe_event(row: &Row) {
    let (block, degree) = ampipe_block(row);
    row.expect(ampipe::simulate_s(&ampipe::equal_chunks(&block, degree)), row.number());
    row.expect(ampipe::ampipe_s(&block, degree), row.number());
    row.expect(ampipe::printed_s(&block, degree), row.field("paper formula"));
    row.expect(ampipe::simulate_s(&ampipe::tutel_chunks(&block, degree)), row.field("tutel event"));
    row.expect(ampipe::tutel_s(&block, degree), row.field("tutel event"));
    row.expect(ampipe::baseline_s(&block), row.field("baseline(no O)"));
}

fn ampipe_table2(row: &Row) {
    let base_s = row.field("base");
    for (key, printed) in ["deg2", "deg4"].into_iter().zip(row.numbers()) {
        row.expect(ampipe::speedup(base_s, row.field(key)), printed);
    }
}

fn global_batch(row: &Row) {
    let (stages, d, m) = (row.field("pp"), row.field("dp"), row.field("m"));
    assert_eq!(pipeline::data_parallel(16_384.0, 8.0, stages), d);
    let sequences = pipeline::global_batch(m, 1.0, d);
    row.expect(sequences, row.number());
    let million_tokens: f64 = row.note.split('M').next().unwrap().parse().unwrap();
    assert!((sequences * 8192.0 / 1e6 - million_tokens).abs() <= 0.0051, "{}", row.name);
}

fn zero(row: &Row) {
    let stages = [Zero::Stage0, Zero::Stage1, Zero::Stage2, Zero::Stage3];
    for (zero, gigabytes) in stages.into_iter().zip(row.numbers()) {
        let bytes = zero_bytes(&StateBytes::MIXED, zero, 7.5e9, row.field("N="));
        assert!((bytes / 1e9 - gigabytes).abs() <= 5.1e-4, "{}: {bytes}", row.name);
    }
}

fn context_balance(row: &Row) {
    let ranks = row.field("cp=");
    if row.name.starts_with("contiguous") {
        let expected = row.value.strip_prefix("max/mean=").unwrap().parse().unwrap();
        return row.expect(attention::contiguous_imbalance(ranks), expected);
    }
    let contiguous = attention::contiguous_ring_blocks(ranks);
    row.expect(contiguous / attention::balanced_ring_blocks(ranks), row.number());
}

/// Parameter counts of named models are `models::model`'s, and tested there.
fn elsewhere(_: &Row) {}

#[test]
fn every_row_of_the_oracle_file_holds() {
    let checks: BTreeMap<&str, fn(&Row)> = BTreeMap::from([
        ("sc21_table1", table1 as fn(&Row)),
        ("sc21_eq4", training_time),
        ("vocab_ratio", vocabulary_ratio),
        ("params", elsewhere),
        ("korthikanti_act_per_layer_bytes", korthikanti_activation),
        ("korthikanti", korthikanti),
        ("ckpt", checkpoints),
        ("ampipe", ampipe_printed),
        ("ampipe_table2", ampipe_table2),
        ("ampipe_event", ampipe_event),
        ("seed003_gbs", global_batch),
        ("zero", zero),
        ("cp_balance", context_balance),
    ]);
    let mut checked = BTreeMap::<&str, usize>::new();
    for row in rows() {
        let check = checks.get(row.group);
        check.unwrap_or_else(|| panic!("no check for group {}", row.group))(&row);
        *checked.entry(row.group).or_default() += 1;
    }
    let missing: Vec<_> = checks.keys().filter(|g| !checked.contains_key(*g)).collect();
    assert!(missing.is_empty(), "groups without rows: {missing:?}");
    assert_eq!(checked.values().sum::<usize>(), 139);
}
