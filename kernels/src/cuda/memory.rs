//! A device as operations see it: one of its queues, and its memory.

use super::driver::{Driver, Event, GpuError, Properties};
use super::product::Product;
use super::queue::{Arena, FreeBlock, Queue, RecordedMemory};
use super::views::{View, ViewMut};
use super::{Element, Launch};
use crate::cuda::fused::Fuser;
use std::marker::PhantomData;
use std::ops::RangeBounds;
use std::sync::{Arc, Mutex, PoisonError};

/// Alignment of every allocation, in bytes; CUDA's allocations have the same.
const ALIGNMENT: usize = 256;

/// A queue of a device, with the memory used in its order. CUDA functions take it where CPU
/// functions take a [`crate::Cpu`].
///
/// Clones are the same queue. [`Gpu::fork`] makes another queue of the same device, whose work
/// overlaps with this one's.
#[derive(Clone, Debug)]
pub struct Gpu {
    pub(super) queue: Arc<Queue>,
    /// Numbers that change from step to step, for kernels of this queue to read.
    pub(super) step: Option<Arc<Memory<u32>>>,
}

impl Gpu {
    /// Opens GPU `ordinal` and loads the driver and its libraries.
    ///
    /// # Errors
    /// If this build, this machine or this GPU is not able to; the message says what is missing.
    #[cfg(feature = "cuda")]
    pub fn open(ordinal: usize) -> Result<Self, GpuError> {
        super::device::open(ordinal).map(Self::on)
    }

    /// Opens GPU `ordinal`: always an error, since this build has no code for GPUs.
    ///
    /// # Errors
    /// Always.
    #[cfg(not(feature = "cuda"))]
    pub fn open(_ordinal: usize) -> Result<Self, GpuError> {
        Err(GpuError::CpuOnly)
    }

    /// A queue of `driver`'s device, without an arena.
    #[must_use]
    pub fn on(driver: Arc<dyn Driver>) -> Self {
        let arena = Arena::of(driver.clone());
        Self { queue: Arc::new(Queue::new(driver, Arc::new(arena))), step: None }
    }

    /// Allocates `bytes` as an arena, from which later requests are served: the memory that a plan
    /// gives a rank. Requests beyond it are allocated one by one ([`Gpu::bytes_beyond_arena`]).
    /// Call it once, before any other request.
    ///
    /// # Errors
    /// If the device has too little free memory.
    pub fn reserve(&self, bytes: usize) -> Result<(), GpuError> {
        self.queue.arena.reserve(bytes)
    }

    /// Bytes of the arena; 0 if none is reserved.
    #[must_use]
    pub fn bytes_reserved(&self) -> usize {
        self.queue.arena.space().size
    }

    /// Peak bytes in use in the arena.
    #[must_use]
    pub fn bytes_of_arena(&self) -> usize {
        self.queue.arena.space().used
    }

    /// Bytes requested beyond the arena: 0 if the plan's figure was enough.
    #[must_use]
    pub fn bytes_beyond_arena(&self) -> usize {
        self.queue.arena.space().beyond_bytes
    }

    /// The properties of the device.
    #[must_use]
    pub fn properties(&self) -> &Properties {
        self.queue.driver.properties()
    }

    /// Uninitialised memory for `len` elements; the caller writes all of them before reading any.
    /// Builds with debug assertions fill it with NaN. When dropped it returns to this queue, which
    /// hands it out again for requests of about the same size. Another queue that used it must have
    /// been waited for ([`Gpu::wait`], [`Memory::busy_until`]).
    ///
    /// # Errors
    /// If the device has too little free memory.
    pub fn memory<E: Element>(&self, len: usize) -> Result<Memory<E>, GpuError> {
        let bytes = (len * size_of::<E>()).next_multiple_of(ALIGNMENT);
        let (address, bytes) = if len == 0 { (0, 0) } else { self.queue.take(bytes)? };
        let memory = Memory {
            address,
            len,
            bytes,
            queue: Arc::clone(&self.queue),
            busy: Mutex::default(),
            recorded: self.queue.arena.session().map(|session| session.memory().clone()),
            elements: PhantomData,
        };
        if cfg!(debug_assertions) && len > 0 {
            self.queue.driver()?.fill(address, 0xff, bytes)?;
        }
        Ok(memory)
    }

    /// Memory filled with zeros.
    ///
    /// # Errors
    /// As [`Gpu::memory`].
    pub fn zeros<E: Element>(&self, len: usize) -> Result<Memory<E>, GpuError> {
        let mut memory = self.memory(len)?;
        self.zero(memory.view_mut())?;
        Ok(memory)
    }

