//! Sums the gradients of data-parallel replicas in buckets, overlapped with the backward pass.

use crate::comm::{CommError, Communicator, Op};
use crate::device::{Device, DeviceGroup, DeviceRequest, Space};
use crate::state::params::{Inventory, Store};
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

/// When the gradients of replicas are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// All at once, after the last pass.
    AtEnd,
    /// Each parameter as soon as its gradient is complete.
    PerParameter,
    /// As soon as this many bytes are complete.
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

/// One all-reduce of gradients.
#[derive(Clone, Copy, Debug)]
pub struct ReductionSpan {
    /// Bytes of the gradients.
    pub bytes: usize,
    /// When it was started.
    pub started: Instant,
    /// When its result had been waited for.
    pub ended: Instant,
}

/// All-reduces of gradients in flight. Gradients are f32 or wider.
pub struct Reducer<'a, D: Space> {
    device: &'a D,
    dp: &'a dyn Communicator,
    how: Reduction,
    pending: Vec<Started<D>>,
    /// Progress of each stage, by the end of the stage's elements.
    progress: BTreeMap<usize, Progress>,
}

/// An all-reduce in flight: its elements, its request and when it started.
type Started<D> = (Range<usize>, DeviceRequest<D, <D as Space>::Wide>, Instant);

/// Progress of a stage, which completes from its end downwards.
struct Progress {
    /// Elements from here on are complete.
    complete: usize,
    /// Elements from here on are being reduced.
    started: usize,
}

impl<'a, D: Device> Reducer<'a, D> {
    /// No reduction in flight.
    pub fn new(device: &'a D, dp: &'a dyn Communicator, how: Reduction) -> Self {
        Self { device, dp, how, pending: Vec::new(), progress: BTreeMap::new() }
    }

    /// Notes that the elements from `from` to `end`, the end of their stage, are complete.
    ///
    /// # Errors
    /// Those of any collective call.
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

    /// Starts the reductions that remain, and waits for all of them.
    ///
    /// # Errors
    /// Those of any collective call.
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

/// The parameters within a range of elements, last first: the order in which they complete.
fn parameters_within(inventory: &Inventory, ready: &Range<usize>) -> Vec<Range<usize>> {
    let parts = inventory.all().iter().rev().map(|held| held.part);
    let ranges = parts.map(|part| part.begin..part.begin + part.len);
    ranges.filter(|part| ready.start <= part.start && part.end <= ready.end).collect()
}
