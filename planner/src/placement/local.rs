//! Incumbents by balance and small moves: good choices fast, with no claim to be best.

use super::{Choice, Problem, Scratch};

/// Columns of each stage by layer range, fastest first.
struct ByRange<'a> {
    problem: &'a Problem,
    uniform: bool,
    /// Layers that the stages from each one on hold at least.
    fewest_from: Vec<usize>,
}

impl<'a> ByRange<'a> {
    fn new(problem: &'a Problem) -> Self {
        let mut fewest_from = vec![0; problem.stages() + 1];
        for (stage, columns) in problem.columns.iter().enumerate().rev() {
            let fewest = columns.iter().map(super::Column::layers).min().unwrap_or(0);
            fewest_from[stage] = fewest_from[stage + 1] + fewest;
        }
        Self { problem, uniform: problem.is_uniform(), fewest_from }
    }

    /// Fastest column of a stage over `start..end`.
    fn fastest(&self, stage: usize, start: usize, end: usize) -> Option<usize> {
        let wanted = if self.uniform { (0, end - start) } else { (start, end) };
        let columns = &self.problem.columns[stage];
        let first = columns.partition_point(|c| (c.start, c.end) < wanted);
        (first < columns.len() && (columns[first].start, columns[first].end) == wanted)
            .then_some(first)
    }

    /// End and fastest column of the longest range from `start` whose load is at most `limit_s`.
    fn longest(&self, stage: usize, start: usize, limit_s: f64) -> Option<(usize, usize)> {
        let most = self.problem.layers.saturating_sub(self.fewest_from[stage + 1]);
        let columns = &self.problem.columns[stage];
        let first = if self.uniform { 0 } else { start };
        let wanted = (first, most - start.min(most) + first);
        let from = columns.partition_point(|c| c.start < first);
        let to = columns.partition_point(|c| (c.start, c.end) <= wanted);
        let fit = (from..to.max(from)).rev().find(|&index| columns[index].load_s() <= limit_s)?;
        let end = start + columns[fit].layers();
        self.fastest(stage, start, end).map(|column| (end, column))
    }
}

/// A balanced choice, mended to fit and, if its iteration is shorter than `improve_below_s`, improved by
/// moving single layers;
/// `None` where mending fails.
pub fn solve(problem: &Problem, improve_below_s: f64, scratch: &mut Scratch) -> Option<(Choice, f64)> {
    let by_range = ByRange::new(problem);
    let mut choice = balanced(&by_range)?;
    mend(problem, &mut choice)?;
    let mut best_s = problem.iteration_s(&choice, scratch);
    if best_s >= improve_below_s {
        return Some((choice, best_s));
    }
    while let Some((better, value_s)) = improve(&by_range, &choice, best_s, scratch) {
        (choice, best_s) = (better, value_s);
    }
    Some((choice, best_s))
}

/// Fills stages in order up to the smallest common load for which all layers find a place.
fn balanced(by_range: &ByRange<'_>) -> Option<Choice> {
    let problem = by_range.problem;
    let mut loads: Vec<f64> = problem.columns.iter().flatten().map(super::Column::load_s).collect();
    loads.sort_by(f64::total_cmp);
    loads.dedup();
    let (mut low, mut high) = (0, loads.len());
    let mut found = None;
    while low < high {
        let middle = (low + high) / 2;
        match filled_to(by_range, loads[middle]) {
            Some(choice) => {
                found = Some(choice);
                high = middle;
            }
            None => low = middle + 1,
        }
    }
    found
}

fn filled_to(by_range: &ByRange<'_>, limit_s: f64) -> Option<Choice> {
    let problem = by_range.problem;
    let (mut start, mut choice) = (0, vec![]);
    for stage in 0..problem.stages() {
        let (end, column) = by_range.longest(stage, start, limit_s)?;
        choice.push(column);
        start = end;
    }
    (start == problem.layers).then_some(choice)
}

/// Exchanges columns for slower ones that need less memory until every device fits.
fn mend(problem: &Problem, choice: &mut Choice) -> Option<()> {
    loop {
        let used = problem.memory_bytes(choice);
        let over = used.iter().zip(&problem.budget_bytes).position(|(used, budget)| used > budget);
        let Some(device) = over else { return Some(()) };
        let (stage, column) = cheapest_relief(problem, choice, device)?;
        choice[stage] = column;
    }
}

/// The exchange on a device that saves most bytes a second.
fn cheapest_relief(problem: &Problem, choice: &Choice, device: usize) -> Option<(usize, usize)> {
    let mut best: Option<(f64, usize, usize)> = None;
    for stage in (0..problem.stages()).filter(|&stage| problem.pipeline.device_of[stage] == device) {
        let now = &problem.columns[stage][choice[stage]];
        let rivals = problem.columns[stage].iter().enumerate();
        for (index, rival) in rivals.filter(|(_, c)| (c.start, c.end) == (now.start, now.end)) {
            let saved = now.in_flight_bytes - rival.in_flight_bytes;
            let rate = saved / (rival.load_s() - now.load_s()).max(1e-12);
            if saved > 0.0 && best.is_none_or(|(best_rate, ..)| rate > best_rate) {
                best = Some((rate, stage, index));
            }
        }
    }
    best.map(|(_, stage, column)| (stage, column))
}

/// The best single move, if it helps.
fn improve(
    by_range: &ByRange<'_>,
    choice: &Choice,
    best_s: f64,
    scratch: &mut Scratch,
) -> Option<(Choice, f64)> {
    let problem = by_range.problem;
    let mut best: Option<(Choice, f64)> = None;
    for rival in moves(by_range, choice) {
        let value_s = problem.iteration_s(&rival, scratch);
        let bar_s = best.as_ref().map_or(best_s, |(_, value_s)| *value_s);
        if value_s < bar_s * (1.0 - 1e-12) && problem.fits(&rival) {
            best = Some((rival, value_s));
        }
    }
    best
}

/// Every choice with one layer moved over one boundary.
fn moves(by_range: &ByRange<'_>, choice: &Choice) -> Vec<Choice> {
    let problem = by_range.problem;
    let mut ends: Vec<usize> = vec![0];
    for (stage, &column) in choice.iter().enumerate() {
        ends.push(ends[stage] + problem.columns[stage][column].layers());
    }
    let shifted = |boundary: usize, end: usize| {
        let mut rival = choice.clone();
        rival[boundary - 1] = by_range.fastest(boundary - 1, ends[boundary - 1], end)?;
        rival[boundary] = by_range.fastest(boundary, end, ends[boundary + 1])?;
        mend(problem, &mut rival)?;
        Some(rival)
    };
    let inner = 1..problem.stages();
    inner
        .flat_map(|boundary| [(boundary, ends[boundary].wrapping_sub(1)), (boundary, ends[boundary] + 1)])
        .filter(|&(boundary, end)| end >= ends[boundary - 1] && end <= ends[boundary + 1])
        .filter_map(|(boundary, end)| shifted(boundary, end))
        .collect()
}
