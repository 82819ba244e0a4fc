//! Vocabulary passes where a configuration's own times would have them.
//!
//! A search compares configurations in an order that bears any times, one for each schedule and its counts. What it
//! finds, and what is priced by itself, has its vocabulary passes placed once more, by the mean times of its
//! passes, transfers and barriers, and keeps the order that is faster.

use crate::case::Case;
use crate::case::ground::Ground;
use crate::case::priced::{Placed, Priced};
use crate::placement::{Problem, Scratch};
use crate::search::{Found, Task};
use models::decisions::{Decisions, Vocab};
use models::schedule::{PassRatios, PassTimes};

/// What a search found, in the order for its own times where that is faster.
pub fn timed(task: &Task<'_>, found: Found) -> Found {
    let ground = Ground::new(task.model, task.cluster, task.gpus);
    let Found { decisions, placed, priced } = found;
    let (decisions, priced) = match faster(&ground, &decisions, &placed, &priced) {
        Some(faster) => faster,
        None => (decisions, priced),
    };
    Found { decisions, placed, priced }
}

/// The same decisions with vocabulary passes placed by this placement's times, if that is faster than `now` and
/// fits where that does.
pub fn faster(
    ground: &Ground<'_>,
    decisions: &Decisions,
    placed: &Placed,
    now: &Priced,
) -> Option<(Decisions, Priced)> {
    // Interlaced passes lie where they lie.
    if !decisions.vocab.over_pipeline() || decisions.vocab == Vocab::Interlaced {
        return None;
    }
    let case = Case::new(ground, decisions.clone()).ok()?;
    let problem = case.problem_of(case.columns_of_placed(placed));
    let pass_times = PassRatios::nearest(mean_times(&problem, decisions));
    let case = Case::new(ground, Decisions { pass_times, ..decisions.clone() }).ok()?;
    let priced = case.price(placed, &mut Scratch::default());
    // The same order by another name is not faster.
    let gains = priced.iteration_s < now.iteration_s * (1.0 - 1e-9);
    (gains && (priced.fits || !now.fits)).then(|| (case.decisions.clone(), priced))
}

/// Means over devices.
fn mean_times(problem: &Problem, d: &Decisions) -> PassTimes {
    let columns = || problem.columns.iter().filter_map(|columns| columns.first());
    let (devices, fixed) = (d.pp as f64, &problem.fixed);
    let vocab = &fixed.vocab;
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    PassTimes {
        forward: columns().map(|column| column.forward_s).sum::<f64>() / devices,
        backward: columns().map(|column| column.backward_s).sum::<f64>() / devices,
        weight: columns().map(|column| column.weight_s).sum::<f64>() / devices,
        vocab: [&vocab.first, &vocab.middle, &vocab.last].map(|times| mean(times)),
        link: mean(&fixed.link_s),
        broadcast: vocab.broadcast_s,
        barriers: [vocab.after_first_s, vocab.after_middle_s, vocab.after_last_s],
    }
}
