//! Placements of schedules with several chunks a device: a family small enough to be tried in full.
//!
//! Chunks are as even as may be, except that the first and the last stage, which also hold the
//! vocabulary layers, may each have up to [`LIGHTER`] layers fewer, or as layer redistribution's min–max
//! rule has them; and every device recomputes to the least level of a chain ([`super::levels`]) that fits.
//! Within this family the search is exact. (With one chunk a device, any contiguous placement and any
//! mix is open, and the integer program decides.)

use super::levels::{Chain, Levels};
use super::mixes::MixCost;
use super::priced::{Placed, PlacedStage};
use super::{Case, StageCost, even_counts};
use crate::placement::{Column, Scratch};
use models::decisions::Vocab;
use std::collections::HashMap;

pub use crate::bounds::listed::Ranges;

/// Layers that the first or the last stage may have fewer than the others.
pub const LIGHTER: usize = 2;

/// What decides which placements are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum List {
    /// As even as may be.
    Even,
    /// As layer redistribution has them.
    Redis,
    /// The family.
    Family,
}

impl List {
    /// The list of decisions; `None` where the solver places layers freely.
    pub fn of(vocab: Vocab, chunks: u64) -> Option<Self> {
        match vocab {
            Vocab::FirstLast => Some(Self::Even),
            Vocab::Redistribute => Some(Self::Redis),
            _ if chunks > 1 => Some(Self::Family),
            _ => None,
        }
    }
}

