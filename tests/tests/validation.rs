//! The cost model against published training runs (`tests/papers/measured.csv`): a ratchet on what was reached.

use planner::validate::score::{SourceScore, by_source};
use planner::validate::{Predicted, predict_all, row};
use std::sync::LazyLock;

const MEASURED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/papers/measured.csv");

fn rows() -> Vec<row::Row> {
    row::read(std::path::Path::new(MEASURED)).expect("the file is here")
}

/// All rows with their predictions, which take a while.
static PREDICTED: LazyLock<(Vec<row::Row>, Vec<Predicted>)> = LazyLock::new(|| {
    let rows = rows();
    let predicted = predict_all(&rows);
    (rows, predicted)
});

/// Source, and the most that the mean and the median over groups may be, with the shipped constants.
const RATCHET: [(&str, f64, f64); 12] = [
    ("all but vtrain_single", 0.056, 0.040),
    ("dense", 0.050, 0.038),
    ("moe", 0.096, 0.078),
    ("megatron_sc21", 0.034, 0.028),
    ("korthikanti2022", 0.034, 0.034),
    ("megascale", 0.036, 0.038),
    ("vtrain_multi", 0.060, 0.048),
    ("zero_bubble", 0.026, 0.025),
    ("vocab_parallelism_paper", 0.067, 0.050),
    ("llm_foundry_mpt", 0.045, 0.034),
    ("simumax_b200", 0.027, 0.031),
    ("nemo_2407_h100", 0.056, 0.040),
];

#[test]
fn published_runs_are_predicted_as_well_as_they_were() {
    let (rows, predicted) = &*PREDICTED;
    let scores = by_source(rows, predicted);
    let mut worse = vec![];
    for (source, mean, median) in RATCHET {
        let found = scores.iter().find(|score| score.source == source).expect("the source is here");
        if found.mean > mean || found.median > median {
            worse.push(format!(
                "{source}: mean {:.4} (at most {mean}), median {:.4} (at most {median})",
                found.mean, found.median
            ));
        }
    }
    assert!(worse.is_empty(), "{}", worse.join("\n"));
}

/// Whether a row is used, and what is predicted for it, must not depend on what was measured.
#[test]
fn predictions_do_not_look_at_results() {
    let (rows, seen) = &*PREDICTED;
    let blind: Vec<row::Row> = rows
        .iter()
        .map(|row| row::Row { iteration_s: None, peak_mem_gb: None, ..row.clone() })
        .collect();
    let unseen = predict_all(&blind);
    let key = |p: &Predicted| (p.used, p.reason.clone(), p.predicted_s, p.predicted_bytes);
    for (a, b) in seen.iter().zip(&unseen) {
        assert_eq!(key(a), key(b), "{}", a.id);
    }
}

#[test]
fn rows_that_cannot_be_expressed_say_why() {
    for predicted in &PREDICTED.1 {
        assert!(predicted.used != predicted.reason.is_some(), "{}", predicted.id);
    }
}

#[test]
fn a_perfect_prediction_scores_zero_and_groups_weigh_the_same() {
    let (rows, predicted) = &*PREDICTED;
    let exact = |(p, row): (&Predicted, &row::Row)| Predicted {
        predicted_s: row.measured_s(),
        ..p.clone()
    };
    let exact: Vec<Predicted> = predicted.iter().zip(rows).map(exact).collect();
    let score = |found: &[Predicted]| -> SourceScore {
        by_source(rows, found).into_iter().last().expect("all sources come last")
    };
    assert_eq!(score(&exact).mean, 0.0);
    // One group off by 10 % counts by the number of groups, not of its rows.
    let scored = rows.iter().find(|row| row.measured_s().is_some()).expect("some are scored");
    let group = &scored.group;
    let off: Vec<Predicted> = exact
        .into_iter()
        .map(|p| match p.predicted_s {
            Some(s) if p.group == *group => Predicted { predicted_s: Some(1.1 * s), ..p },
            _ => p,
        })
        .collect();
    let found = score(&off);
    assert!((found.mean * found.groups as f64 - 0.1).abs() < 1e-9, "{found:?}");
}
