//! DualPipeV: DualPipe's overlap with one copy of the parameters, on stages that turn back.

use super::dualpipe::Part;
use super::generate::{Counts, Steps};
use super::{Schedule, ScheduleError, ScheduleName, StageLayout};

/// Half a DualPipe of `2p` pipeline ranks, up to its middle, where the far direction is the way
/// back of the same micro-batches: pipeline rank `i` holds stages `i` and `2p − 1 − i` (DeepSeek's
/// DualPipe repository; torch's `ScheduleDualPipeV`).
///
/// With chunk times `f`, `b`, `w` and a pair as long as its parts the bubble is
/// `(p − 1)(f&b + b + w − 3w)`, exact for `f = b` and `w ≤ f`; every pipeline rank holds `2p + 1`
/// chunks.
///
/// # Errors
/// `m < 2p`.
pub fn dualpipe_v(ranks: usize, micro_batches: usize) -> Result<Schedule, ScheduleError> {
    ScheduleName::DualPipeV.check(ranks, micro_batches, 2)?;
    let counts = Counts::new(ranks, micro_batches, 2)?;
    let order = |rank: usize| {
        let main = micro_batches + rank + 1 - 2 * ranks;
        Part { half: ranks, from_end: rank, main, near: 0 }.steps()
    };
    let orders: Vec<Steps> = (0..ranks).map(order).collect();
    let pairs = orders.iter().map(|steps| steps.pairs.clone()).collect();
    let passes = orders.into_iter().map(|steps| steps.order).collect();
    Ok(Schedule { pairs, ..counts.schedule(StageLayout::V, passes) })
}
