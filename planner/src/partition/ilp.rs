//! The partition as an integer linear program, exact with respect to the simulation.
//!
//! Variables: `y[q,c] ∈ {0,1}`, stage `q` is filled by its column `c`; `barrier_s ≥ 0`, when the
//! last pipeline rank reaches the global barrier; `step_s ≥ 0`, the longest step after it.
//!
//! Where ranks have several stages of layers of one kind, each rank's number of layers is a
//! variable, too.
//!
//! Minimise `barrier_s + step_s` subject to
//! - *one column*: `Σ_c y[q,c] = 1` for every stage;
//! - *contiguity*: layers end to end. Where columns depend only on their number of layers,
//!   `Σ_q Σ_c layers(c)·y[q,c] = L`; else, for every stage boundary and layer, as many columns of
//!   the stage end there as columns of the next stage start there;
//! - *memory*: for every rank and every combination of micro-batches in flight,
//!   `Σ (state(c) + in_flight·activation(c))·y ≤ budget`; and the same for host memory;
//! - *rank load*: `barrier_s ≥ m·load_i + tail_i` for every rank `i`;
//! - *closed form* (1F1B): the rows of [`super::dynamic_program`], with their two waits as
//!   variables;
//! - *milestones* (split backward): the chains of [`super::milestones`];
//! - *step*: `step_s ≥ Σ step(c)·y` for every rank;
//! - *paths*: for a fixed order of passes the simulated time is the maximum over chains of passes,
//!   each linear in the columns' seconds. Whenever the simulation of a solution takes longer than
//!   the program's optimum, its critical path becomes a row and the program is solved again. There
//!   are finitely many chains and each is a lower bound for every partition, so the loop ends at
//!   the optimum;
//! - *cut-off*: `barrier_s + step_s ≤` the best value known.

use super::rows::Writer;
use super::{Choice, Problem, Scratch};
use crate::simulate::CriticalPath;
use crate::until::Until;
use good_lp::{
    Expression, Variable,
    solvers::highs::{HighsProblem, highs},
    variable, variables,
};
use highs::{HighsModelStatus, HighsSolutionStatus, Model, SolvedModel};
use std::ops::AddAssign;
use std::time::{Duration, Instant};

/// Relative tolerance within which a bound and a value count as equal: HiGHS' feasibility
/// tolerance, with times scaled to about a thousand.
pub const PROOF_TOLERANCE: f64 = 1e-7;

/// Result and effort of solving one problem.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// The best choice found that beats the cut-off, with its simulated iteration time, s.
    pub best: Option<(Choice, f64)>,
    /// Whether it is proven that nothing better than `best` (or the cut-off) exists.
    pub proven: bool,
    /// What the programs cost.
    pub effort: Effort,
    /// Largest proven lower bound on every partition, s.
    pub bound_s: f64,
}

/// What integer programs cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Effort {
    /// Programs solved.
    pub solves: u64,
    /// Their wall time, s.
    pub elapsed_s: f64,
    /// Their work, counted as in [`Limits::work`].
    pub work: u64,
}

impl Effort {
    /// Wall time of a program on average, ms.
    pub fn ms_each(&self) -> f64 {
        1e3 * self.elapsed_s / self.solves.max(1) as f64
    }
}

impl AddAssign for Effort {
    fn add_assign(&mut self, more: Self) {
        self.solves += more.solves;
        self.elapsed_s += more.elapsed_s;
        self.work += more.work;
    }
}

/// Limits on work and precision.
#[derive(Clone, Copy, Debug)]
pub struct Limits<'l> {
    /// Work for one problem: simplex iterations times rows and columns of their program, the same
    /// on every machine. It is enforced by a limit on branch-and-bound nodes, so a program's root
    /// relaxation may exceed it.
    pub work: u64,
    /// Whether path rows are added until the program agrees with the simulation. Without them the
    /// program is the closed form alone.
    pub paths: bool,
    /// When to end with the best choice and bound so far.
    pub until: Until<'l>,
}

/// Simplex iterations that a branch-and-bound node takes on average, to turn work into nodes.
const ITERATIONS_A_NODE: u64 = 20;

