//! Local search over partitions: moves one layer at a time.
//!
//! With several chunks per pipeline rank and many partitions, the search prices a family of them
//! ([`super::partition_candidates`]). The best of the family need not be the best among its
//! neighbours, so hill climbing goes on from there: each step takes the fastest partition that fits
//! among all with one layer on another stage, until none is faster.

use super::partition_candidates::Limits;
use crate::partition::{Problem, Scratch};
use crate::pricing::listed_cuts::{Ranges, to_ranges};
use crate::pricing::priced::{Placed, PlacedStage};
use crate::pricing::{Configuration, recompute_split};
use crate::simulate::CriticalPath;
use std::ops::Range;

/// Least relative gain of a move. For less, the more even partition is kept.
const LEAST_GAIN: f64 = 1e-4;

/// Chains of passes kept from one step to the next.
const MAX_CHAINS: usize = 16;

/// Moves without success after which a step gives up.
const MAX_FAILED_MOVES: usize = 128;

/// Upper estimate of the layers that a rank stops recomputing when it holds one layer less.
const MAX_SPARED_LAYERS: f64 = 2.0;

/// A chain of passes of a placement.
struct Chain {
    path: CriticalPath,
    /// For moves to a later stage.
    later: Shifts,
    /// For moves to an earlier stage.
    earlier: Shifts,
    /// By stage, seconds of recomputation on the chain that removing one layer there may save.
    spared_s: Vec<f64>,
    /// Its length, s.
    length_s: f64,
}

/// Seconds of a chain in layers that change stages, as sums over the first 0, 1, 2, ... stages.
///
/// When stage 1 gives a layer to stage 4, stages 2 and 3 keep their counts and shift by one: each
/// takes the last layer of the stage before and gives its own last one on.
struct Shifts {
    /// In the layer that each stage takes from its neighbour on one side.
    taken_s: Vec<f64>,
    /// In the layer that it gives to its neighbour on the other side.
    given_s: Vec<f64>,
}

impl Configuration<'_> {
    /// The local optimum reached from a placement by moves of single layers, with its time before
    /// overheads, s. Of `limits`, the cut-off does not count.
    pub fn hill_climb(
        &self,
        start: (Placed, f64),
        limits: Limits<'_>,
        scratch: &mut Scratch,
    ) -> (Placed, f64) {
        let mut chains = vec![];
        let mut best = start;
        while let Some(step) = self.step(&best, &mut chains, limits, scratch) {
            best = step;
        }
        best
    }

    /// The fastest placement with one layer on another stage, if it is faster. Moves that shorten
    /// the critical path most are tried first; moves that leave a known chain too long are not
    /// tried. A move that fails makes another chain known.
    fn step(
        &self,
        (placed, pipeline_s): &(Placed, f64),
        chains: &mut Vec<Chain>,
        limits: Limits<'_>,
        scratch: &mut Scratch,
    ) -> Option<(Placed, f64)> {
        let problem = self.problem_of(self.columns_of_placed(placed));
        let choice = vec![0; placed.len()];
        let longest = problem.critical_path(&choice, scratch);
        let known = std::mem::take(chains).into_iter().map(|chain| chain.path);
        for path in std::iter::once(longest).chain(known).take(MAX_CHAINS) {
            chains.push(self.chain(path, placed, &problem, scratch));
        }
        let counts: Vec<usize> = placed.iter().map(|stage| stage.end - stage.start).collect();
        let mut moves = moves(&counts, self.decisions.vocab.over_pipeline());
        moves.sort_by(|&a, &b| chains[0].after_s(a).total_cmp(&chains[0].after_s(b)));
        let (mut limit_s, mut best, mut failed) = (pipeline_s * (1.0 - LEAST_GAIN), None, 0);
        for pair in moves {
            if failed == MAX_FAILED_MOVES || limits.until.is_over() {
                break;
            }
            if chains.iter().any(|chain| chain.after_s(pair) >= limit_s) {
                continue;
            }
            let cut = [after(&counts, pair)];
            let limits = Limits { cutoff_s: limit_s, ..limits };
            match self.best_listed(&cut, limits, scratch).best {
                Some((placed, value_s)) => {
                    (limit_s, failed) = (value_s, 0);
                    best = Some((placed, value_s));
                }
                None => {
                    failed += 1;
                    if chains.len() == MAX_CHAINS {
                        continue;
                    }
                    let path = self.path_over(&cut[0], scratch);
                    if chains.iter().all(|chain| chain.path != path) {
                        chains.push(self.chain(path, placed, &problem, scratch));
                    }
                }
            }
        }
        best
    }

    /// The critical path of a partition whose layers recompute as little as may be.
    fn path_over(&self, ranges: &Ranges, scratch: &mut Scratch) -> CriticalPath {
        let least = |&(start, end): &(usize, usize)| PlacedStage {
            start,
            end,
            recompute: self.least_recompute(start, end).recompute,
        };
        let placed: Placed = ranges.iter().map(least).collect();
        let problem = self.problem_of(self.columns_of_placed(&placed));
        problem.critical_path(&vec![0; placed.len()], scratch)
    }

    /// A chain of passes under `placed`, the only choice of `problem`.
    fn chain(
        &self,
        path: CriticalPath,
        placed: &Placed,
        problem: &Problem,
        scratch: &mut Scratch,
    ) -> Chain {
        let stages = placed.len();
        let counts: Vec<[f64; 3]> = (0..stages)
            .map(|stage| problem.pipeline.counts_on(&path, stage).map(f64::from))
            .collect();
        let layer_s = |stage: usize, layer: usize| -> f64 {
            let passes_s = self.passes_of_layer_s(layer);
            counts[stage].iter().zip(passes_s).map(|(count, pass_s)| count * pass_s).sum()
        };
        let before = |at: usize| at.checked_sub(1);
        let within = |at: usize| (at < self.cache.layers.len()).then_some(at);
        let summed = |layer: &dyn Fn(&PlacedStage) -> Option<usize>| {
            let at_stage = |(stage, s)| layer(s).map_or(0.0, |layer| layer_s(stage, layer));
            running_sums(placed.iter().enumerate().map(at_stage))
        };
        let later =
            Shifts { taken_s: summed(&|s| before(s.start)), given_s: summed(&|s| before(s.end)) };
        let earlier =
            Shifts { taken_s: summed(&|s| within(s.end)), given_s: summed(&|s| within(s.start)) };
        let spared_s = (0..stages).map(|stage| self.spared_s(stage, placed, &counts)).collect();
        let length_s = problem.path_s(&vec![0; stages], &path, scratch);
        Chain { path, later, earlier, spared_s, length_s }
    }

    /// Forward, backward and weight-gradient pass of one layer, s. Recomputation counts where all
    /// layers recompute alike.
    fn passes_of_layer_s(&self, layer: usize) -> [f64; 3] {
        let cost = self.stage_of_layers(layer, layer + 1);
        let again_s = match self.recomputes_alike() {
            true => self.least_recompute(layer, layer + 1).recompute_s,
            false => 0.0,
        };
        let backward_s = cost.backward.total_s() - cost.weight_s + again_s;
        [cost.forward.total_s(), backward_s, cost.weight_s]
    }

    /// Whether no stage chooses what its layers recompute.
    fn recomputes_alike(&self) -> bool {
        recompute_split::options(self.decisions.recompute).len() == 1
    }

    /// Upper estimate of the recomputation on a chain that removing a layer from a stage saves, s;
    /// 0 where layers recompute alike, and the layer's passes include it.
    fn spared_s(&self, stage: usize, placed: &Placed, counts: &[[f64; 3]]) -> f64 {
        if self.recomputes_alike() {
            return 0.0;
        }
        let recompute_s = |stage: usize| self.recompute_cost(&placed[stage].recompute).recompute_s;
        let on_rank = self.stages_of(self.rank_of(stage));
        let again_s: f64 = on_rank.map(|stage| counts[stage][1] * recompute_s(stage)).sum();
        let last = placed[stage].end.saturating_sub(1);
        again_s.min(MAX_SPARED_LAYERS * counts[stage][1] * self.passes_of_layer_s(last)[0])
    }
}

