//! Sums the gradients of data-parallel replicas in buckets, overlapped with the backward pass.

use crate::comm::{CommError, Op};
use crate::device::{Device, DeviceGroup, DeviceRequest, Space};
use crate::groups::Groups;
use crate::spec::Reduction;
use crate::state::gradients::GradientStore;
use crate::state::params::{Division, Inventory, Store};
use crate::state::shards::Unit;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::Instant;

/// One reduction of gradients.
#[derive(Clone, Copy, Debug)]
pub struct ReductionSpan {
    /// Bytes of the gradients.
    pub bytes: usize,
    /// When it was started.
    pub started: Instant,
    /// When its result had been waited for.
    pub ended: Instant,
}

/// Reductions of gradients in flight. Gradients are f32 or wider.
///
/// Without ZeRO these are all-reduces. If replicas share the optimizer state they are
/// reduce-scatters, after which each replica has the sums of its pieces. If replicas share
/// gradients too, every micro-batch's are reduced, unit by unit, and added to the pieces.
pub struct Reducer<'a, D: Space> {
    device: &'a D,
    groups: &'a Groups,
    how: Reduction,
    pending: VecDeque<Started<D>>,
    /// Progress of each stage, by the end of the stage's elements.
    progress: BTreeMap<usize, Progress>,
    spans: Vec<ReductionSpan>,
}

/// A reduction in flight, what it covers, and when it started.
struct Started<D: Space> {
    covers: Covers,
    bytes: usize,
    request: DeviceRequest<D, D::Wide>,
    started: Instant,
}

/// What a reduction returns.
enum Covers {
    /// The sums of these elements.
    Elements(Vec<Range<usize>>),
    /// The sums of this rank's pieces of these units.
    Pieces(Vec<usize>),
    /// What is to be added to this rank's piece of a unit.
    More(usize),
}

/// Progress of a stage, which completes from its end downwards.
struct Progress {
    /// Elements from here on are complete.
    complete: usize,
    /// Elements from here on are being reduced.
    started: usize,
}

impl<'a, D: Device> Reducer<'a, D> {
    /// No reduction in flight.
    pub fn new(device: &'a D, groups: &'a Groups, how: Reduction) -> Self {
        let (pending, progress) = (VecDeque::new(), BTreeMap::new());
        Self { device, groups, how, pending, progress, spans: Vec::new() }
    }

