//! The rows of the integer program of [`super::ilp`], which states them as equations.

use super::milestones::{At, PassCounts};
use super::warm_up::Warm;
use super::{Column, Problem};
use crate::simulate::{CriticalPath, Durations};
use good_lp::solvers::highs::HighsProblem;
use good_lp::{Expression, SolverModel, Variable, constraint};

/// State while rows are written.
pub(super) struct Writer<'a> {
    pub problem: &'a Problem,
    pub chosen: Vec<Vec<(usize, Variable)>>,
    pub barrier: Variable,
    pub step: Variable,
    pub waits: Vec<(Variable, Variable)>,
    /// Layers of each rank, where ranks have several stages and layers are of one kind.
    pub counts: Vec<Variable>,
    pub scale: f64,
}

impl Writer<'_> {
    pub fn rows(
        &self,
        mut model: HighsProblem,
        paths: &[CriticalPath],
        bar_s: f64,
    ) -> HighsProblem {
        for stage in &self.chosen {
            let columns: Expression = stage.iter().map(|&(_, y)| y).sum();
            model.add_constraint(constraint!(columns == 1));
        }
        self.contiguity(&mut model);
        self.memory(&mut model);
        self.host_memory(&mut model);
        self.rank_loads(&mut model);
        if self.problem.pipeline.one_f_one_b {
            self.closed_form(&mut model);
        } else if self.problem.pipeline.milestones.len() == self.problem.stages() {
            self.milestones(&mut model);
        }
        for path in paths {
            let row = self.path(path);
            model.add_constraint(constraint!(self.barrier >= row));
        }
        if bar_s.is_finite() {
            let bar = bar_s * self.scale;
            model.add_constraint(constraint!(self.barrier + self.step <= bar));
        }
        model
    }

    /// Σ value(c)·y over one stage's columns.
    fn sum(&self, stage: usize, value: impl Fn(&Column) -> f64) -> Expression {
        let columns = &self.problem.columns[stage];
        self.chosen[stage].iter().map(|&(column, y)| value(&columns[column]) * y).sum()
    }

    /// As [`Self::sum`], for seconds.
    fn seconds(&self, stage: usize, value: impl Fn(&Column) -> f64) -> Expression {
        self.sum(stage, |column| value(column) * self.scale)
    }

    fn contiguity(&self, model: &mut HighsProblem) {
        let stages = self.problem.stages();
        for (rank, &count) in self.counts.iter().enumerate() {
            let own = self.problem.pipeline.stages_on(rank);
            let layers: Expression =
                own.map(|(stage, _)| self.sum(stage, |c| c.layers() as f64)).sum();
            model.add_constraint(constraint!(layers == count));
        }
        if self.problem.is_uniform() {
            let layers: Expression =
                (0..stages).map(|stage| self.sum(stage, |c| c.layers() as f64)).sum();
            model.add_constraint(constraint!(layers == self.problem.layers as f64));
            self.kinds(model);
            return;
        }
        let at = |here: bool| if here { 1.0 } else { 0.0 };
        let first = self.sum(0, |c| at(c.start == 0));
        model.add_constraint(constraint!(first == 1));
        for boundary in 1..stages {
            for layer in 0..=self.problem.layers {
                let ending = self.sum(boundary - 1, |c| at(c.end == layer));
                let starting = self.sum(boundary, |c| at(c.start == layer));
                model.add_constraint(constraint!(ending == starting));
            }
        }
        let last = self.sum(stages - 1, |c| at(c.end == self.problem.layers));
        model.add_constraint(constraint!(last == 1));
    }

    /// Layers of each kind, where their places do not count but there are several.
    fn kinds(&self, model: &mut HighsProblem) {
        for (kind, &layers) in self.problem.kinds.iter().enumerate() {
            if layers > 0 && layers < self.problem.layers {
                let stages = 0..self.problem.stages();
                let own: Expression =
                    stages.map(|stage| self.sum(stage, |c| c.kinds[kind] as f64)).sum();
                model.add_constraint(constraint!(own == layers as f64));
            }
        }
    }

    fn memory(&self, model: &mut HighsProblem) {
        let pipeline = &self.problem.pipeline;
        for rank in 0..pipeline.ranks {
            let budget = self.problem.budget_bytes[rank];
            for counts in &pipeline.in_flight[rank] {
                // In units of the budget, so that coefficients are of order one.
                let used: Expression = pipeline
                    .stages_on(rank)
                    .map(|(stage, chunk)| {
                        let in_flight = f64::from(counts[chunk]);
                        self.sum(stage, |c| {
                            (c.state_bytes + in_flight * c.in_flight_bytes) / budget
                        })
                    })
                    .sum();
                model.add_constraint(constraint!(used <= 1));
            }
        }
    }

    fn host_memory(&self, model: &mut HighsProblem) {
        let (problem, pipeline) = (self.problem, &self.problem.pipeline);
        let budget = problem.host_budget_bytes;
        let is_used = |column: &Column| column.host_bytes > 0.0;
        if budget.is_infinite() || !problem.columns.iter().flatten().any(is_used) {
            return;
        }
        for rank in 0..pipeline.ranks {
            let stages = pipeline.stages_on(rank);
            let used: Expression =
                stages.map(|(stage, _)| self.sum(stage, |c| c.host_bytes / budget)).sum();
            model.add_constraint(constraint!(used <= 1));
        }
    }

    fn rank_loads(&self, model: &mut HighsProblem) {
        let pipeline = &self.problem.pipeline;
        let (m, runs) = (pipeline.micro_batches as f64, pipeline.runs());
        let vocab = m * self.problem.vocab.passes_s * self.scale;
        for rank in 0..pipeline.ranks {
            let stages = || pipeline.stages_on(rank).map(|(stage, _)| stage);
            let work: Expression =
                stages().map(|stage| self.seconds(stage, |c| runs * c.load_s() + c.tail_s)).sum();
            model.add_constraint(constraint!(self.barrier >= work + vocab));
            let step: Expression = stages().map(|stage| self.seconds(stage, |c| c.step_s)).sum();
            model.add_constraint(constraint!(self.step >= step));
        }
    }

    fn closed_form(&self, model: &mut HighsProblem) {
        let problem = self.problem;
        let stages = problem.stages();
        let m = problem.pipeline.micro_batches as f64;
        let link = |stage: usize| {
            2.0 * problem.fixed.link_s.get(stage).copied().unwrap_or(0.0) * self.scale
        };
        let load = |stage: usize| self.seconds(stage, Column::load_s);
        let tail = self.seconds(0, |c| c.tail_s);
        for stage in 0..stages {
            let ramp: Expression = (0..stage).map(|j| load(j) + link(j)).sum();
            let own =
                self.seconds(stage, |c| m * c.load_s()) + m * problem.vocab.output_s * self.scale;
            let (first, last) = self.waits[stage];
            let row = ramp + own + tail.clone();
            let warm = Warm::new(problem, stage);
            if warm.apart(problem.pipeline.micro_batches) {
                model.add_constraint(constraint!(self.barrier >= row + first + last));
            } else {
                model.add_constraint(constraint!(self.barrier >= row.clone() + first));
                model.add_constraint(constraint!(self.barrier >= row + last));
            }
            let below: Expression = (stage + 1..stages).map(|j| load(j) + link(j - 1)).sum();
            let beyond = below + warm.vocab_s() * self.scale;
            let forward = self.seconds(stage, |c| warm.passes() * c.forward_s);
            let backward = self.seconds(stage, |c| warm.passes() * c.backward_s);
            model.add_constraint(constraint!(first >= beyond.clone() - forward));
            model.add_constraint(constraint!(last >= beyond - backward));
        }
    }

    /// Rows of the chains between milestones, with one chunk a rank.
    fn milestones(&self, model: &mut HighsProblem) {
        let problem = self.problem;
        let (milestones, stages) = (&problem.pipeline.milestones, problem.stages());
        let link =
            |stage: usize| problem.fixed.link_s.get(stage).copied().unwrap_or(0.0) * self.scale;
        let passes = |stage: usize, [f, b, w]: PassCounts| {
            self.seconds(stage, |c| f * c.forward_s + b * c.backward_s + w * c.weight_s)
        };
        let own = |stage: usize, from: At, to: At| {
            let (counts, sets) = milestones[stage].between(from, to);
            passes(stage, counts) + sets * problem.vocab.output_s * self.scale
        };
        let tail = |stage: usize| self.seconds(stage, |c| c.tail_s);
        for (stage, own_milestones) in milestones.iter().enumerate() {
            let ramp: Expression = (0..stage).map(|j| passes(j, [1.0, 0.0, 0.0]) + link(j)).sum();
            let back: Expression = (0..stage).map(|j| passes(j, [0.0, 1.0, 0.0]) + link(j)).sum();
            let below: Expression =
                (stage + 1..stages).map(|j| passes(j, [1.0, 1.0, 0.0]) + 2.0 * link(j - 1)).sum();
            let ready = ramp.clone() + passes(stage, [1.0, 0.0, 0.0]) + below.clone();
            let starts = [(ramp, At::Start), (ready, At::FirstBackward)];
            let ends = [
                own(stage, At::LastBackward, At::End) + tail(stage),
                back + own(0, At::LastBackward, At::End) + tail(0),
            ];
            for (start, from) in starts {
                let through = start.clone() + own(stage, from, At::LastBackward);
                let mut rows = vec![through];
                if from == At::Start || own_milestones.apart {
                    let way = below.clone() + passes(stage, [0.0, 1.0, 0.0]);
                    rows.push(start + own(stage, from, At::LastForward) + way);
                }
                for (row, end) in rows.iter().flat_map(|row| ends.iter().map(move |end| (row, end)))
                {
                    model.add_constraint(constraint!(self.barrier >= row.clone() + end.clone()));
                }
            }
        }
    }

    /// Length of one chain of passes as a function of the columns.
    fn path(&self, path: &CriticalPath) -> Expression {
        let stages = self.problem.stages();
        let mut fixed: Durations = self.problem.fixed.clone();
        fixed.forward = vec![0.0; stages];
        fixed.backward = vec![0.0; stages];
        let mut row = Expression::from(path.length_s(&fixed) * self.scale);
        for stage in 0..stages {
            let counts = self.problem.pipeline.counts_on(path, stage);
            let [forward, backward, weight] = counts.map(f64::from);
            let alone = [path.forward_count[stage], path.backward_count[stage]].map(f64::from);
            let mut holders = self.problem.pipeline.holders(stage);
            let ends_here = holders.any(|(rank, _)| rank == path.end_rank);
            let tail = if ends_here { 1.0 } else { 0.0 };
            row += self.seconds(stage, |c| {
                forward * c.forward_s
                    + backward * c.backward_s
                    + weight * c.weight_s
                    + alone[0] * c.unpaired_s[0]
                    + alone[1] * c.unpaired_s[1]
                    + tail * c.tail_s
            });
        }
        row
    }
}
