//! Sums over ranks after a step's passes: partial gradients, losses, and the gradient norm.

use super::Fixed;
use crate::comm::{CommError, Op, Request};
use crate::device::{Device, DeviceGroup, Wide};
use crate::groups::ExpertGroups;
use crate::ops::RouterLog;
use crate::state::params::{ByDivision, Gradient, HeldParameter, Store};
use crate::state::shards::Slice;
use crate::step::executor::copy_tag;
use crate::step::graph_replay::Squares;
use std::ops::Range;

impl<D: Device> Fixed<'_, D> {
    /// Sums over ranks of one replica what they have of the same gradients, after replicas have
    /// been summed: `sums` has what this rank updates.
    pub(super) fn sum_over_ranks(&self, sums: &mut Store<D>) -> Result<(), CommError> {
        self.sum_copies(sums)?;
        self.sum_partial_gradients(sums)?;
        self.sum_tied_gradients(sums)
    }

    /// Gives both copies of each stage the sum of their gradients, if there are two. Addition of
    /// two numbers commutes, so the copies stay equal to the last bit.
    fn sum_copies(&self, sums: &mut Store<D>) -> Result<(), CommError> {
        if self.spec.layout.copies() == 1 {
            return Ok(());
        }
        let (device, pp) = (&self.device, &*self.groups.pp);
        let (other, group) = (pp.size() - 1 - pp.rank(), DeviceGroup::new(device, pp));
        let places = |chunk: usize| -> Vec<Range<usize>> {
            let stage = self.stages[chunk].parameters();
            let slices = self.shards.updated().iter();
            let inside = slices.filter(|slice| stage.contains(&slice.whole.start));
            inside.map(|slice| sums.place(slice)).collect()
        };
        let places: Vec<_> = (0..self.stages.len()).map(places).collect();
        let mut sends = Vec::new();
        for (chunk, places) in places.iter().enumerate() {
            let own = packed(device, sums, places);
            sends.push(group.start_send(own, other, copy_tag(chunk))?);
        }
        for (chunk, places) in places.iter().enumerate() {
            // Chunk 0 here is chunk 1 there.
            let count = places.iter().map(ExactSizeIterator::len).sum();
            let theirs = group.recv(count, other, copy_tag(1 - chunk))?;
            let mut at = 0;
            for place in places {
                let from = D::view(&theirs, at..at + place.len());
                at += place.len();
                device.add_wide(from, sums.range_mut(place.clone()));
            }
        }
        sends.into_iter().try_for_each(|send| send.wait(device).map(drop))
    }

    /// Sums partial gradients over tensor-parallel ranks, all in one call. Each lies at its place
    /// in the whole tensor, so that copies are summed with the ranks that hold the same elements.
    fn sum_partial_gradients(&self, sums: &mut Store<D>) -> Result<(), CommError> {
        let held = |slice: &Slice| &self.inventory.all()[slice.held];
        let partial = |slice: &&Slice| held(slice).declaration.gradient == Gradient::Partial;
        let any =
            self.inventory.all().iter().any(|held| held.declaration.gradient == Gradient::Partial);
        if self.groups.tp.size() == 1 || !any {
            return Ok(());
        }
        let device = &self.device;
        let mut runs = Vec::new();
        let mut elements = 0;
        for slice in self.shards.updated().iter().filter(partial) {
            let HeldParameter { declaration, extent, part, .. } = held(slice);
            let place = sums.place(slice).start;
            for (local, whole, len) in declaration.runs(extent) {
                let begin = (part.begin + local).max(slice.whole.start);
                let end = (part.begin + local + len).min(slice.whole.end);
                if begin < end {
                    let own = place + begin - slice.whole.start;
                    let whole = elements + whole + begin - part.begin - local;
                    runs.push((own..own + end - begin, whole..whole + end - begin));
                }
            }
            elements += declaration.elements();
        }
        let mut all = device.zeros(elements);
        for (own, whole) in &runs {
            device.copy(sums.range(own.clone()), D::view_mut(&mut all, whole.clone()));
        }
        let all = DeviceGroup::new(device, &*self.groups.tp).all_reduce(all, Op::Sum)?;
        for (own, whole) in runs {
            device.copy(D::view(&all, whole), sums.range_mut(own));
        }
        Ok(())
    }

    /// Sums the gradients of an embedding that the first and the last stage share.
    fn sum_tied_gradients(&self, sums: &mut Store<D>) -> Result<(), CommError> {
        if self.spec.layout.copies() > 1 {
            self.sum_tied_copies(sums);
            return Ok(());
        }
        let apart = self.spec.last_rank() != 0 && self.shard.is_none();
        if self.groups.ends.size() == 1 || !apart {
            return Ok(());
        }
        let Some(name) = &self.spec.tied_table else { return Ok(()) };
        let device = &self.device;
        for slice in self.slices_of(|held| held.declaration.name == *name) {
            let own = device.copied(sums.get(slice));
            let sum = DeviceGroup::new(device, &*self.groups.ends).all_reduce(own, Op::Sum)?;
            device.copy(D::view(&sum, 0..slice.whole.len()), sums.get_mut(slice));
        }
        Ok(())
    }

    /// What this rank updates of some parameters.
    fn slices_of(&self, wanted: impl Fn(&HeldParameter) -> bool) -> impl Iterator<Item = &Slice> {
        let updated = self.shards.updated().iter();
        updated.filter(move |slice| wanted(&self.inventory.all()[slice.held]))
    }

    /// With two copies of each stage, both the first and the last pipeline rank have the table of
    /// the first stage and of the last, each with the gradient summed over its copies. Gives both
    /// tables the sum.
    fn sum_tied_copies(&self, sums: &mut Store<D>) {
        let Some(name) = &self.spec.tied_table else { return };
        // First stage first on both ranks: the sums are equal to the bit.
        let of = |copy: bool| {
            self.slices_of(move |held| {
                held.declaration.name == *name && held.declaration.tied_copy == copy
            })
        };
        for (first, last) in of(false).zip(of(true)) {
            let len = last.whole.len();
            let theirs = self.device.copied(sums.get(last));
            self.device.add_wide(D::view(&theirs, 0..len), sums.get_mut(first));
            let both = self.device.copied(sums.get(first));
            self.device.copy(D::view(&both, 0..len), sums.get_mut(last));
        }
    }

    /// Starts summing the global batch's losses over the ranks that hold the output layer, and
    /// those of routers over all.
    pub(super) fn start_losses(&self, loss_sum: f64) -> Result<PendingLosses, CommError> {
        // All tensor-parallel ranks know the same losses; one of them contributes.
        let sum = if self.groups.tp.rank() == 0 { loss_sum } else { 0.0 };
        let aux = self.routers.as_ref().map(RouterLog::value);
        let sums = std::iter::once(sum).chain(aux).collect();
        self.groups.world.start_all_reduce(sums, Op::Sum).map(PendingLosses)
    }

    /// Sum of squares of the gradients in this rank's pieces; each element of the model is in the
    /// piece of one rank that counts it.
    pub(super) fn squares(&self, sums: &Store<D>) -> Squares<D> {
        ByDivision::each(|division| {
            let mut total = self.device.total();
            let counts = |slice: &&Slice| {
                let held = &self.inventory.all()[slice.held];
                held.counted && held.declaration.division == division
            };
            let counted = self.shards.counted().iter().filter(counts);
            let counted: Vec<Wide<'_, D>> = counted.map(|slice| sums.get(slice)).collect();
            self.device.add_squares(&counted, &mut total);
            total
        })
    }

    /// Starts summing squares over all parameters of the model. The replicas that share one copy
    /// of the state have summed its pieces.
    pub(super) fn start_norm(&self, squares: &Squares<D>) -> Result<Request<f64>, CommError> {
        let mut dense = [self.device.read(&squares.dense)?];
        self.groups.sharing().dense.all_reduce(&mut dense, Op::Sum)?;
        self.groups.tp.all_reduce(&mut dense, Op::Sum)?;
        let mut sum = dense.to_vec();
        if let Some(ExpertGroups { ep, etp, replicas }) = &self.groups.experts {
            let mut expert = [self.device.read(&squares.expert)?];
            for group in [replicas.sharing(), &**etp, &**ep] {
                group.all_reduce(&mut expert, Op::Sum)?;
            }
            sum[0] += expert[0];
        }
        self.groups.pp.start_all_reduce(sum, Op::Sum)
    }
}

