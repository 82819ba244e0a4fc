//! Every row of `data/papers/oracles_formulas.csv` against what the planner computes with.
//!
//! The file's rows are numbers computed outside this crate: from the papers' formulas, and for
//! AMPipe from an event simulation. A group without a check here fails the test.

use crate::ampipe::{self, equal_chunks, printed_s, simulate_s, tutel_chunks};
use crate::megatron::{days, recomputed_flops};
use crate::memory::{by_stage, split, unfused_bytes};
use crate::{DENSE, gpt};
use models::decisions::Recompute;
use models::formulas::{attention, flops, vocabulary};
use models::layer::{core_flops, forward_flops};
use models::model::{ModelSpec, params};
use std::collections::BTreeMap;

const ORACLES: &str = include_str!("../data/papers/oracles_formulas.csv");

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

/// SC'21 Table 1: label, hidden size, layers, heads.
const TABLE1: [(&str, u64, u64, u64); 10] = [
    ("1.7B", 2304, 24, 24),
    ("3.6B", 3072, 30, 32),
    ("7.5B", 4096, 36, 32),
    ("18.4B", 6144, 40, 48),
    ("39.1B", 8192, 48, 64),
    ("76.1B", 10240, 60, 80),
    ("145.6B", 12288, 80, 96),
    ("310.1B", 16384, 96, 128),
    ("529.6B", 20480, 105, 128),
    ("1008.0B", 25600, 128, 160),
];

fn table1(row: &Row) {
    let label = row.name.rsplit('_').next().unwrap();
    let (_, hidden, layers, heads) = *TABLE1.iter().find(|r| r.0 == label).unwrap();
    let model = gpt(hidden, layers, heads);
    if row.name.starts_with("P_eq2") {
        // Equation 2 leaves out the final norm.
        let count = params::total(&model) - params::norm(&model);
        return row.expect(count as f64 / 1e9, row.number());
    }
    let flops = recomputed_flops(&model, row.field("B="));
    row.expect(flops, row.number());
    let flops_per_s = row.field("at ") * 1e12;
    row.expect(flops / (row.field("n=") * flops_per_s), row.field("iter_time_s="));
}

/// The file has equation 4, `8TP/(nX)`, which leaves out attention and logits: 3 % at most.
fn training_time(row: &Row) {
    let (model, tokens, gpus, tflops) = match row.name {
        "days_P175B" => (gpt(12288, 96, 96), 300e9, 1024.0, 140.0),
        "days_P1008B" => (gpt(25600, 128, 160), 450e9, 3072.0, 163.0),
        other => panic!("{other}"),
    };
    let ratio = days(&model, tokens, gpus, tflops * 1e12) / row.number();
    assert!((1.0..1.03).contains(&ratio), "{}: {ratio}", row.name);
}

fn vocabulary_ratio(row: &Row) {
    let (h, v) = (row.field("h="), row.field("V="));
    let ratio = match row.name.rsplit(' ').next() {
        Some("compute") => vocabulary::output_compute_ratio(v, h, row.field("s=")),
        Some("param_mem") => {
            let model = ModelSpec { vocab: v as u64, ..gpt(h as u64, 32, 32) };
            params::embedding(&model) as f64 / (12.0 * h * h)
        }
        other => panic!("{other:?}"),
    };
    row.expect(ratio, row.number());
}

/// Korthikanti Table 3: the model and its micro-batch. All have tensor parallelism of 8.
fn korthikanti_layer(row: &Row) -> (ModelSpec, u64) {
    match row.name.split(' ').next().unwrap() {
        "22B" => (gpt(6144, 48, 64), 4),
        "175B" => (gpt(12288, 96, 96), 1),
        "530B" => (gpt(20480, 105, 128), 1),
        "1T" => (gpt(25600, 128, 160), 1),
        other => panic!("{other}"),
    }
}

fn korthikanti_activation(row: &Row) {
    let (model, micro_batch) = korthikanti_layer(row);
    let kept = |tp, sp, recompute| unfused_bytes(&model, &split(tp, micro_batch, sp), recompute);
    let bytes = match row.name.split_once(' ').unwrap().1 {
        "none" => kept(1, false, Recompute::None),
        "tp" => kept(8, false, Recompute::None),
        "tp+sp" => kept(8, true, Recompute::None),
        "tp+selective" => kept(8, false, Recompute::Selective),
        "tp+sp+selective" => kept(8, true, Recompute::Selective),
        "full(tp replicated input)" => kept(8, false, Recompute::Full),
        other => panic!("{other}"),
    };
    assert_eq!(bytes, row.number(), "{}", row.name);
    let percent = 100.0 * bytes / kept(8, false, Recompute::None);
    let printed: f64 = row.note.split('%').next().unwrap().parse().unwrap();
    assert!((percent - printed).abs() <= 0.0051, "{}: {percent} {printed}", row.name);
}

fn korthikanti(row: &Row) {
    let (model, micro_batch) = korthikanti_layer(row);
    let [s, h, v] = [model.seq_len, model.hidden, model.vocab].map(|count| count as f64);
    let value = match row.name.split_once(' ').unwrap().1 {
        "5as/h" => {
            let kept = |recompute| unfused_bytes(&model, &split(1, micro_batch, false), recompute);
            let scores = kept(Recompute::None) - kept(Recompute::Selective);
            scores / (s * micro_batch as f64 * h)
        }
        // The paper prints three times this: see megatron.rs.
        "selective recompute flops overhead" => {
            let layers = forward_flops(&model, s) - flops::product_flops(s, v, h);
            model.layers as f64 * core_flops(&model, DENSE) / flops::training_flops(layers)
        }
        other => panic!("{other}"),
    };
    row.expect(value, row.number());
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

fn ampipe_event(row: &Row) {
    let (block, degree) = ampipe_block(row);
    row.expect(simulate_s(&equal_chunks(&block, degree)), row.number());
    row.expect(ampipe::ampipe_s(&block, degree), row.number());
    row.expect(printed_s(&block, degree), row.field("paper formula"));
    row.expect(simulate_s(&tutel_chunks(&block, degree)), row.field("tutel event"));
    row.expect(ampipe::tutel_s(&block, degree), row.field("tutel event"));
    row.expect(ampipe::baseline_s(&block), row.field("baseline(no O)"));
}

fn zero(row: &Row) {
    let found = by_stage(7.5e9, row.field("N="));
    for (bytes, gigabytes) in found.into_iter().zip(row.numbers()) {
        assert!((bytes / 1e9 - gigabytes).abs() <= 5.1e-4, "{}: {bytes}", row.name);
    }
}

fn context_balance(row: &Row) {
    let ranks = row.field("cp=");
    if row.name.starts_with("contiguous") {
        let expected = row.value.strip_prefix("max/mean=").unwrap().parse().unwrap();
        return row.expect(attention::contiguous_imbalance(ranks), expected);
    }
    // The ring's slowdown is the imbalance.
    row.expect(attention::contiguous_imbalance(ranks), row.number());
}

#[test]
fn every_row_of_the_oracle_file_holds() {
    let checks: BTreeMap<&str, fn(&Row)> = BTreeMap::from([
        ("sc21_table1", table1 as fn(&Row)),
        ("sc21_eq4", training_time),
        ("vocab_ratio", vocabulary_ratio),
        ("korthikanti_act_per_layer_bytes", korthikanti_activation),
        ("korthikanti", korthikanti),
        ("ampipe_event", ampipe_event),
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
    assert_eq!(checked.values().sum::<usize>(), 96);
}
