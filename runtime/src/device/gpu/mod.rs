//! An NVIDIA GPU: the CUDA twins of the kernels, on CUDA streams of one device. Tensors are stored
//! in `S`, bf16 or f32, and summed in f32; exact weights are separate, in f32.
//!
//! Several ranks may share one GPU (loopback). Each then has a stream for computing and one for
//! combining what it takes from others. Memory passes between ranks together with an event, and
//! returns to the stream that allocated it once all users are done.

mod gpu_buffer;
mod memory;
mod nccl_buffer;

/// Calls a kernel if there is memory behind all views, and records its failure.
macro_rules! call {
    ($self:ident, [$($view:ident),*], |$gpu:ident| $work:expr) => {
        if let ($(Some($view),)*) = ($($view.0,)*) {
            let $gpu = &$self.queue.gpu;
            $self.queue.kept($work);
        }
    };
}

mod compute;

use super::{DeviceError, MemoryUse, Space, StepNumbers, StoredMut, Wide};
use crate::comm::{CommError, Communicator, Element, Payload};
use crate::scalar::Number;
use gpu_buffer::GpuBuffer;
use kernels::cuda::{self, Event};
use kernels::{Cpu, elementwise};
use memory::{Memory, Queue, View, ViewMut};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// One rank's stream of a GPU.
pub struct Gpu<S> {
    queue: Queue,
    /// The stream on which other ranks' memory is combined, beside the rank's computation; forked
    /// at first use.
    transfers: OnceLock<Queue>,
    host: Cpu,
    stored: PhantomData<fn() -> S>,
}

impl<S> Gpu<S> {
    /// A stream of a device, for a rank or one of its threads.
    pub fn new(gpu: cuda::Gpu) -> Self {
        let numbered = gpu.with_step_numbers();
        let queue = Queue { gpu, failure: Arc::default() };
        let gpu = queue.kept(numbered).unwrap_or_else(|| queue.gpu.clone());
        Self::on(Queue { gpu, ..queue }, OnceLock::new())
    }

    fn on(queue: Queue, transfers: OnceLock<Queue>) -> Self {
        Self { queue, transfers, host: Cpu::serial(), stored: PhantomData }
    }

    fn transfers(&self) -> &Queue {
        self.transfers.get_or_init(|| self.queue.fork())
    }
}

impl<S: Number + cuda::Stored> Space for Gpu<S> {
    type Stored = S;
    type Wide = f32;
    const MASTERS: bool = true;
    type Memory<E: Element> = Memory<E>;
    type View<'a, E: Element> = View<'a, E>;
    type ViewMut<'a, E: Element> = ViewMut<'a, E>;
    type Total = Memory<f64>;
    type Mark = Option<Event>;
    type Recording = cuda::Graph;

    fn empty<E: Element>() -> Memory<E> {
        Memory::empty()
    }

    fn len<E: Element>(memory: &Memory<E>) -> usize {
        memory.len
    }

