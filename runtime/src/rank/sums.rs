//! Sums over ranks after a step's passes: partial gradients, losses, and the gradient norm.

use super::Fixed;
use crate::comm::{CommError, Op, Request};
use crate::device::{Device, DeviceGroup};
use crate::state::params::{Gradient, HeldParameter, Store};

impl<D: Device> Fixed<'_, D> {
    /// Sums partial gradients over tensor-parallel ranks, all in one call. Each lies at its place
    /// in the whole tensor, so that copies are summed with the ranks that hold the same elements.
    pub(super) fn sum_partial_gradients(&self, gradients: &mut Store<D>) -> Result<(), CommError> {
        let partial = |held: &&HeldParameter| held.declaration.gradient == Gradient::Partial;
        let held: Vec<&HeldParameter> = self.inventory.all().iter().filter(partial).collect();
        if self.groups.tp.size() == 1 || held.is_empty() {
            return Ok(());
        }
        let device = &self.device;
        let mut runs = Vec::new();
        let mut elements = 0;
        for held in held {
            for (local, whole, len) in held.declaration.runs(&held.extent) {
                let own = held.part.begin + local;
                runs.push((own..own + len, elements + whole..elements + whole + len));
            }
            elements += held.declaration.elements();
        }
        let mut all = device.zeros(elements);
        for (own, whole) in &runs {
            let to = D::view_mut(&mut all, whole.clone());
            device.copy(gradients.range(own.clone()), to);
        }
        let all = DeviceGroup::new(device, &*self.groups.tp).all_reduce(all, Op::Sum)?;
        for (own, whole) in runs {
            device.copy(D::view(&all, whole), gradients.range_mut(own));
        }
        Ok(())
    }

    /// Sums the gradients of an embedding that the first and the last stage share.
    pub(super) fn sum_tied_gradients(&self, gradients: &mut Store<D>) -> Result<(), CommError> {
        if self.spec.layout.copies() > 1 {
            self.sum_tied_copies(gradients);
            return Ok(());
        }
        let apart = self.spec.last_rank() != 0 && self.shard.is_none();
        if self.groups.ends.size() == 1 || !apart {
            return Ok(());
        }
        let Some(name) = &self.spec.tied_table else { return Ok(()) };
        let Some(held) = self.inventory.named(name) else { return Ok(()) };
        let (part, device) = (held.part, &self.device);
        let own = device.copied(gradients.get(part));
        let sum = DeviceGroup::new(device, &*self.groups.ends).all_reduce(own, Op::Sum)?;
        device.copy(D::view(&sum, 0..part.len), gradients.get_mut(part));
        Ok(())
    }

    /// With two copies of each stage, both the first and the last pipeline rank have the table of
    /// the first stage and of the last, each with the gradient summed over its copies. Gives both
    /// tables the sum.
    fn sum_tied_copies(&self, gradients: &mut Store<D>) {
        let Some(name) = &self.spec.tied_table else { return };
        let tables = self.inventory.all().iter().filter(|held| held.declaration.name == *name);
        // First stage first on both ranks: the sums are equal to the bit.
        let (mut first, mut last) = (None, None);
        for held in tables {
            let place = if held.declaration.tied_copy { &mut last } else { &mut first };
            *place = Some(held.part);
        }
        let (Some(first), Some(last)) = (first, last) else { return };
        let theirs = self.device.copied(gradients.get(last));
        self.device.add_wide(D::view(&theirs, 0..last.len), gradients.get_mut(first));
        let both = self.device.copied(gradients.get(first));
        self.device.copy(D::view(&both, 0..first.len), gradients.get_mut(last));
    }

    /// Starts summing the global batch's losses over the ranks that hold the output layer.
    pub(super) fn start_loss(&self, loss_sum: f64) -> Result<Request<f64>, CommError> {
        // All tensor-parallel ranks know the same losses; one of them contributes.
        let sum = if self.groups.tp.rank() == 0 { loss_sum } else { 0.0 };
        self.groups.world.start_all_reduce(vec![sum], Op::Sum)
    }

    /// Sum of squares of this rank's gradients; each element of the model is counted on one rank.
    pub(super) fn squares(&self, gradients: &Store<D>) -> D::Total {
        let mut total = self.device.total();
        for held in self.inventory.all().iter().filter(|held| held.counted) {
            self.device.add_squares(gradients.get(held.part), &mut total);
        }
        total
    }

    /// Starts summing squares over all parameters of the model.
    pub(super) fn start_norm(&self, squares: &D::Total) -> Result<Request<f64>, CommError> {
        let mut sum = [self.device.read(squares)?];
        // Replicas have the same gradients by now.
        self.groups.tp.all_reduce(&mut sum, Op::Sum)?;
        self.groups.pp.start_all_reduce(sum.to_vec(), Op::Sum)
    }
}

/// A sum over the global batch, divided by its valid tokens.
pub(super) fn mean(sum: Request<f64>, valid_tokens: u64) -> Result<f64, CommError> {
    Ok(only(sum)? / valid_tokens.max(1) as f64)
}

pub(super) fn root(squares: Request<f64>) -> Result<f64, CommError> {
    Ok(only(squares)?.sqrt())
}

fn only(request: Request<f64>) -> Result<f64, CommError> {
    Ok(request.wait()?.first().copied().unwrap_or(f64::NAN))
}
