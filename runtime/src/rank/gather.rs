//! Whole tensors, gathered from all ranks onto rank 0.

use super::{Fixed, declare};
use crate::comm::CommError;
use crate::device::Device;
use crate::state::checkpoint::Tensors;
use crate::state::params::Inventory;
use crate::state::shards::{Shards, Slice};
use kernels::Real;
use models::mesh::Coordinates;
use std::collections::BTreeMap;

impl<D: Device> Fixed<'_, D> {
    /// Elements of all of the model's parameters.
    pub(super) fn elements_of_model(&self) -> usize {
        let ranks = (0..self.groups.world.size()).filter_map(|rank| self.inventory_of(rank));
        let counted = |inventory: Inventory| -> usize {
            let counted = inventory.all().iter().filter(|held| held.counted);
            counted.map(|held| held.extent.real_rows() * held.extent.columns.len()).sum()
        };
        ranks.map(counted).sum()
    }

    /// The parameters of a rank of the first replica; `None` for other ranks.
    fn inventory_of(&self, rank: usize) -> Option<Inventory> {
        let at = self.spec.mesh.coordinates(rank as u64);
        if at.dp > 0 || at.cp > 0 {
            return None;
        }
        let mut inventory = Inventory::new(at.tp as usize, self.groups.tp.size());
        declare(self.declared_by, &self.spec, at.pp as usize, &mut inventory);
        Some(inventory)
    }

    /// The rank that replica `replica` has in place of rank `first` of the first replica.
    fn replica_of(&self, first: usize, replica: usize) -> usize {
        let (mesh, replica) = (&self.spec.mesh, replica as u64);
        let at = mesh.coordinates(first as u64);
        let at = Coordinates { cp: replica % mesh.cp, dp: replica / mesh.cp, ..at };
        mesh.rank(at) as usize
    }

    /// Replicas that together hold everything: the first, or those that share the first copy of
    /// the state.
    fn contributing(&self) -> usize {
        let zero = self.spec.zero;
        if zero.shares_optimizer() { zero.ways } else { 1 }
    }

    /// Gathers whole tensors on rank 0. Every contributing rank sends what it updates of the
    /// parameters that it counts. Rank 0 can declare what the others hold, and so knows where each
    /// part belongs.
    pub(super) fn whole(
        &self,
        read: impl Fn(&Slice) -> Result<Vec<D::Wide>, CommError>,
    ) -> Result<Option<Tensors<D::Wide>>, CommError> {
        const TAG: u64 = 1 << 61;
        let world = &self.groups.world;
        if self.groups.dp.rank() >= self.contributing() {
            return Ok(None);
        }
        let mut own = Vec::new();
        for slice in counted(&self.shards, &self.inventory) {
            own.extend(read(slice)?);
        }
        if world.rank() > 0 {
            world.send(&own, 0, TAG)?;
            return Ok(None);
        }
        let mut own = Some(own);
        let mut tensors: Tensors<D::Wide> = BTreeMap::new();
        for first in 0..world.size() {
            let Some(theirs) = self.inventory_of(first) else { continue };
            let mut local = vec![D::Wide::ZERO; theirs.elements()];
            for replica in 0..self.contributing() {
                let rank = self.replica_of(first, replica);
                let shards =
                    Shards::new(&theirs, self.spec.zero, self.groups.sharing().size(), replica);
                let slices: Vec<&Slice> = counted(&shards, &theirs).collect();
                let count = slices.iter().map(|slice| slice.whole.len()).sum();
                let told = match (rank, own.take()) {
                    (0, Some(own)) => own,
                    _ => world.recv(count, rank, TAG)?,
                };
                let mut rest = told.as_slice();
                for slice in slices {
                    let (part, behind) = rest.split_at(slice.whole.len());
                    local[slice.whole.clone()].copy_from_slice(part);
                    rest = behind;
                }
            }
            for held in theirs.all().iter().filter(|held| held.counted) {
                let declaration = &held.declaration;
                let empty =
                    || (declaration.shape.clone(), vec![D::Wide::ZERO; declaration.elements()]);
                let (_, whole) = tensors.entry(declaration.name.clone()).or_insert_with(empty);
                declaration.insert(&held.extent, &local[held.part.range()], whole);
            }
        }
        Ok(Some(tensors))
    }
}

/// What a rank updates of the parameters that it counts.
fn counted<'a>(shards: &'a Shards, inventory: &'a Inventory) -> impl Iterator<Item = &'a Slice> {
    shards.updated().iter().filter(|slice| inventory.all()[slice.held].counted)
}
