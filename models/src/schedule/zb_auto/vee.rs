//! Two chunks per pipeline rank on a V of stages (Zero Bubble, arXiv 2401.10241, section 6 and
//! appendix).

use super::super::generate::Counts;
use super::super::{Pass, StageLayout};
use super::AutoCosts;
use super::run::{Run, Step, Ties};

/// Choices of the greedy run: before which passes weight gradients fill gaps that are too short for
/// them.
#[derive(Clone, Copy)]
pub(super) struct Taste {
    before_forward: bool,
    before_backward: bool,
}

impl Taste {
    pub const ALL: [Self; 4] = [
        Self { before_forward: true, before_backward: true },
        Self { before_forward: false, before_backward: true },
        Self { before_forward: true, before_backward: false },
        Self { before_forward: false, before_backward: false },
    ];
}

/// An order that keeps the memory limit, or `None` where these choices find none. Runs again with
/// the previous run's idle times allowed, as long as that shortens the longest one.
pub(super) fn order(
    counts: Counts,
    costs: AutoCosts,
    (taste, ties): (Taste, Ties),
) -> Option<Vec<Vec<Pass>>> {
    let attempt = |allowed| {
        let run = Run::new(counts, costs, StageLayout::V, ties);
        Vee { run, taste, allowed }.finish()
    };
    let mut best = attempt(None)?;
    loop {
        let allowed: Vec<f64> = best.ranks.iter().map(|rank| rank.idle).collect();
        match attempt(Some(allowed)) {
            Some(next) if next.most_idle() < best.most_idle() => best = next,
            _ => return Some(best.orders()),
        }
    }
}

struct Vee {
    run: Run,
    taste: Taste,
    /// Idle times of an earlier run.
    allowed: Option<Vec<f64>>,
}

impl Vee {
    fn finish(mut self) -> Option<Run> {
        self.warm_up()?;
        for _ in 0..2 * self.run.counts.micro_batches {
            self.backwards()?;
            self.forwards()?;
        }
        (0..self.ranks()).for_each(|rank| self.run.flush_weights(rank));
        Some(self.run)
    }

    fn ranks(&self) -> usize {
        self.run.counts.ranks
    }

    /// Forwards of both chunks down and back up, with more of the first chunk while they cost no
    /// time; then each pipeline rank as many forwards as the one before.
    fn warm_up(&mut self) -> Option<()> {
        for rank in 0..self.ranks() {
            self.put_forward(rank, 0)?;
        }
        for rank in (0..self.ranks()).rev() {
            if let Some(arrival) = self.run.arrival(rank, Step::F(1)) {
                while self.has_time(rank, arrival) {
                    (0..=rank).try_for_each(|above| self.put_forward(above, 0))?;
                }
            }
            self.put_forward(rank, 1)?;
        }
        self.even_out()
    }

    fn has_time(&self, rank: usize, arrival: f64) -> bool {
        self.run.has_room(rank, 2 + 2 * rank)
            && self.run.forward_is_in_time(rank, arrival)
            && self.run.is_open(rank, Step::F(0))
    }

    fn even_out(&mut self) -> Option<()> {
        let count = |run: &Run, rank: usize, chunk: usize| run.count(rank, Step::F(chunk));
        let both = |run: &Run, rank: usize| count(run, rank, 0) + count(run, rank, 1);
        let mut chunk = 0;
        for rank in 1..self.ranks() {
            loop {
                let run = &self.run;
                let fewer = both(run, rank) < both(run, rank - 1);
                let (own, before) = (count(run, rank, 1), count(run, rank - 1, 1));
                if !fewer && (own > before || before >= run.counts.micro_batches) {
                    break;
                }
                for below in (rank..self.ranks()).rev() {
                    if self.run.is_open(below, Step::F(chunk)) {
                        self.put_forward(below, chunk)?;
                    }
                }
                chunk = 1 - chunk;
            }
        }
        Some(())
    }

    fn put_forward(&mut self, rank: usize, chunk: usize) -> Option<()> {
        if !self.run.has_room(rank, 1) {
            return None;
        }
        self.run.put(rank, Step::F(chunk))
    }

    fn backwards(&mut self) -> Option<()> {
        let second: Vec<bool> = (0..self.ranks()).map(|rank| self.turns_back(rank)).collect();
        // In the order in which gradients travel: chunk 1 comes first, so down its chain and then
        // up through chunk 0.
        let back = (0..self.ranks()).rev().filter(|&rank| second[rank]);
        let down = (0..self.ranks()).filter(|&rank| !second[rank]);
        for (rank, chunk) in back.map(|d| (d, 0)).chain(down.map(|d| (d, 1))).collect::<Vec<_>>() {
            let fill = chunk == 0 || self.taste.before_backward;
            self.fill(rank, Step::B(chunk), fill);
            self.run.put(rank, Step::B(chunk))?;
        }
        Some(())
    }

    /// Whether the next backward is of chunk 0: there is one and its input is there, or nothing
    /// else is left.
    fn turns_back(&self, rank: usize) -> bool {
        let run = &self.run;
        let begun = run.count(rank, Step::B(0)) < run.count(rank, Step::B(1));
        begun && (run.has_input(rank, Step::B(0)) || !run.is_open(rank, Step::B(1)))
    }

    fn forwards(&mut self) -> Option<()> {
        for rank in 0..self.ranks() {
            if let Some(chunk) = self.next_forward(rank) {
                self.run.make_room(rank)?;
                self.fill(rank, Step::F(chunk), self.taste.before_forward);
                self.run.put(rank, Step::F(chunk))?;
            }
        }
        Some(())
    }

    /// The second chunk where its input is there, else the first.
    fn next_forward(&self, rank: usize) -> Option<usize> {
        let run = &self.run;
        let (first, second) = (Step::F(0), Step::F(1));
        if !run.is_open(rank, second) {
            return None;
        }
        if run.count(rank, second) >= run.count(rank, first) {
            return Some(0);
        }
        if run.has_input(rank, second) {
            return Some(1);
        }
        (run.is_open(rank, first) && run.has_input(rank, first)).then_some(0)
    }

    /// Weight gradients until the input arrives; one that ends later where idling would be the
    /// longest of any pipeline rank and the choices allow it.
    fn fill(&mut self, rank: usize, step: Step, late: bool) {
        let Some(arrival) = self.run.arrival(rank, step) else { return };
        if self.run.fill(rank, arrival) && late {
            let most = self.most_idle(rank);
            if self.run.would_idle_longest(rank, arrival, most) {
                let _ = self.run.put_weights(rank);
            }
        }
    }

    fn most_idle(&self, rank: usize) -> f64 {
        let allowed = self
            .allowed
            .as_ref()
            .map_or(0.0, |allowed| allowed.iter().copied().fold(0.0, f64::max) - allowed[rank]);
        self.run.most_idle().max(allowed)
    }
}