    /// Notes that the elements from `from` to `end`, the end of their stage, are complete.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn complete(
        &mut self,
        inventory: &Inventory,
        gradients: &mut GradientStore<D>,
        from: usize,
        end: usize,
    ) -> Result<(), CommError> {
        if gradients.opens_units() {
            let units = gradients.shards().within(&(from..end));
            let closed = gradients.close(units);
            return self.scatter(gradients, closed);
        }
        gradients.settle(self.device, from..end);
        let progress = self.progress.entry(end).or_insert(Progress { complete: end, started: end });
        progress.complete = from;
        let ready = from..progress.started;
        let whole_units = gradients.shards().zero().shares_optimizer();
        let parts = match self.how {
            Reduction::AtEnd => return Ok(()),
            Reduction::Buckets { bytes } if ready.len() * size_of::<D::Wide>() < bytes => {
                return Ok(());
            }
            Reduction::PerParameter if !whole_units => parameters_within(inventory, &ready),
            Reduction::Buckets { .. } | Reduction::PerParameter => vec![ready],
        };
        progress.started = from;
        parts.into_iter().try_for_each(|part| self.start(gradients, &part))
    }

    /// Starts to sum complete elements: dense ones, and those of experts, which have other
    /// replicas.
    fn start(
        &mut self,
        gradients: &GradientStore<D>,
        range: &Range<usize>,
    ) -> Result<(), CommError> {
        self.start_of(gradients, range, Division::Dense)?;
        match gradients.shards().has_experts() {
            true => self.start_of(gradients, range, Division::Expert),
            false => Ok(()),
        }
    }

    fn start_of(
        &mut self,
        gradients: &GradientStore<D>,
        range: &Range<usize>,
        division: Division,
    ) -> Result<(), CommError> {
        let shards = gradients.shards();
        let replicas = self.groups.replicas(division);
        let parts = shards.parts(range, division);
        if parts.is_empty() || replicas.all.size() == 1 {
            return Ok(());
        }
        let (bucket, covers) = match shards.zero().shares_optimizer() {
            false => (gathered(self.device, gradients.sums(), &parts), Covers::Elements(parts)),
            true => {
                let of_kind = |&unit: &usize| shards.units()[unit].division == division;
                let units: Vec<usize> = shards.within(range).filter(of_kind).collect();
                (self.piece_by_piece(gradients, &units), Covers::Pieces(units))
            }
        };
        let bytes = D::len(&bucket) * size_of::<D::Wide>();
        let group = DeviceGroup::new(self.device, replicas.sharing());
        let request = match covers {
            Covers::Elements(_) => group.start_all_reduce(bucket, Op::Sum)?,
            _ => group.start_reduce_scatter(bucket, Op::Sum)?,
        };
        let started = Instant::now();
        self.pending.push_back(Started { covers, bytes, request, started });
        Ok(())
    }

    /// The gradients of units, so that a reduce-scatter gives each replica its pieces of all.
    fn piece_by_piece(&self, gradients: &GradientStore<D>, units: &[usize]) -> D::Memory<D::Wide> {
        let (shards, sums) = (gradients.shards(), gradients.sums());
        let units: Vec<&Unit> = units.iter().map(|&unit| &shards.units()[unit]).collect();
        let mut bucket = self.device.zeros(units.iter().map(|unit| unit.padded()).sum());
        let mut at = 0;
        for replica in 0..units.first().map_or(0, |unit| unit.ways()) {
            for unit in &units {
                let begin = (unit.elements.start + replica * unit.piece).min(unit.elements.end);
                let end = (begin + unit.piece).min(unit.elements.end);
                let to = D::view_mut(&mut bucket, at..at + end - begin);
                self.device.copy(sums.range(begin..end), to);
                at += unit.piece;
            }
        }
        bucket
    }

    /// Starts to sum units that were closed over replicas. Those before the last are waited for, so
    /// that the gradients of three units at most are held: two on their way and one that is open.
    fn scatter(
        &mut self,
        gradients: &mut GradientStore<D>,
        closed: Vec<(usize, D::Memory<D::Wide>)>,
    ) -> Result<(), CommError> {
        for (unit, memory) in closed {
            self.wait_until(gradients, 1)?;
            let bytes = D::len(&memory) * size_of::<D::Wide>();
            let replicas = self.groups.replicas(gradients.shards().units()[unit].division);
            let group = DeviceGroup::new(self.device, replicas.sharing());
            let request = group.start_reduce_scatter(memory, Op::Sum)?;
            let (covers, started) = (Covers::More(unit), Instant::now());
            self.pending.push_back(Started { covers, bytes, request, started });
            if self.how == Reduction::AtEnd {
                self.wait_until(gradients, 0)?;
            }
        }
        Ok(())
    }

    /// Waits for reductions, the oldest first, until `left` are on their way.
    fn wait_until(
        &mut self,
        gradients: &mut GradientStore<D>,
        left: usize,
    ) -> Result<(), CommError> {
        while self.pending.len() > left {
            let Some(Started { covers, bytes, request, started }) = self.pending.pop_front() else {
                break;
            };
            let sum = request.wait(self.device)?;
            let whole = D::view(&sum, 0..D::len(&sum));
            match covers {
                Covers::Elements(parts) => {
                    scattered(self.device, &sum, gradients.sums_mut(), &parts);
                }
                Covers::Pieces(units) => {
                    let shards = gradients.shards().clone();
                    let mut at = 0;
                    for unit in units.into_iter().map(|unit| &shards.units()[unit]) {
                        let to = gradients.sums().place_of_piece(unit);
                        let from = D::view(&sum, at..at + to.len());
                        self.device.copy(from, gradients.sums_mut().range_mut(to));
                        at += unit.piece;
                    }
                }
                Covers::More(unit) => {
                    let unit = &gradients.shards().units()[unit];
                    let to = gradients.sums().place_of_piece(unit);
                    self.device.add_wide(whole, gradients.sums_mut().range_mut(to));
                }
            }
            self.spans.push(ReductionSpan { bytes, started, ended: Instant::now() });
        }
        Ok(())
    }

    /// Starts the reductions that remain, and waits for all of them.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn finish(
        mut self,
        gradients: &mut GradientStore<D>,
    ) -> Result<Vec<ReductionSpan>, CommError> {
        gradients.settle(self.device, 0..usize::MAX);
        if gradients.opens_units() {
            let all = 0..gradients.shards().units().len();
            let closed = gradients.close(all);
            self.scatter(gradients, closed)?;
        }
        for Progress { complete, started } in std::mem::take(&mut self.progress).into_values() {
            self.start(gradients, &(complete..started))?;
        }
        self.wait_until(gradients, 0)?;
        self.sum_across(gradients, Division::Dense)?;
        if gradients.shards().has_experts() {
            self.sum_across(gradients, Division::Expert)?;
        }
        Ok(self.spans)
    }

    /// Sums this rank's pieces over the copies of the state, if there are several.
    fn sum_across(
        &mut self,
        gradients: &mut GradientStore<D>,
        division: Division,
    ) -> Result<(), CommError> {
        let Some(across) = self.groups.replicas(division).across() else { return Ok(()) };
        let shards = gradients.shards().clone();
        let (device, sums) = (self.device, gradients.sums_mut());
        let units = shards.units().iter().filter(|unit| unit.division == division);
        let places: Vec<Range<usize>> = units.map(|unit| sums.place_of_piece(unit)).collect();
        let own = gathered(device, sums, &places);
        let (started, bytes) = (Instant::now(), D::len(&own) * size_of::<D::Wide>());
        let sum = DeviceGroup::new(device, across).all_reduce(own, Op::Sum)?;
        self.spans.push(ReductionSpan { bytes, started, ended: Instant::now() });
        scattered(device, &sum, sums, &places);
        Ok(())
    }
}

/// Parts of a store, one behind the other.
fn gathered<D: Device>(device: &D, from: &Store<D>, parts: &[Range<usize>]) -> D::Memory<D::Wide> {
    if let [part] = parts {
        return device.copied(from.range(part.clone()));
    }
    let mut all = device.zeros(parts.iter().map(ExactSizeIterator::len).sum());
    let mut at = 0;
    for part in parts {
        let to = D::view_mut(&mut all, at..at + part.len());
        device.copy(from.range(part.clone()), to);
        at += part.len();
    }
    all
}

/// The inverse of [`gathered`].
fn scattered<D: Device>(
    device: &D,
    all: &D::Memory<D::Wide>,
    to: &mut Store<D>,
    parts: &[Range<usize>],
) {
    let mut at = 0;
    for part in parts {
        device.copy(D::view(all, at..at + part.len()), to.range_mut(part.clone()));
        at += part.len();
    }
}

/// The parameters within a range of elements, last first: the order in which they complete.
fn parameters_within(inventory: &Inventory, ready: &Range<usize>) -> Vec<Range<usize>> {
    let ranges = inventory.all().iter().rev().map(|held| held.part.range());
    ranges.filter(|part| ready.start <= part.start && part.end <= ready.end).collect()
}