    /// A copy of a host slice in device memory.
    ///
    /// # Errors
    /// As [`Gpu::memory`].
    pub fn upload<E: Element>(&self, from: &[E]) -> Result<Memory<E>, GpuError> {
        let mut memory = self.memory(from.len())?;
        self.copy_in(from, memory.view_mut())?;
        Ok(memory)
    }

    /// Copies memory to the host after all queued work.
    ///
    /// # Errors
    /// If the device fails, now or in earlier work.
    pub fn download<E: Element>(&self, from: View<'_, E>) -> Result<Vec<E>, GpuError> {
        let mut to = vec![E::zeroed(); from.len()];
        self.copy_out(from, &mut to)?;
        Ok(to)
    }

    /// Copies from the host through pinned memory. The slice may change as soon as this returns.
    ///
    /// # Errors
    /// If the device fails.
    ///
    /// # Panics
    /// If the lengths differ; the same holds for the copies below.
    #[track_caller]
    pub fn copy_in<E: Element>(&self, from: &[E], to: ViewMut<'_, E>) -> Result<(), GpuError> {
        crate::check::length("to", to.len(), from.len());
        match from.is_empty() {
            true => Ok(()),
            false => self.queue.driver()?.copy_in(bytemuck::cast_slice(from), to.into_address()),
        }
    }

    /// Copies to the host after all queued work, and waits for it.
    ///
    /// # Errors
    /// If the device fails, now or in earlier work.
    #[track_caller]
    pub fn copy_out<E: Element>(&self, from: View<'_, E>, to: &mut [E]) -> Result<(), GpuError> {
        crate::check::length("to", to.len(), from.len());
        match to.is_empty() {
            true => Ok(()),
            false => self.queue.driver()?.copy_out(from.address, bytemuck::cast_slice_mut(to)),
        }
    }

    /// Copies within the device.
    ///
    /// # Errors
    /// If the device fails.
    #[track_caller]
    pub fn copy<E: Element>(&self, from: View<'_, E>, to: ViewMut<'_, E>) -> Result<(), GpuError> {
        crate::check::length("to", to.len(), from.len());
        match from.is_empty() {
            true => Ok(()),
            false => {
                let bytes = from.len() * size_of::<E>();
                self.queue.driver()?.copy(from.address, to.into_address(), bytes)
            }
        }
    }

    /// Fills memory with zeros.
    ///
    /// # Errors
    /// If the device fails.
    pub fn zero<E: Element>(&self, to: ViewMut<'_, E>) -> Result<(), GpuError> {
        let bytes = to.len() * size_of::<E>();
        match bytes {
            0 => Ok(()),
            _ => self.queue.driver()?.fill(to.into_address(), 0, bytes),
        }
    }

    /// Sets every bit, which makes every floating-point element a NaN.
    ///
    /// # Errors
    /// If the device fails.
    pub fn ones<E: Element>(&self, to: ViewMut<'_, E>) -> Result<(), GpuError> {
        let bytes = to.len() * size_of::<E>();
        match bytes {
            0 => Ok(()),
            _ => self.queue.driver()?.fill(to.into_address(), 0xff, bytes),
        }
    }

    /// Sets every element, of 4 bytes.
    ///
    /// # Errors
    /// If the device fails.
    ///
    /// # Panics
    /// If the type has another size.
    pub fn set<E: Element>(&self, to: ViewMut<'_, E>, value: E) -> Result<(), GpuError> {
        let (word, words) = (bytemuck::cast(value), to.len());
        match words {
            0 => Ok(()),
            _ => self.queue.driver()?.fill_words(to.into_address(), word, words),
        }
    }

