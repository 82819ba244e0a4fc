//! DualPipe: both ends of the pipeline feed micro-batches, and forwards hide behind backwards.

use super::generate::{Counts, Steps};
use super::{Pass, Schedule, ScheduleError, ScheduleName, StageLayout};

/// Bidirectional: every pipeline rank holds two stages' parameters and runs half the micro-batches
/// in either direction. In the steady state a forward of one direction runs together with a whole
/// backward of the other (DeepSeek-V3, arXiv 2412.19437, section 3.2.1).
///
/// With a pair as long as its parts the bubble is `(p/2 − 1)(F&B + B + W − 3W)`, exact for `F = B`
/// and `W ≤ F`; every pipeline rank holds `p + 1` micro-batches.
///
/// # Errors
/// `p` or `m` is odd, or `m < 2p`.
pub fn dualpipe(ranks: usize, micro_batches: usize) -> Result<Schedule, ScheduleError> {
    ScheduleName::DualPipe.check(ranks, micro_batches, 2)?;
    let counts = Counts::new(ranks, micro_batches, 2)?;
    let half = ranks / 2;
    let order = |rank: usize| {
        let (from_end, near) = if rank < half { (rank, 0) } else { (ranks - 1 - rank, 1) };
        Part { half, from_end, main: micro_batches / 2 - ranks + from_end + 1, near }.steps()
    };
    let orders: Vec<Steps> = (0..ranks).map(order).collect();
    let pairs = orders.iter().map(|steps| steps.pairs.clone()).collect();
    let mut passes: Vec<Vec<Pass>> = orders.into_iter().map(|steps| steps.order).collect();
    for pass in passes.iter_mut().flatten().filter(|pass| pass.chunk == 1) {
        pass.micro_batch += (micro_batches / 2) as u32;
    }
    Ok(Schedule { pairs, ..counts.schedule(StageLayout::Bidirectional, passes) })
}

/// A pipeline rank's part; [`super::dualpipe_v`] has the same with other counts.
pub(super) struct Part {
    /// Pipeline ranks between an end of the pipeline and its middle, both counted.
    pub half: usize,
    /// Pipeline ranks between this one and the nearer end.
    pub from_end: usize,
    /// Rounds of the steady state.
    pub main: usize,
    /// The chunk whose micro-batches come from the nearer end.
    pub near: usize,
}

impl Part {
    /// The eight phases of the published implementation.
    pub fn steps(self) -> Steps {
        let mut steps = Steps::new();
        self.warm_up(&mut steps);
        self.steady(&mut steps);
        self.drain(&mut steps);
        self.cool_down(&mut steps);
        steps
    }

    fn is_middle(&self) -> bool {
        self.from_end + 1 == self.half
    }

    fn to_middle(&self) -> usize {
        self.half - self.from_end - 1
    }

    fn warm_up(&self, steps: &mut Steps) {
        let (near, far) = (self.near, 1 - self.near);
        for _ in 0..2 * self.to_middle() {
            steps.forward(near);
        }
        for _ in 0..=self.from_end {
            steps.forward(near);
            steps.forward(far);
        }
        for _ in 0..self.to_middle() {
            steps.backward(far);
            steps.weights(None);
            steps.forward(far);
        }
    }

    fn steady(&self, steps: &mut Steps) {
        for round in 0..self.main {
            // Run separately, the first two start the middle's backwards earlier.
            if round == 0 && self.is_middle() {
                steps.forward(self.near);
                steps.whole_backward(1 - self.near);
            } else {
                steps.pair(self.near);
            }
            steps.pair(1 - self.near);
        }
    }

    fn drain(&self, steps: &mut Steps) {
        for _ in 0..self.to_middle() {
            steps.whole_backward(1 - self.near);
            steps.pair(1 - self.near);
        }
    }

    /// The second half of the last backwards is split, so that the other pipeline ranks' last ones
    /// can start early.
    fn cool_down(&self, steps: &mut Steps) {
        let split_from =
            self.from_end.div_ceil(2) * 2 + usize::from(self.from_end.is_multiple_of(2));
        for n in 0..2 * (self.from_end + 1) {
            let chunk = if n % 2 == 0 { 1 - self.near } else { self.near };
            if n < split_from { steps.whole_backward(chunk) } else { steps.backward(chunk) }
        }
        for _ in 0..self.to_middle() {
            steps.weights(None);
            steps.backward(self.near);
        }
        while steps.weights(None) {}
    }
}