/// Parts of a store, one behind the other.
fn packed<D: Device>(device: &D, from: &Store<D>, places: &[Range<usize>]) -> D::Memory<D::Wide> {
    let mut all = device.zeros(places.iter().map(ExactSizeIterator::len).sum());
    let mut at = 0;
    for place in places {
        let to = D::view_mut(&mut all, at..at + place.len());
        device.copy(from.range(place.clone()), to);
        at += place.len();
    }
    all
}

/// Losses of a step while they are summed.
#[must_use = "a call that nobody waits for may never finish"]
pub(super) struct PendingLosses(Request<f64>);

/// Losses of a step.
pub(super) struct Losses {
    /// Of the global batch's valid tokens.
    pub mean: f64,
    /// Of routers, by weight.
    pub aux: f64,
}

impl PendingLosses {
    pub(super) fn wait(self, valid_tokens: u64) -> Result<Losses, CommError> {
        let sums = self.0.wait()?;
        let sum = sums.first().copied().unwrap_or(f64::NAN);
        let aux = sums.get(1).copied().unwrap_or(0.0);
        Ok(Losses { mean: sum / valid_tokens.max(1) as f64, aux })
    }
}

pub(super) fn root(squares: Request<f64>) -> Result<f64, CommError> {
    Ok(squares.wait()?.first().copied().unwrap_or(f64::NAN).sqrt())
}
