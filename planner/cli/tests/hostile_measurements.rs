//! Hostile numbers in a file of measurements: each is refused with its row and column, or handled
//! in reasonable time.

mod cli_common;

use cli_common::{plan, scratch};
use std::time::{Duration, Instant};
use validation::{predict_all, row};

const PAPERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/papers/measured.csv");

/// Columns that hold numbers.
const NUMBERS: [&str; 24] = [
    "layers",
    "hidden",
    "ffn_hidden",
    "heads",
    "kv_heads",
    "seq_len",
    "vocab",
    "n_experts",
    "top_k",
    "moe_ffn_hidden",
    "n_gpus",
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "etp",
    "dp",
    "zero_stage",
    "micro_batch",
    "global_batch",
    "iteration_s",
    "peak_mem_gb",
    "tier",
];

const VALUES: [&str; 29] = [
    "0",
    "1",
    "2",
    "3",
    "7",
    "63",
    "127",
    "1000",
    "9999",
    "10000",
    "65536",
    "100000",
    "1048575",
    "1048576",
    "16777216",
    "1000000000",
    "2147483648",
    "4294967296",
    "9007199254740993",
    "9223372036854775808",
    "18446744073709551615",
    "99999999999999999999999",
    "-1",
    "0.5",
    "1e308",
    "1e-308",
    "NaN",
    "inf",
    "x",
];

/// Rows for each way to price a run: plain, searched order, V-shaped, experts, sharded.
const ROWS: [&str; 7] =
    ["kort-007", "zb-007", "zb-043", "vocp-121", "zoo-001", "fms-001", "mb-001"];

/// The header, and rows by name.
struct Papers {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

fn papers() -> Papers {
    let mut reader = csv::Reader::from_path(PAPERS).unwrap();
    let header = reader.headers().unwrap().iter().map(str::to_owned).collect();
    let rows = reader.records().map(Result::unwrap);
    let rows = rows
        .filter(|row| ROWS.contains(&&row[0]))
        .map(|row| row.iter().map(str::to_owned).collect());
    Papers { header, rows: rows.collect() }
}

impl Papers {
    /// A file with one row, some of whose cells are replaced.
    fn edited(&self, row: usize, edits: &[(&str, &str)]) -> std::path::PathBuf {
        let path = scratch("measured.csv");
        let mut writer = csv::Writer::from_path(&path).unwrap();
        let mut cells = self.rows[row].clone();
        for (column, value) in edits {
            let at = self.header.iter().position(|name| name == column).unwrap();
            cells[at] = (*value).to_owned();
        }
        writer.write_record(&self.header).unwrap();
        writer.write_record(&cells).unwrap();
        writer.flush().unwrap();
        path
    }

    /// Asserts that the row is refused by name and column, or predicted in reasonable time. Returns
    /// whether it was accepted.
    fn tried(&self, row: usize, edits: &[(&str, &str)]) -> bool {
        let path = self.edited(row, edits);
        let begun = Instant::now();
        let read = row::read(&path);
        std::fs::remove_file(path).unwrap();
        let accepted = match read {
            Ok(rows) => {
                let predicted = &predict_all(&rows)[0];
                assert!(predicted.used || predicted.reason.is_some(), "{edits:?}");
                true
            }
            Err(error) => {
                let said = error.to_string();
                let named =
                    edits.iter().any(|(column, _)| said.contains(&format!("`{column}` of row")));
                assert!(named && said.contains(&self.rows[row][0]), "{edits:?}: {said}");
                false
            }
        };
        // Guards against runaway work and is no claim of speed: machines may be busy.
        assert!(begun.elapsed() < Duration::from_secs(300), "{edits:?}: {:?}", begun.elapsed());
        accepted
    }
}

#[test]
fn every_number_is_refused_by_name_or_predicted() {
    let papers = papers();
    let mut accepted = 0;
    for row in 0..papers.rows.len() {
        for column in NUMBERS {
            for value in VALUES {
                accepted += usize::from(papers.tried(row, &[(column, value)]));
            }
        }
    }
    assert!(accepted > 500, "only {accepted} were accepted");
}

/// Random pairs of numbers. Takes minutes.
#[test]
#[ignore = "takes minutes"]
fn hostile_pairs_of_numbers() {
    let papers = papers();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut below = |most: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % most
    };
    for _ in 0..20_000 {
        let row = below(papers.rows.len());
        let mut edit = || (NUMBERS[below(NUMBERS.len())], VALUES[below(VALUES.len())]);
        papers.tried(row, &[edit(), edit(), edit()]);
    }
}

#[test]
fn rows_that_broke_the_program_are_refused() {
    let papers = papers();
    for (column, value) in [
        ("pp", "0"),
        ("vpp", "4294967296"),
        ("vpp", "18446744073709551615"),
        ("layers", "18446744073709551615"),
        ("heads", "0"),
        ("iteration_s", "NaN"),
    ] {
        let path = papers.edited(0, &[(column, value)]);
        let run = plan(&format!("validate --measured {}", path.display()));
        assert_eq!(run.code, 2, "{column} {value}: {run:?}");
        let says = format!("`{column}` of row `{}` cannot be `{value}`", papers.rows[0][0]);
        assert!(run.err.contains(&says) && run.err.contains("measured.csv:2:1"), "{run:?}");
    }
}

#[test]
fn endless_files_are_no_measurements() {
    for (path, says) in [("/dev/zero", "is a device"), ("/dev/null", "is a device")] {
        let run = plan(&format!("validate --measured {path}"));
        assert_eq!(run.code, 2, "{run:?}");
        assert!(run.err.contains(says), "{run:?}");
    }
    let large = scratch("large.csv");
    std::fs::write(&large, vec![b'a'; (16 << 20) + 1]).unwrap();
    let run = plan(&format!("validate --measured {}", large.display()));
    assert!(run.code == 2 && run.err.contains("larger than 16 MiB"), "{run:?}");
}
