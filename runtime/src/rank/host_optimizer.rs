//! Optimizer state in host memory: the CPU updates it, and only gradients and weights move between
//! host and device.

use crate::comm::CommError;
use crate::device::{Device, StoredMut, Wide};
use crate::scalar::{Number, Scalar};
use crate::state::shards::Slice;
use kernels::adamw::{self, AdamW};
use std::collections::BTreeMap;

/// Exact weights and moments in host memory, by each slice's first element.
pub(super) struct HostOptimizer<T>(BTreeMap<usize, SliceState<T>>);

/// The state of one slice.
struct SliceState<T> {
    exact: Vec<T>,
    m: Vec<T>,
    v: Vec<T>,
}

impl<T: Scalar> HostOptimizer<T> {
    /// Zeros.
    pub(super) fn new(slices: &[Slice]) -> Self {
        let zeros = |slice: &Slice| {
            let zeros = || vec![T::ZERO; slice.whole.len()];
            (slice.whole.start, SliceState { exact: zeros(), m: zeros(), v: zeros() })
        };
        Self(slices.iter().map(zeros).collect())
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        let elements = |slice: &SliceState<T>| slice.exact.len() + slice.m.len() + slice.v.len();
        self.0.values().map(elements).sum::<usize>() * size_of::<T>()
    }

    fn of(&mut self, slice: &Slice) -> &mut SliceState<T> {
        self.0.get_mut(&slice.whole.start).expect("made for the same slices")
    }

    /// A slice's exact weights.
    pub(super) fn exact(&self, slice: &Slice) -> &[T] {
        &self.0[&slice.whole.start].exact
    }

    /// Sets a slice's exact weights.
    pub(super) fn set(&mut self, slice: &Slice, exact: Vec<T>) {
        self.of(slice).exact = exact;
    }

    /// Updates a slice from its gradient on the device, and writes the new weights there.
    pub(super) fn update<D: Device<Wide = T>>(
        &mut self,
        device: &D,
        adamw: &AdamW,
        slice: &Slice,
        gradient: Wide<'_, D>,
        weights: StoredMut<'_, D>,
        decay: f64,
    ) -> Result<(), CommError> {
        let g = device.download(gradient)?;
        let SliceState { exact, m, v } = self.of(slice);
        let parameter = adamw::Parameter { w: &mut *exact, g: &g, m, v, decay };
        adamw::update(device.host(), adamw, &mut [parameter]);
        let stored: Vec<D::Stored> =
            exact.iter().map(|value| D::Stored::nearest(value.value())).collect();
        device.upload(&stored, weights);
        Ok(())
    }
}
