//! Placements of schedules with several chunks a device: a family small enough to be tried in full.
//!
//! Chunks are as even as may be, except that the first and the last stage, which also hold the
//! vocabulary layers, may each have up to [`LIGHTER`] layers fewer, or as layer redistribution's min–max
//! rule has them; and every stage recomputes to the
//! same level of its own list of undominated mixes. Within this family the search is exact. (With one
//! chunk a device, any contiguous placement and any mix is open, and the integer program decides.)

use super::priced::{Placed, PlacedStage};
use super::{Case, StageCost, even_counts};
use crate::placement::{Column, Scratch};
use models::decisions::Vocab;
use std::collections::HashMap;

/// Layers that the first or the last stage may have fewer than the others.
pub const LIGHTER: usize = 2;

/// First layer and one past the last, by stage.
pub type Ranges = Vec<(usize, usize)>;

impl Case<'_> {
    /// The layer ranges that may be tried, where they are listed: a single one for `first_last` and
    /// `redistribute`, the family for several chunks; `None` where the solver places layers freely.
    pub fn listed_ranges(&self) -> Option<Vec<Ranges>> {
        let (layers, stages) = (self.ground.layers.len(), self.stages());
        let counts = match self.decisions.vocab {
            Vocab::FirstLast => vec![even_counts(layers, stages)],
            Vocab::Redistribute => vec![self.redis_counts(layers, stages)],
            _ if self.decisions.vpp > 1 => {
                let mut family = lighter_ends(layers, stages);
                family.push(self.redis_counts(layers, stages));
                family.dedup();
                family
            }
            _ => return None,
        };
        Some(counts.into_iter().map(to_ranges).collect())
    }

    /// The best placement of a list, with its iteration before it is finished, s; `None` where none fits.
    pub fn best_listed(
        &self,
        list: &[Ranges],
        ignore_memory: bool,
        scratch: &mut Scratch,
    ) -> Option<(Placed, f64)> {
        let mut costs = HashMap::new();
        let mut best: Option<(Placed, f64)> = None;
        for ranges in list {
            let stages = self.stage_costs(ranges, &mut costs, Self::stage);
            if !ignore_memory && !self.fits_host(self.host_bytes(&stages)) {
                continue;
            }
            let budget = self.budget_bytes();
            let level = self.least_level(ranges, &stages, budget, ignore_memory);
            let Some(level) = level else { continue };
            let columns = self.columns_at(ranges, &stages, level);
            let problem = self.problem_of(columns);
            let value_s = problem.iteration_s(&vec![0; ranges.len()], scratch);
            if best.as_ref().is_none_or(|(_, best_s)| value_s < *best_s) {
                best = Some((self.placed_at(ranges, level), value_s));
            }
        }
        best
    }

    /// Passes of the list's fastest placement, s, with nothing behind them, no gathers in them, and the
    /// recomputation that this case's states make necessary.
    pub fn listed_bound_s(
        &self,
        list: &[Ranges],
        ignore_memory: bool,
        scratch: &mut Scratch,
    ) -> f64 {
        let mut costs = HashMap::new();
        let budget = self.relaxed_budget_bytes();
        let mut bound_s = |ranges: &Ranges| {
            let stages = self.stage_costs(ranges, &mut costs, Self::relaxed_stage);
            let Some(level) = self.least_level(ranges, &stages, budget, ignore_memory) else {
                return f64::INFINITY;
            };
            let mut columns = self.columns_at(ranges, &stages, level);
            for column in columns.iter_mut().flatten() {
                column.step_s = 0.0;
            }
            self.problem_of(columns).iteration_s(&vec![0; ranges.len()], scratch)
        };
        list.iter().map(&mut bound_s).fold(f64::INFINITY, f64::min)
    }

    /// A cheaper bound on the same: device `i` starts when the first micro-batch has come through the
    /// first chunks before it, does all its micro-batches, and the last one still has to go back.
    pub fn listed_chain_bound_s(&self, list: &[Ranges]) -> f64 {
        let mut costs = HashMap::new();
        let bounds = list.iter().map(|ranges| {
            let stages = self.stage_costs(ranges, &mut costs, Self::relaxed_stage);
            self.chain_s(&stages)
        });
        bounds.fold(f64::INFINITY, f64::min)
    }

    fn chain_s(&self, stages: &[StageCost]) -> f64 {
        let devices = self.decisions.pp as usize;
        let m = self.decisions.micro_batches as f64;
        let load_s =
            |stage: usize| stages[stage].forward.total_s() + stages[stage].backward.total_s();
        let (mut ramp_s, mut longest_s) = (0.0, 0.0_f64);
        for device in 0..devices {
            // Stage j·p + i is chunk j of device i.
            let own_s: f64 = (device..stages.len()).step_by(devices).map(load_s).sum();
            longest_s = longest_s.max(ramp_s + m * own_s);
            ramp_s += load_s(device);
        }
        longest_s
    }

    /// Costs of the stages; where layers are alike, equal stages are priced once.
    fn stage_costs(
        &self,
        ranges: &Ranges,
        known: &mut StageCosts,
        price: impl Fn(&Self, usize, usize, usize) -> StageCost,
    ) -> Vec<StageCost> {
        let stages = ranges.len();
        let uniform = self.ground.layers.is_uniform();
        let cost = |(stage, &(start, end)): (usize, &(usize, usize))| {
            let place = if stage == 0 || stage + 1 == stages { stage } else { 1 };
            let key = if uniform { (place, 0, end - start) } else { (stage, start, end) };
            known.entry(key).or_insert_with(|| price(self, stage, start, end)).clone()
        };
        ranges.iter().enumerate().map(cost).collect()
    }

    fn columns_at(&self, ranges: &Ranges, stages: &[StageCost], level: usize) -> Vec<Vec<Column>> {
        let column = |(&(start, end), cost): (&(usize, usize), &StageCost)| {
            if level == 0 {
                return vec![self.column((start, end), 0, cost, &self.first_mix(start, end))];
            }
            let mixes = self.mixes(start, end);
            let index = level.min(mixes.len() - 1);
            vec![self.column((start, end), index, cost, &mixes[index])]
        };
        ranges.iter().zip(stages).map(column).collect()
    }

    /// Most host memory that a device's stages need, bytes.
    pub(crate) fn host_bytes(&self, stages: &[StageCost]) -> f64 {
        let mut host = vec![0.0; self.devices()];
        for (stage, cost) in stages.iter().enumerate() {
            host[self.device_of(stage)] += self.state_memory(cost.params).host;
        }
        host.into_iter().fold(0.0, f64::max)
    }

    /// The least level of recomputation with which every device fits: time grows with the level, so it is
    /// the fastest. Levels are tried in turn, because the buffer that a recomputed layer needs can make a
    /// higher level need more memory than a lower one.
    fn least_level(
        &self,
        ranges: &Ranges,
        stages: &[StageCost],
        budget: f64,
        ignore_memory: bool,
    ) -> Option<usize> {
        if ignore_memory {
            return Some(0);
        }
        let fits = |level: usize| {
            let mut problem = self.problem_of(self.columns_at(ranges, stages, level));
            problem.budget_bytes.fill(budget);
            problem.fits(&vec![0; ranges.len()])
        };
        if fits(0) {
            return Some(0);
        }
        let levels = ranges.iter().map(|&(start, end)| self.mixes(start, end).len()).max()?;
        (1..levels).find(|&level| fits(level))
    }

    fn placed_at(&self, ranges: &Ranges, level: usize) -> Placed {
        let stage = |&(start, end): &(usize, usize)| {
            let mixes = self.mixes(start, end);
            let mix = mixes[level.min(mixes.len() - 1)].mix.clone();
            PlacedStage { start, end, mix }
        };
        ranges.iter().map(stage).collect()
    }
}

