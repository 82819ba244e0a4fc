//! A fake asynchronous device. The host cannot reach its memory. Each stream has a worker, which
//! runs the stream's work later, in order, with random delays, so that a read without a wait sees
//! the previous contents. Tensors are stored in `S` and computed in `W`, with the host's kernels.

#![allow(dead_code)] // each test is a program of its own and uses a part of this

mod device_buffer;
mod kernels;
mod memory;
mod stream;

pub use stream::{Mark, SharedDevice};

use device_buffer::FakeDeviceBuffer;
use memory::{Memory, View, ViewMut, into, of};
use runtime::comm::{CommError, Communicator, Element, Payload};
use runtime::device::{DeviceError, Space, StoredMut, Wide};
use runtime::kernels::Cpu;
use runtime::{Host, Number, Scalar};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, OnceLock};
use stream::Stream;

/// A rank's handle. With `MASTERS` the exact weights are separate.
pub struct FakeAsyncDevice<S, W, const MASTERS: bool = false> {
    stream: Stream<W>,
    /// The stream on which other ranks' memory is combined.
    transfers: OnceLock<Stream<W>>,
    host: Cpu,
    stored: PhantomData<fn() -> S>,
}

impl<S, W: Scalar, const MASTERS: bool> FakeAsyncDevice<S, W, MASTERS> {
    pub fn on(shared: &Arc<SharedDevice>) -> Self {
        let (stream, transfers) = (Stream::new(shared), OnceLock::new());
        Self { stream, transfers, host: Cpu::serial(), stored: PhantomData }
    }

    fn run(&self, job: impl FnOnce(&Host<W>) + Send + 'static) {
        self.stream.run(job);
    }
}

impl<S: Number, W: Scalar, const M: bool> Space for FakeAsyncDevice<S, W, M> {
    type Stored = S;
    type Wide = W;
    const MASTERS: bool = M;
    type Memory<E: Element> = Memory<E>;
    type View<'a, E: Element> = View<'a, E>;
    type ViewMut<'a, E: Element> = ViewMut<'a, E>;
    type Total = Arc<Mutex<f64>>;
    type Mark = Mark;
    type Recording = ();

    fn empty<E: Element>() -> Memory<E> {
        Memory::new(Vec::new())
    }

    fn len<E: Element>(memory: &Memory<E>) -> usize {
        memory.len
    }

    fn view<E: Element>(memory: &Memory<E>, range: Range<usize>) -> View<'_, E> {
        assert!(range.start <= range.end && range.end <= memory.len, "{range:?}");
        View { memory, begin: range.start, len: range.len() }
    }

    fn view_mut<E: Element>(memory: &mut Memory<E>, range: Range<usize>) -> ViewMut<'_, E> {
        assert!(range.start <= range.end && range.end <= memory.len, "{range:?}");
        let block = memory.block.clone();
        ViewMut { block, begin: range.start, len: range.len(), exclusive: PhantomData }
    }

    fn split<'a, E: Element>(
        view: Self::ViewMut<'a, E>,
        at: usize,
    ) -> (Self::ViewMut<'a, E>, Self::ViewMut<'a, E>) {
        let ViewMut { block, begin, len, exclusive } = view;
        assert!(at <= len, "{at} of {len}");
        let first = ViewMut { block: block.clone(), begin, len: at, exclusive };
        (first, ViewMut { block, begin: begin + at, len: len - at, exclusive })
    }

    fn fork_stream(&self) -> Self {
        let forked = Self::on(&self.stream.shared);
        forked.wait_for(&self.mark());
        forked
    }

    fn host(&self) -> &Cpu {
        &self.host
    }

    fn zeros<E: Element>(&self, len: usize) -> Memory<E> {
        Memory::new(vec![E::default(); len])
    }

    fn taken<E: Element>(&self, values: Vec<E>) -> Memory<E> {
        self.stream.shared.uploads.fetch_add(1, Ordering::Relaxed);
        let memory = Memory::new(vec![E::default(); values.len()]);
        let to = memory.all();
        self.run(move |_| to.set(&values));
        memory
    }

    fn copied<E: Element>(&self, from: View<'_, E>) -> Memory<E> {
        let (from, memory) = (of(from), Memory::new(vec![E::default(); from.len]));
        let to = memory.all();
        self.run(move |_| to.set(&from.values()));
        memory
    }

    fn copy<E: Element>(&self, from: View<'_, E>, to: ViewMut<'_, E>) {
        let (from, to) = (of(from), into(to));
        self.run(move |_| to.set(&from.values()));
    }

    fn fill<E: Element>(&self, to: ViewMut<'_, E>, value: E) {
        let to = into(to);
        self.run(move |_| to.set(&vec![value; to.range.len()]));
    }

    fn upload<E: Element>(&self, from: &[E], to: ViewMut<'_, E>) {
        self.stream.shared.uploads.fetch_add(1, Ordering::Relaxed);
        let (from, to) = (from.to_vec(), into(to));
        self.run(move |_| to.set(&from));
    }

    fn download<E: Element>(&self, from: View<'_, E>) -> Result<Vec<E>, DeviceError> {
        self.stream.shared.downloads.fetch_add(1, Ordering::Relaxed);
        let (from, (told, values)) = (of(from), channel());
        self.run(move |_| told.send(from.values()).unwrap());
        let values = values.recv().map_err(|_| DeviceError("a stream has ended".to_owned()))?;
        self.health().map(|()| values)
    }

    fn round(&self, from: Wide<'_, Self>, to: StoredMut<'_, Self>) {
        let (from, to) = (of(from), into(to));
        self.run(move |_| to.put(&from.values()));
    }

    fn total(&self) -> Arc<Mutex<f64>> {
        Arc::default()
    }

    fn read(&self, total: &Arc<Mutex<f64>>) -> Result<f64, DeviceError> {
        self.stream.shared.reads.fetch_add(1, Ordering::Relaxed);
        self.mark().wait();
        self.health().map(|()| *total.lock().unwrap())
    }

    fn mark(&self) -> Mark {
        self.stream.mark()
    }

    fn wait_for(&self, mark: &Mark) {
        self.stream.wait_for(mark);
    }

    fn wrap<E: Element>(
        &self,
        memory: Memory<E>,
        comm: &dyn Communicator,
    ) -> Result<Payload, CommError> {
        if !comm.carries_devices() {
            return Ok(E::wrap(self.download(Self::view(&memory, 0..memory.len))?));
        }
        let transfers = self.transfers.get_or_init(|| Stream::new(&self.stream.shared));
        let stream = Mutex::new(transfers.clone());
        Ok(Payload::Device(Box::new(FakeDeviceBuffer { memory, ready: self.mark(), stream })))
    }

    fn unwrap<E: Element>(&self, payload: Payload) -> Option<Memory<E>> {
        let Payload::Device(buffer) = payload else {
            let values = E::unwrap(payload)?;
            return Some(if values.is_empty() { Self::empty() } else { self.taken(values) });
        };
        let buffer: Box<FakeDeviceBuffer<E, W>> = buffer.into_any().downcast().ok()?;
        self.wait_for(&buffer.ready);
        Some(buffer.memory)
    }

    fn health(&self) -> Result<(), DeviceError> {
        self.stream.shared.health()
    }
}
