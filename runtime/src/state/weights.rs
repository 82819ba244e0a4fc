//! Weights as passes read them: all of them, or gathered unit by unit.

use super::params::{ByDivision, Gradient, Inventory, ParameterSlice, Store, parts_mut};
use super::shards::{Shards, Slice, Unit};
use crate::comm::{CommError, Communicator};
use crate::device::{Device, DeviceGroup, DeviceRequest, Space, Stored, StoredMut};
use kernels::Real;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::{Rc, Weak};

/// The replicas that share one copy of the state.
pub type Sharing<'a> = ByDivision<&'a dyn Communicator>;

/// Memory of a unit, padded.
type Memory<D> = <D as Space>::Memory<<D as Space>::Stored>;

/// Selection biases in host memory, by index in the inventory: exact, and whole on every rank.
pub type Biases<T> = BTreeMap<usize, Vec<T>>;

/// A rank's weights.
pub struct Weights<D: Space> {
    shards: Rc<Shards>,
    units: RefCell<Vec<Whole<D>>>,
    /// This rank's pieces, if replicas share weights (ZeRO stage 3).
    pieces: Option<Store<D, D::Stored>>,
    biases: Biases<D::Wide>,
}

/// The whole weights of a unit.
enum Whole<D: Space> {
    /// They stay here.
    Here(Rc<Memory<D>>),
    /// They are being gathered.
    InFlight(DeviceRequest<D, D::Stored>),
    /// Whoever gathered them may still hold them.
    Lent(Weak<Memory<D>>),
}

impl<D: Device> Weights<D> {
    /// Zeros.
    pub fn new(device: &D, shards: &Rc<Shards>, inventory: &Inventory) -> Self {
        let shared = shards.zero().shares_weights();
        let whole = |unit: &Unit| match shared {
            true => Whole::Lent(Weak::new()),
            false => Whole::Here(Rc::new(device.zeros(unit.padded()))),
        };
        Self {
            units: RefCell::new(shards.units().iter().map(whole).collect()),
            pieces: shared.then(|| Store::pieces(device, shards)),
            shards: shards.clone(),
            biases: (inventory.all().iter())
                .filter(|held| held.declaration.gradient == Gradient::None)
                .map(|held| (held.part.index(), vec![D::Wide::ZERO; held.part.len]))
                .collect(),
        }
    }

    /// Selection biases.
    pub fn biases(&self) -> &Biases<D::Wide> {
        &self.biases
    }

    /// Selection biases.
    pub fn biases_mut(&mut self) -> &mut Biases<D::Wide> {
        &mut self.biases
    }

    /// How they are divided.
    pub fn shards(&self) -> &Shards {
        &self.shards
    }

    /// Bytes held between passes.
    pub fn bytes(&self) -> usize {
        let padded = |unit: &Unit| unit.padded();
        let elements = match &self.pieces {
            Some(_) => self.shards.pieces(),
            None => self.shards.units().iter().map(padded).sum(),
        };
        elements * size_of::<D::Stored>()
    }

