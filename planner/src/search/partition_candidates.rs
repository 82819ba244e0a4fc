//! Candidate partitions of schedules with several chunks per pipeline rank: a list short enough to
//! price in full. A placement is a partition with a recompute split for every stage.
//!
//! - At most [`FEW_CUTS`] ways to cut the layers into stages: all of them. Each is priced with
//!   every recompute split, which the integer program decides. Bidirectional pipelines use the
//!   rungs of the recompute ladder instead: their two stages have few cuts at any depth, and the
//!   integer programs would take minutes.
//! - More than that: a family. Chunks are as even as possible, except that the first and the last
//!   stage, which also hold the vocabulary layers, may have up to [`LIGHTER`] layers fewer, or as
//!   many as the min–max rule of layer redistribution gives them. Every rank recomputes on the
//!   lowest rung of a ladder ([`crate::pricing::recompute_ladder`]) that fits.
//!
//! Within the candidates the search is exact. From the best of a family, `super::local_search`
//! goes on to other partitions. With one chunk per rank every contiguous partition and recompute
//! split is open, and the integer program decides (`super::partition_problem`).
//!
//! [`FEW_CUTS`]: crate::pricing::listed_cuts::FEW_CUTS
//! [`LIGHTER`]: crate::pricing::listed_cuts::LIGHTER

use crate::partition::{Column, Scratch, ilp};
use crate::pricing::listed_cuts::{Ranges, few_cuts};
use crate::pricing::priced::{Placed, PlacedStage};
use crate::pricing::recompute_ladder::{LadderOrder, RecomputeLadder};
use crate::pricing::recompute_split::RecomputeCost;
use crate::pricing::{Configuration, StageCost};
use crate::request::task::SOLVER_WORK;
use crate::until::Until;
use rustc_hash::FxHashMap as HashMap;