/// Finds the best partition with an iteration time below `cutoff_s`.
pub fn solve(
    problem: &Problem,
    cutoff_s: f64,
    limits: Limits<'_>,
    scratch: &mut Scratch,
) -> Report {
    solve_with(problem, vec![], cutoff_s, limits, scratch).0
}

/// The same with critical paths known from other problems on the same pipeline. Returns all paths.
pub fn solve_with(
    problem: &Problem,
    known: Vec<CriticalPath>,
    cutoff_s: f64,
    limits: Limits<'_>,
    scratch: &mut Scratch,
) -> (Report, Vec<CriticalPath>) {
    let (mut report, mut paths) = (Report::default(), known);
    let begun = Instant::now();
    loop {
        let bar_s = report.best.as_ref().map_or(cutoff_s, |(_, value)| *value);
        let left = limits.work.saturating_sub(report.effort.work);
        if left == 0 || limits.until.is_over() {
            break;
        }
        let Some(program) = Program::build(problem, &paths, bar_s, Values::Whole) else {
            report.proven = true;
            report.bound_s = bar_s;
            break;
        };
        report.effort.solves += 1;
        let solved = program.solve(left, limits.until);
        report.effort.work += solved.work.max(1);
        if solved.nothing_below {
            report.proven = true;
            report.bound_s = bar_s;
            break;
        }
        // Every program is a relaxation, so its bound holds for all later ones.
        report.bound_s = report.bound_s.max(solved.bound_s.min(bar_s));
        let Some(choice) = solved.choice else { break };
        let value_s = match limits.paths {
            true => problem.iteration_s(&choice, scratch),
            false => solved.bound_s,
        };
        let path = limits.paths.then(|| problem.critical_path(&choice, scratch));
        if value_s < bar_s && (solved.finished || limits.paths) {
            report.best = Some((choice, value_s));
        }
        if value_s.min(bar_s) <= report.bound_s * (1.0 + PROOF_TOLERANCE) {
            report.proven = true;
            break;
        }
        if !solved.finished {
            break;
        }
        paths.extend(path);
    }
    report.effort.elapsed_s = begun.elapsed().as_secs_f64();
    (report, paths)
}

/// Result of one program.
#[derive(Default)]
struct Solved {
    /// The best choice known, if any.
    choice: Option<Choice>,
    /// Lower bound on the objective of every choice, s.
    bound_s: f64,
    /// Whether the choice is the program's optimum.
    finished: bool,
    /// Whether no choice lies below the cut-off.
    nothing_below: bool,
    work: u64,
}

/// Whether columns may be chosen in part.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Values {
    Whole,
    Parts,
}

/// The optimum of a program in which columns may be chosen in part.
pub(super) struct Relaxed {
    /// By stage, columns with their shares.
    pub shares: Vec<Vec<(usize, f64)>>,
    /// The objective, s.
    pub bound_s: f64,
}

/// An iteration of a linear program alone takes so many times less than one in branch and bound.
const ALONE: u64 = 8;

/// Iterations that a linear program may take whatever work is left: a few seconds with the most
/// columns, so that a user who interrupts does not wait for longer.
const FEWEST_ITERATIONS: u64 = 2000;

/// A program with the map from its variables to columns.
pub(super) struct Program {
    model: HighsProblem,
    /// By stage, columns with their variables, which come first in the program, stage after stage.
    chosen: Vec<Vec<(usize, Variable)>>,
    /// Approximate number of variables and rows.
    size: u64,
    scale: f64,
    /// Settings of the presolve with which it is solved.
    presolve: &'static [&'static str],
}

