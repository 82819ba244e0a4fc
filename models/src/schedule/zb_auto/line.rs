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
    (0..counts.devices).for_each(|device| line.run.flush_weights(device));
    Some(line.run.orders())
}

struct Line {
    run: Run,
    taste: Taste,
}

impl Line {
    fn devices(&self) -> usize {
        self.run.counts.devices
    }

    /// Each pipeline rank's forwards before the first micro-batch is back, and its backward.
    fn first(&mut self) -> Option<()> {
        for device in 0..self.devices() {
            self.run.make_room(device)?;
            self.run.put(device, F)?;
        }
        for (device, more) in self.warm_up().into_iter().enumerate() {
            for _ in 0..more {
                self.run.put(device, F)?;
            }
        }
        (0..self.devices()).rev().try_for_each(|device| self.run.put(device, B))
    }

    /// Forwards that fit, in time and memory, before the first backward arrives; fewer on each
    /// pipeline rank than on the one before.
    fn warm_up(&self) -> Vec<usize> {
        let (costs, micro_batches) = (self.run.costs, self.run.counts.micro_batches);
        let last = self.devices() - 1;
        let mut more = vec![0; self.devices()];
        let mut back = self.run.devices[last].clock + costs.backward;
        for device in (0..last).rev() {
            let arrival = back + costs.latency;
            let mut clock = self.run.devices[device].clock;
            let late = |clock: f64| match self.taste.idle_first {
                true => clock + costs.forward > arrival,
                false => clock >= arrival,
            };
            let room = |more: usize| self.run.has_room(device, more + 1);
            while more[device] + 1 < micro_batches && room(more[device]) && !late(clock) {
                clock += costs.forward;
                more[device] += 1;
            }
            back = clock.max(arrival) + costs.backward;
        }
        for device in 1..self.devices() {
            if more[device] + 1 < micro_batches {
                more[device] = more[device].min(more[device - 1].saturating_sub(1));
            }
        }
        more
    }

    fn forwards(&mut self) -> Option<()> {
        let mut wanted: Vec<bool> = (0..self.devices()).map(|device| self.wants(device)).collect();
        for device in (0..self.devices() - 1).rev() {
            wanted[device] &= wanted[device + 1];
        }
        for device in (0..self.devices()).filter(|&device| wanted[device]) {
            self.run.make_room(device)?;
            self.fill(device, F);
            self.run.put(device, F)?;
        }
        Some(())
    }

    fn wants(&self, device: usize) -> bool {
        let run = &self.run;
        if !run.is_open(device, F) {
            return false;
        }
        let next = device + 1;
        let ahead = || run.count(device, F) >= run.count(next, F) + 2;
        if next == self.devices() || !self.taste.backward_first || !ahead() {
            return true;
        }
        let costs = run.costs;
        let arrival = run.devices[next].clock + costs.forward + costs.backward + costs.latency;
        let own = &run.devices[device];
        let weights = run.weights_for_room(device) as f64 * costs.weight;
        let (busy, in_time) =
            (own.clock >= arrival, own.clock + costs.forward + weights <= arrival);
        !busy && (in_time || arrival - own.clock > run.most_idle() - own.idle)
    }

    fn backwards(&mut self) -> Option<()> {
        for device in (0..self.devices()).rev() {
            self.fill(device, B);
            if device == 0 && !self.run.is_open(0, F) {
                self.run.flush_weights(0);
            }
            self.run.put(device, B)?;
        }
        Some(())
    }

    /// Weight gradients until the input arrives; one that ends later only where idling would be the
    /// longest of any pipeline rank, or by choice.
    fn fill(&mut self, device: usize, step: Step) {
        let Some(arrival) = self.run.arrival(device, step) else { return };
        if self.run.fill(device, arrival) {
            let longest = self.run.would_idle_longest(device, arrival, self.run.most_idle());
            if longest || self.taste.fill_all {
                let _ = self.run.put_weights(device);
            }
        }
    }
}
