//! A rank's CUDA stream, and memory that returns to its stream once all users are done with it.

use crate::comm::Element;
use crate::device::DeviceError;
use kernels::cuda::{self, Event, GpuError};
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A CUDA stream, and the rank's first failure.
#[derive(Clone)]
pub(super) struct Queue {
    pub gpu: cuda::Gpu,
    pub failure: Arc<OnceLock<DeviceError>>,
}

impl Queue {
    /// Another stream of the rank; this one again if there cannot be another.
    pub(super) fn fork(&self) -> Self {
        let gpu = self.kept(self.gpu.fork()).unwrap_or_else(|| self.gpu.clone());
        Self { gpu, failure: self.failure.clone() }
    }

    /// Records a failure.
    pub(super) fn kept<R>(&self, result: Result<R, GpuError>) -> Option<R> {
        match result {
            Ok(result) => Some(result),
            Err(error) => {
                self.failure.get_or_init(|| error.into());
                None
            }
        }
    }

    pub(super) fn health(&self) -> Result<(), DeviceError> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.clone()))
    }

    pub(super) fn mark(&self) -> Option<Event> {
        self.kept(self.gpu.record())
    }

    pub(super) fn wait_for(&self, mark: Option<&Event>) {
        if let Some(event) = mark {
            self.kept(self.gpu.wait(event));
        }
    }

    /// Memory of `len` elements, allocated by `fill`.
    pub(super) fn memory<E: Element>(
        &self,
        len: usize,
        fill: impl FnOnce(&cuda::Gpu) -> Result<cuda::Memory<E>, GpuError>,
    ) -> Memory<E> {
        let memory = if len == 0 { None } else { self.kept(fill(&self.gpu)) };
        let allocation =
            memory.map(|memory| Allocation { memory: Some(memory), users: Mutex::default() });
        Memory { allocation, len }
    }
}

/// GPU memory. If the device had none left, nothing is behind it and operations on it do nothing;
/// the device has recorded the failure.
pub struct Memory<E: Element> {
    allocation: Option<Allocation<E>>,
    pub(super) len: usize,
}

struct Allocation<E: Element> {
    memory: Option<cuda::Memory<E>>,
    /// Other streams that use it.
    users: Mutex<Vec<Queue>>,
}

impl<E: Element> Memory<E> {
    pub(super) fn view(&self, range: Range<usize>) -> View<'_, E> {
        View(
            self.allocation
                .as_ref()
                .and_then(|allocation| allocation.memory.as_ref())
                .map(|of| of.slice(range)),
        )
    }

    pub(super) fn all(&self) -> View<'_, E> {
        self.view(0..self.len)
    }

    pub(super) fn view_mut(&mut self, range: Range<usize>) -> ViewMut<'_, E> {
        let memory = self.allocation.as_mut().and_then(|allocation| allocation.memory.as_mut());
        ViewMut(memory.map(|of| of.slice_mut(range)))
    }

    pub(super) fn all_mut(&mut self) -> ViewMut<'_, E> {
        self.view_mut(0..self.len)
    }

    /// No memory.
    pub(super) const fn empty() -> Self {
        Self { allocation: None, len: 0 }
    }

    /// The memory is in use until `event`.
    pub(super) fn busy_until(&self, event: Event) {
        if let Some(memory) =
            self.allocation.as_ref().and_then(|allocation| allocation.memory.as_ref())
        {
            memory.busy_until(event);
        }
    }

    /// The memory will be used on `queue` too.
    pub(super) fn used_on(&self, queue: &Queue) {
        if let Some(allocation) = &self.allocation {
            allocation.users.lock().unwrap_or_else(PoisonError::into_inner).push(queue.clone());
        }
    }
}

impl<E: Element> Drop for Allocation<E> {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        // The memory's own stream may hand it out again only after the work of its other users.
        let users = self.users.get_mut().unwrap_or_else(PoisonError::into_inner);
        users.drain(..).filter_map(|user| user.mark()).for_each(|mark| memory.busy_until(mark));
    }
}

/// Elements to read.
#[derive(Clone, Copy)]
pub struct View<'a, E: Element>(pub(super) Option<cuda::View<'a, E>>);

/// Elements to write.
pub struct ViewMut<'a, E: Element>(pub(super) Option<cuda::ViewMut<'a, E>>);
