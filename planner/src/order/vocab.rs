//! The last choice of an order with vocabulary passes.
//!
//! A search places them by the mean times of each configuration ([`crate::pricing::vocab_times`]).
//! What it found, or what is priced by itself, has them placed again by the times of its own
//! partition.

use crate::partition::{Column, Scratch};
use crate::pricing::Configuration;
use crate::pricing::cost_cache::CostCache;
use crate::pricing::priced::Priced;
use crate::pricing::vocab_times::placed_by_times;
use crate::request::Task;
use crate::search::Found;
use models::decisions::Decisions;
use models::schedule::{PassRatios, PassTimes};

/// The result of a search, with vocabulary passes placed by the times of its own partition, or by
/// usual ones, where that is faster.
pub fn timed(task: &Task<'_>, found: Found) -> Found {
    if !placed_by_times(&found.decisions) {
        return found;
    }
    // An order without times has the input layer's passes in others.
    let known = found.decisions.pass_times.is_some();
    let known = known.then(|| (found.decisions.clone(), found.priced.clone()));
    let candidates = in_other_times(task, &found).into_iter().chain(known);
    let fastest = candidates.min_by(|a, b| a.1.iteration_s.total_cmp(&b.1.iteration_s));
    match fastest {
        Some((decisions, priced)) => Found { decisions, priced, ..found },
        None => found,
    }
}

/// The configuration with vocabulary passes placed by its partition's times and by usual ones.
/// Where it fits, so do these.
fn in_other_times(task: &Task<'_>, found: &Found) -> Vec<(Decisions, Priced)> {
    let cache = || CostCache::new(task.model, task.cluster, task.gpus);
    let with = |times| Decisions { pass_times: Some(times), ..found.decisions.clone() };
    let priced = |times: PassRatios| {
        let cache = cache();
        let configuration = Configuration::new(&cache, with(times)).ok()?;
        let priced = configuration.price(&found.placed, &mut Scratch::default());
        (priced.fits || !found.priced.fits).then_some((configuration.decisions, priced))
    };
    let Some(usual) = PassRatios::nearest(PassTimes::default()) else { return vec![] };
    let cache = cache();
    let Ok(configuration) = Configuration::new(&cache, with(usual)) else { return vec![] };
    let columns = configuration.columns_of_placed(&found.placed);
    let columns: Vec<Column> = columns.iter().filter_map(|stage| stage.first()).copied().collect();
    let own = PassRatios::nearest(configuration.mean_times(&columns));
    // Stages differ from their mean, so placement by mean times is not always the faster. An order
    // of many passes takes a tenth of a second to make.
    let both = std::thread::scope(|scope| {
        let by_own = scope.spawn(|| own.and_then(priced));
        let by_usual = priced(usual);
        [by_own.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), by_usual]
    });
    both.into_iter().flatten().collect()
}
