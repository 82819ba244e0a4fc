//! A lower bound on every order that keeps the memory limit.

use super::super::StageLayout;
use super::super::generate::Counts;
use super::{AutoCosts, Lengths, change};
use crate::schedule::PassKind;

/// The lower bound. Before its first backward a pipeline rank runs forwards alone, no more than
/// memory holds. That backward waits until a micro-batch has gone from the pipeline rank to the
/// last stage and back.
pub(super) struct Floor {
    stage: f64,
    makespan: f64,
}

impl Floor {
    /// The bound for stages laid out as `layout`, with `costs` of a chunk.
    pub fn new(counts: Counts, layout: StageLayout, costs: AutoCosts) -> Self {
        let Counts { ranks, micro_batches, chunks } = counts;
        let AutoCosts { forward, backward, weight, latency, limit, .. } = costs;
        let stages = ranks * chunks;
        let held = limit * (1.0 + 1e-9) / change(PassKind::F, costs);
        let forwards = held.floor().min((micro_batches * chunks) as f64);
        let work = (micro_batches * chunks) as f64 * (forward + backward + weight);
        let crosses =
            |stage: &usize| layout.rank_of(ranks, *stage) != layout.rank_of(ranks, stage + 1);
        let links = |from: usize, to: usize| (from..to).filter(crosses).count() as f64 * latency;
        let mut floor = Self { stage: 0.0, makespan: 0.0 };
        for rank in 0..ranks {
            let stage_of = |chunk: usize| layout.stage_of(ranks, rank, chunk);
            let (first, back) = (stage_of(0), stage_of(chunks - 1));
            let down = (stages - first) as f64 * forward + links(first, stages - 1);
            let up = (stages - 1 - back) as f64 * backward + links(back, stages - 1);
            let stage = work + (down + up - forwards * forward).max(0.0);
            let begin = first as f64 * forward + links(0, first);
            floor.stage = floor.stage.max(stage);
            floor.makespan = floor.makespan.max(begin + stage);
        }
        floor
    }

    /// Whether an order meets the bound, in its longest stage and in its makespan.
    pub fn is_met(&self, (stage, makespan, _): Lengths) -> bool {
        let met = |length: f64, floor: f64| length <= floor * (1.0 + 1e-12);
        met(stage, self.stage) && met(makespan, self.makespan)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Frame, most_held, with_ties};
    use super::super::{line, vee};
    use super::*;
    use crate::schedule::{Schedule, ScheduleName};

    /// Some costs, different ones for each seed.
    fn costs(seed: usize) -> AutoCosts {
        let value = |n: usize| 0.2 + ((seed * 7919 + n * 104_729) % 997) as f64 / 500.0;
        let latency = if seed.is_multiple_of(3) { 0.0 } else { 0.2 * value(3) };
        AutoCosts {
            forward: value(0),
            backward: value(1),
            weight: value(2),
            latency,
            ..AutoCosts::even(1)
        }
    }

    /// Whether an order is shorter than the bound for the memory it takes.
    fn check(order: &Schedule, costs: AutoCosts) -> bool {
        let Schedule { ranks, micro_batches, chunks, layout, .. } = *order;
        let counts = Counts { ranks, micro_batches, chunks };
        let part = costs.of_chunk(chunks);
        let part = AutoCosts { limit: most_held(order, part), ..part };
        let lengths = Frame::new(order, part).unwrap().lengths();
        let floor = Floor::new(counts, layout, part);
        let close = 1.0 - 1e-9;
        assert!(
            lengths.0 >= floor.stage * close,
            "{counts:?} {costs:?}: {lengths:?} {}",
            floor.stage
        );
        assert!(lengths.1 >= floor.makespan * close, "{counts:?}: {lengths:?} {}", floor.makespan);
        floor.is_met(lengths)
    }

    #[test]
    fn no_order_is_shorter() {
        use ScheduleName::{VHalf, VMin, ZbH1, ZbH2, ZbV};
        let (mut compared, mut met) = (0, 0);
        for p in 1..=6 {
            for m in (1..=12).step_by(1 + p % 3) {
                for (name, chunks) in [(ZbH1, 1), (ZbH2, 1), (ZbV, 2), (VHalf, 2), (VMin, 2)] {
                    let Ok(order) = name.build(p, m, chunks) else { continue };
                    met += u32::from(check(&order, costs(compared)));
                    met += u32::from(check(&order, AutoCosts::even(p)));
                    compared += 2;
                }
                for v in [1, 2] {
                    let counts = Counts::new(p, m, v).unwrap();
                    let limit = 1.0 + (compared % (2 * p)) as f64;
                    let part = AutoCosts { limit, ..costs(compared) }.of_chunk(v);
                    let found: Vec<_> = match v {
                        1 => with_ties(&line::Taste::ALL)
                            .filter_map(|t| line::order(counts, part, t))
                            .collect(),
                        _ => with_ties(&vee::Taste::ALL)
                            .filter_map(|t| vee::order(counts, part, t))
                            .collect(),
                    };
                    for passes in found.into_iter().step_by(7) {
                        let order = counts.schedule(ScheduleName::ZbAuto.layout(v), passes);
                        met += u32::from(check(&order, costs(compared)));
                        compared += 1;
                    }
                }
            }
        }
        assert!(compared > 500 && met > 50, "{met} of {compared}");
    }
}
