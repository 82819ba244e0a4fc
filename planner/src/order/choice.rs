//! An order of passes made for one plan: with split backward, and shorter than any named schedule.
//! It is looked for where a pipeline has one chunk a rank, for small ones by an integer program
//! ([`crate::order::ilp`]), otherwise as the best greedy run of `zb_auto` for the plan's times and
//! memory.
//!
//! Both methods give every rank the mean times, and as many micro-batches as the fullest rank can
//! hold. The order found is then priced with each stage's own times, and taken only if it is faster
//! and fits.

use crate::order::ilp::{Found as Orders, Objective, Ordering};
use crate::partition::{Problem, Scratch};
use crate::pricing::Configuration;
use crate::pricing::cost_cache::CostCache;
use crate::pricing::priced::Placed;
use crate::request::Task;
use crate::search::Found;
use crate::simulate::{Durations, simulate};
use crate::until::Until;
use models::decisions::Decisions;
use models::schedule::{AutoCosts, ScheduleError, ScheduleName, zb_auto};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Most stages times micro-batches that the program orders. For larger pipelines it finds nothing
/// within minutes.
pub const MOST_ORDERED: u64 = 128;

/// An order found for a configuration.
#[derive(Clone, Debug)]
pub struct Ordered {
    /// The configuration with this order of passes.
    pub found: Found,
    /// One line for each pipeline rank.
    pub order: Vec<String>,
    /// Whether it is proven that with mean times no order that fits is shorter.
    pub proven: bool,
    /// Relative gap between this order and the lower bound.
    pub gap: f64,
}

/// Why a configuration keeps its named schedule.
#[derive(Clone, Debug, PartialEq)]
pub enum Kept {
    /// The method does not support such pipelines. The message says what it supports.
    Unknown(String),
    /// The named schedule is as short.
    Shortest {
        /// Whether it is proven that with mean times no order that fits is shorter than the one
        /// found.
        proven: bool,
        /// Relative gap between the order found and the lower bound.
        gap: f64,
    },
}

/// Method to find an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// An integer program, for at most so long.
    Program(Option<Duration>),
    /// The greedy runs of `zb_auto`.
    Greedy,
}

impl How {
    fn order(
        self,
        d: &Decisions,
        costs: AutoCosts,
        interrupt: Option<&AtomicBool>,
    ) -> Result<Orders, ScheduleError> {
        let (ranks, micro_batches) = (d.pp as usize, d.micro_batches as usize);
        match self {
            Self::Program(time) => {
                let objective = Objective::Makespan;
                let deadline = time.map(|time| Instant::now() + time);
                let until = Until { interrupt, deadline, ..Until::default() };
                Ordering { ranks, micro_batches, costs, objective }.solve(until)
            }
            Self::Greedy => greedy(ranks, micro_batches, costs),
        }
    }
}

/// The order of `zb_auto`. Its lower bound is the forward path to the last rank plus that rank's
/// work.
fn greedy(ranks: usize, micro_batches: usize, costs: AutoCosts) -> Result<Orders, ScheduleError> {
    let AutoCosts { forward, backward, weight, latency, .. } = costs;
    let schedule = zb_auto(ranks, micro_batches, 1, costs)?;
    let durations = Durations::uniform(&schedule, forward, backward, weight, latency);
    let makespan_s = simulate(&schedule, &durations)?.makespan_s;
    let work_s = micro_batches as f64 * (forward + backward + weight);
    let bound_s = (ranks - 1) as f64 * (forward + latency) + work_s;
    let gap = (1.0 - bound_s / makespan_s).max(0.0);
    Ok(Orders { schedule, value: makespan_s, proven: gap <= 1e-9, gap })
}

/// Finds an order that makes a configuration faster.
///
/// # Errors
/// No such order was found, or the pipeline is not supported.
pub fn shorter(
    task: &Task<'_>,
    decisions: Decisions,
    placed: &Placed,
    how: How,
) -> Result<Ordered, Kept> {
    let d = &decisions;
    supported(d, how).map_err(Kept::Unknown)?;
    let cache = CostCache::new(task.model, task.cluster, task.gpus);
    let split = Decisions { schedule: ScheduleName::ZbH1, ..d.clone() };
    let unknown = |error: ScheduleError| Kept::Unknown(error.to_string());
    let configuration = Configuration::new(&cache, split).map_err(unknown)?;
    let problem = configuration.problem_of(configuration.columns_of_placed(placed));
    let costs = mean_costs(&problem, configuration.mean_link_s(), d.micro_batches as f64);
    let answer = how.order(d, costs, task.until.interrupt).map_err(unknown)?;
    let order = (0..answer.schedule.ranks).map(|i| answer.schedule.order_words(i).join(" "));
    let order: Vec<String> = order.collect();
    let searched = Decisions { schedule: ScheduleName::ZbAuto, ..d.clone() };
    let configuration =
        Configuration::new(&cache, searched).map_err(unknown)?.in_order(answer.schedule);
    let scratch = &mut Scratch::default();
    let priced = configuration.price(placed, scratch);
    let named = Configuration::new(&cache, decisions).map_err(unknown)?.price(placed, scratch);
    if priced.iteration_s >= named.iteration_s * (1.0 - 1e-9) || !priced.fits {
        return Err(Kept::Shortest { proven: answer.proven, gap: answer.gap });
    }
    let found =
        Found { decisions: configuration.decisions.clone(), placed: placed.clone(), priced };
    Ok(Ordered { found, order, proven: answer.proven, gap: answer.gap })
}

/// Checks that the pipeline is supported.
fn supported(d: &Decisions, how: How) -> Result<(), String> {
    let rules = [
        (d.pp > 1, "pp above 1"),
        (d.vpp == 1, "one chunk per pipeline rank"),
        (
            !d.vocab.over_pipeline(),
            "a vocabulary that is not split over the pipeline, as with --set vocab=tensor",
        ),
        (d.micro_batches > 1, "several micro-batches"),
    ];
    if let Some((_, rule)) = rules.into_iter().find(|(holds, _)| !holds) {
        return Err(format!("--order is for plans with {rule}"));
    }
    let size = d.pp * d.micro_batches;
    let small = format!(
        "--order ilp needs pp x micro-batches of at most {MOST_ORDERED}, this plan has {size}"
    );
    if size > MOST_ORDERED && how != How::Greedy { Err(small) } else { Ok(()) }
}

/// Mean times over the stages, and the micro-batches that the fullest rank can hold.
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
