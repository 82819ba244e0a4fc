//! `plan validate`.

use crate::args::ValidateArgs;
use crate::failure::Failure;
use crate::output;
use planner::request::DEFAULT_HEADROOM;
use serde::Serialize;
use std::collections::BTreeMap;
use validation::claims::{Claim, claims};
use validation::memory_limit::{MemoryLimit, Verdicts, memory_limit};
use validation::ranking::{self, Pairs, Sweep, SweepScore, sweeps, vocabulary_pairs};
use validation::score::{SourceScore, by_source, memory_by_source};
use validation::{Predicted, predict_all, row};

/// Row names per line.
const ROWS_A_LINE: usize = 12;

/// What `--json` prints.
#[derive(Serialize)]
struct Answer {
    rows: Vec<Predicted>,
    sources: Vec<SourceScore>,
    memory: Vec<SourceScore>,
    sweeps: Vec<Sweep>,
    vocabulary_pairs: Pairs,
    memory_limit: MemoryLimit,
    claims: Vec<Claim>,
}

/// Compares the cost model with published measurements.
pub fn run(args: &ValidateArgs) -> Result<(), Failure> {
    let rows = row::read(&args.measured)?;
    let predicted = predict_all(&rows);
    let sources = by_source(&rows, &predicted);
    let memory = memory_by_source(&rows, &predicted);
    let sweeps = sweeps(&rows, &predicted);
    let vocabulary_pairs = vocabulary_pairs(&rows, &predicted);
    let memory_limit = memory_limit(&rows, &predicted);
    let claims = claims();
    if args.json {
        return output::print_json(&Answer {
            rows: predicted,
            sources,
            memory,
            sweeps,
            vocabulary_pairs,
            memory_limit,
            claims,
        });
    }
    output::print(&format!(
        "{}\n{}\n{}\n{}\n{}\n{}{}\n{}\n{}",
        counted(&predicted),
        table("source (tier 1, time)", &sources),
        table("source (memory)", &memory),
        ranked(&sweeps),
        pairs(vocabulary_pairs),
        limit(&memory_limit),
        warned(&predicted),
        claimed(&claims),
        unused(&predicted)
    ))
}

/// How many rows are used, and how to read their errors.
fn counted(predicted: &[Predicted]) -> String {
    let used = predicted.iter().filter(|row| row.used).count();
    format!(
        "{used} of {} rows can be expressed. The model's constants were fitted to published runs, so errors on those are \
         smaller than on others:\nplans carry the band that runs not seen earned.\n",
        predicted.len()
    )
}

fn table(title: &str, sources: &[SourceScore]) -> String {
    let mut text = format!(
        "{:28} {:>5} {:>6} {:>7} {:>7} {:>7}  worst row\n",
        title, "rows", "groups", "mean", "median", "bias"
    );
    for s in sources {
        if s.rows == 0 {
            text += &format!("{:28}     0  nothing to compare\n", s.source);
            continue;
        }
        text += &format!(
            "{:28} {:5} {:6} {:6.1}% {:6.1}% {:+6.1}%  {} {:+.1}%\n",
            s.source,
            s.rows,
            s.groups,
            100.0 * s.mean,
            100.0 * s.median,
            100.0 * s.bias,
            s.worst,
            100.0 * s.worst_error
        );
    }
    text
}

/// Scores of sweeps by source, and the sweeps whose predicted best is not the measured best.
fn ranked(sweeps: &[Sweep]) -> String {
    let mut text = format!(
        "{:28} {:>6} {:>16} {:>13}\n",
        "sweeps of one model and batch", "sweeps", "rank correlation", "worst regret"
    );
    for SweepScore { source, sweeps, rank_correlation, worst_regret } in ranking::by_source(sweeps)
    {
        let regret = 100.0 * worst_regret;
        text += &format!("{source:29} {sweeps:6} {rank_correlation:16.2} {regret:12.1}%\n");
    }
    for sweep in sweeps.iter().filter(|sweep| sweep.regret > 0.0) {
        text += &format!(
            "  {}: {} predicted best, {} measured best, regret {:.1} % of {} configurations\n",
            sweep.fixed,
            sweep.predicted_best,
            sweep.measured_best,
            100.0 * sweep.regret,
            sweep.configurations
        );
    }
    text
}

fn pairs(pairs: Pairs) -> String {
    format!(
        "vocabulary strategies: {} of {} pairs more than 3 % apart in the measured order ({:.1} %)\n",
        pairs.right,
        pairs.pairs,
        100.0 * pairs.share()
    )
}

/// The confusion matrix of memory predictions.
fn limit(found: &MemoryLimit) -> String {
    let mut text = format!(
        "{:28} {:>6} {:>12} {:>10}\n",
        "memory of the device", "safe", "within 5 %", "infeasible"
    );
    for (name, called) in [
        ("ran", &found.ran),
        ("ran, recomputation unstated", &found.ran_recompute_unstated),
        ("out of memory", &found.out_of_memory),
    ] {
        let Verdicts { safe, at_edge, infeasible } = called;
        text += &format!("{name:28} {safe:6} {at_edge:12} {infeasible:10}\n");
    }
    for (name, rows) in [
        ("ran, predicted more than 2 % beyond", &found.ran_but_infeasible),
        ("out of memory, predicted to fit", &found.out_of_memory_but_fits),
    ] {
        if !rows.is_empty() {
            text += &format!("  {name}: {}\n", rows.join(" "));
        }
    }
    text
}

/// Rows predicted to fit within the headroom only.
fn warned(predicted: &[Predicted]) -> String {
    let rows: Vec<&str> =
        predicted.iter().filter(|row| row.warning.is_some()).map(|row| row.id.as_str()).collect();
    let limit = 100.0 * DEFAULT_HEADROOM;
    let mut text = format!("  {} with a warning, within {limit:.0} % of the limit:\n", rows.len());
    for some in rows.chunks(ROWS_A_LINE) {
        text += &format!("    {}\n", some.join(" "));
    }
    text
}

fn claimed(claims: &[Claim]) -> String {
    let held = claims.iter().filter(|claim| claim.holds).count();
    let mut text = format!("claims: {held} of {} hold\n", claims.len());
    for Claim { id, source, claim, predicted, holds } in claims {
        let verdict = if *holds { "holds" } else { "FAILS" };
        text +=
            &format!("  {verdict}  {id} ({source}): {claim}\n         predicted: {predicted}\n");
    }
    text
}

/// Rows that could not be expressed, by reason.
fn unused(predicted: &[Predicted]) -> String {
    let mut reasons: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for row in predicted {
        if let Some(reason) = &row.reason {
            *reasons.entry((&row.file, reason)).or_default() += 1;
        }
    }
    let mut text = String::from("not expressed\n");
    for ((file, reason), count) in reasons {
        text += &format!("  {count:4}  {file}: {reason}\n");
    }
    text
}