    /// Waits for all queued work.
    ///
    /// # Errors
    /// If any of the work failed.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        self.queue.driver()?.synchronize()
    }

    /// Records an event after all work queued so far.
    ///
    /// # Errors
    /// If the device fails.
    pub fn record(&self) -> Result<Event, GpuError> {
        let event = self.queue.driver()?.record()?;
        Ok(if self.queue.arena.session().is_some() { event.in_recording() } else { event })
    }

    /// Makes work queued here from now on wait for `event`, of this queue or another.
    ///
    /// # Errors
    /// If the device fails.
    pub fn wait(&self, event: &Event) -> Result<(), GpuError> {
        // Recording begins once the device is idle, so events from before it are complete.
        match self.queue.arena.session().is_some() && !event.is_recorded() {
            true => Ok(()),
            false => self.queue.driver()?.wait(event),
        }
    }

    /// Another queue of the same device, with the same arena. Its work overlaps with this one's
    /// except where events order it.
    ///
    /// # Errors
    /// If the device fails.
    pub fn fork(&self) -> Result<Self, GpuError> {
        let queue = Queue::new(self.queue.driver.fork()?, self.queue.arena.clone());
        Ok(Self { queue: Arc::new(queue), step: self.step.clone() })
    }

    /// The address of its stream, for libraries that queue work there. Makes the device current on
    /// the calling thread.
    #[cfg(feature = "cuda")]
    pub(super) fn stream(&self) -> Result<u64, GpuError> {
        self.queue.driver()?.stream()
    }

    /// Runs a host function in this queue's order.
    #[cfg(feature = "cpu_emulator")]
    pub(super) fn run(&self, job: super::Job) -> Result<(), GpuError> {
        self.queue.driver()?.run(job)
    }

    /// Memory outside the arena.
    pub(crate) fn apart(&self, bytes: usize) -> Result<TrialMemory, GpuError> {
        let driver = self.queue.driver.clone();
        let address = if bytes == 0 { 0 } else { driver.allocate(bytes)? };
        Ok(TrialMemory { address, driver })
    }

    /// The library that runs attention as a fused graph, if there is one.
    pub fn fuser(&self) -> Option<&dyn Fuser> {
        self.queue.driver.fuser()
    }

    /// For each shape and pass of attention that ran: its description, then the kernel in use and
    /// the time of each candidate. Empty if there are only our own kernels.
    #[must_use]
    pub fn attention_choices(&self) -> Vec<(String, String)> {
        let settled = self.fuser().map(Fuser::settled).unwrap_or_default();
        settled.into_iter().map(|(what, found)| (what, found.to_string())).collect()
    }

    pub(crate) fn launch(&self, launch: &Launch) -> Result<(), GpuError> {
        match launch.is_empty() {
            true => Ok(()),
            false => self.queue.driver()?.launch(launch),
        }
    }

    pub(crate) fn product(&self, product: &Product) -> Result<(), GpuError> {
        self.queue.driver()?.product(product)
    }

    pub(crate) fn survey(&self, product: &Product) -> Result<Vec<f64>, GpuError> {
        self.queue.driver()?.survey(product)
    }
}

/// Memory for timing trials, freed when dropped, after all queued work.
#[derive(Debug)]
pub(crate) struct TrialMemory {
    address: u64,
    driver: Arc<dyn Driver>,
}

impl TrialMemory {
    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for TrialMemory {
    fn drop(&mut self) {
        if self.address != 0 {
            self.driver.free(self.address);
        }
    }
}

/// Device memory, which returns to its queue when dropped.
#[derive(Debug)]
pub struct Memory<E: Element> {
    address: u64,
    len: usize,
    bytes: usize,
    queue: Arc<Queue>,
    /// Events until which other queues use it.
    busy: Mutex<Vec<Event>>,
    /// The recorded work that it belongs to.
    recorded: Option<Arc<RecordedMemory>>,
    elements: PhantomData<E>,
}

impl<E: Element> Drop for Memory<E> {
    fn drop(&mut self) {
        if self.bytes > 0 {
            let after = std::mem::take(self.busy.get_mut().unwrap_or_else(PoisonError::into_inner));
            let block = FreeBlock { address: self.address, bytes: self.bytes, after };
            match (self.queue.arena.session(), &self.recorded) {
                (Some(session), of) => session.take_back(&self.queue, block, of.as_ref()),
                // Stays reserved for as long as the recording may be replayed.
                (None, Some(memory)) => memory.until(block.after),
                (None, None) => self.queue.give(block),
            }
        }
    }
}

impl<E: Element> Memory<E> {
    /// Declares that another queue uses this memory until `event`. The next owner's work waits for
    /// the event; the host does not.
    pub fn busy_until(&self, event: Event) {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A view of all of it, to read.
    #[must_use]
    pub fn view(&self) -> View<'_, E> {
        View { address: self.address, len: self.len, memory: PhantomData }
    }

    /// A view of all of it, to write.
    #[must_use]
    pub fn view_mut(&mut self) -> ViewMut<'_, E> {
        ViewMut { address: self.address, len: self.len, memory: PhantomData }
    }

    /// A view of a part, to read.
    ///
    /// # Panics
    /// If the range is outside; the same holds for [`Memory::slice_mut`].
    #[track_caller]
    #[must_use]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> View<'_, E> {
        self.view().slice(range)
    }

    /// A view of a part, to write.
    #[track_caller]
    #[must_use]
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> ViewMut<'_, E> {
        self.view_mut().into_slice(range)
    }
}
