//! A device as operations see it: one of its queues, and memory.

use super::driver::{Driver, Event, GpuError, Properties};
use super::product::Product;
use super::queue::{Arena, FreeBlock, Queue, RecordedMemory};
use super::views::{View, ViewMut};
use super::{Element, Launch};
use crate::cuda::fused::Fuser;
use std::marker::PhantomData;
use std::ops::RangeBounds;
use std::sync::{Arc, Mutex, PoisonError};

/// Every allocation begins at a multiple of this, which is what CUDA's own do.
const ALIGNMENT: usize = 256;

/// A device's queue, with the memory that is used in its order. What operations take where the CPU's take a
/// [`crate::Cpu`].
///
/// Clones are the same queue. [`Gpu::fork`] gives another of the same device, whose work overlaps with this one's.
#[derive(Clone, Debug)]
pub struct Gpu {
    pub(super) queue: Arc<Queue>,
    /// What changes from step to step, where kernels of this queue are to find it.
    pub(super) step: Option<Arc<Memory<u32>>>,
}

impl Gpu {
    /// The GPU of that number, with its driver and libraries looked for only now.
    ///
    /// # Errors
    /// Where this build, this machine or this GPU cannot: the message says what is missing.
    #[cfg(feature = "cuda")]
    pub fn open(ordinal: usize) -> Result<Self, GpuError> {
        super::device::open(ordinal).map(Self::on)
    }

    /// The GPU of that number: an error here, since this build has no code for GPUs.
    ///
    /// # Errors
    /// Always.
    #[cfg(not(feature = "cuda"))]
    pub fn open(_ordinal: usize) -> Result<Self, GpuError> {
        Err(GpuError::CpuOnly)
    }

    /// A queue of what `driver` drives, without an arena.
    #[must_use]
    pub fn on(driver: Arc<dyn Driver>) -> Self {
        let arena = Arena::of(driver.clone());
        Self { queue: Arc::new(Queue::new(driver, Arc::new(arena))), step: None }
    }

    /// Takes `bytes` from the device at once, as a plan says that a rank needs; what is asked for later is cut from them.
    /// Beyond them memory is taken piece by piece ([`Gpu::bytes_beyond_arena`]). To be called once, first.
    ///
    /// # Errors
    /// Where the device has not so many.
    pub fn reserve(&self, bytes: usize) -> Result<(), GpuError> {
        self.queue.arena.reserve(bytes)
    }

    /// Bytes of the arena; 0 where nothing is reserved.
    #[must_use]
    pub fn bytes_reserved(&self) -> usize {
        self.queue.arena.space().size
    }

    /// Bytes of the arena that are or were in use: the most that were at any time.
    #[must_use]
    pub fn bytes_of_arena(&self) -> usize {
        self.queue.arena.space().used
    }

    /// Bytes that were asked for when the arena had no room: 0 where the plan said enough.
    #[must_use]
    pub fn bytes_beyond_arena(&self) -> usize {
        self.queue.arena.space().beyond_bytes
    }

    /// The device.
    #[must_use]
    pub fn properties(&self) -> &Properties {
        self.queue.driver.properties()
    }

