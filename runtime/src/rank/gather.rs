//! Whole tensors, gathered from all ranks onto rank 0.

use super::{Fixed, declare};
use crate::comm::CommError;
use crate::device::Device;
use crate::spec::TrainerSpec;
use crate::state::checkpoint::Tensors;
use crate::state::params::{ByDivision, Declaration, Division, HeldParameter, Inventory, Member};
use crate::state::shards::{Shards, Slice};
use kernels::Real;
use models::mesh::{Coordinates, ExpertPlace};
use std::collections::BTreeMap;

/// An empty inventory for the rank at `at`.
pub(super) fn inventory(spec: &TrainerSpec, at: Coordinates) -> Inventory {
    let member = |rank: u64, of: u64| Member { rank: rank as usize, of: of as usize };
    let replicas = replica(spec, at);
    let replicas = ByDivision::each(|division| spec.zero.group(replicas.of(division).of));
    let inventory = Inventory::new(at.tp as usize, spec.mesh.tp as usize);
    let inventory = inventory.with_replicas(spec.zero, replicas);
    let Some(experts) = spec.experts else { return inventory };
    let ExpertPlace { ep, etp, .. } = experts.place(spec.mesh.fold(at));
    inventory.with_experts(member(ep, experts.ep), member(etp, experts.etp))
}

/// The rank at `at` among those that hold the same parameters.
fn replica(spec: &TrainerSpec, at: Coordinates) -> ByDivision<Member> {
    let mesh = &spec.mesh;
    let dense = (at.dp * mesh.cp + at.cp, mesh.cp * mesh.dp);
    let expert = spec.experts.map_or((0, 1), |experts| {
        let ranks = mesh.folded_ranks() / (experts.ep * experts.etp);
        (experts.place(mesh.fold(at)).edp, ranks)
    });
    let member = |(rank, of): (u64, u64)| Member { rank: rank as usize, of: of as usize };
    ByDivision { dense: member(dense), expert: member(expert) }
}

impl<D: Device> Fixed<'_, D> {
    /// Elements of all of the model's parameters.
    pub(super) fn elements_of_model(&self) -> usize {
        let of_rank = |rank: usize| -> usize {
            let at = self.spec.mesh.coordinates(rank as u64);
            let replica = replica(&self.spec, at);
            let first = |division| self.has(division) && replica.of(division).rank == 0;
            if !first(Division::Dense) && !first(Division::Expert) {
                return 0;
            }
            let inventory = self.inventory_of(at);
            let counts = |held: &&HeldParameter| held.counted && first(held.declaration.division);
            let counted = inventory.all().iter().filter(counts);
            counted.map(|held| held.extent.real_rows() * held.extent.columns.len()).sum()
        };
        (0..self.groups.world.size()).map(of_rank).sum()
    }

    /// Whether the model has parameters of a division.
    fn has(&self, division: Division) -> bool {
        division == Division::Dense || self.spec.experts.is_some()
    }

    /// The parameters of the rank at `at`.
    fn inventory_of(&self, at: Coordinates) -> Inventory {
        let mut inventory = inventory(&self.spec, at);
        declare(self.declared_by, &self.spec, at.pp as usize, &mut inventory);
        inventory
    }

    /// Of each division, whether the rank at `at` is one of the replicas that together hold
    /// everything: the first, or those that share the first copy of the state.
    fn contributes(&self, at: Coordinates) -> ByDivision<bool> {
        let (zero, replica) = (self.spec.zero, replica(&self.spec, at));
        ByDivision::each(|division| {
            let Member { rank, of } = replica.of(division);
            self.has(division) && rank < if zero.shares_optimizer() { zero.group(of) } else { 1 }
        })
    }

    /// How many ranks contribute to whole tensors.
    pub(super) fn contributors(&self) -> usize {
        let contributes = |rank: &usize| {
            let of_rank = self.contributes(self.spec.mesh.coordinates(*rank as u64));
            of_rank.dense || of_rank.expert
        };
        (0..self.groups.world.size()).filter(contributes).count()
    }

    /// Gathers whole tensors on rank 0. Every contributing rank sends what it updates of the
    /// parameters that it counts, if they are `wanted`. Rank 0 can declare what the others hold,
    /// and so knows where each part belongs.
    pub(super) fn whole(
        &self,
        wanted: impl Fn(&Declaration) -> bool,
        read: impl Fn(&Slice) -> Result<Vec<D::Wide>, CommError>,
    ) -> Result<Option<Tensors<D::Wide>>, CommError> {
        const TAG: u64 = 1 << 61;
        let world = &self.groups.world;
        let contributes = self.contributes(self.groups.at);
        let mut own = Vec::new();
        for slice in contributed(&self.shards, &self.inventory, contributes, &wanted) {
            own.extend(read(slice)?);
        }
        if world.rank() > 0 {
            if contributes.dense || contributes.expert {
                world.send(&own, 0, TAG)?;
            }
            return Ok(None);
        }
        let mut own = Some(own);
        let mut tensors: Tensors<D::Wide> = BTreeMap::new();
        for rank in 0..world.size() {
            let at = self.spec.mesh.coordinates(rank as u64);
            let contributes = self.contributes(at);
            if !(contributes.dense || contributes.expert) {
                continue;
            }
            let theirs = self.inventory_of(at);
            let replica = replica(&self.spec, at);
            let member = |division| {
                let Member { rank, of } = replica.of(division);
                let of = self.spec.zero.group(of);
                Member { rank: rank % of, of }
            };
            let shards = Shards::new(&theirs, self.spec.zero, ByDivision::each(member));
            let slices: Vec<&Slice> = contributed(&shards, &theirs, contributes, &wanted).collect();
            let count = slices.iter().map(|slice| slice.whole.len()).sum();
            let told = match (rank, own.take()) {
                (0, Some(own)) => own,
                _ => world.recv(count, rank, TAG)?,
            };
            let mut rest = told.as_slice();
            for slice in slices {
                let (part, behind) = rest.split_at(slice.whole.len());
                insert(&theirs.all()[slice.held], slice, part, &mut tensors);
                rest = behind;
            }
        }
        Ok(Some(tensors))
    }
}

/// Inserts a slice of a parameter into its whole tensor.
fn insert<T: Real>(held: &HeldParameter, slice: &Slice, values: &[T], tensors: &mut Tensors<T>) {
    let HeldParameter { declaration, extent, part, .. } = held;
    let empty = || (declaration.shape.clone(), vec![T::ZERO; declaration.elements()]);
    let (_, whole) = tensors.entry(declaration.name.clone()).or_insert_with(empty);
    let first = slice.whole.start - part.begin;
    declaration.insert(extent, first, values, whole);
}

/// What a rank contributes to whole tensors.
fn contributed<'a>(
    shards: &'a Shards,
    inventory: &'a Inventory,
    contributes: ByDivision<bool>,
    wanted: impl Fn(&Declaration) -> bool,
) -> impl Iterator<Item = &'a Slice> {
    let sent = move |slice: &&Slice| {
        let HeldParameter { counted, declaration, .. } = &inventory.all()[slice.held];
        *counted && contributes.of(declaration.division) && wanted(declaration)
    };
    shards.updated().iter().filter(sent)
}
