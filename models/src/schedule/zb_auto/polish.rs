//! Weight gradients moved one place at a time, as long as that shortens something.

use super::super::{Pass, PassKind, Schedule, Work};
use super::{AutoCosts, Lengths, length, lengths, most_held};

/// Orders that are polished: the best may be at its end where the next best is not.
pub(super) const MOST: usize = 8;

/// Passes that may be run in all tries of one order together: a fraction of a second.
const MOST_RUN: usize = 1 << 19;

/// The schedule with weight gradients elsewhere, as far as that makes it better: a shorter longest stage
/// time, else a shorter makespan, else shorter stage times.
pub(super) fn polished(
    mut schedule: Schedule,
    mut best: Lengths,
    costs: AutoCosts,
) -> (Lengths, Schedule) {
    let passes: usize = schedule.passes.iter().map(Vec::len).sum();
    let mut tries = MOST_RUN / passes.max(1);
    let floor = busiest(&schedule, costs);
    // Without idling there is nothing to shorten but the makespan.
    let mut improved = best.0 > floor * (1.0 + 1e-9);
    while improved {
        improved = false;
        for device in 0..schedule.devices {
            for place in 1..schedule.passes[device].len() {
                if tries == 0 {
                    return (best, schedule);
                }
                if moves_weights(&schedule, device, place) {
                    tries -= 1;
                    schedule.passes[device].swap(place - 1, place);
                    match better(&schedule, best, costs) {
                        Some(lengths) => (best, improved) = (lengths, true),
                        None => schedule.passes[device].swap(place - 1, place),
                    }
                }
            }
        }
    }
    (best, schedule)
}

/// The longest any device works.
fn busiest(schedule: &Schedule, costs: AutoCosts) -> f64 {
    let device = |order: &Vec<Pass>| order.iter().map(|&p| length(Work::Pass(p), costs)).sum();
    schedule.passes.iter().map(device).fold(0.0, f64::max)
}

/// Whether of a pass and the one before it just one is weight gradients.
fn moves_weights(schedule: &Schedule, device: usize, place: usize) -> bool {
    let order = &schedule.passes[device];
    let is_weights = |place: usize| order[place].kind == PassKind::W;
    is_weights(place - 1) != is_weights(place)
}

/// Its lengths, if the schedule runs, fits and is better.
fn better(schedule: &Schedule, best: Lengths, costs: AutoCosts) -> Option<Lengths> {
    if most_held(schedule, costs) > costs.limit * (1.0 + 1e-9) {
        return None;
    }
    let found = lengths(schedule, costs).ok()?;
    let shorter = |ours: f64, theirs: f64| ours < theirs * (1.0 - 1e-12);
    let (a, b) = (found, best);
    let order = [(a.0, b.0), (a.1, b.1), (a.2, b.2)];
    let decided =
        order.into_iter().find(|&(ours, theirs)| shorter(ours, theirs) || shorter(theirs, ours));
    decided.is_some_and(|(ours, theirs)| ours < theirs).then_some(found)
}
