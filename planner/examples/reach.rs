//! What no prediction of the measured runs can reach (docs/validation.md, "What is out of reach, and how we know").
//!
//!     cargo run --release -p meshwright-planner --example reach -- tests/papers/measured.csv

use planner::validate::claims::claims;
use planner::validate::fit::{fit, folds, held_out, samples};
use planner::validate::predict_all;
use planner::validate::reach::Share;
use planner::validate::reach::oracle::oracle;
use planner::validate::reach::order::{LEAST_MARGIN, MOST_ERROR, most_rank_correlation};
use planner::validate::reach::repeats::{Axis, Measured, Seen, floors, humps, repeats};
use planner::validate::reach::unseen::{Unseen, unseen, unseen_memory};
use planner::validate::row::{self, Row};
use std::path::Path;

/// Sources with a target that is not met, or with sweeps.
const SOURCES: [&str; 12] = [
    "bigscience_bloom_a100",
    "korthikanti2022",
    "llm_foundry_mpt",
    "megascale",
    "megatron_sc21",
    "nemo_megatron_bridge",
    "nvidia_dgxc_benchmarking",
    "vocab_parallelism",
    "vocab_parallelism_paper",
    "vtrain_multi",
    "vtrain_single",
    "zero_bubble",
];
/// Repeats that tell less apart are not printed.
const APART: f64 = 0.02;

fn main() -> anyhow::Result<()> {
    let measured =
        std::env::args().nth(1).ok_or_else(|| anyhow::anyhow!("give a file of measurements"))?;
    let rows = row::read(Path::new(&measured))?;
    show_repeats(&rows, Measured::Time, "time");
    show_repeats(&rows, Measured::Memory, "memory");
    show_humps(&rows, Axis::MicroBatch, "micro-batch");
    show_humps(&rows, Axis::Gpus, "GPUs");
    show_oracles(&rows);
    show_orders(&rows);
    show_unseen(&rows);
    println!("\nclaims that do not hold");
    for claim in claims().iter().filter(|claim| !claim.holds) {
        println!("{} {}: {}", claim.id, claim.claim, claim.predicted);
    }
    Ok(())
}

fn percent(share: &Share) -> String {
    format!("{:5.2} ({:5.2})", 100.0 * share.mean, 100.0 * share.median)
}

fn show_repeats(rows: &[Row], measured: Measured, what: &str) {
    println!("\n{what}: least mean (median) over groups of any predictor, %");
    println!("{:28} by columns        by what the planner makes of them", "");
    let by_setup = floors(rows, Seen::Setup, measured);
    for floor in floors(rows, Seen::Columns, measured) {
        let own = by_setup.iter().find(|own| own.source == floor.source);
        if floor.mean > 0.0005 || own.is_some_and(|own| own.mean > 0.0005) {
            println!(
                "{:28} {}   {}",
                floor.source,
                percent(&floor),
                own.map_or_else(String::new, percent)
            );
        }
    }
    println!("{what}: configurations measured more than once, least error of one prediction, %");
    let mut found = repeats(rows, Seen::Columns, measured);
    found.retain(|repeats| repeats.least_error > APART);
    found.sort_by(|a, b| b.least_error.total_cmp(&a.least_error));
    for repeats in &found {
        let ids = repeats.ids.join(" ");
        println!("{:28} {:5.1}  {ids}", repeats.source, 100.0 * repeats.least_error);
    }
}

fn show_humps(rows: &[Row], axis: Axis, what: &str) {
    println!("\n{what}: slower than with less and with more, all else equal, %");
    for hump in humps(rows, axis, APART) {
        let [before, at, behind] = hump.places;
        let height = 100.0 * hump.height;
        println!(
            "{:28} {:9} {at} against {before} and {behind}: {height:5.1}",
            hump.source, hump.id
        );
    }
}

/// Sources whose sweeps are ordered less well than asked, and how long a proof may take, s.
const UNORDERED: [(&str, f64); 1] = [("vtrain_multi", 3600.0)];

fn show_orders(rows: &[Row]) {
    let predicted = predict_all(rows);
    println!(
        "\nmost rank correlation of any such constants with errors of {:.0} % or less, pairs {} % apart:",
        100.0 * MOST_ERROR,
        100.0 * LEAST_MARGIN
    );
    for (source, limit_s) in UNORDERED {
        let most = most_rank_correlation(source, (rows, &predicted), limit_s);
        let said = most.map_or_else(|| "no proof".to_owned(), |most| format!("{most:.3}"));
        println!("{source:28} {said}");
    }
}

fn show_unseen(rows: &[Row]) {
    let samples = samples(rows);
    let fold = folds(&samples);
    let fitted = fit(&samples);
    let errors = held_out(&fitted, &samples, |sample| fold[&sample.row.group].to_string());
    println!(
        "\nunseen errors (five-fold), and the least with factors for each term learnt from the"
    );
    println!("other folds' errors, their freedom chosen in hindsight, mean (median), %:");
    let predicted = predict_all(rows);
    let found = unseen(&samples, &errors, &fold, (rows, &predicted));
    found.iter().for_each(show_learnt);
    println!(
        "\nrank correlation and worst regret of unseen times, and the best with such factors:"
    );
    for Unseen { now, order, .. } in &found {
        let Some(order) = order else { continue };
        println!(
            "{:28} {:5.3} {:5.1}   {:5.3} {:5.1}",
            now.source,
            order.rank_correlation,
            100.0 * order.worst_regret,
            order.most_rank_correlation,
            100.0 * order.least_worst_regret
        );
    }
    println!("\nthe same of memory, each group left out once, mean (median), %:");
    unseen_memory(rows, &predicted).iter().for_each(show_learnt);
}

fn show_learnt(found: &Unseen) {
    let [mean, median] = [found.least_mean, found.least_median].map(|least| 100.0 * least);
    println!("{:28} {}  {mean:5.2} ({median:5.2})", found.now.source, percent(&found.now));
}

fn show_oracles(rows: &[Row]) {
    let predicted = predict_all(rows);
    println!("\nfree constants for each source and GPU, fitted to the runs they are judged on, %:");
    println!("least mean (median); the same where every sweep's fastest run must come first;");
    println!(
        "rank correlation and worst regret of the former; sweeps that constants of their own order rightly"
    );
    for source in SOURCES {
        let Some(found) = oracle(source, rows, &predicted) else { continue };
        print!("{source:28} {}", percent(&found.error));
        if found.sweeps > 0 {
            print!(
                "  {:13}  {:5.3} {:5.1}  {} of {}",
                found.ordered.as_ref().map_or_else(|| "none".to_owned(), percent),
                found.rank_correlation,
                100.0 * found.worst_regret,
                found.sweeps_in_reach,
                found.sweeps,
            );
        }
        println!();
        for fixed in &found.out_of_reach {
            println!("    out of reach: {fixed}");
        }
    }
}
