//! Local search over partitions: moves one layer at a time.
//!
//! With several chunks per pipeline rank and many partitions, the search prices a family of them
//! ([`super::partition_candidates`]). The best of the family need not be the best among its
//! neighbours, so hill climbing goes on from there: each step takes the fastest partition that fits
//! among all with one layer on another stage, until none is faster.

use super::partition_candidates::Limits;
use crate::partition::{Column, Problem, Scratch};
use crate::pricing::Configuration;
use crate::pricing::listed_cuts::{Ranges, to_ranges};
use crate::pricing::priced::Placed;
use crate::simulate::CriticalPath;

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
    /// By stage, seconds of the chain per layer there, without recomputation.
    layer_s: Vec<f64>,
    /// By stage, seconds of recomputation on the chain that removing one layer there may save.
    spared_s: Vec<f64>,
    /// Its length, s.
    length_s: f64,
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
    /// tried.
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
                None => failed += 1,
            }
        }
        best
    }

    /// A chain of passes under `placed`, the only choice of `problem`.
    fn chain(
        &self,
        path: CriticalPath,
        placed: &Placed,
        problem: &Problem,
        scratch: &mut Scratch,
    ) -> Chain {
        let recompute_s: Vec<f64> =
            placed.iter().map(|stage| self.recompute_cost(&stage.recompute).recompute_s).collect();
        let layers = self.cache.layers.len() as f64;
        let mean_s = |seconds: fn(&Column) -> f64| -> f64 {
            problem.columns.iter().flatten().map(seconds).sum::<f64>() / layers
        };
        let forward_s = mean_s(|column| column.forward_s);
        let backward_s =
            mean_s(|column| column.backward_s) - recompute_s.iter().sum::<f64>() / layers;
        let weight_s = mean_s(|column| column.weight_s);
        let counts = |stage: usize| problem.pipeline.counts_on(&path, stage).map(f64::from);
        let layer_s = |stage: usize| {
            let [forward, backward, weight] = counts(stage);
            forward * forward_s + backward * backward_s + weight * weight_s
        };
        let spared_s = |stage: usize| -> f64 {
            let on_rank = self.stages_of(self.rank_of(stage));
            let again = on_rank.map(|stage| counts(stage)[1] * recompute_s[stage]);
            again.sum::<f64>().min(MAX_SPARED_LAYERS * counts(stage)[1] * forward_s)
        };
        let stages = 0..problem.stages();
        let (layer_s, spared_s) =
            (stages.clone().map(layer_s).collect(), stages.map(spared_s).collect());
        let length_s = problem.path_s(&vec![0; problem.stages()], &path, scratch);
        Chain { path, layer_s, spared_s, length_s }
    }
}

impl Chain {
    /// Estimated least length after a layer has moved, s: the rank it leaves may recompute less.
    fn after_s(&self, (from, to): (usize, usize)) -> f64 {
        self.length_s + self.layer_s[to] - self.layer_s[from] - self.spared_s[from]
    }
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
