//! Memory of a device, as one of its streams sees it.

use super::DeviceError;
use crate::comm::{CommError, Communicator, Element, Payload};
use crate::scalar::{Number, Scalar};
use kernels::Cpu;
use serde::Serialize;
use std::collections::BTreeMap;
use std::ops::Range;

/// A device's memory: bytes reserved for all ranks that share it, the most used of them, and bytes
/// allocated beyond.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryUse {
    /// Reserved bytes.
    pub reserved_bytes: u64,
    /// Most reserved bytes in use at a time.
    pub used_bytes: u64,
    /// Bytes allocated beyond the reserve; 0 if the reserve was large enough.
    pub beyond_bytes: u64,
}

/// Numbers that change from step to step, besides tokens and labels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepNumbers {
    /// The training step, for random draws that differ in each.
    pub step: u32,
    /// Weight of each token's loss.
    pub loss_scale: f64,
}

/// Memory of one device, as one of its streams sees it.
pub trait Space: Sized + Send + Sync + 'static {
    /// Element type of activations and of the weights that layers read.
    type Stored: Number;
    /// Element type of gradients, moments and statistics, and of downloads: f32 or wider.
    type Wide: Scalar;
    /// Whether the optimizer's exact weights are separate from those that layers read, which are
    /// rounded copies.
    const MASTERS: bool;
    /// Owned memory.
    type Memory<E: Element>: Send + Sync + 'static;
    /// A view to read.
    type View<'a, E: Element>: Copy;
    /// A view to write.
    type ViewMut<'a, E: Element>;
    /// A sum in f64 that stays on the device until it is read.
    type Total: Send;
    /// A point in a stream's work (on a GPU, an event).
    type Mark: Send;
    /// Recorded work (on a GPU, a graph).
    type Recording: Send;

    /// No elements.
    fn empty<E: Element>() -> Self::Memory<E>;

    /// Number of elements.
    fn len<E: Element>(memory: &Self::Memory<E>) -> usize;

    /// A view of some elements, to read.
    fn view<E: Element>(memory: &Self::Memory<E>, range: Range<usize>) -> Self::View<'_, E>;

    /// A view of some elements, to write.
    fn view_mut<E: Element>(
        memory: &mut Self::Memory<E>,
        range: Range<usize>,
    ) -> Self::ViewMut<'_, E>;

    /// Splits a view after the first `at` elements.
    fn split<'a, E: Element>(
        view: Self::ViewMut<'a, E>,
        at: usize,
    ) -> (Self::ViewMut<'a, E>, Self::ViewMut<'a, E>);

    /// A new stream for another thread of this rank. Its work comes after everything asked of this
    /// stream so far.
    #[must_use]
    fn fork_stream(&self) -> Self;

    /// CPU threads for a rank's work on the host.
    fn host(&self) -> &Cpu;

    /// Notes that memory of another of this rank's streams is used on this one too, so that it is
    /// not reused before.
    fn adopt<E: Element>(&self, _memory: &Self::Memory<E>) {}

    /// Zeros.
    fn zeros<E: Element>(&self, len: usize) -> Self::Memory<E>;

    /// Memory with these elements. Costs nothing if the host's memory is the device's.
    fn taken<E: Element>(&self, values: Vec<E>) -> Self::Memory<E>;

    /// A copy of the elements.
    fn copied<E: Element>(&self, from: Self::View<'_, E>) -> Self::Memory<E>;

    /// Copies elements between views of the same length.
    fn copy<E: Element>(&self, from: Self::View<'_, E>, to: Self::ViewMut<'_, E>);

    /// Sets all elements to one value.
    fn fill<E: Element>(&self, to: Self::ViewMut<'_, E>, value: E);

    /// Copies elements from the host.
    fn upload<E: Element>(&self, from: &[E], to: Self::ViewMut<'_, E>);

    /// Copies elements to the host; waits for them.
    ///
    /// # Errors
    /// The device has failed.
    fn download<E: Element>(&self, from: Self::View<'_, E>) -> Result<Vec<E>, DeviceError>;

    /// Rounds exact weights to those that layers read.
    fn round(&self, from: Wide<'_, Self>, to: StoredMut<'_, Self>);

    /// A new sum, 0 so far.
    fn total(&self) -> Self::Total;

    /// Reads a sum; waits for it.
    ///
    /// # Errors
    /// The device has failed.
    fn read(&self, total: &Self::Total) -> Result<f64, DeviceError>;

    /// This stream's current point.
    fn mark(&self) -> Self::Mark;

    /// Orders later work of this stream after another stream's mark.
    fn wait_for(&self, mark: &Self::Mark);

    /// Memory as a payload: device memory if the communicator transfers it, else a copy on the
    /// host.
    ///
    /// # Errors
    /// The device has failed.
    fn wrap<E: Element>(
        &self,
        memory: Self::Memory<E>,
        comm: &dyn Communicator,
    ) -> Result<Payload, CommError>;

    /// The memory of a received payload; `None` if it has another type.
    fn unwrap<E: Element>(&self, payload: Payload) -> Option<Self::Memory<E>>;

    /// Whether all work so far has succeeded.
    ///
    /// # Errors
    /// The device has failed.
    fn health(&self) -> Result<(), DeviceError>;

    /// Sets the numbers that change from step to step. Returns what later calls of the step pass
    /// for them: the numbers themselves, or placeholders if kernels read them from memory, so that
    /// the step can be recorded.
    fn step_numbers(&self, numbers: StepNumbers) -> StepNumbers {
        numbers
    }

    /// Why work cannot be recorded; `None` if it can.
    fn not_recordable(&self) -> Option<&'static str> {
        Some("the rank is on a processor")
    }

    /// Starts recording: from now on work is recorded and not executed, also on forked streams.
    /// Nothing can be uploaded or read meanwhile.
    ///
    /// # Errors
    /// The device has failed, or cannot record ([`Space::not_recordable`]).
    fn start_recording(&self) -> Result<(), DeviceError> {
        Err(DeviceError("this device records nothing: our bug".to_owned()))
    }

    /// Ends [`Space::start_recording`].
    ///
    /// # Errors
    /// The device has failed, or was asked for something that cannot be recorded.
    fn finish_recording(&self) -> Result<Self::Recording, DeviceError> {
        Err(DeviceError("this device records nothing: our bug".to_owned()))
    }

    /// Executes recorded work on the memory that it was recorded with, including transfers over
    /// `world` and its groups.
    ///
    /// # Errors
    /// The device has failed.
    fn replay(
        &self,
        _recording: &Self::Recording,
        _world: &dyn Communicator,
    ) -> Result<(), DeviceError> {
        Err(DeviceError("this device records nothing: our bug".to_owned()))
    }

    /// The device's memory use so far; `None` if it is not counted.
    fn memory_use(&self) -> Option<MemoryUse> {
        None
    }

    /// For each shape with several kernels that was measured: the kernel in use, then the time of
    /// each. Empty if there is no choice.
    fn chosen_kernels(&self) -> BTreeMap<String, Vec<String>> {
        BTreeMap::new()
    }
}

/// Activations or weights to read.
pub type Stored<'a, D> = <D as Space>::View<'a, <D as Space>::Stored>;
/// Activations or weights to write.
pub type StoredMut<'a, D> = <D as Space>::ViewMut<'a, <D as Space>::Stored>;
/// Gradients of weights, moments or statistics to read.
pub type Wide<'a, D> = <D as Space>::View<'a, <D as Space>::Wide>;
/// Gradients of weights, moments or statistics to write.
pub type WideMut<'a, D> = <D as Space>::ViewMut<'a, <D as Space>::Wide>;
/// Token ids, labels or positions.
pub type Ids<'a, D> = <D as Space>::View<'a, i64>;