impl Program {
    /// `None` where no column of some stage could lie below the cut-off.
    pub(super) fn build(
        problem: &Problem,
        paths: &[CriticalPath],
        bar_s: f64,
        values: Values,
    ) -> Option<Self> {
        let whole = values == Values::Whole;
        let choice = || if whole { variable().binary() } else { variable().min(0.0).max(1.0) };
        let mut vars = variables!();
        let mut chosen = vec![];
        for stage in 0..problem.stages() {
            let kept: Vec<(usize, Variable)> = (0..problem.columns[stage].len())
                .filter(|&column| could_beat(problem, stage, column, bar_s))
                .map(|column| (column, vars.add(choice())))
                .collect();
            if kept.is_empty() {
                return None;
            }
            chosen.push(kept);
        }
        let barrier = vars.add(variable().min(0.0));
        let step = vars.add(variable().min(0.0));
        // Only the closed form has waits.
        let waiting = if problem.pipeline.one_f_one_b { problem.stages() } else { 0 };
        let waits = (0..waiting)
            .map(|_| (vars.add(variable().min(0.0)), vars.add(variable().min(0.0))))
            .collect();
        // Branching on a rank's number of layers settles more than branching on a column.
        let counted = whole && problem.is_uniform() && problem.stages() > problem.pipeline.ranks;
        let most = problem.layers as f64;
        let counts = (0..if counted { problem.pipeline.ranks } else { 0 })
            .map(|_| vars.add(variable().integer().min(0.0).max(most)))
            .collect();
        // Times are scaled so that the solver's absolute tolerances are relative ones.
        let scale = 1000.0 / if bar_s.is_finite() { bar_s } else { 1.0 };
        let writer = Writer { problem, chosen, barrier, step, waits, counts, scale };
        let objective: Expression = Expression::from(barrier) + step;
        let model = vars.minimise(objective).using(highs);
        let model = writer.rows(model, paths, bar_s);
        let columns: usize = writer.chosen.iter().map(Vec::len).sum();
        let rows = paths.len() + problem.stages() * 2 + problem.pipeline.ranks * 2;
        let (size, presolve) = ((columns + rows) as u64, presolve(problem));
        Some(Self { model, chosen: writer.chosen, size, scale, presolve })
    }

    /// Solves a program in which columns may be chosen in part, with about as much work as the
    /// limits say: its work, and the optimum, `None` where nothing lies below the cut-off; no
    /// optimum where that is not known.
    pub(super) fn relaxed(self, limits: Limits<'_>) -> (u64, Option<Option<Relaxed>>) {
        let Limits { work, until, .. } = limits;
        let left = until.left();
        until.unless_interrupted(move || self.relaxed_within(work, left)).unwrap_or((1, None))
    }

    fn relaxed_within(self, work: u64, left: Option<Duration>) -> (u64, Option<Option<Relaxed>>) {
        let Ok(mut model) = self.model.try_into_inner() else { return (1, None) };
        let iterations = (work * ALONE / self.size).max(FEWEST_ITERATIONS);
        model.set_option("simplex_iteration_limit", i32::try_from(iterations).unwrap_or(i32::MAX));
        model.set_option("threads", 1);
        model.set_option("primal_feasibility_tolerance", 1e-9);
        if let Some(left) = left {
            model.set_option("time_limit", left.as_secs_f64());
        }
        let Ok(solved) = model.try_solve() else { return (1, None) };
        let work = self.size * solved.simplex_iteration_count().max(1) as u64 / ALONE;
        match solved.status() {
            HighsModelStatus::Infeasible => return (work, Some(None)),
            HighsModelStatus::Optimal => {}
            _ => return (work, None),
        }
        let solution = solved.get_solution();
        let mut values = solution.columns();
        let shares = |stage: &Vec<(usize, Variable)>| {
            let (own, rest) = values.split_at(stage.len());
            values = rest;
            stage.iter().zip(own).map(|((column, _), &share)| (*column, share)).collect()
        };
        let shares = self.chosen.iter().map(shares).collect();
        let bound_s = solved.objective_value() / self.scale;
        (work, Some(Some(Relaxed { shares, bound_s })))
    }

    /// Solves the program, each time with at most this much work, counted as in [`Limits::work`].
    fn solve(self, work: u64, until: Until<'_>) -> Solved {
        let deadline = until.deadline;
        until.unless_interrupted(move || self.solve_by(work, deadline)).unwrap_or_default()
    }

