//! Whole tensors, gathered from all ranks onto rank 0.

use super::{Fixed, declare};
use crate::comm::CommError;
use crate::device::{Device, DeviceError};
use crate::state::checkpoint::Tensors;
use crate::state::params::{HeldParameter, Inventory, ParameterSlice};
use kernels::Real;
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
        if at.dp > 0 {
            return None;
        }
        let mut inventory = Inventory::new(at.tp as usize, self.groups.tp.size());
        declare(self.declared_by, &self.spec, at.pp as usize, &mut inventory);
        Some(inventory)
    }

    /// Gathers whole tensors on rank 0. Every rank of the first replica sends the parameters that
    /// it counts; rank 0 can declare what the others hold, and so knows where each part belongs.
    pub(super) fn whole(
        &self,
        read: impl Fn(ParameterSlice) -> Result<Vec<D::Wide>, DeviceError>,
    ) -> Result<Option<Tensors<D::Wide>>, CommError> {
        const TAG: u64 = 1 << 61;
        let world = &self.groups.world;
        if self.groups.dp.rank() > 0 {
            return Ok(None);
        }
        let mut own = Vec::new();
        for held in self.inventory.all().iter().filter(|held| held.counted) {
            own.extend(read(held.part)?);
        }
        if world.rank() > 0 {
            world.send(&own, 0, TAG)?;
            return Ok(None);
        }
        let mut own = Some(own);
        let mut tensors: Tensors<D::Wide> = BTreeMap::new();
        for rank in 0..world.size() {
            let Some(theirs) = self.inventory_of(rank) else { continue };
            let counted: Vec<&HeldParameter> =
                theirs.all().iter().filter(|held| held.counted).collect();
            let count = counted.iter().map(|held| held.part.len).sum();
            let told = match (rank, own.take()) {
                (0, Some(own)) => own,
                _ => world.recv(count, rank, TAG)?,
            };
            let mut rest = told.as_slice();
            for held in counted {
                let (local, behind) = rest.split_at(held.part.len);
                let declaration = &held.declaration;
                let empty =
                    || (declaration.shape.clone(), vec![D::Wide::ZERO; declaration.elements()]);
                let (_, whole) = tensors.entry(declaration.name.clone()).or_insert_with(empty);
                declaration.insert(&held.extent, local, whole);
                rest = behind;
            }
        }
        Ok(Some(tensors))
    }
}
