//! The order of a zero-bubble schedule as an integer linear program (Zero Bubble, arXiv 2401.10241,
//! appendix G), for pipelines small enough to be solved.
//!
//! It supports one chunk a rank. Variables: the end of every pass, and for two passes of one rank
//! whose order is open, a binary that says which comes first. Passes of a kind come in the order of
//! micro-batches. This leaves open `F_j` against `B_k` and `W_k`, and `B_j` against `W_k`, for
//! `j > k`.
//!
//! The solver starts from the best order of the heuristics and asks for a shorter one, again and
//! again. When there is none, the last order is proven optimal.

use crate::simulate::{Durations, simulate};
use crate::until::Until;
use good_lp::{
    Expression, ResolutionError, Solution, SolverModel, Variable, WithTimeLimit, constraint,
    solvers::{
        SolutionStatus,
        highs::{HighsProblem, HighsSolution, highs},
    },
    variable, variables,
};
use models::schedule::{AutoCosts, Pass, PassKind, Schedule, ScheduleError, ScheduleName, zb_auto};
use std::collections::HashMap;

/// The quantity to minimise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// Longest time from the start of a rank's first pass to the end of its last.
    LongestStage,
    /// The end of the last pass.
    Makespan,
}

/// The pipeline to order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ordering {
    /// Pipeline ranks, `p`.
    pub ranks: usize,
    /// Micro-batches, `m`.
    pub micro_batches: usize,
    /// Durations and memory.
    pub costs: AutoCosts,
    /// The quantity to minimise.
    pub objective: Objective,
}

/// The result.
#[derive(Clone, Debug)]
pub struct Found {
    /// The best order known.
    pub schedule: Schedule,
    /// Its objective value.
    pub value: f64,
    /// Whether it is proven that no order within the memory limit is shorter.
    pub proven: bool,
    /// Relative gap between the value and the lower bound; 0 where proven.
    pub gap: f64,
}

/// Relative improvement that the program asks for. It is larger than rounding errors.
const SHORTER: f64 = 1e-5;

impl Ordering {
    /// Finds the shortest order in the time that there is, or the best until the user interrupts.
    ///
    /// # Errors
    /// As [`zb_auto`] with one chunk.
    pub fn solve(&self, until: Until<'_>) -> Result<Found, ScheduleError> {
        let (schedule, value) = self.known()?;
        let mut found = Found { schedule, value, proven: false, gap: 0.0 };
        loop {
            let floor = self.floor();
            if found.value <= floor * (1.0 + SHORTER) {
                return Ok(Found { proven: true, ..found });
            }
            match Program::new(self, found.value).solve(until) {
                Answer::NothingShorter => return Ok(Found { proven: true, ..found }),
                Answer::OutOfTime => {
                    let gap = (found.value - floor) / found.value;
                    return Ok(Found { gap, ..found });
                }
                Answer::Shorter(passes) => {
                    let schedule = Schedule { passes, ..found.schedule.clone() };
                    let value = self.value(&schedule)?;
                    if value >= found.value {
                        // An artefact of the solver's tolerance, not a shorter order.
                        return Ok(Found { proven: true, ..found });
                    }
                    found = Found { schedule, value, ..found };
                }
            }
        }
    }

    /// The best order of `zb_auto`, ZB-H1 and ZB-H2.
    fn known(&self) -> Result<(Schedule, f64), ScheduleError> {
        let (p, m) = (self.ranks, self.micro_batches);
        let searched = zb_auto(p, m, 1, self.costs)?;
        let mut best = (self.value(&searched)?, searched);
        for name in [ScheduleName::ZbH1, ScheduleName::ZbH2] {
            let schedule = name.build(p, m, 1)?;
            let value = self.value(&schedule)?;
            if value < best.0 && self.fits(&schedule) {
                best = (value, schedule);
            }
        }
        Ok((best.1, best.0))
    }

    fn value(&self, schedule: &Schedule) -> Result<f64, ScheduleError> {
        let AutoCosts { forward, backward, weight, latency, .. } = self.costs;
        let durations = Durations::uniform(schedule, forward, backward, weight, latency);
        let timeline = simulate(schedule, &durations)?;
        Ok(match self.objective {
            Objective::LongestStage => timeline.longest_stage_s,
            Objective::Makespan => timeline.makespan_s,
        })
    }

