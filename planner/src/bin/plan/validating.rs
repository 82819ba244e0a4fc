//! `plan validate`.

use crate::args::ValidateArgs;
use crate::failure::Failure;
use crate::output;
use planner::validate::score::{SourceScore, by_source, memory_by_source};
use planner::validate::{Predicted, predict_all, row};
use serde::Serialize;
use std::collections::BTreeMap;

/// What `--json` prints.
#[derive(Serialize)]
struct Answer {
    rows: Vec<Predicted>,
    sources: Vec<SourceScore>,
    memory: Vec<SourceScore>,
}

/// Compares the cost model with published measurements.
pub fn run(args: &ValidateArgs) -> Result<(), Failure> {
    let rows = row::read(&args.measured)?;
    let predicted = predict_all(&rows);
    let sources = by_source(&rows, &predicted);
    let memory = memory_by_source(&rows, &predicted);
    if args.json {
        return output::print_json(&Answer { rows: predicted, sources, memory });
    }
    output::print(&format!(
        "{}\n{}\n{}",
        table("source (tier 1, time)", &sources),
        table("source (memory)", &memory),
        unused(&predicted)
    ))
}

fn table(title: &str, sources: &[SourceScore]) -> String {
    let mut text = format!(
        "{:28} {:>5} {:>6} {:>7} {:>7} {:>7}  worst row\n",
        title, "rows", "groups", "mean", "median", "bias"
    );
    for s in sources {
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
