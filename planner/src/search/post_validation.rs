//! Iterations without a barrier at their end (post-validation).
//!
//! The bounds of [`super::queue`] hold for iterations that end at a barrier. So the same space is
//! searched with one, and the fastest configuration of each tp, pp and schedule is then priced
//! without it. The gap is that to the load of the layers, which some rank has with or without a
//! barrier.

use super::queue;
use super::{Candidate, Found, Outcome, Progress};
use crate::pricing::cost_cache::CostCache;
use crate::request::Task;
use crate::request::restrictions::{Choice, Restrictions};
use models::decisions::{Decisions, Vocab};
use models::plan::Proof;
use models::schedule::ScheduleName;

/// Runs the search.
pub(super) fn run(task: &Task<'_>, progress: Progress<'_>) -> Outcome {
    let restrictions = with_barrier(task.restrictions);
    let cutoff_s = f64::INFINITY;
    let with_barrier =
        Task { restrictions: &restrictions, cutoff_s, every_cut_work: 0, ..task.clone() };
    let Outcome { best, passed, proof, effort } = queue::run(&with_barrier, progress);
    let cache = CostCache::new(task.model, task.cluster, task.gpus);
    let nothing_fits = best.is_none() && proof.searched_gap == 0.0;
    let without_barrier = |Candidate { decisions, placed, .. }| {
        Found::new(&cache, Decisions { post_validation: true, ..decisions }, placed)
    };
    let counts = |found: &Found| {
        let fits = found.priced.fits || task.ignore_memory;
        fits && found.priced.iteration_s < task.cutoff_s
    };
    let all = best.map(Candidate::from).into_iter().chain(passed);
    let mut found: Vec<Found> = all.filter_map(without_barrier).filter(counts).collect();
    found.sort_by(|a, b| a.priced.iteration_s.total_cmp(&b.priced.iteration_s));
    let best_s = found.first().map_or(task.cutoff_s, |best| best.priced.iteration_s);
    let gap = if nothing_fits { 0.0 } else { (1.0 - queue::least_load_s(task) / best_s).max(0.0) };
    let proof = Proof { gap, searched_gap: gap, proven_optimal: gap == 0.0, ..proof };
    let mut found = found.into_iter();
    let best = found.next();
    Outcome { best, passed: found.map(Candidate::from).collect(), proof, effort }
}

/// The same space with a barrier: schedules and vocabulary placements that allow none.
fn with_barrier(asked: &Restrictions) -> Restrictions {
    let mut schedules = asked.schedule.among(&ScheduleName::ALL);
    schedules.retain(|schedule| schedule.splits_backward());
    let mut vocabs = asked.vocab.among(Vocab::ALL);
    vocabs.retain(|vocab| !vocab.over_pipeline());
    Restrictions {
        schedule: Choice::of(&schedules),
        vocab: Choice::of(&vocabs),
        post_validation: Choice::default(),
        ..asked.clone()
    }
}
