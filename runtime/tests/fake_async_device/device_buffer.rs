//! Memory in transit between ranks.

use super::memory::{Memory, Part};
use super::stream::{Mark, Stream};
use runtime::Scalar;
use runtime::comm::{DeviceBuffer, Dtype, Element, Op};
use runtime::device::DeviceError;
use std::any::Any;
use std::ops::Range;
use std::sync::Mutex;

/// Memory in transit between ranks: the memory, when it is ready, and the giver's stream.
pub(super) struct FakeDeviceBuffer<E, W> {
    pub(super) memory: Memory<E>,
    pub(super) ready: Mark,
    pub(super) stream: Mutex<Stream<W>>,
}

impl<E, W> std::fmt::Debug for FakeDeviceBuffer<E, W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FakeDeviceBuffer of {}", self.memory.len)
    }
}

impl<E: Element, W: Scalar> FakeDeviceBuffer<E, W> {
    fn of(buffer: &dyn DeviceBuffer) -> Result<&Self, DeviceError> {
        let wrong = || DeviceError("memory of another device".to_owned());
        buffer.as_any().downcast_ref().ok_or_else(wrong)
    }

    /// New memory, filled after its inputs are ready.
    fn made(
        &self,
        parts: Vec<&Self>,
        len: usize,
        make: impl FnOnce() -> Vec<E> + Send + 'static,
    ) -> Box<dyn DeviceBuffer> {
        let stream = self.stream.lock().unwrap().clone();
        parts.into_iter().for_each(|part| stream.wait_for(&part.ready));
        let memory = Memory::new(vec![E::default(); len]);
        let to = memory.all();
        stream.run(move |_| to.set(&make()));
        Box::new(Self { memory, ready: stream.mark(), stream: Mutex::new(stream) })
    }
}

impl<E: Element, W: Scalar> DeviceBuffer for FakeDeviceBuffer<E, W> {
    fn dtype(&self) -> Dtype {
        E::DTYPE
    }

    fn len(&self) -> usize {
        self.memory.len
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }

    fn reduced(
        &self,
        given: &[&dyn DeviceBuffer],
        range: Range<usize>,
        op: Op,
    ) -> Result<Box<dyn DeviceBuffer>, DeviceError> {
        let given: Vec<&Self> = given.iter().map(|of| Self::of(*of)).collect::<Result<_, _>>()?;
        let parts: Vec<Part<E>> = given.iter().map(|of| of.memory.all()).collect();
        let len = range.len();
        let make = move || {
            let mut parts = parts.into_iter().map(|part| part.values());
            let mut sum = parts.next().unwrap_or_default()[range.clone()].to_vec();
            for part in parts {
                for (sum, &next) in sum.iter_mut().zip(&part[range.clone()]) {
                    *sum = match op {
                        Op::Sum => sum.plus(next),
                        Op::Max if next > *sum => next,
                        Op::Max => *sum,
                    };
                }
            }
            sum
        };
        Ok(self.made(given, len, make))
    }

    fn joined(
        &self,
        parts: &[(&dyn DeviceBuffer, Range<usize>)],
    ) -> Result<Box<dyn DeviceBuffer>, DeviceError> {
        let given: Vec<&Self> = parts.iter().map(|of| Self::of(of.0)).collect::<Result<_, _>>()?;
        let pieces = given.iter().zip(parts);
        let pieces: Vec<Part<E>> = pieces
            .map(|(of, (_, range))| Part { block: of.memory.block.clone(), range: range.clone() })
            .collect();
        let len = pieces.iter().map(|piece| piece.range.len()).sum();
        Ok(self.made(given, len, move || pieces.iter().flat_map(Part::values).collect()))
    }
}