type StageCosts = HashMap<(usize, usize, usize), StageCost>;

/// Even counts with up to [`LIGHTER`] layers fewer on the first and the last stage.
fn lighter_ends(layers: usize, stages: usize) -> Vec<Vec<usize>> {
    let mut found: Vec<Vec<usize>> = vec![];
    for first in 0..=LIGHTER {
        for last in 0..=LIGHTER {
            let mut counts = even_counts(layers + first + last, stages);
            let enough = counts[0] >= first && counts[stages - 1] >= last;
            if enough && counts[1..stages - 1].iter().all(|&count| count > 0) {
                counts[0] -= first;
                counts[stages - 1] -= last;
                found.push(counts);
            }
        }
    }
    found
}

fn to_ranges(counts: Vec<usize>) -> Ranges {
    let mut start = 0;
    let range = |count: usize| {
        start += count;
        (start - count, start)
    };
    counts.into_iter().map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_hold_every_layer_once() {
        for (layers, stages) in [(61, 16), (8, 4), (80, 40), (4, 4)] {
            let family = lighter_ends(layers, stages);
            assert!(family.contains(&even_counts(layers, stages)));
            for counts in family {
                assert_eq!(counts.iter().sum::<usize>(), layers, "{counts:?}");
                let ranges = to_ranges(counts);
                assert_eq!(ranges.first().map(|r| r.0), Some(0));
                assert!(ranges.windows(2).all(|pair| pair[0].1 == pair[1].0));
            }
        }
    }
}