impl Case<'_> {
    /// The layer ranges that may be tried, where they are listed: a single one for `first_last` and
    /// `redistribute`, the family for several chunks; `None` where the solver places layers freely.
    pub fn listed_ranges(&self) -> Option<Vec<Ranges>> {
        let list = List::of(self.decisions.vocab, self.decisions.vpp)?;
        Some(self.ground.listed_ranges(list, self.stages()))
    }

    /// The best placement of a list below `cutoff_s`, with its iteration before it is finished, s.
    pub fn best_listed(
        &self,
        list: &[Ranges],
        cutoff_s: f64,
        ignore_memory: bool,
        scratch: &mut Scratch,
    ) -> Option<(Placed, f64)> {
        let mut costs = HashMap::new();
        let mut best: Option<(Placed, f64)> = None;
        for ranges in list {
            let limit_s = best.as_ref().map_or(cutoff_s, |(_, best_s)| *best_s);
            let stages = self.stage_costs(ranges, &mut costs);
            let hosts = ignore_memory || self.fits_host(self.host_bytes(&stages));
            if !hosts || self.chain_s(&self.pinned_columns(ranges, &stages)) >= limit_s {
                continue;
            }
            for mixes in self.fitting_mixes(ranges, &stages, ignore_memory) {
                let columns = self.columns_at(ranges, &stages, &mixes);
                let limit_s = best.as_ref().map_or(cutoff_s, |(_, best_s)| *best_s);
                if self.chain_s(&columns) >= limit_s {
                    continue;
                }
                let problem = self.problem_of(columns.into_iter().map(|c| vec![c]).collect());
                let value_s = problem.iteration_s(&vec![0; ranges.len()], scratch);
                if value_s < limit_s {
                    best = Some((placed(ranges, mixes), value_s));
                }
            }
        }
        best
    }

    /// A chain of passes in columns: see [`crate::bounds::listed`]; each device's own reductions may
    /// come instead of the way back.
    fn chain_s(&self, columns: &[Column]) -> f64 {
        if !self.decisions.schedule.is_whole() {
            // Nothing is claimed of other schedules yet.
            return 0.0;
        }
        let devices = self.devices();
        let (m, link_s) = (self.micro_batches(), self.link_s());
        let (mut down_s, mut back_s, mut longest_s, mut step_s) = (0.0, 0.0, 0.0_f64, 0.0_f64);
        let first_tail_s: f64 = columns.iter().step_by(devices).map(|column| column.tail_s).sum();
        for device in 0..devices {
            // Stage j·p + i is chunk j of device i.
            let own = || columns.iter().skip(device).step_by(devices);
            let own_s = down_s + m * (own().map(Column::load_s).sum::<f64>() + self.vocab_pass_s());
            let tail_s = own().map(|column| column.tail_s).sum::<f64>();
            longest_s = longest_s.max(own_s + tail_s.max(back_s + first_tail_s));
            step_s = step_s.max(own().map(|column| column.step_s).sum());
            down_s += columns[device].forward_s + link_s;
            back_s += columns[device].backward_s + link_s;
        }
        longest_s + step_s
    }

    /// Costs of the stages; where layers are alike, equal stages are priced once.
    fn stage_costs(&self, ranges: &Ranges, known: &mut StageCosts) -> Vec<StageCost> {
        let stages = ranges.len();
        let uniform = self.ground.layers.is_uniform();
        let cost = |(stage, &(start, end)): (usize, &(usize, usize))| {
            // Stages that do not lie on the first device and at no end of the model are alike, but for
            // vocabulary shards, which only first chunks hold.
            let inner = stage > 0 && stage + 1 < stages && self.vocab_pass_s() == 0.0;
            let key = match (inner, uniform) {
                (true, true) => (1, 0, end - start),
                (false, true) => (stage, 0, end - start),
                (_, false) => (stage, start, end),
            };
            known.entry(key).or_insert_with(|| self.stage(stage, start, end)).clone()
        };
        ranges.iter().enumerate().map(cost).collect()
    }

    /// Seconds of the stages with no more recomputation than is pinned.
    fn pinned_columns(&self, ranges: &Ranges, stages: &[StageCost]) -> Vec<Column> {
        let first = crate::bounds::work::options(self.decisions.recompute)[0];
        let column = |(&(start, end), cost): (&(usize, usize), &StageCost)| {
            let layers = self.sheet.layer.iter().zip(self.ground.layers.between(start, end));
            let recompute = layers.map(|(l, count)| l.recompute[first].total_s() * count as f64);
            Column {
                forward_s: cost.forward.total_s(),
                backward_s: cost.backward.total_s() + recompute.sum::<f64>(),
                tail_s: cost.tail_s,
                step_s: cost.optimizer_s + cost.gather_s,
                ..Column::default()
            }
        };
        ranges.iter().zip(stages).map(column).collect()
    }

    fn columns_at(&self, ranges: &Ranges, stages: &[StageCost], mixes: &[MixCost]) -> Vec<Column> {
        let all = ranges.iter().zip(stages).zip(mixes);
        all.map(|((&range, cost), mix)| self.column(range, 0, cost, mix)).collect()
    }

    fn first_mixes(&self, ranges: &Ranges) -> Vec<MixCost> {
        ranges.iter().map(|&(start, end)| self.first_mix(start, end)).collect()
    }

    /// Most host memory that a device's stages need, bytes.
    pub(crate) fn host_bytes(&self, stages: &[StageCost]) -> f64 {
        let mut host = vec![0.0; self.devices()];
        for (stage, cost) in stages.iter().enumerate() {
            host[self.device_of(stage)] += self.state_memory(cost.params).host;
        }
        host.into_iter().fold(0.0, f64::max)
    }

    /// The fastest mixes with which every device fits: one chunk a device, any; several, one for each
    /// chain of levels.
    fn fitting_mixes(
        &self,
        ranges: &Ranges,
        stages: &[StageCost],
        ignore_memory: bool,
    ) -> Vec<Vec<MixCost>> {
        let first = self.first_mixes(ranges);
        let fits = |mixes: &[MixCost]| self.fits(ranges, stages, mixes);
        if ignore_memory || fits(&first) {
            return vec![first];
        }
        if self.decisions.vpp == 1 {
            let budget = self.budget_bytes();
            let stage = |(stage, cost): (usize, &StageCost)| {
                let (start, end) = ranges[stage];
                self.fastest_mix(stage, (start, end), cost, budget)
            };
            return stages
                .iter()
                .enumerate()
                .map(stage)
                .collect::<Option<Vec<_>>>()
                .into_iter()
                .collect();
        }
        let chains = Levels::chains(self.decisions.recompute).iter();
        chains.filter_map(|&chain| self.levelled_mixes(ranges, stages, chain)).collect()
    }

    fn fits(&self, ranges: &Ranges, stages: &[StageCost], mixes: &[MixCost]) -> bool {
        let columns = self.columns_at(ranges, stages, mixes);
        self.problem_of(columns.into_iter().map(|c| vec![c]).collect()).fits(&vec![0; ranges.len()])
    }

    /// Mixes of every device's least level that fits.
    fn levelled_mixes(
        &self,
        ranges: &Ranges,
        stages: &[StageCost],
        chain: Chain,
    ) -> Option<Vec<MixCost>> {
        let mut mixes = self.first_mixes(ranges);
        for device in 0..self.devices() {
            let levels = self.levels_of(device, ranges, chain);
            let level =
                levels.least(|level| self.device_fits(device, ranges, stages, levels, level))?;
            for stage in (device..ranges.len()).step_by(self.devices()) {
                mixes[stage] = self.mix_at(ranges[stage], levels, level);
            }
        }
        Some(mixes)
    }

    /// The levels of a device's chunks.
    pub fn levels_of(&self, device: usize, ranges: &Ranges, chain: Chain) -> Levels {
        let chunks = ranges.iter().skip(device).step_by(self.devices());
        let longest = chunks.flat_map(|&(start, end)| self.ground.layers.between(start, end)).max();
        Levels::new(chain, self.decisions.recompute, longest.unwrap_or(0))
    }

    fn mix_at(&self, range: (usize, usize), levels: Levels, level: usize) -> MixCost {
        self.mix_cost(&levels.mix(level, &self.ground.layers.counts(range.0, range.1)))
    }

    fn device_fits(
        &self,
        device: usize,
        ranges: &Ranges,
        stages: &[StageCost],
        levels: Levels,
        level: usize,
    ) -> bool {
        let own = (device..ranges.len()).step_by(self.devices());
        let columns: Vec<Column> = own
            .map(|stage| {
                self.column(
                    ranges[stage],
                    0,
                    &stages[stage],
                    &self.mix_at(ranges[stage], levels, level),
                )
            })
            .collect();
        let states: f64 = columns.iter().map(|column| column.state_bytes).sum();
        let held = |counts: &Vec<u32>| -> f64 {
            counts
                .iter()
                .zip(&columns)
                .map(|(&n, column)| f64::from(n) * column.in_flight_bytes)
                .sum()
        };
        let most = self.pipeline().in_flight[device].iter().map(held).fold(0.0, f64::max);
        states + most <= self.budget_bytes()
    }
}

fn placed(ranges: &Ranges, mixes: Vec<MixCost>) -> Placed {
    let stage =
        |(&(start, end), mix): (&(usize, usize), MixCost)| PlacedStage { start, end, mix: mix.mix };
    ranges.iter().zip(mixes).map(stage).collect()
}

type StageCosts = HashMap<(usize, usize, usize), StageCost>;

/// Even counts with up to [`LIGHTER`] layers fewer on the first and the last stage.
pub(super) fn lighter_ends(layers: usize, stages: usize) -> Vec<Vec<usize>> {
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

pub(super) fn to_ranges(counts: Vec<usize>) -> Ranges {
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
