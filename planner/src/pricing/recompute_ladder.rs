//! How much a pipeline rank with several chunks recomputes: a rung of a ladder from nothing to
//! everything.
//!
//! With several chunks a rank, all chunks of a rank stand on the same rung of one of two ladders,
//! and all ranks use the same ladder. Going up a ladder, each stage's backward pass only gets
//! longer. So the lowest rung that fits is the fastest for each rank, independently of the others.

use super::recompute_split::RecomputeSplit;
use models::decisions::RecomputePolicy;

/// An order in which layers start to recompute: it names a ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LadderOrder {
    /// First one layer of each kind and chunk after another selectively, then one after another
    /// fully.
    SelectiveFirst,
    /// One layer after another fully.
    FullOnly,
}

/// The ladder of a rank whose longest chunk has `longest` layers of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecomputeLadder {
    order: LadderOrder,
    allowed: RecomputePolicy,
    longest: usize,
}

impl RecomputeLadder {
    /// The ladders for the recomputation allowed.
    pub fn orders(allowed: RecomputePolicy) -> &'static [LadderOrder] {
        match allowed {
            RecomputePolicy::PerLayer => &[LadderOrder::SelectiveFirst, LadderOrder::FullOnly],
            _ => &[LadderOrder::SelectiveFirst],
        }
    }

    /// One ladder.
    pub fn new(order: LadderOrder, allowed: RecomputePolicy, longest: usize) -> Self {
        Self { order, allowed, longest }
    }

    /// Number of rungs.
    pub fn count(self) -> usize {
        match (self.allowed, self.order) {
            (RecomputePolicy::PerLayer, LadderOrder::SelectiveFirst) => 2 * self.longest + 1,
            (RecomputePolicy::PerLayer, LadderOrder::FullOnly) => self.longest + 1,
            _ => 1,
        }
    }

    /// Ranges of rungs along which memory never grows. Within a range the buffer for a recomputed
    /// layer stays the same.
    fn runs(self) -> [std::ops::Range<usize>; 3] {
        let (all, middle) = (self.count(), (self.longest + 1).min(self.count()));
        [0..1, 1..middle, middle..all]
    }

    /// How many of `count` layers of one kind in one chunk keep everything, recompute selectively,
    /// and recompute fully.
    pub fn split(self, rung: usize, count: usize) -> [usize; 3] {
        let beyond = rung.saturating_sub(self.longest).min(count);
        let until = rung.min(count);
        match (self.allowed, self.order) {
            (RecomputePolicy::None, _) => [count, 0, 0],
            (RecomputePolicy::Selective, _) => [0, count, 0],
            (RecomputePolicy::Full, _) => [0, 0, count],
            (RecomputePolicy::PerLayer, LadderOrder::FullOnly) => [count - until, 0, until],
            (RecomputePolicy::PerLayer, LadderOrder::SelectiveFirst) => {
                [count - until, until - beyond, beyond]
            }
        }
    }

    /// The recompute split of a stage with `counts[k]` layers of kind `k`.
    pub fn recompute(self, rung: usize, counts: &[usize]) -> RecomputeSplit {
        counts.iter().map(|&count| self.split(rung, count)).collect()
    }

    /// The lowest rung for which `fits` holds.
    pub fn least(self, fits: impl Fn(usize) -> bool) -> Option<usize> {
        self.runs().into_iter().find_map(|run| first_in(run, &fits))
    }
}

/// First element of a range in which `holds` changes at most once, from false to true.
fn first_in(run: std::ops::Range<usize>, holds: &impl Fn(usize) -> bool) -> Option<usize> {
    if run.is_empty() || !holds(run.end - 1) {
        return None;
    }
    let (mut low, mut high) = (run.start, run.end - 1);
    while low < high {
        let middle = low.midpoint(high);
        if holds(middle) { high = middle } else { low = middle + 1 }
    }
    Some(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rung_recomputes_at_least_as_much_as_the_one_before() {
        for &order in RecomputeLadder::orders(RecomputePolicy::PerLayer) {
            let ladder = RecomputeLadder::new(order, RecomputePolicy::PerLayer, 3);
            for count in 0..=3 {
                assert_eq!(ladder.split(0, count), [count, 0, 0]);
                assert_eq!(ladder.split(ladder.count() - 1, count), [0, 0, count]);
                for rung in 1..ladder.count() {
                    let (a, b) = (ladder.split(rung - 1, count), ladder.split(rung, count));
                    assert_eq!(b.iter().sum::<usize>(), count);
                    assert!(b[2] >= a[2] && b[1] + b[2] >= a[1] + a[2], "{a:?} {b:?}");
                }
            }
        }
    }

    #[test]
    fn the_lowest_rung_is_found_in_each_run() {
        let ladder =
            RecomputeLadder::new(LadderOrder::SelectiveFirst, RecomputePolicy::PerLayer, 3);
        for wanted in 0..7 {
            assert_eq!(ladder.least(|rung| rung >= wanted), Some(wanted));
        }
        assert_eq!(ladder.least(|_| false), None);
        // The buffer makes rung 1 larger than rung 0. That must not hide rung 0.
        assert_eq!(ladder.least(|rung| rung == 0 || rung > 2), Some(0));
    }
}
