//! Memory between ranks as NCCL takes it.

use super::memory::Queue;
use super::parcel::Parcel;
use crate::comm::{Cargo, Element, Freight};
use kernels::cuda::{Event, Gpu, Span};

impl<E: Element> Freight for Parcel<E> {
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

    fn like(&self, lane: &Gpu, len: usize) -> Box<dyn Cargo> {
        let giver = Queue { gpu: lane.clone(), failure: self.giver.failure.clone() };
        let memory = giver.memory(len, |gpu| gpu.memory::<E>(len));
        Box::new(Self { memory, ready: None, giver })
    }
}
