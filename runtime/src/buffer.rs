//! Memory for activations and gradients, used again and again.
//!
//! A step asks for the same lengths as the step before. Handing buffers back to a pool instead of the
//! operating system saves the zeroing and the page faults, about a tenth of a step on a CPU.

use crate::comm::Element;
use crate::device::Space;
use crate::scalar::Number;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

/// Runs of elements by their length.
type ByLength<M> = HashMap<usize, Vec<M>>;

/// One rank's free buffers of one element type.
pub struct Pool<D: Space, E: Element> {
    free: Rc<RefCell<ByLength<D::Memory<E>>>>,
}

/// One rank's free buffers.
pub struct Pools<D: Space> {
    /// For activations.
    pub stored: Pool<D, D::Stored>,
    /// For statistics of rows.
    pub wide: Pool<D, D::Wide>,
}

impl<D: Space> Default for Pools<D> {
    fn default() -> Self {
        Self { stored: Pool::default(), wide: Pool::default() }
    }
}

impl<D: Space, E: Element> Default for Pool<D, E> {
    fn default() -> Self {
        Self { free: Rc::default() }
    }
}

impl<D: Space, E: Element> Clone for Pool<D, E> {
    fn clone(&self) -> Self {
        Self { free: self.free.clone() }
    }
}

impl<D: Space, E: Number> Pool<D, E> {
    /// A buffer of `len` elements that are anything: whoever takes it writes all of them before
    /// reading any. Builds with debug assertions fill it with NaN, so that tests see who does not.
    pub fn take(&self, device: &D, len: usize) -> Buffer<D, E> {
        let free = self.free.borrow_mut().get_mut(&len).and_then(Vec::pop);
        let mut buffer = self.adopt(free.unwrap_or_else(|| device.zeros(len)));
        if cfg!(debug_assertions) {
            device.fill(buffer.view_mut(), E::nearest(f64::NAN));
        }
        buffer
    }

    /// A copy of a buffer.
    pub fn copy_of(&self, device: &D, buffer: &Buffer<D, E>) -> Buffer<D, E> {
        let mut copy = self.take(device, buffer.len());
        device.copy(buffer.view(), copy.view_mut());
        copy
    }
}

impl<D: Space, E: Element> Pool<D, E> {
    /// A buffer of what came from elsewhere; its memory stays here afterwards.
    pub fn adopt(&self, memory: D::Memory<E>) -> Buffer<D, E> {
        Buffer { memory, pool: Some(self.clone()) }
    }

    fn give(&self, memory: D::Memory<E>) {
        self.free.borrow_mut().entry(D::len(&memory)).or_default().push(memory);
    }
}

/// Elements that go back to their pool when dropped: activations, unless said otherwise.
pub struct Buffer<D: Space, E: Element = <D as Space>::Stored> {
    memory: D::Memory<E>,
    pool: Option<Pool<D, E>>,
}

/// Statistics of rows.
pub type WideBuffer<D> = Buffer<D, <D as Space>::Wide>;

impl<D: Space, E: Element> Buffer<D, E> {
    /// No elements.
    pub fn empty() -> Self {
        Self { memory: D::empty(), pool: None }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        D::len(&self.memory)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        self.len() * size_of::<E>()
    }

    /// All elements.
    pub fn view(&self) -> D::View<'_, E> {
        D::view(&self.memory, 0..self.len())
    }

    /// Some of the elements.
    pub fn part(&self, range: Range<usize>) -> D::View<'_, E> {
        D::view(&self.memory, range)
    }

    /// All elements.
    pub fn view_mut(&mut self) -> D::ViewMut<'_, E> {
        let len = self.len();
        D::view_mut(&mut self.memory, 0..len)
    }

    /// The elements, for good.
    pub fn into_memory(mut self) -> D::Memory<E> {
        std::mem::replace(&mut self.memory, D::empty())
    }
}

impl<D: Space, E: Element> Drop for Buffer<D, E> {
    fn drop(&mut self) {
        let memory = std::mem::replace(&mut self.memory, D::empty());
        if let (Some(pool), true) = (&self.pool, D::len(&memory) > 0) {
            pool.give(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Host;

    #[test]
    fn memory_comes_back() {
        let (device, pool) = (Host::<f32>::serial(), Pool::<Host<f32>, f32>::default());
        let first = pool.take(&device, 5);
        let at = first.view().as_ptr();
        drop(first);
        assert_eq!(pool.take(&device, 5).view().as_ptr(), at);
        assert_ne!(pool.take(&device, 6).view().as_ptr(), at);
        assert!(pool.take(&device, 5).view().iter().all(|x| x.is_nan()));
        let kept = pool.take(&device, 5).into_memory();
        assert_ne!(pool.take(&device, 5).view().as_ptr(), kept.as_ptr());
        let adopted = pool.adopt(kept);
        let at = adopted.view().as_ptr();
        drop(adopted);
        assert_eq!(pool.take(&device, 5).view().as_ptr(), at);
    }
}
