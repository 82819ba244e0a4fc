//! Pooled memory for activations and gradients.
//!
//! A step asks for the same lengths as the step before. Returning buffers to a pool instead of the
//! operating system saves zeroing and page faults, about a tenth of a step on a CPU.
//!
//! Collectives take buffers away and bring others, sometimes of another length. So a pool never
//! holds more buffers of a length, in use and free together, than were in use at one time; the
//! excess is freed.
//!
//! Some lengths differ from step to step, such as the rows of an expert. So a pool keeps buffers
//! only of lengths that the step before asked for too.

use crate::comm::Element;
use crate::device::{DeviceError, Space};
use crate::scalar::Number;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

/// The buffers of one length.
struct Shelf<M> {
    free: Vec<M>,
    /// Buffers in use now.
    used: usize,
    /// The most that were in use at one time. `free.len() + used` is never more.
    most_used: usize,
    /// Whether this step has asked for the length.
    asked: bool,
    /// Whether the step before had.
    kept: bool,
}

impl<M> Default for Shelf<M> {
    fn default() -> Self {
        Self { free: Vec::new(), used: 0, most_used: 0, asked: false, kept: false }
    }
}

impl<M> Shelf<M> {
    fn enter(&mut self) {
        self.asked = true;
        self.used += 1;
        self.most_used = self.most_used.max(self.used);
    }

    /// Takes a free buffer into use; the caller allocates one if there is none.
    fn take(&mut self) -> Option<M> {
        self.enter();
        self.free.pop()
    }

    /// Takes a buffer from outside the pool into use. Returns a free buffer if there is now one too
    /// many.
    fn adopt(&mut self) -> Option<M> {
        self.enter();
        if self.free.len() + self.used > self.most_used { self.free.pop() } else { None }
    }

    /// A buffer in use has left the pool.
    fn leave(&mut self) {
        self.used -= 1;
    }

    /// A buffer in use is free again. Returns it if it is not kept.
    fn give(&mut self, memory: M) -> Option<M> {
        self.leave();
        if !self.kept {
            return Some(memory);
        }
        self.free.push(memory);
        None
    }

    /// Begins a step; returns whether anything is left here.
    fn begin_step(&mut self) -> bool {
        self.kept = std::mem::take(&mut self.asked);
        if !self.kept {
            self.free.clear();
        }
        self.kept || self.used > 0
    }
}

/// Buffers by their length.
type ByLength<M> = HashMap<usize, Shelf<M>>;

/// One rank's buffers of one element type.
pub struct Pool<D: Space, E: Element> {
    shelves: Rc<RefCell<ByLength<D::Memory<E>>>>,
}

/// One rank's buffers.
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

impl<D: Space> Pools<D> {
    /// Begins a step: frees buffers of lengths that the last step did not ask for.
    pub fn begin_step(&self) {
        self.stored.begin_step();
        self.wide.begin_step();
    }
}

impl<D: Space, E: Element> Default for Pool<D, E> {
    fn default() -> Self {
        Self { shelves: Rc::default() }
    }
}

impl<D: Space, E: Element> Clone for Pool<D, E> {
    fn clone(&self) -> Self {
        Self { shelves: self.shelves.clone() }
    }
}

impl<D: Space, E: Number> Pool<D, E> {
    /// A buffer of `len` elements with arbitrary contents: the caller must write all of them before
    /// reading any. Builds with debug assertions fill it with NaN, so that tests notice a caller
    /// that does not.
    pub fn take(&self, device: &D, len: usize) -> Buffer<D, E> {
        let free = self.on_shelf(len, Shelf::take);
        let memory = free.unwrap_or_else(|| device.zeros(len));
        let mut buffer = Buffer { memory, pool: Some(self.clone()), on_host: None };
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
    /// A buffer around memory from outside the pool.
    pub fn adopt(&self, memory: D::Memory<E>) -> Buffer<D, E> {
        let too_many = self.on_shelf(D::len(&memory), Shelf::adopt);
        drop(too_many);
        Buffer { memory, pool: Some(self.clone()), on_host: None }
    }

    fn begin_step(&self) {
        self.shelves.borrow_mut().retain(|_, shelf| shelf.begin_step());
    }

    fn on_shelf<R>(&self, len: usize, work: impl FnOnce(&mut Shelf<D::Memory<E>>) -> R) -> R {
        work(self.shelves.borrow_mut().entry(len).or_default())
    }
}

/// Elements that return to their pool when dropped: activations unless the type says otherwise.
pub struct Buffer<D: Space, E: Element = <D as Space>::Stored> {
    memory: D::Memory<E>,
    pool: Option<Pool<D, E>>,
    /// The elements, while they are in host memory and there is none on the device.
    on_host: Option<Vec<E>>,
}

/// Statistics of rows.
pub type WideBuffer<D> = Buffer<D, <D as Space>::Wide>;

impl<D: Space, E: Element> Buffer<D, E> {
    /// No elements.
    pub fn empty() -> Self {
        Self { memory: D::empty(), pool: None, on_host: None }
    }

    /// Memory that no pool takes back.
    pub fn apart(memory: D::Memory<E>) -> Self {
        Self { memory, pool: None, on_host: None }
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

    /// Some of the elements.
    pub fn part_mut(&mut self, range: Range<usize>) -> D::ViewMut<'_, E> {
        D::view_mut(&mut self.memory, range)
    }

    /// All elements.
    pub fn view_mut(&mut self) -> D::ViewMut<'_, E> {
        let len = self.len();
        D::view_mut(&mut self.memory, 0..len)
    }