    fn view<E: Element>(memory: &Memory<E>, range: Range<usize>) -> View<'_, E> {
        memory.view(range)
    }

    fn view_mut<E: Element>(memory: &mut Memory<E>, range: Range<usize>) -> ViewMut<'_, E> {
        memory.view_mut(range)
    }

    fn split<'a, E: Element>(
        view: Self::ViewMut<'a, E>,
        at: usize,
    ) -> (Self::ViewMut<'a, E>, Self::ViewMut<'a, E>) {
        match view.0.map(|view| view.split_at(at)) {
            Some((first, behind)) => (ViewMut(Some(first)), ViewMut(Some(behind))),
            None => (ViewMut(None), ViewMut(None)),
        }
    }

    fn fork_stream(&self) -> Self {
        let queue = self.queue.fork();
        queue.wait_for(self.queue.mark().as_ref());
        // A forked stream already runs beside the computation.
        Self::on(queue.clone(), OnceLock::from(queue))
    }

    fn host(&self) -> &Cpu {
        &self.host
    }

    fn adopt<E: Element>(&self, memory: &Memory<E>) {
        memory.used_on(&self.queue);
    }

    fn zeros<E: Element>(&self, len: usize) -> Memory<E> {
        self.queue.memory(len, |gpu| gpu.zeros(len))
    }

    fn taken<E: Element>(&self, values: Vec<E>) -> Memory<E> {
        self.queue.memory(values.len(), |gpu| gpu.upload(&values))
    }

    fn copied<E: Element>(&self, from: View<'_, E>) -> Memory<E> {
        let Some(from) = from.0 else { return Self::empty() };
        self.queue.memory(from.len(), |gpu| {
            let mut memory = gpu.memory(from.len())?;
            gpu.copy(from, memory.view_mut())?;
            Ok(memory)
        })
    }

    fn copy<E: Element>(&self, from: View<'_, E>, to: ViewMut<'_, E>) {
        call!(self, [from, to], |gpu| gpu.copy(from, to));
    }

    fn fill<E: Element>(&self, to: ViewMut<'_, E>, value: E) {
        // NaN is not equal to itself.
        let (zero, nothing) = (value == E::default(), value.ne(&value));
        call!(self, [to], |gpu| match (zero, nothing) {
            (true, _) => gpu.zero(to),
            (_, true) => gpu.ones(to),
            _ if size_of::<E>() == 4 => gpu.set(to, value),
            // A step that does this cannot be recorded.
            _ => gpu.copy_in(&vec![value; to.len()], to),
        });
    }

    fn upload<E: Element>(&self, from: &[E], to: ViewMut<'_, E>) {
        call!(self, [to], |gpu| gpu.copy_in(from, to));
    }

    fn download<E: Element>(&self, from: View<'_, E>) -> Result<Vec<E>, DeviceError> {
        self.queue.health()?;
        from.0.map_or_else(|| Ok(Vec::new()), |from| Ok(self.queue.gpu.download(from)?))
    }

    fn round(&self, from: Wide<'_, Self>, to: StoredMut<'_, Self>) {
        call!(self, [from, to], |gpu| elementwise::cuda::narrow(gpu, from, to));
    }

    fn total(&self) -> Memory<f64> {
        self.zeros(1)
    }

    fn read(&self, total: &Memory<f64>) -> Result<f64, DeviceError> {
        Ok(self.download(total.all())?.first().copied().unwrap_or(f64::NAN))
    }

    fn mark(&self) -> Option<Event> {
        self.queue.mark()
    }

    fn wait_for(&self, mark: &Option<Event>) {
        self.queue.wait_for(mark.as_ref());
    }

    fn wrap<E: Element>(
        &self,
        memory: Memory<E>,
        comm: &dyn Communicator,
    ) -> Result<Payload, CommError> {
        if !comm.carries_devices() {
            return Ok(E::wrap(self.download(memory.all())?));
        }
        let ready = self.queue.mark();
        Ok(Payload::Device(Box::new(GpuBuffer { memory, ready, giver: self.transfers().clone() })))
    }

    fn unwrap<E: Element>(&self, payload: Payload) -> Option<Memory<E>> {
        let Payload::Device(buffer) = payload else {
            return E::unwrap(payload).map(|values| self.taken(values));
        };
        let gpu_buffer: Box<GpuBuffer<E>> = buffer.into_any().downcast().ok()?;
        self.queue.wait_for(gpu_buffer.ready.as_ref());
        gpu_buffer.memory.used_on(&self.queue);
        Some(gpu_buffer.memory)
    }

    fn health(&self) -> Result<(), DeviceError> {
        self.queue.health()
    }

    fn memory_use(&self) -> Option<MemoryUse> {
        let gpu = &self.queue.gpu;
        Some(MemoryUse {
            reserved_bytes: gpu.bytes_reserved() as u64,
            used_bytes: gpu.bytes_of_arena() as u64,
            beyond_bytes: gpu.bytes_beyond_arena() as u64,
        })
    }

    fn chosen_kernels(&self) -> BTreeMap<String, Vec<String>> {
        let choices = self.queue.gpu.attention_choices().into_iter();
        choices.map(|(what, found)| (what, found.lines().map(str::to_owned).collect())).collect()
    }

    fn step_numbers(&self, StepNumbers { step, loss_scale }: StepNumbers) -> StepNumbers {
        let numbers = cuda::StepNumbers { step, loss_scale: loss_scale as f32 };
        self.queue.kept(self.queue.gpu.set_step_numbers(numbers));
        StepNumbers { step: 0, loss_scale: cuda::OF_STEP }
    }

    fn not_recordable(&self) -> Option<&'static str> {
        (!self.queue.gpu.records()).then_some("the device records nothing")
    }

    fn start_recording(&self) -> Result<(), DeviceError> {
        self.queue.health()?;
        Ok(self.queue.gpu.start_recording()?)
    }

    fn finish_recording(&self) -> Result<cuda::Graph, DeviceError> {
        let graph = self.queue.gpu.finish_recording();
        self.queue.health()?;
        Ok(graph?)
    }

    fn replay(&self, graph: &cuda::Graph, world: &dyn Communicator) -> Result<(), DeviceError> {
        self.queue.health()?;
        graph.replay()?;
        world.replayed(self.queue.gpu.record()?);
        Ok(())
    }
}
