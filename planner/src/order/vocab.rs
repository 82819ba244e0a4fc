//! Vocabulary passes where a configuration's own times would have them.
//!
//! A search compares configurations in an order that bears any times, one for each schedule and its counts, in which
//! the input layer's passes are part of `T`. What it finds, and what is priced by itself, has its vocabulary passes
//! placed once more, by the mean times of its passes, transfers and barriers, and those of the input layer in
//! places of their own: the order that runs.

use crate::partition::{Problem, Scratch};
use crate::pricing::Configuration;
use crate::pricing::cost_cache::CostCache;
use crate::pricing::priced::{Placed, Priced};
use crate::request::Task;
use crate::search::Found;
use models::decisions::{Decisions, Vocab};
use models::schedule::{PassRatios, PassTimes};

/// What a search found, in the order for its own times.
pub fn timed(task: &Task<'_>, found: Found) -> Found {
    let cache = CostCache::new(task.model, task.cluster, task.gpus);
    let Found { decisions, placed, priced } = found;
    let (decisions, priced) = match by_own_times(&cache, &decisions, &placed, &priced) {
        Some(timed) => timed,
        None => (decisions, priced),
    };
    Found { decisions, placed, priced }
}

/// The same decisions with vocabulary passes placed by this placement's times, or by usual ones where that is faster
/// or alone fits; `now` says whether any would have to. `None` without vocabulary passes, and for interlaced
/// ones, which lie where they lie.
pub fn by_own_times(
    cache: &CostCache<'_>,
    decisions: &Decisions,
    placed: &Placed,
    now: &Priced,
) -> Option<(Decisions, Priced)> {
    if !decisions.vocab.over_pipeline() || decisions.vocab == Vocab::Interlaced {
        return None;
    }
    let priced = |pass_times: PassRatios| {
        let decisions = Decisions { pass_times: Some(pass_times), ..decisions.clone() };
        let case = Configuration::new(cache, decisions).ok()?;
        let priced = case.price(placed, &mut Scratch::default());
        (priced.fits || !now.fits).then(|| (case.decisions.clone(), priced))
    };
    let usual = PassRatios::nearest(PassTimes::default())?;
    let apart = Decisions { pass_times: Some(usual), ..decisions.clone() };
    let case = Configuration::new(cache, apart).ok()?;
    let problem = case.problem_of(case.columns_of_placed(placed));
    let own = PassRatios::nearest(mean_times(&case, &problem));
    // Stages are not all as long as their mean.
    let both = own.into_iter().chain([usual]).filter_map(priced);
    both.min_by(|(_, one), (_, other)| one.iteration_s.total_cmp(&other.iteration_s))
}

/// Means over devices.
fn mean_times(case: &Configuration<'_>, problem: &Problem) -> PassTimes {
    let columns = || problem.columns.iter().filter_map(|columns| columns.first());
    let (devices, fixed) = (case.devices() as f64, &problem.fixed);
    let vocab = &fixed.vocab;
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    PassTimes {
        forward: columns().map(|column| column.forward_s).sum::<f64>() / devices,
        backward: columns().map(|column| column.backward_s).sum::<f64>() / devices,
        weight: columns().map(|column| column.weight_s).sum::<f64>() / devices,
        vocab: [&vocab.first, &vocab.middle, &vocab.last].map(|times| mean(times)),
        link: case.mean_link_s(),
        broadcast: vocab.broadcast_s,
        barriers: [vocab.after_first_s, vocab.after_middle_s, vocab.after_last_s],
    }
}