    /// Moves the elements to host memory; waits for them. Until [`Self::reload`] the buffer has
    /// no elements, and its memory serves others.
    ///
    /// # Errors
    /// The device has failed.
    pub fn offload(&mut self, device: &D) -> Result<(), DeviceError> {
        if !self.is_empty() {
            self.on_host = Some(device.download(self.view())?);
            self.free();
        }
        Ok(())
    }

    /// Moves the elements back.
    pub fn reload(&mut self, device: &D) {
        let Some(elements) = self.on_host.take() else { return };
        let len = elements.len();
        let free = self.pool.as_ref().and_then(|pool| pool.on_shelf(len, Shelf::take));
        self.memory = free.unwrap_or_else(|| device.zeros(len));
        device.upload(&elements, self.view_mut());
    }

    /// Bytes in host memory.
    pub fn host_bytes(&self) -> usize {
        self.on_host.as_ref().map_or(0, |elements| elements.len() * size_of::<E>())
    }

    fn free(&mut self) {
        let memory = std::mem::replace(&mut self.memory, D::empty());
        if let Some(pool) = &self.pool {
            let not_kept = pool.on_shelf(D::len(&memory), |shelf| shelf.give(memory));
            drop(not_kept);
        }
    }

    /// Takes the memory out of the buffer for good: it does not return to the pool.
    pub fn into_memory(mut self) -> D::Memory<E> {
        let memory = std::mem::replace(&mut self.memory, D::empty());
        if let Some(pool) = self.pool.take() {
            pool.on_shelf(D::len(&memory), Shelf::leave);
        }
        memory
    }
}

impl<D: Space, E: Element> Drop for Buffer<D, E> {
    fn drop(&mut self) {
        if self.on_host.is_none() {
            self.free();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Host;

    type TestPool = Pool<Host<f32>, f32>;

    fn free(pool: &TestPool, len: usize) -> usize {
        pool.on_shelf(len, |shelf| shelf.free.len())
    }

    /// A pool after a step that asked for these lengths.
    fn used_before(lengths: &[usize]) -> TestPool {
        let (device, pool) = (Host::<f32>::serial(), TestPool::default());
        lengths.iter().for_each(|&len| drop(pool.take(&device, len)));
        pool.begin_step();
        pool
    }

    #[test]
    fn memory_comes_back() {
        let (device, pool) = (Host::<f32>::serial(), used_before(&[5, 6]));
        let first = pool.take(&device, 5);
        let at = first.view().as_ptr();
        drop(first);
        assert_eq!(pool.take(&device, 5).view().as_ptr(), at);
        assert_ne!(pool.take(&device, 6).view().as_ptr(), at);
        assert!(pool.take(&device, 5).view().iter().all(|x| x.is_nan()));
        let kept = pool.take(&device, 5).into_memory();
        assert_ne!(pool.take(&device, 5).view().as_ptr(), kept.as_ptr());
        drop(pool.adopt(kept));
        assert_eq!(free(&pool, 5), 1);
    }

    #[test]
    fn elements_go_to_the_host_and_back() {
        let (device, pool) = (Host::<f32>::serial(), used_before(&[3]));
        let mut buffer = pool.adopt(vec![1.0, 2.0, 3.0]);
        buffer.offload(&device).unwrap();
        assert_eq!((buffer.len(), buffer.bytes(), buffer.host_bytes()), (0, 0, 12));
        // Its memory serves another meanwhile.
        let other = pool.take(&device, 3);
        assert_eq!(free(&pool, 3), 0);
        drop(other);
        buffer.reload(&device);
        assert_eq!((buffer.view(), buffer.host_bytes()), (&[1.0, 2.0, 3.0][..], 0));
        assert_eq!(free(&pool, 3), 0);
        buffer.offload(&device).unwrap();
        drop(buffer);
        assert_eq!(free(&pool, 3), 1);
    }

    /// As in an all-gather: short buffers leave and long ones arrive, step after step.
    #[test]
    fn memory_from_elsewhere_does_not_pile_up() {
        let (device, pool) = (Host::<f32>::serial(), used_before(&[4, 8]));
        for _ in 0..10 {
            let gathered: Vec<_> = (0..3).map(|_| pool.adopt(vec![0.0; 8])).collect();
            drop(pool.take(&device, 4).into_memory());
            let taken = pool.take(&device, 8);
            drop((gathered, taken));
            assert_eq!((free(&pool, 8), free(&pool, 4)), (4, 0));
            pool.begin_step();
        }
    }

    /// As in an all-reduce: other memory of the same length returns.
    #[test]
    fn memory_that_comes_for_what_went_is_kept() {
        let (device, pool) = (Host::<f32>::serial(), used_before(&[8]));
        drop(pool.take(&device, 8));
        drop(pool.take(&device, 8).into_memory());
        let came = pool.adopt(vec![0.0; 8]);
        let at = came.view().as_ptr();
        drop(came);
        assert_eq!(pool.take(&device, 8).view().as_ptr(), at);
    }

    /// As the rows of an expert, whose number differs between micro-batches and steps.
    #[test]
    fn lengths_that_differ_from_step_to_step_are_not_kept() {
        let (device, pool) = (Host::<f32>::serial(), TestPool::default());
        for step in 0..10 {
            pool.begin_step();
            for micro_batch in 0..3 {
                drop(pool.take(&device, 100 + 10 * step + micro_batch));
                drop(pool.take(&device, 8));
            }
            let kept = pool.shelves.borrow().values().map(|shelf| shelf.free.len()).sum::<usize>();
            assert_eq!(kept, usize::from(step > 0));
            assert!(pool.shelves.borrow().len() <= 7);
        }
    }
}
