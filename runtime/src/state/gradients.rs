//! Gradients of a rank's parameters while they are added up.

use super::params::{HeldParameter, Inventory, ParameterSlice, Store};
use super::shards::Shards;
use crate::device::{Device, Space, WideMut};
use kernels::Real;
use std::ops::Range;
use std::rc::Rc;

/// Sums of gradients, and where passes add to them.
///
/// If replicas share gradients (ZeRO stages 2 and 3), a pass adds to memory of one unit, which is
/// *open* until its reduce-scatter. Otherwise passes add to the sums themselves.
pub struct GradientStore<D: Space> {
    shards: Rc<Shards>,
    sums: Store<D>,
    /// Memory of open units, padded.
    open: Vec<Option<D::Memory<D::Wide>>>,
    /// Gradients that are added to their unit when it closes, by parameter.
    early: Vec<Option<D::Memory<D::Wide>>>,
    /// Whether what passes add now is early.
    is_early: bool,
    /// The parameters.
    parts: Vec<ParameterSlice>,
    /// Whether each parameter was ever asked for to be written.
    written: Vec<bool>,
}

impl<D: Device> GradientStore<D> {
    /// Zeros.
    pub fn new(device: &D, shards: &Rc<Shards>, inventory: &Inventory) -> Self {
        let sums = match shards.zero().shares_gradients() {
            true => Store::pieces(device, shards),
            false => Store::whole(device, inventory),
        };
        Self {
            shards: shards.clone(),
            sums,
            open: shards.units().iter().map(|_| None).collect(),
            early: inventory.all().iter().map(|_| None).collect(),
            is_early: false,
            parts: inventory.all().iter().map(|held| held.part).collect(),
            written: vec![false; inventory.all().len()],
        }
    }

    /// Whether passes add to memory of one unit at a time.
    pub fn opens_units(&self) -> bool {
        self.shards.zero().shares_gradients()
    }

    /// How the sums are divided.
    pub fn shards(&self) -> &Rc<Shards> {
        &self.shards
    }

    /// Runs work on vectors whose unit will be open only later: it opens no unit.
    pub fn early(&mut self, work: impl FnOnce(&mut Self)) {
        self.is_early = self.opens_units();
        work(self);
        self.is_early = false;
    }

    /// Sets all sums to 0.
    pub fn clear(&mut self, device: &D) {
        device.fill(self.sums.all_mut(), D::Wide::ZERO);
    }

    /// The sums: of everything, or of this rank's pieces.
    pub fn sums(&self) -> &Store<D> {
        &self.sums
    }

    /// The sums.
    pub fn sums_mut(&mut self) -> &mut Store<D> {
        &mut self.sums
    }

    /// Where a pass adds to a parameter's gradient.
    pub fn get_mut(&mut self, device: &D, part: ParameterSlice) -> WideMut<'_, D> {
        self.written[part.index()] = true;
        if self.is_early {
            return early(device, &mut self.early[part.index()], part);
        }
        let begin = part.begin;
        let (memory, at) = self.around(device, part);
        D::split(D::split(memory, begin - at).1, part.len).0
    }

    /// The same for two parameters of one unit, of which the first lies before the second.
    pub fn get_pair_mut(
        &mut self,
        device: &D,
        first: ParameterSlice,
        second: ParameterSlice,
    ) -> (WideMut<'_, D>, WideMut<'_, D>) {
        self.written[first.index()] = true;
        self.written[second.index()] = true;
        if self.is_early {
            let (before, behind) = self.early.split_at_mut(second.index());
            let one = early(device, &mut before[first.index()], first);
            return (one, early(device, &mut behind[0], second));
        }
        let (memory, at) = self.around(device, first);
        let (one, rest) = D::split(D::split(memory, first.begin - at).1, first.len);
        let behind = D::split(rest, second.begin - first.range().end).1;
        (one, D::split(behind, second.len).0)
    }

    /// The memory that holds a parameter's gradient, and the element with which it begins.
    fn around(&mut self, device: &D, part: ParameterSlice) -> (WideMut<'_, D>, usize) {
        if !self.opens_units() {
            return (self.sums.all_mut(), 0);
        }
        let unit = &self.shards.units()[part.unit()];
        let open = &mut self.open[part.unit()];
        let memory = open.get_or_insert_with(|| device.zeros(unit.padded()));
        (D::view_mut(memory, 0..unit.padded()), unit.elements.start)
    }

    /// Takes the gradients of the open units among `units`, the last first. They are no longer
    /// open.
    pub fn close(&mut self, device: &D, units: Range<usize>) -> Vec<(usize, D::Memory<D::Wide>)> {
        let open: Vec<usize> = units.rev().filter(|&unit| self.open[unit].is_some()).collect();
        open.into_iter().filter_map(|unit| Some((unit, self.closed(device, unit)?))).collect()
    }

    /// The same of all units, those included that have early gradients alone.
    pub fn close_all(&mut self, device: &D) -> Vec<(usize, D::Memory<D::Wide>)> {
        for part in &self.parts {
            if self.early[part.index()].is_some() {
                let unit = &self.shards.units()[part.unit()];
                self.open[part.unit()].get_or_insert_with(|| device.zeros(unit.padded()));
            }
        }
        self.close(device, 0..self.open.len())
    }

    fn closed(&mut self, device: &D, unit: usize) -> Option<D::Memory<D::Wide>> {
        let mut memory = self.open[unit].take()?;
        let begin = self.shards.units()[unit].elements.start;
        for part in self.parts.iter().filter(|part| part.unit() == unit) {
            if let Some(early) = self.early[part.index()].take() {
                let at = part.begin - begin..part.range().end - begin;
                device.add_wide(D::view(&early, 0..part.len), D::view_mut(&mut memory, at));
            }
        }
        Some(memory)
    }

    /// The first parameter that [`Self::get_mut`] was never called for.
    pub fn unwritten<'a>(&self, inventory: &'a Inventory) -> Option<&'a HeldParameter> {
        let mut all = inventory.all().iter().zip(&self.written);
        all.find(|(_, written)| !**written).map(|(held, _)| held)
    }
}

/// Memory of a parameter's early gradient.
fn early<'a, D: Device>(
    device: &D,
    memory: &'a mut Option<D::Memory<D::Wide>>,
    part: ParameterSlice,
) -> WideMut<'a, D> {
    D::view_mut(memory.get_or_insert_with(|| device.zeros(part.len)), 0..part.len)
}