    fn fits(&self, schedule: &Schedule) -> bool {
        let AutoCosts { freed_by_b, freed_by_w, limit, .. } = self.costs;
        schedule.passes.iter().all(|order| {
            let mut held = 0.0;
            order.iter().all(|pass| {
                held += match pass.kind {
                    PassKind::F => freed_by_b + freed_by_w,
                    PassKind::B => -freed_by_b,
                    _ => -freed_by_w,
                };
                held <= limit * (1.0 + 1e-9)
            })
        })
    }

    /// Lower bound for every order: a rank's own work, and for the makespan the forward path to the
    /// last rank.
    fn floor(&self) -> f64 {
        let AutoCosts { forward, backward, weight, latency, .. } = self.costs;
        let (transfers, m) = ((self.ranks - 1) as f64, self.micro_batches as f64);
        let work = m * (forward + backward + weight);
        match self.objective {
            Objective::LongestStage => work,
            Objective::Makespan => work + transfers * (forward + latency),
        }
    }
}

enum Answer {
    Shorter(Vec<Vec<Pass>>),
    NothingShorter,
    OutOfTime,
}

const KINDS: [PassKind; 3] = [PassKind::F, PassKind::B, PassKind::W];
/// Pairs of kinds whose order is open, by index.
const OPEN: [(usize, usize); 3] = [(0, 1), (0, 2), (1, 2)];

/// One program: is there an order below a value?
struct Program<'a> {
    ordering: &'a Ordering,
    below: f64,
    model: HighsProblem,
    /// End of each pass, by rank, kind and micro-batch.
    ends: Vec<[Vec<Variable>; 3]>,
    /// By rank, pair of kinds, and micro-batches `j > k`: 1 if pass `j` of the first kind comes
    /// before pass `k` of the second.
    before: HashMap<(usize, usize, usize, usize), Variable>,
    length: Variable,
}

impl<'a> Program<'a> {
    fn new(ordering: &'a Ordering, below: f64) -> Self {
        let (p, m) = (ordering.ranks, ordering.micro_batches);
        let mut vars = variables!();
        let length = vars.add(variable().min(ordering.floor()).max(below * (1.0 - SHORTER)));
        let mut row = || (0..m).map(|_| vars.add(variable().min(0.0))).collect::<Vec<_>>();
        let ends: Vec<[Vec<Variable>; 3]> = (0..p).map(|_| [row(), row(), row()]).collect();
        let mut before = HashMap::new();
        for rank in 0..p {
            for pair in 0..OPEN.len() {
                for j in 0..m {
                    for k in 0..j {
                        before.insert((rank, pair, j, k), vars.add(variable().binary()));
                    }
                }
            }
        }
        let model = vars
            .minimise(Expression::from(length))
            .using(highs)
            .set_option("mip_feasibility_tolerance", 1e-7)
            .set_option("primal_feasibility_tolerance", 1e-7)
            .set_threads(1);
        let mut program = Self { ordering, below, model, ends, before, length };
        for rank in 0..p {
            program.chains(rank);
            program.objective(rank);
            program.open_orders(rank);
            program.cuts(rank);
            program.memory(rank);
        }
        program
    }

    fn time(&self, kind: usize) -> f64 {
        let AutoCosts { forward, backward, weight, .. } = self.ordering.costs;
        [forward, backward, weight][kind]
    }

    fn at_least(&mut self, one: Variable, other: Variable, more: f64) {
        self.model.add_constraint(constraint!(one >= other + more));
    }

    /// Precedence constraints that hold for every order.
    fn chains(&mut self, rank: usize) {
        let (p, m) = (self.ordering.ranks, self.ordering.micro_batches);
        let latency = self.ordering.costs.latency;
        for k in 0..m {
            for kind in 0..3 {
                let (end, time) = (self.ends[rank][kind][k], self.time(kind));
                let source = match kind {
                    0 => rank.checked_sub(1),
                    1 => Some(rank + 1).filter(|&next| next < p),
                    _ => None,
                };
                if let Some(source) = source {
                    self.at_least(end, self.ends[source][kind][k], latency + time);
                }
                if let Some(before) = kind.checked_sub(1) {
                    self.at_least(end, self.ends[rank][before][k], time);
                }
                match k.checked_sub(1) {
                    Some(k) => self.at_least(end, self.ends[rank][kind][k], time),
                    None => {
                        self.model.add_constraint(constraint!(end >= time));
                    }
                }
            }
        }
    }