    /// Memory for `len` elements, which are anything: whoever takes it writes all of them before any is read. Builds with
    /// debug assertions fill it with NaN. It goes back to this queue when dropped, and is handed out again to whoever asks
    /// for as many bytes; another queue that used it must have been waited for ([`Gpu::wait`], [`Memory::busy_until`]).
    ///
    /// # Errors
    /// Where the device has none left.
    pub fn memory<E: Element>(&self, len: usize) -> Result<Memory<E>, GpuError> {
        let bytes = (len * size_of::<E>()).next_multiple_of(ALIGNMENT);
        let address = if len == 0 { 0 } else { self.queue.take(bytes)? };
        let memory = Memory {
            address,
            len,
            bytes: if len == 0 { 0 } else { bytes },
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

    /// Memory that holds zeros.
    ///
    /// # Errors
    /// As [`Gpu::memory`].
    pub fn zeros<E: Element>(&self, len: usize) -> Result<Memory<E>, GpuError> {
        let mut memory = self.memory(len)?;
        self.zero(memory.view_mut())?;
        Ok(memory)
    }

    /// Memory that holds what the host has.
    ///
    /// # Errors
    /// As [`Gpu::memory`].
    pub fn upload<E: Element>(&self, from: &[E]) -> Result<Memory<E>, GpuError> {
        let mut memory = self.memory(from.len())?;
        self.copy_in(from, memory.view_mut())?;
        Ok(memory)
    }

    /// What memory holds, after all that is queued.
    ///
    /// # Errors
    /// Where the device fails, now or in what was queued.
    pub fn download<E: Element>(&self, from: View<'_, E>) -> Result<Vec<E>, GpuError> {
        let mut to = vec![E::zeroed(); from.len()];
        self.copy_out(from, &mut to)?;
        Ok(to)
    }

    /// Copies from the host, by way of pinned memory; the slice may change as soon as this returns.
    ///
    /// # Errors
    /// Where the device fails.
    ///
    /// # Panics
    /// Where the lengths differ; so below.
    #[track_caller]
    pub fn copy_in<E: Element>(&self, from: &[E], to: ViewMut<'_, E>) -> Result<(), GpuError> {
        crate::check::length("to", to.len(), from.len());
        match from.is_empty() {
            true => Ok(()),
            false => self.queue.driver()?.copy_in(bytemuck::cast_slice(from), to.into_address()),
        }
    }

    /// Copies to the host after all that is queued, and waits for it.
    ///
    /// # Errors
    /// Where the device fails, now or in what was queued.
    #[track_caller]
    pub fn copy_out<E: Element>(&self, from: View<'_, E>, to: &mut [E]) -> Result<(), GpuError> {
        crate::check::length("to", to.len(), from.len());
        match to.is_empty() {
            true => Ok(()),
            false => self.queue.driver()?.copy_out(from.address, bytemuck::cast_slice_mut(to)),
        }
    }

    /// Copies on the device.
    ///
    /// # Errors
    /// Where the device fails.
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

    /// Fills with zeros.
    ///
    /// # Errors
    /// Where the device fails.
    pub fn zero<E: Element>(&self, to: ViewMut<'_, E>) -> Result<(), GpuError> {
        let bytes = to.len() * size_of::<E>();
        match bytes {
            0 => Ok(()),
            _ => self.queue.driver()?.fill(to.into_address(), 0, bytes),
        }
    }

    /// Sets every bit, so that no element of a floating type is a number.
    ///
    /// # Errors
    /// Where the device fails.
    pub fn ones<E: Element>(&self, to: ViewMut<'_, E>) -> Result<(), GpuError> {
        let bytes = to.len() * size_of::<E>();
        match bytes {
            0 => Ok(()),
            _ => self.queue.driver()?.fill(to.into_address(), 0xff, bytes),
        }
    }

    /// Waits for all that is queued.
    ///
    /// # Errors
    /// Where any of it failed.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        self.queue.driver()?.synchronize()
    }

    /// The point after all that is queued so far.
    ///
    /// # Errors
    /// Where the device fails.
    pub fn record(&self) -> Result<Event, GpuError> {
        let event = self.queue.driver()?.record()?;
        Ok(if self.queue.arena.session().is_some() { event.in_recording() } else { event })
    }

    /// What is queued here from now on begins after `event`, of this or another queue.
    ///
    /// # Errors
    /// Where the device fails.
    pub fn wait(&self, event: &Event) -> Result<(), GpuError> {
        // While a step is recorded, what is not part of it is done.
        match self.queue.arena.session().is_some() && !event.is_recorded() {
            true => Ok(()),
            false => self.queue.driver()?.wait(event),
        }
    }

    /// Another queue of the same device: its work overlaps with this one's but for what events say. It shares the arena.
    ///
    /// # Errors
    /// Where the device fails.
    pub fn fork(&self) -> Result<Self, GpuError> {
        let queue = Queue::new(self.queue.driver.fork()?, self.queue.arena.clone());
        Ok(Self { queue: Arc::new(queue), step: self.step.clone() })
    }

    /// The address of its stream, for libraries that queue there; the device is the calling thread's from now on.
    #[cfg(feature = "cuda")]
    pub(super) fn stream(&self) -> Result<u64, GpuError> {
        self.queue.driver()?.stream()
    }

    /// Something of the host's, in this queue's order.
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

    /// A library that fuses graphs of operations, where attention may use one.
    pub(crate) fn fuser(&self) -> Option<&dyn Fuser> {
        self.queue.driver.fuser()
    }

    /// For each shape and pass of attention that ran: what it is, and below it the kernel in use and what each took. Empty
    /// where there are none but our own.
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

/// Memory that goes back to the device when dropped, behind all that is queued: for trials.
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

/// Device memory, which goes back to its queue when dropped.
#[derive(Debug)]
pub struct Memory<E: Element> {
    address: u64,
    len: usize,
    bytes: usize,
    queue: Arc<Queue>,
    /// Until when other queues use it.
    busy: Mutex<Vec<Event>>,
    /// Recorded work that it belongs to.
    recorded: Option<Arc<RecordedMemory>>,
    elements: PhantomData<E>,
}

impl<E: Element> Drop for Memory<E> {
    fn drop(&mut self) {
        if self.bytes > 0 {
            let after = std::mem::take(self.busy.get_mut().unwrap_or_else(PoisonError::into_inner));
            let block = FreeBlock { address: self.address, after };
            match (self.queue.arena.session(), &self.recorded) {
                (Some(session), of) => {
                    session.take_back(&self.queue, self.bytes, block, of.as_ref());
                }
                // Nobody else's, for as long as it may be replayed.
                (None, Some(_)) => {}
                (None, None) => self.queue.give(self.bytes, block),
            }
        }
    }
}

impl<E: Element> Memory<E> {
    /// Another queue uses it until `event`: once it has come back, whoever gets it next comes behind that. Nobody waits
    /// before.
    pub fn busy_until(&self, event: Event) {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }

    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All of it, to read.
    #[must_use]
    pub fn view(&self) -> View<'_, E> {
        View { address: self.address, len: self.len, memory: PhantomData }
    }

    /// All of it, to write.
    #[must_use]
    pub fn view_mut(&mut self) -> ViewMut<'_, E> {
        ViewMut { address: self.address, len: self.len, memory: PhantomData }
    }

    /// A part, to read.
    ///
    /// # Panics
    /// Where the range is outside; so below.
    #[track_caller]
    #[must_use]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> View<'_, E> {
        self.view().slice(range)
    }

    /// A part, to write.
    #[track_caller]
    #[must_use]
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> ViewMut<'_, E> {
        self.view_mut().into_slice(range)
    }
}