    fn solve_by(self, work: u64, deadline: Option<Instant>) -> Solved {
        let Self { model, chosen, size, scale, presolve } = self;
        let Ok(mut model) = model.try_into_inner() else { return Solved::default() };
        let nodes = work / (size * ITERATIONS_A_NODE).max(1);
        model.set_option("mip_feasibility_tolerance", 1e-9);
        model.set_option("primal_feasibility_tolerance", 1e-9);
        model.set_option("mip_rel_gap", 0.0);
        model.set_option("mip_abs_gap", 1e-6);
        model.set_option("threads", 1);
        model.set_option("mip_max_nodes", i32::try_from(nodes.max(1)).unwrap_or(i32::MAX));
        let mut best = Solved::default();
        for presolve in presolve {
            model.set_option("presolve", *presolve);
            if let Some(deadline) = deadline {
                let left = deadline.saturating_duration_since(Instant::now());
                model.set_option("time_limit", left.as_secs_f64());
            }
            let Ok(solved) = model.try_solve() else { return best };
            best = best.or(Solved::new(&solved, &chosen, (size, scale)));
            if !best.finished && !best.nothing_below {
                break;
            }
            model = Model::from(solved);
        }
        best
    }
}

impl Solved {
    fn new(
        solved: &SolvedModel,
        chosen: &[Vec<(usize, Variable)>],
        (size, scale): (u64, f64),
    ) -> Self {
        let finished = matches!(solved.status(), HighsModelStatus::Optimal);
        let nothing_below = matches!(
            solved.status(),
            HighsModelStatus::Infeasible | HighsModelStatus::UnboundedOrInfeasible
        );
        let bound = if finished { Some(solved.objective_value()) } else { dual_bound(solved) };
        Self {
            choice: choice(chosen, solved),
            bound_s: bound.unwrap_or(0.0).max(0.0) / scale,
            finished,
            nothing_below,
            work: size * solved.simplex_iteration_count().max(1) as u64,
        }
    }

    /// What two runs on the same program found. Where only one of them missed an optimum, the other
    /// has it.
    fn or(self, other: Self) -> Self {
        let work = self.work + other.work;
        let decided = self.finished || self.nothing_below;
        let lower = self.nothing_below || other.bound_s < self.bound_s;
        let kept = if !decided || other.finished && lower { other } else { self };
        Self { work, ..kept }
    }
}

/// Lower bound that branch and bound has proven on the objective.
fn dual_bound(solved: &SolvedModel) -> Option<f64> {
    solved.double_info_value(c"mip_dual_bound").ok().filter(|bound| bound.is_finite())
}

/// The columns of a feasible solution.
fn choice(chosen: &[Vec<(usize, Variable)>], solved: &SolvedModel) -> Option<Choice> {
    if solved.primal_solution_status() != HighsSolutionStatus::Feasible {
        return None;
    }
    let solution = solved.get_solution();
    let mut values = solution.columns();
    let picked = |stage: &Vec<(usize, Variable)>| {
        let (own, rest) = values.split_at(stage.len());
        values = rest;
        let best = stage.iter().zip(own).max_by(|a, b| a.1.total_cmp(b.1));
        best.map_or(0, |((column, _), _)| *column)
    };
    Some(chosen.iter().map(picked).collect())
}

/// HiGHS 1.15 misses optima of programs without rows of a closed form or milestones, about one in a
/// thousand small random ones, with its presolve and without (`tests/tests/placement_oracle.rs`,
/// `tests/tests/every_cut.rs`). These are solved both ways. Of the other programs, which are
/// larger, none has been seen to go wrong.
fn presolve(problem: &Problem) -> &'static [&'static str] {
    let pipeline = &problem.pipeline;
    let rows = pipeline.one_f_one_b || pipeline.milestones.len() == problem.stages();
    if rows { &["choose"] } else { &["off", "choose"] }
}

/// Whether a stage's own work with a column stays below the cut-off. Other columns are dropped.
pub(super) fn could_beat(problem: &Problem, stage: usize, column: usize, bar_s: f64) -> bool {
    let c = &problem.columns[stage][column];
    let runs = problem.pipeline.runs();
    runs * (c.load_s() + problem.vocab.passes_s) + c.tail_s + c.step_s < bar_s
}
