//! Lengths of orders that differ only in the positions of weight gradients.

use super::super::{Pass, PassKind, Schedule};
use super::{AutoCosts, Lengths};

/// An order's forwards and backwards, which only wait for one another, and the weight gradients
/// between them, which wait for nothing but the pipeline rank. Trying a move needs no new graph:
/// the order of forwards and backwards stays.
pub(super) struct Frame {
    /// Steps, each after those it waits for.
    steps: Vec<Step>,
    /// Weight gradients that a pipeline rank runs just before a step.
    weights: Vec<u32>,
    /// By pipeline rank, weight gradients after its last step.
    last_weights: Vec<u32>,
    /// By pipeline rank, its steps in order.
    of_rank: Vec<Vec<u32>>,
    ends: Vec<f64>,
    costs: AutoCosts,
}

#[derive(Clone, Copy)]
struct Step {
    rank: u32,
    /// The step it waits for, or itself where it waits for none.
    needs: u32,
    /// A transfer lies between.
    away: bool,
    forward: bool,
}

/// Not run.
const NEVER: u32 = u32::MAX;

impl Frame {
    /// The frame of an order with `costs` of its chunks; `None` for a deadlock.
    pub fn new(schedule: &Schedule, costs: AutoCosts) -> Option<Self> {
        let mut found = Self {
            steps: Vec::new(),
            weights: Vec::new(),
            last_weights: vec![0; schedule.ranks],
            of_rank: vec![Vec::new(); schedule.ranks],
            ends: Vec::new(),
            costs,
        };
        let m = schedule.micro_batches;
        // By stage and micro-batch, forwards before backwards.
        let mut ran = vec![NEVER; 2 * schedule.stages() * m];
        let mut next = vec![0_usize; schedule.ranks];
        let mut left = schedule.passes.iter().map(Vec::len).sum::<usize>();
        while left > 0 {
            let before = left;
            for (rank, next) in next.iter_mut().enumerate() {
                while let Some(&pass) = schedule.passes[rank].get(*next) {
                    if !found.take(schedule, &mut ran, rank, pass) {
                        break;
                    }
                    *next += 1;
                    left -= 1;
                }
            }
            if left == before {
                return None;
            }
        }
        found.ends = vec![0.0; found.steps.len()];
        Some(found)
    }

    /// Adds a pipeline rank's next pass; whether its input is there.
    fn take(&mut self, schedule: &Schedule, ran: &mut [u32], rank: usize, pass: Pass) -> bool {
        if pass.kind == PassKind::W {
            self.last_weights[rank] += 1;
            return true;
        }
        let m = schedule.micro_batches;
        let (stages, stage) = (schedule.stages(), schedule.stage_of(rank, pass.chunk.into()));
        let forward = pass.kind == PassKind::F;
        let slot = |forward: bool, stage: usize| {
            (if forward { 0 } else { stages * m }) + stage * m + pass.micro_batch as usize
        };
        let other = if forward { stage.checked_sub(1) } else { Some(stage + 1) };
        let other = other.filter(|&other| other < stages);
        let own = self.steps.len() as u32;
        let needs = other.map_or(own, |other| ran[slot(forward, other)]);
        // Its own forward comes before a backward on the pipeline rank.
        if needs == NEVER || !forward && ran[slot(true, stage)] == NEVER {
            return false;
        }
        let away = other.is_some_and(|other| schedule.rank_of(other) != rank);
        self.steps.push(Step { rank: rank as u32, needs, away, forward });
        self.weights.push(std::mem::take(&mut self.last_weights[rank]));
        self.of_rank[rank].push(own);
        ran[slot(forward, stage)] = own;
        true
    }

    /// Moves a weight gradient of a pipeline rank from after its `place`-th step to before it, or
    /// back.
    pub fn move_weights(&mut self, rank: usize, place: usize, earlier: bool) {
        let of_rank = &self.of_rank[rank];
        let step = of_rank[place] as usize;
        let behind = match of_rank.get(place + 1) {
            Some(&next) => &mut self.weights[next as usize],
            None => &mut self.last_weights[rank],
        };
        if earlier {
            *behind -= 1;
            self.weights[step] += 1;
        } else {
            *behind += 1;
            self.weights[step] -= 1;
        }
    }

