//! The partition problem with one chunk per pipeline rank, without the columns that a bound prunes.

use crate::bounds::cuts::{OpenCuts, PartitionBound};
use crate::bounds::pipeline_spec::PipelineSpec;
use crate::bounds::states::StateView;
use crate::bounds::workload::MicroBatchCost;
use crate::partition::{Column, Problem};
use crate::pricing::Configuration;
use rustc_hash::FxHashMap as HashMap;

impl Configuration<'_> {
    /// The partition problem with one chunk per rank. Columns that a bound proves to take
    /// `cutoff_s` or more are left out; `None` where no placement remains.
    ///
    /// Of each layer range only the fastest recompute split that fits is kept: a longer backward
    /// pass never shortens the iteration, and the split affects the memory of no other stage.
    pub fn problem(&self, cutoff_s: f64, ignore_memory: bool) -> Option<Problem> {
        let budget = if ignore_memory { f64::INFINITY } else { self.budget_bytes() };
        let cuts = self.cuts(cutoff_s, budget)?;
        let stages = cuts.ranges.iter().enumerate();
        let columns = stages.map(|(stage, ranges)| self.free_columns(stage, ranges, budget));
        let mut problem = self.problem_of(columns.collect());
        problem.budget_bytes.fill(budget);
        problem.columns.iter().all(|columns| !columns.is_empty()).then_some(problem)
    }

    /// The layer ranges of one chunk per rank that may have passes below `cutoff_s`.
    fn cuts(&self, cutoff_s: f64, budget_bytes: f64) -> Option<OpenCuts> {
        let d = &self.decisions;
        let spec = PipelineSpec::new(self.cache, d, &self.layer_costs);
        let state = StateView::new(self.cache, d, &self.layer_costs.params);
        let plain = MicroBatchCost::of(self.cache, d, &self.layer_costs);
        let work = state.added_to(&plain, &spec);
        // Another order of summation must not hide what lies just below the cutoff.
        let partition_bound =
            PartitionBound::new(&spec, &work, &state, &self.cache.layers, budget_bytes);
        partition_bound.with_generated_order(self.cache).solve(cutoff_s * (1.0 + 1e-9))
    }

    /// One column for each range that fits with some recompute split. Where all layers are of one
    /// kind only their count matters, and ranges start at 0. Ranges with as many layers of each
    /// kind cost the same.
    fn free_columns(&self, stage: usize, ranges: &[(usize, usize)], budget: f64) -> Vec<Column> {
        let mut ranges = ranges.to_vec();
        if self.cache.layers.is_uniform() {
            ranges.iter_mut().for_each(|range| *range = (0, range.1 - range.0));
        }
        ranges.sort_unstable();
        ranges.dedup();
        let mut known: HashMap<Vec<usize>, Option<Column>> = HashMap::default();
        let column = |(start, end)| {
            let counts = self.cache.layers.counts(start, end);
            let of = || self.free_column(stage, (start, end), budget);
            let column = known.entry(counts).or_insert_with(of).as_ref()?;
            Some(Column { start, end, ..*column })
        };
        ranges.into_iter().filter_map(column).collect()
    }

    fn free_column(&self, stage: usize, range: (usize, usize), budget: f64) -> Option<Column> {
        let cost = self.stage(stage, range.0, range.1);
        if budget.is_finite() && !self.fits_host(self.stage_host_bytes(stage, &cost)) {
            return None;
        }
        let recompute = self.fastest_recompute(stage, range, &cost, budget)?;
        Some(self.column(range, 0, &cost, &recompute))
    }
}
