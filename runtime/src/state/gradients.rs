//! Gradients of a rank's parameters while they are added up.

use super::params::{Gradient, HeldParameter, Inventory, ParameterSlice, Store};
use super::shards::Shards;
use crate::device::{Device, Space, WideMut};
use kernels::{Output, Real};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

/// Sums of gradients, and where passes add to them.
///
/// A step does not set all of them to 0 before it: the first product of a matrix's gradient
/// replaces what the step before has left there. Which matrices those are is seen in the first
/// step. Until then their elements are *stale*; what reads sums settles them first.
///
/// If replicas share gradients (ZeRO stages 2 and 3), a pass adds to memory of one unit, which is
/// *open* until its reduce-scatter. Otherwise passes add to the sums themselves.
pub struct GradientStore<D: Space> {
    shards: Rc<Shards>,
    sums: Store<D>,
    /// Memory of open units, padded.
    open: Vec<Option<D::Memory<D::Wide>>>,
    /// Whether each parameter was ever asked for to be written, or is not trained.
    written: Vec<bool>,
    /// Whether anything but products was added to a parameter's gradient in this step.
    added: Vec<bool>,
    /// Begin and end of the elements that a product writes first in each step.
    products: BTreeMap<usize, usize>,
    /// Those of them that were not written in this step.
    stale: BTreeMap<usize, usize>,
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
            written: inventory.all().iter().map(is_untrained).collect(),
            added: vec![false; inventory.all().len()],
            products: BTreeMap::new(),
            stale: BTreeMap::new(),
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

    /// Begins a step: sets to 0 what no product replaces.
    pub fn clear(&mut self, device: &D) {
        let end = self.sums.len();
        let mut at = 0;
        for (begin, behind) in self.products.iter().map(|(b, e)| (*b, *e)).chain([(end, end)]) {
            if at < begin {
                device.fill(self.sums.range_mut(at..begin), D::Wide::ZERO);
            }
            at = behind;
        }
        self.added.fill(false);
        self.stale.clone_from(&self.products);
    }

    /// Sets to 0 what is stale in a range.
    pub fn settle(&mut self, device: &D, range: Range<usize>) {
        while let Some((&begin, &end)) = self.stale.range(..range.end).next_back()
            && end > range.start
        {
            device.fill(self.sums.range_mut(begin..end), D::Wide::ZERO);
            self.stale.remove(&begin);
        }
    }

    /// The sums: of everything, or of this rank's pieces.
    pub fn sums(&self) -> &Store<D> {
        &self.sums
    }

    /// The sums.
    pub fn sums_mut(&mut self) -> &mut Store<D> {
        &mut self.sums
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

    fn part_mut(&mut self, device: &D, part: ParameterSlice) -> WideMut<'_, D> {
        let (memory, at) = self.around(device, part);
        D::split(D::split(memory, part.begin - at).1, part.len).0
    }

    /// Notes that something will be added to a parameter's gradient.
    fn begin_sum(&mut self, device: &D, part: ParameterSlice) {
        self.written[part.index()] = true;
        self.added[part.index()] = true;
        self.settle(device, part.range());
    }

    /// Takes the gradients of the open units among `units`, the last first. They are no longer
    /// open.
    pub fn close(&mut self, units: Range<usize>) -> Vec<(usize, D::Memory<D::Wide>)> {
        units.rev().filter_map(|unit| Some((unit, self.open[unit].take()?))).collect()
    }

    /// The first parameter that [`Self::get_mut`] was never called for.
    pub fn unwritten<'a>(&self, inventory: &'a Inventory) -> Option<&'a HeldParameter> {
        let mut all = inventory.all().iter().zip(&self.written);
        all.find(|(_, written)| !**written).map(|(held, _)| held)
    }
}

fn is_untrained(held: &HeldParameter) -> bool {
    held.declaration.gradient == Gradient::None
}

/// Where work on weights adds its gradients.
pub trait GradientSink<D: Space> {
    /// Where to add to a parameter's gradient.
    fn get_mut(&mut self, device: &D, part: ParameterSlice) -> WideMut<'_, D>;

    /// Where a product goes that is a parameter's gradient, and whether it is added there or
    /// stored.
    fn get_product(&mut self, device: &D, part: ParameterSlice) -> (WideMut<'_, D>, Output);

    /// The same for two parameters of one unit, of which the first lies before the second.
    fn get_pair_mut(
        &mut self,
        device: &D,
        first: ParameterSlice,
        second: ParameterSlice,
    ) -> (WideMut<'_, D>, WideMut<'_, D>);
}

impl<D: Device> GradientSink<D> for GradientStore<D> {
    fn get_mut(&mut self, device: &D, part: ParameterSlice) -> WideMut<'_, D> {
        self.begin_sum(device, part);
        self.part_mut(device, part)
    }

    fn get_product(&mut self, device: &D, part: ParameterSlice) -> (WideMut<'_, D>, Output) {
        self.written[part.index()] = true;
        let Range { start, end } = part.range();
        let output = match self.stale.get(&start) {
            Some(known) if *known == end => {
                self.stale.remove(&start);
                Output::Overwrite
            }
            _ => {
                self.settle(device, start..end);
                let first = !self.opens_units() && !self.added[part.index()];
                let before = self.products.range(..end).next_back();
                if first && before.is_none_or(|(_, end)| *end <= start) {
                    self.products.insert(start, end);
                }
                Output::Accumulate
            }
        };
        (self.part_mut(device, part), output)
    }