    fn objective(&mut self, rank: usize) {
        let (length, m) = (self.length, self.ordering.micro_batches);
        let [forwards, _, weights] = &self.ends[rank];
        let (first, last) = (forwards[0], weights[m - 1]);
        let forward = self.time(0);
        match self.ordering.objective {
            Objective::LongestStage => {
                self.model.add_constraint(constraint!(length >= last - first + forward));
            }
            Objective::Makespan => {
                self.model.add_constraint(constraint!(length >= last));
            }
        }
    }

    /// Of two passes of a rank one comes first. All passes of a rank end within `below` of each
    /// other.
    fn open_orders(&mut self, rank: usize) {
        for (pair, (one, other)) in OPEN.into_iter().enumerate() {
            let (one_time, other_time) = (self.time(one), self.time(other));
            for j in 0..self.ordering.micro_batches {
                for k in 0..j {
                    let x = self.before[&(rank, pair, j, k)];
                    let (a, b) = (self.ends[rank][one][j], self.ends[rank][other][k]);
                    let apart = self.below + one_time + other_time;
                    self.model.add_constraint(constraint!(b >= a + other_time - apart + apart * x));
                    self.model.add_constraint(constraint!(a >= b + one_time - apart * x));
                }
            }
        }
    }

    /// Implications between binaries: passes of a kind keep their order, and weight gradients
    /// follow their backward.
    fn cuts(&mut self, rank: usize) {
        let m = self.ordering.micro_batches;
        let before = |pair: usize, j: usize, k: usize| self.before[&(rank, pair, j, k)];
        let mut implied = Vec::new();
        for j in 0..m {
            for k in 0..j {
                for pair in 0..OPEN.len() {
                    if k + 1 < j {
                        implied.push((before(pair, j, k), before(pair, j, k + 1)));
                    }
                    if j + 1 < m {
                        implied.push((before(pair, j + 1, k), before(pair, j, k)));
                    }
                }
                // F_j before B_k implies F_j before W_k. B_j before W_k implies F_j before W_k.
                implied.push((before(0, j, k), before(1, j, k)));
                implied.push((before(2, j, k), before(1, j, k)));
            }
        }
        for (one, other) in implied {
            self.model.add_constraint(constraint!(one <= other));
        }
    }

    /// Activations held when a forward begins, including its own.
    fn memory(&mut self, rank: usize) {
        let AutoCosts { freed_by_b, freed_by_w, limit, .. } = self.ordering.costs;
        for j in 0..self.ordering.micro_batches {
            let mut held = Expression::from((freed_by_b + freed_by_w) * (j + 1) as f64);
            for k in 0..j {
                let [backward, weights] = [0, 1].map(|pair| self.before[&(rank, pair, j, k)]);
                held = held - freed_by_b * (1.0 - backward) - freed_by_w * (1.0 - weights);
            }
            self.model.add_constraint(constraint!(held <= limit + 1e-6));
        }
    }

    fn solve(self, until: Until<'_>) -> Answer {
        let Self { mut model, ends, .. } = self;
        if let Some(left) = until.left() {
            model = model.with_time_limit(left.as_secs_f64().max(0.01));
        }
        let solver = move || match model.solve() {
            Ok(solution) if matches!(solution.status(), SolutionStatus::TimeLimit) => {
                Answer::OutOfTime
            }
            Ok(solution) => {
                Answer::Shorter(ends.iter().map(|ends| order(ends, &solution)).collect())
            }
            Err(ResolutionError::Infeasible) => Answer::NothingShorter,
            Err(_) => Answer::OutOfTime,
        };
        until.unless_interrupted(solver).unwrap_or(Answer::OutOfTime)
    }
}

/// A rank's passes, sorted by their ends.
fn order(ends: &[Vec<Variable>; 3], solution: &HighsSolution) -> Vec<Pass> {
    let mut timed: Vec<(f64, Pass)> = Vec::new();
    for (kind, ends) in KINDS.into_iter().zip(ends) {
        let pass = |k: usize| Pass { kind, micro_batch: k as u32, chunk: 0 };
        timed.extend(ends.iter().enumerate().map(|(k, &end)| (solution.value(end), pass(k))));
    }
    timed.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    timed.into_iter().map(|(_, pass)| pass).collect()
}
