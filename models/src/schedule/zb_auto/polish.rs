//! Local search that moves weight gradients one place at a time while that shortens the order.

use super::super::{Pass, PassKind, Schedule};
use super::frame::Frame;
use super::{AutoCosts, Lengths, busy, change};

/// Orders that are polished: the best one may be at a local optimum where the next best is not.
pub(super) const MOST: usize = 8;

/// Passes that may be run over all tries of one order: a fraction of a second.
const MOST_RUN: usize = 1 << 19;

/// With fewer tries only the first passes of the first pipeline rank are looked at.
const FEWEST_TRIES: usize = 32;

/// The schedule with weight gradients moved as far as that improves it: a shorter longest stage
/// time, else a shorter makespan, else shorter stage times. `frame` is that of the schedule.
pub(super) fn polished(
    schedule: Schedule,
    frame: Frame,
    best: Lengths,
    costs: AutoCosts,
) -> (Lengths, Schedule) {
    let passes: usize = schedule.passes.iter().map(Vec::len).sum();
    let tries = MOST_RUN / passes.max(1);
    let floor = schedule.passes.iter().map(|order| busy(order, costs)).fold(0.0, f64::max);
    // Without idling there is nothing to shorten but the makespan.
    let idles = best.0 > floor * (1.0 + 1e-9);
    let mut polish = Polish { schedule, frame, best, costs, tries };
    let worth = idles && tries >= FEWEST_TRIES;
    while worth && polish.round() {}
    (polish.best, polish.schedule)
}

/// An order, its lengths, and the tries left.
struct Polish {
    schedule: Schedule,
    frame: Frame,
    best: Lengths,
    costs: AutoCosts,
    tries: usize,
}

impl Polish {
    /// Tries each place once; whether that shortened something and more may be tried.
    fn round(&mut self) -> bool {
        let mut improved = false;
        for rank in 0..self.schedule.ranks {
            // Of the passes before the two in question: what they hold, and how many are no weight
            // gradients.
            let (mut held, mut steps) = (0.0, 0);
            for place in 1..self.schedule.passes[rank].len() {
                if self.tries == 0 {
                    return false;
                }
                improved |= self.swaps(rank, place, held, steps);
                let first = self.schedule.passes[rank][place - 1];
                held += change(first.kind, self.costs);
                steps += usize::from(first.kind != PassKind::W);
            }
        }
        improved
    }

    /// Swaps a pass and the one before it where just one of them is weight gradients and that is
    /// better.
    fn swaps(&mut self, rank: usize, place: usize, held: f64, steps: usize) -> bool {
        let order = &self.schedule.passes[rank];
        let (first, second) = (order[place - 1], order[place]);
        let earlier = second.kind == PassKind::W;
        if earlier == (first.kind == PassKind::W) {
            return false;
        }
        self.tries -= 1;
        let fits = held + change(second.kind, self.costs) <= self.costs.limit * (1.0 + 1e-9);
        if !fits || earlier && first == (Pass { kind: PassKind::B, ..second }) {
            return false;
        }
        self.frame.move_weights(rank, steps, earlier);
        let found = self.frame.lengths();
        if is_shorter(found, self.best) {
            self.best = found;
            self.schedule.passes[rank].swap(place - 1, place);
            return true;
        }
        self.frame.move_weights(rank, steps, !earlier);
        false
    }
}

/// Whether the first of the lengths that differ is shorter.
fn is_shorter(ours: Lengths, theirs: Lengths) -> bool {
    let shorter = |a: f64, b: f64| a < b * (1.0 - 1e-12);
    let pairs = [(ours.0, theirs.0), (ours.1, theirs.1), (ours.2, theirs.2)];
    let decided = pairs.into_iter().find(|&(a, b)| shorter(a, b) || shorter(b, a));
    decided.is_some_and(|(a, b)| a < b)
}
