//! The last choice of an order with vocabulary passes.
//!
//! A search places them by the mean times of each configuration ([`crate::pricing::vocab_times`]).
//! What it found, or what is priced by itself, has them placed again by the times of its own
//! partition, and is compared with other schedules on the same stages.

use crate::partition::{Column, Scratch};
use crate::pricing::Configuration;
use crate::pricing::cost_cache::CostCache;
use crate::pricing::priced::{Placed, Priced};
use crate::pricing::vocab_times::placed_by_times;
use crate::request::Task;
use crate::search::Found;
use models::decisions::Decisions;
use models::schedule::{PassRatios, PassTimes, ScheduleName};

/// Most micro-batches times stages where other schedules are tried, too: an order then takes a few
/// milliseconds.
const FEW_PASSES: u64 = 1 << 12;

/// The result of a search, with vocabulary passes placed by its own times. Schedules that are as
/// fast in the order for any times may differ then: those that can take its place are tried, too,
/// as long as there is time.
pub fn timed(task: &Task<'_>, found: Found) -> Found {
    let cache = CostCache::new(task.model, task.cluster, task.gpus);
    let Found { decisions, placed, priced } = found;
    let Some(own) = by_own_times(&cache, &decisions, &placed, &priced) else {
        return Found { decisions, placed, priced };
    };
    let known = decisions.pass_times.is_some().then(|| (decisions.clone(), priced.clone()));
    let few = passes(&decisions) <= FEW_PASSES;
    let others = if few { others_on_the_same_stages(task, &decisions) } else { vec![] };
    let others = others.into_iter();
    let others = others.take_while(|_| !task.until.is_over());
    let timed = others.filter_map(|d| by_own_times(&cache, &d, &placed, &priced)).chain(known);
    let (decisions, priced) = timed.fold(own, |best, other| {
        let faster = other.1.iteration_s < best.1.iteration_s;
        if faster && other.1.fits >= best.1.fits { other } else { best }
    });
    Found { decisions, placed, priced }
}

fn passes(d: &Decisions) -> u64 {
    d.pp * d.vpp * d.micro_batches
}

/// The decisions with every other allowed schedule that hosts vocabulary passes on the same stages.
fn others_on_the_same_stages(task: &Task<'_>, d: &Decisions) -> Vec<Decisions> {
    let (ranks, micro_batches, chunks) = (d.pp as usize, d.micro_batches as usize, d.vpp as usize);
    let hosts = |name: &ScheduleName| {
        *name != d.schedule
            && name.takes_vocab()
            && name.is_whole() == d.schedule.is_whole()
            && name.layout(chunks) == d.schedule.layout(chunks)
            && name.check(ranks, micro_batches, chunks).is_ok()
    };
    let all = task.restrictions.schedule.among(&ScheduleName::ALL).into_iter().filter(hosts);
    let all = all.map(|schedule| Decisions { schedule, ..d.clone() });
    all.filter(|d| task.space().runs(d)).collect()
}

/// The same decisions with vocabulary passes placed by this partition's times, or by default times
/// where those are faster or alone fit. `now` is the current price: where it fits, only orders that
/// fit are considered. `None` where they are not placed by times ([`placed_by_times`]).
pub fn by_own_times(
    cache: &CostCache<'_>,
    decisions: &Decisions,
    placed: &Placed,
    now: &Priced,
) -> Option<(Decisions, Priced)> {
    if !placed_by_times(decisions) {
        return None;
    }
    let (model, cluster, gpus) = (cache.model, cache.cluster, cache.gpus);
    let priced = |pass_times: PassRatios| {
        let cache = CostCache::new(model, cluster, gpus);
        let decisions = Decisions { pass_times: Some(pass_times), ..decisions.clone() };
        let configuration = Configuration::new(&cache, decisions).ok()?;
        let priced = configuration.price(placed, &mut Scratch::default());
        (priced.fits || !now.fits).then(|| (configuration.decisions.clone(), priced))
    };
    let default = PassRatios::nearest(PassTimes::default())?;
    let with_input_passes = Decisions { pass_times: Some(default), ..decisions.clone() };
    let configuration = Configuration::new(cache, with_input_passes).ok()?;
    let columns = configuration.columns_of_placed(placed);
    let columns: Vec<Column> = columns.iter().filter_map(|stage| stage.first()).copied().collect();
    let own = PassRatios::nearest(configuration.mean_times(&columns));
    // Stages differ from their mean, so placement by mean times is not always the faster. An order
    // of many passes takes a tenth of a second to make.
    let both = std::thread::scope(|scope| {
        let by_own = scope.spawn(|| own.and_then(priced));
        let by_default = priced(default);
        [by_own.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), by_default]
    });
    let candidates = both.into_iter().flatten();
    candidates.min_by(|(_, one), (_, other)| one.iteration_s.total_cmp(&other.iteration_s))
}
