//! A plan's own order of passes: where a pipeline has one chunk a device, an order with split backward that is
//! shorter than any schedule by name, by an integer program for small ones ([`crate::order::ilp`]), or the best of
//! the greedy runs of `zb_auto` for these times and this memory.
//!
//! Either sees every device with the mean times of all and as many micro-batches as the fullest device
//! can hold. What is found is then priced with each stage's own times, and taken only if it is faster and fits.

use crate::order::ilp::{Found as Orders, Objective, Ordering};
use crate::partition::{Problem, Scratch};
use crate::pricing::Configuration;
use crate::pricing::cost_cache::CostCache;
use crate::pricing::priced::Placed;
use crate::request::Task;
use crate::search::Found;
use crate::simulate::{Durations, simulate};
use models::decisions::Decisions;
use models::schedule::{AutoCosts, ScheduleError, ScheduleName, zb_auto};
use std::time::Duration;

/// Most stages times micro-batches that the program orders: beyond, it finds nothing within minutes.
pub const MOST_ORDERED: u64 = 128;

/// An order found for a configuration.
#[derive(Clone, Debug)]
pub struct Ordered {
    /// The configuration in that order.
    pub found: Found,
    /// A line for each device.
    pub order: Vec<String>,
    /// By mean times, no order that fits is shorter.
    pub proven: bool,
    /// How far a bound lies below it, as a share.
    pub gap: f64,
}

/// Why a configuration has no order of its own.
#[derive(Clone, Debug, PartialEq)]
pub enum Kept {
    /// The program does not know such pipelines; what it takes.
    Unknown(String),
    /// The order by name is as short.
    Shortest {
        /// By mean times no order that fits is shorter than the program's.
        proven: bool,
        /// How far a bound lies below that, as a share.
        gap: f64,
    },
}

/// How an order is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// By an integer program within this time.
    Program(Duration),
    /// By the greedy runs of `zb_auto`.
    Greedy,
}

impl How {
    fn order(self, d: &Decisions, costs: AutoCosts) -> Result<Orders, ScheduleError> {
        let (devices, micro_batches) = (d.pp as usize, d.micro_batches as usize);
        match self {
            Self::Program(time) => {
                let objective = Objective::Makespan;
                Ordering { devices, micro_batches, costs, objective, time }.solve()
            }
            Self::Greedy => greedy(devices, micro_batches, costs),
        }
    }
}

/// The order of `zb_auto`. No order is shorter than the way down to the last device and its work.
fn greedy(devices: usize, micro_batches: usize, costs: AutoCosts) -> Result<Orders, ScheduleError> {
    let AutoCosts { forward, backward, weight, latency, .. } = costs;
    let schedule = zb_auto(devices, micro_batches, 1, costs)?;
    let durations = Durations::uniform(&schedule, forward, backward, weight, latency);
    let makespan_s = simulate(&schedule, &durations)?.makespan_s;
    let work_s = micro_batches as f64 * (forward + backward + weight);
    let bound_s = (devices - 1) as f64 * (forward + latency) + work_s;
    let gap = (1.0 - bound_s / makespan_s).max(0.0);
    Ok(Orders { schedule, value: makespan_s, proven: gap <= 1e-9, gap })
}

/// Looks for an order that makes a configuration faster.
///
/// # Errors
/// There is none, or none can be looked for.
pub fn shorter(
    task: &Task<'_>,
    decisions: Decisions,
    placed: &Placed,
    how: How,
) -> Result<Ordered, Kept> {
    let d = &decisions;
    known(d, how).map_err(Kept::Unknown)?;
    let cache = CostCache::new(task.model, task.cluster, task.gpus);
    let split = Decisions { schedule: ScheduleName::ZbH1, ..d.clone() };
    let unknown = |error: ScheduleError| Kept::Unknown(error.to_string());
    let case = Configuration::new(&cache, split).map_err(unknown)?;
    let problem = case.problem_of(case.columns_of_placed(placed));
    let costs = mean_costs(&problem, case.mean_link_s(), d.micro_batches as f64);
    let answer = how.order(d, costs).map_err(unknown)?;
    let order = (0..answer.schedule.devices).map(|i| answer.schedule.order_words(i).join(" "));
    let order: Vec<String> = order.collect();
    let searched = Decisions { schedule: ScheduleName::ZbAuto, ..d.clone() };
    let case = Configuration::new(&cache, searched).map_err(unknown)?.in_order(answer.schedule);
    let scratch = &mut Scratch::default();
    let priced = case.price(placed, scratch);
    let named = Configuration::new(&cache, decisions).map_err(unknown)?.price(placed, scratch);
    if priced.iteration_s >= named.iteration_s * (1.0 - 1e-9) || !priced.fits {
        return Err(Kept::Shortest { proven: answer.proven, gap: answer.gap });
    }
    let found = Found { decisions: case.decisions.clone(), placed: placed.clone(), priced };
    Ok(Ordered { found, order, proven: answer.proven, gap: answer.gap })
}

/// What can be ordered.
fn known(d: &Decisions, how: How) -> Result<(), String> {
    let rules = [
        (d.pp > 1, "pp above 1"),
        (d.vpp == 1, "one chunk a device"),
        (!d.vocab.over_pipeline(), "no vocabulary passes"),
        (d.micro_batches > 1, "several micro-batches"),
    ];
    if let Some((_, rule)) = rules.into_iter().find(|(holds, _)| !holds) {
        return Err(format!("an order is looked for with {rule}"));
    }
    let size = d.pp * d.micro_batches;
    let small = format!(
        "an order is looked for where pp x micro-batches is {MOST_ORDERED} at most: {size}"
    );
    if size > MOST_ORDERED && how != How::Greedy { Err(small) } else { Ok(()) }
}

/// The means over stages, and what the fullest device can hold.
pub fn mean_costs(problem: &Problem, link_s: f64, micro_batches: f64) -> AutoCosts {
    let columns = || problem.columns.iter().filter_map(|columns| columns.first());
    let stages = columns().count().max(1) as f64;
    let limits = columns().zip(&problem.budget_bytes).map(|(column, budget)| {
        let free = budget - column.state_bytes;
        // Rounding must not take a micro-batch away.
        let held = free / column.in_flight_bytes.max(f64::MIN_POSITIVE) + 1e-9;
        held.floor().min(micro_batches)
    });
    AutoCosts {
        forward: columns().map(|column| column.forward_s).sum::<f64>() / stages,
        backward: columns().map(|column| column.backward_s).sum::<f64>() / stages,
        weight: columns().map(|column| column.weight_s).sum::<f64>() / stages,
        latency: link_s,
        freed_by_b: 0.0,
        freed_by_w: 1.0,
        limit: limits.fold(micro_batches, f64::min).max(0.0),
    }
}