    fn get_pair_mut(
        &mut self,
        device: &D,
        first: ParameterSlice,
        second: ParameterSlice,
    ) -> (WideMut<'_, D>, WideMut<'_, D>) {
        self.begin_sum(device, first);
        self.begin_sum(device, second);
        let (memory, at) = self.around(device, first);
        let (one, rest) = D::split(D::split(memory, first.begin - at).1, first.len);
        let behind = D::split(rest, second.begin - first.range().end).1;
        (one, D::split(behind, second.len).0)
    }
}

/// A parameter, and a gradient of it.
pub type Apart<D> = (ParameterSlice, <D as Space>::Memory<<D as Space>::Wide>);

/// Gradients of some vectors, each in memory of its own.
pub struct Vectors<D: Space>(pub Vec<Apart<D>>);

impl<D: Device> Vectors<D> {
    fn begin(&mut self, device: &D, part: ParameterSlice) {
        self.0.push((part, device.zeros(part.len)));
    }
}

impl<D: Device> GradientSink<D> for Vectors<D> {
    fn get_mut(&mut self, device: &D, part: ParameterSlice) -> WideMut<'_, D> {
        self.begin(device, part);
        let (_, memory) = self.0.last_mut().expect("just begun");
        D::view_mut(memory, 0..part.len)
    }

    fn get_product(&mut self, device: &D, part: ParameterSlice) -> (WideMut<'_, D>, Output) {
        (self.get_mut(device, part), Output::Accumulate)
    }

    fn get_pair_mut(
        &mut self,
        device: &D,
        first: ParameterSlice,
        second: ParameterSlice,
    ) -> (WideMut<'_, D>, WideMut<'_, D>) {
        self.begin(device, first);
        self.begin(device, second);
        match &mut self.0[..] {
            [.., (_, one), (_, other)] => {
                (D::view_mut(one, 0..first.len), D::view_mut(other, 0..second.len))
            }
            _ => unreachable!("both were just begun"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Host;
    use crate::state::params::{ByDivision, Declaration, Division, Init, Member, Placement};
    use crate::state::shards::Zero;

    type TestStore = GradientStore<Host<f32>>;

    fn store() -> (Host<f32>, TestStore, [ParameterSlice; 3]) {
        let mut inventory = Inventory::new(0, 1);
        let [matrix, bias, table] = [("a", 6), ("b", 2), ("c", 4)].map(|(name, elements)| {
            inventory.declare(Declaration {
                name: name.to_owned(),
                shape: vec![elements],
                transposed: false,
                division: Division::Dense,
                placement: Placement::Replicated,
                gradient: Gradient::Whole,
                tied_copy: false,
                init: Init::Constant(0.0),
            })
        });
        let only = ByDivision { dense: Member::ONLY, expert: Member::ONLY };
        let shards = Rc::new(Shards::new(&inventory, Zero::NONE, only));
        let device = Host::serial();
        let store = GradientStore::new(&device, &shards, &inventory);
        (device, store, [matrix, bias, table])
    }

    /// A product that is `value` everywhere.
    fn product(device: &Host<f32>, store: &mut TestStore, part: ParameterSlice, value: f32) {
        let (to, output) = store.get_product(device, part);
        for to in to {
            *to = if output == Output::Accumulate { *to + value } else { value };
        }
    }

    fn sum(device: &Host<f32>, store: &mut TestStore, part: ParameterSlice, value: f32) {
        store.get_mut(device, part).iter_mut().for_each(|to| *to += value);
    }

    #[test]
    fn a_product_replaces_what_the_step_before_has_left() {
        let (device, mut store, [matrix, bias, table]) = store();
        for step in 0..3 {
            store.clear(&device);
            // Two rows of blocks in two micro-batches, a vector, and a table that a product writes
            // before rows are added to it.
            for _ in 0..2 {
                product(&device, &mut store, matrix.rows(0..2, 2), 1.0);
                product(&device, &mut store, matrix.rows(2..3, 2), 2.0);
                sum(&device, &mut store, bias, 3.0);
                product(&device, &mut store, table, 4.0);
                sum(&device, &mut store, table, 5.0);
            }
            let (to, output) = (store.stale.len(), store.products.len());
            assert_eq!((to, output), (0, 3), "step {step}");
            store.settle(&device, 0..usize::MAX);
            let wanted = [[2.0; 4].as_slice(), &[4.0; 2], &[6.0; 2], &[18.0; 4]].concat();
            assert_eq!(store.sums().all(), wanted, "step {step}");
        }
    }

    #[test]
    fn what_no_product_replaces_is_0() {
        let (device, mut store, [matrix, bias, table]) = store();
        for step in 0..2 {
            store.clear(&device);
            product(&device, &mut store, matrix, 1.0);
            product(&device, &mut store, table, 2.0);
            sum(&device, &mut store, bias, 3.0);
            assert!(store.stale.is_empty(), "step {step}");
        }
        // A step in which rows are added to the table first, and the matrix is left out.
        store.clear(&device);
        sum(&device, &mut store, table, 5.0);
        product(&device, &mut store, table, 2.0);
        assert_eq!(store.sums().all()[..6], [1.0; 6], "stale until it is settled");
        store.settle(&device, 6..12);
        assert_eq!(store.sums().all()[..6], [1.0; 6], "it lies before that range");
        store.settle(&device, 0..usize::MAX);
        assert_eq!(store.sums().all(), [[0.0; 6].as_slice(), &[0.0; 2], &[7.0; 4]].concat());
    }
}