impl Chain {
    /// Estimated least length after a layer has moved, s: the rank it leaves may recompute less.
    fn after_s(&self, (from, to): (usize, usize)) -> f64 {
        let changed_s = match from < to {
            true => self.later.between_s(from + 1..to + 1, from..to),
            false => self.earlier.between_s(to..from, to + 1..from + 1),
        };
        self.length_s + changed_s - self.spared_s[from]
    }
}

impl Shifts {
    /// What a shift changes, s: some stages take a layer, some give one.
    fn between_s(&self, taking: Range<usize>, giving: Range<usize>) -> f64 {
        let sum_s = |sums: &[f64], stages: Range<usize>| sums[stages.end] - sums[stages.start];
        sum_s(&self.taken_s, taking) - sum_s(&self.given_s, giving)
    }
}

/// Sums of the first 0, 1, 2 and so on.
fn running_sums(seconds: impl Iterator<Item = f64>) -> Vec<f64> {
    let add = |sum: &mut f64, seconds: f64| {
        *sum += seconds;
        Some(*sum)
    };
    std::iter::once(0.0).chain(seconds.scan(0.0, add)).collect()
}

/// Pairs of stages between which a layer may move. Only the first and the last stage may become
/// empty, and neither where the vocabulary is spread over the pipeline.
fn moves(counts: &[usize], all_filled: bool) -> Vec<(usize, usize)> {
    let stages = counts.len();
    let fewest = |stage: usize| usize::from(all_filled || (stage > 0 && stage + 1 < stages));
    let pairs = (0..stages).flat_map(|from| (0..stages).map(move |to| (from, to)));
    pairs.filter(|&(from, to)| from != to && counts[from] > fewest(from)).collect()
}

/// The partition after a move.
fn after(counts: &[usize], (from, to): (usize, usize)) -> Ranges {
    let mut counts = counts.to_vec();
    counts[from] -= 1;
    counts[to] += 1;
    to_ranges(counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_takes_one_layer_and_leaves_inner_stages_one() {
        assert_eq!(moves(&[1, 1, 2], false), [(0, 1), (0, 2), (2, 0), (2, 1)]);
        assert_eq!(moves(&[1, 1, 2], true), [(2, 0), (2, 1)]);
        assert_eq!(after(&[1, 1, 2], (2, 0)), [(0, 2), (2, 3), (3, 4)]);
        assert_eq!(after(&[1, 1, 2], (0, 2)), [(0, 0), (0, 1), (1, 4)]);
    }
}
