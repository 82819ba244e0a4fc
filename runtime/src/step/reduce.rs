//! Gradients of data-parallel replicas, summed: in buckets, while the backward pass goes on.

use crate::comm::{CommError, Communicator, Op};
use crate::device::{Device, DeviceGroup, DeviceRequest, Space};
use crate::state::params::{Inventory, Store};
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

/// When replicas' gradients are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// All at once, behind the last pass.
    AtEnd,
    /// Each parameter as soon as it is complete.
    PerParameter,
    /// As soon as so many bytes are complete.
    Buckets {
        /// Bytes.
        bytes: usize,
    },
}

impl Default for Reduction {
    /// Buckets of 25 MB (PyTorch DDP; Li et al. 2020, section 5.3).
    fn default() -> Self {
        Self::Buckets { bytes: 25 << 20 }
    }
}

/// One sum: when it was started, and when it was needed and there.
#[derive(Clone, Copy, Debug)]
pub struct ReductionSpan {
    /// Of the gradients.
    pub bytes: usize,
    /// When.
    pub started: Instant,
    /// When.
    pub ended: Instant,
}

/// Sums under way. The element type is that of the gradients: f32 or wider.
pub struct Reducer<'a, D: Space> {
    device: &'a D,
    dp: &'a dyn Communicator,
    how: Reduction,
    pending: Vec<Started<D>>,
    /// By the end of each stage's elements, how far they are.
    progress: BTreeMap<usize, Progress>,
}

/// A sum under way: of which elements, and since when.
type Started<D> = (Range<usize>, DeviceRequest<D, <D as Space>::Wide>, Instant);

/// How far down from its end a stage is.
struct Progress {
    /// Elements from here on are complete.
    complete: usize,
    /// Elements from here on are on their way.
    started: usize,
}

impl<'a, D: Device> Reducer<'a, D> {
    /// Nothing under way.
    pub fn new(device: &'a D, dp: &'a dyn Communicator, how: Reduction) -> Self {
        Self { device, dp, how, pending: Vec::new(), progress: BTreeMap::new() }
    }

    /// The elements from `from` to `end`, where their stage ends, have got their last contribution.
    ///
    /// # Errors
    /// As any collective call.
    pub fn complete(
        &mut self,
        inventory: &Inventory,
        gradients: &Store<D>,
        from: usize,
        end: usize,
    ) -> Result<(), CommError> {
        let progress = self.progress.entry(end).or_insert(Progress { complete: end, started: end });
        progress.complete = from;
        let ready = from..progress.started;
        let parts = match self.how {
            Reduction::AtEnd => return Ok(()),
            Reduction::Buckets { bytes } if ready.len() * size_of::<D::Wide>() < bytes => {
                return Ok(());
            }
            Reduction::Buckets { .. } => vec![ready],
            Reduction::PerParameter => parameters_within(inventory, &ready),
        };
        progress.started = from;
        parts.into_iter().try_for_each(|part| self.start(gradients, part))
    }

    fn start(&mut self, gradients: &Store<D>, range: Range<usize>) -> Result<(), CommError> {
        if self.dp.size() > 1 && !range.is_empty() {
            let bucket = self.device.copied(gradients.range(range.clone()));
            let request =
                DeviceGroup::new(self.device, self.dp).start_all_reduce(bucket, Op::Sum)?;
            self.pending.push((range, request, Instant::now()));
        }
        Ok(())
    }

    /// Starts what is left, and waits for everything.
    ///
    /// # Errors
    /// As any collective call.
    pub fn finish(mut self, gradients: &mut Store<D>) -> Result<Vec<ReductionSpan>, CommError> {
        for Progress { complete, started } in std::mem::take(&mut self.progress).into_values() {
            self.start(gradients, complete..started)?;
        }
        let mut spans = Vec::with_capacity(self.pending.len());
        for (range, request, started) in self.pending {
            let bytes = range.len() * size_of::<D::Wide>();
            let sum = request.wait(self.device)?;
            self.device.copy(D::view(&sum, 0..range.len()), gradients.range_mut(range));
            spans.push(ReductionSpan { bytes, started, ended: Instant::now() });
        }
        Ok(spans)
    }
}

/// The parameters in a range of elements, last first: the order in which they are complete.
fn parameters_within(inventory: &Inventory, ready: &Range<usize>) -> Vec<Range<usize>> {
    let parts = inventory.all().iter().rev().map(|held| held.part);
    let ranges = parts.map(|part| part.begin..part.begin + part.len);
    ranges.filter(|part| ready.start <= part.start && part.end <= ready.end).collect()
}
