//! GPU memory as NCCL takes it.

use super::gpu_buffer::GpuBuffer;
use super::memory::Queue;
use crate::comm::{DeviceBuffer, Element, NcclBuffer};
use kernels::cuda::{Event, Gpu, Span};

impl<E: Element> NcclBuffer for GpuBuffer<E> {
    fn span(&self) -> Option<Span> {
        self.memory.all().0.map(|view| view.span())
    }

    fn gpu(&self) -> &Gpu {
        &self.giver.gpu
    }

    fn ready(&self) -> Option<&Event> {
        self.ready.as_ref()
    }

    fn set_ready(&mut self, event: Event) {
        self.memory.busy_until(event.clone());
        self.ready = Some(event);
    }

    fn busy_until(&self, event: Event) {
        self.memory.busy_until(event);
    }

    fn like(&self, stream: &Gpu, len: usize) -> Box<dyn DeviceBuffer> {
        let giver = Queue { gpu: stream.clone(), failure: self.giver.failure.clone() };
        let memory = giver.memory(len, |gpu| gpu.memory::<E>(len));
        Box::new(Self { memory, ready: None, giver })
    }
}