    /// Sets a unit to `values`, one for each of its elements.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn set(&mut self, device: &D, unit: usize, values: &Memory<D>) -> Result<(), CommError> {
        let (of, len) = (&self.shards.units()[unit], D::len(values));
        let Some(pieces) = &mut self.pieces else {
            let memory = Self::here(device, self.units.get_mut(), unit)?;
            device.copy(D::view(values, 0..len), D::view_mut(memory, 0..len));
            return Ok(());
        };
        let own = of.own_of(len);
        let to = pieces.range_mut(of.begin..of.begin + own.len());
        device.copy(D::view(values, own), to);
        Ok(())
    }

    /// The memory of a unit that stays here, to write to it.
    fn here<'a>(
        device: &D,
        units: &'a mut [Whole<D>],
        unit: usize,
    ) -> Result<&'a mut Memory<D>, CommError> {
        let held = Self::arrived(device, &mut units[unit])?;
        drop(held);
        match &mut units[unit] {
            Whole::Here(memory) => Ok(Rc::get_mut(memory).expect("no pass runs meanwhile")),
            Whole::InFlight(_) | Whole::Lent(_) => unreachable!("a unit that stays here"),
        }
    }

    /// Waits for a unit that stays here.
    fn arrived(device: &D, unit: &mut Whole<D>) -> Result<Rc<Memory<D>>, CommError> {
        if let Whole::InFlight(_) = unit {
            let Whole::InFlight(request) = std::mem::replace(unit, Whole::Lent(Weak::new())) else {
                unreachable!("it is in flight");
            };
            *unit = Whole::Here(Rc::new(request.wait(device)?));
        }
        match unit {
            Whole::Here(memory) => Ok(memory.clone()),
            Whole::InFlight(_) | Whole::Lent(_) => unreachable!("a unit that stays here"),
        }
    }

    /// The elements of each slice, to update them.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn each_mut(
        &mut self,
        device: &D,
        slices: &[Slice],
    ) -> Result<Vec<StoredMut<'_, D>>, CommError> {
        if let Some(pieces) = &mut self.pieces {
            // What was gathered and not read is old once they are updated.
            for unit in self.units.get_mut() {
                if let Whole::InFlight(request) = std::mem::replace(unit, Whole::Lent(Weak::new()))
                {
                    request.wait(device)?;
                }
            }
            return Ok(pieces.each_mut(slices));
        }
        let units = self.units.get_mut();
        for unit in 0..units.len() {
            Self::here(device, units, unit)?;
        }
        let mut views = Vec::with_capacity(slices.len());
        for (unit, held) in units.iter_mut().enumerate() {
            let of = &self.shards.units()[unit];
            let inside = slices.iter().filter(|slice| slice.unit == unit);
            let places: Vec<Range<usize>> = inside.map(|slice| slice.whole.clone()).collect();
            if let Whole::Here(memory) = held {
                let memory = Rc::get_mut(memory).expect("no pass runs meanwhile");
                let view = D::view_mut(memory, 0..of.padded());
                views.extend(parts_mut::<D, D::Stored>(view, of.elements.start, &places));
            }
        }
        Ok(views)
    }

    /// Starts to gather what the replicas that share the state have updated, if each updates its
    /// piece of weights that stay whole (ZeRO stages 1 and 2).
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn start_gathers(&mut self, device: &D, sharing: Sharing<'_>) -> Result<(), CommError> {
        if !self.shards.gathers_updates() {
            return Ok(());
        }
        for (unit, held) in self.shards.units().iter().zip(self.units.get_mut()) {
            let group = sharing.of(unit.division);
            if group.size() == 1 {
                continue;
            }
            let own = match held {
                Whole::Here(memory) => device.copied(D::view(memory, unit.own())),
                Whole::InFlight(_) | Whole::Lent(_) => unreachable!("it was updated"),
            };
            let request = DeviceGroup::new(device, group).start_all_gather(own)?;
            *held = Whole::InFlight(request);
        }
        Ok(())
    }

    /// Starts to gather a unit over the replicas that share it, unless it is here or on its way.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn prefetch(&self, device: &D, sharing: Sharing<'_>, unit: usize) -> Result<(), CommError> {
        let Some(pieces) = &self.pieces else { return Ok(()) };
        let held = &mut self.units.borrow_mut()[unit];
        let absent = matches!(held, Whole::Lent(memory) if memory.strong_count() == 0);
        if absent {
            let unit = &self.shards.units()[unit];
            let group = sharing.of(unit.division);
            let own = device.copied(pieces.range(pieces.place_of_piece(unit)));
            *held = Whole::InFlight(DeviceGroup::new(device, group).start_all_gather(own)?);
        }
        Ok(())
    }

    /// Weights that a pass can read: those of `units`. If replicas share weights, they are gathered
    /// and freed with the last holder of what this returns. If replicas share updates, this waits
    /// for what the others have updated.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn gather(
        &self,
        device: &D,
        sharing: Sharing<'_>,
        units: &[Range<usize>],
    ) -> Result<WeightView<D>, CommError> {
        let each = || units.iter().cloned().flatten();
        each().try_for_each(|unit| self.prefetch(device, sharing, unit))?;
        let held = |unit| Ok((unit, self.held(device, unit)?));
        let units = each().map(held).collect::<Result<_, CommError>>()?;
        Ok(WeightView { shards: self.shards.clone(), units })
    }

    /// The memory of a unit that is here or on its way.
    fn held(&self, device: &D, unit: usize) -> Result<Rc<Memory<D>>, CommError> {
        let held = &mut self.units.borrow_mut()[unit];
        if let Whole::Lent(memory) = held
            && let Some(memory) = memory.upgrade()
        {
            return Ok(memory);
        }
        if self.pieces.is_none() {
            return Self::arrived(device, held);
        }
        match std::mem::replace(held, Whole::Lent(Weak::new())) {
            Whole::InFlight(request) => {
                let memory = Rc::new(request.wait(device)?);
                *held = Whole::Lent(Rc::downgrade(&memory));
                Ok(memory)
            }
            Whole::Here(_) | Whole::Lent(_) => unreachable!("it was prefetched"),
        }
    }

    /// Reads what this rank holds of a slice.
    ///
    /// # Errors
    /// Those of any collective call.
    pub fn read(&self, device: &D, slice: &Slice) -> Result<Vec<D::Stored>, CommError> {
        if let Some(pieces) = &self.pieces {
            return Ok(device.download(pieces.get(slice))?);
        }
        let held = Self::arrived(device, &mut self.units.borrow_mut()[slice.unit])?;
        let begin = self.shards.units()[slice.unit].elements.start;
        let (from, to) = (slice.whole.start - begin, slice.whole.end - begin);
        Ok(device.download(D::view(&held, from..to))?)
    }
}

/// Weights that a pass can read.
pub struct WeightView<D: Space> {
    shards: Rc<Shards>,
    /// Units with their numbers: a layer's, and maybe a table.
    units: Vec<(usize, Rc<Memory<D>>)>,
}

impl<D: Space> WeightView<D> {
    /// A parameter's weights.
    ///
    /// # Panics
    /// They are not among those that were asked for.
    #[track_caller]
    pub fn get(&self, part: ParameterSlice) -> Stored<'_, D> {
        let Some((_, memory)) = self.units.iter().find(|(unit, _)| *unit == part.unit()) else {
            panic!(
                "weights are read that were not asked for: `gather` or `weights` of the layer's \
                 `Parameters` gives a context that has them"
            );
        };
        let begin = part.begin - self.shards.units()[part.unit()].elements.start;
        D::view(memory, begin..begin + part.len)
    }
}
