//! Placement of vocabulary passes by a configuration's own times.
//!
//! A search compares configurations with one order for each schedule and its counts. That order
//! suits any times, and the input layer's passes are part of `T`. A configuration that a search has
//! found, or that is priced by itself, has its vocabulary passes placed again by the mean times of
//! its passes, transfers and barriers. The input layer then has passes of its own. This is the
//! order that runs.

use crate::partition::{Problem, Scratch};
use crate::pricing::Configuration;
use crate::pricing::cost_cache::CostCache;
use crate::pricing::priced::{Placed, Priced};
use crate::request::Task;
use crate::search::Found;
use models::decisions::{Decisions, Vocab};
use models::schedule::{PassRatios, PassTimes, ScheduleName};

/// Most micro-batches times stages of pipelines whose passes are placed again. More take most of a
/// second, and leave hardly a bubble to fill.
const MOST_PASSES: u64 = 1 << 15;
/// Most of them where other schedules are tried, too: an order then takes a few milliseconds.
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
    let few = passes(&decisions) <= FEW_PASSES;
    let others = if few { others_on_the_same_stages(task, &decisions) } else { vec![] };
    let others = others.into_iter();
    let others = others.take_while(|_| !task.until.is_over());
    let timed = others.filter_map(|d| by_own_times(&cache, &d, &placed, &priced));
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
/// fit are considered. `None` without vocabulary passes, for interlaced ones, whose places are
/// fixed, and for more than [`MOST_PASSES`].
pub fn by_own_times(
    cache: &CostCache<'_>,
    decisions: &Decisions,
    placed: &Placed,
    now: &Priced,
) -> Option<(Decisions, Priced)> {
    let placed_freely = decisions.vocab.over_pipeline() && decisions.vocab != Vocab::Interlaced;
    if !placed_freely || passes(decisions) > MOST_PASSES {
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
    let problem = configuration.problem_of(configuration.columns_of_placed(placed));
    let own = PassRatios::nearest(mean_times(&configuration, &problem));
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

/// Mean times over pipeline ranks.
fn mean_times(configuration: &Configuration<'_>, problem: &Problem) -> PassTimes {
    let columns = || problem.columns.iter().filter_map(|columns| columns.first());
    let (ranks, fixed) = (configuration.ranks() as f64, &problem.fixed);
    let vocab = &fixed.vocab;
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    PassTimes {
        forward: columns().map(|column| column.forward_s).sum::<f64>() / ranks,
        backward: columns().map(|column| column.backward_s).sum::<f64>() / ranks,
        weight: columns().map(|column| column.weight_s).sum::<f64>() / ranks,
        vocab: [&vocab.first, &vocab.middle, &vocab.last].map(|times| mean(times)),
        link: configuration.mean_link_s(),
        broadcast: vocab.broadcast_s,
        barriers: [vocab.after_first_s, vocab.after_middle_s, vocab.after_last_s],
    }
}
