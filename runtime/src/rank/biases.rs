//! Selection biases that load updates, once a step.

use super::Fixed;
use crate::comm::{CommError, Op};
use crate::device::Device;
use crate::error::Error;
use crate::ops::update_bias;
use crate::state::params::{BiasUpdate, HeldParameter};
use crate::state::weights::Biases;
use crate::step::executor::copy_tag;

impl<D: Device> Fixed<'_, D> {
    /// Updates the biases by the load of the step's global batch. All ranks with the same layers
    /// get the same bits, whatever the split, since counts are whole numbers.
    pub(super) fn update_biases(&self, biases: &mut Biases<D::Wide>) -> Result<(), Error> {
        let Some(loads) = &self.loads else { return Ok(()) };
        let mut counts = Vec::new();
        let updated = self.updated_biases();
        for (held, update) in &updated {
            let missing = || Error::NoLoad { name: held.declaration.name.clone() };
            counts.extend(loads.of_layer(update.layer).ok_or_else(missing)?);
        }
        self.sum_loads(&mut counts)?;
        let mut rest = counts.as_slice();
        for (held, update) in updated {
            let (of_layer, behind) = rest.split_at(held.part.len);
            if let Some(bias) = biases.get_mut(&held.part.index()) {
                update_bias(bias, of_layer, update.rate);
            }
            rest = behind;
        }
        Ok(())
    }

    /// The biases that load updates, by layer.
    fn updated_biases(&self) -> Vec<(&HeldParameter, BiasUpdate)> {
        let all = self.inventory.all().iter();
        let mut updated: Vec<_> = all.filter_map(|held| Some((held, held.by_load?))).collect();
        updated.sort_by_key(|(_, update)| update.layer);
        updated
    }

    /// Sums counts of all layers over the ranks that have other rows for them: no pipeline rank
    /// waits for another, but for that of the second copy of its stages.
    fn sum_loads(&self, counts: &mut [i64]) -> Result<(), CommError> {
        self.groups.dense.all.all_reduce(counts, Op::Sum)?;
        self.groups.tp.all_reduce(counts, Op::Sum)?;
        if self.spec.layout.copies() == 1 {
            return Ok(());
        }
        let pp = &*self.groups.pp;
        // Chunks 0 and 1 are those of gradients.
        let (other, tag) = (pp.size() - 1 - pp.rank(), copy_tag(2));
        let sent = pp.start_send(counts.to_vec(), other, tag)?;
        let theirs: Vec<i64> = pp.recv(counts.len(), other, tag)?;
        counts.iter_mut().zip(theirs).for_each(|(count, other)| *count += other);
        sent.wait().map(drop)
    }
}