impl Configuration<'_> {
    /// Whether every partition and recompute split is open with several chunks per rank.
    pub fn is_open(&self) -> bool {
        let once = self.decisions.vpp > 1 && self.decisions.layout().copies() == 1;
        once && few_cuts(self.cache.layers.len(), self.stages())
    }

    /// The best placement over candidate partitions within limits.
    pub fn best_listed(
        &self,
        list: &[Ranges],
        limits: Limits<'_>,
        scratch: &mut Scratch,
    ) -> BestListed {
        let Limits { cutoff_s, ignore_memory, work, until } = limits;
        let mut costs = HashMap::default();
        let mut found = BestListed { cutoff_s, ..BestListed::default() };
        for ranges in list {
            if until.is_over() {
                found.open_s = 0.0;
                break;
            }
            let stages = self.stage_costs(ranges, &mut costs);
            let hosts = ignore_memory || self.fits_host(self.host_bytes(&stages));
            let first = self.least_recomputes(ranges);
            let least_s = self.chain_s(&self.columns_at(ranges, &stages, &first));
            if !hosts || least_s >= found.limit_s() {
                continue;
            }
            let first_fits = ignore_memory || self.fits(ranges, &stages, &first);
            let open = self.is_open() && !first_fits;
            let fitting = match first_fits {
                true => vec![first],
                false => self.fitting_recomputes(ranges, &stages, found.limit_s()),
            };
            for recompute_choices in fitting {
                let columns = self.columns_at(ranges, &stages, &recompute_choices);
                if self.chain_s(&columns) >= found.limit_s() {
                    continue;
                }
                let problem = self.problem_of(columns.into_iter().map(|c| vec![c]).collect());
                let value_s = problem.iteration_s(&vec![0; problem.stages()], scratch);
                found.offer(placed(ranges, recompute_choices), value_s);
            }
            if open {
                self.best_recomputes(ranges, &stages, (work, until), least_s, &mut found, scratch);
            }
        }
        found
    }

    /// Searches all recompute splits of a partition by the integer program. None takes less than
    /// `least_s`.
    fn best_recomputes(
        &self,
        ranges: &Ranges,
        stages: &[StageCost],
        (work, until): (u64, Until<'_>),
        least_s: f64,
        found: &mut BestListed,
        scratch: &mut Scratch,
    ) {
        let all: Vec<_> =
            ranges.iter().map(|&(start, end)| self.recompute_choices(start, end)).collect();
        let columns =
            ranges.iter().zip(stages).zip(&all).map(|((&range, cost), recompute_choices)| {
                let column = |(index, recompute)| self.column(range, index, cost, recompute);
                recompute_choices.iter().enumerate().map(column).collect()
            });
        let problem = self.problem_of(columns.collect());
        let work = work.saturating_sub(found.effort.work);
        let limits = ilp::Limits { work, paths: true, until };
        let report = ilp::solve(&problem, found.limit_s(), limits, scratch);
        found.effort += report.effort;
        if let Some((choice, value_s)) = &report.best {
            let chosen = choice
                .iter()
                .zip(&all)
                .map(|(&index, recompute_choices)| recompute_choices[index].clone());
            found.offer(placed(ranges, chosen.collect()), *value_s);
        }
        if !report.proven {
            found.open_s = found.open_s.min(report.bound_s.max(least_s));
        }
    }

    /// Costs of the stages. Where all layers are of one kind, equal stages are priced once.
    pub(super) fn stage_costs(&self, ranges: &Ranges, known: &mut StageCosts) -> Vec<StageCost> {
        let stages = ranges.len();
        let uniform = self.cache.layers.is_uniform();
        let cost = |(stage, &(start, end)): (usize, &(usize, usize))| {
            // Inner stages cost the same if there are no vocabulary shards, which only first chunks
            // hold, and if both neighbours lie on other ranks at the same distance.
            let inside = stage > 0
                && stage + 1 < stages
                && self.vocab_pass_s() == 0.0
                && (self.p2p_transfer.is_alike() || !self.p2p_transfer.blocks);
            let own = self.rank_of(stage);
            let is_shared =
                inside && self.rank_of(stage - 1) != own && self.rank_of(stage + 1) != own;
            let key = match (is_shared, uniform) {
                (true, true) => (1, 0, end - start),
                (false, true) => (stage, 0, end - start),
                (_, false) => (stage, start, end),
            };
            known.entry(key).or_insert_with(|| self.stage(stage, start, end)).clone()
        };
        ranges.iter().enumerate().map(cost).collect()
    }

    fn columns_at(
        &self,
        ranges: &Ranges,
        stages: &[StageCost],
        recompute_choices: &[RecomputeCost],
    ) -> Vec<Column> {
        let all = ranges.iter().zip(stages).zip(recompute_choices);
        all.map(|((&range, cost), recompute)| self.column(range, 0, cost, recompute)).collect()
    }

    fn least_recomputes(&self, ranges: &Ranges) -> Vec<RecomputeCost> {
        ranges.iter().map(|&(start, end)| self.least_recompute(start, end)).collect()
    }

    /// The fastest recompute splits with which every rank fits, where the least do not. With one
    /// chunk per rank all splits are considered; with several, one result for each ladder order on
    /// which no rank's own passes take `limit_s`.
    fn fitting_recomputes(
        &self,
        ranges: &Ranges,
        stages: &[StageCost],
        limit_s: f64,
    ) -> Vec<Vec<RecomputeCost>> {
        if self.decisions.vpp == 1 {
            let budget = self.budget_bytes();
            let stage = |(stage, cost): (usize, &StageCost)| {
                let (start, end) = ranges[stage];
                self.fastest_recompute(stage, (start, end), cost, budget)
            };
            return stages
                .iter()
                .enumerate()
                .map(stage)
                .collect::<Option<Vec<_>>>()
                .into_iter()
                .collect();
        }
        let orders = RecomputeLadder::orders(self.decisions.recompute).iter();
        orders.filter_map(|&order| self.ladder_recomputes(ranges, stages, order, limit_s)).collect()
    }

    fn fits(
        &self,
        ranges: &Ranges,
        stages: &[StageCost],
        recompute_choices: &[RecomputeCost],
    ) -> bool {
        let columns = self.columns_at(ranges, stages, recompute_choices);
        self.problem_of(columns.into_iter().map(|c| vec![c]).collect()).fits(&vec![0; ranges.len()])
    }

    /// The recompute splits on every rank's lowest rung that fits.
    fn ladder_recomputes(
        &self,
        ranges: &Ranges,
        stages: &[StageCost],
        order: LadderOrder,
        limit_s: f64,
    ) -> Option<Vec<RecomputeCost>> {
        let runs = self.micro_batches() / self.decisions.layout().copies() as f64;
        let mut recompute_choices = self.least_recomputes(ranges);
        // Ranks `i` and `p − 1 − i` hold the same stages.
        for rank in 0..self.ranks() / self.decisions.layout().copies() {
            let ladder = self.ladder_of(rank, ranges, order);
            let rung = ladder.least(|rung| {
                let mut holders = self.holders_of(rank);
                holders.all(|rank| self.rank_fits(rank, ranges, stages, ladder, rung))
            })?;
            let mut own_s = 0.0;
            for stage in self.stages_of(rank) {
                recompute_choices[stage] = self.recompute_at(ranges[stage], ladder, rung);
                own_s += stages[stage].load_s() + recompute_choices[stage].recompute_s;
            }
            if runs * own_s >= limit_s {
                return None;
            }
        }
        Some(recompute_choices)
    }

    /// The recompute ladder of the chunks of a rank.
    pub fn ladder_of(&self, rank: usize, ranges: &Ranges, order: LadderOrder) -> RecomputeLadder {
        let chunks = self.stages_of(rank).map(|stage| ranges[stage]);
        let longest = chunks.flat_map(|(start, end)| self.cache.layers.between(start, end)).max();
        RecomputeLadder::new(order, self.decisions.recompute, longest.unwrap_or(0))
    }

    fn recompute_at(
        &self,
        range: (usize, usize),
        ladder: RecomputeLadder,
        rung: usize,
    ) -> RecomputeCost {
        self.recompute_cost(&ladder.recompute(rung, &self.cache.layers.counts(range.0, range.1)))
    }

    fn rank_fits(
        &self,
        rank: usize,
        ranges: &Ranges,
        stages: &[StageCost],
        ladder: RecomputeLadder,
        rung: usize,
    ) -> bool {
        let columns: Vec<Column> = self
            .stages_of(rank)
            .map(|stage| {
                self.column(
                    ranges[stage],
                    0,
                    &stages[stage],
                    &self.recompute_at(ranges[stage], ladder, rung),
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
        let most = self.pipeline().in_flight[rank].iter().map(held).fold(0.0, f64::max);
        states + most <= self.budget_bytes()
    }
}

/// Limits on the placements of candidate partitions.
#[derive(Clone, Copy, Debug)]
pub struct Limits<'a> {
    /// Only placements below this time count, s.
    pub cutoff_s: f64,
    /// Whether to ignore memory.
    pub ignore_memory: bool,
    /// Work of integer programs, in the unit of [`ilp::Limits::work`].
    pub work: u64,
    /// When to end with the best so far.
    pub until: Until<'a>,
}

impl Limits<'_> {
    /// All placements below a cutoff that fit. Integer programs get a part of the work of a search.
    pub fn below(cutoff_s: f64) -> Self {
        Self { cutoff_s, ignore_memory: false, work: SOLVER_WORK / 8, until: Until::default() }
    }
}

/// The best of some candidate partitions below a cutoff.
#[derive(Clone, Debug)]
pub struct BestListed {
    cutoff_s: f64,
    /// The best placement, with its time before overheads, s.
    pub best: Option<(Placed, f64)>,
    /// What integer programs cost.
    pub effort: ilp::Effort,
    /// Least bound of a program that ran out of work, s; 0 where not all were tried in time, and
    /// infinite where nothing is left open.
    pub open_s: f64,
}

impl Default for BestListed {
    fn default() -> Self {
        Self {
            cutoff_s: f64::INFINITY,
            best: None,
            effort: ilp::Effort::default(),
            open_s: f64::INFINITY,
        }
    }
}

impl BestListed {
    fn limit_s(&self) -> f64 {
        self.best.as_ref().map_or(self.cutoff_s, |(_, best_s)| *best_s)
    }

    fn offer(&mut self, placed: Placed, value_s: f64) {
        if value_s < self.limit_s() {
            self.best = Some((placed, value_s));
        }
    }
}

fn placed(ranges: &Ranges, recompute_choices: Vec<RecomputeCost>) -> Placed {
    let stage = |(&(start, end), recompute): (&(usize, usize), RecomputeCost)| PlacedStage {
        start,
        end,
        recompute: recompute.recompute,
    };
    ranges.iter().zip(recompute_choices).map(stage).collect()
}

type StageCosts = HashMap<(usize, usize, usize), StageCost>;
