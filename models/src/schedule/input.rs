//! Passes of an input layer that is split over all pipeline ranks.

use super::generate::pass;
use super::run::{Run, Timed};
use super::{Pass, PassKind, PassTimes, Schedule, ScheduleError};

impl Schedule {
    /// The schedule with passes of the input layer on every pipeline rank. `IF` looks up a
    /// micro-batch's tokens ahead of the first stage's forward, which takes the sum over all
    /// pipeline ranks. `IB` adds the gradient of the rows, which the first stage's backward
    /// broadcasts, to the pipeline rank's own (Vocabulary Parallelism, arXiv 2411.05288, appendix
    /// C).
    ///
    /// `IF` comes when the first stage begins the forward two before its own, so that its sum has
    /// one of that stage's intervals and at most two micro-batches' rows wait there. `IB` comes
    /// when the first stage has ended the next backward, so that the broadcast has as long and at
    /// most two gradients wait. A run with `times` gives these moments. All pipeline ranks then
    /// have the same order of micro-batches, and the order of other passes stays.
    ///
    /// # Errors
    /// The schedule has no vocabulary passes, a time is negative or not finite, or the order cannot
    /// run.
    pub fn with_input_passes(self, times: PassTimes) -> Result<Self, ScheduleError> {
        times.check()?;
        if self.vocab.is_none() {
            return Err(ScheduleError::NoInputPasses);
        }
        let run = Run::new(&self, times.without_empty())?;
        let extra = self.input_passes(&run);
        let orders = self.passes.iter().zip(&self.pairs).zip(&run.ranks);
        let orders = orders.map(|((order, pairs), own)| merged(order, pairs, own, &extra));
        let (passes, pairs) = orders.unzip();
        Ok(Self { passes, pairs, ..self })
    }

    /// All passes of the input layer in the order of their times.
    fn input_passes(&self, run: &Run) -> Vec<Extra> {
        let of_first = |backward: bool| {
            let here = move |rank: usize, timed: &Timed| {
                let is_backward = match timed.pass.kind {
                    PassKind::F => false,
                    PassKind::B | PassKind::BW => true,
                    _ => return false,
                };
                self.stage_of(rank, usize::from(timed.pass.chunk)) == 0 && is_backward == backward
            };
            let all = run.ranks.iter().enumerate();
            all.flat_map(move |(d, own)| own.iter().filter(move |timed| here(d, timed)))
                .copied()
                .collect::<Vec<Timed>>()
        };
        let (forwards, backwards) = (of_first(false), of_first(true));
        let again = |kind: PassKind, of: &Timed| pass(kind, of.pass.micro_batch as usize, 0);
        let look_up = |(n, timed): (usize, &Timed)| {
            let from =
                n.checked_sub(LOOK_UPS_AHEAD).map_or(BEFORE_ALL, |before| forwards[before].start);
            Extra { from, pass: again(PassKind::IF, timed) }
        };
        let add = |(n, timed): (usize, &Timed)| {
            let from = backwards.get(n + BEHIND).unwrap_or(timed).end;
            Extra { from, pass: again(PassKind::IB, timed) }
        };
        let adds = backwards.iter().enumerate().map(add);
        let mut extra: Vec<_> = adds.chain(forwards.iter().enumerate().map(look_up)).collect();
        // Stable: of passes at the same time `IB` comes first, and each kind keeps the order of
        // micro-batches.
        extra.sort_by(|one, other| one.from.total_cmp(&other.from));
        extra
    }
}

/// Forwards of the first stage by which an `IF` comes before its own: it follows the forward that
/// many micro-batches before.
pub const LOOK_UPS_AHEAD: usize = 2;

/// Backwards of the first stage by which an `IB` comes after its own.
const BEHIND: usize = 1;

/// Before the first pass.
const BEFORE_ALL: f64 = -1.0;

/// A pass of the input layer.
#[derive(Clone, Copy)]
struct Extra {
    /// Start (`IF`) or end (`IB`) of the first stage's pass that it follows.
    from: f64,
    pass: Pass,
}

impl Extra {
    /// Whether it comes before a pass that starts then.
    fn comes_before(&self, start: f64) -> bool {
        self.from < start || (self.from == start && self.pass.kind == PassKind::IB)
    }
}

/// An order with `extra` passes merged in, each as early as it may come, and its pairs.
fn merged(order: &[Pass], pairs: &[u32], own: &[Timed], extra: &[Extra]) -> (Vec<Pass>, Vec<u32>) {
    let (mut passes, mut paired) = (Vec::with_capacity(order.len() + extra.len()), Vec::new());
    let mut extra = extra.iter().peekable();
    for (n, timed) in own.iter().enumerate() {
        // Both of a pair start at the same time, so that nothing comes between them.
        while let Some(more) = extra.next_if(|more| more.comes_before(timed.start)) {
            passes.push(more.pass);
        }
        if pairs.binary_search(&(n as u32)).is_ok() {
            paired.push(passes.len() as u32);
        }
        passes.push(timed.pass);
    }
    passes.extend(extra.map(|more| more.pass));
    (passes, paired)
}
