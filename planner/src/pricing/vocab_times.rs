//! Places of vocabulary passes by a configuration's own times.
//!
//! Where vocabulary passes lie best depends on how long they and the other passes take. A
//! configuration that is priced has them placed by the mean times of its passes, transfers and
//! barriers, and the input layer has passes of its own. This is the order that runs.

use super::{Column, Configuration};
use crate::pricing::listed_cuts::{even_counts, to_ranges};
use models::decisions::{Decisions, Vocab};
use models::schedule::{PassRatios, PassTimes};

/// Most micro-batches times stages of pipelines whose vocabulary passes are placed by their own
/// times. More take most of a second, and leave hardly a bubble to fill.
const MOST_PASSES: u64 = 1 << 15;

/// Whether vocabulary passes are placed by a configuration's own times: not interlaced ones, whose
/// places are fixed.
pub fn placed_by_times(d: &Decisions) -> bool {
    let placed_freely = d.vocab.over_pipeline() && d.vocab != Vocab::Interlaced;
    placed_freely && d.pp * d.vpp * d.micro_batches <= MOST_PASSES
}

impl Configuration<'_> {
    /// The configuration with its vocabulary passes placed by its own times, where they are
    /// ([`placed_by_times`]). Mean times hardly depend on the partition: an even one is taken.
    #[must_use]
    pub fn in_own_times(self) -> Self {
        let times = self.own_times();
        match times {
            Some(_) => {
                let decisions = Decisions { pass_times: times, ..self.decisions.clone() };
                Self::new(self.cache, decisions).unwrap_or(self)
            }
            None => self,
        }
    }

    fn own_times(&self) -> Option<PassRatios> {
        if !placed_by_times(&self.decisions) {
            return None;
        }
        // The input layer's passes are apart as soon as there are times.
        let pass_times = PassRatios::nearest(PassTimes::default());
        let decisions = Decisions { pass_times, ..self.decisions.clone() };
        let apart = Configuration::new(self.cache, decisions).ok()?;
        let ranges = to_ranges(even_counts(self.cache.layers.len(), self.stages()));
        let column = |(stage, range): (usize, (usize, usize))| {
            let cost = apart.stage(stage, range.0, range.1);
            apart.column(range, 0, &cost, &apart.least_recompute(range.0, range.1))
        };
        let columns: Vec<Column> = ranges.into_iter().enumerate().map(column).collect();
        PassRatios::nearest(apart.mean_times(&columns))
    }

    /// Mean times of the passes of a pipeline rank, with these columns by stage.
    pub fn mean_times(&self, columns: &[Column]) -> PassTimes {
        let ranks = self.ranks() as f64;
        let vocab = self.passes.as_ref().map(|passes| passes.durations.clone()).unwrap_or_default();
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
        PassTimes {
            forward: columns.iter().map(|column| column.forward_s).sum::<f64>() / ranks,
            backward: columns.iter().map(|column| column.backward_s).sum::<f64>() / ranks,
            weight: columns.iter().map(|column| column.weight_s).sum::<f64>() / ranks,
            vocab: [&vocab.first, &vocab.middle, &vocab.last].map(|times| mean(times)),
            link: self.mean_link_s(),
            broadcast: vocab.broadcast_s,
            barriers: [vocab.after_first_s, vocab.after_middle_s, vocab.after_last_s],
        }
    }
}
