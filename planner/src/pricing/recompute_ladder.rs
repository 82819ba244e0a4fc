//! How far a device with several chunks recomputes: a level, from nothing to everything.
//!
//! With several chunks a device, every chunk of a device recomputes to the same level of one of two
//! chains, and all devices use the same chain. Along a chain each stage's backward pass only lengthens, so
//! that each device's least level that fits is the fastest: its memory is its own affair.

use super::recompute_split::RecomputeSplit;
use models::decisions::Recompute;

/// An order in which layers start to recompute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LadderOrder {
    /// One layer of each kind and chunk after another selectively, then one after another fully.
    SelectiveFirst,
    /// One after another fully.
    FullOnly,
}

/// The levels of a device whose longest chunk has `longest` layers of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecomputeLadder {
    chain: LadderOrder,
    allowed: Recompute,
    longest: usize,
}

impl RecomputeLadder {
    /// The chains there are for what is allowed.
    pub fn chains(allowed: Recompute) -> &'static [LadderOrder] {
        match allowed {
            Recompute::PerLayer => &[LadderOrder::SelectiveFirst, LadderOrder::FullOnly],
            _ => &[LadderOrder::SelectiveFirst],
        }
    }

    /// The levels of one chain.
    pub fn new(chain: LadderOrder, allowed: Recompute, longest: usize) -> Self {
        Self { chain, allowed, longest }
    }

    /// How many levels there are.
    pub fn count(self) -> usize {
        match (self.allowed, self.chain) {
            (Recompute::PerLayer, LadderOrder::SelectiveFirst) => 2 * self.longest + 1,
            (Recompute::PerLayer, LadderOrder::FullOnly) => self.longest + 1,
            _ => 1,
        }
    }

    /// Runs of levels within which memory never grows: the buffer for recomputed layers does not change.
    fn runs(self) -> [std::ops::Range<usize>; 3] {
        let (all, middle) = (self.count(), (self.longest + 1).min(self.count()));
        [0..1, 1..middle, middle..all]
    }

    /// How many of `count` layers of one kind in one chunk keep everything, recompute selectively, fully.
    pub fn split(self, level: usize, count: usize) -> [usize; 3] {
        let beyond = level.saturating_sub(self.longest).min(count);
        let until = level.min(count);
        match (self.allowed, self.chain) {
            (Recompute::None, _) => [count, 0, 0],
            (Recompute::Selective, _) => [0, count, 0],
            (Recompute::Full, _) => [0, 0, count],
            (Recompute::PerLayer, LadderOrder::FullOnly) => [count - until, 0, until],
            (Recompute::PerLayer, LadderOrder::SelectiveFirst) => {
                [count - until, until - beyond, beyond]
            }
        }
    }

    /// The mix of a stage with `counts[k]` layers of kind `k`.
    pub fn recompute(self, level: usize, counts: &[usize]) -> RecomputeSplit {
        counts.iter().map(|&count| self.split(level, count)).collect()
    }

    /// The least level at which `fits` holds.
    pub fn least(self, fits: impl Fn(usize) -> bool) -> Option<usize> {
        self.runs().into_iter().find_map(|run| first_in(run, &fits))
    }
}

/// First element of a run along which `holds` turns true once.
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
    fn every_level_recomputes_at_least_as_much_as_the_one_before() {
        for &chain in RecomputeLadder::chains(Recompute::PerLayer) {
            let ladder = RecomputeLadder::new(chain, Recompute::PerLayer, 3);
            for count in 0..=3 {
                assert_eq!(ladder.split(0, count), [count, 0, 0]);
                assert_eq!(ladder.split(ladder.count() - 1, count), [0, 0, count]);
                for level in 1..ladder.count() {
                    let (a, b) = (ladder.split(level - 1, count), ladder.split(level, count));
                    assert_eq!(b.iter().sum::<usize>(), count);
                    assert!(b[2] >= a[2] && b[1] + b[2] >= a[1] + a[2], "{a:?} {b:?}");
                }
            }
        }
    }

    #[test]
    fn the_least_level_is_found_in_each_run() {
        let ladder = RecomputeLadder::new(LadderOrder::SelectiveFirst, Recompute::PerLayer, 3);
        for wanted in 0..7 {
            assert_eq!(ladder.least(|level| level >= wanted), Some(wanted));
        }
        assert_eq!(ladder.least(|_| false), None);
        // A buffer that makes level 1 larger than level 0 must not hide level 0.
        assert_eq!(ladder.least(|level| level == 0 || level > 2), Some(0));
    }
}