    /// Runs the order.
    pub fn lengths(&mut self) -> Lengths {
        let AutoCosts { forward, backward, weight, latency, .. } = self.costs;
        let mut spans = vec![(f64::INFINITY, 0.0_f64); self.of_rank.len()];
        let work = |from: f64, weights: u32| (0..weights).fold(from, |end, _| end + weight);
        for (n, step) in self.steps.iter().enumerate() {
            let (first, free) = &mut spans[step.rank as usize];
            let needs = step.needs as usize;
            let way = if step.away { latency } else { 0.0 };
            let arrival = if needs == n { 0.0 } else { self.ends[needs] + way };
            let start = work(*free, self.weights[n]).max(arrival);
            *first = first.min(start);
            *free = start + if step.forward { forward } else { backward };
            self.ends[n] = *free;
        }
        for ((_, free), &weights) in spans.iter_mut().zip(&self.last_weights) {
            *free = work(*free, weights);
        }
        let stages = || spans.iter().map(|(start, end)| end - start);
        let makespan = spans.iter().map(|&(_, end)| end).fold(0.0, f64::max);
        (stages().fold(0.0, f64::max), makespan, stages().sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{Graph, Latency, NO_NODE, ScheduleName, Work};

    /// The same lengths by the graph of all passes.
    fn by_graph(schedule: &Schedule, costs: AutoCosts) -> Lengths {
        let nodes = Graph::new(schedule).unwrap().nodes;
        let mut ends: Vec<f64> = Vec::with_capacity(nodes.len());
        let mut spans = vec![(f64::INFINITY, 0.0_f64); schedule.ranks];
        for node in &nodes {
            let end = |n: u32| if n == NO_NODE { 0.0 } else { ends[n as usize] };
            let way = if node.latency == Latency::None { 0.0 } else { costs.latency };
            let start = end(node.before).max(end(node.needs) + way);
            let length = match node.work {
                Work::Pass(Pass { kind: PassKind::F, .. }) => costs.forward,
                Work::Pass(Pass { kind: PassKind::B, .. }) => costs.backward,
                _ => costs.weight,
            };
            let span = &mut spans[node.rank as usize];
            *span = (span.0.min(start), span.1.max(start + length));
            ends.push(start + length);
        }
        let stages = || spans.iter().map(|(start, end)| end - start);
        let makespan = spans.iter().map(|&(_, end)| end).fold(0.0, f64::max);
        (stages().fold(0.0, f64::max), makespan, stages().sum())
    }

    #[test]
    fn a_frame_takes_as_long_as_its_passes() {
        let even = AutoCosts::even(1);
        let costs = AutoCosts { forward: 1.1, backward: 0.7, weight: 0.9, latency: 0.13, ..even };
        let mut moved = 0;
        for (name, v) in [(ScheduleName::ZbH1, 1), (ScheduleName::ZbH2, 1), (ScheduleName::ZbV, 2)]
        {
            for (p, m) in [(1, 3), (2, 4), (4, 6), (5, 12)] {
                let mut schedule = name.build(p, m, v).unwrap();
                let mut frame = Frame::new(&schedule, costs).unwrap();
                assert_eq!(frame.lengths(), by_graph(&schedule, costs), "{name} {p} {m}");
                // Weight gradients before another pass run after it.
                for rank in 0..p {
                    let kinds: Vec<_> =
                        schedule.passes[rank].iter().map(|pass| pass.kind).collect();
                    let behind =
                        |n: &usize| kinds[*n] == PassKind::W && kinds[n + 1] != PassKind::W;
                    let Some(place) = (0..kinds.len() - 1).find(behind) else { continue };
                    let steps = kinds[..place].iter().filter(|&&kind| kind != PassKind::W).count();
                    schedule.passes[rank].swap(place, place + 1);
                    frame.move_weights(rank, steps, false);
                    assert_eq!(
                        frame.lengths(),
                        by_graph(&schedule, costs),
                        "{name} {p} {m} {rank}"
                    );
                    moved += 1;
                }
            }
        }
        assert!(moved > 15, "{moved}");
    }
}
