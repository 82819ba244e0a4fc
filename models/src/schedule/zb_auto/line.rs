//! One chunk per pipeline rank (Zero Bubble, arXiv 2401.10241, section 3.1).

use super::super::generate::Counts;
use super::super::{Pass, StageLayout};
use super::AutoCosts;
use super::run::{Run, Step, Ties};

const F: Step = Step::F(0);
const B: Step = Step::B(0);

/// Choices of the greedy run.
#[derive(Clone, Copy)]
pub(super) struct Taste {
    /// A pipeline rank may idle before its first backward rather than run one more forward.
    idle_first: bool,
    /// A pipeline rank that is two forwards ahead of the next lets it catch up.
    backward_first: bool,
    /// Weight gradients fill gaps that are too short for them, even where that lengthens nothing.
    fill_all: bool,
}

impl Taste {
    pub const ALL: [Self; 8] = {
        let mut all = [Self { idle_first: false, backward_first: false, fill_all: false }; 8];
        let mut n = 0;
        while n < 8 {
            all[n] =
                Self { idle_first: n & 1 == 0, backward_first: n & 2 == 0, fill_all: n & 4 == 0 };
            n += 1;
        }
        all
    };
}

/// An order that keeps the memory limit, or `None` where these choices find none.
pub(super) fn order(
    counts: Counts,
    costs: AutoCosts,
    (taste, ties): (Taste, Ties),
) -> Option<Vec<Vec<Pass>>> {
    let mut line = Line { run: Run::new(counts, costs, StageLayout::RoundRobin, ties), taste };
    line.first()?;
    for _ in 1..counts.micro_batches {
        line.forwards()?;
        line.backwards()?;
    }
    (0..counts.ranks).for_each(|rank| line.run.flush_weights(rank));
    Some(line.run.orders())
}

struct Line {
    run: Run,
    taste: Taste,
}

impl Line {
    fn ranks(&self) -> usize {
        self.run.counts.ranks
    }

    /// Each pipeline rank's forwards before the first micro-batch is back, and its backward.
    fn first(&mut self) -> Option<()> {
        for rank in 0..self.ranks() {
            self.run.make_room(rank)?;
            self.run.put(rank, F)?;
        }
        for (rank, more) in self.warm_up().into_iter().enumerate() {
            for _ in 0..more {
                self.run.put(rank, F)?;
            }
        }
        (0..self.ranks()).rev().try_for_each(|rank| self.run.put(rank, B))
    }

    /// Forwards that fit, in time and memory, before the first backward arrives; fewer on each
    /// pipeline rank than on the one before.
    fn warm_up(&self) -> Vec<usize> {
        let (costs, micro_batches) = (self.run.costs, self.run.counts.micro_batches);
        let last = self.ranks() - 1;
        let mut more = vec![0; self.ranks()];
        let mut back = self.run.ranks[last].clock + costs.backward;
        for rank in (0..last).rev() {
            let arrival = back + costs.latency;
            let mut clock = self.run.ranks[rank].clock;
            let late = |clock: f64| match self.taste.idle_first {
                true => clock + costs.forward > arrival,
                false => clock >= arrival,
            };
            let room = |more: usize| self.run.has_room(rank, more + 1);
            while more[rank] + 1 < micro_batches && room(more[rank]) && !late(clock) {
                clock += costs.forward;
                more[rank] += 1;
            }
            back = clock.max(arrival) + costs.backward;
        }
        for rank in 1..self.ranks() {
            if more[rank] + 1 < micro_batches {
                more[rank] = more[rank].min(more[rank - 1].saturating_sub(1));
            }
        }
        more
    }

    fn forwards(&mut self) -> Option<()> {
        let mut wanted: Vec<bool> = (0..self.ranks()).map(|rank| self.wants(rank)).collect();
        for rank in (0..self.ranks() - 1).rev() {
            wanted[rank] &= wanted[rank + 1];
        }
        for rank in (0..self.ranks()).filter(|&rank| wanted[rank]) {
            self.run.make_room(rank)?;
            self.fill(rank, F);
            self.run.put(rank, F)?;
        }
        Some(())
    }

    fn wants(&self, rank: usize) -> bool {
        let run = &self.run;
        if !run.is_open(rank, F) {
            return false;
        }
        let next = rank + 1;
        let ahead = || run.count(rank, F) >= run.count(next, F) + 2;
        if next == self.ranks() || !self.taste.backward_first || !ahead() {
            return true;
        }
        let costs = run.costs;
        let arrival = run.ranks[next].clock + costs.forward + costs.backward + costs.latency;
        let own = &run.ranks[rank];
        let weights = run.weights_for_room(rank) as f64 * costs.weight;
        let (busy, in_time) =
            (own.clock >= arrival, own.clock + costs.forward + weights <= arrival);
        !busy && (in_time || arrival - own.clock > run.most_idle() - own.idle)
    }

    fn backwards(&mut self) -> Option<()> {
        for rank in (0..self.ranks()).rev() {
            self.fill(rank, B);
            if rank == 0 && !self.run.is_open(0, F) {
                self.run.flush_weights(0);
            }
            self.run.put(rank, B)?;
        }
        Some(())
    }

    /// Weight gradients until the input arrives; one that ends later only where idling would be the
    /// longest of any pipeline rank, or by choice.
    fn fill(&mut self, rank: usize, step: Step) {
        let Some(arrival) = self.run.arrival(rank, step) else { return };
        if self.run.fill(rank, arrival) {
            let longest = self.run.would_idle_longest(rank, arrival, self.run.most_idle());
            if longest || self.taste.fill_all {
                let _ = self.run.put_weights(rank);
            }
        }
    }
}
